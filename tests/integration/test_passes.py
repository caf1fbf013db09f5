"""From a graph to a program to emitted graphs: what each pass promises, on small models."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch import fx, nn

from dtrcompile.passes.device.allocators import Allocator
from dtrcompile.passes.device.host_copies import offload, prefetch, wait_for_copy
from dtrcompile.passes.errors import (
    InfeasibleBudgetError,
    VerificationError,
)
from dtrcompile.passes.fitting import fit as fit_module
from dtrcompile.passes.fitting.fit import Limits, MemoryModel, RefereeModel, fit
from dtrcompile.passes.fitting.measured import Measured
from dtrcompile.passes.fitting.residuals import with_residuals
from dtrcompile.passes.graphs import emit as emit_module
from dtrcompile.passes.graphs.capture import Captured
from dtrcompile.passes.graphs.copy_nodes import add_offload
from dtrcompile.passes.graphs.emit import Emitted, emit, free
from dtrcompile.passes.graphs.verify import verify_emitted
from dtrcompile.passes.inductor import ScheduleTrace, Wrapper, lower, trace
from dtrcompile.passes.inductor.patches import keep_plan_order
from dtrcompile.passes.inductor.plan_order import allow_late_frees
from dtrcompile.passes.inductor.schedule_trace import Cause, Moment
from dtrcompile.passes.inductor.step import _static_in_backward
from dtrcompile.passes.inductor.wrapper_run import (
    Recorder,
    Resident,
    count_accumulation,
    count_coercion,
    run_wrapper,
)
from dtrcompile.passes.nodes import aten, draws_random_numbers, mark_of, why_not_recomputable
from dtrcompile.passes.planning.planners import make_planner, minimum_plan
from dtrcompile.passes.planning.planners.base import keep_all
from dtrcompile.passes.program.host_link import HostLink
from dtrcompile.passes.program.plan import Boundary, Offload, Plan, Prefetch
from dtrcompile.passes.program.program import Phase, StorageKind
from dtrcompile.passes.program.replay import PlanStats, replay
from dtrcompile.passes.program.tighten import tighten
from dtrcompile.passes.torch_private import AllocateLine, FakeTensorMode
from tests.integration.scenarios import WIDTH, Block
from workloads.captured import captured_of
from workloads.models import Bottleneck
from workloads.training import RELEASE


class MLP(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return x


@pytest.fixture
def mlp() -> Captured:
    return captured_of(MLP(), torch.randn(32, 16))


def smallest(captured: Captured) -> tuple[Plan, Emitted]:
    plan = tighten(captured.program, minimum_plan(captured.program, make_planner("auto")))
    return plan, emit(captured, plan)


def test_a_program_has_inductors_buffers_not_fx_nodes(mlp: Captured) -> None:
    program = mlp.program
    forward = program.operators[: program.boundary]
    # Four products and four activations; GELU's inner values (erf, muls) are in no storage.
    assert len(forward) == 8
    # 32 rows of 16 floats: 32 * 16 * 4 = 2048 bytes.
    assert {
        program.storages[program.tensors[t].storage].size_bytes for o in forward for t in o.outputs
    } == {2048}
    # Weights 4 * (16 * 16 + 16) * 4 = 4352 bytes.
    parameters = [s.size_bytes for s in program.storages if s.kind is StorageKind.PARAMETER]
    assert sum(parameters) == 4352
    gradients = [s.size_bytes for s in program.storages if s.kind is StorageKind.GRADIENT]
    assert sum(gradients) >= 4352


class PickedInBackward(torch.autograd.Function):
    """Saves all of a value, of which backward takes a few elements."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y, i)
        return y.sum(1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        y, i = ctx.saved_tensors
        return (g * y.gather(1, i)).expand_as(y), None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's
def test_a_saved_value_of_which_backward_takes_a_few_elements() -> None:
    class Picks(nn.Linear):
        def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            y = torch.softmax(super().forward(x), 1)  # a reduction: saved, not computed again
            return PickedInBackward.apply(y.exp(), i)  # type: ignore[no-any-return,no-untyped-call]

    captured = captured_of(
        Picks(16, 64), torch.randn(32, 16), torch.zeros(32, 1, dtype=torch.int64)
    )
    for plan in (keep_all(captured.program), smallest(captured)[0]):
        plan = tighten(captured.program, plan)
        timeline, _ = replay(captured.program, plan)
        verify_emitted(captured, plan, timeline, emit(captured, plan))


class Classifier(nn.Module):
    """Far more classes than features, so that what the loss holds is the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.features = MLP(3)
        self.head = nn.Linear(16, 512)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.features(x)), labels)


def test_the_loss_of_a_few_classes_is_not_computed_for_all() -> None:
    captured = captured_of(Classifier(), torch.randn(32, 16), torch.randint(512, (32,)))
    program = captured.program
    large = [
        op
        for op in program.operators
        for t in op.outputs
        if program.storages[program.tensors[t].storage].size_bytes == 32 * 512 * 4
    ]
    # The scores in forward, their gradient in backward; not the logarithms of all classes, out of
    # which one of 512 is taken.
    assert [op.phase.value for op in large] == ["forward", "backward"]
    plan, emitted = smallest(captured)
    timeline, _ = replay(program, plan)
    verify_emitted(captured, plan, timeline, emitted)


def test_what_is_read_element_by_element_elsewhere_is_there_in_time() -> None:
    """The value that an indirect load computes for itself is also an output, and read later."""

    class Read(nn.Linear):
        def forward(self, x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = torch.relu(super().forward(x)) * 2
            picked = y.gather(1, i)
            later = super().forward(y + picked.sum())
            return later.sin(), picked, y

    captured = captured_of(Read(16, 16), torch.randn(16, 16), torch.zeros(16, 2, dtype=torch.int64))
    program = captured.program
    made: set[int] = set()
    for op in program.operators:
        assert all(program.tensors[t].producer is None or t in made for t in op.inputs)
        made.update(op.outputs)
    plan = tighten(program, keep_all(program))
    verify_emitted(captured, plan, replay(program, plan)[0], emit(captured, plan))


def test_recomputed_nodes_are_named_after_their_origin(mlp: Captured) -> None:
    plan, emitted = smallest(mlp)
    _, stats = replay(mlp.program, plan)
    assert stats.recomputed
    names = {n.name for n in mlp.forward.graph.nodes} | {n.name for n in mlp.backward.graph.nodes}
    assert emitted.backward is not None
    copies = [
        n
        for gm in (emitted.forward, emitted.backward)
        for n in gm.graph.nodes
        if mark_of(n).recomputes
    ]
    assert copies
    for node in copies:
        assert mark_of(node).recomputes in names
        assert node.name.startswith(f"{mark_of(node).recomputes}_remat")
        assert mark_of(node).step is not None


def test_frees_are_nodes_of_the_emitted_graph(mlp: Captured) -> None:
    _, emitted = smallest(mlp)
    assert emitted.backward is not None
    frees = emitted.backward.graph.find_nodes(op="call_function", target=free)
    assert frees
    emit_module.lower_frees(emitted.backward)
    assert not emitted.backward.graph.find_nodes(op="call_function", target=free)


def test_the_verifier_accepts_what_was_emitted_and_nothing_else(mlp: Captured) -> None:
    plan, emitted = smallest(mlp)
    timeline, _ = replay(mlp.program, plan)
    verify_emitted(mlp, plan, timeline, emitted)

    assert emitted.backward is not None
    graph = emitted.backward.graph
    # A free that comes too early: its value is used afterwards.
    late = next(n for n in graph.nodes if n.target is free)
    owner = late.args[0]
    first_use = next(n for n in graph.nodes if owner in n.all_input_nodes)
    first_use.prepend(late)
    with pytest.raises(VerificationError, match=r"freed|holds"):
        verify_emitted(mlp, plan, timeline, emitted)

    # A free that is missing: the graph holds more than the plan says.
    _, emitted = smallest(mlp)
    assert emitted.backward is not None
    graph = emitted.backward.graph
    graph.erase_node(next(n for n in graph.nodes if n.target is free))
    with pytest.raises(VerificationError, match="holds"):
        verify_emitted(mlp, plan, timeline, emitted)


def test_views_are_made_again_not_saved_beside_their_base() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return (y.view(-1, 4, 4).transpose(1, 2) @ y.view(-1, 4, 4)).sin()

    captured = captured_of(Views(), torch.randn(32, 16))
    emitted = emit(captured, tighten(captured.program, keep_all(captured.program)))
    (out,) = emitted.forward.graph.find_nodes(op="output")
    saved = [n for n in out.args[0][captured.num_fwd_outputs :] if isinstance(n, fx.Node)]
    computed = [mark_of(n).storage for n in saved if n.op == "call_function"]
    assert computed  # each saved value owns its storage, and no storage is saved twice
    assert len(computed) == len(set(computed))


def test_what_reads_a_mutated_buffer_runs_once() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x).sin()

    program = captured_of(Counter(), torch.randn(32, 16)).program
    reasons = {o.not_recomputable for o in program.operators}
    assert "it reads an input that the step writes into" in reasons


WRAPPER = """
async_compile = AsyncCompile()
kernel = async_compile.cpp_pybinding([], '')
def call(args):
    x, = args
    args.clear()
    buf0 = empty_strided_cpu((8, 4), (4, 1), torch.float32)
    kernel(x, buf0)
    buf1 = empty_strided_cpu((8, 4), (4, 1), torch.float32)
    kernel(buf0, buf1)
    del buf0
    buf2 = buf1; del buf1  # reuse
    buf3 = empty_strided_cpu((2, 4), (4, 1), torch.float32)
    return (buf2, reinterpret_tensor(buf3, (4,), (1,), 4), )
"""


class Draws(nn.Module):
    """Three draws, the third of what the second gave."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.multinomial(x.sigmoid(), 16)
        second = torch.multinomial((x @ self.weight).sigmoid(), 16)
        third = torch.multinomial(second.cos().abs(), 16)
        return ((x @ self.weight * first).sin() * second).exp() + third


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1, 2, 0)])
def test_random_numbers_are_drawn_in_the_order_asked_for(order: tuple[int, ...]) -> None:
    captured = captured_of(Draws(), torch.randn(32, 16))
    draws = list(captured.draws)
    assert len(draws) == 3
    names = [captured.draws[o].name for o in draws]
    again = captured.with_draws([draws[i] for i in order])
    assert [n.name for n in again.draws.values()] == [names[i] for i in order]
    plan, emitted = smallest(again)
    timeline, _ = replay(again.program, plan)
    verify_emitted(again, plan, timeline, emitted)
    drawn = [n.name for n in emitted.forward.graph.nodes if draws_random_numbers(n)]
    assert drawn == [names[i] for i in order]


