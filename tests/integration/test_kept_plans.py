"""A second process makes no plan and lowers nothing; what is kept on disk is right or ignored."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import dtrcompile
from dtrcompile.options import Options
from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.fitting.fit import Outcome
from dtrcompile.passes.fitting.kept_choices import Choice, refusal_entry, refusal_of_entry
from dtrcompile.passes.fitting.sharing import OtherGraphs
from dtrcompile.passes.inductor import disk_cache, lowering
from dtrcompile.passes.inductor.lowering import graph_text, without_device_index
from dtrcompile.passes.program.plan import Boundary, Compute, Free, Plan
from dtrcompile.passes.target.devices import TARGETS, planning_for
from dtrcompile.passes.torch_private import (
    FakeTensorMode,
    functorch_config,
    inductor_config,
)
from dtrcompile.probe import planned_outcome
from tests.integration.counting import Counted
from tests.integration.scenarios import layers
from workloads.training import compile_dtr, gradients_of

ENTRY = {"plan": "text", "numbers": [1, 2]}


@pytest.fixture(scope="module", autouse=True)
def plans_that_will_do() -> None:
    """Plans are made with all that is built in: options are part of what is kept."""


@pytest.fixture
def folder(cache_folder: Path) -> Path:
    return cache_folder


def files(folder: Path) -> list[Path]:
    return sorted((folder / "dtrcompile").rglob("*.json"))


def key(*parts: object) -> str:
    found = disk_cache.key_of("test", *parts)
    assert found is not None
    return found


# --- entries --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
def test_what_was_written_is_read() -> None:
    disk_cache.write(key(1), ENTRY)
    assert disk_cache.read(key(1)) == ENTRY
    assert disk_cache.read(key(2)) is None


def test_a_file_that_was_cut_off_is_no_entry_at_any_length(folder: Path) -> None:
    disk_cache.write(key(1), ENTRY)
    (path,) = files(folder)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert disk_cache.read(key(1)) is None
    path.write_bytes(whole)
    assert disk_cache.read(key(1)) == ENTRY


@pytest.mark.parametrize("text", ["[]", "null", "{}", '{"key": 1}', "\xff", '{"entry": {}}'])
def test_a_foreign_file_is_no_entry(folder: Path, text: str) -> None:
    disk_cache.write(key(1), ENTRY)
    files(folder)[0].write_text(text, encoding="utf-8")
    assert disk_cache.read(key(1)) is None


def test_the_entry_of_another_key_or_one_that_was_changed_is_ignored(folder: Path) -> None:
    disk_cache.write(key(1), ENTRY)
    disk_cache.write(key(2), ENTRY)
    first, second = files(folder)
    first.write_bytes(second.read_bytes())
    assert [disk_cache.read(key(i)) for i in (1, 2)].count(None) == 1
    stored = json.loads(second.read_text())
    stored["entry"]["numbers"] = [1, 3]
    second.write_text(json.dumps(stored))
    assert [disk_cache.read(key(i)) for i in (1, 2)] == [None, None]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.usefixtures("folder")
def test_a_disk_that_takes_nothing_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk_cache, "write_atomic", refuse)
    monkeypatch.setattr(disk_cache, "FileLock", refuse)
    with disk_cache.one_at_a_time(key(1)):
        disk_cache.write(key(1), ENTRY)
    assert disk_cache.read(key(1)) is None


def test_where_inductors_cache_is_off_this_is_off() -> None:
    assert not inductor_config.fx_graph_cache  # by the tests' environment
    assert disk_cache.key_of("test") is None


def test_where_all_caches_are_off_this_is_off(folder: Path) -> None:
    with inductor_config.patch(force_disable_caches=True):
        assert disk_cache.key_of("test") is None
    assert disk_cache.read(None) is None
    disk_cache.write(None, ENTRY)
    assert files(folder) == []


def test_entries_travel_with_pytorchs_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_cache.write(key(1), ENTRY)
    packed = torch.compiler.save_cache_artifacts()
    assert packed is not None
    elsewhere = folder / "elsewhere"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(elsewhere))
    assert disk_cache.read(key(1)) is None
    torch.compiler.load_cache_artifacts(packed[0])
    assert disk_cache.read(key(1)) == ENTRY


# --- keys -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("folder")
def test_a_key_covers_its_parts_and_their_order() -> None:
    parts = [(), ("a",), ("a", "b"), ("ab",), ("b", "a"), ("a", ""), (1,), (1, 2), (12,)]
    assert len({key(*p) for p in parts}) == len(parts)


@pytest.mark.parametrize(
    ("module", "setting", "value"),
    [
        (inductor_config, "max_fusion_size", 7),
        (inductor_config, "epilogue_fusion", False),
        (inductor_config, "cpp.threads", 5),
        (inductor_config, "triton.cudagraphs", True),
        (functorch_config, "donated_buffer", False),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_key_covers_the_settings(module: Any, setting: str, value: Any) -> None:
    assert module.get_config_copy()[setting] != value
    before = key()
    with module.patch({setting: value}):
        assert key() != before
    assert key() == before


@pytest.mark.parametrize("name", ["compile_threads", "trace.enabled"])
@pytest.mark.usefixtures("folder")
def test_a_key_leaves_out_what_changes_no_schedule(name: str) -> None:
    before = key()
    with inductor_config.patch({name: 3}):
        assert key() == before


@pytest.mark.usefixtures("folder")
def test_a_key_covers_the_process_wide_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key()]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    keys.append(key())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    keys.append(key())
    with planning_for(TARGETS["T4"]):
        keys.append(key())
    monkeypatch.setattr(disk_cache, "_installation", lambda _target: ("another release",))
    keys.append(key())
    assert len(set(keys)) == len(keys)


@pytest.mark.usefixtures("folder")
def test_nothing_is_kept_under_a_setting_without_identity() -> None:
    with inductor_config.patch(post_grad_custom_pre_pass=print):
        assert disk_cache.key_of("test") is None


@pytest.mark.slow
def test_keys_are_the_same_in_every_process() -> None:
    script = (
        "from dtrcompile.passes.inductor import disk_cache\n"
        "print(disk_cache.key_of('test', frozenset()))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1
    assert len(printed.pop().strip()) == 64


def text_of_ranks(*ranks: int) -> list[str]:
    """The text of a graph on each rank's device, which need not be there."""
    texts = []
    for rank in ranks:
        with FakeTensorMode():
            x = torch.empty(2, 3, device=f"cuda:{rank}")
            graph = make_fx(lambda x: torch.zeros(3, device=x.device) + x.sin())(x)
        texts.append(graph_text(graph))
    return texts


