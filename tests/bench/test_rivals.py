"""The benchmark against the alternatives: its rows and how it measures, without a compiler."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import bench.rivals as rivals
from bench.measure import Trainee
from bench.rivals_rows import Row, draw, summarize, table
from bench.zoo import SCALES, ZOO
from dtrcompile.passes.errors import InfeasibleBudgetError
from workloads.training import relative_error


def made_up_rows() -> list[Row]:
    def dtr(setting: str, peak: int, budget: int | None, promised: int, step_s: float) -> Row:
        return Row(
            "toy",
            "dtr",
            setting,
            peak_bytes=peak,
            budget_bytes=budget,
            promised_bytes=promised,
            baseline_bytes=1000,
            step_s=step_s,
            gradient_error=3e-7,
        )

    return [
        Row("toy", "compile", peak_bytes=1000, step_s=1.0, gradient_error=2e-7),
        Row("toy", "memory_budget", "0.5", peak_bytes=800, step_s=1.1),
        Row("toy", "memory_budget", "0.0", peak_bytes=900, step_s=1.4),
        Row("toy", "blocks", peak_bytes=500, step_s=1.3),
        dtr("60%", 600, 600, 600, 1.1),
        dtr("50%", 490, 500, 500, 1.2),  # promised 10 of 1000 too much: 1 %
        dtr("40%", 360, 400, 400, 1.5),  # 4 %
        Row("toy", "dtr", "20%", status="refused", minimum_bytes=300),
        dtr("min", 310, None, 310, 2.0),
    ]


def test_the_summary_answers_what_was_asked() -> None:
    (summary,) = summarize(made_up_rows())
    assert (summary.dtr_bytes, summary.memory_budget_bytes, summary.blocks_bytes) == (310, 800, 500)
    assert summary.selective_bytes is None
    # Within the blocks' 500 bytes the 50 % row is the fastest: 1.2 s / 1.3 s.
    assert summary.step_ratio == pytest.approx(1.2 / 1.3)
    # At most the blocks' 1.3 s: the 50 % row is the smallest: 490 / 500.
    assert summary.peak_ratio == pytest.approx(490 / 500)
    assert summary.error_ratio == pytest.approx(1.5)
    assert summary.promise_off == pytest.approx(0.04)
    assert (summary.promises, summary.close_promises) == (4, 3)
    assert summary.broken == ()
    assert "dtr / best budget 0.39" in summary.lines()[0]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (Row("toy", "dtr", "50%", peak_bytes=501, budget_bytes=500), "1 bytes over 500"),
        (Row("toy", "dtr", "min", peak_bytes=9, promised_bytes=8), "1 bytes over 8"),
        (Row("toy", "dtr", "50%", status="failed", reason="KeyError: x"), "KeyError: x"),
        (Row("toy", "dtr", "50%", status="refused"), "refused"),
        (Row("toy", "dtr", "min", status="refused", minimum_bytes=1), "refused"),
    ],
)
def test_a_broken_promise_is_named(row: Row, words: str) -> None:
    (summary,) = summarize([row])
    (broken,) = summary.broken
    assert words in broken


def test_a_rival_that_fails_breaks_no_promise() -> None:
    rows = [Row("toy", "blocks", status="failed", reason="no"), *made_up_rows()[4:]]
    (summary,) = summarize(rows)
    assert summary.step_ratio is None
    assert summary.blocks_bytes is None
    assert not summary.broken


def test_rows_survive_json(tmp_path: Path) -> None:
    rows = made_up_rows()
    rows[0].gradient_error = math.inf
    path = tmp_path / "rows.jsonl"
    lines = [{"bench": "rivals", **row.to_json(), "machine": {}} for row in rows]
    lines.append({"bench": "another"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert rivals.read_rows(path) == rows
    assert rivals.main(["--rows", str(path), "--plot", str(tmp_path)]) == 0
    assert (tmp_path / "rivals-toy.png").exists()


@pytest.mark.parametrize("origin", ["machine", "process"])
def test_steps_measured_elsewhere_are_left_out(origin: str, tmp_path: Path) -> None:
    rows = made_up_rows()
    path = tmp_path / "rows.jsonl"
    lines = [
        {"bench": "rivals", **row.to_json(), origin: f"of {row.method == 'memory_budget'}"}
        for row in rows
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for before, after in zip(rows, rivals.read_rows(path), strict=True):
        assert after.peak_bytes == before.peak_bytes
        assert after.step_s == (None if before.method == "memory_budget" else before.step_s)


def test_one_curve_a_method() -> None:
    axes = draw("toy", made_up_rows()).axes[0]
    assert [line.get_label() for line in axes.lines] == [
        "torch.compile",
        "activation_memory_budget",
        "per-block checkpoints",
        "dtr",
    ]
    ours = axes.lines[-1]
    assert list(ours.get_xdata()) == sorted(ours.get_xdata())


def test_steps_are_compared_with_the_plain_compile() -> None:
    cells = {row[2]: row for row in table(made_up_rows()) if row[1] == "dtr"}
    assert cells["min"][9] == "2.00"
    assert cells["20%"][9] == "-"


def test_settings_follow_the_blocks_they_are_compared_with() -> None:
    arguments = rivals.parse(
        ["--methods", "compile,memory_budget,blocks,dtr", "--shares", "0.5", "--budgets", "min"]
    )
    assert rivals.settings(arguments) == [
        ("compile", ""),
        ("memory_budget", "0.5"),
        ("blocks", ""),
        ("dtr", "min"),
        ("dtr", rivals.AS_BLOCKS),
    ]


def test_every_solver_has_every_share() -> None:
    arguments = rivals.parse(
        ["--methods", "memory_budget", "--shares", "0.5,0.0", "--solvers", "dp,greedy"]
    )
    assert rivals.settings(arguments) == [
        ("memory_budget", "0.5"),
        ("memory_budget", "0.0"),
        ("memory_budget", "0.5 greedy"),
        ("memory_budget", "0.0 greedy"),
    ]


def test_every_other_product_is_saved() -> None:
    def products(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.tanh(x @ x)
        return x

    runs: list[str] = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            runs.append(str(function))
            return function(*args, **(kwargs or {}))

    x = torch.randn(4, 4, requires_grad=True)
    result = checkpoint(
        products, x, use_reentrant=False, context_fn=rivals.save_every_other_product
    )
    with Counted():
        result.sum().backward()
    # Two gradients for each product, and the second and the fourth again.
    assert runs.count("aten.mm.default") == 4 * 2 + 2


@pytest.mark.parametrize("name", ["mixture", "siamese", "lstm_lm", "resnet50"])
def test_checkpointed_blocks_compute_the_same_with_the_same_parameters(name: str) -> None:
    model = ZOO[name]
    module, inputs = model.build("quick")
    plain = Trainee(module, inputs, module)
    plain.step()
    expected = rivals.gradients(module)
    # An eager LSTM cell writes into the product that the policy saved; torch refuses.
    policies = (None,) if name == "lstm_lm" else (None, rivals.save_products)
    for context_fn in policies:
        wrapped = rivals.checkpoint_blocks(module, model, context_fn)
        shared = zip(module.parameters(), wrapped.parameters(), strict=True)
        assert all(a is b for a, b in shared)
        count = sum(isinstance(m, rivals.Checkpointed) for m in wrapped.modules())
        assert count == len(model.block_names(module)) > 0
        plain.restore()
        Trainee(wrapped, inputs, wrapped).step()
        assert relative_error(rivals.gradients(wrapped), expected) < 1e-5


def test_the_budget_is_the_measured_peak_of_a_rival(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []

    def compiled_by(_method: str, setting: object, _model: object, module: torch.nn.Module) -> Any:
        given.append(setting)
        return module, module

    monkeypatch.setattr(rivals, "compiled_by", compiled_by)
    argv = ["--quick", "--methods", "selective,memory_budget,dtr", "--shares", "0.5"]
    budgets = ["--budgets", "as selective,as memory_budget 0.5,as blocks"]
    arguments = rivals.parse([*argv, *budgets, "--rounds", "0", "--reference", "none"])
    rows: list[Row] = []
    rivals._Bench(ZOO["siamese"], arguments).run(rows.append)
    assert given == ["", "0.5", rows[0].peak_bytes, rows[1].peak_bytes]
    assert [row.status for row in rows] == ["ok"] * 4 + ["failed"]
    assert rows[-1].reason == "ValueError: the peak of blocks was not measured"
    assert all(row.gradient_error is None for row in rows)


def test_a_row_is_measured_against_float64() -> None:
    rows: list[Row] = []
    arguments = rivals.parse(["--quick", "--methods", "eager", "--rounds", "1"])
    rivals._Bench(ZOO["siamese"], arguments).run(rows.append)
    row = rows[-1]
    assert row.status == "ok"
    assert row.peak_bytes is not None and row.static_bytes is not None
    assert row.peak_bytes > row.static_bytes > 0
    assert row.step_s is not None and row.step_s > 0
    # Rounded to 24 bits, and not further off than a hundred such roundings.
    assert row.gradient_error is not None
    assert 0 < row.gradient_error < 1e-5


def test_what_a_method_cannot_do_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter(
        [
            InfeasibleBudgetError(10, minimum_bytes=20),
            RuntimeError("first line\nsecond line"),
            torch.OutOfMemoryError("CUDA out of memory."),
        ]
    )

    def refuse(*_: object) -> None:
        raise next(errors)

    monkeypatch.setattr(rivals, "compiled_by", refuse)
    arguments = rivals.parse(["--quick", "--methods", "dtr", "--budgets", "50%,40%,min"])
    rows: list[Row] = []
    rivals._Bench(ZOO["siamese"], arguments).run(rows.append)
    refused, failed, out = rows[:3]
    assert (refused.status, refused.budget_bytes, refused.minimum_bytes) == ("refused", 10, 20)
    assert (failed.status, failed.reason) == ("failed", "RuntimeError: first line")
    assert out.status == "out of memory"


@pytest.mark.parametrize("most", [0, 1, 2, 3, 13, 16, 100, 1000])
def test_the_largest_batch_is_found_to_a_sixteenth(most: int) -> None:
    found = rivals.largest(lambda batch: batch <= most)
    assert found <= most <= found + max(1, found // 16)
    assert most > 16 or found == most
    assert rivals.largest(lambda batch: batch <= most, most=4) == min(found, 4)


def test_a_batch_fits_or_does_not() -> None:
    arguments = rivals.parse(["--quick", "--methods", "eager"])
    model = ZOO["siamese"]
    module, _ = model.build("quick")
    assert rivals.fits(model, "eager", 1 << 30, 2, arguments)
    # Adam's moments alone fill it.
    assert not rivals.fits(model, "eager", rivals.adam_bytes(module), 2, arguments)


@pytest.mark.parametrize(
    "argv",
    [
        ["--models", "gpt5"],
        ["--methods", "magic"],
        ["--largest-batch", "40%"],
        ["--models", "mixture,siamese", "--scale", "few-gb"],
    ],
)
def test_a_wrong_name_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        rivals.parse(argv)
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("name", ZOO)
def test_every_model_has_blocks_and_three_sizes(name: str) -> None:
    model = ZOO[name]
    assert set(model.sizes) == set(SCALES)
    if not model.is_there:
        pytest.skip(f"{model.needs} is not installed")
    module, inputs = model.build("quick", batch=3)
    assert model.block_names(module)
    assert any(3 in t.shape[:2] for t in inputs)
