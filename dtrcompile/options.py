"""The options of ``torch.compile(model, backend="dtr", options={...})``, as one frozen value.

`Options.parse` merges four sources.  For each option, the first source that names it wins:

1. the ``options`` mapping given to ``torch.compile``;
2. `set_defaults`, for scripts that choose the backend but cannot pass options;
3. environment variables, one for each option whose value can be written as text:
   ``DTRCOMPILE_BUDGET``, ``DTRCOMPILE_SEVERAL_GRAPHS`` and so on (`variable_of`);
4. the built-in defaults of `Options`.

Everything is checked here, before any graph is captured, so that a typing error is reported before
anything is compiled.  This module imports torch and the planners only when a value has to be
checked against them.
"""

from __future__ import annotations

import enum
import json
import logging
import math
import numbers
import os
import re
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from fractions import Fraction
from typing import Any, TypeAlias

from dtrcompile.passes.errors import OptionError, format_bytes

log = logging.getLogger("dtrcompile")

_PREFIX = "DTRCOMPILE_"
BUDGET_VARIABLE = f"{_PREFIX}BUDGET"
# Options whose values cannot be written as text, so that they have no environment variable.
_OBJECTS = ("optimizer",)

COST_MODELS = ("roofline", "measured")
COMPILERS = ("inductor", "eager")

# A copy of torch._inductor.list_mode_options(), so that torch is not imported here; a test compares
# the two.
INDUCTOR_MODES = (
    "default",
    "lite",
    "max-autotune",
    "max-autotune-no-cudagraphs",
    "reduce-overhead",
)

_MAX_BYTES = 2**63 - 1
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
_BANDWIDTH = re.compile(r"([0-9]+(?:\.[0-9]+)?\s*[kKMGT]i?B)\s*/\s*s")
_FORMS = (
    "an int (bytes), a string such as '8GiB', '500MB' or '40%', a float in (0, 1] (that share of"
    " the unbudgeted peak), 'min' or 'auto'"
)


class BudgetKind(enum.Enum):
    """How an amount of memory was given.

    `OPTIMIZER` is possible only for option ``reserve``: the memory that the optimizers need.
    """

    BYTES = "bytes"
    SHARE = "share"
    MIN = "min"
    AUTO = "auto"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class Budget:
    """An amount of memory, as the user gave it.

    Attributes:
        kind: how the amount was given; it decides which of the next two fields is used, if any.
        size_bytes: the amount, for `BudgetKind.BYTES`.
        share: the share of the unbudgeted peak, for `BudgetKind.SHARE`; a fraction, so that 29 %
            of 100 is exactly 29.
        text: what the user wrote, for messages and reports; it does not count when budgets are
            compared.
    """

    kind: BudgetKind
    size_bytes: int = 0
    share: Fraction = Fraction(0)
    text: str = field(default="", compare=False)

    @staticmethod
    def parse(value: object, *, what: str = "option 'budget'") -> Budget:
        """Read a budget in any of the accepted forms.

        An int is a number of bytes and a float is a share: ``1`` is one byte, ``1.0`` the whole
        unbudgeted peak.  NumPy's integer and float scalars are treated as ints and floats.

        Args:
            value: an int, a float in (0, 1], a string, or a `Budget` (returned unchanged).
            what: the name of the value in error messages.

        Raises:
            OptionError: if the value has none of these forms, or is not positive.
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

    def resolve(
        self,
        baseline_peak_bytes: int,
        available_bytes: int | None = None,
        mode: str | None = None,
    ) -> int | None:
        """The amount in bytes, or None for ``"min"``.

        Args:
            baseline_peak_bytes: the unbudgeted peak, which a share is multiplied by.
            available_bytes: the memory that the device has free, or None if that is unknown.
            mode: Inductor's, for what an error tells the user to pass.

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
            case BudgetKind.OPTIMIZER:
                return 0  # `beside` adds the optimizers' memory, once the optimizers are known
            case BudgetKind.AUTO:
                if available_bytes is None:
                    wanted: dict[str, object] = {"budget": "8GiB"}
                    # torch.compile takes either a mode or options.
                    instead = "" if mode is None else f" in place of mode='{mode}'"
                    if mode is not None:
                        wanted["inductor"] = {"mode": mode}
                    raise OptionError(
                        "a budget is needed: budget='auto' takes what a CUDA device has free, and"
                        f" this device does not say what it has. Pass options={wanted} to"
                        f" torch.compile{instead}, call dtrcompile.set_defaults(budget='8GiB'), or"
                        f" set {BUDGET_VARIABLE}=8GiB. This graph needs"
                        f" {format_bytes(baseline_peak_bytes)} without a budget."
                    )
                return available_bytes

    def __str__(self) -> str:
        return self.text or self.canonical()

    def canonical(self) -> str:
        """A text that is the same for all equal budgets."""
        match self.kind:
            case BudgetKind.BYTES:
                return f"{self.size_bytes}B"
            case BudgetKind.SHARE:
                return f"share {self.share}"
            case _:
                return str(self.kind.value)


