"""What is said of a step beforehand, and what is explained of it, against the step itself."""

from __future__ import annotations

import gc
import inspect
import json
import pickle
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx

import dtrcompile
from dtrcompile.cli import main
from dtrcompile.demo.memory import static_bytes
from dtrcompile.explain.explained import Fate
from dtrcompile.passes.errors import DTRError, OptionError
from workloads.training import compile_dtr, live_peak_bytes

WIDTH, ROWS = 32, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.down(hidden)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 50)
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        scores = self.head(x * self.scale)
        return nn.functional.cross_entropy(scores, labels)


def made() -> tuple[Model, Tensor, Tensor]:
    torch.manual_seed(0)
    return Model(), torch.randn(ROWS, WIDTH), torch.randint(50, (ROWS,))


@pytest.mark.parametrize(
    "compiler", ["eager", pytest.param("inductor", marks=(pytest.mark.inductor, pytest.mark.slow))]
)
def test_a_forecast_is_what_the_step_is_promised(compiler: str) -> None:
    model, *inputs = made()
    forecast = dtrcompile.plan(model, *inputs, budget="60%", compiler=compiler)
    assert not dtrcompile.reports()
    compile_dtr(model, "60%", compiler=compiler)(*inputs).backward()
    (report,) = dtrcompile.reports()
    assert forecast.fits
    assert forecast.peak_bytes == report.promised_peak_bytes
    assert forecast.baseline_peak_bytes == report.baseline_peak_bytes
    assert forecast.budget_bytes == report.budget_bytes
    assert dict(forecast.split) == dict(report.promised_split)
    assert forecast.overhead == report.overhead > 1
    ours, theirs = forecast.explain().data, report.explain().data
    for field in fields(ours):
        if field.name not in ("title", "facts"):
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
    assert theirs.peak_bytes == report.promised_peak_bytes
    assert theirs.facts["budget"].startswith("60% = ")


def test_a_forecast_says_that_a_loss_outside_is_not_in_it() -> None:
    with_loss, x, labels = made()
    model = with_loss.head
    forecast = dtrcompile.plan(model, x, budget=10**6, compiler="eager")
    assert forecast.loss_bytes == 4 * ROWS * 50 * 4
    assert "a loss outside      not counted; up to about 200.0 KiB more" in str(forecast)
    assert str(dtrcompile.Sweep((forecast,))).endswith(
        "\na loss outside: not counted; up to about 200.0 KiB more"
    )

    def step() -> None:
        scores = model(x)
        nn.functional.cross_entropy(scores, labels).backward()

    held_bytes = live_peak_bytes(step) + static_bytes(model, x)
    assert forecast.peak_bytes < held_bytes <= forecast.peak_bytes + forecast.loss_bytes
    inside = dtrcompile.plan(with_loss, x, labels, budget="60%", compiler="eager")
    assert inside.loss_bytes == 0
    assert "outside" not in str(inside) + str(dtrcompile.Sweep((inside,)))


def test_a_sweep_answers_as_each_plan_does() -> None:
    model, *inputs = made()
    budgets = ["90%", "60%", 150_000, "min", "5%"]
    points = dtrcompile.sweep(model, *inputs, budgets=budgets, compiler="eager").points
    alone = [dtrcompile.plan(model, *inputs, budget=b, compiler="eager") for b in budgets]
    assert points == tuple(alone)
    assert [p.fits for p in points] == [True, True, False, True, False]
    assert points[2].peak_bytes > 150_000
    assert pickle.loads(pickle.dumps(points)) == points
    assert points[4].peak_bytes <= points[3].peak_bytes * 1.001
    text = str(dtrcompile.Sweep(points))
    assert "needs" in text
    assert [row["budget"] for row in json.loads(dtrcompile.Sweep(points).to_json())] == [
        str(p.budget) for p in points
    ]


@pytest.mark.slow
@pytest.mark.inductor
def test_pytorchs_own_settings_hold_what_a_sweep_says_of_them() -> None:
    model, *inputs = made()
    swept = dtrcompile.sweep(model, *inputs, budgets=["min"], stock=[0.5, 0])
    assert [p.setting for p in swept.stock] == [
        "activation_memory_budget=0.5",
        "activation_memory_budget=0",
    ]
    assert "activation_memory_budget=0.5" in str(swept)
    assert "activation_memory_budget=0" in swept.to_json()
    for share, point in zip((0.5, 0), swept.stock, strict=True):
        torch._dynamo.reset()
        with functorch_config.patch(activation_memory_budget=share):
            compiled = torch.compile(model, backend=_inductor)
            compiled(*inputs).backward()
        model.zero_grad(set_to_none=True)
        peak_bytes = live_peak_bytes(lambda: compiled(*inputs).backward())  # noqa: B023
        model.zero_grad(set_to_none=True)
        assert 0 <= point.peak_bytes - peak_bytes - static_bytes(model, *inputs) <= 8
        assert point.overhead > 1
        assert point.baseline_peak_bytes == swept.points[0].baseline_peak_bytes


