"""The options of ``torch.compile(model, backend="dtr", options={...})``, as one frozen value.

`Options.parse` merges four sources, the first that names an option wins:

1. the ``options`` mapping given to ``torch.compile``;
2. `set_defaults`, for scripts that choose the backend but cannot pass options;
3. the environment variable ``DTRCOMPILE_BUDGET`` (the budget only);
4. the built-in defaults of `Options`.

Everything is checked here, before any graph is captured, so that a typing mistake costs no compile.
This module imports neither torch nor the planners until a name has to be checked.
"""

from __future__ import annotations

import enum
import logging
import math
import numbers
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any, TypeAlias

from dtrcompile.passes.errors import OptionError, format_bytes

log = logging.getLogger("dtrcompile")

BUDGET_VARIABLE = "DTRCOMPILE_BUDGET"

COST_MODELS = ("roofline", "measured")
COMPILERS = ("inductor", "eager")

# torch._inductor.list_mode_options(); a test compares, so that torch is not imported for it here.
INDUCTOR_MODES = (
    "default",
    "lite",
    "max-autotune",
    "max-autotune-no-cudagraphs",
    "reduce-overhead",
)

_MOST_BYTES = 2**63 - 1
_UNIT_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_AMOUNT = re.compile(r"([+-]?[0-9]{1,30}(?:\.[0-9]{0,30})?|[+-]?\.[0-9]{1,30})\s*([a-zA-Z]*|%)")
_FORMS = (
    "an int (bytes), a string such as '8GiB', '500MB' or '40%', a float in (0, 1] (that share of"
    " the unbudgeted peak), 'min' or 'auto'"
)


class BudgetKind(enum.Enum):
    """How an amount of memory was given."""

    BYTES = "bytes"
    SHARE = "share"
    MIN = "min"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Budget:
    """An amount of memory, as the user gave it.

    Attributes:
        kind: which of the two next fields, if any, holds the amount.
        size_bytes: for `BudgetKind.BYTES`.
        share: of the unbudgeted peak, for `BudgetKind.SHARE`; exact, so that 29 % of 100 is 29.
        text: what the user wrote, for messages and reports; two budgets that mean the same are
            equal whatever their text.
    """

    kind: BudgetKind
    size_bytes: int = 0
    share: Fraction = Fraction(0)
    text: str = field(default="", compare=False)

    @staticmethod
    def parse(value: object, *, what: str = "option 'budget'") -> Budget:
        """Read any accepted form.

        An int counts bytes and a float is a share: ``1`` is one byte, ``1.0`` the whole
        unbudgeted peak.  Numpy's integer and float scalars count as such.

        Args:
            value: an int, a float in (0, 1], a string, or a `Budget` (returned as it is).
            what: how messages call it.

        Raises:
            OptionError: if it has none of these forms, or is not positive.
        """
        budget = _parse_amount(value, what)
        if budget.kind is BudgetKind.BYTES and budget.size_bytes < 1:
            raise OptionError(f"{what} must be positive, not {_show(value)}. Give {_FORMS}.")
        if budget.kind is BudgetKind.SHARE and budget.share <= 0:
            raise OptionError(
                f"{what} must be a share above 0, not {_show(value)}."
                " For the smallest budget that a plan can be found for, give 'min'."
            )
        return budget

    def resolve(self, baseline_peak_bytes: int, available_bytes: int | None = None) -> int | None:
        """The amount in bytes, or None for ``"min"``.

        Args:
            baseline_peak_bytes: the unbudgeted peak, of which a share is taken.
            available_bytes: what the device can give, None where that cannot be known.

        Raises:
            OptionError: for ``"auto"`` without ``available_bytes``.
        """
        match self.kind:
            case BudgetKind.BYTES:
                return self.size_bytes
            case BudgetKind.SHARE:
                return math.floor(self.share * baseline_peak_bytes)
            case BudgetKind.MIN:
                return None
            case BudgetKind.AUTO:
                if available_bytes is None:
                    raise OptionError(
                        "a budget is needed: budget='auto' takes what a CUDA device has free, and"
                        " this device does not say what it has. Pass options={'budget': '8GiB'} to"
                        f" torch.compile, call dtrcompile.set_defaults(budget='8GiB'), or set"
                        f" {BUDGET_VARIABLE}=8GiB. This graph needs"
                        f" {format_bytes(baseline_peak_bytes)} without a budget."
                    )
                return available_bytes

    def __str__(self) -> str:
        return self.text or self.canonical()

    def canonical(self) -> str:
        """The same text for all budgets that mean the same."""
        match self.kind:
            case BudgetKind.BYTES:
                return f"{self.size_bytes}B"
            case BudgetKind.SHARE:
                return f"share {self.share}"
            case _:
                return str(self.kind.value)


