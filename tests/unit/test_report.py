"""The report: what it prints, what is kept, and where it is logged."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from dataclasses import FrozenInstanceError, fields, replace

import pytest

import dtrcompile
from dtrcompile import report as report_module
from dtrcompile.report import CompileReport, add_report, clear_reports, next_graph_index, reports

MIB = 2**20

REPORT = CompileReport(
    graph=0,
    kind="training",
    compiler="inductor",
    device="cpu",
    budget="40%",
    budget_bytes=96 * MIB,
    baseline_peak_bytes=240 * MIB,
    promised_peak_bytes=96 * MIB,
    planned_peak_bytes=90 * MIB,
    promised_split={"parameters": 20 * MIB, "saved": 76 * MIB, "gradients": 0},
    saved_bytes=80 * MIB,
    overhead=1.17,
    operators=200,
    recomputed={"mm": 1, "gelu": 3},
    planner="dtr(h_dtr_eq)",
    planning_s=0.12,
    notes=("the first note",),
)


def test_the_printed_report() -> None:
    assert str(REPORT) == (
        "dtrcompile graph 0: training, inductor, cpu\n"
        "  budget              40% = 96.0 MiB (100663296 bytes)\n"
        "  baseline peak       240.0 MiB\n"
        "  promised peak       96.0 MiB (40.0% of the baseline)\n"
        "    parameters        20.0 MiB\n"
        "    saved             76.0 MiB\n"
        "  planned peak        90.0 MiB (37.5% of the baseline)\n"
        "  saved for backward  80.0 MiB\n"
        "  overhead            1.170 x the baseline's compute\n"
        "  recomputed          2 of 200 operators, 4 extra runs: gelu x3, mm\n"
        "  planner             dtr(h_dtr_eq), 0.12 s\n"
        "  note                the first note"
    )


def test_a_report_of_the_smallest_budget_where_nothing_is_recomputed() -> None:
    text = str(replace(REPORT, budget="min", budget_bytes=None, recomputed={}, lowering_s=1.5))
    assert "  budget              min\n" in text
    assert "none of 200 operators" in text
    assert "  schedule check      1.50 s" in text


def test_many_recomputed_operators_are_cut_short() -> None:
    text = str(replace(REPORT, recomputed={f"op_{i}": 1 for i in range(9)}))
    assert "9 of 200 operators, 9 extra runs: op_0, op_1, op_2, op_3, op_4, and 4 more" in text


def test_an_empty_graph_prints() -> None:
    empty = replace(REPORT, baseline_peak_bytes=0, promised_peak_bytes=0, planned_peak_bytes=0)
    assert "promised peak       0 B\n" in str(empty)


def test_json_has_every_field_and_reads_back() -> None:
    read = json.loads(REPORT.to_json())
    assert set(read) == {f.name for f in fields(CompileReport)} - {"get_explained"}
    assert CompileReport(**{**read, "notes": tuple(read["notes"])}) == REPORT


def test_a_report_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        REPORT.overhead = 1.0  # type: ignore[misc]


def test_reports_are_kept_in_order_until_cleared() -> None:
    assert reports() == ()
    for _ in range(3):
        add_report(replace(REPORT, graph=next_graph_index()))
    assert [report.graph for report in dtrcompile.reports()] == [0, 1, 2]
    clear_reports()
    assert reports() == ()
    assert next_graph_index() == 0


def test_only_the_last_reports_are_kept() -> None:
    assert report_module.MOST_REPORTS >= 100
    for graph in range(report_module.MOST_REPORTS + 5):
        add_report(replace(REPORT, graph=graph))
    assert len(reports()) == report_module.MOST_REPORTS
    assert reports()[0].graph == 5


def test_threads_share_the_store_and_never_a_graph_index() -> None:
    def compile_some() -> None:
        for _ in range(50):
            add_report(replace(REPORT, graph=next_graph_index()))

    threads = [threading.Thread(target=compile_some) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(report.graph for report in reports()) == list(range(400))


def test_a_report_is_logged_at_info(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dtrcompile"):
        add_report(REPORT)
    assert str(REPORT) in caplog.text


@pytest.mark.parametrize("setting", ["dtrcompile", "+dtrcompile"])
def test_torch_logs_reaches_the_logger(setting: str) -> None:
    code = (
        "import logging, torch\n"
        "logging.getLogger('dtrcompile').info('at info')\n"
        "logging.getLogger('dtrcompile').debug('at debug')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TORCH_LOGS": setting, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "at info" in run.stderr
    assert ("at debug" in run.stderr) == setting.startswith("+")