class DrawsLater(RefereeModel):
    """A compiler that puts the first draw last."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def measure(self, captured: Captured, emitted: Emitted | None, stats: PlanStats) -> Measured:
        by_name = {n.name: o for o, n in captured.draws.items()}
        draws = tuple(by_name[name] for name in self.names)
        return replace(super().measure(captured, emitted, stats), draws=draws)


def test_a_plan_draws_random_numbers_in_the_compilers_order() -> None:
    captured = captured_of(Draws(), torch.randn(32, 16))
    first, *rest = [n.name for n in captured.draws.values()]
    model = DrawsLater([*rest, first])
    terms = Limits(None)
    outcome = fit(captured, make_planner("auto"), lambda _: terms, model, always_emit=True)
    assert outcome.chosen is not None
    calls = outcome.chosen.emitted.forward.graph.nodes
    assert [n.name for n in calls if draws_random_numbers(n)] == [*rest, first]
    assert [n.name for n in outcome.captured.draws.values()] == [*rest, first]


def moments_of(recorder: Recorder) -> list[Moment]:
    return list(ScheduleTrace(tuple(recorder.events)).moments())


def held(recorder: Recorder) -> list[int]:
    return [m.live_bytes for m in moments_of(recorder)]


def test_a_wrapper_is_replayed_on_fake_tensors() -> None:
    source = "import torch\n" + WRAPPER
    mode = FakeTensorMode()
    with mode:
        x = torch.empty(8, 4)
    recorder = Recorder()
    recorder.begin(Phase.FORWARD, [Resident("w", Cause.PARAMETER, 1000, sympy.Integer(1000))])
    outputs = run_wrapper(Wrapper(source, {}), [x], recorder, mode)
    # 8 * 4 * 4 = 128 bytes each for buf0 and buf1, then buf0 dies, then 2 * 4 * 4 = 32 for buf3.
    moments = moments_of(recorder)
    assert [m.live_bytes for m in moments] == [1000, 1128, 1256, 1160]
    assert moments[2].taken.line.startswith("buf1 = ")
    assert [m.taken.buffer for m in moments] == ["w", "buf0", "buf1", "buf3"]
    assert len(outputs) == 2


TWICE = """
import torch
async_compile = AsyncCompile()
def call(args):
    x, src = args
    args.clear()
    part = torch.ops.aten.slice.Tensor(x, 1, 0, 3)
    buf0 = SCATTER
    buf1 = SCATTER
    return (buf0, buf1)
