"""Inductor's C++ kernels, those of a graph in one run of the compiler.

A kernel of a small model takes a second to compile, nearly all of which passes with the headers and
with linking.  `compiled_together` lets Inductor collect the kernels of a wrapper's module, and
compiles those that are new as one source with one entry point:

    kernel(number, arguments)

The kernels' own text is what Inductor wrote.  A graph whose kernels do not go together, because two
of them define the same helper for example, is compiled kernel by kernel, as Inductor does it.

`make test` and `make bench-quick` compile so, where kernels have no vector instructions either;
`make test-all` and the benchmarks themselves run what users run.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.exc import CppCompileError

Kernel = Callable[..., None]


@dataclass(frozen=True)
class _Source:
    """A kernel to be compiled; what a wrapper's module has in its place until then.

    Attributes:
        argument_types: in C++, as ``const float*``.
        text: defines the function ``kernel``.
    """

    argument_types: tuple[str, ...]
    text: str


_compiled: dict[_Source, Kernel] = {}


def compiled_lightly() -> contextlib.AbstractContextManager[None]:
    """`compiled_together` where the Makefile asks for kernels that are compiled in little time."""
    is_light = os.environ.get("TORCHINDUCTOR_VEC_ISA_OK") == "0"
    return compiled_together() if is_light else contextlib.nullcontext()


@contextlib.contextmanager
def compiled_together() -> Iterator[None]:
    """Compile the kernels of each graph in one run of the compiler while this is active."""
    wait_for_others = AsyncCompile.wait

    def cpp_pybinding(_: AsyncCompile, argtypes: list[str], source_code: str) -> _Source:
        return _Source(tuple(argtypes), source_code)

    def wait(self: AsyncCompile, scope: dict[str, Any]) -> None:
        wanted = {name: value for name, value in scope.items() if isinstance(value, _Source)}
        kernels = _kernels(list(wanted.values()))
        scope.update({name: kernels[source] for name, source in wanted.items()})
        wait_for_others(self, scope)

    with (
        mock.patch.object(AsyncCompile, "cpp_pybinding", cpp_pybinding),
        mock.patch.object(AsyncCompile, "wait", wait),
    ):
        yield


def _kernels(sources: Sequence[_Source]) -> dict[_Source, Kernel]:
    new = [s for s in dict.fromkeys(sources) if s not in _compiled]
    if len(new) > 1:
        with contextlib.suppress(CppCompileError):
            _compiled.update(_compile_together(new))
    for source in new:
        if source not in _compiled:
            _compiled[source] = CppPythonBindingsCodeCache.load_pybinding(
                list(source.argument_types), source.text
            )
    return {source: _compiled[source] for source in sources}


def _compile_together(sources: Sequence[_Source]) -> dict[_Source, Kernel]:
    texts: list[str] = []
    cases: list[str] = []
    for number, source in enumerate(sources):
        name = f"kernel_{number}"
        texts.append(f"#define kernel {name}\n{source.text}\n#undef kernel\n")
        arguments = ", ".join(
            f"parse_arg<{argument_type.replace('const ', '')}>(arguments, {i})"
            for i, argument_type in enumerate(source.argument_types)
        )
        cases.append(f"case {number}: {name}({arguments}); Py_RETURN_NONE;")
    calls = (
        "PyObject* arguments = PyTuple_GET_ITEM(args, 1);"
        f" switch (parse_arg<int64_t>(args, 0)) {{ {' '.join(cases)} }}"
        ' throw std::runtime_error("no such kernel");'
    )
    # A class of its own, since the call of the entry point is an attribute of the class.
    bindings = type(
        "KernelsTogether",
        (CppPythonBindingsCodeCache,),
        {"call_entry_function": calls.replace("{", "{{").replace("}", "}}")},
    )
    entry_point = bindings.load_pybinding(["int64_t", "PyObject*"], "".join(texts))  # type: ignore[attr-defined]
    return {
        source: functools.partial(_call, entry_point, number)
        for number, source in enumerate(sources)
    }


def _call(entry_point: Kernel, number: int, *arguments: object) -> None:
    entry_point(number, arguments)