_ZERO = Budget(BudgetKind.BYTES, 0, text="0")
_AUTO = Budget(BudgetKind.AUTO, text="auto")


def _parse_reserve(value: object) -> Budget:
    what = "option 'reserve'"
    reserve = _parse_amount(value, what)
    if reserve.kind in (BudgetKind.MIN, BudgetKind.AUTO):
        raise OptionError(
            f"{what} must be an amount, not {_show(value)}: it is subtracted from the budget."
            " Give an int (bytes, 0 for none), a string such as '2GiB' or '10%', or a share of the"
            " unbudgeted peak in [0, 1]."
        )
    if reserve.size_bytes < 0 or reserve.share < 0:
        raise OptionError(f"{what} must not be negative: {_show(value)}. Give 0 for none.")
    return reserve


def _parse_amount(value: object, what: str) -> Budget:
    """The amount, of either sign; the callers decide which signs make sense."""
    if isinstance(value, Budget):
        return value
    if isinstance(value, str):
        return _parse_text(value, what)
    if isinstance(value, bool):
        raise OptionError(f"{what} must be an amount of memory, not {value}. Give {_FORMS}.")
    if isinstance(value, numbers.Integral):
        size_bytes = int(value)
        if abs(size_bytes) > _MOST_BYTES:
            raise OptionError(f"{what} is more bytes than any device has (above 2**63 - 1).")
        return Budget(BudgetKind.BYTES, size_bytes, text=str(size_bytes))
    if isinstance(value, numbers.Real):
        share = float(value)
        if not math.isfinite(share):
            raise OptionError(f"{what} must be finite, not {share}. Give {_FORMS}.")
        if share > 1:
            hint = f": {int(share)}" if share.is_integer() and share < _MOST_BYTES else ""
            raise OptionError(
                f"{what} is the float {share}, and a float is a share of the unbudgeted peak, at"
                f" most 1.0. Use an int for bytes{hint}, or a string such as '8GiB'."
            )
        # The decimal that was written, not the binary fraction next to it.
        return Budget(BudgetKind.SHARE, share=Fraction(str(share)), text=str(share))
    raise OptionError(
        f"{what} cannot be read from {_show(value)} of type {type(value).__name__}. Give {_FORMS};"
        " leave the option out for its default."
    )


def _parse_text(text: str, what: str) -> Budget:
    word = text.strip().lower()
    if word == "min":
        return Budget(BudgetKind.MIN, text="min")
    if word == "auto":
        return _AUTO
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise OptionError(f"{what} cannot be read from {_show(text)}. Give {_FORMS}.")
    number, unit = Fraction(match[1]), match[2].lower()
    if unit == "%":
        if number > 100:
            raise OptionError(
                f"{what} is {_show(text)}, and a percentage is a share of the unbudgeted peak, at"
                " most 100%. Give bytes ('8GiB') for more room than the program can use."
            )
        return Budget(BudgetKind.SHARE, share=number / 100, text=text.strip())
    if unit in ("k", "m", "g", "t", "ki", "mi", "gi", "ti"):
        big = unit[0].upper()
        raise OptionError(
            f"{what} is {_show(text)}, whose unit is unclear."
            f" Write {match[1]}{'k' if big == 'K' else big}B (powers of 1000) or"
            f" {match[1]}{big}iB (powers of 1024)."
        )
    if unit not in _UNIT_BYTES:
        raise OptionError(
            f"{what} is {_show(text)}, and {match[2]!r} is no unit."
            " Units: B, kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024), %."
        )
    if unit == "" and "." in match[1]:
        raise OptionError(
            f"{what} is {_show(text)}, without a unit."
            f" Write {float(number) * 100:g}% for a share of the unbudgeted peak, or a unit of"
            " bytes, such as '8GiB'."
        )
    size_bytes = math.floor(number * _UNIT_BYTES[unit])
    if abs(size_bytes) > _MOST_BYTES:
        raise OptionError(
            f"{what} is {_show(text)}, more bytes than any device has (above 2**63 - 1)."
        )
    return Budget(BudgetKind.BYTES, size_bytes, text=text.strip())


