"""`python -m bench`: which scripts it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.__main__ import benchmarks, main

ROOT = Path(__file__).resolve().parents[2]


def test_every_script_that_can_be_run_is_a_benchmark() -> None:
    listed = benchmarks()
    for path in (ROOT / "bench").glob("*.py"):
        is_script = "ArgumentParser(" in path.read_text(encoding="utf-8")
        assert (path.stem in listed) == (is_script and path.stem != "__main__"), path.name


def test_an_unknown_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["amples"])
    assert "unknown benchmark 'amples'; there are: ample, " in capsys.readouterr().err
