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

A storage can also be moved to the host and back (`host_link.HostLink`): ``offload 3`` starts a
copy to the host, ``free 3`` waits for it, ``prefetch 3`` starts the copy back.  Planners write such
steps only if they are told of a link, and nothing emits them yet (`refuse_copies`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from dtrcompile.passes.errors import PlanError, UnsupportedPlanError

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


@dataclass(frozen=True, slots=True)
class Offload:
    """Start copying a storage to the host; its bytes stay on the device until a `Free`.

    The copy stays valid to the end of the plan: a storage has one value, however often it is
    computed.
    """

    storage: int


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Allocate a storage and start copying it back from the host.

    It defines the tensors that were defined when the storage was last offloaded; the first
    `Compute` that reads one waits for the copy.
    """

    storage: int


Step: TypeAlias = Compute | Free | Boundary | Offload | Prefetch


_NUMBERED: dict[str, type[Compute | Free | Offload | Prefetch]] = {
    "compute": Compute,
    "free": Free,
    "offload": Offload,
    "prefetch": Prefetch,
}


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
                case Offload(storage):
                    lines.append(f"offload {storage}")
                case Prefetch(storage):
                    lines.append(f"prefetch {storage}")
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
            elif word in _NUMBERED and rest.isdecimal():
                steps.append(_NUMBERED[word](int(rest)))
            elif word == "boundary" and not rest:
                steps.append(Boundary())
            elif line.strip():
                raise PlanError(
                    f"line {number}: cannot read {line!r}; expected 'compute N', 'free N',"
                    " 'offload N', 'prefetch N', 'boundary', 'program ID' or 'planner NAME'"
                )
        for name in ("program", "planner"):
            if name not in fields:
                raise PlanError(f"the plan has no {name!r} line")
        return Plan(tuple(steps), fields["program"], fields["planner"])


def refuse_copies(plan: Plan, what: str) -> None:
    """For what knows `Compute` and `Free` only: refuse a plan that moves storages to the host.

    Raises:
        UnsupportedPlanError: naming the first such step.
    """
    for index, step in enumerate(plan.steps):
        if isinstance(step, (Offload, Prefetch)):
            raise UnsupportedPlanError(
                f"{what} cannot handle step {index} ({step}) of a plan by {plan.planner!r}: copies"
                " to the host are planned and replayed, not emitted. Plan without host_link."
            )
