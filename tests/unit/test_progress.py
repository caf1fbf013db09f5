"""One line that is rewritten, or lines of the log, and nothing while planning is short."""

from __future__ import annotations

import io
import logging
import threading

import pytest

from dtrcompile import progress
from dtrcompile.passes.fitting.progress import listening, stage
from dtrcompile.progress import Progress, showing


class Screen(io.StringIO):
    """A terminal with one line; ``seen`` is what it showed, one entry a change."""

    def __init__(self, *, is_terminal: bool = True) -> None:
        super().__init__()
        self.is_terminal = is_terminal
        self.seen: list[str] = []

    def isatty(self) -> bool:
        return self.is_terminal

    def flush(self) -> None:
        written = self.getvalue().rpartition("\r")[2].removesuffix("\x1b[K")
        self.seen.append(written)


def test_the_line_is_rewritten_in_place_and_removed() -> None:
    screen = Screen()
    shown = Progress("graph 0", screen)
    shown.begin("lowering plan 1")
    shown.show(2.9)
    assert screen.seen == []
    shown.show(3.1)
    shown.begin("planning")
    shown.show(4.0)
    shown.close()
    shown.close()
    assert screen.seen == ["graph 0: 3 s, lowering plan 1", "graph 0: 4 s, planning", ""]
    assert "\n" not in screen.getvalue()


def test_nothing_is_written_where_planning_is_short() -> None:
    screen = Screen()
    with showing("graph 0", screen):
        stage("planning")
    assert screen.getvalue() == ""


def test_elsewhere_a_line_is_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    screen = Screen(is_terminal=False)
    shown = Progress("graph 0", screen)
    with caplog.at_level(logging.INFO, "dtrcompile"):
        for second in range(60):
            shown.begin(f"lowering plan {second // 10}")
            shown.show(float(second))
        shown.close()
    assert caplog.messages == [
        "graph 0: 3 s, lowering plan 0",
        "graph 0: 18 s, lowering plan 1",
        "graph 0: 33 s, lowering plan 3",
        "graph 0: 48 s, lowering plan 4",
    ]
    assert screen.getvalue() == ""


def test_it_is_shown_while_something_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_QUIET_S", 0.0)
    shown = threading.Event()

    class Watched(Screen):
        def flush(self) -> None:
            super().flush()
            shown.set()

    screen = Watched()
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), showing("graph 0", screen):
        stage("planning")
        assert shown.wait(60)
        raise KeyboardInterrupt
    assert screen.seen[0].startswith("graph 0: ")
    assert screen.seen[0].endswith(" s, planning")
    assert screen.seen[-1] == ""
    assert threading.active_count() == before
    stage("of nobody")


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(progress.VARIABLE, "0")
    monkeypatch.setattr(progress, "_QUIET_S", 0.0)
    screen = Screen()
    before = threading.active_count()
    with showing("graph 0", screen):
        assert threading.active_count() == before
        stage("planning")
    assert screen.getvalue() == ""


def test_stages_reach_the_innermost_listener() -> None:
    outer: list[str] = []
    inner: list[str] = []
    with listening(outer.append):
        stage("a")
        with listening(inner.append):
            stage("b")
        stage("c")
    assert (outer, inner) == (["a", "c"], ["b"])