"""


@pytest.mark.parametrize(
    "scatter",
    [
        "slice_scatter.default(part, src[:2], 0, 0, 2)",
        "select_scatter.default(part, src[0], 0, 1)",
        "diagonal_scatter.default(part, src[0])",
        "copy.default(part, src)",
    ],
)
def test_what_is_copied_with_all_that_it_is_a_part_of(scatter: str) -> None:
    """As large the second time, when PyTorch's fake tensors have seen the call before."""
    scatter = f"torch.ops.aten.{scatter}"
    x, src = torch.zeros(8, 16), torch.zeros(8, 3)
    result = eval(scatter, {"torch": torch, "part": x[:, :3], "src": src})
    assert result.untyped_storage().nbytes() == 8 * 16 * 4
    mode = FakeTensorMode()
    recorder = Recorder()
    wrapper = Wrapper(TWICE.replace("SCATTER", scatter), {})
    run_wrapper(wrapper, [mode.from_tensor(x), mode.from_tensor(src)], recorder, mode)
    assert max(held(recorder)) == 2 * 8 * 16 * 4


def test_what_is_dead_is_not_counted_beside_what_comes() -> None:
    recorder = Recorder()
    with FakeTensorMode():
        kept, dropped, late = (torch.empty(n) for n in (1, 8, 4))
    recorder.allocate(kept, "kept")
    recorder.allocate(dropped, "dropped")
    del dropped
    recorder.use(20, "workspace")
    recorder.allocate(late, "late")
    del late
    tangent = Resident("tangent", Cause.TANGENT, 100, sympy.Integer(100))
    recorder.begin(Phase.BACKWARD, [tangent])
    assert held(recorder) == [4, 36, 24, 20, 104]
    traced = ScheduleTrace(tuple(recorder.events))
    assert traced.boundary_bytes() == 20  # ``late`` is given back when backward begins
    peak = traced.peak(Phase.BACKWARD)
    assert peak is not None
    assert set(traced.live(peak.taken.moment)) == {1, 5}


