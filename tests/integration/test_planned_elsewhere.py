"""Planning for a GPU that is not there."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import dtrcompile
from dtrcompile.cli import main
from dtrcompile.explain.explained import Fate
from dtrcompile.passes.device import host_copies
from dtrcompile.passes.errors import CaptureError, OptionError
from dtrcompile.passes.graphs import grouping
from dtrcompile.passes.inductor import dry_run, lowering
from dtrcompile.passes.inductor.dry_run import Wrapper
from dtrcompile.passes.nodes import mark_of
from dtrcompile.passes.target.devices import CONTEXT_BYTES, TARGETS
from dtrcompile.passes.target.workspaces import keeps_workspaces, product_bytes
from workloads.training import compile_dtr

WIDTH, ROWS, LAYERS = 256, 256, 4
PARAMETER_BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
DEVICE = "cuda:H100-80GB"

pytestmark = pytest.mark.inductor


class Net(nn.Module):
    def __init__(self, n_layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(n_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().sum()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inner(x).chunk(3, -1)
        query, key, value = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in parts)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.drop(mixed).square().mean()


class Gated(nn.Module):
    """Blocks of a language model without their attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.inner = nn.ModuleList(nn.Linear(WIDTH, 8 * WIDTH) for _ in range(LAYERS))
        self.outer = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for norm, inner, outer in zip(self.norms, self.inner, self.outer, strict=True):
            gate, up = inner(norm(x)).chunk(2, -1)
            x = x + outer(nn.functional.silu(gate) * up)
        return x.square().mean()


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(ROWS, WIDTH)


@pytest.mark.slow
def test_loops_compute_what_they_share_from_what_has_no_more_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Normalized values are not stored for them; the statistics of each row still are."""

    def stored(width: int) -> int:
        inputs = torch.randn(16 * ROWS, WIDTH)
        told = dtrcompile.plan(
            Gated(), inputs, budget="60%", device=DEVICE, autocast=torch.bfloat16
        )
        assert told.fits
        tensors = told.explain().data.tensors
        return sum(t.shape == (16 * ROWS, width) and "float32" in t.dtype for t in tensors)

    inside = stored(WIDTH), stored(1)
    monkeypatch.setattr(grouping, "_loads_cost_most", lambda _node: False)
    assert inside[0] < stored(WIDTH)
    assert inside[1] >= stored(1) > 0


def test_a_simple_net_holds_the_same_on_every_device() -> None:
    """Its kernels write the same values on each: all are multiples of 512 bytes but the loss."""
    model, x = made()
    here = dtrcompile.plan(model, x, budget="100%")
    there = dtrcompile.plan(model, x, budget="100%", device=DEVICE)
    assert there.fits
    assert there.device == "NVIDIA H100 80GB HBM3"
    assert here.device == ""
    # The loss and its gradient are blocks of 512 bytes there, and four bytes here.
    # From PyTorch 2.15 on, each product has cuBLAS's workspace while it runs.
    workspace_bytes = 0 if keeps_workspaces() else product_bytes((9, 0))
    for name in ("peak_bytes", "baseline_peak_bytes"):
        more_bytes = getattr(there, name) - getattr(here, name)
        assert 0 <= more_bytes <= 2 * 508 + (workspace_bytes and workspace_bytes + (1 << 20))
    assert there.split["parameters"] == here.split["parameters"] == PARAMETER_BYTES
    assert here.reserved_bytes is None
    # Whole segments: see `CachingAllocator`.
    assert there.reserved_bytes is not None
    assert there.reserved_bytes >= there.peak_bytes
    assert there.reserved_bytes % (2 << 20) == 0
    assert there.cost_ns < here.cost_ns


@pytest.mark.slow
def test_the_largest_batch_on_a_gpu_that_is_not_there() -> None:
    model, x = made()
    found = dtrcompile.largest(model, x[:4], budget="64MiB", device=DEVICE)
    assert found.budget_bytes == 64 << 20
    point = found.points[-1]
    assert point.size == found.size > ROWS
    assert found.size < found.refused_size <= found.size * 1.001 + 1
    for size, fits in ((found.size, True), (found.refused_size, False)):
        with torch.device("meta"):
            rows = torch.empty(size, WIDTH)
        forecast = dtrcompile.plan(model, rows, budget="64MiB", device=DEVICE)
        assert forecast.fits is fits
        if fits:
            assert forecast.peak_bytes == point.promised_peak_bytes


class MakesTensors(nn.Module):
    """Of values that its program holds, on its parameters' device."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        nothing = torch.tensor([], dtype=x.dtype, device=x.device)
        half = torch.tensor(0.5, device=self.inner.weight.device)
        rows = torch.cat([nothing, self.inner(x).flatten()])
        return (rows * half + torch.tensor([1.0, 2.0], device=x.device).sum()).square().sum()