_ZERO = Budget(BudgetKind.BYTES, 0, text="0")
_AUTO = Budget(BudgetKind.AUTO, text="auto")


def _parse_reserve(value: object, what: str) -> Budget:
    if isinstance(value, str) and value.strip().lower() == "optimizer":
        return Budget(BudgetKind.OPTIMIZER, text="optimizer")
    reserve = _parse_amount(value, what)
    if reserve.kind in (BudgetKind.MIN, BudgetKind.AUTO):
        raise OptionError(
            f"{what} must be an amount, not {_show(value)}: it is subtracted from the budget."
            " Give an int (bytes, 0 for none), a string such as '2GiB' or '10%', a share of the"
            " unbudgeted peak in [0, 1], or 'optimizer' (the memory that the model's optimizers"
            " need)."
        )
    if reserve.size_bytes < 0 or reserve.share < 0:
        raise OptionError(f"{what} must not be negative: {_show(value)}. Give 0 for none.")
    return reserve


def _parse_amount(value: object, what: str) -> Budget:
    """The amount, which may be negative: the callers decide whether that is an error."""
    if isinstance(value, Budget):
        return value
    if isinstance(value, str):
        return _parse_text(value, what)
    if isinstance(value, bool):
        raise OptionError(f"{what} must be an amount of memory, not {value}. Give {_FORMS}.")
    if isinstance(value, numbers.Integral):
        size_bytes = int(value)
        if abs(size_bytes) > _MAX_BYTES:
            raise OptionError(f"{what} is more bytes than any device has (above 2**63 - 1).")
        return Budget(BudgetKind.BYTES, size_bytes, text=str(size_bytes))
    if isinstance(value, numbers.Real):
        share = float(value)
        if not math.isfinite(share):
            raise OptionError(f"{what} must be finite, not {share}. Give {_FORMS}.")
        if share > 1:
            hint = f": {int(share)}" if share.is_integer() and share < _MAX_BYTES else ""
            raise OptionError(
                f"{what} is the float {share}, and a float is a share of the unbudgeted peak, at"
                f" most 1.0. Use an int for bytes{hint}, or a string such as '8GiB'."
            )
        # The decimal number that the user wrote, not the nearest binary fraction.
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
    if abs(size_bytes) > _MAX_BYTES:
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


class ObjectsBeside:
    """Optimizers, and modules such as an average of the weights, that no graph contains.

    The objects are held by weak references.  They are not part of a cache key; the number of bytes
    that they need is.
    """

    __slots__ = ("_references",)

    def __init__(self, objects: Iterable[Any] = ()) -> None:
        self._references = tuple(weakref.ref(o) for o in objects)

    def alive(self) -> list[Any]:
        """The objects that still exist."""
        return [o for reference in self._references if (o := reference()) is not None]

    def __bool__(self) -> bool:
        return bool(self._references)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectsBeside) and self._references == other._references

    def __hash__(self) -> int:
        return hash(tuple(map(id, self._references)))

    def __reduce__(self) -> tuple[object, ...]:
        return ObjectsBeside, ()  # for cache keys: another process has other objects

    def uuid(self) -> str:
        """The same for all objects, because all graphs that are given any share one ledger."""
        return "given" if self else "none"


_NOTHING_BESIDE = ObjectsBeside()


