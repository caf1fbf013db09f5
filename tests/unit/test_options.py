"""Options: every accepted form, every bad input, and which source wins."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dtrcompile
from dtrcompile.options import (
    BUDGET_VARIABLE,
    COMPILERS,
    COST_MODELS,
    INDUCTOR_MODES,
    Budget,
    BudgetKind,
    Options,
)
from dtrcompile.passes.errors import DTRError, OptionError
from dtrcompile.passes.planning.heuristics import HEURISTICS
from dtrcompile.passes.planning.planners import PLANNERS

MIB = 2**20


@pytest.mark.parametrize(
    ("given_value", "size_bytes"),
    [
        (1, 1),
        (300 * MIB, 300 * MIB),
        (np.int32(5), 5),
        (np.uint64(7), 7),
        ("123", 123),
        ("123B", 123),
        ("1kB", 1000),
        ("500MB", 500_000_000),
        ("500 mb", 500_000_000),
        (" 8GiB ", 8 * 2**30),
        ("8gib", 8 * 2**30),
        ("1.5KiB", 1536),
        (".5KiB", 512),
        ("5.KiB", 5120),
        ("1TB", 10**12),
        ("1TiB", 2**40),
    ],
)
def test_amounts_in_bytes(given_value: object, size_bytes: int) -> None:
    budget = Budget.parse(given_value)
    assert budget.kind is BudgetKind.BYTES
    assert budget.size_bytes == size_bytes
    assert budget.resolve(baseline_peak_bytes=10) == size_bytes


@pytest.mark.parametrize(
    ("given_value", "share"),
    [
        (1.0, Fraction(1)),
        (0.4, Fraction(2, 5)),
        (np.float32(0.5), Fraction(1, 2)),
        (np.float64(0.4), Fraction(2, 5)),
        (Fraction(1, 4), Fraction(1, 4)),
        ("40%", Fraction(2, 5)),
        ("100 %", Fraction(1)),
        ("0.5%", Fraction(1, 200)),
    ],
)
def test_amounts_as_a_share(given_value: object, share: Fraction) -> None:
    budget = Budget.parse(given_value)
    assert budget.kind is BudgetKind.SHARE
    assert budget.share == share
    assert budget.resolve(baseline_peak_bytes=1000) == math.floor(share * 1000)


def test_an_int_one_is_a_byte_and_a_float_one_is_everything() -> None:
    assert Budget.parse(1).resolve(1000) == 1
    assert Budget.parse(1.0).resolve(1000) == 1000


@pytest.mark.parametrize("share", [0.29, "29%"])
def test_a_share_is_exact(share: object) -> None:
    # 0.29 * 100 is 28.999999999999996 in binary floating point.
    assert Budget.parse(share).resolve(100) == 29


@pytest.mark.parametrize(("text", "kind"), [("min", BudgetKind.MIN), ("AUTO", BudgetKind.AUTO)])
def test_budgets_by_name(text: str, kind: BudgetKind) -> None:
    assert Budget.parse(text).kind is kind


def test_min_resolves_to_none_and_auto_to_what_is_there() -> None:
    assert Budget.parse("min").resolve(1000, 500) is None
    assert Budget.parse("auto").resolve(1000, 500) == 500


def test_auto_without_a_known_device_says_that_a_budget_is_needed() -> None:
    with pytest.raises(OptionError, match=r"a budget is needed.*DTRCOMPILE_BUDGET.*3.0 MiB"):
        Budget.parse("auto").resolve(3 * MIB)


def test_a_mode_without_a_budget_is_told_where_the_mode_goes() -> None:
    options = Options.parse({"inductor": {"mode": "max-autotune"}})
    wanted = "{'budget': '8GiB', 'inductor': {'mode': 'max-autotune'}}"
    with pytest.raises(OptionError, match=f"options={wanted} .* in place of mode='max-autotune'"):
        options.resolve_budget_bytes(3 * MIB)


@pytest.mark.parametrize(
    ("given_value", "message"),
    [
        (True, "not True"),
        (False, "not False"),
        (np.True_, "cannot be read"),
        (None, "NoneType.*leave the option out"),
        (0, "must be positive, not 0"),
        (-1, "must be positive, not -1"),
        (2**64, "more bytes than any device"),
        pytest.param(10**5000, "more bytes than any device", id="10**5000"),
        (0.0, "above 0"),
        (-0.5, "above 0"),
        (float("nan"), "finite, not nan"),
        (float("inf"), "finite, not inf"),
        (float("-inf"), "finite, not -inf"),
        (np.float32("nan"), "finite, not nan"),
        (1.5, "Use an int for bytes"),
        (1024.0, "Use an int for bytes: 1024"),
        (1e300, "Use an int for bytes"),
        (1j, "of type complex"),
        (b"8GiB", "of type bytes"),
        ([1], "of type list"),
        (object, "of type type"),
        ("", "cannot be read from ''"),
        ("lots", "cannot be read from 'lots'"),
        ("nan", "cannot be read"),
        ("inf", "cannot be read"),
        ("True", "cannot be read"),
        ("8 GiB each", "cannot be read"),
        ("1e9", "cannot be read"),
        ("1_000", "cannot be read"),
        ("٤٠%", "cannot be read"),
        pytest.param("9" * 5000, "cannot be read", id="5000 digits"),
        ("9" * 30, "more bytes than any device"),
        ("8XB", "'XB' is no unit"),
        ("8GiBs", "'GiBs' is no unit"),
        ("8G", "Write 8GB.*or 8GiB"),
        ("8k", "Write 8kB.*or 8KiB"),
        ("8Ki", "Write 8kB.*or 8KiB"),
        ("0.4", "Write 40%"),
        ("0", "must be positive"),
        ("-3GiB", "must be positive"),
        ("0.1B", "must be positive"),
        ("0%", "above 0"),
        ("-5%", "above 0"),
        ("101%", "at most 100%"),
    ],
)
def test_unusable_budgets(given_value: object, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        Options.parse({"budget": given_value})
    assert "option 'budget'" in str(caught.value)
    assert len(str(caught.value)) < 500


@given(st.one_of(st.text(max_size=12), st.integers(), st.floats(), st.booleans(), st.none()))
def test_anything_is_either_a_positive_budget_or_an_option_error(value: object) -> None:
    try:
        budget = Budget.parse(value)
    except OptionError:
        return
    resolved = budget.resolve(2**40, available_bytes=1)
    assert resolved is None or resolved >= 0
    assert Budget.parse(budget) is budget


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bugdet": "1GiB"}, "unknown option 'bugdet'. Did you mean 'budget'?"),
        ({"": 1}, "unknown option ''"),
        ({1: "1GiB"}, "option names must be strings, not 1 of type int"),
        ({None: "1GiB"}, "option names must be strings, not None"),
        ([("budget", 1)], "options must be a mapping"),
        ("budget=1", "options must be a mapping"),
        (7, "options must be a mapping"),
        ({"planner": "no-such"}, "unknown planner 'no-such'"),
        ({"planner": None}, "option 'planner' must be the name of a planner, not None"),
        ({"planner": ["auto"]}, "option 'planner' must be the name of a planner"),
        ({"heuristic": "no-such"}, "unknown heuristic 'no-such'"),
        ({"heuristic": 3}, "option 'heuristic' must be the name of a heuristic, not 3"),
        ({"planning_s": "5"}, "option 'planning_s' must be a number of seconds"),
        ({"offload": 25}, "option 'offload' must be a bandwidth such as '25GB/s'"),
        ({"offload": "25GB"}, "in each direction, or 'measured', not '25GB'"),
        ({"offload": "0GB/s"}, "must be a bandwidth"),
        ({"offload": "1.2.3GB/s"}, "must be a bandwidth"),
        ({"planning_s": -1}, "0 or more, not -1"),
        ({"lowering_s": -1}, "option 'lowering_s' must be a number of seconds, 0 or more"),
        ({"planning_s": float("nan")}, "0 or more, not nan"),
        ({"planning_s": True}, "option 'planning_s' must be a number of seconds"),
        ({"cost_model": "measure"}, "unknown cost model 'measure'. Did you mean 'measured'?"),
        ({"cost_model": True}, "option 'cost_model' must be the name of a cost model"),
        ({"compiler": "inductr"}, "unknown compiler 'inductr'. Did you mean 'inductor'?"),
        ({"compiler": None}, "option 'compiler' must be the name of a compiler"),
        ({"verify": 1}, "option 'verify' must be True or False, not 1"),
        ({"verify": "no"}, "option 'verify' must be True or False"),
        ({"several_graphs": 2}, "option 'several_graphs' must be True or False, not 2"),
        ({"inductor": None}, "option 'inductor' must be a mapping"),
        ({"inductor": "max-autotune"}, "option 'inductor' must be a mapping"),
        ({"inductor": {3: True}}, "the key 3 of type int"),
        ({"inductor": {"mode": "max_autotune"}}, "Did you mean 'max-autotune'?"),
        ({"inductor": {"mode": 1}}, "the mode 1 of type int"),
        ({"inductor": {"custom_partitioner_fn": None}}, "must not set 'custom_partitioner_fn'"),
        ({"inductor": {"a": [{1, 2}]}}, "option 'inductor'['a'] is of type set"),
        ({"reserve": -1}, "option 'reserve' must not be negative"),
        ({"reserve": "-10%"}, "option 'reserve' must not be negative"),
        ({"reserve": "min"}, "option 'reserve' must be an amount, not 'min'"),
        ({"reserve": "auto"}, "option 'reserve' must be an amount, not 'auto'"),
        ({"reserve": False}, "option 'reserve' must be an amount of memory, not False"),
        ({"reserve": 1.5}, "option 'reserve' is the float 1.5"),
        ({"reserve": None}, "option 'reserve' cannot be read from None"),
    ],
)
def test_unusable_options(options: object, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.parse(options)  # type: ignore[arg-type]
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("option", "allowed"),
    [
        ("planner", {"auto", *PLANNERS}),
        ("heuristic", set(HEURISTICS)),
        ("cost_model", set(COST_MODELS)),
        ("compiler", set(COMPILERS)),
    ],
)
def test_every_registered_name_is_accepted_and_an_unknown_one_lists_them(
    option: str, allowed: set[str]
) -> None:
    for name in allowed:
        assert getattr(Options.parse({option: name}), option) == name
    with pytest.raises(OptionError) as caught:
        Options.parse({option: "no such name"})
    for name in allowed:
        assert name in str(caught.value)


def test_errors_are_of_the_family_and_value_errors() -> None:
    with pytest.raises(DTRError):
        Options.parse({"budget": 0})
    with pytest.raises(ValueError, match="positive"):
        Options.parse({"budget": 0})


def test_defaults() -> None:
    options = Options.parse()
    assert options == Options.parse({}) == Options.parse(None) == Options()
    assert options.budget.kind is BudgetKind.AUTO
    assert options.reserve.resolve(1000) == 0
    assert (options.planner, options.heuristic, options.cost_model, options.compiler) == (
        "auto",
        None,
        "roofline",
        "inductor",
    )
    assert options.verify


def test_reserve_is_taken_off_the_budget() -> None:
    # 1000 bytes without a budget: 40 % is 400, less 100.
    assert Options.parse({"budget": "40%", "reserve": 100}).resolve_budget_bytes(1000) == 300
    assert Options.parse({"budget": 400, "reserve": 0.1}).resolve_budget_bytes(1000) == 300
    assert Options.parse({"reserve": "10%"}).resolve_budget_bytes(1000, 900) == 800
    assert Options.parse({"budget": "min", "reserve": 100}).resolve_budget_bytes(1000) is None
    assert Options.parse({"budget": 400, "reserve": 0}).resolve_budget_bytes(1000) == 400


def test_a_reserve_that_leaves_nothing_is_an_error() -> None:
    with pytest.raises(OptionError, match="leaves nothing"):
        Options.parse({"budget": 100, "reserve": "10%"}).resolve_budget_bytes(1000)


class TestWhichSourceWins:
    def test_environment_over_built_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(BUDGET_VARIABLE, " 30% ")
        assert Options.parse().budget == Budget.parse("30%")

    def test_an_empty_environment_variable_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(BUDGET_VARIABLE, "  ")
        assert Options.parse().budget.kind is BudgetKind.AUTO

    def test_set_defaults_over_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(BUDGET_VARIABLE, "30%")
        dtrcompile.set_defaults(budget="20%")
        assert Options.parse().budget == Budget.parse("20%")

    def test_explicit_over_set_defaults(self) -> None:
        dtrcompile.set_defaults(budget="20%", compiler="eager")
        options = Options.parse({"budget": "10%"})
        assert options.budget == Budget.parse("10%")
        assert options.compiler == "eager"

    def test_a_bandwidth_in_bytes_per_ns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert Options.parse({"offload": "25GB/s"}).offload == 25.0
        assert Options.parse({"offload": "2 GiB / s"}).offload == 2**31 / 1e9
        assert Options.parse({"offload": "measured"}).offload == "measured"
        monkeypatch.setenv("DTRCOMPILE_OFFLOAD", "500MB/s")
        assert Options.parse().offload == 0.5

    def test_a_bad_environment_variable_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(BUDGET_VARIABLE, "lots")
        with pytest.raises(OptionError, match="environment variable DTRCOMPILE_BUDGET"):
            Options.parse()
        assert Options.parse({"budget": 1}).budget.size_bytes == 1

    @pytest.mark.parametrize(
        ("option", "text", "given_value"),
        [
            ("reserve", "2GiB", "2GiB"),
            ("reserve", "optimizer", "optimizer"),
            ("planner", "dtr", "dtr"),
            ("heuristic", sorted(HEURISTICS)[0], sorted(HEURISTICS)[0]),
            ("planning_s", "1.5", 1.5),
            ("lowering_s", "20", 20.0),
            ("cost_model", "measured", "measured"),
            ("compiler", "eager", "eager"),
            (
                "inductor",
                '{"mode": "default", "a": [1, true]}',
                {"mode": "default", "a": [1, True]},
            ),
            ("verify", "no", False),
            ("several_graphs", "1", True),
            ("most_plans", "2", 2),
            ("chunking", "0", False),
        ],
    )
    def test_every_option_has_a_variable(
        self, option: str, text: str, given_value: object, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(f"DTRCOMPILE_{option.upper()}", text)
        assert Options.parse() == Options.parse({option: given_value}) != Options()
        assert Options.parse({option: getattr(Options(), option)} if option == "verify" else {})

    @pytest.mark.parametrize(
        ("variable", "text", "message"),
        [
            ("DTRCOMPILE_PLANNER", "best", "unknown planner in environment variable"),
            ("DTRCOMPILE_PLANNING_S", "long", "DTRCOMPILE_PLANNING_S must be a number"),
            ("DTRCOMPILE_PLANNING_S", "-1", "DTRCOMPILE_PLANNING_S must be a number"),
            ("DTRCOMPILE_SEVERAL_GRAPHS", "maybe", "must be one of 1, true"),
            ("DTRCOMPILE_INDUCTOR", "max-autotune", "must be a JSON object"),
            ("DTRCOMPILE_INDUCTOR", "[1]", "DTRCOMPILE_INDUCTOR must be a mapping"),
            ("DTRCOMPILE_MOST_PLANS", "0", "DTRCOMPILE_MOST_PLANS must be a whole number"),
            ("DTRCOMPILE_RESERVE", "min", "DTRCOMPILE_RESERVE must be an amount"),
            ("DTRCOMPILE_BUGDET", "8GiB", "Did you mean DTRCOMPILE_BUDGET"),
        ],
    )
    def test_variables_are_checked_like_options(
        self, variable: str, text: str, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(variable, text)
        with pytest.raises(OptionError, match=message):
            Options.parse()


def test_the_optimizer_is_an_object_and_no_part_of_a_cache_key() -> None:
    optim = pytest.importorskip("torch.optim")
    import torch

    first, second = (optim.SGD([torch.zeros(1, requires_grad=True)]) for _ in range(2))
    options = Options.parse({"optimizer": first})
    assert options.counts_optimizers and options.optimizer.alive() == [first]
    assert options == Options.parse({"optimizer": [first]})
    assert options != Options.parse({"optimizer": second})
    assert options.cache_key() == Options.parse({"optimizer": second}).cache_key()
    assert options.cache_key() != Options().cache_key()
    assert pickle.loads(pickle.dumps(options)) == Options()
    assert Options.parse({"optimizer": None}) == Options()
    with pytest.raises(OptionError, match="reserve='optimizer'"):
        Options.parse({"optimizer": "AdamW"})


def test_set_defaults_adds_up_and_reset_forgets() -> None:
    dtrcompile.set_defaults(budget="20%")
    dtrcompile.set_defaults(compiler="eager")
    assert Options.parse().compiler == "eager"
    assert Options.parse().budget == Budget.parse("20%")
    dtrcompile.reset_defaults()
    assert Options.parse() == Options()


def test_set_defaults_is_checked_at_once_and_changes_nothing_when_it_fails() -> None:
    with pytest.raises(OptionError, match="unknown option 'bugdet'"):
        dtrcompile.set_defaults(compiler="eager", bugdet=1)
    assert Options.parse() == Options()


def test_inductor_options_are_copied_both_ways() -> None:
    given_patches = {"mode": "max-autotune", "a": [1, {"b": (2, None)}], "c": True}
    options = Options.parse({"inductor": given_patches})
    given_patches["c"] = False
    expected = {"a": [1, {"b": (2, None)}], "c": True}
    assert options.inductor_mode == "max-autotune"
    assert options.inductor_patches == expected
    options.inductor_patches["a"].append(3)
    assert options.inductor_patches == expected


def test_options_are_a_value() -> None:
    options = Options.parse({"budget": "8GiB", "inductor": {"a": [1], "b": {"x": 1, "y": 2}}})
    same = Options.parse({"inductor": {"b": {"y": 2, "x": 1}, "a": [1]}, "budget": 8 * 2**30})
    assert options == same
    assert hash(options) == hash(same)
    assert options.cache_key() == same.cache_key()
    assert pickle.loads(pickle.dumps(options)) == options
    with pytest.raises(FrozenInstanceError):
        options.budget = Budget.parse(1)  # type: ignore[misc]


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 1},
        {"budget": 1.0},
        {"budget": "min"},
        {"reserve": 1},
        {"planner": max(set(PLANNERS) - {"auto"})},
        {"heuristic": sorted(HEURISTICS)[0]},
        {"planning_s": 2},
        {"cost_model": "measured"},
        {"compiler": "eager"},
        {"inductor": {"mode": "default"}},
        {"inductor": {"a": 1}},
        {"inductor": {"a": True}},
        {"inductor": {"a": "True"}},
        {"inductor": {"a": [1]}},
        {"inductor": {"a": (1,)}},
        {"verify": False},
        {"several_graphs": True},
    ],
)
def test_every_option_changes_the_cache_key(options: dict[str, object]) -> None:
    assert Options.parse(options).cache_key() != Options().cache_key()


def test_cache_keys_differ_between_options_that_differ() -> None:
    keys = {
        Options.parse({"inductor": {"a": value}}).cache_key()
        for value in (1, True, "True", "1", [1], (1,), None, {"b": 1}, 1.0)
    }
    assert len(keys) == 9


class _CustomPass:
    def uuid(self) -> str:
        return "pass-1"


def test_the_cache_key_is_the_same_in_another_process_whatever_the_hash_seed() -> None:
    code = (
        "from dtrcompile.options import Options\n"
        "print(Options.parse({'budget': '40%', 'inductor': {'b': [1], 'a': {'y': len, 'x': 2}}})"
        ".cache_key())"
    )
    keys = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(keys) == 1
    key = Options.parse({"inductor": {"p": _CustomPass()}}).cache_key()
    assert "pass-1" in key
    assert "0x" not in key


def test_the_modes_are_those_of_inductor() -> None:
    inductor = pytest.importorskip("torch._inductor")
    assert set(inductor.list_mode_options()) <= set(INDUCTOR_MODES)


def test_the_cost_models_are_those_that_can_be_made() -> None:
    costs = pytest.importorskip("dtrcompile.passes.device.costs")
    assert set(costs.COST_MODELS) == set(COST_MODELS)
