"""Inductor's rules for the data types of operators, made once.

One object has them, but until torch 2.15 its ``__init__`` runs whenever it is asked for, and sets a
hundred attributes each time: a twentieth of a lowering's time.
"""

from __future__ import annotations

from typing import Any

from dtrcompile.passes.torch_private import DtypePropagationOpsHandler, op_dtype_propagation_rules

_INIT = DtypePropagationOpsHandler.__init__
_made_of: tuple[tuple[str, Any], ...] = ()


def make_rules_once(handler: DtypePropagationOpsHandler) -> None:
    """In place of ``DtypePropagationOpsHandler.__init__``, with the same rules in the end."""
    global _made_of
    # Modules that are imported later add rules.
    rules = tuple(op_dtype_propagation_rules.items())
    if rules != _made_of:
        _INIT(handler)
        _made_of = rules
