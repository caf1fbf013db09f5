"""The plan: an immutable list of steps, printable and parseable.

Every planner returns one; `replay.replay` alone says what it costs and how much memory it needs.
The text form has one step on each line, so that a file is enough for a bug report and two plans can
be compared with ``diff``::

    dtrcompile-plan 1
    program 0123456789abcdef
    planner dtr(h_dtr_eq)
    compute 0
    free 3
    boundary
    compute 1

A storage can also be moved to the host and back: ``offload 3`` starts a copy to the host,
``free 3`` waits for it, ``prefetch 3`` starts the copy back.  Planners write such steps only if
they are given a link (`host_link.HostLink`), which is then a part of the plan: ``link 25.0 10000``
is one of 25 GB/s and 10 µs.

`Step` is a closed union: code that does something else for each kind of step ends in
`unknown_step`, so that the type checker names every such place when a kind is added.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from dtrcompile.passes.errors import PlanError, UnsupportedPlanError
from dtrcompile.passes.program.host_link import HostLink

_HEADER = "dtrcompile-plan 1"
_LINK = re.compile(r"(inf|[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?) ([0-9]+)")


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
# Of a plan that makes no copies to the host (`refuse_copies`).
DeviceStep: TypeAlias = Compute | Free | Boundary


def unknown_step(step: NoReturn) -> UnsupportedPlanError:
    """What to raise at the end of a match over the kinds of steps.

    The type checker accepts the call only where no kind is left, as it does `typing.assert_never`,
    which Python 3.10 does not have.
    """
    return UnsupportedPlanError(f"{step!r} is no step that is known here")


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
        program: fingerprint of the program that the plan is for.
        planner: name of the planner that made it.
        host_link: over which it copies; None if it makes no copies.
    """

    steps: tuple[Step, ...]
    program: str
    planner: str
    host_link: HostLink | None = None

    def to_text(self) -> str:
        """The text form; `from_text` reads it back to an equal plan."""
        lines = [_HEADER, f"program {self.program}", f"planner {self.planner}"]
        if self.host_link is not None:
            lines.append(f"link {self.host_link.bytes_per_ns!r} {self.host_link.latency_ns}")
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
                case _:
                    raise unknown_step(step)
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
        link: HostLink | None = None
        steps: list[Step] = []
        for number, line in enumerate(lines[1:], start=2):
            word, _, rest = line.strip().partition(" ")
            if word in ("program", "planner") and rest:
                fields[word] = rest
            elif word == "link" and (numbers := _LINK.fullmatch(rest)):
                link = HostLink(float(numbers[1]), int(numbers[2]))
            elif word in _NUMBERED and rest.isdecimal():
                steps.append(_NUMBERED[word](int(rest)))
            elif word == "boundary" and not rest:
                steps.append(Boundary())
            elif line.strip():
                raise PlanError(
                    f"line {number}: cannot read {line!r}; expected 'compute N', 'free N',"
                    " 'offload N', 'prefetch N', 'boundary', 'program ID', 'planner NAME' or"
                    " 'link BYTES_PER_NS LATENCY_NS'"
                )
        for name in ("program", "planner"):
            if name not in fields:
                raise PlanError(f"the plan has no {name!r} line")
        return Plan(tuple(steps), fields["program"], fields["planner"], link)

    @property
    def makes_copies(self) -> bool:
        """Whether a storage is copied to the host."""
        return any(isinstance(step, Offload) for step in self.steps)


def refuse_copies(plan: Plan, what: str) -> tuple[DeviceStep, ...]:
    """The steps of a plan, for code that cannot handle steps that move storages to the host.

    Raises:
        UnsupportedPlanError: if the plan has such a step; names the first one.
    """
    steps: list[DeviceStep] = []
    for index, step in enumerate(plan.steps):
        match step:
            case Compute() | Free() | Boundary():
                steps.append(step)
            case Offload() | Prefetch():
                raise UnsupportedPlanError(
                    f"{what} cannot handle step {index} ({step}) of a plan by {plan.planner!r},"
                    " which copies to the host. Plan without host_link."
                )
            case _:
                raise unknown_step(step)
    return tuple(steps)