def test_tensors_that_the_model_makes_of_numbers_are_on_the_gpu() -> None:
    here = dtrcompile.plan(MakesTensors(), torch.randn(ROWS, WIDTH), budget="100%")
    there = dtrcompile.plan(MakesTensors(), torch.randn(ROWS, WIDTH), budget="100%", device="T4")
    assert there.fits
    # Constants are blocks of 512 bytes there.
    assert 0 <= there.split["parameters"] - here.split["parameters"] < 2 * 512


def test_nothing_is_left_of_it() -> None:
    model, x = made()
    dtrcompile.plan(model, x, budget="60%", device=DEVICE)
    assert not torch.cuda.is_available() or torch.cuda.get_device_name() != "NVIDIA H100 80GB HBM3"
    assert all(p.device.type == "cpu" and p.grad is None for p in model.parameters())
    expected = Net()
    expected.load_state_dict(model.state_dict())
    expected(x).backward()
    compile_dtr(model, "100%")(x).backward()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-4)


def test_attention_and_autocast_are_those_of_the_device() -> None:
    """Flash attention keeps no scores: what is saved grows with the length, not with its square."""
    model = Attention()
    saved = [
        dtrcompile.plan(
            model,
            torch.randn(1, n, WIDTH),
            budget="100%",
            device="H200",
            autocast=torch.bfloat16,
        ).saved_bytes
        for n in (128, 256)
    ]
    assert 1.5 < saved[1] / saved[0] < 2.5
    old = [
        dtrcompile.plan(
            model, torch.randn(1, n, WIDTH), budget="100%", device="V100-16GB"
        ).saved_bytes
        for n in (128, 256)
    ]
    assert 1.5 < old[1] / old[0] < 2.5  # memory-efficient attention


class Head(nn.Module):
    """A loss over so many words, most of what the step holds."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, words, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.inner(x)), labels)


def test_checkpointed_attention() -> None:
    """Its kernel counts as random, so PyTorch's partitioner asks the device for a random state."""
    model, x = Attention(), torch.randn(8, ROWS, WIDTH)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(WIDTH, WIDTH), model

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, self.first(x), use_reentrant=False)

    for budget in ("100%", "min"):
        told = dtrcompile.plan(
            Checkpointed(), x, budget=budget, device=DEVICE, autocast=torch.bfloat16
        )
        assert told.fits
        # The parts of what attention reads are not saved.
        assert told.saved_bytes < 3 * x.numel() * 2


def test_what_is_free_has_room_for_whole_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = functools.partial(
        dtrcompile.plan, Net(6), torch.randn(36 * ROWS, WIDTH), device="T4", chunking=False
    )
    whole = plan(budget="100%")
    assert whole.reserved_bytes is not None
    # (The peak counts cuBLAS's workspace from PyTorch 2.15 on, in a segment of its own.)
    assert whole.reserved_bytes > (1.1 if keeps_workspaces() else 1.02) * whole.peak_bytes
    # Less than the segments of the step as it is, and more than what it holds.
    free_bytes = (whole.peak_bytes + whole.reserved_bytes) // 2
    target = replace(TARGETS["T4"], memory_bytes=free_bytes + CONTEXT_BYTES)
    monkeypatch.setitem(TARGETS, "T4", target)  # type: ignore[arg-type]
    told = plan(budget="auto")
    assert told.reserved_bytes is not None
    assert told.reserved_bytes <= free_bytes
    assert told.overhead > 1
    # What the user gives in bytes is taken at the user's word.
    assert plan(budget=free_bytes).overhead == 1


@pytest.mark.slow
def test_an_odd_vocabulary_is_padded_as_on_the_device_and_still_fits() -> None:
    """Two copies of the scores in bfloat16, until there is too little room for them."""
    rows, words = 4096, 30011
    plan = functools.partial(dtrcompile.plan, device=DEVICE, autocast=torch.bfloat16)
    with torch.device("meta"):
        x, labels = torch.randn(rows, WIDTH), torch.zeros(rows, dtype=torch.long)
        odd, even = Head(words), Head(words + 5)
    padded, aligned = (plan(model, x, labels, budget="100%") for model in (odd, even))
    copy_bytes = 2 * rows * words
    assert padded.baseline_peak_bytes - aligned.baseline_peak_bytes > copy_bytes // 2
    smaller = plan(odd, x, labels, budget="45%")
    assert smaller.fits and smaller.chunks
    assert smaller.peak_bytes < aligned.baseline_peak_bytes


