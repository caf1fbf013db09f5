"""Inductor's C++ kernels, those of a wrapper in one run of the compiler for each core.

A kernel takes a second to compile, nearly all of which passes with headers, templates and linking,
and Inductor compiles each one by itself.  Here a wrapper's module collects its kernels
(`collect`), and those that are new are compiled before it runs (`compile_collected`): as many
sources as threads compile, each with one entry point, which returns a kernel as a function of
Python's.  The kernels' own text is what Inductor wrote, and the flags are Inductor's.

Kernels that do not go together, because two of them define the same helper for example, are
compiled one by one, as Inductor does it.

The library of each kernel is noted on disk, since a later process that loads a wrapper cannot know
which kernels were compiled together.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrcompile.passes.inductor import disk_cache
from dtrcompile.passes.torch_private import (
    AsyncCompile,
    CppCompileError,
    CppPythonBindingsCodeCache,
    cache_dir,
    get_compile_threads,
    inductor_config,
    kernel_code_log,
)

log = logging.getLogger("dtrcompile")

Kernel = Callable[..., None]


@dataclass(frozen=True)
class KernelSource:
    """A kernel to be compiled; what a wrapper's module has in its place until then.

    Attributes:
        argument_types: in C++, as ``const float*``.
        text: defines the function ``kernel``.
    """

    argument_types: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class _Compiled:
    """A kernel that was loaded.

    Attributes:
        library: its file, below the cache's folder; "" if it was compiled by itself.
        number: its place in the library.
    """

    function: Kernel
    library: str
    number: int


# Of Inductor's, those that the C++ compiler is run with.
_CPP_SETTINGS = ("cpp.", "aot_inductor.")

# Of this process, by the settings that the compiler was run with.
_COMPILED: dict[str, dict[KernelSource, _Compiled]] = {}
_wait_for_others = AsyncCompile.wait


def collect(_: AsyncCompile, argtypes: list[str], source_code: str) -> KernelSource:
    """In place of ``AsyncCompile.cpp_pybinding``, which begins to compile a kernel."""
    kernel_code_log.info("CPP+Bindings Kernel:\n%s", source_code)
    return KernelSource(tuple(argtypes), source_code)


def compile_collected(self: AsyncCompile, scope: dict[str, Any]) -> None:
    """In place of ``AsyncCompile.wait``: compile what was collected, then wait for the rest."""
    wanted = {name: value for name, value in scope.items() if isinstance(value, KernelSource)}
    if wanted:
        compiled = _COMPILED.setdefault(_cpp_settings(), {})
        _compile_or_load(list(dict.fromkeys(wanted.values())), compiled)
        scope.update({name: compiled[source].function for name, source in wanted.items()})
    _wait_for_others(self, scope)


def _cpp_settings() -> str:
    settings = inductor_config.get_config_copy().items()
    return str(sorted((name, str(v)) for name, v in settings if name.startswith(_CPP_SETTINGS)))


def _compile_or_load(
    sources: Sequence[KernelSource], compiled: dict[KernelSource, _Compiled]
) -> None:
    """Have all of a wrapper's kernels in ``compiled``."""
    tag = sys.implementation.cache_tag
    key = disk_cache.key_of("kernels", tag, *sources, settings=_CPP_SETTINGS)
    entry = disk_cache.read(key)
    if entry is not None:
        _load_known(sources, entry["places"], compiled)
    new = [source for source in sources if source not in compiled]
    _compile(new, compiled)
    if new or entry is None:
        places = [(compiled[s].library, compiled[s].number) for s in sources]
        disk_cache.write(key, {"places": places})


def _load_known(
    sources: Sequence[KernelSource],
    places: Sequence[tuple[str, int]],
    compiled: dict[KernelSource, _Compiled],
) -> None:
    """Load what an earlier process compiled together, as far as it is still there."""
    entry_points: dict[str, Callable[[int], Kernel] | None] = {}
    for source, (library, number) in zip(sources, places, strict=True):
        if source in compiled or not library:
            continue
        if library not in entry_points:
            entry_points[library] = _entry_point(library)
        entry_point = entry_points[library]
        if entry_point is not None:
            compiled[source] = _Compiled(entry_point(number), library, number)


def _entry_point(library: str) -> Callable[[int], Kernel] | None:
    path = Path(cache_dir()) / library
    if not path.is_file():
        return None
    try:
        module = CppPythonBindingsCodeCache._load_library(str(path), path.stem)
    except (ImportError, OSError) as error:
        log.debug("the kernels in %s cannot be loaded: %s", path, error)
        return None
    found: Callable[[int], Kernel] = getattr(module, CppPythonBindingsCodeCache.entry_function)
    return found


