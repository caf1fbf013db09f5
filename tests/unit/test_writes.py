"""What a graph writes into its inputs comes as early as can be, and nothing reads it too late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from dtrcompile.passes.device.costs import make_cost_model
from dtrcompile.passes.errors import PlanError, ProgramError
from dtrcompile.passes.graphs.capture import Captured, capture
from dtrcompile.passes.graphs.emit import emit, lower_frees
from dtrcompile.passes.graphs.modules import output_arguments
from dtrcompile.passes.graphs.verify import verify_emitted
from dtrcompile.passes.graphs.writes import final_writes, with_early_writes
from dtrcompile.passes.nodes import packet
from dtrcompile.passes.planning.planners import keep_all, make_planner, minimum_plan
from dtrcompile.passes.planning.planners.brute_force import BruteForcePlanner
from dtrcompile.passes.program.io import from_json, to_json
from dtrcompile.passes.program.plan import Compute, Free, Plan
from dtrcompile.passes.program.program import Program, StorageKind
from dtrcompile.passes.program.replay import replay
from workloads.synthetic import ProgramBuilder

LAYERS, WIDTH, ROWS = 6, 64, 256


def step(x: Tensor, *values: Tensor) -> Tensor:
    """Layers, their gradients, and an update with momentum, written at the end."""
    weights, momenta = values[:LAYERS], values[LAYERS:]

    def loss(*weights: Tensor) -> Tensor:
        h = x
        for w in weights:
            h = torch.tanh(h @ w)
        return h.square().mean()

    gradients, found = torch.func.grad_and_value(loss, argnums=tuple(range(LAYERS)))(*weights)
    made = [
        (m, w, new := m * 0.9 + g, w - 0.1 * new)
        for w, m, g in zip(weights, momenta, gradients, strict=True)
    ]
    for m, w, new_m, new_w in made:
        m.copy_(new_m)
        w.copy_(new_w)
    return found


def values() -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(ROWS, WIDTH),
        *(torch.randn(WIDTH, WIDTH) / 8 for _ in range(LAYERS)),
        *(torch.randn(WIDTH, WIDTH) for _ in range(LAYERS)),
    ]


def traced(function: Any = step) -> fx.GraphModule:
    pure = torch.func.functionalize(function, remove="mutations")
    gm = make_fx(pure, tracing_mode="fake")(*values())
    gm.graph.eliminate_dead_code()
    return gm


def captured_of(gm: fx.GraphModule) -> Captured:
    return capture(
        gm,
        None,
        num_fwd_outputs=len(output_arguments(gm)),
        static_input_indices=range(1, 1 + 2 * LAYERS),
        cost_model=make_cost_model("roofline", torch.device("cpu")),
    )


def test_writes_are_found_if_nothing_reads_after_them() -> None:
    gm = traced()
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert len(final_writes(calls)) == 2 * LAYERS
    (output,) = gm.graph.find_nodes(op="output")
    write = next(iter(final_writes(calls)))
    with gm.graph.inserting_before(output):
        late = gm.graph.call_function(torch.ops.aten.neg.default, (write.args[0],))
        late.meta["val"] = write.args[0].meta["val"]  # type: ignore[union-attr]
    calls.append(late)
    assert len(final_writes(calls)) == 2 * LAYERS - 1


def test_the_same_is_computed_and_little_is_held() -> None:
    gm = traced()
    early = with_early_writes(gm)
    expected, found = values(), values()
    a = fx.Interpreter(gm).run(*expected)
    b = fx.Interpreter(early).run(*found)
    torch.testing.assert_close(b, a, rtol=0, atol=0)
    for x, y in zip(expected, found, strict=True):
        torch.testing.assert_close(y, x, rtol=0, atol=0)
    assert gradients_at_once(captured_of(gm).program) == LAYERS
    assert gradients_at_once(captured_of(early).program) <= 2


def gradients_at_once(program: Program) -> int:
    """How many of what updates read are in memory at most."""
    lives = [
        range(producer, op.id)
        for op in program.operators
        if op.overwrites
        for t in op.inputs
        if (producer := program.tensors[t].producer) is not None
    ]
    return max(sum(i in life for life in lives) for i in range(len(program.operators)))


def test_writes_wait_for_what_reads_the_old_value() -> None:
    order = [n for n in with_early_writes(traced()).graph.nodes if n.op == "call_function"]
    place = {n: i for i, n in enumerate(order)}
    for write, target in final_writes(order).items():
        assert all(place[user] <= place[write] for user in target.users)


def test_clipping_holds_every_gradient_and_updates_then() -> None:
    def clipped(x: Tensor, *given: Tensor) -> Tensor:
        def loss(*weights: Tensor) -> Tensor:
            h = x
            for w in weights:
                h = torch.tanh(h @ w)
            return h.sum()

        weights = given[:LAYERS]
        gradients, found = torch.func.grad_and_value(loss, argnums=tuple(range(LAYERS)))(*weights)
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for w, new in [(w, w - g / norm) for w, g in zip(weights, gradients, strict=True)]:
            w.copy_(new)
        return found

    gm = traced(clipped)
    early = with_early_writes(gm)
    expected, found = values(), values()
    fx.Interpreter(gm).run(*expected)
    fx.Interpreter(early).run(*found)
    for x, y in zip(expected, found, strict=True):
        torch.testing.assert_close(y, x, rtol=0, atol=0)


def test_other_effects_keep_their_order() -> None:
    def counted(x: Tensor, *given: Tensor) -> Tensor:
        given[0].copy_(given[0] * 2)
        return x + 1

    gm = traced(counted)
    (output,) = gm.graph.find_nodes(op="output")
    first = next(n for n in gm.graph.nodes if n.op == "placeholder")
    with gm.graph.inserting_before(output):
        other = gm.graph.call_function(torch.ops.aten.add_.Tensor, (first, 1))
        other.meta["val"] = first.meta["val"]
    assert with_early_writes(gm) is gm


@pytest.mark.parametrize("share", [None, 0.3, 0.7])
def test_plans_read_nothing_that_was_overwritten(share: float | None) -> None:
    captured = captured_of(with_early_writes(traced()))
    program = captured.program
    writes = [op for op in program.operators if op.overwrites]
    assert len(writes) == LAYERS  # a parameter and its momentum are one loop
    ways = [op.not_recomputable for op in program.operators if packet_of(captured, op.id) == "mm"]
    # Forward's products may run again, those that read a weight in backward may not.
    assert ways.count(None) >= LAYERS
    assert ways.count("it reads an input that is overwritten afterwards") >= LAYERS - 1
    planner = make_planner("auto")
    plan = minimum_plan(program, planner)
    if share is not None:
        least = replay(program, plan)[0].peak_bytes
        most = replay(program, keep_all(program))[0].peak_bytes
        plan = planner.plan(program, int(least + share * (most - least)))
        assert replay(program, plan)[1].recomputed
    timeline, _ = replay(program, plan)
    emitted = emit(captured, plan)
    verify_emitted(captured, plan, timeline, emitted)
    lower_frees(emitted.forward)
    expected, found = values(), values()
    fx.Interpreter(captured.forward).run(*expected)
    fx.Interpreter(emitted.forward).run(*found)
    for x, y in zip(expected, found, strict=True):
        torch.testing.assert_close(y, x, rtol=0, atol=0)


def packet_of(captured: Captured, operator: int) -> str:
    return str(packet(captured.operators[operator].nodes[-1])).rpartition(".")[2]


# --- the referee ------------------------------------------------------------------------------


def overwritten_program() -> ProgramBuilder:
    p = ProgramBuilder()
    w = p.constant("w", 8, StorageKind.PARAMETER)
    (a,) = p.operator("a", [w], [4], 10)
    p.operator("write", [w, a], [], 5, not_recomputable="an effect", overwrites=[w])
    return p


def test_what_was_overwritten_is_not_read_again() -> None:
    p = overwritten_program()
    (b,) = p.operator("b", [], [4], 1)
    program = p.build([b])
    steps = (Compute(0), Compute(1), Free(1), Compute(2))
    replay(program, Plan(steps, program.fingerprint, "test"))
    late = (Compute(0), Compute(1), Free(1), Compute(0), Free(1), Compute(2))
    with pytest.raises(PlanError, match="'a' reads 'w', which was overwritten"):
        replay(program, Plan(late, program.fingerprint, "test"))


def test_a_program_that_reads_what_was_overwritten_is_refused() -> None:
    p = overwritten_program()
    (b,) = p.operator("b", [0], [4], 1)
    with pytest.raises(ProgramError, match=r"'b' reads 'w', which 'write' has overwritten"):
        p.build([b])


def test_overwriting_is_part_of_the_program() -> None:
    program = overwritten_program().build([])
    assert from_json(to_json(program)) == program
    p = ProgramBuilder()
    w = p.constant("w", 8, StorageKind.PARAMETER)
    (a,) = p.operator("a", [w], [4], 10)
    p.operator("write", [w, a], [], 5, not_recomputable="an effect")
    assert p.build([]).fingerprint != program.fingerprint


def test_brute_force_reads_before_it_overwrites() -> None:
    p = ProgramBuilder()
    w = p.constant("w", 1, StorageKind.PARAMETER)
    (a,) = p.operator("a", [w], [4], 10)
    (b,) = p.operator("b", [w], [4], 10)
    (c,) = p.operator("c", [a, b], [4], 10)
    (d,) = p.operator("d", [b, c], [4], 10)
    p.operator("write", [w], [], 5, not_recomputable="an effect", overwrites=[w])
    program = p.build([d])
    planner = BruteForcePlanner()
    plan = planner.plan(program, planner.smallest_budget_bytes(program))
    replay(program, plan)