def test_cuda_sizes_are_rounded_up() -> None:
    mode = FakeTensorMode()
    with mode:
        x = torch.empty(8, 4)
    recorder = Recorder(Allocator(512))
    run_wrapper(Wrapper("import torch\n" + WRAPPER, {}), [x], recorder, mode)
    assert max(held(recorder)) == 1024
    causes = [e.cause for e in recorder.events[:2]]
    assert causes == [Cause.STORAGE, Cause.ROUNDING]


_ATTENTION = (
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
)


@pytest.mark.parametrize("target", [packet.default for packet in _ATTENTION], ids=str)
def test_fused_attention_may_run_again_without_dropout(target: Any) -> None:
    graph = fx.Graph()
    q = graph.placeholder("q")
    names = [argument.name for argument in target._schema.arguments]
    before = [None if "bias" in name else True for name in names[3 : names.index("dropout_p")]]
    for more, kwargs, is_random in (
        ((), {}, False),
        ((0.0,), {}, False),
        ((0.1,), {}, True),
        ((), {"dropout_p": 0.0}, False),
        ((), {"dropout_p": 0.1}, True),
    ):
        args = (q, q, q, *before, *more)
        node = graph.call_function(target, args, kwargs)
        assert (why_not_recomputable(node) is not None) == is_random


@pytest.mark.slow
def test_fused_attention_is_computed_again() -> None:
    captured = captured_of(nn.Sequential(*(Block() for _ in range(8))), torch.randn(8, 32, WIDTH))
    _, emitted = smallest(captured)
    assert emitted.backward is not None
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert emitted.backward.graph.find_nodes(op="call_function", target=attention)


def test_what_asserts_about_values_hold_is_counted() -> None:
    source = WRAPPER.replace("    buf1 =", "    assert not buf0.isnan().any().item()\n    buf1 =")
    mode = FakeTensorMode()
    with mode:
        x = torch.empty(8, 4)
    recorder = Recorder()
    run_wrapper(Wrapper("import torch\n" + source, {}), [x], recorder, mode)
    # Of 32 elements a byte each, and one for any of them, beside the 128 bytes of buf0.
    assert held(recorder)[:3] == [128, 160, 161]


@pytest.mark.parametrize(
    "check",
    [
        "assert_size_stride(buf0, (1,), (1,))",
        "assert_size_stride_grouped((buf0,), ((1,),), ((1,),), 'input')",  # torch 2.14
    ],
)
def test_what_checks_sizes_is_left_out(check: str) -> None:
    source = WRAPPER.replace("    buf1 =", f"    {check}\n    buf1 =")
    mode = FakeTensorMode()
    with mode:
        x = torch.empty(8, 4)
    recorder = Recorder()
    run_wrapper(Wrapper("import torch\n" + source, {}), [x], recorder, mode)
    assert max(held(recorder)) >= 128


@pytest.mark.parametrize(
    ("free_at", "is_comm", "is_other", "expected"),
    [
        (2, False, False, True),
        (1, False, False, False),
        # Indices of different schedulers mean nothing: torch 2.15 asks.
        (2, False, True, RELEASE < (2, 15)),
        (1, True, False, True),
    ],
)
def test_a_dead_buffer_is_taken_at_once_or_not_at_all(
    free_at: int, is_comm: bool, is_other: bool, expected: bool
) -> None:
    here, there = object(), object()
    line = SimpleNamespace(comm_buffer=is_comm, scheduler=here, scheduler_node_index=3)
    free_line = SimpleNamespace(scheduler=there if is_other else here, scheduler_node_index=free_at)
    with keep_plan_order():
        assert AllocateLine.should_reuse_buffer(line, free_line, 64) is expected


