"""Random programs, and what must hold for every planner on every one of them.

One generator serves hypothesis (which draws the numbers and shrinks them) and
``bench/random_programs.py`` (which takes them from a seeded generator, ten thousand times).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import product

from dtrcompile.passes.errors import InfeasibleBudgetError, PlanError, ProgramTooLargeError
from dtrcompile.passes.planning.heuristics import HEURISTICS, Neighborhood
from dtrcompile.passes.planning.hoist import hoist
from dtrcompile.passes.planning.planners import PLANNERS, keep_all, lower_bound_bytes, make_planner
from dtrcompile.passes.planning.planners.base import Planner
from dtrcompile.passes.planning.planners.brute_force import BruteForcePlanner
from dtrcompile.passes.planning.planners.checkmate import CheckmatePlanner
from dtrcompile.passes.planning.planners.checkmate_lp import CheckmateLPPlanner
from dtrcompile.passes.planning.planners.cover import least_cost_ns
from dtrcompile.passes.planning.planners.improve import BOUNDARY, keep_what_fits, schedule_of
from dtrcompile.passes.planning.planners.intervals import Intervals
from dtrcompile.passes.planning.planners.offload import OffloadPlanner
from dtrcompile.passes.planning.simulator import Deallocation, SimulatorOptions, simulate
from dtrcompile.passes.program.host_link import HostLink
from dtrcompile.passes.program.index import ProgramIndex
from dtrcompile.passes.program.plan import Boundary, Compute, Free, Plan, Step
from dtrcompile.passes.program.program import Operator, Phase, Program, Storage, StorageKind, Tensor
from dtrcompile.passes.program.replay import MemoryTimeline, PlanStats, replay

Pick = Callable[[int, int], int]
"""An integer between two bounds, both included."""


_ELSEWHERE = frozenset(
    {
        BruteForcePlanner.name,
        CheckmatePlanner.name,
        CheckmateLPPlanner.name,
        OffloadPlanner.name,
    }
)
"""Planners that search exhaustively, or with a solver, or that are another one unless they are
given a host link: tests of their own run them."""


def random_program(pick: Pick, most_operators: int = 14) -> Program:
    """Views, several outputs, pins, operators that run once, constants, tangents, boundaries."""
    storages: list[Storage] = []
    tensors: list[Tensor] = []
    operators: list[Operator] = []

    def storage(kind: StorageKind, pinned: str | None = None) -> int:
        size_bytes = 0 if pick(0, 9) == 0 else pick(1, 12)
        storages.append(Storage(len(storages), f"s{len(storages)}", size_bytes, kind, pinned))
        return storages[-1].id

    def tensor(of: int, producer: int | None) -> int:
        tensors.append(Tensor(len(tensors), f"t{len(tensors)}", of, producer))
        return tensors[-1].id

    readable = [tensor(storage(StorageKind.PARAMETER), None) for _ in range(pick(0, 2))]
    tangents = [tensor(storage(StorageKind.TANGENT), None) for _ in range(pick(0, 2))]
    n = pick(1, most_operators)
    boundary = pick(0, n) if tangents or pick(0, 3) else None
    if boundary is None and tangents:
        boundary = n
    for o in range(n):
        phase = Phase.FORWARD if boundary is None or o < boundary else Phase.BACKWARD
        if o == boundary:
            readable += tangents
        # Mostly the recent past, sometimes anything: chains with skips, as in real programs.
        inputs = [
            readable[
                pick(max(0, len(readable) - 4), len(readable) - 1)
                if pick(0, 2)
                else pick(0, len(readable) - 1)
            ]
            for _ in range(pick(0, min(3, len(readable))))
        ]
        outputs = []
        for _ in range(1 if pick(0, 3) else pick(0, 3)):
            if inputs and pick(0, 4) == 0:
                outputs.append(tensor(tensors[inputs[pick(0, len(inputs) - 1)]].storage, o))
            else:
                pinned = "test" if pick(0, 11) == 0 else None
                outputs.append(tensor(storage(StorageKind.INTERMEDIATE, pinned), o))
        operators.append(
            Operator(
                o,
                f"op{o}",
                phase,
                tuple(inputs),
                tuple(outputs),
                pick(0, 9),
                pick(1, 8) if pick(0, 7) == 0 else 0,
                "test" if pick(0, 7) == 0 else None,
            )
        )
        readable += outputs
    ends = (
        tuple(dict.fromkeys(readable[pick(0, len(readable) - 1)] for _ in range(pick(0, 3))))
        if readable
        else ()
    )
    program = Program(
        tuple(storages), tuple(tensors), tuple(operators), ends, boundary, name="random"
    )
    return replace(
        program,
        operators=tuple(
            replace(op, workspace_bytes=-written_over(program, op)) if pick(0, 3) == 0 else op
            for op in operators
        ),
    )


def written_over(program: Program, op: Operator) -> int:
    """Bytes of its inputs that the baseline does not need after it, and that it could write to."""
    storages, tensors = program.storages, program.tensors
    read = {tensors[t].storage for t in op.inputs}
    made = {tensors[t].storage for t in op.outputs} - read
    kept = program.output_storages | program.held_from_boundary
    dead = {
        s
        for s in read - kept
        if not storages[s].is_constant
        and program.readers[s][-1] == op.id
        and not any(tensors[t].storage == s for t in op.outputs)
    }
    return min(sum(storages[s].size_bytes for s in made), sum(storages[s].size_bytes for s in dead))


def budgets(program: Program, pick: Pick) -> tuple[int, ...]:
    """One below the lower bound, the lower bound, one in between, the baseline's peak."""
    low = lower_bound_bytes(program)
    high = replay(program, keep_all(program))[0].peak_bytes
    return low - 1, low, pick(low, max(low, high)), high