def test_ranks_ask_for_the_same_plan() -> None:
    """Each has a device of its own, and one of them plans for all."""
    first, second = text_of_ranks(0, 1)
    assert first != second
    assert "cuda:0" in first
    assert "index=0" in first
    assert without_device_index([first]) == without_device_index([second]) != [first]
    both = [first, second]  # of a model on two devices
    assert without_device_index(both) == both
    on_cpu = ['x: "f32[2][1]cpu"']
    assert without_device_index(on_cpu) == on_cpu


def test_choices_as_entries() -> None:
    plan = Plan((Compute(0), Boundary(), Free(1), Compute(0)), "0123456789abcdef", "dtr")
    for choice in (Choice(plan, OtherGraphs(1, 2, 3), 4, 5), Choice(None, OtherGraphs(), 0, 7)):
        assert Choice.of_entry(json.loads(json.dumps(choice.entry()))) == choice
    assert Choice.of_entry(None) is None
    assert Choice.of_entry({"plan": "dtrcompile-plan 9"}) is None
    assert Choice.of_entry({}) is None


def test_refusals_as_entries() -> None:
    for refusal in (
        InfeasibleBudgetError(8, minimum_bytes=9, operator="mm", largest=[("x", 4), ("y", 2)]),
        InfeasibleBudgetError(8),
    ):
        read = refusal_of_entry(json.loads(json.dumps(refusal_entry(refusal))))
        assert str(read) == str(refusal)
    assert refusal_of_entry(None) is None
    assert refusal_of_entry({"plan": None}) is None
    assert Choice.of_entry(refusal_entry(InfeasibleBudgetError(8))) is None


# --- plans ----------------------------------------------------------------------------------------


def trained(width: int = 16, rows: int = 256, **options: Any) -> tuple[Any, dict[str, Any]]:
    """The report and the gradients of a step, as a process of its own would have them."""
    torch._dynamo.reset()
    dtrcompile.clear_reports()
    lowering._LOWERED.clear()
    torch.manual_seed(0)
    model = layers(4, width)
    budget = options.pop("budget", "50%")
    compile_dtr(model, budget, compiler="inductor", **options)(
        torch.randn(rows, width)
    ).sum().backward()
    (report,) = dtrcompile.reports()
    return report, gradients_of(model)