class ConvNet(nn.Module):
    """On a CPU, Inductor makes its images channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        for channels in (3, 8, 8):
            conv = nn.Conv2d(channels, 8, 3, padding=1, bias=False)
            self.layers.extend([conv, nn.BatchNorm2d(8), nn.ReLU()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_a_buffer_of_any_layout_belongs_to_a_step_of_the_plan() -> None:
    captured = captured_of(ConvNet(), torch.randn(4, 3, 16, 16))
    _, emitted = smallest(captured)
    assert emitted.backward is not None
    schedule = trace(lower(captured, [emitted.forward, emitted.backward]))
    allocated = [e for e in schedule.events if e.cause is Cause.STORAGE and not e.is_given_back]
    # A buffer that belongs to no step may be computed anywhere, beside any other.
    assert {e.buffer for e in allocated if e.step is None} == set()


class Residuals(nn.Module):
    """Between two products there are loops, and between the loops values are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x)
            x = x + y.softmax(0) * y.softmax(1).cumsum(0)
        return x.square().mean()


@pytest.mark.slow
def test_a_function_ends_where_it_would_hold_more_than_the_plan() -> None:
    captured = captured_of(Residuals(), torch.randn(64, 32))
    plan, emitted = smallest(captured)
    timeline, stats = replay(captured.program, plan)
    assert emitted.backward is not None
    graphs = [emitted.forward, emitted.backward]

    def lowered_for(peaks: tuple[int, int]) -> tuple[int, int, dict[int, int]]:
        """The bytes held, the number of functions, and what each step holds without late frees."""
        for graph, peak_bytes in zip(graphs, peaks, strict=True):
            allow_late_frees(graph, timeline.during_bytes, peak_bytes)
        lowered = lower(captured, graphs)
        schedule = trace(lowered)
        assert lowered.backward is not None
        sources = lowered.forward.source + lowered.backward.source
        held_bytes = max(moment.live_bytes for moment in schedule.moments())
        return held_bytes, sources.count("async_compile.cpp"), schedule.step_bytes()

    peaks = stats.forward_peak_bytes, stats.backward_peak_bytes
    tight_bytes, n_tight, needed = lowered_for(peaks)
    loose_bytes, n_loose, needed_when_loose = lowered_for((4 * peaks[0], 4 * peaks[1]))
    assert tight_bytes < loose_bytes
    assert n_tight > n_loose  # no function is split where that is not needed
    # What is freed late on purpose is not taken for what an operator needs.
    assert needed.items() <= needed_when_loose.items()


def test_inputs_that_backward_takes_to_stay_are_those_that_inductor_does() -> None:
    graph = fx.Graph()
    for name in ("primals_1", "primals_2", "relu", "tangents_1"):
        graph.placeholder(name)
    graph.output(())
    backward = fx.GraphModule(nn.Module(), graph)
    assert _static_in_backward(backward) == (0, 1, 2)
    # As the partitioner of torch 2.15 marks what the user gives anew in each step.
    next(iter(graph.nodes)).meta["is_static_input"] = False
    assert _static_in_backward(backward) == (1, 2)


def test_an_unknown_wrapper_is_refused() -> None:
    with pytest.raises(VerificationError, match="Python wrapper"):
        run_wrapper(Wrapper("def call(args): pass", {}), [], Recorder(), FakeTensorMode())


