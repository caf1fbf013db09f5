"""Emitted graphs that are tampered with are refused: by what they compute, and by what they hold.

Every case changes a graph as an error of emission would, its marks along with it where emission
would have written them so.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import fx, nn

from dtrcompile.passes.errors import VerificationError
from dtrcompile.passes.graphs.capture import Captured
from dtrcompile.passes.graphs.emit import Emitted, emit, free
from dtrcompile.passes.graphs.modules import calls_of, placeholders
from dtrcompile.passes.graphs.verify import verify_emitted
from dtrcompile.passes.nodes import aten, draws_random_numbers, is_tensor, mark, mark_of, prims
from dtrcompile.passes.planning.planners import make_planner, minimum_plan
from dtrcompile.passes.planning.planners.base import keep_all
from dtrcompile.passes.program.plan import Plan
from dtrcompile.passes.program.replay import replay
from dtrcompile.passes.program.tighten import tighten
from workloads.captured import captured_of
from workloads.training import compile_dtr


class Layers(nn.Module):
    """Products of equal shape, each with a dropout: values that can be mistaken for one another."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)) - x)
        return x


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch.manual_seed(0)
    return captured_of(Layers(), torch.randn(64, 16))


@pytest.fixture(params=["all kept", "smallest"])
def plan(captured: Captured, request: pytest.FixtureRequest) -> Plan:
    planner = make_planner("dtr")
    found = (
        keep_all(captured.program)
        if request.param == "all kept"
        else minimum_plan(captured.program, planner)
    )
    return tighten(captured.program, found)


Tamper = Callable[[Emitted], None]


def backward_of(emitted: Emitted) -> fx.GraphModule:
    assert emitted.backward is not None
    return emitted.backward


def first_call(gm: fx.GraphModule, *packets: object) -> fx.Node:
    return next(n for n in calls_of(gm) if getattr(n.target, "overloadpacket", None) in packets)


def is_like(a: fx.Node, b: fx.Node) -> bool:
    return is_tensor(a) and is_tensor(b) and a.meta["val"].shape == b.meta["val"].shape


def swap_saved_tensors(emitted: Emitted) -> None:
    """Forward returns two saved values of one shape in each other's place."""
    (out,) = emitted.forward.graph.find_nodes(op="output")
    results = list(out.args[0])  # type: ignore[call-overload]
    saved = [i for i, n in enumerate(results) if i > 0 and n.op == "call_function"]
    i, j = next((i, j) for i in saved for j in saved if i < j and is_like(results[i], results[j]))
    results[i], results[j] = results[j], results[i]
    out.args = (tuple(results),)


def read_another_saved_tensor(emitted: Emitted) -> None:
    """A call of backward reads another saved value of the same shape."""
    saved = [n for n in placeholders(backward_of(emitted)) if is_tensor(n)]
    a, b = next((a, b) for a in saved for b in saved if a is not b and is_like(a, b))
    next(iter(n for n in a.users if n.target is not free)).replace_input_with(a, b)


def run_another_operator(emitted: Emitted) -> None:
    first_call(backward_of(emitted), aten.mul).target = aten.add.Tensor


def swap_arguments(emitted: Emitted) -> None:
    node = first_call(emitted.forward, aten.sub)
    node.args = node.args[::-1]


def change_a_number(emitted: Emitted) -> None:
    node = first_call(emitted.forward, prims.inductor_lookup_seed)
    node.args = (node.args[0], node.args[1] + 1)  # type: ignore[operator]


def draw_the_seeds_again(emitted: Emitted) -> None:
    """Backward draws seeds of its own in place of those that forward saved."""
    backward = backward_of(emitted)
    drawn = next(n for n in calls_of(emitted.forward) if draws_random_numbers(n))
    first = calls_of(backward)[0]
    with backward.graph.inserting_before(first):
        again = backward.graph.create_node("call_function", drawn.target, drawn.args, drawn.kwargs)
    again.meta = dict(drawn.meta)
    mark(again, step=None, storage=None)
    for saved in placeholders(backward):
        if saved.meta["val"].dtype is torch.int64:  # none where all masks are kept
            saved.replace_all_uses_with(again, delete_user_cb=lambda n: n.target is not free)


def swap_gradients(emitted: Emitted) -> None:
    (out,) = backward_of(emitted).graph.find_nodes(op="output")
    results = list(out.args[0])  # type: ignore[call-overload]
    tensors = [i for i, n in enumerate(results) if isinstance(n, fx.Node)]
    i, j = next(
        (i, j) for i in tensors for j in tensors if i < j and is_like(results[i], results[j])
    )
    results[i], results[j] = results[j], results[i]
    out.args = (tuple(results),)


