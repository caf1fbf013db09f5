"""The benchmark for a borrowed GPU: rows, resumption, parts and verdicts, without a device."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import bench.gpu as gpu
from bench.gpu_jobs import Job, Runner
from bench.gpu_parts import BUDGETS, Where, jobs_of
from bench.gpu_rows import (
    PARTS,
    Row,
    RowFile,
    file_name,
    machine,
    rank_correlation,
    read,
    verdict,
)
from bench.gpu_workers import Line, largest_trained, operators
from bench.measure import TURNS, Trainee, device_turn
from bench.plain_models import PLAIN
from bench.rivals import MODELS, checkpoint_blocks, gradients
from workloads.training import relative_error

MACHINE = {"device": "a GPU", "torch": "2.11.0", "cuda": "13.0", "source": "abc", "driver": "1"}
SETTINGS = {"model": "toy", "dtype": "bf16-autocast", "sizes": {"depth": 2}}


def row(name: str, part: str = "promise", settings: Any = None, **found: Any) -> Row:
    return Row(part, SETTINGS if settings is None else settings, name, found, MACHINE)


def dtr(setting: str = "60%", **found: Any) -> Row:
    usual = {
        "method": "dtr",
        "setting": setting,
        "status": "ok",
        "budget_bytes": 600,
        "promised_bytes": 590,
        "baseline_bytes": 1000,
        "peak_bytes": 580,
        "gradient_error": 2e-3,
    }
    return row(f"dtr {setting}", **{**usual, **found})


COMPILE = row("compile", method="compile", setting="", status="ok", gradient_error=2e-3)


# --- rows ---------------------------------------------------------------------------------------


def test_a_row_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "rows.jsonl"
    file = RowFile(path, MACHINE)
    file.add(dtr(gradient_error=math.inf))
    file.add(dtr("min", status="failed", reason="no"))
    (first, second) = read(path)
    assert first.found["gradient_error"] == "inf"
    assert (first.settings, first.machine, second.name) == (SETTINGS, MACHINE, "dtr min")
    again = RowFile(path, MACHINE)
    assert again.names("promise", SETTINGS) == {"dtr 60%", "dtr min"}
    assert again.names("promise", SETTINGS, retry=True) == {"dtr 60%"}
    assert again.names("promise", {**SETTINGS, "dtype": "float32"}) == set()
    assert again.names("tests", SETTINGS) == set()


@pytest.mark.parametrize("what", ["device", "torch", "cuda", "source"])
def test_rows_of_another_machine_or_source_do_not_count(what: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    RowFile(path, MACHINE).add(dtr())
    assert not RowFile(path, {**MACHINE, what: "another"}).rows("promise")
    assert RowFile(path, {**MACHINE, "driver": "another"}).rows("promise")


def test_the_latest_of_equal_rows_counts(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "rows.jsonl", MACHINE)
    file.add(dtr(peak_bytes=1))
    file.add(dtr(peak_bytes=2))
    for same in (file, RowFile(file.path, MACHINE)):
        (found,) = same.rows("promise")
        assert found.found["peak_bytes"] == 2


def test_half_a_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    RowFile(path, MACHINE).add(dtr())
    with path.open("a") as lines:
        lines.write('{"bench": "gpu", "part": "pro')
    assert [r.name for r in read(path)] == ["dtr 60%"]


def test_a_machine_says_what_is_needed() -> None:
    found = machine("a GPU")
    assert found["torch"] == torch.__version__
    assert all(isinstance(found[name], str) for name in MACHINE)
    assert file_name("NVIDIA H100 80GB HBM3") == "gpu-nvidia-h100-80gb-hbm3.jsonl"


# --- processes ----------------------------------------------------------------------------------


def job(script: str, names: tuple[str, ...] = ("a", "b"), **more: Any) -> Job:
    """A process of a few lines of Python, which is told what is measured."""

    def command(measured: Collection[str]) -> list[str]:
        return [sys.executable, "-S", "-c", script, *sorted(measured)]

    return Job("costs", {"operators": "toy"}, names, command, **more)


PRINTS = """
import json, os, sys
def row(name, **found):
    print("row " + json.dumps({"name": name, **found}), flush=True)
