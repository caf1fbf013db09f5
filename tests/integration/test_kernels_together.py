"""The C++ kernels of a wrapper are compiled together, and found again by later processes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor import cpp_builder
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.exc import CppCompileError
from torch._inductor.utils import fresh_cache

from dtrcompile.passes.inductor import kernels_together
from dtrcompile.passes.inductor.kernels_together import KernelSource, collect, compile_collected
from workloads.training import compile_dtr, gradients_of

ARGUMENTS = ["const float*", "float*", "int64_t"]


def kernel_text(expression: str, helper: str = "") -> str:
    return (
        "#include <cstdint>\n"
        f"{helper}\n"
        'extern "C" void kernel(const float* in_ptr0, float* out_ptr0, const int64_t ks0) {\n'
        f"    for (int64_t i = 0; i < ks0; ++i) {{ const float x = in_ptr0[i];"
        f" out_ptr0[i] = {expression}; }}\n"
        "}\n"
    )


def forget_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(kernels_together, "_COMPILED", {})
    for name in [n for n in sys.modules if n.endswith(".kernel")]:
        monkeypatch.delitem(sys.modules, name)
    CppPythonBindingsCodeCache.cache_clear()


@pytest.fixture(autouse=True)
def no_kernel_is_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a new process with an empty folder."""
    forget_libraries(monkeypatch)
    monkeypatch.setattr(kernels_together, "get_compile_threads", lambda: 1)
    with fresh_cache():
        yield


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The runs of the compiler, those for precompiled headers left out."""
    runs: list[Any] = []
    build = cpp_builder.CppBuilder.build

    @functools.wraps(build)
    def counted(self: Any, *args: Any, **keywords: Any) -> Any:
        if self.get_target_file_path().endswith(".so"):
            runs.append(self)
        return build(self, *args, **keywords)

    monkeypatch.setattr(cpp_builder.CppBuilder, "build", counted)
    return runs


def compiled(**texts: str) -> Mapping[str, Any]:
    """What a wrapper's module has after its kernels were compiled."""
    begun = AsyncCompile()
    scope: dict[str, Any] = {name: collect(begun, ARGUMENTS, text) for name, text in texts.items()}
    compile_collected(begun, scope)
    return scope


def result_of(kernel: Any) -> list[float]:
    x, y = torch.tensor([1.0, 2.0, 3.0]), torch.empty(3)
    kernel(x, y, 3)
    return y.tolist()


def test_kernels_of_a_module_are_compiled_in_one_run(compilations: list[Any]) -> None:
    scope = compiled(twice=kernel_text("2 * x"), square=kernel_text("x * x"))
    assert result_of(scope["twice"]) == [2, 4, 6]
    assert result_of(scope["square"]) == [1, 4, 9]
    assert len(compilations) == 1
    # Another module, of which one kernel is known.
    scope = compiled(square=kernel_text("x * x"), less=kernel_text("x - 1"))
    assert result_of(scope["square"]) == [1, 4, 9]
    assert result_of(scope["less"]) == [0, 1, 2]
    assert len(compilations) == 2
    compiled(less=kernel_text("x - 1"), twice=kernel_text("2 * x"))
    assert len(compilations) == 2


def test_as_many_sources_as_threads_compile(
    compilations: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_together, "get_compile_threads", lambda: 2)
    with mock.patch("torch._inductor.async_compile.get_compile_threads", lambda: 2):
        scope = compiled(**{f"k{n}": kernel_text(f"{n} * x") for n in range(3)})
    assert [result_of(scope[f"k{n}"]) for n in range(3)] == [[0, 0, 0], [1, 2, 3], [2, 4, 6]]
    assert len(compilations) == 2


def test_kernels_that_do_not_go_together_are_compiled_one_by_one(
    compilations: list[Any],
) -> None:
    """Two define the same function."""
    helper = "static inline float changed(float x) {{ return {}; }}"
    scope = compiled(
        more=kernel_text("changed(x)", helper.format("x + 1")),
        less=kernel_text("changed(x)", helper.format("x - 1")),
    )
    assert result_of(scope["more"]) == [2, 3, 4]
    assert result_of(scope["less"]) == [0, 1, 2]
    assert len(compilations) == 3


