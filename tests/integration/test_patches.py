"""What is replaced in Inductor: only for our own compilations, and only what was read."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dtrcompile.cli import main
from dtrcompile.passes import private_names
from dtrcompile.passes.inductor import patches
from dtrcompile.passes.inductor.patches import (
    PATCHES,
    Patch,
    Purpose,
    State,
    applied,
    keep_plan_order,
    source_hash,
    state_of,
)
from dtrcompile.passes.releases import NEWEST, OLDEST
from dtrcompile.passes.torch_private import compile_fx_inner
from workloads.training import compile_dtr


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target)
def test_what_is_replaced_is_what_was_read(patch: Patch) -> None:
    """Else read it again, with the replacement beside it; docs/releases.md says how."""
    assert state_of(patch) is State.SAME, f"{patch.target}: {source_hash(patch.original)}"


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target)
def test_it_was_read_in_every_supported_release(patch: Patch) -> None:
    supported = [f"{OLDEST[0]}.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1)]
    assert list(patch.sources) == supported
    assert patch.why and patch.until


def test_a_function_that_changed_by_one_line_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = PATCHES[3]
    source = inspect.getsource(changed.original)
    get_source = inspect.getsource

    def getsource(function: Any) -> str:
        return f"{source}    # changed\n" if function is changed.original else get_source(function)

    monkeypatch.setattr(inspect, "getsource", getsource)
    states = {p.target: state_of(p) for p in PATCHES}
    assert [t for t, state in states.items() if state is not State.SAME] == [changed.target]
    assert main(["patches"]) == 1
    assert changed.target in capsys.readouterr().err


def test_a_function_that_is_gone_is_named() -> None:
    class Empty:
        pass

    gone = Patch(Empty, "missing", print, Purpose.PLAN, "", "", {})
    assert state_of(gone) is State.GONE


def test_a_private_name_that_is_gone_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [*private_names.private_names(), ("torch._inductor.graph", "NoSuchGraph")]
    monkeypatch.setattr(private_names, "private_names", lambda: names)
    assert main(["patches"]) == 1
    assert "torch._inductor.graph.NoSuchGraph" in capsys.readouterr().err


def test_all_are_taken_out_when_the_last_compilation_ends() -> None:
    def found() -> list[Any]:
        return [inspect.getattr_static(p.owner, p.name) for p in PATCHES]

    before = found()
    with applied(Purpose.DRY_RUN):
        with applied(Purpose.PLAN):
            assert all(f is not b for f, b in zip(found(), before, strict=True))
        assert all(f is not b for f, b in zip(found(), before, strict=True))
    assert all(f is b for f, b in zip(found(), before, strict=True))
    with pytest.raises(RuntimeError, match="inside"), keep_plan_order():
        raise RuntimeError("inside")
    assert all(f is b for f, b in zip(found(), before, strict=True))


def in_a_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    assert results, "the thread raised"
    return results[0]


@pytest.mark.inductor
def test_another_thread_that_compiles_with_plain_inductor_sees_none_of_it() -> None:
    """All of them at once, and while a plan's graph is really being lowered."""

    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor]:
        y = torch.relu(x @ w) + 1
        return ((y.sigmoid() @ w + y.sum()).cos(),)

    inputs = torch.randn(8, 8), torch.randn(8, 8)

    def code() -> str:
        return str(compile_fx_inner(make_fx(f)(*inputs), list(inputs)).source_code)

    alone = in_a_thread(code)
    with keep_plan_order(), applied(*Purpose):
        assert in_a_thread(code) == alone

    beside: list[str] = []
    lower_graph = patches.run_node_and_realize

    def lower_beside(graph: Any, node: Any) -> Any:
        if not beside:
            beside.append("")
            beside[0] = in_a_thread(code)
        return lower_graph(graph, node)

    run_node = next(p for p in PATCHES if p.name == "run_node")
    with mock.patch.object(
        patches,
        "PATCHES",
        tuple(
            Patch(**{**vars(p), "replacement": lower_beside}) if p is run_node else p
            for p in PATCHES
        ),
    ):
        layers = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
        compile_dtr(layers, "min", compiler="inductor")(torch.randn(64, 16)).sum().backward()
    assert beside == [alone]
