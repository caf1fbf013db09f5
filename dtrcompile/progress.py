"""Where planning is, if it takes long: one line, rewritten in place, or lines of the log.

Nothing is shown in the first three seconds.  On a terminal, the line is written to standard error
and removed when planning is done; elsewhere, lines are logged at level INFO, a few a minute.
``DTRCOMPILE_PROGRESS=0`` switches both off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Protocol

from dtrcompile.passes.fitting.progress import listening

log = logging.getLogger("dtrcompile")

VARIABLE = "DTRCOMPILE_PROGRESS"
_QUIET_S = 3.0
_REWRITTEN_EVERY_S = 0.5
_LOGGED_EVERY_S = 15.0
_TO_LINE_START, _CLEAR_TO_END = "\r", "\x1b[K"


class Terminal(Protocol):
    """Of a text stream, what is asked."""

    def write(self, text: str, /) -> object:
        """Write text."""

    def flush(self) -> object:
        """Show what was written."""

    def isatty(self) -> bool:
        """Whether somebody looks at it."""


class Progress:
    """The progress of planning one graph.

    Attributes:
        name: of the graph.
        stage: what planning does at the moment.
    """

    def __init__(self, name: str, terminal: Terminal) -> None:
        self.name = name
        self.stage = ""
        self._terminal = terminal
        self._is_line_there = False
        self._logged: tuple[float, str] | None = None

    def begin(self, stage: str) -> None:
        """Planning begins with ``stage``."""
        self.stage = stage

    def show(self, elapsed_s: float) -> None:
        """Say what planning does, if it takes long."""
        if elapsed_s < _QUIET_S or not self.stage:
            return
        text = f"{self.name}: {elapsed_s:.0f} s, {self.stage}"
        if self._terminal.isatty():
            self._terminal.write(f"{_TO_LINE_START}{text}{_CLEAR_TO_END}")
            self._terminal.flush()
            self._is_line_there = True
        elif self._logged is None or (
            elapsed_s >= self._logged[0] + _LOGGED_EVERY_S and self.stage != self._logged[1]
        ):
            self._logged = elapsed_s, self.stage
            log.info("%s", text)

    def close(self) -> None:
        """Remove the line."""
        if self._is_line_there:
            self._terminal.write(f"{_TO_LINE_START}{_CLEAR_TO_END}")
            self._terminal.flush()
            self._is_line_there = False


@contextlib.contextmanager
def showing(name: str, terminal: Terminal | None = None) -> Iterator[None]:
    """Show the progress of what is planned within it.

    Args:
        name: of the graph.
        terminal: where to write; None: standard error.
    """
    if os.environ.get(VARIABLE) == "0":
        yield
        return
    progress = Progress(name, sys.stderr if terminal is None else terminal)
    is_done = threading.Event()
    start = time.perf_counter()

    def keep_showing() -> None:
        wait_s = _QUIET_S
        while not is_done.wait(wait_s):
            progress.show(time.perf_counter() - start)
            wait_s = _REWRITTEN_EVERY_S

    thread = threading.Thread(target=keep_showing, name="dtrcompile progress", daemon=True)
    thread.start()
    try:
        with listening(progress.begin):
            yield
    finally:
        is_done.set()
        thread.join()
        progress.close()
