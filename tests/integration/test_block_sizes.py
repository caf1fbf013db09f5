"""Kernels that choose their block sizes in a first step, on a device that is pretended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dtrcompile.compilation.inductor import choose_in_first_run
from dtrcompile.passes.inductor import block_sizes
from dtrcompile.passes.torch_private import CachingAutotuner, CompiledFxGraph, InductorBenchmarker

L2_BYTES, ELEMENT_BYTES = 60 << 20, 4


class Benchmarker(InductorBenchmarker):
    """Knows the cache of a device, once it was asked for it."""

    def __init__(self) -> None:
        vars(self)["L2_cache_size"] = L2_BYTES


class Tuner(CachingAutotuner):
    """Of a kernel in the forward graph of a training step."""

    def __init__(self) -> None:
        self.optimize_mem = False


class Graph(CompiledFxGraph):
    """Compiled for a device; its kernel chooses in every call.

    Attributes:
        chosen: for each call, the bytes of the buffer and whether copies may go to the host.
        fails: nothing is chosen.
    """

    def __init__(self, device_type: str) -> None:
        self.device_types = {device_type}  # type: ignore[assignment]
        self.compiled_fn_runner = None
        self.current_callable = self.run
        self.chosen: list[tuple[int, bool]] = []
        self.fails = False

    def run(self, _inputs: Sequence[Any]) -> str:
        if self.fails:
            raise RuntimeError("no kernel was called")
        found = Benchmarker().benchmark_gpu(lambda: None), Tuner().copy_args_to_cpu_if_needed()
        self.chosen.append(found)  # type: ignore[arg-type]
        return "outputs"


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def benchmark(benchmarker: Any, _call: Any) -> int:
        return int(benchmarker.L2_cache_size)

    def copy(tuner: Any) -> bool:
        return bool(tuner.optimize_mem)

    monkeypatch.setattr(block_sizes, "_BENCHMARK", benchmark)
    monkeypatch.setattr(block_sizes, "_COPY", copy)
    monkeypatch.setattr(InductorBenchmarker, "benchmark_gpu", benchmark)
    monkeypatch.setattr(CachingAutotuner, "copy_args_to_cpu_if_needed", copy)


@pytest.mark.parametrize("fails_first", [False, True])
def test_the_first_run_that_ends_chooses_without_memory(fails_first: bool) -> None:
    graph = Graph("cuda")
    choose_in_first_run(graph)
    assert graph.current_callable is not None
    if fails_first:
        graph.fails = True
        with pytest.raises(RuntimeError):
            graph.current_callable([])
        graph.fails = False
    for _ in range(2):
        assert graph.current_callable([]) == "outputs"
    assert graph.chosen == [(ELEMENT_BYTES, True), (L2_BYTES, False)]


def test_on_a_cpu_nothing_is_put_between() -> None:
    graph = Graph("cpu")
    call = graph.current_callable
    choose_in_first_run(graph)
    assert graph.current_callable is call


def test_inductor_gets_its_values_back() -> None:
    benchmarker, tuner = Benchmarker(), Tuner()
    assert block_sizes.benchmark_without_buffer(benchmarker, print) == ELEMENT_BYTES
    assert block_sizes.copy_below_peak(tuner)
    assert benchmarker.L2_cache_size == L2_BYTES
    assert not tuner.optimize_mem
