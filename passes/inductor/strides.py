"""How far apart a vector's elements lie in a C++ loop, with a short cut and a larger memory.

It is found by simplifying expressions, nearly half of a lowering's time.  Nearly all of them are
sums in which the variable stands alone.  Inductor remembers 128, a graph has thousands, and the
same ones come back with every candidate and with the final compilation.
"""

from __future__ import annotations

import functools

import sympy

from dtrcompile.passes.torch_private import cpp_codegen


@functools.lru_cache(maxsize=1 << 16)
def stride(index: sympy.Expr, var: sympy.Symbol, vec_length: int | None = None) -> sympy.Expr:
    """In place of ``stride_at_vec_range``, with the same result."""
    coefficient = _coefficient(index, var)
    return _STRIDE(index, var, vec_length) if coefficient is None else coefficient


_STRIDE = cpp_codegen.stride_at_vec_range


def _coefficient(index: sympy.Expr, var: sympy.Symbol) -> sympy.Integer | None:
    """The integer that ``var`` is multiplied by, where it appears in no other way."""
    total = sympy.S.Zero
    for term in sympy.Add.make_args(index):
        if var in term.free_symbols:
            factor, rest = term.as_coeff_Mul()
            if rest != var or not factor.is_Integer:
                return None
            total += factor
    return total