class Unrolled(nn.Module):
    """One layer, many times: its weight's gradient is a sum of as many terms."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(16):
            x = torch.tanh(self.layer(x))
        return x


def test_a_gradient_is_added_up_as_it_comes() -> None:
    captured = captured_of(Unrolled(), torch.randn(2, 64))
    program = captured.program
    weight_bytes = 64 * 64 * 4
    timeline, _ = replay(program, keep_all(program))
    held = [s for s in timeline.peak_resident if program.storages[s].size_bytes == weight_bytes]
    # The weight, the sum so far, a term and the new sum; not all sixteen.
    assert len(held) <= 4


@pytest.mark.parametrize(
    ("shape", "format", "copied_bytes"),
    [
        ((4, 4, 3, 3), torch.contiguous_format, 0),
        ((4, 4, 3, 3), torch.channels_last, 4 * 4 * 3 * 3 * 4),
        ((4, 4, 1, 1), torch.channels_last, 0),  # one and the same layout
    ],
)
def test_a_gradient_in_another_layout_than_its_parameter_is_copied(
    shape: tuple[int, ...], format: torch.memory_format, copied_bytes: int
) -> None:
    graph = fx.Graph()
    parameter = graph.placeholder("parameter")
    parameter.meta["val"] = torch.empty(shape)
    gradient = torch.empty(shape).contiguous(memory_format=format)
    recorder = Recorder()
    count_accumulation(recorder, [parameter], [gradient])
    assert max(held(recorder), default=0) == copied_bytes


@pytest.mark.parametrize(
    ("output_strides", "is_given", "during_bytes", "after_bytes"),
    [
        ((4, 1), False, 0, 0),  # it comes as it was traced
        (None, False, 0, 0),  # no output that it is the tangent of
        ((1, 4), False, 64, 64),  # the copy stands beside the tangent, which stays with its caller
        ((1, 4), True, 64, 0),  # both are there only while one is made from the other
    ],
)
def test_a_tangent_in_another_layout_than_was_traced_is_copied(
    output_strides: tuple[int, ...] | None, is_given: bool, during_bytes: int, after_bytes: int
) -> None:
    tangent = torch.empty(4, 4)
    recorder = Recorder()
    count_coercion(recorder, output_strides, tangent, is_given=is_given)
    counted = held(recorder)
    assert max(counted, default=0) == during_bytes
    assert sum(event.size_bytes for event in recorder.events) == after_bytes
    assert all(event.cause is Cause.TANGENT_COPY for event in recorder.events)


class ExtraAt(MemoryModel):
    """A compiler whose kernels for one operator hold more than they have to."""

    def __init__(self, operator: int, extra_bytes: int) -> None:
        self.operator, self.extra_bytes = operator, extra_bytes
        self.referee = RefereeModel()

    def measure(self, captured: Captured, emitted: Emitted | None, stats: PlanStats) -> Measured:
        if emitted is None:
            return self.referee.measure(captured, emitted, stats)
        known = with_residuals(captured.program, {self.operator: self.extra_bytes})
        plan = replace(self.plan, program=known.fingerprint)
        timeline, stats = replay(known, plan)
        measured = self.referee.measure(captured, emitted, stats)
        return replace(measured, step_bytes=dict(enumerate(timeline.during_bytes)))

    plan: Plan


def test_what_the_schedule_holds_at_an_operator_is_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured = captured_of(MLP(6), torch.randn(64, 16))
    program = captured.program
    plan = keep_all(program)
    timeline, _ = replay(program, plan)
    budget_bytes = timeline.peak_bytes * 7 // 10
    # An operator that no plan can do without, in the middle of backward.
    operator = (program.boundary + len(program.operators)) // 2  # type: ignore[operator]
    model = ExtraAt(operator, timeline.peak_bytes // 4)

    def emit_and_tell(captured: Captured, plan: Plan) -> Emitted:
        model.plan = plan
        return emit(captured, plan)

    monkeypatch.setattr(fit_module, "emit", emit_and_tell)
    outcome = fit(captured, make_planner("auto"), lambda _: Limits(budget_bytes), model)
    assert outcome.chosen is not None
    assert outcome.measured.peak_bytes <= budget_bytes
    # The plan alone would hold less where the operator is none of the peak's.
    assert outcome.measured.peak_bytes >= outcome.chosen.stats.peak_bytes


class MeanSquare(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.model(x)
        return y.square().mean()


class ExtraAtMany(RefereeModel):
    """A compiler whose kernels for some operators hold more than they have to.

    Args:
        n_plans: the number of plans for which they do.
    """

    def __init__(self, extra_bytes: dict[int, int], n_plans: int = 100) -> None:
        self.extra_bytes, self.n_plans = extra_bytes, n_plans
        self.peaks: list[int] = []

    def measure(self, captured: Captured, emitted: Emitted | None, stats: PlanStats) -> Measured:
        if emitted is None:
            return super().measure(captured, emitted, stats)
        extra_bytes = self.extra_bytes if len(self.peaks) < self.n_plans else {}
        known = with_residuals(captured.program, extra_bytes)
        timeline, stats = replay(known, replace(self.plan, program=known.fingerprint))
        self.peaks.append(stats.peak_bytes)
        measured = super().measure(captured, emitted, stats)
        return replace(measured, step_bytes=dict(enumerate(timeline.during_bytes)))

    plan: Plan


def smallest_with_extra(
    extra_bytes: int, monkeypatch: pytest.MonkeyPatch, n_plans: int = 100
) -> tuple[int, list[int]]:
    """The smallest peak of some blocks where a third of the operators holds more, and all peaks."""
    blocks = nn.Sequential(*(Bottleneck(32, 8, 1) for _ in range(4)))
    captured = captured_of(MeanSquare(blocks), torch.randn(2, 32, 8, 8))
    operators = captured.program.operators[::3]
    model = ExtraAtMany({operator.id: extra_bytes for operator in operators}, n_plans)

    def emit_and_tell(captured: Captured, plan: Plan) -> Emitted:
        model.plan = plan
        return emit(captured, plan)

    monkeypatch.setattr(fit_module, "emit", emit_and_tell)
    outcome = fit(captured, make_planner("auto"), lambda _: Limits(None), model)
    return outcome.measured.peak_bytes, model.peaks


BETWEEN_BLOCKS_BYTES = 2 * 32 * 8 * 8 * 4


@pytest.mark.slow
def test_what_is_known_to_hold_more_than_the_smallest_is_not_lowered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peak_bytes, (first, *others) = smallest_with_extra(BETWEEN_BLOCKS_BYTES, monkeypatch)
    # The first plan knows nothing of what the kernels hold; there are smaller ones.
    assert peak_bytes == min(others) < first
    for n, other_bytes in enumerate(others[1:], 1):
        assert other_bytes <= 1.02 * min(others[:n])


@pytest.mark.slow
def test_what_was_learned_is_not_trusted_where_there_is_much_to_gain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernels of the first plans hold more, and those of later plans do not."""
    peak_bytes, peaks = smallest_with_extra(8 * BETWEEN_BLOCKS_BYTES, monkeypatch, n_plans=2)
    assert peak_bytes == min(peaks[2:]) < min(peaks[:2])