def leave_a_free_out(emitted: Emitted) -> None:
    graph = backward_of(emitted).graph
    graph.erase_node(next(n for n in graph.nodes if n.target is free))


def leave_the_last_free_out(emitted: Emitted) -> None:
    graph = backward_of(emitted).graph
    graph.erase_node([n for n in graph.nodes if n.target is free][-1])


def free_early(emitted: Emitted) -> None:
    late = next(n for n in calls_of(backward_of(emitted)) if n.target is free)
    next(n for n in late.args[0].users if n is not late).prepend(late)  # type: ignore[union-attr]


def free_another_of_the_same_size(emitted: Emitted) -> None:
    """The bytes are the same, but what is freed is not what the plan frees."""
    frees = [n for n in calls_of(backward_of(emitted)) if n.target is free]
    a, b = next(
        (a, b)
        for a in frees
        for b in frees
        if a is not b and is_like(a.args[0], b.args[0])  # type: ignore[arg-type]
    )
    a.args, b.args = b.args, a.args


def owners(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in calls_of(gm) if mark_of(n).storage is not None]


def mark_another_storage(emitted: Emitted) -> None:
    """Two values of one size are marked as each other's storage."""
    found = owners(emitted.forward)
    a, b = next((a, b) for a in found for b in found if a is not b and is_like(a, b))
    marked = mark_of(a).storage, mark_of(b).storage
    mark(a, storage=marked[1])
    mark(b, storage=marked[0])


def mark_no_storage(emitted: Emitted) -> None:
    mark(owners(emitted.forward)[0], storage=None)


def mark_another_step(emitted: Emitted) -> None:
    node = owners(emitted.forward)[0]
    mark(node, step=mark_of(owners(emitted.forward)[1]).step)


def mark_an_input_as_another(emitted: Emitted) -> None:
    a, b = (n for n in placeholders(emitted.forward)[:4] if n.meta["val"].shape == (16, 16))
    mark(a, storage=mark_of(b).storage)


REFUSALS: dict[Tamper, str] = {
    swap_saved_tensors: "computes what no node|freed",
    read_another_saved_tensor: "computes what no node",
    run_another_operator: "computes what no node",
    swap_arguments: "computes what no node",
    change_a_number: "computes what no node",
    draw_the_seeds_again: "runs again",
    swap_gradients: "gradient . is not",
    leave_a_free_out: "holds|does not hold",
    leave_the_last_free_out: "holds|does not hold",
    free_early: "freed",
    free_another_of_the_same_size: "freed",
    mark_another_storage: "is marked as storage",
    mark_no_storage: "is marked as storage",
    mark_another_step: "is marked as storage|out of order",
    mark_an_input_as_another: "is marked as storage",
}


@pytest.mark.parametrize("tamper", REFUSALS, ids=attrgetter("__name__"))
def test_a_graph_that_was_tampered_with_is_refused(
    captured: Captured, plan: Plan, tamper: Tamper
) -> None:
    timeline, _ = replay(captured.program, plan)
    emitted = emit(captured, plan)
    verify_emitted(captured, plan, timeline, emitted)
    tamper(emitted)
    with pytest.raises(VerificationError, match=REFUSALS[tamper]):
        verify_emitted(captured, plan, timeline, emitted)


class _Zeros(torch.autograd.Function):
    """Its result and its gradients have one value, and are three storages."""

    @staticmethod
    def forward(_ctx: Any, *_inputs: torch.Tensor) -> torch.Tensor:
        return torch.zeros(8)

    @staticmethod
    def backward(_ctx: Any, _gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return torch.zeros(8), torch.zeros(8)


# (Dynamo does so in some releases.)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_gradient_may_be_equal_to_an_output_that_the_caller_holds() -> None:
    inputs = [torch.rand(8, requires_grad=True) for _ in range(2)]

    def step(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        long = torch.sin(given[0].repeat(100))
        return _Zeros.apply(*given), long.exp().sin().exp().mean()

    wanted = torch.autograd.grad(sum(r.sum() for r in step(*inputs)), inputs)
    compiled = compile_dtr(step, "min")
    found = torch.autograd.grad(sum(r.sum() for r in compiled(*inputs)), inputs)
    torch.testing.assert_close(found, wanted)
