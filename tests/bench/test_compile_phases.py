"""Where the benchmark of compile times says that the time went."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.compile_phases import CODE, KERNELS, PHASES, TRACING, CompileEvents
from dtrcompile.passes.fitting.progress import LOWERING, PLANNING
from dtrcompile.passes.torch_private import dynamo_timed, get_chromium_event_logger

_S = 10**9


def events() -> CompileEvents:
    """Of ten seconds; lowering contains events of the same names as Inductor's own compilation."""
    found = CompileEvents()
    for name, start, end in (
        ("entire_frame_compile", 0, None),
        (PLANNING, 1, 2),
        (LOWERING, 2, None),
        ("GraphLowering.run", 2, 3),
        ("async_compile.wait", 3, 4),
        (LOWERING, None, 5),
        ("inductor_compile", 5, None),
        ("GraphLowering.run", 5, 6),
        ("async_compile.wait", 6, 9),
        ("inductor_compile", None, 9),
        ("entire_frame_compile", None, 10),
    ):
        if start is not None:
            found.begin(name, start * _S)
        if end is not None:
            found.end(name, end * _S)
    return found


def test_each_second_belongs_to_one_phase() -> None:
    seconds = events().seconds()
    assert set(seconds) == set(PHASES)
    assert {phase: s for phase, s in seconds.items() if s} == {
        TRACING: 2.0,
        "planning": 1.0,
        "lowering to count": 3.0,
        CODE: 1.0,
        KERNELS: 3.0,
    }


def test_an_event_that_was_cut_off_ends_with_the_one_around_it() -> None:
    found = CompileEvents()
    found.begin("entire_frame_compile", 0)
    found.begin(PLANNING, 1 * _S)
    found.end("entire_frame_compile", 4 * _S)
    found.end("unknown", 5 * _S)
    assert found.seconds()["planning"] == 3.0


def test_pytorchs_events_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = get_chromium_event_logger()
    for name in ("log_event_start", "log_event_end"):
        monkeypatch.setattr(logger, name, getattr(logger, name))
    found = CompileEvents.recorded()
    with dynamo_timed("outer"), dynamo_timed(PLANNING):
        pass
    (outer,) = found.events
    assert (outer.name, [e.name for e in outer.inside]) == ("outer", [PLANNING])


def test_the_flame_chart_has_every_event(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    events().write_chrome_trace(path)
    found = json.loads(path.read_text())["traceEvents"]
    assert [e["name"] for e in found].count("GraphLowering.run") == 2
    assert max(e["dur"] for e in found) == 10e6