def _inductor(gm: torch.fx.GraphModule, example_inputs: Sequence[Tensor]) -> Any:
    """By another name: Dynamo's guards know nothing of the setting."""
    return compile_fx(gm, example_inputs)


def test_a_model_without_data_is_planned_as_one_with_data() -> None:
    model, *inputs = made()
    with torch.device("meta"):
        without = Model()
        given = [torch.empty(ROWS, WIDTH), torch.empty(ROWS, dtype=torch.int64)]
    told = [
        dtrcompile.plan(m, *i, budget="60%", compiler="eager")
        for m, i in ((model, inputs), (without, given), (without, inputs))
    ]
    assert told[0] == told[1] == told[2]
    assert all(p.is_meta for p in without.parameters())


def test_an_optimizer_is_counted() -> None:
    model, *inputs = made()
    parameters = sum(p.nbytes for p in model.parameters())
    optimizer = torch.optim.Adam(model.parameters())
    alone = dtrcompile.plan(model, *inputs, budget="100%", compiler="eager")
    beside = dtrcompile.plan(model, *inputs, budget="100%", compiler="eager", optimizer=optimizer)
    state_bytes = beside.outside_bytes
    assert 2 * parameters <= state_bytes <= 2.1 * parameters
    assert beside.peak_bytes == alone.peak_bytes + state_bytes
    assert beside.optimizer_step_bytes > 4 * parameters


def test_every_large_tensor_is_explained_with_its_line() -> None:
    model, *inputs = made()
    explained = dtrcompile.plan(model, *inputs, budget="60%", compiler="eager").explain().data
    names = {*dict(model.named_parameters()), *dict(model.named_buffers()), "x", "labels"}
    constants = [t for t in explained.tensors if t.fate is Fate.CONSTANT and t.kind != "tangent"]
    assert {t.name for t in constants} == names
    source, start = inspect.getsourcelines(Model.forward)
    of_block, start_of_block = inspect.getsourcelines(Block.forward)
    text = {start + i: line.strip() for i, line in enumerate(source)}
    text |= {start_of_block + i: line.strip() for i, line in enumerate(of_block)}
    wanted = {"up": "hidden =", "down": "return x +", "norm": "hidden =", "head": "scores ="}
    large = [t for t in explained.tensors if t.size_bytes >= explained.planned_peak_bytes / 100]
    seen = set()
    for tensor in large:
        if tensor.operator is None:
            continue
        frame = explained.operators[tensor.operator].frames[-1]
        assert frame.file == __file__
        assert frame.code.startswith(text[frame.line].split("(")[0][:8])
        module = tensor.module.rpartition(".")[2]
        if module in wanted:
            assert text[frame.line].startswith(wanted[module])
            seen.add(module)
    assert seen == wanted.keys()


def test_a_report_explains_as_long_as_the_model_is_there() -> None:
    model, *inputs = made()
    compiled = compile_dtr(model, "60%", compiler="eager")
    compiled(*inputs).backward()
    (report,) = dtrcompile.reports()
    assert "head" in str(report.explain())
    assert "get_explained" not in json.loads(report.to_json())
    copied = pickle.loads(pickle.dumps(report))
    assert copied == report
    with pytest.raises(DTRError, match="gone"):
        copied.explain()
    del compiled
    torch._dynamo.reset()
    gc.collect()
    with pytest.raises(DTRError, match="gone"):
        report.explain()


def _breaking(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x.exp()


def test_an_error_while_a_graph_is_compiled_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_args: object, **_kwargs: object) -> None:
        raise ZeroDivisionError("seen in capture")

    monkeypatch.setattr("dtrcompile.compilation.planning.capture", fails)
    model, *inputs = made()
    with pytest.raises(dtrcompile.CaptureError, match="ZeroDivisionError: seen in capture"):
        dtrcompile.plan(model, *inputs, budget="50%", compiler="eager")


