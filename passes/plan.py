"""The plan: an immutable list of steps, printable and parseable.

Every planner returns one; `replay.replay` alone says what it costs and how much memory it needs.
The text form is one step a line, so that a bug report is a file and two plans can be compared with
``diff``::

    dtrcompile-plan 1
    program 0123456789abcdef
    planner dtr(h_dtr_eq)
    compute 0
    free 3
    boundary
    compute 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from dtrcompile.passes.errors import PlanError

_HEADER = "dtrcompile-plan 1"


@dataclass(frozen=True, slots=True)
class Compute:
    """Run an operator: the first time, or again (a rematerialization)."""

    operator: int


@dataclass(frozen=True, slots=True)
class Free:
    """Free a storage: an eviction if it is computed again later, else its end."""

    storage: int


@dataclass(frozen=True, slots=True)
class Boundary:
    """Forward ends here: what is resident is saved, and backward begins."""


Step: TypeAlias = Compute | Free | Boundary


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of a whole training step, in order.

    Attributes:
        steps: what to do.
        program: fingerprint of the program that it is a plan of.
        planner: name of what made it.
    """

    steps: tuple[Step, ...]
    program: str
    planner: str

    def to_text(self) -> str:
        """The text form; `from_text` reads it back to an equal plan."""
        lines = [_HEADER, f"program {self.program}", f"planner {self.planner}"]
        for step in self.steps:
            match step:
                case Compute(operator):
                    lines.append(f"compute {operator}")
                case Free(storage):
                    lines.append(f"free {storage}")
                case Boundary():
                    lines.append("boundary")
        return "\n".join(lines) + "\n"

    @staticmethod
    def from_text(text: str) -> Plan:
        """Read the text form.

        Raises:
            PlanError: with the line number, if a line cannot be read.
        """
        lines = text.splitlines()
        if not lines or lines[0].strip() != _HEADER:
            raise PlanError(f"line 1: expected {_HEADER!r}; this is not a plan of this version")
        fields: dict[str, str] = {}
        steps: list[Step] = []
        for number, line in enumerate(lines[1:], start=2):
            word, _, rest = line.strip().partition(" ")
            if word in ("program", "planner") and rest:
                fields[word] = rest
            elif word in ("compute", "free") and rest.isdecimal():
                steps.append(Compute(int(rest)) if word == "compute" else Free(int(rest)))
            elif word == "boundary" and not rest:
                steps.append(Boundary())
            elif line.strip():
                raise PlanError(
                    f"line {number}: cannot read {line!r}; expected 'compute N', 'free N',"
                    " 'boundary', 'program ID' or 'planner NAME'"
                )
        for name in ("program", "planner"):
            if name not in fields:
                raise PlanError(f"the plan has no {name!r} line")
        return Plan(tuple(steps), fields["program"], fields["planner"])
