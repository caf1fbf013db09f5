"""The models that nobody tuned for: rows, the table and going on where a run ended."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bench.hub as hub
from bench.hub_models import LIBRARIES, silence, tensors, wake


def row(name: str, budget: str, *, library: str = "timm", **changes: Any) -> hub.Row:
    kept = {
        "library": library,
        "name": name,
        "budget": budget,
        "trained_at": budget,
        "graphs": 1,
        "bad": [],
        "error_of_eager": "1e-07",
    }
    return kept | changes


def failed(name: str, error: str, **changes: Any) -> hub.Row:
    return {"library": "timm", "name": name, "budget": "min", "error": error} | changes


KEPT = [row("beit", "min"), row("beit", "50%", error_of_eager="3e-07")]
REFUSED = [row("cait", "min"), row("cait", "50%", trained_at="4000")]
WRONG = [
    row("davit", "min"),
    row("davit", "50%", bad=["counted 2 bytes, predicted 1"]),
]
NOT_OURS = [failed("deit", "Dynamo cannot: X", dynamo_fails="X")]
LATE = [failed("deit3", "took longer than 300 s", timed_out=True)]
OURS = [failed("eva", "KeyError('x')", dynamo_fails=None)]
ALL = [*KEPT, *REFUSED, *WRONG, *NOT_OURS, *LATE, *OURS]


def test_each_architecture_is_counted_once() -> None:
    # Six models: beit and cait trained, one of them at 50 % and one as named; of the others Dynamo
    # cannot compile deit, deit3 took too long, and davit and eva are wrong.
    counts = ("6", "2", "0", "1", "1", "1", "1", "2", "3e-07")
    assert hub.line(ALL) == counts
    lines = hub.summary(ALL).splitlines()
    assert lines[2] == "| timm | transformers | 6 | 2 | 0 | 1 | 1 | 1 | 1 | 2 | 3e-07 |"
    assert lines[3].startswith("| all |  | 6 |")
    assert "timm, davit at 50%: counted 2 bytes, predicted 1" in lines
    assert "timm, deit at min: Dynamo cannot: X" in lines
    assert "timm, eva at min: KeyError('x')" in lines


def test_rows_of_the_other_benchmark_are_of_transformers() -> None:
    older = {key: value for key, value in row("gpt2", "50%").items() if key != "library"}
    assert hub.member_of(older) == hub.Member("transformers", "decoders", "gpt2")
    assert "| transformers | decoders | 1 |" in hub.summary([older])
    assert not hub.is_failure(older)


def test_seconds_and_float64_are_said() -> None:
    timed = [
        row("beit", "50%", seconds=4.0, aot_eager_seconds=2.0),
        row("cait", "50%", seconds=6.0, aot_eager_seconds=2.0, eager_float32_error=0.002),
    ]
    said = list(hub.remarks(timed))
    assert said[0] == ("50%: three steps of 2 models took 5.0 s (median), and 2.0 s with aot_eager")
    assert said[1].startswith("in float64: 1 models")
    assert said[1].endswith("2e-03 to 2e-03")


@pytest.mark.parametrize(
    ("rows", "status"),
    [(KEPT, 0), (REFUSED, 0), (NOT_OURS, 0), (LATE, 0), (WRONG, 1), (OURS, 1)],
)
def test_only_what_is_ours_makes_the_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[hub.Row], status: int
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    assert hub.main(["--rows", str(path)]) == status
    printed = capsys.readouterr().out
    assert "| all |" in printed
    assert f"not run: {len(hub.members(LIBRARIES)) - 1} models: gpt2, " in printed


def test_what_a_file_holds_is_not_run_again() -> None:
    wanted = hub.members(["timm"])
    left = hub.remaining(wanted, KEPT)
    assert len(left) == len(wanted) - 1
    assert "beit" not in {member.name for member in left}
    # A model of another library that has the same name is another model.
    assert hub.Member("timm", "convolutions", "resnet") in hub.remaining(
        wanted, [row("resnet", "min", library="transformers")]
    )


def test_a_process_that_ends_early_has_a_row_that_says_so() -> None:
    budgets = ("min", "50%")
    found = [row("beit", "min")]
    (first, late) = hub.gathered(found, budgets, exitcode=-9, late_s=300)
    assert first == found[0]
    assert (late["budget"], late["timed_out"]) == ("50%", True)
    assert not hub.is_failure(late)
    (_, died) = hub.gathered(found, budgets, exitcode=-11, late_s=None)
    assert "status -11" in died["error"]
    assert hub.is_failure(died)
    # What is measured once for a model is in each of its rows.
    added = {"aot_eager_seconds": 2.0}
    both = list(hub.gathered([*KEPT, added], budgets, exitcode=0, late_s=None))
    assert [each["aot_eager_seconds"] for each in both] == [2.0, 2.0]
    # An error ends a model; no budget is missing then.
    assert len(list(hub.gathered(OURS, budgets, exitcode=0, late_s=None))) == 1


def test_a_library_that_is_not_installed_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(hub, "prepare", lambda: None)
    assert hub.main(["--quick"]) == 0
    printed = capsys.readouterr().out
    for library in LIBRARIES:
        assert f"skipped: {library} is not installed" in printed


def test_there_is_a_small_one_of_each_library_and_names_are_known() -> None:
    everything = hub.members(LIBRARIES)
    assert len(everything) >= 150
    assert len(set(everything)) == len(everything)
    quick, unknown = hub.chosen(everything, None, quick=True)
    assert [member.library for member in quick] == list(LIBRARIES)
    assert not unknown
    named, unknown = hub.chosen(everything, "resnet,renset", quick=False)
    assert {member.library for member in named} == {"transformers", "timm"}
    assert unknown == {"renset"}
    for library, families in LIBRARIES.items():
        names = [name for family in families.values() for name in family]
        assert len(set(names)) == len(names), library


def test_models_drop_nothing_and_hide_nothing_when_asked() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Dropout(0.0))
    assert silence(module)
    assert not silence(module)
    with torch.no_grad():
        module[0].bias.zero_()
    weight = module[0].weight.detach().clone()
    torch.manual_seed(0)
    wake(module)
    assert bool(module[0].bias.any())
    assert torch.equal(module[0].weight, weight)


def test_a_loss_is_of_every_tensor_that_has_gradients() -> None:
    first, second = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    result = {"sample": first, "others": (second, torch.ones(1), None)}
    assert [tuple(tensor.shape) for tensor in tensors(result)] == [(2,), (3,)]