class WritesOver(RefereeModel):
    """A compiler that writes one operator's result over what it reads, if that is true."""

    def __init__(self, operator: int, size_bytes: int, is_true: bool) -> None:
        self.over, self.size_bytes = operator, size_bytes
        self.is_true = is_true
        self.referee = RefereeModel()

    def measure(self, captured: Captured, emitted: Emitted | None, stats: PlanStats) -> Measured:
        measured = self.referee.measure(captured, emitted, stats)
        if emitted is None:
            return replace(measured, written_over=frozenset({self.over}))
        program = captured.program
        if self.is_true:
            program = with_residuals(program, {self.over: -self.size_bytes})
        timeline, stats = replay(program, replace(self.plan, program=program.fingerprint))
        measured = self.referee.measure(captured, emitted, stats)
        return replace(measured, step_bytes=dict(enumerate(timeline.during_bytes)))

    plan: Plan


@pytest.mark.parametrize("is_true", [True, False])
def test_what_is_written_over_is_not_counted_twice(
    is_true: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = captured_of(Classifier(), torch.randn(32, 16), torch.randint(512, (32,)))
    program = captured.program
    size_bytes = 32 * 512 * 4
    (gradient,) = (
        op.id
        for op in program.operators[program.boundary :]
        for t in op.outputs
        if program.storages[program.tensors[t].storage].size_bytes == size_bytes
    )
    model = WritesOver(gradient, size_bytes, is_true)

    def emit_and_tell(captured: Captured, plan: Plan) -> Emitted:
        model.plan = plan
        return emit(captured, plan)

    monkeypatch.setattr(fit_module, "emit", emit_and_tell)
    outcome = fit(captured, make_planner("auto"), lambda _: Limits(None), model)
    counted_bytes = replay(program, smallest(captured)[0])[0].peak_bytes
    if is_true:
        # Another operator is the peak then: the gradient of the weights, half as large.
        assert outcome.measured.peak_bytes < counted_bytes - size_bytes // 3
    else:
        # It is seen not to hold in a plan, and the next plan knows.
        assert outcome.measured.peak_bytes <= counted_bytes


class Copies(RefereeModel):
    """A compiler after whose step PyTorch copies results, which is more than any plan holds."""

    def __init__(self) -> None:
        self.n_measured = 0

    def measure(self, captured: Captured, emitted: Emitted | None, stats: PlanStats) -> Measured:
        self.n_measured += emitted is not None
        measured = super().measure(captured, emitted, stats)
        is_plan = emitted is not None
        held_bytes = replay(captured.program, keep_all(captured.program))[1].peak_bytes - is_plan
        return replace(
            measured,
            peak_bytes=held_bytes,
            forward_peak_bytes=0,
            backward_peak_bytes=held_bytes,
            is_floor=is_plan,
        )


def test_the_search_for_the_smallest_ends_with_what_every_plan_holds(mlp: Captured) -> None:
    model = Copies()
    outcome = fit(mlp, make_planner("auto"), lambda _: Limits(None), model)
    assert outcome.chosen is not None
    assert model.n_measured == 1


class ExtraWhenOdd(RefereeModel):
    """A compiler that loses a twentieth on plans with an odd number of recomputations."""

    def measure(self, captured: Captured, emitted: Emitted | None, stats: PlanStats) -> Measured:
        measured = super().measure(captured, emitted, stats)
        factor = 1.05 if sum(stats.recomputed.values()) % 2 else 1.0
        return replace(
            measured,
            peak_bytes=int(measured.peak_bytes * factor),
            forward_peak_bytes=int(measured.forward_peak_bytes * factor),
            backward_peak_bytes=int(measured.backward_peak_bytes * factor),
        )


def test_a_little_less_than_the_smallest_is_refused() -> None:
    captured = captured_of(MLP(10), torch.randn(64, 16))
    planner, model = make_planner("auto"), ExtraWhenOdd()
    smallest = fit(captured, planner, lambda _: Limits(None), model)
    assert smallest.chosen is not None
    peak_bytes = smallest.measured.peak_bytes
    assert fit(captured, planner, lambda _: Limits(peak_bytes), model).measured.peak_bytes <= (
        peak_bytes
    )
    with pytest.raises(InfeasibleBudgetError) as caught:
        fit(captured, planner, lambda _: Limits(peak_bytes * 63 // 64), model)
    assert caught.value.minimum_bytes == peak_bytes


def test_copies_to_the_host_are_emitted_as_the_plan_has_them() -> None:
    captured = captured_of(MLP(), torch.randn(64, 16))
    program = captured.program
    peak_bytes = replay(program, keep_all(program))[0].peak_bytes
    planner = make_planner("offload", host_link=HostLink(float("inf")), base=make_planner("dtr"))
    budget_bytes = (replay(program, minimum_plan(program, make_planner("dtr")))[0].peak_bytes
                    + peak_bytes) // 2  # fmt: skip
    plan = planner.plan(program, budget_bytes)
    assert any(isinstance(step, Offload) for step in plan.steps)
    timeline, _ = replay(program, plan)
    emitted = emit(captured, plan)
    verify_emitted(captured, plan, timeline, emitted)
    assert emitted.backward is not None
    boundary = plan.steps.index(Boundary())
    phases = ((emitted.forward, plan.steps[:boundary]), (emitted.backward, plan.steps[boundary:]))
    for graph, steps in phases:
        for kind, operator in ((Offload, offload), (Prefetch, prefetch)):
            copies = graph.graph.find_nodes(op="call_function", target=operator)
            assert len(copies) == sum(isinstance(step, kind) for step in steps)
    # A copy of something else, and one that the plan does not have.
    copy, *_ = emitted.forward.graph.find_nodes(op="call_function", target=offload)
    other = next(n for n in emitted.forward.graph.nodes if mark_of(n).storage is not None)
    right = copy.args
    copy.args = (other,)
    with pytest.raises(VerificationError):
        verify_emitted(captured, plan, timeline, emitted)
    copy.args = right
    with emitted.forward.graph.inserting_after(copy):
        add_offload(emitted.forward.graph, copy.all_input_nodes[0], None)
    with pytest.raises(VerificationError, match="where the plan does not"):
        verify_emitted(captured, plan, timeline, emitted)
    fitted = fit(captured, planner, lambda _: Limits(budget_bytes), RefereeModel())
    assert fitted.measured.peak_bytes <= budget_bytes


def test_a_copy_that_nothing_waits_for_is_found() -> None:
    """One to the host before what it reads is freed, one back before what it writes is read."""
    captured = captured_of(MLP(), torch.randn(64, 16))
    program = captured.program
    planner = make_planner("offload", host_link=HostLink(float("inf")), base=make_planner("dtr"))
    smallest = minimum_plan(program, make_planner("dtr"))
    plan = planner.plan(program, replay(program, smallest)[0].peak_bytes)
    timeline, _ = replay(program, plan)
    emitted = emit(captured, plan)
    verify_emitted(captured, plan, timeline, emitted)
    assert emitted.backward is not None
    graphs = (emitted.forward.graph, emitted.backward.graph)
    waits = [
        wait for g in graphs for wait in g.find_nodes(op="call_function", target=wait_for_copy)
    ]
    assert {len(wait.args) for wait in waits} == {1, 2}
    for wait in waits:
        graph, next_node, args = wait.graph, wait.next, wait.args
        message = _UNFINISHED[len(args)]
        graph.erase_node(wait)
        with pytest.raises(VerificationError, match=message):
            verify_emitted(captured, plan, timeline, emitted)
        with graph.inserting_before(next_node):
            put_back = graph.call_function(wait_for_copy, args)
        put_back.meta = dict(wait.meta)
        verify_emitted(captured, plan, timeline, emitted)
    with graph.inserting_after(put_back):
        graph.call_function(wait_for_copy, put_back.args)
    with pytest.raises(VerificationError, match="waits for what is not copied"):
        verify_emitted(captured, plan, timeline, emitted)


# By how many values a wait names: what comes back; a copy on the host and what is copied.
_UNFINISHED = {
    1: "uses .*, which has not come back from the host yet",
    2: "frees .*, which is being copied",
}
