"""Planner ``dtr``: one staged run of DTR with one heuristic, its record taken as it is.

Kirisame et al., ICLR 2021.  The reference that other planners are measured against; nothing is
tried twice and nothing is polished.  Where the baseline fits, it is the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dtrcompile.passes.errors import OptionError
from dtrcompile.passes.planning.heuristics import HEURISTICS, Heuristic, HRand
from dtrcompile.passes.planning.planners.base import Planner, keep_all
from dtrcompile.passes.planning.planners.improve import schedule_of
from dtrcompile.passes.planning.simulator import Deallocation, SimulatorOptions, simulate
from dtrcompile.passes.program.index import ProgramIndex
from dtrcompile.passes.program.plan import Plan
from dtrcompile.passes.program.program import Program


@dataclass(frozen=True)
class DTRPlanner(Planner):
    """See the module docstring.

    Attributes:
        heuristic: a name in `heuristics.HEURISTICS`.
        deallocation: ``"eager"``, ``"banish"`` or ``"ignore"``.
        ignore_small, sample, batch, cost_limit: see `simulator.SimulatorOptions`.
        seed: of ``h_rand`` and of ``sample``.
    """

    name: ClassVar[str] = "dtr"

    heuristic: str = "h_dtr_eq"
    deallocation: str = "eager"
    ignore_small: bool = False
    sample: bool = False
    batch: bool = False
    cost_limit: float = 8.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.heuristic not in HEURISTICS:
            raise OptionError.unknown("heuristic", self.heuristic, HEURISTICS)
        allowed = [d.value for d in Deallocation]
        if self.deallocation not in allowed:
            raise OptionError.unknown("deallocation", self.deallocation, allowed)

    def plan(self, program: Program, budget_bytes: int) -> Plan:
        index = ProgramIndex.of(program)
        baseline = schedule_of(index, keep_all(program).steps)
        if baseline.peak_bytes <= budget_bytes:
            return Plan(baseline.steps(), program.fingerprint, f"dtr({self.heuristic})")
        run = simulate(index, budget_bytes, self.simulator_options())
        return Plan(run.steps, program.fingerprint, f"dtr({self.heuristic})")

    def simulator_options(self) -> SimulatorOptions:
        """What the simulator is run with."""
        heuristic: Heuristic = (
            HRand(self.seed) if self.heuristic == HRand.name else HEURISTICS[self.heuristic]()
        )
        return SimulatorOptions(
            heuristic=heuristic,
            deallocation=Deallocation(self.deallocation),
            ignore_small=self.ignore_small,
            sample=self.sample,
            batch=self.batch,
            cost_limit=self.cost_limit,
            seed=self.seed,
        )
