"""What a compilation leaves for people: files that the command line reads."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from dtrcompile import artifacts
from dtrcompile.cli import main
from tests.integration.scenarios import layers
from workloads.training import compile_dtr


def train(compiler: str = "eager") -> None:
    compile_dtr(layers(4, 16), "50%", compiler=compiler)(torch.randn(256, 16)).sum().backward()


def test_nothing_is_written_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(artifacts.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    train()
    assert list(tmp_path.iterdir()) == []


def test_a_plan_can_be_replayed_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "folder"
    monkeypatch.setenv(artifacts.VARIABLE, str(folder))
    train()
    assert sorted(p.name for p in folder.iterdir()) == [
        "graph0-explanation.json",
        "graph0-plan.txt",
        "graph0-program.json",
        "graph0-report.txt",
    ]
    program, plan = (str(folder / f"graph0-{end}") for end in ("program.json", "plan.txt"))
    assert main(["replay", program, plan]) == 0
    assert "planned peak" in capsys.readouterr().out
    assert main(["explain", str(folder / "graph0-explanation.json")]) == 0
    assert capsys.readouterr().out.startswith("dtrcompile graph 0: training, eager, cpu\n")


@pytest.mark.inductor
def test_a_schedule_can_be_compared_with_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(artifacts.VARIABLE, str(tmp_path))
    train("inductor")
    files = [str(tmp_path / f"graph0-{end}") for end in ("program.json", "plan.txt")]
    assert main(["gap", *files, str(tmp_path / "graph0-schedule.json")]) == 0
    output = capsys.readouterr().out
    assert "scheduled peak" in output
    assert "steps allocate something" in output


def test_a_folder_that_cannot_be_written_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    monkeypatch.setenv(artifacts.VARIABLE, str(file))
    with caplog.at_level(logging.WARNING, "dtrcompile"):
        train()
    assert artifacts.VARIABLE in caplog.text
