"""The command line: what it prints, and that a mistake gives a message and no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dtrcompile
from dtrcompile.cli import main
from dtrcompile.passes.program.io import to_json
from dtrcompile.passes.program.plan import Plan
from dtrcompile.passes.program.program import Operator, Phase, Program, Storage, StorageKind, Tensor
from dtrcompile.passes.program.replay import replay


def chain() -> Program:
    """x → a → b → c → loss, then backward reads c, b and a: 10 bytes each, the ends 1 byte.

    The baseline holds x, a, b, c and then the loss and its gradient: 1 + 3 * 10 + 1 + 1 = 33 at the
    boundary's other side; without saving anything twice, a and b can be computed again.
    """
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    storages = [("x", 1, StorageKind.INPUT)]
    storages += [(name, 10, StorageKind.INTERMEDIATE) for name in "abc"]
    storages += [("loss", 1, StorageKind.OUTPUT)]
    storages += [(f"d{name}", 1, StorageKind.INTERMEDIATE) for name in "cb"]
    storages += [("da", 1, StorageKind.GRADIENT)]
    reads = {1: (0,), 2: (1,), 3: (2,), 4: (3,), 5: (3, 4), 6: (5, 2), 7: (6, 1)}
    return Program(
        tuple(Storage(i, name, size, kind) for i, (name, size, kind) in enumerate(storages)),
        tuple(Tensor(i, name, i, i - 1 if i else None) for i, (name, _, _) in enumerate(storages)),
        tuple(
            Operator(i - 1, f"make_{storages[i][0]}", forward if i < 5 else backward, ids, (i,), 7)
            for i, ids in reads.items()
        ),
        (4, 7),
        boundary=4,
        name="chain",
    )


@pytest.fixture
def program_file(tmp_path: Path) -> Path:
    path = tmp_path / "program.json"
    path.write_text(to_json(chain()), encoding="utf-8")
    return path


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == dtrcompile.__version__


def test_info_names_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dtrcompile"] == dtrcompile.__version__
    assert "H200" in found["devices_to_plan_for"]
    assert main(["info"]) == 0
    output = capsys.readouterr().out
    assert f"dtrcompile {dtrcompile.__version__}" in output
    assert "python 3." in output
    assert "torch " in output


@pytest.mark.parametrize("budget", ["100%", "1kB", "70%", "min"])
def test_plan_prints_a_plan_that_replays(
    program_file: Path, capsys: pytest.CaptureFixture[str], budget: str
) -> None:
    assert main(["plan", str(program_file), "--budget", budget]) == 0
    captured = capsys.readouterr()
    _, stats = replay(chain(), Plan.from_text(captured.out))
    assert f"planned peak:   {stats.peak_bytes} bytes" in captured.err


def test_a_plan_with_copies_replays_over_its_link_or_another(
    program_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_file = str(tmp_path / "plan.txt")
    link = ["--host-link", "inf"]
    arguments = ["plan", str(program_file), "--budget", "80%", "-o", plan_file]
    assert main([*arguments, "--planner", "offload", *link]) == 0
    planned = capsys.readouterr().out
    assert "overhead:       1.000 x" in planned
    assert "compute waits 0 ns" in planned
    assert main(["replay", str(program_file), plan_file]) == 0
    assert capsys.readouterr().out == planned
    assert main(["replay", str(program_file), plan_file, "--host-link", "1e-6"]) == 0
    assert "compute waits 0 ns" not in capsys.readouterr().out
    assert main([*arguments, "--planner", "dtr", *link]) == 1
    assert "unknown option of planner 'dtr' 'host_link'" in capsys.readouterr().err


def test_plan_to_a_file_and_replay_of_it(
    program_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_file = tmp_path / "plan.txt"
    arguments = ["plan", str(program_file), "--budget", "80%", "-o", str(plan_file)]
    assert main([*arguments, "--planner", "dtr", "--heuristic", "h_lru"]) == 0
    planned = capsys.readouterr().out
    assert "planner:        dtr(h_lru)" in planned
    assert main(["replay", str(program_file), str(plan_file)]) == 0
    assert capsys.readouterr().out == planned
    assert main(["replay", str(program_file), str(plan_file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] > 0
    assert main(["replay", str(program_file), str(plan_file), "--json", "--steps"]) == 1
    assert "--steps" in capsys.readouterr().err
    assert main(["replay", str(program_file), str(plan_file), "--steps"]) == 0
    steps = capsys.readouterr().out.splitlines()
    plan = Plan.from_text(plan_file.read_text(encoding="utf-8"))
    assert len(steps) == len(plan.steps) + len(planned.splitlines())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "PROGRAM", "--budget", "lots"], "option 'budget' cannot be read from 'lots'"),
        (["plan", "PROGRAM", "--budget", "auto"], "--budget auto needs a device"),
        (["plan", "PROGRAM", "--budget", "1"], "no plan fits a budget of 1 B"),
        (["plan", "PROGRAM", "--budget", "1kB", "--planner", "best"], "unknown planner 'best'"),
        (
            ["plan", "PROGRAM", "--budget", "1kB", "--heuristic", "h_dtr_e"],
            "Did you mean 'h_dtr_eq'?",
        ),
        (["plan", "MISSING", "--budget", "1kB"], "No such file"),
        (["plan", "train"], "train: No such file or directory. If a model is meant"),
        (["plan", "BINARY", "--budget", "1kB"], "is not a text file"),
        (["plan", "PLAN", "--budget", "1kB"], "plan.txt: not a JSON text"),
        (["explain", "OTHER"], "other.json: not an explanation"),
        (["compare", "OTHER"], "compare needs two explanation files"),
        (["sweep", "m:f", "--plot", "FOLDER"], "is a folder; name a file in it"),
        (["plan", "OTHER", "--budget", "1kB"], "the program has no 'format'"),
        (["plan", "PROGRAM", "--device", "H100-80GB"], "--device: plan has no use for it with a"),
        (["plan", "PROGRAM", "--budget", "1kB", "--json"], "--json: plan has no use for it"),
        (["plan", "m:f", "--budget", "1kB", "-o", "f"], "--output: plan has no use for it with a"),
        (["explain", "MISSING", "--budget", "1kB"], "No such file"),
        (["explain", "OTHER", "--budget", "1kB"], "--budget: explain has no use for it with an"),
        (
            ["compare", "OTHER", "OTHER", "--dtype", "bfloat16", "--length", "8"],
            "--dtype and --length: compare has no use for it",
        ),
        (["replay", "PROGRAM", "PROGRAM"], "this is not a plan of this version"),
        (["replay", "PROGRAM", "MISSING"], "No such file"),
        (["replay", "PROGRAM", "PLAN"], "the plan is for program 0123"),
        (["demo", "--budget", "lots"], "--budget cannot be read from 'lots'"),
    ],
)
def test_mistakes_give_one_message_and_no_traceback(
    program_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    files = {
        "PROGRAM": program_file,
        "MISSING": tmp_path / "missing",
        "BINARY": tmp_path / "binary",
        "PLAN": tmp_path / "plan.txt",
        "OTHER": tmp_path / "other.json",
        "FOLDER": tmp_path,
    }
    files["BINARY"].write_bytes(b"\xff\xfe\x00")
    files["PLAN"].write_text("dtrcompile-plan 1\nprogram 0123\nplanner x\n", encoding="utf-8")
    files["OTHER"].write_text("{}", encoding="utf-8")
    status = main([str(files.get(argument, argument)) for argument in arguments])
    captured = capsys.readouterr()
    assert status == 1
    assert captured.err.startswith("dtrcompile: ")
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("arguments", [[], ["fly"], ["plan"], ["demo", "--steps", "0"]])
def test_a_wrong_command_line_exits_with_two(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: dtrcompile" in capsys.readouterr().err


def test_the_infeasible_error_of_the_command_line_names_a_budget_that_works(
    program_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(program_file), "--budget", "5"]) == 1
    minimum = capsys.readouterr().err.split("can be met is ")[1].split(" ")[0]
    assert main(["plan", str(program_file), "--budget", minimum]) == 0


def test_a_reader_that_goes_away_is_no_error_message(program_file: Path) -> None:
    command = f'"{sys.executable}" -m dtrcompile plan "{program_file}" --budget 100% | true'
    run = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in run.stderr
