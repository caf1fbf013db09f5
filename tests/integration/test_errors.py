"""Bad input through ``torch.compile``: a typed error that says what was given and what is allowed.

Point by point what ``Options.parse`` says is tested where it is written; here, that it reaches the
user through Dynamo, that nothing is compiled before, and that a correct call works afterwards.
"""

from __future__ import annotations

import math
import pickle
import re
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import dtrcompile
from dtrcompile.passes.errors import (
    CaptureError,
    DTRError,
    InfeasibleBudgetError,
    OptionError,
)
from tests.integration.scenarios import BATCH, WIDTH, batch, layers
from workloads.training import RELEASE, compile_dtr, executor_checked, raises_dtr, unwrap


def run_with(options: Any, module: nn.Module | None = None) -> None:
    from dtrcompile.backend import dtr

    module = module or layers(2)
    compiled = torch.compile(module, backend=dtr, options=options)
    compiled(batch()).sum().backward()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budgett": "1GiB"}, ["budgett", "'budget'", "reserve"]),
        ({"budget": "1GiB", "reserv": 0}, ["reserv", "'reserve'"]),
        ({"budget": "1GiB", "costmodel": "roofline"}, ["costmodel", "'cost_model'"]),
        ({"budget": "1GiB", "zzzzzz": 1}, ["zzzzzz", "budget", "planner", "heuristic"]),
        ({"budget": "1GiB", 3: 1}, ["3", "int"]),
        ({"budget": "1GiB", None: 1}, ["None"]),
        ({"budget": "1GiB", ("a", "b"): 1}, ["tuple"]),
    ],
    ids=str,
)
def test_unknown_options(options: dict[Any, Any], words: list[str]) -> None:
    with raises_dtr(OptionError, *words):
        run_with(options)
    assert not dtrcompile.reports()


MALFORMED_BUDGETS = [
    "",
    " ",
    "lots",
    "GiB",
    "8 GiB B",
    "8XiB",
    "8,5GiB",
    "1e",
    "--5",
    "0x10",
    "8GiB extra",
    "50 percent",
    "nan",
    "inf",
    0,
    -1,
    -(2**40),
    0.0,
    -0.5,
    "0",
    "0%",
    "0GiB",
    "-8GiB",
    "-10%",
    True,
    False,
    math.nan,
    math.inf,
    -math.inf,
    1.5,
    1.0000001,
    "101%",
    "1000%",
    2**80,
    None,
    [],
    ["8GiB"],
    {"bytes": 8},
    b"8GiB",
    1 + 2j,
    object,
]


@pytest.mark.parametrize("budget", MALFORMED_BUDGETS, ids=repr)
def test_budgets_that_are_none(budget: object) -> None:
    with raises_dtr(OptionError, "budget"):
        run_with({"budget": budget})
    assert not dtrcompile.reports()


def test_a_tensor_is_no_budget() -> None:
    with raises_dtr(OptionError, "budget"):
        run_with({"budget": torch.ones(3)})


@pytest.mark.parametrize("reserve", ["lots", -1, "-1GiB", math.nan, True, 1.5, None, [], "min"])
def test_reserves_that_are_none(reserve: object) -> None:
    with raises_dtr(OptionError, "reserve"):
        run_with({"budget": "1GiB", "reserve": reserve})


def test_a_reserve_that_leaves_nothing() -> None:
    with raises_dtr(DTRError, "reserve"):
        run_with({"budget": "1MiB", "reserve": "2MiB", "compiler": "eager"})


@pytest.mark.parametrize(
    ("option", "given", "near"),
    [
        ("heuristic", "h_dtr_eqq", "h_dtr_eq"),
        ("heuristic", "h_LRUU", "h_LRU"),
        ("cost_model", "rooflin", "roofline"),
        ("cost_model", "mesured", "measured"),
        ("compiler", "inducto", "inductor"),
        ("compiler", "eagre", "eager"),
        ("planner", "aut", "auto"),
    ],
)
def test_unknown_names_suggest_the_nearest(option: str, given: str, near: str) -> None:
    with raises_dtr(OptionError, repr(given)) as caught:
        run_with({"budget": "1GiB", option: given})
    assert "did you mean" in str(caught[0]).lower()
    assert near.lower() in str(caught[0]).lower()


@pytest.mark.parametrize("option", ["planner", "heuristic", "cost_model", "compiler"])
@pytest.mark.parametrize("given", ["qqqqqqqq", "", 3, True, ["auto"], {"a": 1}], ids=repr)
def test_names_that_are_none(option: str, given: object) -> None:
    with raises_dtr(OptionError, option.replace("_", " ").split()[0], repr(given)):
        run_with({"budget": "1GiB", option: given})