@dataclass(frozen=True, slots=True)
class Options:
    """All options, checked; `parse` makes them.

    Attributes:
        budget: the most bytes that one step may hold; see ``docs/memory-model.md``.
        reserve: subtracted from the budget, for memory that the graphs cannot see (another model, a
            gradient buffer); zero by default.  With `BudgetKind.OPTIMIZER`, the optimizers of the
            model's parameters are found and then counted as if option ``optimizer`` named them.
        optimizer: optimizers, and averages of the weights, whose memory is counted; the budget then
            covers the whole step, ``optimizer.step()`` included.
        planner: a name in `dtrcompile.passes.planning.planners.PLANNERS`, or ``"auto"``.
        heuristic: a name in `dtrcompile.passes.planning.heuristics.HEURISTICS`; None lets the
            planner choose.
        planning_s: about how many seconds planner ``"auto"`` may take for one plan; a compilation
            makes up to half a dozen plans.  The number is converted into a fixed amount of work, so
            that the plan does not depend on the machine.  None: less than one second for a thousand
            operators, at most 5 seconds.
        lowering_s: about how many seconds one search for a plan may lower plans with Inductor in
            order to count what they hold.  The number is converted into a number of operators, so
            that the plan does not depend on the machine; the smallest plan is always lowered.
            None: as many as the search needs.
        cost_model: ``"roofline"`` (analytic) or ``"measured"`` (each operator timed once).
        compiler: ``"inductor"``, or ``"eager"`` (the reference executor, which counts bytes).
        inductor: configuration patches that are passed on to Inductor, ``"mode"`` included, in a
            frozen form (see `inductor_patches`).
        verify: check the emitted graphs and Inductor's final schedule against the plan.
        several_graphs: the user says that the step consists of more than one graph, so every graph
            saves as little as possible until all graphs have been seen.  False: only graphs that
            are known to be followed by another one do so.
        most_plans: the most plans that a graph with symbolic sizes may have at once, each for a
            range of sizes.
        offload: values may be copied to the host and back over a link of this bandwidth, in bytes
            per ns (10⁹ bytes/s), where that costs less than to compute them again; ``"measured"``:
            over the device's own; None: never.
        chunking: large values may be computed in chunks where a training step would otherwise not
            fit, or would cost more.
        whole_step: each graph without a backward is a whole training step, the optimizer's update
            included.  `dtrcompile.train_step` sets it.
    """

    budget: Budget = _AUTO
    reserve: Budget = _ZERO
    optimizer: ObjectsBeside = _NOTHING_BESIDE
    planner: str = "auto"
    heuristic: str | None = None
    planning_s: float | None = None
    lowering_s: float | None = None
    cost_model: str = "roofline"
    compiler: str = "inductor"
    inductor: FrozenMapping = ()
    verify: bool = True
    several_graphs: bool = False
    most_plans: int = 4
    offload: float | str | None = None
    chunking: bool = True
    whole_step: bool = False

    @staticmethod
    def parse(options: Mapping[str, Any] | None = None) -> Options:
        """Check ``options`` and fill in those that are not given (see the module docstring).

        Raises:
            OptionError: for an unknown name (the nearest is suggested) or an unusable value.
        """
        given = {**_defaults.values, **_checked(options)}
        return Options(**{**_from_environment(without=given), **given})

    @property
    def counts_optimizers(self) -> bool:
        """Whether the budget covers the whole step, ``optimizer.step()`` included."""
        return bool(self.optimizer) or self.finds_optimizers

    @property
    def finds_optimizers(self) -> bool:
        """Whether dtrcompile has to find the optimizers of the model's parameters."""
        return self.reserve.kind is BudgetKind.OPTIMIZER

    def resolve_budget_bytes(
        self, baseline_peak_bytes: int, available_bytes: int | None = None
    ) -> int | None:
        """The budget less the reserve, in bytes; None for ``"min"``.

        Raises:
            OptionError: for ``"auto"`` without ``available_bytes``, or if the reserve is as large
                as the budget.
        """
        budget_bytes = self.budget.resolve(baseline_peak_bytes, available_bytes, self.inductor_mode)
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
        """Whether the budget is 100 % of the unbudgeted peak, with no reserve."""
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
        """Inductor's mode, or None if none was given."""
        return dict(self.inductor).get("mode")

    @property
    def inductor_patches(self) -> dict[str, Any]:
        """A new dict of Inductor's configuration patches, without the mode."""
        return {name: _thaw(value) for name, value in self.inductor if name != "mode"}

    def planner_options(self) -> dict[str, Any]:
        """The keyword arguments of the planner, for `passes.planning.planners.make_planner`."""
        given = {"heuristic": self.heuristic, "planning_s": self.planning_s}
        return {name: value for name, value in given.items() if value is not None}

    def cache_key(self) -> str:
        """A text of all options, which is the same for equal options in any process."""
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

    Options that an earlier call set and that this call does not name keep their values;
    `reset_defaults` removes all of them.

    Graphs that have been compiled already keep the options that they were compiled with; a warning
    names those graphs.

    Raises:
        OptionError: as for `Options.parse`; no default is changed then.
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
            "set_defaults(%s) was called after graph%s %s had been compiled with the earlier"
            " default, which %s. The new default applies to graphs that are compiled from now on."
            " Call set_defaults before the model first runs, or call torch._dynamo.reset() after it"
            " to compile all graphs again.",
            ", ".join(f"{n}={_show(options[n])}" for n in sorted(changed)),
            "s" if len(late) > 1 else "",
            ", ".join(map(str, sorted(late))),
            "they keep" if len(late) > 1 else "it keeps",
        )


