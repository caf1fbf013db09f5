"""Every exception that dtrcompile raises on purpose.

Each message says what was given, what is allowed, and what to do next.  All of them derive from
`DTRError`, so that a training script can catch them together; none is a subclass of another
library's exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches


class DTRError(Exception):
    """Base class of the errors that dtrcompile raises."""


class OptionError(DTRError, ValueError):
    """An option has an unknown name or an unusable value."""

    @classmethod
    def unknown(cls, what: str, given: object, allowed: Iterable[str]) -> OptionError:
        """The error for an unknown name; its message suggests the nearest allowed name."""
        names = sorted(allowed)
        # Upper and lower case are not distinguished, because the paper writes h_DTR.
        lowered = {name.lower(): name for name in names}
        near = [
            lowered[match]
            for match in get_close_matches(str(given).lower(), list(lowered), n=1, cutoff=0.5)
        ]
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return cls(f"unknown {what} {given!r}.{hint} Allowed: {', '.join(names)}.")


class ProgramError(DTRError):
    """A program or a program file is invalid by the rules of `program.Program`."""


class PlanError(DTRError):
    """A plan is invalid by the rules of the referee (`replay.replay`)."""


class UnsupportedPlanError(PlanError):
    """A valid plan contains steps that cannot be emitted (`plan.Offload`, `plan.Prefetch`)."""


class CaptureError(DTRError):
    """The graph contains something that cannot be represented in a program."""


class VerificationError(DTRError):
    """An emitted graph, or the schedule made from it, does not follow its plan."""


class ChangedInputError(DTRError):
    """A value must be recomputed in backward from a tensor that has been changed since forward."""

    def __init__(self) -> None:
        super().__init__(
            "a compiled graph freed the values that it had saved for backward, to make room for"
            " other graphs of the step, and one of its inputs or parameters was then changed in"
            " place before its backward, so the saved values cannot be recomputed. Run backward"
            " before the change (an optimizer's step, for instance), or pass"
            " options={'several_graphs': True}, so that the graphs need less room from the start."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return ChangedInputError, ()


class ProgramTooLargeError(DTRError):
    """A planner that searches exhaustively refuses a program, or abandons the search."""


class InfeasibleBudgetError(DTRError):
    """No plan was found that stays within the budget.

    Attributes:
        budget_bytes: the budget that was asked for.
        minimum_bytes: the smallest budget that a plan was found for, or None if no plan was found.
        operator: name of the operator at which the peak of that plan occurs.
        largest: (storage name, size_bytes) of the largest storages live at that peak, largest
            first.
        advice: further advice for the user, in one or more sentences.
        places: name of the operator, or of a storage -> where in the user's program it comes from.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        minimum_bytes: int | None = None,
        operator: str = "",
        largest: Sequence[tuple[str, int]] = (),
        advice: str = "",
        places: Mapping[str, str] | None = None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        self.operator = operator
        self.largest = tuple(largest)
        self.advice = advice
        self.places = dict(places or {})
        lines = [f"no plan fits a budget of {format_bytes(budget_bytes)}."]
        if minimum_bytes is not None:
            lines.append(
                f"The smallest budget that can be met is {minimum_bytes} bytes"
                f" ({format_bytes(minimum_bytes)})"
                + (f"; its peak occurs at operator {self._located(operator)}." if operator else ".")
            )
        if self.largest:
            live = ", ".join(
                f"{format_bytes(size)} of {self._located(name)}" for name, size in self.largest
            )
            lines.append(f"Largest storages live there: {live}.")
        lines.append(
            f"Set budget={minimum_bytes} or more, or budget='min', or make the batch smaller."
            if minimum_bytes is not None
            else "Raise the budget, or make the batch smaller."
        )
        if advice:
            lines.append(advice)
        super().__init__(" ".join(lines))

    def with_advice(self, advice: str) -> InfeasibleBudgetError:
        """A copy of this error with ``advice`` in place of its own."""
        return self._copy(advice, self.places)

    def with_places(self, places: Mapping[str, str]) -> InfeasibleBudgetError:
        """A copy of this error that says where things come from."""
        return self._copy(self.advice, places)

    def _copy(self, advice: str, places: Mapping[str, str]) -> InfeasibleBudgetError:
        return _rebuild_infeasible(
            self.budget_bytes, self.minimum_bytes, self.operator, self.largest, advice, places
        )

    def _located(self, name: str) -> str:
        place = self.places.get(name)
        return f"{name!r}" if not place else f"{name!r} ({place})"

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword-only arguments do not pickle by default.
        return _rebuild_infeasible, (
            self.budget_bytes,
            self.minimum_bytes,
            self.operator,
            self.largest,
            self.advice,
            self.places,
        )