@pytest.mark.parametrize("inductor", ["max-autotune", 3, [("mode", "default")], {1: 2}], ids=repr)
def test_inductor_options_of_a_wrong_type(inductor: object) -> None:
    with raises_dtr(OptionError, "inductor"):
        run_with({"budget": "1GiB", "inductor": inductor})


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_an_inductor_option_that_inductor_does_not_know(compiler: str) -> None:
    with raises_dtr(OptionError, "max_autotun", "max_autotune"):
        run_with({"budget": "min", "compiler": compiler, "inductor": {"max_autotun": True}})


def test_an_unknown_inductor_mode() -> None:
    with raises_dtr(OptionError, "max-autotun", "max-autotune"):
        run_with({"budget": "1GiB", "inductor": {"mode": "max-autotun"}})


# ------------------------------------------------------------------ no budget


def test_on_the_cpu_a_budget_is_needed() -> None:
    for options in ({}, None, {"compiler": "eager"}, {"budget": "auto"}):
        torch._dynamo.reset()
        with raises_dtr(OptionError, "budget is needed", "'8GiB'"):
            run_with(options)


def test_the_budget_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRCOMPILE_BUDGET", "min")
    with executor_checked():
        run_with({"compiler": "eager"})
    (report,) = dtrcompile.reports()
    assert report.budget == "min"


def test_a_bad_budget_in_the_environment_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DTRCOMPILE_BUDGET", "lots")
    with raises_dtr(OptionError, "DTRCOMPILE_BUDGET", "'lots'"):
        run_with({"compiler": "eager"})


def test_defaults_of_the_process_and_what_overrides_them() -> None:
    dtrcompile.set_defaults(budget="min", compiler="eager")
    with executor_checked():
        run_with(None)
    torch._dynamo.reset()
    run_with({"budget": "100%"})
    assert [r.budget for r in dtrcompile.reports()] == ["min", "100%"]
    with pytest.raises(OptionError, match="budgett"):
        dtrcompile.set_defaults(budgett="8GiB")
    dtrcompile.reset_defaults()
    torch._dynamo.reset()
    with raises_dtr(OptionError, "budget is needed"):
        run_with({"compiler": "eager"})


def test_the_backend_is_found_by_name_when_it_is_installed() -> None:
    if "dtr" not in torch._dynamo.list_backends():
        pytest.skip("dtrcompile is not installed; the test of the package covers it")
    compiled = torch.compile(
        layers(2), backend="dtr", options={"budget": "min", "compiler": "eager"}
    )
    with executor_checked():
        compiled(batch()).sum().backward()


# ------------------------------------------------------------------ infeasible budgets


def infeasible(budget: object, **options: object) -> InfeasibleBudgetError:
    with raises_dtr(InfeasibleBudgetError) as caught:
        compile_dtr(layers(4), budget, **options)(batch())
    assert isinstance(caught[0], InfeasibleBudgetError)
    return caught[0]


def test_an_infeasible_budget_says_what_would_do() -> None:
    error = infeasible(1000)
    assert error.budget_bytes == 1000
    assert error.minimum_bytes is not None and error.minimum_bytes > 1000
    assert str(error.minimum_bytes) in str(error)
    assert error.operator and error.operator in str(error)
    assert error.largest
    sizes = [size for _, size in error.largest]
    assert sizes == sorted(sizes, reverse=True)
    for name, _ in error.largest:
        assert name in str(error)
    # The activations of this model are its largest storages: (BATCH, WIDTH) float32.
    assert sizes[0] >= BATCH * WIDTH * 4
    assert sum(sizes) <= error.minimum_bytes


@pytest.mark.parametrize("budget", [1, 1000, "1B", "1kB", 1e-6, "0.001%"])
def test_the_named_minimum_works_and_one_byte_less_does_not(budget: object) -> None:
    minimum_bytes = infeasible(budget).minimum_bytes
    assert minimum_bytes is not None
    torch._dynamo.reset()
    dtrcompile.clear_reports()
    with executor_checked():
        compile_dtr(layers(4), minimum_bytes)(batch()).sum().backward()
    (report,) = dtrcompile.reports()
    assert report.promised_peak_bytes <= minimum_bytes
    torch._dynamo.reset()
    assert infeasible(minimum_bytes - 1).minimum_bytes == minimum_bytes


def test_the_named_minimum_is_what_min_finds() -> None:
    model = layers(4)  # with its loss, so that there is nothing that a caller may give up
    with raises_dtr(InfeasibleBudgetError) as refused:
        compile_dtr(lambda x: model(x).sum(), 1)(batch()).backward()
    torch._dynamo.reset()
    dtrcompile.clear_reports()
    compile_dtr(lambda x: model(x).sum(), "min")(batch()).backward()
    (report,) = dtrcompile.reports()
    assert report.promised_peak_bytes == refused[0].minimum_bytes