def reset_defaults() -> None:
    """Remove all defaults that `set_defaults` has set."""
    _defaults.values = {}


def defaults_used(graph: int, given: Mapping[str, Any] | None, parsed: Options) -> None:
    """Note that ``graph`` was compiled with ``parsed``, and which of these options were defaults.

    Args:
        graph: index of the graph.
        given: the options that were passed with the model itself.
        parsed: all options.
    """
    _defaults.used[graph] = {
        f.name: getattr(parsed, f.name) for f in fields(Options) if f.name not in (given or ())
    }


def forget_defaults_used() -> None:
    """Forget which defaults the graphs used, because no compiled graph exists any more."""
    _defaults.used = {}


class _Defaults:
    """The defaults of `set_defaults`.

    A change replaces the whole mapping, so that no reader sees a partial change.
    """

    values: dict[str, Any]
    used: dict[int, dict[str, Any]]  # graph -> options that were not passed with the model itself

    def __init__(self) -> None:
        self.values = {}
        self.used = {}


_defaults = _Defaults()


def _checked(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The given options, each converted into the type of its field."""
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
        if name not in names:
            raise OptionError.unknown("option", name, names)
        values[name] = _parsed(name, value, f"option {name!r}")
    return values


def variable_of(option: str) -> str:
    """The name of the environment variable of an option."""
    return _PREFIX + option.upper()


def _from_environment(without: Iterable[str]) -> dict[str, Any]:
    """The options that environment variables set, except those in ``without``.

    Raises:
        OptionError: for an unusable value, or a name that looks like a misspelt variable.
    """
    options = {variable_of(f.name): f.name for f in fields(Options) if f.name not in _OBJECTS}
    values: dict[str, Any] = {}
    for variable, given in os.environ.items():
        text = given.strip()
        if not variable.startswith(_PREFIX) or not text:
            continue
        option = options.get(variable)
        if option is None:
            near = get_close_matches(variable, options, n=1, cutoff=0.9)
            if near:
                raise OptionError(
                    f"environment variable {variable} does not belong to any option. Did you mean"
                    f" {near[0]}?"
                )
        elif option not in without:
            what = f"environment variable {variable}"
            values[option] = _parsed(option, _value_of(option, text, what), what)
    return values


def _value_of(option: str, text: str, what: str) -> object:
    """The Python value that the text of an environment variable stands for."""
    match option:
        case "verify" | "several_graphs" | "chunking" | "whole_step":
            words = {"1": True, "true": True, "yes": True, "on": True}
            words |= {"0": False, "false": False, "no": False, "off": False}
            if text.lower() not in words:
                raise OptionError(f"{what} must be one of {', '.join(words)}, not {text!r}.")
            return words[text.lower()]
        case "planning_s" | "lowering_s":
            try:
                return float(text)
            except ValueError:
                raise OptionError(f"{what} must be a number of seconds, not {text!r}.") from None
        case "most_plans":
            try:
                return int(text)
            except ValueError:
                raise OptionError(f"{what} must be a whole number, not {text!r}.") from None
        case "inductor":
            try:
                return json.loads(text)
            except json.JSONDecodeError as error:
                raise OptionError(
                    f'{what} must be a JSON object, such as {{"max_autotune": true}}, not'
                    f" {_show(text)} ({error})."
                ) from None
        case _:
            return text


def _parsed(name: str, value: Any, what: str) -> Any:
    """The value of an option, checked and converted into the type of its field.

    Args:
        name: of the option.
        value: as the user gave it.
        what: the name of the value in error messages.
    """
    match name:
        case "budget":
            return Budget.parse(value, what=what)
        case "reserve":
            return _parse_reserve(value, what)
        case "optimizer":
            return _parse_objects(value, what)
        case "planner":
            return _parse_name(value, name, what, _planner_names())
        case "heuristic":
            return None if value is None else _parse_name(value, name, what, _heuristic_names())
        case "planning_s" | "lowering_s":
            return None if value is None else _parse_seconds(value, what)
        case "cost_model":
            return _parse_name(value, name, what, COST_MODELS)
        case "compiler":
            return _parse_name(value, name, what, COMPILERS)
        case "inductor":
            return _parse_inductor(value, what)
        case "verify" | "several_graphs" | "chunking" | "whole_step":
            if not isinstance(value, bool):
                raise OptionError(
                    f"{what} must be True or False, not {_show(value)}"
                    f" of type {type(value).__name__}."
                )
            return value
        case "offload":
            return value if value in (None, "measured") else _parse_bandwidth(value, what)
        case "most_plans":
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(
                    f"{what} must be a whole number, 1 or more, not {_show(value)}"
                    f" of type {type(value).__name__}."
                )
            return value
    raise AssertionError(name)


def _parse_objects(value: object, what: str) -> ObjectsBeside:
    if isinstance(value, ObjectsBeside):
        return value
    if value is None:
        return _NOTHING_BESIDE
    from torch import nn, optim

    objects = value if isinstance(value, (list, tuple)) else (value,)
    for item in objects:
        if not isinstance(item, (optim.Optimizer, nn.Module)):
            raise OptionError(
                f"{what} must be a torch.optim.Optimizer, an nn.Module (an average of the weights),"
                f" or a list of those, not {_show(item)} of type {type(item).__name__}. If your"
                " script has no access to the optimizer, pass reserve='optimizer': dtrcompile then"
                " finds it."
            )
    return ObjectsBeside(objects)


def _parse_seconds(value: object, what: str) -> float:
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not 0 <= value < float("inf")
    ):
        raise OptionError(
            f"{what} must be a number of seconds, 0 or more, not {_show(value)}"
            f" of type {type(value).__name__}."
        )
    return float(value)


def _parse_bandwidth(value: object, what: str) -> float:
    """Bytes per ns; each way, and both ways at once."""
    match = _BANDWIDTH.fullmatch(value.strip()) if isinstance(value, str) else None
    amount = None if match is None else _parse_amount(match[1], what)
    if amount is None or amount.kind is not BudgetKind.BYTES or amount.size_bytes < 1:
        raise OptionError(
            f"{what} must be a bandwidth such as '25GB/s', of the link to the host in each"
            f" direction, or 'measured', not {_show(value)}. Leave the option out to copy nothing."
        )
    return amount.size_bytes / 1e9


def _planner_names() -> set[str]:
    from dtrcompile.passes.planning.planners import PLANNERS

    return {"auto", *PLANNERS}


def _heuristic_names() -> set[str]:
    from dtrcompile.passes.planning.heuristics import HEURISTICS

    return set(HEURISTICS)


def _parse_name(value: object, option: str, what: str, allowed: Iterable[str]) -> str:
    if isinstance(value, str) and value in allowed:
        return value
    kind = option.replace("_", " ")
    if isinstance(value, str):
        is_option = what.startswith("option")
        raise OptionError.unknown(kind if is_option else f"{kind} in {what}", value, allowed)
    raise OptionError(
        f"{what} must be the name of a {kind}, not {_show(value)} of type"
        f" {type(value).__name__}. Allowed: {', '.join(sorted(allowed))}."
    )


def _parse_inductor(value: object, what: str) -> FrozenMapping:
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
            f"{what} must not set 'custom_partitioner_fn', because dtrcompile uses that hook"
            " itself. Leave it out, or use backend='inductor'."
        )
    if "mode" in value:
        _parse_inductor_mode(value["mode"], what)
    return tuple(sorted((name, _freeze(item, f"{what}[{name!r}]")) for name, item in value.items()))


def _parse_inductor_mode(mode: object, what: str) -> None:
    if not isinstance(mode, str):
        raise OptionError(
            f"{what} has the mode {_show(mode)} of type {type(mode).__name__}."
            f" Allowed: {', '.join(INDUCTOR_MODES)}."
        )
    if mode not in INDUCTOR_MODES:
        raise OptionError.unknown("Inductor mode", mode, INDUCTOR_MODES)


def _freeze(value: Any, what: str) -> Any:
    """A hashable copy of ``value``, which `_thaw` converts back into an equal value."""
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
    """A text that identifies ``value`` and contains no memory address."""
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
    if callable(uuid):  # by which torch itself identifies a custom pass in a cache key
        return f"{type(value).__module__}.{type(value).__qualname__}:{uuid()!r}"
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):
        return f"{value.__module__}.{name}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _show(value: object) -> str:
    """A short ``repr``, because the value may be a whole model."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