def test_a_model_without_data_and_its_optimizer() -> None:
    with torch.device("meta"):
        model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    forecast = dtrcompile.plan(
        model, torch.zeros(ROWS, WIDTH), device="A100-80GB", optimizer=optimizer, budget="auto"
    )
    assert forecast.budget_bytes is not None
    assert 78 << 30 < forecast.budget_bytes < 80 << 30
    # Two moments of each parameter.  Counts of steps are on the CPU.
    assert forecast.outside_bytes == 2 * PARAMETER_BYTES
    assert not optimizer.state
    assert all(p.is_meta for p in model.parameters())
    # On a GPU the optimizer works on lists of tensors, and makes one for its denominators.
    assert forecast.optimizer_step_bytes >= (4 + 1) * PARAMETER_BYTES
    assert forecast.reserved_bytes is not None
    without = dtrcompile.plan(model, torch.zeros(ROWS, WIDTH), device="A100-80GB", budget="auto")
    assert without.reserved_bytes is not None
    assert forecast.reserved_bytes > without.reserved_bytes


def test_in_another_dtype() -> None:
    model, x = made()
    whole = dtrcompile.plan(model, x, budget="100%", device=DEVICE)
    half = dtrcompile.plan(model, x, budget="100%", device=DEVICE, dtype=torch.bfloat16)
    assert half.split["parameters"] * 2 == whole.split["parameters"]
    assert half.saved_bytes * 2 == pytest.approx(whole.saved_bytes, rel=0.01)
    assert next(model.parameters()).dtype is torch.float32


def test_a_forecast_for_a_device_explains_itself() -> None:
    model, x = made()
    told = dtrcompile.plan(model, x, budget="min", device=DEVICE)
    explained = told.explain()
    assert explained.data.planned_peak_bytes > 0
    assert "layers.0.weight" in str(explained)


def test_a_sweep_for_a_device() -> None:
    model, x = made()
    points = dtrcompile.sweep(model, x, budgets=["100%", "min"], device="MI300X").points
    assert [p.fits for p in points] == [True, True]
    assert points[1].peak_bytes < points[0].peak_bytes
    assert json.loads(points[0].to_json())["device"] == "AMD Instinct MI300X"


def test_what_cannot_be_planned_is_said() -> None:
    model, x = made()
    with pytest.raises(OptionError, match="T4 does not compute in bfloat16"):
        dtrcompile.plan(model, x, device="T4", autocast=torch.bfloat16)
    with pytest.raises(OptionError, match="name one of"):
        dtrcompile.plan(model, x, device="cuda:GTX-480")
    with pytest.raises(CaptureError, match=r"pass an nn\.Module"):
        dtrcompile.plan(lambda x: model(x), x, device="T4")


def test_the_eager_executor_too() -> None:
    model, x = made()
    here, there = (
        dtrcompile.plan(model, x, budget="min", device=device, compiler="eager")
        for device in (None, DEVICE)
    )
    assert there.peak_bytes == here.peak_bytes


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--device", "H900"], "no device that is known"),
        (["--device", "T4", "--dtype", "int99"], "no such dtype"),
        (["--device", "T4", "--optimizer", "Foo"], "torch.optim has none of that name"),
        ([], "plan needs --budget"),
        (["--device", "T4", "--budget", "12 stones"], "--budget"),
    ],
)
def test_wrong_command_lines(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "transformers:GPT2Config", *arguments]) == 1
    error = capsys.readouterr().err
    assert told in error
    assert len(error.splitlines()) == 1