@dataclass(frozen=True, slots=True)
class _FrozenList:
    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _FrozenDict:
    items: tuple[tuple[str, Any], ...]


FrozenMapping: TypeAlias = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Options:
    """Every option, checked.  Made by `parse`.

    Attributes:
        budget: the most bytes that one step may hold; see ``docs/memory-model.md``.
        reserve: taken off the budget, for what the graphs cannot see (optimizer state, another
            model); zero by default.
        planner: a name in `dtrcompile.passes.planners.PLANNERS`, or ``"auto"``.
        heuristic: a name in `dtrcompile.passes.heuristics.HEURISTICS`; None lets the planner
            choose.
        planning_s: about how many seconds planner ``"auto"`` may take for one plan, of which a
            compilation makes up to half a dozen; it stands for a fixed amount of work, so that the
            plan does not depend on the machine.  None: under one for a thousand operators, at
            most 5.
        cost_model: ``"roofline"`` (analytic) or ``"measured"`` (each operator timed once).
        compiler: ``"inductor"``, or ``"eager"`` (the reference executor, which counts bytes).
        inductor: passed on to Inductor as configuration patches, ``"mode"`` included; frozen, see
            `inductor_patches`.
        verify: check the emitted graphs and Inductor's final schedule against the plan.
        several_graphs: the step is known to be more than one graph, so each saves as little as it
            can until all have been seen.  False: so do those that are known to be followed.
        most_plans: how many plans a graph with symbolic sizes may have at once, each for other
            sizes.
    """

    budget: Budget = _AUTO
    reserve: Budget = _ZERO
    planner: str = "auto"
    heuristic: str | None = None
    planning_s: float | None = None
    cost_model: str = "roofline"
    compiler: str = "inductor"
    inductor: FrozenMapping = ()
    verify: bool = True
    several_graphs: bool = False
    most_plans: int = 4

    @staticmethod
    def parse(options: Mapping[str, Any] | None = None) -> Options:
        """Check ``options`` and fill in what they leave out (see the module docstring).

        Raises:
            OptionError: for an unknown name (the nearest is suggested) or an unusable value.
        """
        values = _checked(options)
        defaults = _defaults.values
        merged = {**defaults, **values}
        if "budget" not in merged and (text := os.environ.get(BUDGET_VARIABLE, "").strip()):
            merged["budget"] = Budget.parse(text, what=f"environment variable {BUDGET_VARIABLE}")
        return Options(**merged)

    def resolve_budget_bytes(
        self, baseline_peak_bytes: int, available_bytes: int | None = None
    ) -> int | None:
        """The budget less the reserve, in bytes; None for ``"min"``.

        Raises:
            OptionError: for ``"auto"`` without ``available_bytes``, or when the reserve leaves
                nothing.
        """
        budget_bytes = self.budget.resolve(baseline_peak_bytes, available_bytes)
        reserve_bytes = self.reserve.resolve(baseline_peak_bytes)
        if budget_bytes is None or reserve_bytes is None:
            return None
        if reserve_bytes and budget_bytes <= reserve_bytes:
            raise OptionError(
                f"option 'reserve' ({self.reserve} = {reserve_bytes} bytes) leaves nothing of the"
                f" budget ({self.budget} = {budget_bytes} bytes). Raise the budget or lower the"
                " reserve."
            )
        return budget_bytes - reserve_bytes

    @property
    def is_whole_peak(self) -> bool:
        """Whether the budget is what is held without one, less no reserve."""
        budget, reserve = self.budget, self.reserve
        return (
            budget.kind is BudgetKind.SHARE
            and budget.share == 1
            and not (reserve.share or reserve.size_bytes)
        )

    @property
    def is_share(self) -> bool:
        """Whether the budget, or the reserve, is a share of a training step's unbudgeted peak."""
        return BudgetKind.SHARE in (self.budget.kind, self.reserve.kind)

    @property
    def inductor_mode(self) -> str | None:
        """Inductor's mode, None where none was given."""
        return dict(self.inductor).get("mode")

    @property
    def inductor_patches(self) -> dict[str, Any]:
        """A new dict of Inductor's configuration patches, the mode left out."""
        return {name: _thaw(value) for name, value in self.inductor if name != "mode"}

    def planner_options(self) -> dict[str, Any]:
        """What `passes.planners.make_planner` takes beside the name."""
        given = {"heuristic": self.heuristic, "planning_s": self.planning_s}
        return {name: value for name, value in given.items() if value is not None}

    def cache_key(self) -> str:
        """Equal for equal options, in any process; covers every option."""
        parts = []
        for f in fields(self):
            value = getattr(self, f.name)
            text = value.canonical() if isinstance(value, Budget) else _key(value)
            parts.append(f"{f.name}={text}")
        return "; ".join(parts)