def checked(program: Program, plan: Plan, budget_bytes: int) -> tuple[MemoryTimeline, PlanStats]:
    """Replay, and hold the plan to the budget."""
    timeline, stats = replay(program, plan)
    assert timeline.peak_bytes <= budget_bytes, plan.to_text()
    return timeline, stats


def check_simulator(program: Program, budget_bytes: int) -> int:
    """Every heuristic and policy: the simulator's account is the replayer's, step by step.

    Returns how many of them found a plan, and so were compared; as those below do.
    """
    index = ProgramIndex.of(program)
    return sum(
        check_run(
            program,
            index,
            budget_bytes,
            SimulatorOptions(heuristic=HEURISTICS[name](), deallocation=deallocation),
        )
        for name, deallocation in product(HEURISTICS, Deallocation)
    )


def check_speed_options(program: Program, budget_bytes: int) -> int:
    """No combination of the speed tricks makes a plan invalid."""
    index = ProgramIndex.of(program)
    compared = 0
    for small, sample, batch, hold in product((False, True), repeat=4):
        options = SimulatorOptions(
            ignore_small=small, sample=sample, batch=batch, hold_sources=hold, walk_limit=2
        )
        compared += check_run(program, index, budget_bytes, options)
    return compared


def random_link(pick: Pick) -> HostLink:
    """Slower than computing, about as fast, faster, or for nothing."""
    bytes_per_ns = (0.25, 1.0, 2.5, 8.0, float("inf"))[pick(0, 4)]
    return HostLink(bytes_per_ns, latency_ns=pick(0, 2) if pick(0, 1) else 0)


def check_simulator_with_link(
    program: Program, budget_bytes: int, link: HostLink, link_price: float
) -> int:
    """As `check_simulator`, where evictions may be copies: the account, and the waits."""
    index = ProgramIndex.of(program)
    compared = 0
    for name, deallocation in product(HEURISTICS, Deallocation):
        options = SimulatorOptions(
            heuristic=HEURISTICS[name](),
            deallocation=deallocation,
            hold_sources=link_price > 0,
            host_link=link,
            link_price=link_price,
        )
        try:
            run = simulate(index, budget_bytes, options)
        except InfeasibleBudgetError:
            continue
        plan = Plan(run.steps, program.fingerprint, "test", link)
        assert Plan.from_text(plan.to_text()) == plan
        timeline, stats = replay(program, plan)
        assert timeline.peak_bytes <= budget_bytes
        assert timeline.during_bytes == run.during_bytes
        assert timeline.after_bytes == run.after_bytes
        assert stats.cost_ns == run.cost_ns
        exact = HEURISTICS[name].neighborhood in (Neighborhood.ANCESTORS, Neighborhood.EXACT)
        if exact and link.transfer_ns(1000) == 0:
            # Else what is computed again can look cheaper than it is.
            assert stats.cost_ns == program.cost_ns, plan.to_text()
        compared += 1
    return compared


def check_offload(program: Program, budget_bytes: int, link: HostLink) -> int:
    """Never dearer than the base planner; with a link that takes no time, as cheap as it gets."""
    index = ProgramIndex.of(program)
    try:
        run = simulate(index, budget_bytes, SimulatorOptions(host_link=link))
    except InfeasibleBudgetError:
        pass
    else:
        hoisted = hoist(index, run.steps, budget_bytes, link)
        timeline, _ = replay(program, Plan(hoisted, program.fingerprint, "test", link))
        assert timeline.peak_bytes <= budget_bytes
    base = make_planner("dtr")
    base_ns = cost_or_none(program, base, budget_bytes)
    compared = 0
    for tried in (link, HostLink(float("inf"))):
        planner = make_planner("offload", host_link=tried, base=base)
        try:
            plan = planner.plan(program, budget_bytes)
        except InfeasibleBudgetError:
            assert base_ns is None
            continue
        assert planner.plan(program, budget_bytes) == plan
        assert Plan.from_text(plan.to_text()) == plan
        timeline, stats = replay(program, plan)
        assert timeline.peak_bytes <= budget_bytes, plan.to_text()
        assert base_ns is None or stats.cost_ns <= base_ns, plan.to_text()
        if tried != link:
            assert stats.cost_ns == program.cost_ns, plan.to_text()
        compared += 1
    return compared


