"""A backward graph that is lowered in another process while this process lowers the forward."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dtrcompile
from dtrcompile.options import Options
from dtrcompile.passes.inductor import lowering, side_by_side, step
from dtrcompile.passes.inductor.dry_run import Wrapper
from dtrcompile.passes.inductor.side_by_side import LoweredBeside, may_fork
from dtrcompile.passes.torch_private import inductor_config
from dtrcompile.probe import planned_outcome

_WRAPPER = Wrapper(
    "code" * 50_000, {}, {"buf0": 3}, {"buf0": 7}, {"buf1": 8}, frozenset({1, 2}), (5, 4)
)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also where tests that run side by side compile their kernels one by one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with inductor_config.patch(compile_threads=2):
        yield


@pytest.fixture
def beside() -> Iterator[Callable[[Callable[[], Wrapper]], LoweredBeside]]:
    made: list[LoweredBeside] = []

    def make(lower: Callable[[], Wrapper]) -> LoweredBeside:
        made.append(LoweredBeside("key", lower))
        return made[-1]

    yield make
    for process in made:
        process.close()
        with pytest.raises(ProcessLookupError):
            os.kill(process._process, 0)


def test_a_wrapper_comes_as_it_was_written(beside: Callable[..., LoweredBeside]) -> None:
    assert beside(lambda: _WRAPPER).wrapper() == _WRAPPER


def test_a_process_that_fails_writes_no_wrapper(beside: Callable[..., LoweredBeside]) -> None:
    def fail() -> Wrapper:
        raise RuntimeError("no wrapper")

    def exit_at_once() -> Wrapper:
        os._exit(0)

    assert beside(fail).wrapper() is None
    assert beside(exit_at_once).wrapper() is None


def test_tensors_do_not_cross(beside: Callable[..., LoweredBeside]) -> None:
    assert beside(lambda: Wrapper("code", {"c": torch.ones(2)})).wrapper() is None


def test_a_process_that_is_stuck_is_given_up(
    beside: Callable[..., LoweredBeside], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "_LEAST_PATIENCE_S", 0.1)

    def wait() -> Wrapper:
        time.sleep(600)
        return _WRAPPER

    assert beside(wait).wrapper() is None


def test_the_other_process_holds_no_pipe_of_another_thread(
    beside: Callable[..., LoweredBeside],
) -> None:
    """A thread that starts a program reads from a pipe until nobody can write into it."""

    def wait() -> Wrapper:
        time.sleep(600)
        return _WRAPPER

    read_end, write_end = os.pipe()
    beside(wait)
    os.close(write_end)
    is_ended, _, _ = select.select([read_end], [], [], 60)
    assert is_ended
    assert os.read(read_end, 1) == b""
    os.close(read_end)


def test_a_process_that_is_ended_keeps_no_lock(
    beside: Callable[..., LoweredBeside], tmp_path: Path
) -> None:
    """PyTorch takes tqdm's lock, which forked processes share, whenever it interprets a graph."""
    tqdm = pytest.importorskip("tqdm.std")
    shared = tqdm.TqdmDefaultWriteLock()
    tqdm.tqdm.set_lock(shared)
    has_lock = tmp_path / "has lock"

    def wait() -> Wrapper:
        tqdm.tqdm.get_lock().acquire()
        has_lock.touch()
        time.sleep(600)
        return _WRAPPER

    process = beside(wait)
    while not has_lock.exists():
        time.sleep(0.01)
    os.kill(process._process, signal.SIGKILL)
    os.waitpid(process._process, 0)
    is_free = shared.mp_lock.acquire(timeout=10)
    assert is_free
    shared.mp_lock.release()


def test_the_other_process_sees_the_number_of_threads(
    beside: Callable[..., LoweredBeside],
) -> None:
    n_threads = torch.get_num_threads()
    found = beside(lambda: Wrapper(str(torch.get_num_threads()), {})).wrapper()
    assert found is not None
    assert found.source == str(n_threads)


@pytest.mark.skipif(
    not os.access("/proc/self/oom_score_adj", os.W_OK), reason="a kernel without this file"
)
def test_where_memory_runs_out_the_other_process_is_ended(
    beside: Callable[..., LoweredBeside],
) -> None:
    score = Path("/proc/self/oom_score_adj")
    before = score.read_text()
    found = beside(lambda: Wrapper(score.read_text(), {})).wrapper()
    assert found is not None
    assert int(found.source) == 1000
    assert score.read_text() == before


def test_no_process_where_one_would_be_useless_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert may_fork()
    with inductor_config.patch(compile_threads=1):
        assert not may_fork()
    with monkeypatch.context() as patched:
        patched.setattr(os, "sched_getaffinity", lambda _: {0})
        assert not may_fork()
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        assert not may_fork()
    with monkeypatch.context() as patched:
        patched.setattr(torch.distributed, "is_initialized", lambda: True)
        assert not may_fork()


class Blocks(nn.Module):
    """Convolutions, to which Inductor gives other strides than were traced, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + nn.functional.gelu(nn.functional.dropout(block(x), 0.1))
        return x.square().mean()


@pytest.fixture
def came(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each wrapper that was waited for came."""
    found: list[bool] = []
    wrapper = LoweredBeside.wrapper

    def counted(self: LoweredBeside) -> Wrapper | None:
        result = wrapper(self)
        found.append(result is not None)
        return result

    monkeypatch.setattr(LoweredBeside, "wrapper", counted)
    return found


@pytest.mark.slow
def test_plans_are_the_same_side_by_side(monkeypatch: pytest.MonkeyPatch, came: list[bool]) -> None:
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(4, 3, 16, 16)
    options = Options.parse({"budget": "min"})
    beside = planned_outcome(model, [x], options)
    assert came and all(came)
    lowering._LOWERED.clear()
    monkeypatch.setattr(step, "may_fork", lambda: False)
    alone = planned_outcome(model, [x], options)
    assert alone.plan == beside.plan
    assert alone.measured.peak_bytes == beside.measured.peak_bytes
    assert alone.measured.step_bytes == beside.measured.step_bytes


def test_strides_that_inductor_pads_on_a_gpu_are_expected(came: list[bool]) -> None:
    """The first time, when no forward graph has told yet what it saves in which strides."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 2051), nn.Tanh(), nn.Linear(2051, 3), nn.Tanh())
        x = torch.randn(64, 64)
    for dtype in (torch.float32, torch.bfloat16):
        dtrcompile.plan(model, x, budget="100%", device="H100-80GB", dtype=dtype)
        assert came == [True]
        came.clear()