"""


def run(tmp_path: Path, *jobs: Job, limit_s: float = 300.0) -> tuple[RowFile, list[Job]]:
    file = RowFile(tmp_path / "rows.jsonl", MACHINE)
    return file, Runner(file, tmp_path / "log").run(jobs, limit_s)


def statuses(file: RowFile) -> dict[str, str]:
    return {r.name: r.status for r in file.rows("costs")}


def test_a_process_makes_the_rows_that_are_missing(tmp_path: Path) -> None:
    script = PRINTS + "[row(name, given=sys.argv[1:]) for name in 'ab' if name not in sys.argv]"
    file, unfinished = run(tmp_path, job(script, ("a",)))
    assert not unfinished
    file, unfinished = run(tmp_path, job(PRINTS + "row('b', given=sys.argv[1:])"))
    assert not unfinished
    found = {r.name: r.found.get("given") for r in file.rows("costs")}
    assert found == {"a": [], "b": ["a"]} or found["b"] == []
    before = file.path.read_text()
    assert not run(tmp_path, job("raise SystemExit('not started')"))[1]
    assert file.path.read_text() == before


def test_a_crash_costs_one_row(tmp_path: Path) -> None:
    script = PRINTS + "row('a') if 'a' not in sys.argv else None\n"
    script += "os.abort() if 'b' not in sys.argv else row('c')"
    file, unfinished = run(tmp_path, job(script, ("a", "b", "c")))
    assert not unfinished
    assert statuses(file) == {"a": "ok", "b": "crashed", "c": "ok"}


def test_a_lost_context_ends_the_process(tmp_path: Path) -> None:
    script = PRINTS + "row('a', status='failed', reason='CUDA error: illegal address')\n"
    script = script.replace("row('a'", "'a' in sys.argv or row('a'") + "row('b', n=len(sys.argv))"
    file, unfinished = run(tmp_path, job(script))
    assert not unfinished
    assert statuses(file) == {"a": "failed", "b": "ok"}
    # It is of a second process, which knew of the first row.
    assert next(r.found["n"] for r in file.rows("costs") if r.name == "b") == 2


def test_what_a_process_was_at_is_named(tmp_path: Path) -> None:
    script = PRINTS + "print('begin found.py::test', flush=True)\nos.abort()"
    file, unfinished = run(tmp_path, job(script, ("all",)))
    assert unfinished
    assert statuses(file) == {"found.py::test": "crashed"}


def test_nothing_starts_when_the_time_is_over(tmp_path: Path) -> None:
    given = job("raise SystemExit('started')")
    file, unfinished = run(tmp_path, given, limit_s=1.0)
    assert unfinished == [given]
    assert not file.rows("costs")


def test_a_row_is_final_when_it_has_its_time(tmp_path: Path) -> None:
    once = {"method": "blocks", "setting": "", "status": "ok", "step_s": None}
    script = PRINTS + f"null = None\nprint('row ' + json.dumps({once}))"
    given = job(script, ("blocks",), is_timed=True)
    file, unfinished = run(tmp_path, given)
    assert unfinished == [given]
    assert statuses(file) == {"blocks": "ok"}
    file, unfinished = run(
        tmp_path, job(script.replace("'step_s': None", "'step_s': 1"), ("blocks",))
    )
    assert not unfinished


def test_processes_have_their_environment_and_their_own_line(tmp_path: Path) -> None:
    script = PRINTS + "row('a', value=os.environ['DTR_BENCH'])"
    beside = replace(job(script, ("a",), is_on_device=False), environment={"DTR_BENCH": "x"})
    file, unfinished = run(tmp_path, beside)
    assert not unfinished
    assert [r.found["value"] for r in file.rows("costs")] == ["x"]


def test_counted_processes_run_side_by_side_and_lone_ones_after_them(tmp_path: Path) -> None:
    """The first two wait for one another; what is alone finds both of them ended."""
    meets = PRINTS + (
        "import time\n"
        "own, other = os.environ['OWN'], os.environ['OTHER']\n"
        "open(own, 'w').close()\n"
        "while not os.path.exists(other): time.sleep(0.01)\n"
        "row('a')"
    )
    files = str(tmp_path / "one"), str(tmp_path / "two")
    pair = [
        replace(
            job(meets, ("a",), is_alone=False),
            settings={"operators": own},
            environment={"OWN": own, "OTHER": other},
        )
        for own, other in (files, files[::-1])
    ]
    alone = job(PRINTS + f"row('a', met=all(map(os.path.exists, {files})))", ("a",))
    file = RowFile(tmp_path / "rows.jsonl", MACHINE)
    runner = Runner(file, tmp_path / "log", side_by_side=2)
    assert not runner.run([alone, *pair], 300.0)
    assert [r.found.get("met") for r in file.rows("costs")] == [None, None, True]


def test_what_is_timed_waits_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TURNS, str(tmp_path / "turns"))
    events: list[str] = []

    def time_it() -> None:
        with device_turn(alone=True):
            events.append("timed")

    with device_turn(), device_turn():
        thread = threading.Thread(target=time_it)
        thread.start()
        thread.join(0.2)
        events.append("counted")
    thread.join()
    assert events == ["counted", "timed"]


# --- parts --------------------------------------------------------------------------------------


def test_every_part_has_processes() -> None:
    where = Where(target="H100-80GB")
    for part in PARTS:
        jobs = jobs_of(part, where)
        assert jobs, part
        for found in jobs:
            assert found.part == part
            assert found.command(()), found.title
            assert json.loads(json.dumps(found.settings)) == found.settings
    assert [j.settings["file"] for j in jobs_of("tests", where)].count("tests/gpu/test_streams.py")


def test_what_tells_the_most_comes_first() -> None:
    jobs = [j for j in jobs_of("promise", Where()) if j.is_on_device]
    first = jobs[0]
    assert first.settings["dtype"] == "bf16-autocast"
    assert first.environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert first.names == ("compile", *(f"dtr {budget}" for budget in BUDGETS))
    # Then a step of each other model, before anything else.
    assert {j.settings["model"] for j in jobs[: len(PLAIN)]} == set(PLAIN)
    assert {name for j in jobs[1 : len(PLAIN)] for name in j.names} == {"compile", "dtr 60%"}
    asked = {
        (j.settings["model"], j.settings["dtype"], j.settings["allocator"], name)
        for j in jobs
        for name in j.names
        if name != "compile"
    }
    assert len(asked) == len(PLAIN) * 2 * 2 * len(BUDGETS)


def test_budgets_that_are_measured_are_not_asked_for() -> None:
    (first, told, *_) = jobs_of("promise", Where(target="H100-80GB"))
    command = first.command({"compile", "dtr 60%", "dtr min"})
    assert command[command.index("--budgets") + 1] == "40%,100%"
    assert not told.is_on_device
    assert told.environment["CUDA_VISIBLE_DEVICES"] == ""
    assert json.loads(told.command({"forecast 60%"})[-1])["budgets"] == ["40%", "min", "100%"]
    assert first.settings == told.settings


def test_only_the_models_that_are_wanted() -> None:
    for part in ("promise", "rivals", "compile"):
        jobs = jobs_of(part, Where(models=("plain_llama",)))
        assert {j.settings["model"] for j in jobs} == {"plain_llama"}


@pytest.mark.parametrize("name", PLAIN)
def test_the_models_need_nothing_and_have_blocks(name: str) -> None:
    model = PLAIN[name]
    assert MODELS[name] is model
    assert model.needs is None and not model.dropout
    for scale in set(model.sizes) - {"cpu", "cuda"}:
        module, _ = model.build(scale, device="meta")
        assert model.block_names(module)
    module, inputs = model.build("quick")
    Trainee(module, inputs, module).step()
    expected = gradients(module)
    wrapped = checkpoint_blocks(module, model)
    Trainee(wrapped, inputs, wrapped).step()
    assert relative_error(gradients(wrapped), expected) < 1e-5


def test_a_line_says_what_fits() -> None:
    line = Line((2, 4), (120, 140))
    assert [line.largest(size) for size in (99, 100, 149, 150, 1000)] == [0, 0, 4, 5, 90]


@pytest.mark.parametrize("most", [0, 1, 5, 31, 32, 33, 100])
def test_the_largest_batch_is_searched_downwards(most: int) -> None:
    def train(batch: int) -> float | None:
        return 0.5 if batch <= most else None

    found = largest_trained(32, train)
    if not most:
        assert found is None
    else:
        assert found is not None and found[1] == 0.5
        assert found[0] <= most
        assert found[0] > min(most, 32) - 2


def test_every_operator_runs() -> None:
    for function, inputs in operators(64, 64, torch.device("cpu")).values():
        assert isinstance(function(*inputs), torch.Tensor)


# --- verdicts -----------------------------------------------------------------------------------


def broken(part: str, *rows: Row) -> tuple[str, ...]:
    return verdict(part, rows).broken


def test_a_promise_that_is_kept() -> None:
    found = verdict("promise", [COMPILE, dtr(), dtr("20%", status="refused", minimum_bytes=300)])
    assert not found.broken
    assert "1 of 1 steps within their budgets, 1 not trained" in found.text
    assert "promise minus measured 1.72%" in found.text
    assert "gradient error at most 1.00 x" in found.text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dtr(peak_bytes=601), "1 bytes over 600"),
        (dtr("min", budget_bytes=None, peak_bytes=591), "1 bytes over 590"),
        (dtr(gradient_error=3.1e-3), "gradient error 1.55 x"),
        (dtr(gradient_error="nan"), "gradient error nan x"),
        (dtr(status="failed", reason="KeyError: x"), "failed: KeyError: x"),
        (row("dtr min", status="crashed", reason="status -6"), "crashed: status -6"),
    ],
)
def test_a_promise_that_is_broken(given: Row, words: str) -> None:
    (text,) = broken("promise", COMPILE, given)
    assert words in text


def test_errors_that_rounding_explains_are_none() -> None:
    plain = replace(COMPILE, found={**COMPILE.found, "gradient_error": 1e-8})
    assert not broken("promise", plain, dtr(gradient_error=9e-7))


def test_a_refusal_breaks_nothing_but_a_rival_may_fail() -> None:
    assert not broken("promise", row("compile", method="compile", status="out of memory"), dtr())


def forecast(**told: Any) -> Row:
    usual = {"fits": True, "peak_bytes": 590, "baseline_peak_bytes": 1000}
    found = {"method": "forecast", "setting": "60%", "status": "ok", "told": {**usual, **told}}
    return row("forecast 60%", **found, budget_bytes=600, peak_bytes=590)


def test_a_forecast_is_compared() -> None:
    found = verdict("promise", [COMPILE, dtr(), forecast()])
    assert not found.broken
    assert "1 of 1 as told" in found.text
    (text,) = broken("promise", COMPILE, dtr(), forecast(peak_bytes=591))
    assert "not as it was told" in text
    refused = dtr(status="refused", minimum_bytes=300)
    assert not broken("promise", COMPILE, refused, forecast(fits=False, peak_bytes=300))
    assert broken("promise", COMPILE, refused, forecast())


def test_tests_are_counted() -> None:
    rows = [
        row("a", "tests", {"file": "f"}, method="test", status="ok"),
        row("b", "tests", {"file": "f"}, method="test", status="failed", reason="assert 0"),
        row("c", "tests", {"file": "f"}, method="test", status="skipped", reason="no kernel"),
        row("all", "tests", {"file": "f"}, status="done"),
    ]
    found = verdict("tests", rows)
    assert found.text == "1 ok, 1 failed, 1 skipped (no kernel)"
    assert found.broken == ("f b: failed: assert 0",)


def test_rivals_are_compared_at_their_peaks() -> None:
    settings = {**SETTINGS, "rival": "blocks"}
    found = {"status": "ok", "peak_bytes": 500, "setting": ""}
    rows = [
        row("compile", "rivals", settings, **found, method="compile", step_s=1.0),
        row("blocks", "rivals", settings, **found, method="blocks", step_s=1.3),
        replace(dtr("as blocks", budget_bytes=500, peak_bytes=490, step_s=1.17), settings=settings),
    ]
    assert "blocks 0.900" in verdict("rivals", rows).text
    assert not verdict("rivals", rows).broken


def test_first_steps_are_compared() -> None:
    def first(budget: str, name: str, seconds: float) -> Row:
        found = {"method": "dtr", "status": "ok", "first_step_s": seconds}
        return row(name, "compile", {"model": "toy", "budget": budget}, **found)

    rows = [first("plain", "cold", 10.0), first("50%", "cold", 15.0)]
    rows += [first("plain", "warm", 4.0), first("50%", "warm", 5.0)]
    assert verdict("compile", rows).text.endswith("cold 1.50, warm 1.25")


def test_the_largest_batches_are_told() -> None:
    def largest(method: str, batch: int) -> Row:
        found = {"status": "ok", "batch": batch, "samples_per_s": batch * 2.0}
        return row("24GB", "largest", {"method": method}, **found)

    text = verdict("largest", [largest("dtr", 12), largest("compile", 5)]).text
    assert text == "24GB: dtr 12 at 24.0 samples/s, compile 5 at 10.0 samples/s"


def test_operators_are_sorted_alike_or_not() -> None:
    def priced(name: str, modelled: int, measured: int) -> Row:
        found = {"method": "operator", "status": "ok"}
        return row(name, "costs", {}, **found, modelled_ns=modelled, measured_ns=measured)

    rows = [priced("a", 10, 20), priced("b", 20, 40), priced("c", 30, 60), priced("d", 40, 800)]
    found = verdict("costs", rows)
    assert "rank correlation 1.000 over 4 operators" in found.text
    assert "worst for d 0.10" in found.text
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 2], [5, 5, 7]) == pytest.approx(1)


@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_said_of_nothing(part: str) -> None:
    assert verdict(part, []).text == "nothing was measured"


# --- command line -------------------------------------------------------------------------------


def test_parts_and_models_are_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.parse([]).parts == PARTS
    chosen = gpu.parse(["--parts", "costs,promise", "--models", "plain_vit", "--limit-s", "60"])
    assert (chosen.parts, chosen.models, chosen.limit_s) == (
        ("costs", "promise"),
        ("plain_vit",),
        60,
    )
    for argv in (["--parts", "promises"], ["--models", "gpt5"]):
        with pytest.raises(SystemExit):
            gpu.parse(argv)
        assert "unknown name" in capsys.readouterr().err


def test_without_a_device_one_line_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert "needs a CUDA device" in line


def test_rows_are_judged_without_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    RowFile(path, MACHINE).add(COMPILE)
    RowFile(path, MACHINE).add(dtr())
    assert gpu.main(["--rows", str(path), "--parts", "promise"]) == 0
    RowFile(path, MACHINE).add(dtr(peak_bytes=700))
    assert gpu.main(["--rows", str(path), "--parts", "promise"]) == 1
    assert "BROKEN" in capsys.readouterr().out


def test_a_run_measures_the_parts_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []

    def jobs_of(part: str, _where: Where) -> list[Job]:
        made.append(part)
        return [replace(job(PRINTS + "row('a', modelled_ns=1, measured_ns=1)", ("a",)), part=part)]

    monkeypatch.setattr(gpu, "jobs_of", jobs_of)
    argv = ["--device", "cpu", "--parts", "costs,tests", "--out", str(tmp_path)]
    assert gpu.main(argv) == 0
    assert made == ["costs", "tests"]
    rows = read(tmp_path / "gpu-cpu.jsonl")
    assert [(r.part, r.name) for r in rows] == [("costs", "a"), ("tests", "a")]
    assert gpu.main(argv) == 0
    assert len(read(tmp_path / "gpu-cpu.jsonl")) == 2
    assert "costs: rank correlation" in capsys.readouterr().out
