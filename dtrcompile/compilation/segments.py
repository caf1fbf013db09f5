"""Budget ``"auto"`` where PyTorch's allocator takes memory from the device in whole segments.

A budget counts what the allocator hands out.  What it takes from the device is more: segments of
20 MiB, or of a multiple of 2 MiB, from which it hands out pieces (`passes.device.caching_allocator`
has the rules).  A budget in bytes is the user's, who may know what else is free.  ``"auto"`` is all
that is free, so there the segments have to fit.  With expandable segments they do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from dtrcompile.compilation.session import Session
from dtrcompile.options import BudgetKind
from dtrcompile.passes.device.allocators import allocator_of, library_blocks
from dtrcompile.passes.device.optimizer_step import Request
from dtrcompile.passes.errors import InfeasibleBudgetError, format_bytes
from dtrcompile.passes.fitting.fit import Outcome
from dtrcompile.passes.fitting.inductor_model import ScheduleSizeModel
from dtrcompile.passes.fitting.reserved import reserved_bytes
from dtrcompile.passes.inductor.step import device_of, trace

log = logging.getLogger("dtrcompile")

_MAX_ROUNDS = 4
# Divides the room; a plan that holds only a little less often takes the same segments.
_LEAST_STEP_DIVISOR = 32


def reserved_by(
    outcome: Outcome, optimizers: Sequence[tuple[Sequence[Request], Sequence[Request]]] = ()
) -> int | None:
    """What the allocator takes from the device over some steps of what was planned.

    None where the schedule was not measured, and on a device whose allocator keeps nothing.

    Args:
        optimizers: what each asks for in its first step, and in any later one.
    """
    model = outcome.measured.by_sizes
    if not isinstance(model, ScheduleSizeModel):
        return None
    device = device_of(model.lowered.captured)
    if device.type != "cuda":
        return None
    return reserved_bytes(
        trace(model.lowered),
        optimizers,
        expandable_segments=allocator_of(device).splits_all,
        library_blocks=library_blocks(device),
    )


def fitted_in_segments(session: Session, fit: Callable[[], Outcome]) -> Outcome:
    """What is planned for the session's budget; for ``"auto"``, such that its segments fit too.

    If they do not, less is made available than the plan holds, by as much as the segments are too
    large or a little more, and the step is planned again.  Where that leads to no plan, the one
    that takes the least is returned: the allocator gives segments back where it finds no room,
    which is not followed here.

    Args:
        fit: plans for what the session says is available.

    Raises:
        InfeasibleBudgetError: if there is no plan to begin with.
    """
    best = outcome = fit()
    given_bytes = session.available_bytes
    if (
        session.options.budget.kind is not BudgetKind.AUTO
        or session.assignment.budget_bytes is not None
        or given_bytes is None
        or best.budget_bytes is None
    ):
        return best
    room_bytes = best.budget_bytes - best.others.outside_bytes
    taken_bytes = reserved_by(best)
    available_bytes = given_bytes
    for _ in range(_MAX_ROUNDS):
        if taken_bytes is None or taken_bytes <= room_bytes:
            break
        log.debug(
            "segments of %s do not fit into %s", *map(format_bytes, (taken_bytes, room_bytes))
        )
        available_bytes -= max(
            taken_bytes - room_bytes, room_bytes // _LEAST_STEP_DIVISOR, _unused_bytes(outcome) + 1
        )
        session.available_bytes = available_bytes
        try:
            outcome = fit()
        except InfeasibleBudgetError:
            break
        outcome_bytes = reserved_by(outcome)
        if outcome_bytes is None or outcome_bytes < taken_bytes:
            best, given_bytes = outcome, available_bytes
            taken_bytes = outcome_bytes
    session.available_bytes = given_bytes
    return best


def _unused_bytes(outcome: Outcome) -> int:
    """Of the budget.  The same plan is found for all budgets that it fits in."""
    assert outcome.budget_bytes is not None
    held_bytes = outcome.others.outside_bytes + outcome.measured.peak_with(outcome.others)
    return outcome.budget_bytes - held_bytes