class TimeLimitError(InfeasibleBudgetError):
    """An exact planner reached its time limit before it found a plan; a plan may still exist.

    Attributes:
        time_limit_s: the limit on the planner's search.
    """

    def __init__(self, budget_bytes: int, *, time_limit_s: float) -> None:
        super().__init__(budget_bytes)
        self.time_limit_s = time_limit_s
        self.args = (
            f"no plan was found for a budget of {format_bytes(budget_bytes)} within"
            f" {time_limit_s:g} s, but it was not proven that there is none. Raise time_limit_s, or"
            " use the planner 'auto'.",
        )

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_time_limit, (self.budget_bytes, self.time_limit_s)


class UnknownOptimizerError(DTRError):
    """The memory that an optimizer's ``step`` needs cannot be counted.

    Attributes:
        optimizer: name of the optimizer's class.
        reason: why its memory cannot be counted.
    """

    def __init__(self, optimizer: str, reason: str) -> None:
        self.optimizer, self.reason = optimizer, reason
        super().__init__(
            f"the memory that {optimizer} needs cannot be counted, because its step cannot be run"
            f" on tensors without data ({reason}). Leave the optimizer out of the options, and"
            " reserve memory for its state and its temporaries: options={'reserve': '2GiB'}."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return UnknownOptimizerError, (self.optimizer, self.reason)


class UnsupportedOptimizerError(DTRError):
    """An optimizer's update cannot be part of a graph (`dtrcompile.train_step`).

    Attributes:
        optimizer: name of the optimizer's class.
        reason: why not.
    """

    def __init__(self, optimizer: str, reason: str) -> None:
        self.optimizer, self.reason = optimizer, reason
        super().__init__(
            f"the update of {optimizer} cannot be part of the training step's graph: {reason}."
            ' Train in a loop of your own with torch.compile(model, backend="dtr"); there,'
            ' options={"optimizer": optimizer} counts its memory.'
        )

    def __reduce__(self) -> tuple[object, ...]:
        return UnsupportedOptimizerError, (self.optimizer, self.reason)


class MissingExtraError(DTRError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, needs: str, extra: str) -> None:
        self.what, self.needs, self.extra = what, needs, extra
        super().__init__(
            f"{what} needs {needs}, which is not installed. Install it with:"
            f" pip install 'dtrcompile[{extra}]'"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return MissingExtraError, (self.what, self.needs, self.extra)


class UnsupportedTorchError(DTRError):
    """The installed release of PyTorch is not one that dtrcompile was tested with.

    Attributes:
        version: the installed version.
        oldest, newest: the oldest and the newest supported release, as (major, minor).
        variable: the environment variable that lets other releases pass.
    """

    def __init__(
        self, version: str, oldest: tuple[int, int], newest: tuple[int, int], variable: str
    ) -> None:
        self.version, self.oldest, self.newest, self.variable = version, oldest, newest, variable
        first, last = f"{oldest[0]}.{oldest[1]}", f"{newest[0]}.{newest[1]}"
        after = f"{newest[0]}.{newest[1] + 1}"
        super().__init__(
            f"dtrcompile supports PyTorch {first} to {last}, but {version} is installed: install a"
            f" supported release (torch>={first},<{after}), or set the environment variable"
            f" {variable}=1 to try this one anyway"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return UnsupportedTorchError, (self.version, self.oldest, self.newest, self.variable)


class ChangedTorchError(DTRError):
    """The installed PyTorch differs from the PyTorch that dtrcompile was written for.

    Attributes:
        names: private names that no longer exist, or replaced functions whose source has changed.
        what: the problem that all of them have, for the message.
    """

    def __init__(self, names: Sequence[str], what: str) -> None:
        self.names, self.what = tuple(names), what
        super().__init__(
            f"{', '.join(names)}: {what}. Use a supported release of PyTorch; docs/releases.md"
            " describes how to support another one."
        )

    def __reduce__(self) -> tuple[object, ...]:
        return ChangedTorchError, (self.names, self.what)


def _rebuild_time_limit(budget_bytes: int, time_limit_s: float) -> TimeLimitError:
    return TimeLimitError(budget_bytes, time_limit_s=time_limit_s)


def _rebuild_infeasible(
    budget_bytes: int,
    minimum_bytes: int | None,
    operator: str,
    largest: tuple[tuple[str, int], ...],
    advice: str,
    places: Mapping[str, str],
) -> InfeasibleBudgetError:
    return InfeasibleBudgetError(
        budget_bytes,
        minimum_bytes=minimum_bytes,
        operator=operator,
        largest=largest,
        advice=advice,
        places=places,
    )


def wrapped_error(error: BaseException) -> DTRError | None:
    """``error``, or the error that PyTorch wrapped in it, if that is a `DTRError`; else None."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        if isinstance(current, DTRError):
            return current
        seen.add(id(current))
        pending += [
            current.__context__,
            current.__cause__,
            getattr(current, "inner_exception", None),
        ]
    return None


def format_bytes(size_bytes: float) -> str:
    """``size_bytes`` in a readable form, such as ``'93.0 MiB'``."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