def set_defaults(**options: Any) -> None:
    """Set options for every later compilation in this process that does not name them itself.

    For scripts that choose ``backend="dtr"`` but cannot pass options to it::

        dtrcompile.set_defaults(budget="8GiB")

    Options that an earlier call set, and this one does not name, stay as they are;
    `reset_defaults` forgets them all.

    Graphs that are compiled already keep what they were compiled with; a warning then names them.

    Raises:
        OptionError: as `Options.parse`; nothing is changed then.
    """
    values = _checked(options)
    _defaults.values = {**_defaults.values, **values}
    late = {
        graph: changed
        for graph, used in _defaults.used.items()
        if (changed := {n for n, value in values.items() if n in used and used[n] != value})
    }
    if late:
        changed = set().union(*late.values())
        log.warning(
            "set_defaults(%s) comes after graph%s %s had been compiled with the earlier default,"
            " which %s. It holds for what is compiled from here on. Call set_defaults before the"
            " model first runs, or torch._dynamo.reset() after it to have all compiled again.",
            ", ".join(f"{n}={_show(options[n])}" for n in sorted(changed)),
            "s" if len(late) > 1 else "",
            ", ".join(map(str, sorted(late))),
            "they keep" if len(late) > 1 else "it keeps",
        )


def reset_defaults() -> None:
    """Forget everything that `set_defaults` was told."""
    _defaults.values = {}


def defaults_used(graph: int, given: Mapping[str, Any] | None, parsed: Options) -> None:
    """A graph was compiled with ``parsed``, of which only some had been ``given`` with it."""
    _defaults.used[graph] = {
        f.name: getattr(parsed, f.name) for f in fields(Options) if f.name not in (given or ())
    }


def forget_defaults_used() -> None:
    """No graph is compiled any more."""
    _defaults.used = {}


class _Defaults:
    """What `set_defaults` was told; replaced as a whole, so that a reader never sees half of it."""

    values: dict[str, Any]
    used: dict[int, dict[str, Any]]  # graph -> options that it was not given itself

    def __init__(self) -> None:
        self.values = {}
        self.used = {}


_defaults = _Defaults()


def _checked(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options that were given, each turned into its field's type."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise OptionError(
            f"options must be a mapping from names to values, such as {{'budget': '8GiB'}}, not"
            f" {_show(options)} of type {type(options).__name__}."
        )
    names = [f.name for f in fields(Options)]
    values: dict[str, Any] = {}
    for name, value in options.items():
        if not isinstance(name, str):
            raise OptionError(
                f"option names must be strings, not {_show(name)} of type {type(name).__name__}."
                f" Allowed: {', '.join(sorted(names))}."
            )
        match name:
            case "budget":
                values[name] = Budget.parse(value)
            case "reserve":
                values[name] = _parse_reserve(value)
            case "planner":
                values[name] = _parse_name(value, name, _planner_names())
            case "heuristic":
                values[name] = (
                    None if value is None else _parse_name(value, name, _heuristic_names())
                )
            case "planning_s":
                values[name] = None if value is None else _parse_seconds(value, name)
            case "cost_model":
                values[name] = _parse_name(value, name, COST_MODELS)
            case "compiler":
                values[name] = _parse_name(value, name, COMPILERS)
            case "inductor":
                values[name] = _parse_inductor(value)
            case "verify" | "several_graphs":
                if not isinstance(value, bool):
                    raise OptionError(
                        f"option {name!r} must be True or False, not {_show(value)}"
                        f" of type {type(value).__name__}."
                    )
                values[name] = value
            case "most_plans":
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise OptionError(
                        f"option {name!r} must be a whole number, 1 or more, not {_show(value)}"
                        f" of type {type(value).__name__}."
                    )
                values[name] = value
            case _:
                raise OptionError.unknown("option", name, names)
    return values