def check_run(
    program: Program, index: ProgramIndex, budget_bytes: int, options: SimulatorOptions
) -> bool:
    """One run of the simulator, and its polished schedule; whether there was a plan to compare."""
    try:
        run = simulate(index, budget_bytes, options)
    except InfeasibleBudgetError:
        return False
    assert budget_bytes >= lower_bound_bytes(program)
    plan = Plan(run.steps, program.fingerprint, "test")
    timeline, stats = checked(program, plan, budget_bytes)
    assert timeline.during_bytes == run.during_bytes
    assert timeline.after_bytes == run.after_bytes
    assert stats.cost_ns == run.cost_ns

    schedule = schedule_of(index, run.steps)
    timeline, stats = checked(
        program, Plan(schedule.steps(), program.fingerprint, "test"), budget_bytes
    )
    assert schedule.peak_bytes == timeline.peak_bytes
    assert schedule.cost_ns == stats.cost_ns <= run.cost_ns
    better = keep_what_fits(index, schedule, budget_bytes)
    _, stats = checked(program, Plan(better.steps(), program.fingerprint, "test"), budget_bytes)
    assert better.cost_ns == stats.cost_ns <= schedule.cost_ns
    return True


def check_intervals(program: Program, budget_bytes: int, pick: Pick) -> None:
    """Retention intervals: every stage's bytes and the cost are the referee's after any moves.

    Starts from a run's schedule where there is one; some of the moves are taken back.
    """
    index = ProgramIndex.of(program)
    state = Intervals(index, budget_bytes)
    try:
        run = simulate(index, budget_bytes, SimulatorOptions())
    except InfeasibleBudgetError:
        pass
    else:
        schedule = schedule_of(index, run.steps)
        state.load(schedule)
        assert state.cost_ns <= schedule.cost_ns
    check_stages(program, state)
    for _ in range(4):
        mark, before = len(state.journal), decision(state)
        for _ in range(pick(1, 3)):
            segments = sorted(state.slot)
            if segments:
                u, t = segments[pick(0, len(segments) - 1)]
                move = state.evict if state.segment_kept[state.slot[u, t]] else state.keep
                move(u, t)
        state.settle()
        check_stages(program, state)
        if pick(0, 1):
            state.journal.roll_back(mark)
            assert decision(state) == before
            check_stages(program, state)


def decision(state: Intervals) -> tuple[object, ...]:
    """All that a move changes and that taking it back restores."""
    segments = {
        key: (int(state.segment_start[slot]), bool(state.segment_kept[slot]))
        for key, slot in state.slot.items()
    }
    return copy.deepcopy(
        (
            state.cost_ns,
            state.held_bytes.tolist(),
            state.still_bytes,
            state.touches,
            state.counts,
            state.again,
            state.runs,
            state.needs,
            state.anchors,
            segments,
        )
    )


def check_stages(program: Program, state: Intervals) -> None:
    """Replays the state's plan and compares stage by stage."""
    steps: list[Step] = []
    stages: list[int] = []
    for t in range(state.n_stages):
        for o, freed in state.entries(t):
            steps.append(Boundary() if o == BOUNDARY else Compute(o))
            steps.extend(Free(s) for s in freed)
        stages += [t] * (len(steps) - len(stages))
    timeline, stats = replay(program, Plan(tuple(steps), program.fingerprint, "test"))
    assert stats.cost_ns == state.cost_ns
    most: dict[int, int] = {}
    for t, during_bytes in zip(stages, timeline.during_bytes, strict=True):
        most[t] = max(most.get(t, 0), during_bytes)
    assert most == {t: state.held_bytes[t] for t in most}


def check_planners(program: Program, budget_bytes: int, baseline_bytes: int) -> int:
    """Every planner: a plan within the budget or the typed error; the same plan again."""
    costs_ns: dict[str, int] = {}
    least_ns = least_cost_ns(ProgramIndex.of(program), budget_bytes)
    for name in sorted(PLANNERS.keys() - _ELSEWHERE):
        planner = make_planner(name)
        try:
            plan = planner.plan(program, budget_bytes)
        except InfeasibleBudgetError as error:
            assert error.budget_bytes == budget_bytes
            assert budget_bytes < baseline_bytes
            continue
        _, stats = checked(program, plan, budget_bytes)
        # The bound is of plans in the program's order.
        assert stats.cost_ns >= least_ns or name == "auto", name
        assert planner.plan(program, budget_bytes) == plan
        assert Plan.from_text(plan.to_text()) == plan
        if budget_bytes >= baseline_bytes:
            assert not stats.recomputed
        costs_ns[name] = stats.cost_ns
    # Another order of first runs is taken only where it costs less.
    if "program-order" in costs_ns:
        assert costs_ns["auto"] <= costs_ns["program-order"]
    return len(costs_ns)