def test_an_error_in_a_kernel_is_the_compilers() -> None:
    with pytest.raises(CppCompileError, match="nowhere"):
        compiled(wrong=kernel_text("nowhere(x)"), right=kernel_text("x"))


@pytest.mark.usefixtures("code_cache")
def test_a_later_process_finds_what_was_compiled_together(
    compilations: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiled(twice=kernel_text("2 * x"), square=kernel_text("x * x"))
    # Only one of them is new: its library is another.
    compiled(square=kernel_text("x * x"), less=kernel_text("x - 1"))
    assert len(compilations) == 2
    monkeypatch.setattr(kernels_together, "_COMPILED", {})
    scope = compiled(square=kernel_text("x * x"), less=kernel_text("x - 1"))
    assert result_of(scope["square"]) == [1, 4, 9]
    assert result_of(scope["less"]) == [0, 1, 2]
    assert len(compilations) == 2
    # Libraries that are gone, or were cut off, are compiled again.
    libraries = {Path(k.__self__.__file__) for k in (first["twice"], scope["less"])}
    assert len(libraries) == 2
    gone, torn = libraries
    gone.unlink()
    torn.unlink()
    torn.write_bytes(b"\x7fELF")
    forget_libraries(monkeypatch)
    scope = compiled(square=kernel_text("x * x"), less=kernel_text("x - 1"))
    assert result_of(scope["square"]) == [1, 4, 9]
    assert result_of(scope["less"]) == [0, 1, 2]


@pytest.mark.usefixtures("code_cache")
def test_a_later_process_finds_kernels_whatever_else_is_set(
    compilations: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch loads compiled code under other settings than those that it was compiled under."""
    compiled(twice=kernel_text("2 * x"))
    monkeypatch.setattr(kernels_together, "_COMPILED", {})
    with inductor_config.patch(comment_origin=not inductor_config.comment_origin):
        assert result_of(compiled(twice=kernel_text("2 * x"))["twice"]) == [2, 4, 6]
    assert len(compilations) == 1


@pytest.mark.usefixtures("code_cache")
@pytest.mark.parametrize("is_later", [False, True], ids=["this process", "a later one"])
def test_other_flags_of_the_compiler_make_another_kernel(
    compilations: list[Any], monkeypatch: pytest.MonkeyPatch, is_later: bool
) -> None:
    compiled(twice=kernel_text("2 * x"))
    for is_unsafe in (True, False):
        if is_later:
            monkeypatch.setattr(kernels_together, "_COMPILED", {})
        with inductor_config.patch("cpp.enable_unsafe_math_opt_flag", is_unsafe):
            compiled(twice=kernel_text("2 * x"))
    safe = "-fno-unsafe-math-optimizations"
    assert [safe in run.get_command_line() for run in compilations] == [True, False]


def test_a_call_with_wrong_arguments_is_an_error() -> None:
    kernel = compiled(twice=kernel_text("2 * x"))["twice"]
    x, y = torch.ones(3), torch.ones(3)
    with pytest.raises(RuntimeError, match="requires 3 arguments"):
        kernel(x, y)
    with pytest.raises(TypeError):
        kernel(x, y, "3")


def test_a_kernel_is_what_its_arguments_and_its_text_say() -> None:
    assert collect(AsyncCompile(), ["float*"], "text") == KernelSource(("float*",), "text")


@pytest.mark.slow
@pytest.mark.inductor
def test_a_model_has_the_same_gradients_bit_for_bit(compilations: list[Any]) -> None:
    def gradients(*, is_ours: bool) -> dict[str, Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
        x = torch.randn(8, 16)
        step = compile_dtr(module, "1GiB", compiler="inductor") if is_ours else None
        (step or torch.compile(module))(x).square().sum().backward()
        return gradients_of(module)

    with (
        mock.patch.object(AsyncCompile, "wait", _wait),
        mock.patch.object(AsyncCompile, "cpp_pybinding", _cpp_pybinding),
    ):
        one_by_one = gradients(is_ours=False)
        n_alone = len(compilations)
        together = gradients(is_ours=True)
    assert len(compilations) - n_alone == 2  # a forward and a backward
    assert n_alone > 2
    assert all(torch.equal(together[n], one_by_one[n]) for n in one_by_one)


_wait, _cpp_pybinding = AsyncCompile.wait, AsyncCompile.cpp_pybinding