def _parse_seconds(value: object, name: str) -> float:
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not 0 <= value < float("inf")
    ):
        raise OptionError(
            f"option {name!r} must be a number of seconds, 0 or more, not {_show(value)}"
            f" of type {type(value).__name__}."
        )
    return float(value)


def _planner_names() -> set[str]:
    from dtrcompile.passes.planners import PLANNERS

    return {"auto", *PLANNERS}


def _heuristic_names() -> set[str]:
    from dtrcompile.passes.heuristics import HEURISTICS

    return set(HEURISTICS)


def _parse_name(value: object, option: str, allowed: Iterable[str]) -> str:
    if isinstance(value, str) and value in allowed:
        return value
    what = option.replace("_", " ")
    if isinstance(value, str):
        raise OptionError.unknown(what, value, allowed)
    raise OptionError(
        f"option {option!r} must be the name of a {what}, not {_show(value)} of type"
        f" {type(value).__name__}. Allowed: {', '.join(sorted(allowed))}."
    )


def _parse_inductor(value: object) -> FrozenMapping:
    what = "option 'inductor'"
    if not isinstance(value, Mapping):
        raise OptionError(
            f"{what} must be a mapping of Inductor's configuration, such as"
            f" {{'max_autotune': True}} or {{'mode': 'max-autotune'}}, not {_show(value)} of type"
            f" {type(value).__name__}."
        )
    for name in value:
        if not isinstance(name, str):
            raise OptionError(
                f"{what} has the key {_show(name)} of type {type(name).__name__};"
                " its keys must be strings, the names in torch._inductor.config."
            )
    if "custom_partitioner_fn" in value:
        raise OptionError(
            f"{what} must not set 'custom_partitioner_fn': that is where dtrcompile itself plans."
            " Leave it out, or use backend='inductor'."
        )
    if "mode" in value:
        _parse_inductor_mode(value["mode"])
    return tuple(sorted((name, _freeze(item, f"{what}[{name!r}]")) for name, item in value.items()))


def _parse_inductor_mode(mode: object) -> None:
    if not isinstance(mode, str):
        raise OptionError(
            f"option 'inductor' has the mode {_show(mode)} of type {type(mode).__name__}."
            f" Allowed: {', '.join(INDUCTOR_MODES)}."
        )
    if mode not in INDUCTOR_MODES:
        raise OptionError.unknown("Inductor mode", mode, INDUCTOR_MODES)


def _freeze(value: Any, what: str) -> Any:
    """A hashable copy of ``value``, from which `_thaw` makes an equal one again."""
    if isinstance(value, list):
        return _FrozenList(tuple(_freeze(item, what) for item in value))
    if isinstance(value, tuple):
        return tuple(_freeze(item, what) for item in value)
    if isinstance(value, Mapping):
        return _FrozenDict(
            tuple(sorted(((k, _freeze(v, what)) for k, v in value.items()), key=_by_name))
        )
    try:
        hash(value)
    except TypeError:
        raise OptionError(
            f"{what} is of type {type(value).__name__}, which cannot be kept unchanged."
            " Give numbers, strings, lists, dicts, or an object that can be hashed."
        ) from None
    return value


def _by_name(item: tuple[Any, Any]) -> str:
    return repr(item[0])


def _thaw(value: Any) -> Any:
    match value:
        case _FrozenList(items):
            return [_thaw(item) for item in items]
        case _FrozenDict(items):
            return {name: _thaw(item) for name, item in items}
        case tuple():
            return tuple(_thaw(item) for item in value)
        case _:
            return value


def _key(value: Any) -> str:
    """A text that says what ``value`` is and holds no memory address."""
    match value:
        case _FrozenList(items):
            return f"[{', '.join(map(_key, items))}]"
        case _FrozenDict(items):
            return f"{{{', '.join(f'{_key(k)}: {_key(v)}' for k, v in items)}}}"
        case tuple():
            return f"({', '.join(map(_key, value))})"
        case None | bool() | int() | float() | str() | bytes():
            return repr(value)
        case enum.Enum():
            return f"{type(value).__qualname__}.{value.name}"
    uuid = getattr(value, "uuid", None)
    if callable(uuid):  # torch's own way to name a custom pass in a cache key
        return f"{type(value).__module__}.{type(value).__qualname__}:{uuid()!r}"
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):
        return f"{value.__module__}.{name}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _show(value: object) -> str:
    """``repr``, kept short: what was given may be a whole model."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