def test_a_configuration_by_the_name_of_its_class(capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    from dtrcompile.configured_model import model_of_config

    small = functools.partial(
        transformers.GPT2Config,
        n_layer=1,
        n_embd=64,
        n_head=2,
        vocab_size=512,
        bos_token_id=0,
        eos_token_id=0,
    )
    named = model_of_config(small, batch=2, length=16)
    assert [i.shape for i in named.inputs] == [(2, 16), (2, 16)]
    forecast = dtrcompile.plan(named.model, *named.inputs, budget="100%", device="L4")
    parameters = sum(p.numel() for p in named.model.parameters()) * 4  # type: ignore[attr-defined]
    assert parameters <= forecast.split["parameters"] < parameters + (1 << 20)
    assert main(["plan", "transformers:Trainer", "--budget", "min"]) == 1
    assert "transformers:Trainer" in capsys.readouterr().err


def test_kernels_need_not_be_written_to_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left out of Triton's kernels changes nothing of the wrappers that call them."""
    model = Attention()
    x = torch.randn(1, 128, WIDTH)

    def planned() -> tuple[str, ...]:
        lowering._LOWERED.clear()
        sources.clear()
        dtrcompile.plan(model, x, budget="min", device=DEVICE, autocast=torch.bfloat16)
        return tuple(_calls(source) for source in sources)

    sources: list[str] = []
    lowered = lowering._lowered

    def noted(*args: Any) -> Wrapper:
        wrapper = lowered(*args)
        sources.append(wrapper.source)
        return wrapper

    monkeypatch.setattr(lowering, "_lowered", noted)
    monkeypatch.setattr("dtrcompile.passes.inductor.step.may_fork", lambda: False)
    short = planned()
    monkeypatch.setattr(dry_run, "TritonKernel", ())
    assert planned() == short
    assert len(short) >= 2
    assert all(".run(" in source for source in short)


@pytest.mark.slow
def test_the_wrapper_has_each_copy_to_the_host_where_the_plan_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[tuple[fx.GraphModule, Wrapper]] = []
    lowered = lowering._lowered

    def noted(request: lowering.Request) -> Wrapper:
        wrapper = lowered(request)
        found.append((request.graph, wrapper))
        return wrapper

    monkeypatch.setattr(lowering, "_lowered", noted)
    monkeypatch.setattr("dtrcompile.passes.inductor.step.may_fork", lambda: False)
    inputs = torch.randn(64 * ROWS, WIDTH)
    told = dtrcompile.plan(Gated(), inputs, budget="40%", device=DEVICE, offload="50GB/s")
    assert told.fits
    tensors = told.explain().data.tensors
    assert any(tensor.fate is Fate.OFFLOADED for tensor in tensors)
    copies: Counter[str] = Counter()
    for gm, wrapper in found:
        calls = (node.target.__name__ for node in gm.graph.nodes if node.op == "call_function")
        expected = [name for call in calls if (name := _product(call.split(".")[0])) in _PLACED]
        matches = map(_CALL.match, _lines(wrapper))
        assert [_product(match.group(2)) for match in matches if match] == expected
        copies.update(expected)
        _check_copies(gm, wrapper)
    assert copies["offload"] > 0
    assert copies["wait_for_copy"] == copies["offload"] + copies["prefetch"]


_PLACED = ("mm", "offload", "prefetch", "wait_for_copy")
_CALL = re.compile(
    r"(?:(buf\d+) = )?(?:extern_kernels|torch\.ops\.dtrcompile)\.(\w+)(?:\.default)?\((.*)\)"
)


def _product(name: str) -> str:
    """A product is one, whether Inductor adds the bias in it or after it."""
    return "mm" if name == "addmm" else name


def _check_copies(gm: fx.GraphModule, wrapper: Wrapper) -> None:
    """Each is in its step of the plan; nothing reads or frees what is still being copied."""
    steps = {
        mark_of(node).step
        for node in gm.graph.nodes
        if node.target in (host_copies.offload, host_copies.prefetch)
    }
    arriving: set[str] = set()
    leaving: dict[str, str] = {}
    for line in _lines(wrapper):
        names = set(re.findall(r"\b(?:buf|primals_|arg)\w+", line))
        call = _CALL.match(line)
        match call.group(2) if call else "":
            case "offload":
                assert call is not None
                assert wrapper.steps[call.group(1)] in steps
                (source,) = names - {call.group(1)}
                leaving[source] = call.group(1)
            case "prefetch":
                assert call is not None
                assert wrapper.steps[call.group(1)] in steps
                arriving.add(call.group(1))
            case "wait_for_copy" if len(names) == 1:
                arriving -= names
            case "wait_for_copy":
                (source,) = names & leaving.keys()
                assert names == {source, leaving.pop(source)}
            case _ if not line.startswith("assert_"):
                assert not arriving & names, line
                if line.startswith("del ") or "reuse" in line:
                    assert not leaving.keys() & names, line
    assert not arriving
    assert "not aligned" not in wrapper.source  # kernels read what comes back in wide loads


def _lines(wrapper: Wrapper) -> list[str]:
    """With one name for each buffer."""
    lines: list[str] = []
    names: dict[str, str] = {}
    for line in _calls(wrapper.source).splitlines():
        renamed = re.sub(r"\bbuf\d+\b", lambda m: names.get(m[0], m[0]), line.strip())
        same = re.fullmatch(r"(buf\d+) = (buf\d+)", renamed)
        if same:
            names[same[1]] = same[2]
        elif line.strip().removeprefix("del ") not in names.values():
            lines.append(renamed)
    return lines


def _calls(source: str) -> str:
    """A wrapper without its kernels: what it allocates, calls, reuses and frees."""
    return source.partition("class Runner")[2].partition("def get_args")[0]
