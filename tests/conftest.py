"""What every test may rely on: fixed seeds, fresh options and reports, no compiled code left over.

Torch is touched only where a test module has imported it, so that the tests of planners run
without it.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import fields

import pytest
from hypothesis import HealthCheck, settings

import dtrcompile
from dtrcompile.options import variable_of

# Plans are made anew in every run: a cached graph would hide a change of the planner.  Compiled
# C++ stays cached, by its contents.
os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")
for option in fields(dtrcompile.Options):
    os.environ.pop(variable_of(option.name), None)
# Workers side by side take a core each: threads that wait for one another, and further processes
# that compile, would cost more.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "search", parent=settings.get_profile("default"), derandomize=False, max_examples=2000
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(trylast=True)  # after what is not to run was left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = long_ones_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    skip_what_needs_a_gpu(items)


def long_ones_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Each worker begins with its part of those that are marked slow, or compile with Inductor.

    xdist hands each a run of neighbours, of equal length, and lets those that are done early steal
    from the others' ends: short tests are what should be left there.
    """
    long: list[pytest.Item] = []
    short: list[pytest.Item] = []
    for item in items:
        is_long = any(map(item.get_closest_marker, ("inductor", "slow")))
        (long if is_long else short).append(item)
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        share = (len(items) - len(ordered)) // (workers - worker)
        mine = long[worker::workers]
        count = max(0, share - len(mine))
        ordered += mine + short[:count]
        del short[:count]
    return ordered + short


def skip_what_needs_a_gpu(items: list[pytest.Item]) -> None:
    """Where there is no CUDA device; torch is asked only if some test needs one."""
    gpu_items = [item for item in items if "gpu" in item.keywords]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    leave_earlier_objects_to_themselves()
    _seed()
    yield
    dtrcompile.reset_defaults()
    dtrcompile.clear_reports()
    if "dtrcompile.steps.ledger" in sys.modules:
        # What a failed call left is frozen with the modules below, and so is never collected.
        sys.modules["dtrcompile.steps.ledger"]._LEDGERS.clear()
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


@pytest.fixture(autouse=True)
def kernels_compiled_lightly(request: pytest.FixtureRequest) -> Iterator[None]:
    """What Inductor compiles, in little time; `make test-all` compiles what users get."""
    if request.node.get_closest_marker("inductor") is None:
        yield
        return
    from workloads.kernels import compiled_lightly

    with compiled_lightly():
        yield


@pytest.fixture(scope="module")
def planned_quickly() -> Iterator[None]:
    """For tests to which any plan will do: planning takes most of their time.

    Processes that a test starts plan quickly too.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variable_of("planning_s"), "0.02")
        yield


@pytest.fixture(scope="module")
def planned_in_one_order() -> Iterator[None]:
    """For tests to which any plan will do: one order of first runs takes half the time of two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variable_of("planner"), "program-order")
        yield


@pytest.fixture
def planned_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """In two orders, as by default, among tests that plan in one."""
    monkeypatch.delenv(variable_of("planner"))


def leave_earlier_objects_to_themselves() -> None:
    """Have Python's cycle collector look no more at what modules and earlier tests have left.

    That is nearly all that there is, and it grows with every test.  The first steps of every model
    collect garbage: with modules alone left out, a seventh of the tests' time passed with looking
    at what earlier tests had left, again and again.
    """
    gc.collect()
    gc.freeze()


def _seed() -> None:
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