def check_oracle(program: Program) -> bool:
    """No planner beats brute force, nor finds a plan below the smallest budget that it names.

    Returns False where the program is too large for brute force.
    """
    oracle = BruteForcePlanner()
    try:
        smallest_bytes = oracle.smallest_budget_bytes(program)
        baseline_bytes = replay(program, keep_all(program))[0].peak_bytes
        assert lower_bound_bytes(program) <= smallest_bytes <= baseline_bytes
        assert cost_or_none(program, oracle, smallest_bytes - 1) is None
        for budget_bytes in {smallest_bytes, (smallest_bytes + baseline_bytes) // 2}:
            best = cost_or_none(program, oracle, budget_bytes)
            assert best is not None
            for name in sorted(PLANNERS.keys() - _ELSEWHERE):
                cost_ns = cost_or_none(program, make_planner(name), budget_bytes)
                assert cost_ns is None or cost_ns >= best, name
                assert cost_or_none(program, make_planner(name), smallest_bytes - 1) is None
    except ProgramTooLargeError:
        return False
    return True


def cost_or_none(program: Program, planner: Planner, budget_bytes: int) -> int | None:
    """What its plan costs; None where it finds nothing."""
    try:
        plan = planner.plan(program, budget_bytes)
    except InfeasibleBudgetError:
        return None
    return checked(program, plan, budget_bytes)[1].cost_ns


def check_scaling(program: Program, budget_bytes: int) -> bool:
    """Twice the bytes in twice the budget: the same steps; whether there are any."""
    doubled = Program(
        tuple(
            Storage(s.id, s.name, 2 * s.size_bytes, s.kind, s.pinned) for s in program.storages
        ),
        program.tensors,
        tuple(
            Operator(
                o.id, o.name, o.phase, o.inputs, o.outputs, o.cost_ns, 2 * o.workspace_bytes,
                o.not_recomputable,
            )
            for o in program.operators
        ),
        program.outputs,
        program.boundary,
    )  # fmt: skip
    steps = steps_or_none(program, budget_bytes)
    assert steps_or_none(doubled, 2 * budget_bytes) == steps
    return steps is not None


def steps_or_none(program: Program, budget_bytes: int) -> tuple[object, ...] | None:
    """What ``auto`` plans; None where it finds nothing."""
    try:
        return make_planner("auto").plan(program, budget_bytes).steps
    except InfeasibleBudgetError:
        return None


def check_mutants(program: Program, plan: Plan, pick: Pick) -> None:
    """A plan with a step dropped, doubled or moved is rejected, or is still a plan.

    Some mutations are harmless (two independent operators change places); those that touch a
    value's life are not.
    """
    steps = plan.steps
    at = pick(0, len(steps) - 1)

    def mutant(*new: object) -> Plan:
        return Plan((*steps[:at], *new, *steps[at + 1 :]), plan.program, plan.planner)  # type: ignore[arg-type]

    match steps[at]:
        case Free(s):
            assert rejected(program, mutant(Free(s), Free(s)))
            assert rejected(program, mutant())  # never freed, or allocated over
        case Compute(o) if o not in {
            step.operator for i, step in enumerate(steps) if i != at and isinstance(step, Compute)
        }:
            assert rejected(program, mutant())  # an operator that does not run


def rejected(program: Program, plan: Plan) -> bool:
    """Whether the referee refuses the plan."""
    try:
        replay(program, plan)
    except PlanError:
        return True
    return False


def check_everything(pick: Pick, most_operators: int = 14) -> None:
    """All of the above on one random program; what ``bench/random_programs.py`` repeats."""
    program = random_program(pick, most_operators)
    baseline = keep_all(program)
    baseline_bytes = replay(program, baseline)[0].peak_bytes
    for budget_bytes in budgets(program, pick):
        check_simulator(program, budget_bytes)
        check_planners(program, budget_bytes, baseline_bytes)
    link = random_link(pick)
    middle = budgets(program, pick)[2]
    check_simulator_with_link(program, middle, link, pick(0, 1) / 2)
    check_offload(program, middle, link)
    check_speed_options(program, middle)
    check_intervals(program, middle, pick)
    check_scaling(program, middle)
    check_mutants(program, baseline, pick)
    check_oracle(random_program(pick, min(8, most_operators)))