def test_what_is_asked_wrongly() -> None:
    model, *inputs = made()
    with pytest.raises(OptionError, match="budgets"):
        dtrcompile.sweep(model, *inputs, budget="50%")
    with pytest.raises(OptionError, match="at least one"):
        dtrcompile.sweep(model, *inputs, budgets=[])
    with pytest.raises(OptionError, match=r"shares from 0 to 1 .*50 is none"):
        dtrcompile.sweep(model, *inputs, stock=[50])
    refused = dtrcompile.plan(model, *inputs, budget=1000, compiler="eager")
    assert not refused.fits
    assert str(refused) == str(refused.refusal)
    with pytest.raises(dtrcompile.InfeasibleBudgetError):
        refused.explain()
    with pytest.raises(dtrcompile.CaptureError, match="one graph"):
        dtrcompile.plan(_breaking, inputs[0].requires_grad_(), budget="min")
    assert replace(refused, get_explained=None) == refused


_MODULE = """
import torch
from torch import nn

def make():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
                            for _ in range(4)))
    return lambda x: model(x).square().sum(), torch.ones(1024, 16, requires_grad=True)

def fails():
    raise RuntimeError("no\\ndata")

def breaks():
    return _breaks, torch.ones(2, requires_grad=True)

def _breaks(x):
    torch._dynamo.graph_break()
    return x.exp()

def raises():
    return _raises, torch.ones(2, requires_grad=True)

def _raises(x):
    if x.shape[0] < 3:
        raise ValueError("a batch of two is too small")
    return x.exp()

def of_two(x, y):
    return (x * y).sum()

def gives_one():
    return of_two, torch.ones(2)

def takes_one(n):
    return breaks()

def exits():
    raise SystemExit(7)

nothing = None
wrong = lambda: 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"model_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(_MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.inductor
@pytest.mark.slow
def test_commands_on_a_users_model(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = f"{module}:make"
    assert main(["plan", named, "--budget", "70%", "--json"]) == 0
    point = json.loads(capsys.readouterr().out)
    assert point["peak_bytes"] <= point["budget_bytes"]
    assert main(["sweep", named, "--budget", "70%", "--budget", "min", "--stock"]) == 0
    first = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert first[:3] == ["budget", "70%", "min"]
    assert [text.partition("=")[0] for text in first[3:]] == ["activation_memory_budget"] * 5
    page = tmp_path / "page.html"
    assert main(["explain", named, "--budget", "70%", "-o", str(page)]) == 0
    assert "Live memory" in page.read_text(encoding="utf-8")
    capsys.readouterr()
    assert main(["explain", named, "--budget", "70%", "--json", "-o", str(page)]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"]
    capsys.readouterr()
    assert main(["compare", named, "--budget", "100%", "--budget", "min"]) == 0
    assert "kept -> recomputed" in capsys.readouterr().out
    assert main(["compare", named, "--budget", "100%"]) == 1
    assert "--budget twice" in capsys.readouterr().err
    assert main(["plan", named, "--budget", "10"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["largest", named, "--budget", "1MiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["points"][-1]["size"] == found["size"]
    assert found["points"][-1]["promised_peak_bytes"] <= found["budget_bytes"] == 1 << 20
    assert main(["largest", named]) == 1
    assert "--budget" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("no_such_module:make", "no module"),
        ("MODULE:missing", "has no 'missing'"),
        ("MODULE:nothing", "cannot be called"),
        ("MODULE:wrong", "returned int"),
        ("MODULE:fails", "RuntimeError: no data"),
        ("MODULE:takes_one", "has to be called without arguments: takes_one() missing 1 required"),
        ("MODULE:exits", "raised SystemExit: 7"),
        ("MODULE:gives_one", "cannot be called with these inputs, 1 in all: missing a required"),
        ("MODULE:breaks", "one graph"),
        ("MODULE:raises", "it raises ValueError('a batch of two is too small')"),
        ("MODULE:", "module:callable"),
        ("missing.json", "missing.json"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "explain", "sweep", "largest", "compare"])
def test_commands_on_what_cannot_be_used(
    command: str, name: str, told: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if command in ("sweep", "largest") and ":" not in name:
        told = "module:callable"
    arguments = [command, name.replace("MODULE", module)]
    if command == "compare":
        arguments += ["--budget", "2MiB"] if ":" in name else [name]
    if command != "compare" or ":" in name:
        arguments += ["--budget", "1MiB"]
    assert main(arguments) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("dtrcompile: ")
    assert output.err.count("\n") == 1, output.err
    assert told in output.err
