"""Graphs that other processes compile, while this process does something else."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import dtrcompile
from dtrcompile.passes.inductor import compiled_beside, kernels_together
from dtrcompile.passes.inductor.compiled_beside import CompiledBeside, begin_to_compile
from dtrcompile.passes.inductor.loaded_code import noting_code
from dtrcompile.passes.inductor.lowering import Request
from dtrcompile.passes.torch_private import counters, inductor_config
from workloads.training import compile_dtr, gradients_of, relative_error

pytestmark = pytest.mark.usefixtures("nothing_compiled", "code_cache")


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing that an earlier test compiled, and also where tests run side by side."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(kernels_together, "_COMPILED", {})
    counters.clear()
    with inductor_config.patch(compile_threads=2):
        yield
        wait_for_all()


def wait_for_all() -> None:
    deadline_s = time.monotonic() + 60
    while compiled_beside._running():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + nn.functional.gelu(block(x))
        return x.square().mean()


def step(budget: object) -> tuple[dict[str, Any], list[str]]:
    """The gradients of a step, and the code of its graphs, without the name of the graph."""
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(512, 16)
    with noting_code() as sources:
        compile_dtr(model, budget, compiler="inductor")(x).backward()
    return gradients_of(model), [re.sub("# AOT ID: .*", "", source) for source in sources]


def found_in_cache() -> tuple[int, int]:
    """Graphs that Inductor found in its cache, and those that it did not find."""
    return counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("budget", "n_beside"),
    [("70%", 2), ("min", 1), ("1GiB", 1)],
    ids=["the first plan", "a later plan", "no plan"],
)
def test_the_code_is_what_this_process_would_compile(budget: str, n_beside: int) -> None:
    gradients, sources = step(budget)
    assert found_in_cache() == (n_beside, 2 - n_beside)
    (report,) = dtrcompile.reports()
    assert report.verification.startswith("verified")

    dtrcompile.clear_reports()
    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False, compile_threads=1):
        alone, sources_alone = step(budget)
    assert sources == sources_alone
    assert relative_error(gradients, alone) == 0
    (report_alone,) = dtrcompile.reports()
    assert report.promised_peak_bytes == report_alone.promised_peak_bytes
    assert report.recomputed == report_alone.recomputed


@pytest.mark.inductor
def test_a_process_that_fails_costs_nothing_but_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(compiled_beside, "_compile", fail)
    step("70%")
    assert found_in_cache() == (0, 2)
    (report,) = dtrcompile.reports()
    assert report.verification.startswith("verified")


def a_request(scale: int = 1) -> Request:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, scale)),))
    gm = fx.GraphModule(nn.Module(), graph)
    return Request(gm, [torch.empty(4)], (), is_backward=False, is_inference=False)


def test_wrappers_are_remembered_for_the_switches_that_they_were_written_under() -> None:
    """Deterministic algorithms, for example, are other operators, with other buffers."""
    before = a_request().key
    assert a_request().key == before
    torch.use_deterministic_algorithms(True)
    try:
        assert a_request().key != before
    finally:
        torch.use_deterministic_algorithms(False)


def begun(compile_graph: Callable[..., object]) -> CompiledBeside:
    found = begin_to_compile([a_request()], compile_graph)
    assert found is not None
    return found[0]


def test_another_graph_is_not_waited_for() -> None:
    process = begun(lambda *_, **__: time.sleep(600))
    other = a_request(scale=2)
    process.wait_for(other.graph, other.inputs, {"static_input_idxs": [], "is_inference": False})
    wait_for_all()


def test_the_same_graph_is_waited_for(tmp_path: Path) -> None:
    done = tmp_path / "done"

    def compile_graph(*_: object, **__: object) -> None:
        time.sleep(0.5)
        done.touch()

    process = begun(compile_graph)
    same = a_request()
    process.wait_for(same.graph, same.inputs, {"static_input_idxs": [], "is_inference": False})
    assert done.exists()


def test_a_compiler_that_runs_is_not_interrupted(tmp_path: Path) -> None:
    """Half of a library would be taken for a whole one."""
    begins, ends = tmp_path / "begins", tmp_path / "ends"

    def run_compiler(*_: object) -> None:
        begins.touch()
        time.sleep(1)
        ends.touch()

    def compile_graph(*_: object, **__: object) -> None:
        kernels_together._compile([], {})
        time.sleep(600)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernels_together, "_compile", run_compiler)
        process = begun(compile_graph)
    while not begins.exists():
        time.sleep(0.01)
    process.close()
    wait_for_all()
    assert ends.exists()


def test_a_process_ends_when_nobody_needs_it() -> None:
    process = begun(lambda *_, **__: time.sleep(600))
    number = process._process
    os.kill(number, 0)
    del process
    wait_for_all()
    with pytest.raises(ProcessLookupError):
        os.kill(number, signal.SIGTERM)


def test_no_more_processes_than_cores() -> None:
    def compile_graph(*_: object, **__: object) -> None:
        time.sleep(600)

    assert begin_to_compile([a_request()] * 3, compile_graph) is None
    first = begin_to_compile([a_request()], compile_graph)
    assert first is not None
    assert begin_to_compile([a_request()] * 2, compile_graph) is None
    second = begin_to_compile([a_request()], compile_graph)
    assert second is not None
    assert begin_to_compile([a_request()], compile_graph) is None
    for process in (*first, *second):
        process.close()


@pytest.mark.parametrize(
    "setting",
    [
        {"compile_threads": 1},
        {"force_disable_caches": True},
        {"max_autotune": True},
        {"max_autotune_gemm": True},
        {"trace.enabled": True},
    ],
    ids=str,
)
def test_no_process_where_its_work_would_not_be_the_same(setting: dict[str, object]) -> None:
    with inductor_config.patch(setting):
        assert begin_to_compile([a_request()], lambda *_, **__: None) is None


def test_no_process_while_somebody_reads_what_inductor_logs() -> None:
    logger = logging.getLogger("torch._inductor.scheduler")
    before = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        assert begin_to_compile([a_request()], lambda *_, **__: None) is None
    finally:
        logger.setLevel(before)