def test_a_reserve_is_taken_off_the_budget() -> None:
    error = infeasible(1)
    assert error.minimum_bytes is not None
    torch._dynamo.reset()
    compile_dtr(layers(4), error.minimum_bytes + 512, reserve=512)(batch()).sum().backward()
    torch._dynamo.reset()
    infeasible(error.minimum_bytes, reserve=1)


def test_infeasible_in_an_inference_graph() -> None:
    with torch.no_grad(), raises_dtr(InfeasibleBudgetError) as caught:
        compile_dtr(layers(4), 1)(batch())
    minimum_bytes = caught[0].minimum_bytes
    torch._dynamo.reset()
    with torch.no_grad(), executor_checked():
        compile_dtr(layers(4), minimum_bytes)(batch())


def test_errors_survive_pickling() -> None:
    """Worker processes send them."""
    error = infeasible(1000)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.minimum_bytes) == (str(error), error.minimum_bytes)


def test_errors_are_found_inside_what_dynamo_raises() -> None:
    with pytest.raises(Exception) as caught:
        compile_dtr(layers(2), 1)(batch())
    assert isinstance(unwrap(caught.value), InfeasibleBudgetError)
    # The message reaches a user who sees only the outer exception.
    assert "smallest budget" in str(caught.value)


def test_a_later_graph_of_the_same_model_may_be_the_infeasible_one() -> None:
    """The second, larger batch does not fit; the first one's code goes on working."""
    module = layers(4)
    small, large = batch(8, WIDTH), batch(64 * BATCH, WIDTH)
    compile_dtr(module, "min", dynamic=False)(small).sum().backward()
    (report,) = dtrcompile.reports()
    torch._dynamo.reset()
    budget_bytes = report.promised_peak_bytes
    compiled = compile_dtr(module, budget_bytes, dynamic=False)
    module.zero_grad()
    compiled(small).sum().backward()
    module.zero_grad()
    with raises_dtr(InfeasibleBudgetError):
        compiled(large)
    compiled(small).sum().backward()


@pytest.mark.parametrize("of", ["nonzero", "item", "input"])
@pytest.mark.parametrize("budget", ["min", "100%"])
def test_sizes_that_are_not_known_when_planning(of: str, budget: str) -> None:
    """No bytes can be promised; without the settings that make such graphs, the model runs."""
    first, second = layers(2), layers(2)

    def function(x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        h = first(x)
        if of == "nonzero":
            h = h[torch.nonzero(h[:, 0] > 0).flatten()]
        elif of == "item":
            count = length.item()
            torch._check(count >= 2)
            torch._check(count <= BATCH)
            h = h[: int(count)]
        return second(h).sum()

    x, length = batch(), torch.tensor(BATCH // 2)
    if of == "input":
        torch._dynamo.decorators.mark_unbacked(x, 0)
    with (
        torch._dynamo.config.patch(
            capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True
        ),
        raises_dtr(CaptureError, "size", "mark_dynamic"),
    ):
        compile_dtr(function, budget)(x, length)
    torch._dynamo.reset()
    with executor_checked():
        compile_dtr(function, budget)(batch(), length).backward()


def test_a_refusal_names_the_users_modules_and_lines() -> None:
    error = infeasible(1000)
    assert all(name in error.places for name in (error.operator, *dict(error.largest)))
    text = str(error)
    for name, _ in error.largest:
        place = error.places[name]
        assert place or RELEASE < (2, 13)  # whose tangents have none
        assert (f"{name!r} ({place})" if place else repr(name)) in text
    assert re.fullmatch(r"[0-7]", error.places[error.operator])
    names = {f"{i}.{name}" for i in (0, 2, 4, 6) for name in ("weight", "bias")}
    assert names <= set(error.places.values())
    assert pickle.loads(pickle.dumps(error)).places == error.places
    assert str(error.with_advice("Do.")) == f"{text} Do."


def test_an_error_reaches_the_user_as_it_is() -> None:
    compiled = torch.compile(layers(4), backend="dtr", options={"budget": 1000})
    with pytest.raises(dtrcompile.InfeasibleBudgetError) as caught:
        compiled(batch())
    error = caught.value
    assert "TORCHDYNAMO_VERBOSE" not in str(error)
    assert "".join(traceback.format_exception_only(error)).startswith(
        "dtrcompile.InfeasibleBudgetError: no plan fits a budget of 1000 B"
    )
    files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    assert not any("dtrcompile" in Path(file).parts for file in files)
    assert len(traceback.format_exception(error)) <= 8
    assert isinstance(error, BackendCompilerFailed)
    assert type(error.inner_exception) is dtrcompile.InfeasibleBudgetError
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is dtrcompile.InfeasibleBudgetError
    assert str(copied) == str(error)
    with pytest.raises(OptionError, match="budgett") as misspelt:
        torch.compile(layers(1), backend="dtr", options={"budgett": 1})(batch())
    assert isinstance(misspelt.value, ValueError)