def _compile(sources: Sequence[KernelSource], compiled: dict[KernelSource, _Compiled]) -> None:
    alone = []
    groups = [(group, _begin_together(group)) for group in _groups(sources)]
    for group, begun in groups:
        try:
            entry_point = begun()
        except CppCompileError as error:
            log.debug("%d kernels cannot be compiled together: %s", len(group), error)
            alone += group
        else:
            library = os.path.relpath(entry_point.__self__.__file__, cache_dir())
            for number, source in enumerate(group):
                compiled[source] = _Compiled(entry_point(number), library, number)
    for source, begun in [(source, _begin_alone(source)) for source in alone]:
        compiled[source] = _Compiled(begun(), "", 0)


def _groups(sources: Sequence[KernelSource]) -> list[list[KernelSource]]:
    """As many as threads compile, of about the same length."""
    n_groups = min(max(1, get_compile_threads()), len(sources))
    groups: list[list[KernelSource]] = [[] for _ in range(n_groups)]
    for source in sorted(sources, key=lambda s: len(s.text), reverse=True):
        min(groups, key=lambda group: sum(len(s.text) for s in group)).append(source)
    return groups


def _begin_alone(source: KernelSource) -> Callable[[], Any]:
    return CppPythonBindingsCodeCache.load_pybinding_async(
        list(source.argument_types), source.text, submit_fn=_submit()
    )  # type: ignore[no-any-return]


def _submit() -> Callable[[Callable[[], Any]], Future[Any]] | None:
    """How a run of the compiler is begun; None if it is to run when its result is asked for."""
    return AsyncCompile.submit if get_compile_threads() > 1 else None


def _begin_together(sources: Sequence[KernelSource]) -> Callable[[], Any]:
    """The entry point takes the number of a kernel, and returns it."""
    texts = [
        f"#define kernel kernel_{number}\n{source.text}\n#undef kernel\n"
        for number, source in enumerate(sources)
    ]
    # A class of its own, since what the entry point does is an attribute of the class.
    bindings = type(
        "KernelsTogether",
        (CppPythonBindingsCodeCache,),
        {
            "call_entry_function": "return PyCFunction_New(&kernels[{}], self);",
            "extra_parse_arg": _escaped(_functions(sources)),
        },
    )
    return bindings.load_pybinding_async(  # type: ignore[attr-defined,no-any-return]
        ["int64_t"], "".join([*_includes(sources), *texts]), submit_fn=_submit()
    )


def _includes(sources: Iterable[KernelSource]) -> Iterable[str]:
    """Before any kernel is renamed, since a header may have something of that name."""
    lines = (line for source in sources for line in source.text.splitlines())
    return dict.fromkeys(f"{line}\n" for line in lines if line.startswith("#include"))


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _functions(sources: Sequence[KernelSource]) -> str:
    """The kernels as functions of Python's; stands after what tells a tensor's address."""
    functions = [
        _FUNCTION.format(
            number=number,
            n_arguments=len(source.argument_types),
            arguments=", ".join(
                f"argument_of<{argument_type.replace('const ', '')}>(arguments[{i}])"
                for i, argument_type in enumerate(source.argument_types)
            ),
        )
        for number, source in enumerate(sources)
    ]
    rows = [
        f'{{"kernel", (PyCFunction)(void (*)())call_{number}, METH_FASTCALL, ""}}'
        for number in range(len(sources))
    ]
    table = f"static PyMethodDef kernels[] = {{{', '.join(rows)}}};\n"
    return "".join([_ARGUMENTS, *functions, table])


# Conversions throw where Python has an error already.
_ARGUMENTS = """
struct PythonError {};

template <typename T> static inline T argument_of(PyObject* object) {
    static_assert(std::is_pointer_v<T>, "a kernel takes pointers and numbers");
    return static_cast<T>(_torchinductor_pyobject_tensor_data_ptr(object));
}
template <> inline int64_t argument_of<int64_t>(PyObject* object) {
    const auto value = PyLong_AsSsize_t(object);
    if (value == -1 && PyErr_Occurred()) throw PythonError();
    return value;
}
template <> inline uintptr_t argument_of<uintptr_t>(PyObject* object) {
    const auto value = PyLong_AsVoidPtr(object);
    if (value == nullptr && PyErr_Occurred()) throw PythonError();
    return reinterpret_cast<uintptr_t>(value);
}
template <> inline float argument_of<float>(PyObject* object) {
    const auto value = PyFloat_AsDouble(object);
    if (value == -1.0 && PyErr_Occurred()) throw PythonError();
    return static_cast<float>(value);
}
"""

_FUNCTION = """
static PyObject* call_{number}(PyObject*, PyObject* const* arguments, Py_ssize_t n_arguments) {{
    if (n_arguments != {n_arguments}) {{
        PyErr_SetString(PyExc_RuntimeError, "requires {n_arguments} arguments");
        return nullptr;
    }}
    try {{
        kernel_{number}({arguments});
    }} catch (const PythonError&) {{
        return nullptr;
    }} catch (const std::exception& error) {{
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }} catch (...) {{
        PyErr_SetString(PyExc_RuntimeError, "unhandled error");
        return nullptr;
    }}
    Py_RETURN_NONE;
}}
"""
