"""Planner ``auto``, the default: try several heuristics, polish the best, search from there.

Staging DTR (Kirisame et al., ICLR 2021) makes each run of it cheap and its result comparable: all
candidates are known before the first step is taken.  No heuristic wins on every graph, so a few
are run, and each record is polished by `improve`.  The best of them are the seeds of a local
search over retention intervals (`search`), which gets what is left of the time.  The least cost
wins, then the lower peak, then the order of the candidates.  A plan that is proven to be optimal
(`cover`) ends it all.

Then another order of first runs is tried, in which the program holds less (`orders`), of a small
program all that `orders` knows: the heuristics run in it, and where they find a plan that is
cheaper than the one at hand, the search goes on from there.  The program's own order is always
searched, so no plan is more expensive for it.  Of a program of a few operators, all plans are
searched in the end (`brute_force`).

The amount of work is fixed by the program and the options, never by a clock: `planning_s` is
turned into units of work, so the same program and options give the same plan on every machine and
every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar

from dtrcompile.passes.errors import InfeasibleBudgetError, OptionError, ProgramTooLargeError
from dtrcompile.passes.planning.heuristics import (
    HDTR,
    HEURISTICS,
    HLRU,
    HMSPS,
    HDTREq,
    HDTREqNext,
    HDTRLocal,
    HDTRNext,
    Heuristic,
    HMSPSNext,
    HSize,
)
from dtrcompile.passes.planning.orders import orders, permuted, plan_of_permuted
from dtrcompile.passes.planning.planners.base import Planner, keep_all, lower_bound_bytes
from dtrcompile.passes.planning.planners.brute_force import BruteForcePlanner
from dtrcompile.passes.planning.planners.chains import binomial_seed
from dtrcompile.passes.planning.planners.cover import least_cost_ns
from dtrcompile.passes.planning.planners.improve import (
    Schedule,
    judged_plan,
    keep_what_fits,
    schedule_of,
)
from dtrcompile.passes.planning.planners.intervals import Intervals
from dtrcompile.passes.planning.planners.search import Search
from dtrcompile.passes.planning.settings import (
    CANDIDATE_WORK_SHARE,
    DEFAULT_S_PER_OPERATOR,
    DEFAULT_S_PER_THOUSAND_OPERATORS,
    LOOSER_BUDGET_PERCENT,
    MAX_DEFAULT_S,
    MAX_EXHAUSTED_OPERATORS,
    MAX_EXHAUSTED_STATES,
    MAX_OPERATORS_IN_ALL_ORDERS,
    MAX_PROVABLE_OPERATORS,
    MAX_SEEDS,
    MIN_CANDIDATES,
    MINIMUM_WORK_DIVISOR,
    SIMULATOR_WALK_LIMIT,
    TIGHTENING_STEPS,
    TRIAL_WORK_SHARE,
    WORK_PER_S,
    WORK_PER_SIMULATED_STEP,
)
from dtrcompile.passes.planning.simulator import Simulator, SimulatorOptions
from dtrcompile.passes.program.index import ProgramIndex
from dtrcompile.passes.program.plan import Plan
from dtrcompile.passes.program.program import Program
from dtrcompile.passes.program.replay import replay

# In the order in which they are run; how many depends on the work.  The paper's own two best come
# early, so that no program is planned worse than they would plan it.
_CANDIDATES: tuple[Heuristic, ...] = (
    HMSPSNext(1.0, 0.5),
    HDTREq(),
    HDTRNext(1.0, 0.0),
    HDTR(),
    HDTREqNext(1.0, 0.5),
    HDTRNext(1.3, 0.5),
    HDTRNext(1.0, 1.0),
    HMSPS(),
    HDTRNext(1.3, 0.0),
    HMSPSNext(0.8, 0.25),
    HDTREqNext(1.0, 0.0),
    HSize(),
    HMSPSNext(0.8, 0.5),
    HDTRNext(1.0, 0.5),
    HDTRLocal(),
    HMSPSNext(1.0, 1.0),
    HLRU(),
)

_ORDERS = ("program", "other", "best")


@dataclass(frozen=True)
class _Found:
    """The best schedule in one order of first runs.

    Attributes:
        schedule: with operators numbered in that order.
        is_squeezed: no heuristic got through at this budget.
    """

    schedule: Schedule
    is_squeezed: bool = False


@dataclass(frozen=True)
class AutoPlanner(Planner):
    """See the module docstring.

    Attributes:
        heuristic: run this one only (a name in `heuristics.HEURISTICS`); None: the portfolio.
        cost_limit: a candidate is given up at this multiple of the baseline's cost.
        planning_s: about how many seconds one plan may take; None: `default_planning_s`.
            It stands for a fixed amount of work, so a slower machine takes longer, and the
            candidate that runs when the work is used up is finished.
        order: of first runs: the program's ("program"), another one in which it holds less
            ("other"), or both, whose cheaper plan is taken ("best").
        first_fit: take the first candidate that fits; for searching the smallest budget.
    """

    name: ClassVar[str] = "auto"

    heuristic: str | None = None
    cost_limit: float = 8.0
    planning_s: float | None = None
    order: str = "best"
    first_fit: bool = False

    def __post_init__(self) -> None:
        if self.heuristic is not None and self.heuristic not in HEURISTICS:
            raise OptionError.unknown("heuristic", self.heuristic, HEURISTICS)
        if self.planning_s is not None and not 0 <= self.planning_s < math.inf:
            raise OptionError(f"planning_s is {self.planning_s!r}; give seconds, 0 or more")
        if self.order not in _ORDERS:
            raise OptionError.unknown("order", self.order, _ORDERS)

    def plan(self, program: Program, budget_bytes: int) -> Plan:
        if budget_bytes < lower_bound_bytes(program):
            raise InfeasibleBudgetError(budget_bytes)
        best: _Found | None = None
        best_plan: Plan | None = None
        for order in self._orders(program):
            in_order = program if order is None else permuted(program, order)
            try:
                found, plan = self._found_in_order(in_order, budget_bytes, best)
            except InfeasibleBudgetError:
                continue
            if best is not None and found.schedule.rank >= best.schedule.rank:
                continue
            best, best_plan = found, plan
            if order is not None:
                best_plan = plan_of_permuted(program, order, plan, self.name)
            if self.first_fit or found.schedule.cost_ns == program.cost_ns:
                break
        if self._may_be_beaten(program, best):
            found_ns = math.inf if best is None else best.schedule.cost_ns
            best_plan = self._optimum(program, budget_bytes, found_ns) or best_plan
        if best_plan is None:
            raise InfeasibleBudgetError(budget_bytes)
        return best_plan

    def _may_be_beaten(self, program: Program, found: _Found | None) -> bool:
        """Whether all plans of a tiny program are to be searched, after all the others."""
        n_storages = sum(not storage.is_constant for storage in program.storages)
        if self.heuristic or max(len(program.operators), n_storages) > MAX_EXHAUSTED_OPERATORS:
            return False
        if found is None:
            return True
        return not self.first_fit and found.schedule.cost_ns > program.cost_ns

    def _optimum(self, program: Program, budget_bytes: int, found_ns: float) -> Plan | None:
        """The cheapest plan of a tiny program; None if it costs no less than what was found."""
        exact = BruteForcePlanner(reorder=self.order != "program", most_states=MAX_EXHAUSTED_STATES)
        try:
            plan = exact.plan(program, budget_bytes)
        except (InfeasibleBudgetError, ProgramTooLargeError):
            return None
        if replay(program, plan)[1].cost_ns >= found_ns:
            return None
        return replace(plan, planner=self.name)

    def _orders(self, program: Program) -> Iterator[tuple[int, ...] | None]:
        """Orders of first runs; None is the program's own."""
        if self.order != "other":
            yield None
        if self.order != "program":
            is_small = len(program.operators) <= MAX_OPERATORS_IN_ALL_ORDERS
            yield from islice(orders(program), None if is_small else 1)

    def _found_in_order(
        self, program: Program, budget_bytes: int, rival: _Found | None
    ) -> tuple[_Found, Plan]:
        """The cheapest schedule found with first runs in the program's order, and its plan.

        Args:
            rival: of another order; this one is given up if the heuristics find nothing cheaper.

        Raises:
            InfeasibleBudgetError: if there is none, or it was given up.
        """
        baseline = keep_all(program)
        index = ProgramIndex.of(program)
        schedule = schedule_of(index, baseline.steps)
        if schedule.peak_bytes <= budget_bytes:
            return _Found(schedule), baseline
        found = self._best_found(index, budget_bytes, rival)
        return found, judged_plan(program, found.schedule, budget_bytes, self.name)

    def _work(self, index: ProgramIndex) -> int:
        """Units of work for one plan."""
        seconds = self.planning_s
        if seconds is None:
            seconds = default_planning_s(index.n_operators)
        return int(seconds * WORK_PER_S)

    def _best_found(self, index: ProgramIndex, budget_bytes: int, rival: _Found | None) -> _Found:
        """The cheapest schedule found.

        Raises:
            InfeasibleBudgetError: if there is none, or none that is likely to beat the rival.
        """
        work = self._work(index)
        if self.first_fit:
            return _Found(self._first_schedule(index, budget_bytes, work))
        least_ns = 0
        if index.n_operators <= MAX_PROVABLE_OPERATORS:
            least_ns = least_cost_ns(index, budget_bytes)
        seeds = self._seeds(index, budget_bytes, int(CANDIDATE_WORK_SHARE * work), least_ns)
        if seeds and seeds[0].cost_ns <= least_ns:
            return _Found(seeds[0])
        chain = binomial_seed(index, budget_bytes)
        if chain is not None:
            seeds = sorted([chain, *seeds], key=lambda schedule: schedule.rank)
        is_squeezed = not seeds
        if rival is not None and (
            not rival.is_squeezed if is_squeezed else seeds[0].cost_ns >= rival.schedule.cost_ns
        ):
            raise InfeasibleBudgetError(budget_bytes)
        searches = [Search(_loaded(index, budget_bytes, seed)) for seed in seeds[:MAX_SEEDS]]
        searches = [s for s in searches if s.repair(work_limit=s.work + work)]
        if is_squeezed:
            searches = self._squeezed(index, budget_bytes, work)
        if searches:
            seeds.append(self._searched(searches, work, least_ns))
        fitting = [
            keep_what_fits(index, seed, budget_bytes)
            for seed in seeds
            if seed.peak_bytes <= budget_bytes
        ]
        if not fitting:
            raise InfeasibleBudgetError(budget_bytes)
        return _Found(min(fitting, key=lambda schedule: schedule.rank), is_squeezed)

    def _first_schedule(self, index: ProgramIndex, budget_bytes: int, work: int) -> Schedule:
        """The first schedule found that fits.

        Raises:
            InfeasibleBudgetError: if there is none.
        """
        chain = binomial_seed(index, budget_bytes)
        if chain is not None:
            return chain
        seeds = self._seeds(index, budget_bytes, int(CANDIDATE_WORK_SHARE * work), 0)
        if seeds:
            return seeds[0]
        searches = self._squeezed(index, budget_bytes, work // MINIMUM_WORK_DIVISOR)
        if searches:
            return searches[0].state.schedule()
        raise InfeasibleBudgetError(budget_bytes)

    def _squeezed(self, index: ProgramIndex, budget_bytes: int, work: int) -> list[Search]:
        """Where no heuristic gets through: a plan for more bytes, repaired down to the budget."""
        for percent in LOOSER_BUDGET_PERCENT:
            loose_bytes = budget_bytes * percent // 100
            seeds = replace(self, first_fit=True)._seeds(index, loose_bytes, work, 0)
            if not seeds:
                continue
            search = Search(_loaded(index, loose_bytes, seeds[0]))
            limit = search.work + work
            for k in range(TIGHTENING_STEPS - 1, -1, -1):
                search.state.budget_bytes = (
                    budget_bytes + (loose_bytes - budget_bytes) * k // TIGHTENING_STEPS
                )
                if not search.repair(power=1.0, work_limit=limit) and not search.repair(
                    power=0.0, work_limit=limit
                ):
                    break
            else:
                search.state.journal.clear()
                return [search]
        return []

    def _searched(self, searches: list[Search], work: int, least_ns: int) -> Schedule:
        """What the search makes of the seed that it gets furthest from."""
        work = int((1.0 - CANDIDATE_WORK_SHARE) * work)
        if len(searches) > 1:
            trial = int(TRIAL_WORK_SHARE * work)
            for search in searches:
                search.run(trial, 0.0, TRIAL_WORK_SHARE, least_ns)
                work -= trial
        best = min(searches, key=lambda search: search.state.cost_ns)
        best.run(work, TRIAL_WORK_SHARE, least_ns=least_ns)
        return best.state.schedule()

    def _seeds(
        self, index: ProgramIndex, budget_bytes: int, work: int, least_ns: int
    ) -> list[Schedule]:
        """The best few plans of the simulator, best first; one of ``least_ns`` is enough."""
        seeds: list[Schedule] = []
        most_work = work
        held_none: set[Heuristic] = set()  # whose runs came to no source that could be let go
        for tried, options in enumerate(self.candidates()):
            if seeds and (self.first_fit or not options.hold_sources or work <= 0):
                break
            if seeds and seeds[0].cost_ns <= least_ns:
                break
            if tried >= MIN_CANDIDATES and options.hold_sources and work <= -most_work:
                continue
            if not options.hold_sources and options.heuristic in held_none:
                continue  # the same run as before
            simulator = Simulator(index, budget_bytes, options)
            try:
                steps = simulator.run().steps
            except InfeasibleBudgetError:
                continue
            finally:
                work -= WORK_PER_SIMULATED_STEP * len(simulator.steps)
                if not simulator.has_held_sources:
                    held_none.add(options.heuristic)
            seed = schedule_of(index, steps)
            if not self.first_fit:
                seed = keep_what_fits(index, seed, budget_bytes)
            if all(seed.operators != other.operators for other in seeds):
                seeds = sorted([*seeds, seed], key=lambda schedule: schedule.rank)[:MAX_SEEDS]
        return seeds

    def candidates(self) -> tuple[SimulatorOptions, ...]:
        """The runs, in order; those that let sources go are for where nothing else fits."""
        heuristics = _CANDIDATES
        if self.heuristic is not None:
            heuristics = (HEURISTICS[self.heuristic](),)
        elif self.first_fit:
            heuristics = heuristics[:MIN_CANDIDATES]
        usual = SimulatorOptions(cost_limit=self.cost_limit, walk_limit=SIMULATOR_WALK_LIMIT)
        return (
            *(replace(usual, heuristic=h) for h in heuristics),
            *(replace(usual, heuristic=h, hold_sources=False) for h in heuristics[:2]),
        )

    def for_minimum(self) -> Planner:
        return replace(self, first_fit=True)

    def minimum_searches(self) -> tuple[Planner, ...]:
        orders = ("program", "other") if self.order == "best" else (self.order,)
        return tuple(replace(self, first_fit=True, order=order) for order in orders)


def default_planning_s(n_operators: int) -> float:
    """Seconds for one plan where none are given: under one up to a thousand operators."""
    of_small = min(DEFAULT_S_PER_OPERATOR * n_operators, DEFAULT_S_PER_THOUSAND_OPERATORS)
    return min(max(of_small, DEFAULT_S_PER_THOUSAND_OPERATORS * n_operators / 1000), MAX_DEFAULT_S)


def _loaded(index: ProgramIndex, budget_bytes: int, seed: Schedule) -> Intervals:
    state = Intervals(index, budget_bytes)
    state.load(seed)
    return state