def told(report: Any) -> Any:
    """What a report says of a plan."""
    return (
        report.promised_peak_bytes,
        report.planned_peak_bytes,
        report.promised_split,
        report.recomputed,
        report.overhead,
        report.verification,
    )


@pytest.mark.inductor
@pytest.mark.usefixtures("folder")
def test_a_second_process_plans_and_lowers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch.setattr)
    with inductor_config.patch(compile_threads=1):  # what another process lowers is not counted
        first, gradients = trained()
    searches, lowerings = counted.searched_and_lowered()
    assert searches >= 1
    assert lowerings >= 4  # forward and backward, of the default split and of a plan
    second, same = trained()
    assert counted.searched_and_lowered() == (0, 0)
    assert told(second) == told(first)
    assert all(torch.equal(same[name], gradients[name]) for name in gradients)


class WithLoss(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(x).square().sum()
        return loss


def probed(width: int = 16, rows: int = 256, depth: int = 4, **options: Any) -> Outcome:
    """What a step would be compiled with; no kernel is."""
    torch._dynamo.reset()
    lowering._LOWERED.clear()
    torch.manual_seed(0)
    model = WithLoss(layers(depth, width))
    given = {"budget": "60%", **options}
    return planned_outcome(model, [torch.randn(rows, width)], Options.parse(given))


CHANGES: list[dict[str, Any]] = [
    {"budget": "70%"},
    {"budget": "min"},
    {"width": 17},
    {"rows": 255},
    {"depth": 5},
    {"planner": "dtr"},
    {"heuristic": "h_lru"},
    {"planning_s": 0.01},
    {"lowering_s": 0.01},
    {"inductor": {"max_fusion_size": 7}},
]


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.usefixtures("folder")
def test_each_thing_that_a_plan_depends_on_makes_another_plan() -> None:
    assert not probed().is_kept
    for change in CHANGES:
        assert not probed(**change).is_kept, change
    for change in ({}, *CHANGES):
        assert probed(**change).is_kept, change


@pytest.mark.inductor
@pytest.mark.usefixtures("folder")
def test_a_refusal_is_kept_and_names_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch.setattr)
    refusals = []
    for _ in range(2):
        with pytest.raises(InfeasibleBudgetError) as caught:
            probed(budget=20_000)
        refusals.append(str(caught.value))
    assert counted.searched_and_lowered()[0] == 1
    assert refusals[0] == refusals[1]


@pytest.mark.inductor
@pytest.mark.usefixtures("folder")
def test_an_entry_that_promises_what_is_not_so_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch.setattr)
    first, _ = trained()
    of_entry = Choice.of_entry

    def changed(entry: Any) -> Choice | None:
        return of_entry(entry if entry is None else {**entry, "peak_bytes": 1})

    def broken(entry: Any) -> Choice | None:
        choice = of_entry(entry)
        if choice is None or choice.plan is None:
            return None
        steps = choice.plan.steps[1:]
        return Choice(Plan(steps, choice.plan.program, "dtr"), choice.others, 0, choice.peak_bytes)

    counted.searched_and_lowered()
    for wrong in (changed, broken):
        monkeypatch.setattr(Choice, "of_entry", staticmethod(wrong))
        second, _ = trained()
        assert counted.searched_and_lowered()[0] >= 1
        assert told(second) == told(first)


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.usefixtures("folder")
def test_dynamic_sizes_are_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch.setattr)

    def formulas() -> list[str]:
        torch._dynamo.reset()
        dtrcompile.clear_reports()
        lowering._LOWERED.clear()
        torch.manual_seed(0)
        model = nn.Sequential(layers(4, 16))
        compiled = torch.compile(model, backend="dtr", options={"budget": 120_000}, dynamic=True)
        for rows in (64, 200):
            compiled(torch.randn(rows, 16)).sum().backward()
        return [report.peak_formula for report in dtrcompile.reports()]

    first = formulas()
    assert first[0]
    assert counted.searched_and_lowered()[1] > 0
    assert formulas() == first
    assert counted.searched_and_lowered() == (0, 0)
