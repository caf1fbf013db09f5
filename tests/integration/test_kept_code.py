"""A second process takes up the code that PyTorch's cache kept, and says the same of it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

import dtrcompile
from dtrcompile.compilation import kept_code
from dtrcompile.compilation.inductor import DTRPartitioner
from dtrcompile.compilation.kept_code import TOO_LARGE, KeptCode
from dtrcompile.compilation.one_graph import asking_for
from dtrcompile.options import Options
from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.fitting.measured import Measured
from dtrcompile.passes.fitting.sharing import OtherGraphs
from dtrcompile.passes.graphs.capture import HandedOn
from dtrcompile.passes.inductor import disk_cache
from dtrcompile.passes.inductor.loaded_code import noting_code
from dtrcompile.passes.inductor.lowering import graph_text
from dtrcompile.passes.program.plan import Boundary, Compute, Free, Plan
from dtrcompile.passes.torch_private import (
    BypassAOTAutogradCache,
    GraphLowering,
    functorch_config,
    inductor_config,
)
from dtrcompile.probe import planned_outcome
from dtrcompile.steps.planned import Assignment, HeldBytes
from dtrcompile.steps.step_peak import StepPeak
from dtrcompile.steps.summary import GraphFacts, Summary
from tests.integration.scenarios import SCENARIOS, layers
from workloads.random_modules import Case
from workloads.training import RELEASE, compile_dtr

ROOT = Path(__file__).resolve().parents[2]
_ENTRIES = ("dtrcompile", "aotautograd", "fxgraph")

# --- processes ------------------------------------------------------------------------------------


def seen_by_a_process(folder: Path, budget: str, *names: str, **environment: str) -> Any:
    """What `kept_code_worker` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.kept_code_worker", budget, *names],
        env={
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(folder),
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
            "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            **environment,
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def without_entries(folder: Path) -> None:
    """Fill a cache folder with the kernels that other tests compiled, and nothing else."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if given:
        for path in Path(given).iterdir():
            if path.is_dir() and path.name not in _ENTRIES:
                (folder / path.name).symlink_to(path.resolve())


SAME = ("observed", "peaks", "refused", "reports")
SCRIPTS = ("two_graphs", "evaluation_between", "a_step_of_the_optimizer", "dropout")
# Inductor has no kernel for FlexAttention without AVX.  Where another script has trained the same
# model without retain_graph=True, PyTorch's cache serves its backward, which does not allow that.
MAY_FAIL = {"flex_attention", "retain_graph", "retain_graph_with_dropout"}
# Their default split is compiled, and what it holds is asked for once more when it has been.
AT_THE_MINIMUM = ("a_bag_of_embeddings", "changing_batch_size")


def is_same(first: Any, second: Any) -> bool:
    return all(first[name][what] == second[name][what] for name in second for what in SAME)


@pytest.mark.inductor
@pytest.mark.slow
def test_later_processes_take_up_the_code_and_say_the_same_of_it(tmp_path: Path) -> None:
    without_entries(tmp_path)
    first = seen_by_a_process(tmp_path, "50%", *SCRIPTS)
    assert not any(seen["hits"] for seen in first.values())
    second = seen_by_a_process(tmp_path, "50%", *SCRIPTS)
    assert is_same(first, second)
    for name, seen in second.items():
        assert seen["loads"] == seen["hits"] >= 1, name
        assert seen["searches"] == 0, name
        assert all(seen["from_disk"]), name
    assert second["two_graphs"]["peaks"][-1] > 0
    # Code of which nothing is known, because an entry is gone or is of other code, is not used.
    entries = sorted((tmp_path / "dtrcompile").rglob("*.json"))
    for index, path in enumerate(entries):
        stored = json.loads(path.read_text())
        if "code" not in stored["entry"]:
            continue
        if index % 2:
            path.unlink()
        else:
            stored["entry"]["code"] = "of another"
            stored["checksum"] = disk_cache._checksum(stored["entry"])
            path.write_text(json.dumps(stored))
    third = seen_by_a_process(tmp_path, "50%", "a_step_of_the_optimizer", "dropout")
    assert is_same(first, third)
    assert all(seen["loads"] >= 1 and seen["fits"] >= 1 for seen in third.values())


@pytest.mark.inductor
@pytest.mark.slow
def test_the_first_process_may_still_ask_what_its_graphs_hold(tmp_path: Path) -> None:
    """AOTAutograd's cache takes what is known of the nodes off the backward graph it is given."""
    without_entries(tmp_path)
    first, second = (seen_by_a_process(tmp_path, "min", *AT_THE_MINIMUM) for _ in range(2))
    assert not [name for name, seen in first.items() if seen["refused"]]
    assert is_same(first, second)
    # (The bag is planned a second time from PyTorch 2.14 on.)
    loads = [1 if RELEASE < (2, 14) else 2, 1]
    assert [seen["loads"] for seen in second.values()] == loads
    assert all(seen["loads"] == seen["hits"] for seen in second.values())
    assert not any(seen["misses"] for seen in second.values())


@pytest.mark.inductor
@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("budget", ["50%", "min"])
def test_every_script_sees_the_same_in_the_second_process(tmp_path: Path, budget: str) -> None:
    without_entries(tmp_path)
    names = sorted(SCENARIOS)
    loads = 0
    for part in (names[::4], names[1::4], names[2::4], names[3::4]):
        first, second = (seen_by_a_process(tmp_path, budget, *part) for _ in range(2))
        assert is_same(first, second)
        failed = {n for n, seen in first.items() if (seen["refused"] or "").startswith("failed")}
        assert failed <= MAY_FAIL
        loads += sum(seen["loads"] for seen in second.values())
    assert loads > len(names)


# --- keys -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def plans_that_will_do() -> None:
    """Plans are made with all that is built in: options are part of what is kept."""


@pytest.fixture
def folder(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept_code, "is_asked", lambda: True)
    return cache_folder


def kept(
    target: Any,
    *inputs: Any,
    assignment: Assignment | None = None,
    step_peak: StepPeak | None = None,
    may_estimate: bool = True,
    dynamic: bool = False,
    **options: Any,
) -> list[KeptCode | None]:
    """The places of the graphs that Dynamo makes of a call."""
    torch._dynamo.reset()
    parsed = Options.parse({"budget": "50%", **options})
    found: list[KeptCode | None] = []

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        found.append(
            KeptCode.of(
                gm,
                example_inputs,
                parsed,
                assignment or Assignment(),
                step_peak or StepPeak(),
                may_estimate=may_estimate,
            )
        )
        return gm.forward

    torch.compile(target, backend=backend, dynamic=dynamic)(*inputs)
    return found


def key_of(*args: Any, **kwargs: Any) -> str:
    (found,) = kept(*args, **kwargs)
    assert found is not None
    return found.key


def model(depth: int = 2, width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return layers(depth, width)


@pytest.mark.usefixtures("folder")
def test_each_thing_that_the_code_depends_on_makes_another_key() -> None:
    x = torch.randn(4, 16)
    frozen = model()
    next(frozen.parameters()).requires_grad_(False)
    handed_on = Assignment(handed_on=HandedOn(frozenset({0})))
    changed: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "nothing": ((model(), x), {}),
        "depth": ((model(3), x), {}),
        "width": ((model(2, 17), torch.randn(4, 17)), {}),
        "rows": ((model(), torch.randn(5, 16)), {}),
        "dtype": ((model().double(), x.double()), {}),
        "layout": ((model(), torch.randn(16, 4).t()), {}),
        "an input's gradient": ((model(), x.clone().requires_grad_()), {}),
        "what is frozen": ((frozen, x), {}),
        "dropout in training": ((nn.Sequential(model(), nn.Dropout()), x), {}),
        "dropout in evaluation": ((nn.Sequential(model(), nn.Dropout()).eval(), x), {}),
        "budget": ((model(), x), {"budget": "60%"}),
        "planner": ((model(), x), {"planner": "dtr"}),
        "heuristic": ((model(), x), {"heuristic": "h_lru"}),
        "seconds of planning": ((model(), x), {"planning_s": 3.0}),
        "seconds of lowering": ((model(), x), {"lowering_s": 3.0}),
        "Inductor's settings": ((model(), x), {"inductor": {"max_fusion_size": 7}}),
        "reserve": ((model(), x), {"reserve": 100}),
        "the budget of the step": ((model(), x), {"assignment": Assignment(1000)}),
        "other graphs": ((model(), x), {"assignment": Assignment(others=OtherGraphs(1))}),
        "what follows": ((model(), x), {"assignment": Assignment(more_follow=True)}),
        "what is handed on": ((model(), x), {"assignment": handed_on}),
        "the step's peak": ((model(), x), {"step_peak": StepPeak(1000)}),
        "an estimate": ((model(), x), {"may_estimate": False}),
    }
    keys = {what: key_of(*args, **kwargs) for what, (args, kwargs) in changed.items()}
    equal = [pair for pair in itertools.combinations(keys, 2) if len({keys[k] for k in pair}) == 1]
    assert equal == []
    assert {what: key_of(*args, **kwargs) for what, (args, kwargs) in changed.items()} == keys
    with torch.no_grad():
        assert key_of(model(), x) not in keys.values()
    for name, value in (("epilogue_fusion", False), ("cpp.threads", 3)):
        with inductor_config.patch({name: value}):
            assert key_of(model(), x) not in keys.values()
    with functorch_config.patch(donated_buffer=False):
        assert key_of(model(), x) not in keys.values()


@pytest.mark.usefixtures("folder")
def test_a_scope_whose_inside_is_not_kept_is_part_of_a_key() -> None:
    x = torch.randn(4, 16)
    first, second = model(), model()

    def plain(x: torch.Tensor) -> torch.Tensor:
        return second(first(x))

    def scoped(x: torch.Tensor) -> torch.Tensor:
        with dtrcompile.recompute():
            x = first(x)
        return second(x)

    assert key_of(plain, x) != key_of(scoped, x)


@pytest.mark.usefixtures("folder")
def test_the_place_in_the_source_is_no_part_of_a_key() -> None:
    keys = set()
    texts = set()
    for lines in ("", "\n\n\n"):
        source = f"{lines}def call(x):\n    return x.sin().cos()\n"
        names: dict[str, Any] = {}
        exec(compile(source, f"<{len(lines)}>", "exec"), names)
        keys.add(key_of(names["call"], torch.randn(3, requires_grad=True)))
        graph = fx.symbolic_trace(names["call"])
        for node in graph.graph.nodes:
            node.stack_trace = f'File "model.py", line {len(lines)}, in forward\n    x.sin()'
        graph.recompile()
        assert f"model.py:{len(lines)}" in graph.print_readable(print_output=False)
        texts.add(graph_text(graph))
    assert len(keys) == len(texts) == 1


@torch.library.custom_op("kept_code::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.usefixtures("folder")
def test_nothing_is_kept_of_what_only_this_process_knows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    x = torch.randn(4, 16)
    sized = kept(model(), torch.randn(5, 16), dynamic=True)
    assert sized == [None]
    assert kept(lambda x: twice(x).sin(), x) == [None]
    assert kept(model(), x, cost_model="measured") == [None]
    assert kept(model(), x, verify=False) == [None]
    assert kept(model(), x, budget="auto") == [None]
    assert kept(model(), x)[0] is not None
    monkeypatch.setenv("DTRCOMPILE_ARTIFACTS", str(tmp_path))
    assert kept(model(), x) == [None]  # the files are to be written


def test_nothing_is_kept_where_autograds_cache_is_off() -> None:
    assert not functorch_config.enable_autograd_cache  # by the tests' environment
    assert kept(model(), torch.randn(4, 16)) == [None]


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_keys_of_random_modules_and_options_are_all_different() -> None:
    """Two hundred pairs; the same key means the same graph, inputs and options."""
    choices = [
        {"budget": budget, "planner": planner}
        for budget in ("30%", "50%", "min", 100_000)
        for planner in ("auto", "dtr")
    ]
    texts: dict[str, set[str]] = {}
    modules: list[tuple[nn.Module, torch.Tensor]] = []
    for seed in range(50):
        module, x = Case(seed).made()
        with contextlib.suppress(RuntimeError):  # not every module means anything
            module(x)
            modules.append((module, x))
    for module, x in modules[:30]:
        found: list[tuple[fx.GraphModule, Any]] = []

        def backend(gm: fx.GraphModule, example_inputs: Any, found: Any = found) -> Any:
            found.append((gm, example_inputs))
            return gm.forward

        torch._dynamo.reset()
        torch.compile(module, backend=backend)(x)
        for gm, example_inputs in found:
            for choice in choices:
                place = KeptCode.of(
                    gm,
                    example_inputs,
                    Options.parse(choice),
                    Assignment(),
                    StepPeak(),
                    may_estimate=True,
                )
                assert place is not None
                described = [
                    gm.code,
                    [(v.shape, v.stride(), v.dtype, v.requires_grad) for v in example_inputs],
                    choice,
                ]
                texts.setdefault(place.key, set()).add(str(described))
    assert len(texts) >= 200
    assert all(len(described) == 1 for described in texts.values())


# --- entries --------------------------------------------------------------------------------------


def summary() -> Summary:
    outcome = planned_outcome(
        nn.Sequential(model(), nn.Dropout()),
        [torch.randn(64, 16)],
        Options.parse({"budget": "min", "compiler": "eager"}),
    )
    return Summary.of(outcome, GraphFacts.of(outcome.captured), 0.5)


def test_summaries_as_entries() -> None:
    whole = summary()
    read = Summary.of_entry(json.loads(json.dumps(whole.entry())))
    assert read is not None
    assert read.entry() == whole.entry()
    assert (read.graph, read.program, read.plan, read.stats, read.handed_on, read.others) == (
        whole.graph,
        whole.program,
        whole.plan,
        whole.stats,
        whole.handed_on,
        whole.others,
    )
    assert read.measured_entries() == whole.measured_entries()
    assert read.is_kept
    assert read.graph.draws
    entry = whole.entry()
    for name in entry:
        assert Summary.of_entry({k: v for k, v in entry.items() if k != name}) is None
        assert Summary.of_entry({**entry, name: "something else"}) is None or name in (
            "budget_bytes",
            "is_default",
            "saves_least",
            "is_cut_short",
        )


@pytest.mark.usefixtures("folder")
def test_what_is_known_is_signed_with_the_code() -> None:
    whole = summary()
    place = KeptCode("1" * 64, None)
    assert place.summary_of(["forward", "backward"]) is None
    place.write(whole, ["forward", "backward"])
    read = KeptCode(place.key, disk_cache.read(place.key))
    found = read.summary_of(["forward", "backward"])
    assert found is not None
    assert found.entry() == whole.entry()
    for others in ([], ["forward"], ["backward", "forward"], ["forwardbackward", ""]):
        assert read.summary_of(others) is None


@pytest.mark.usefixtures("folder")
def test_what_cannot_be_taken_up_and_refusals() -> None:
    place = KeptCode("2" * 64, None)
    assert not place.is_useless
    assert not place.was_too_large
    place.write_off(TOO_LARGE)
    read = KeptCode(place.key, disk_cache.read(place.key))
    assert read.is_useless
    assert read.was_too_large
    assert read.refusal is None
    assert read.summary_of([]) is None
    refusal = InfeasibleBudgetError(8, minimum_bytes=9, operator="mm", largest=[("x", 4)])
    place.write_refusal(refusal, 7)
    read = KeptCode(place.key, disk_cache.read(place.key))
    assert str(read.refusal) == str(refusal)
    assert read.around_bytes == 7
    assert not read.is_useless
    # Lines move, and the graph stays the same: then none is named.
    located = refusal.with_places(
        {"mm": "model.py:7", "x": "layer.weight", "another": "model.py:8"}
    )
    KeptCode("2" * 64, None, "lines").write_refusal(located, 7)
    entry = disk_cache.read(place.key)
    assert "model.py:7" in str(KeptCode(place.key, entry, "lines").refusal)
    assert str(KeptCode(place.key, entry, "lines").refusal) == str(located)
    assert str(KeptCode(place.key, entry, "other lines").refusal) == str(refusal)


@pytest.mark.usefixtures("folder")
def test_what_is_held_is_remembered_for_what_is_known() -> None:
    whole = summary()
    place = KeptCode("3" * 64, None)
    held = HeldBytes(
        (1, 2),
        Measured(3, "mm", {"outputs": 3}, 2, 3, 4, 5),
        Measured(4, "addmm", {"inputs": 4}, 4, 3, 2, 1),
        Plan((Compute(0), Boundary(), Free(1)), "0123456789abcdef", "dtr"),
    )
    memory = place.memory_of(whole)
    for handed_on in (HandedOn(frozenset({2, 0}), tangents=True), HandedOn(None)):
        assert memory.read_held(handed_on) is None
        memory.write_held(handed_on, held)
        assert memory.read_held(handed_on) == held
    larger = replace(whole, measured=replace(whole.measured, peak_bytes=1))
    assert place.memory_of(larger).read_held(HandedOn(None)) is None
    disk_cache.write(memory._key_of(HandedOn()), {"plan": "none"})
    assert memory.read_held(HandedOn()) is None


# --- what PyTorch's caches are asked --------------------------------------------------------------


def test_autograds_cache_is_bypassed_where_nothing_is_kept() -> None:
    partitioner = DTRPartitioner(Options.parse({"budget": "50%"}))
    with asking_for(None), pytest.raises(BypassAOTAutogradCache):
        partitioner.uuid()
    seen = [partitioner.uuid()]
    for identity in ("one", "two"):
        with asking_for(identity):
            seen.append(partitioner.uuid())
    assert len(set(seen)) == len(seen)


def test_sources_are_noted_beside_whoever_listens_already() -> None:
    heard: list[str] = []
    before = GraphLowering.save_output_code
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, GraphLowering, "save_output_code", before)
        GraphLowering.save_output_code = heard.append
        with noting_code() as outer:
            GraphLowering.save_output_code("a")
            with noting_code() as inner:
                GraphLowering.save_output_code("b")
        assert GraphLowering.save_output_code == heard.append
    assert (heard, outer, inner) == (["a", "b"], ["a"], ["b"])
    assert GraphLowering.save_output_code is before


@pytest.mark.inductor
def test_without_autograds_cache_nothing_is_loaded() -> None:
    torch.manual_seed(0)
    compile_dtr(model(), "90%", compiler="inductor")(torch.randn(64, 16)).sum().backward()
    (report,) = dtrcompile.reports()
    assert not report.is_plan_from_disk
