"""Where the time of a compilation goes, read from PyTorch's compile-time events.

PyTorch notes the beginning and the end of what it does while it compiles, and `dtrcompile` adds
what it does itself.  Each moment belongs to the innermost event that was open then, and each event
to a phase.
"""

from __future__ import annotations

import functools
import json
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtrcompile.passes.fitting.progress import CAPTURE, CHECK, EMISSION, LOWERING, PLANNING
from dtrcompile.passes.torch_private import get_chromium_event_logger

# In the order of a compilation.
TRACING, KERNELS, CODE = "tracing", "kernels", "Inductor"
PHASES = (TRACING, "capture", "planning", "emission", "lowering to count", CODE, KERNELS, "check")

# What is open inside of these belongs to them, whatever it is.
_OURS = {
    CAPTURE: "capture",
    PLANNING: "planning",
    EMISSION: "emission",
    LOWERING: "lowering to count",
    CHECK: "check",
}
_WAITING_FOR_KERNELS = ("async_compile.wait", "PyCodeCache.load_by_key_path", "compile_file")
_INDUCTOR = ("inductor_compile", "fx_codegen_and_compile", "compile_fx_inner")


@dataclass
class Event:
    """One event, with those that it contains; times in nanoseconds."""

    name: str
    start_ns: int
    end_ns: int = 0
    inside: list[Event] = field(default_factory=list)


@dataclass
class CompileEvents:
    """The events of one thread, nested.

    Attributes:
        events: those that no other contains.
    """

    events: list[Event] = field(default_factory=list)
    _open: list[Event] = field(default_factory=list)

    @staticmethod
    def recorded() -> CompileEvents:
        """Record all events of this thread from here on."""
        found, logger = CompileEvents(), get_chromium_event_logger()
        thread = threading.get_ident()
        begin, end = logger.log_event_start, logger.log_event_end

        @functools.wraps(begin)
        def log_event_start(event_name: str, time_ns: int, *args: Any, **kwargs: Any) -> None:
            if threading.get_ident() == thread:
                found.begin(event_name, time_ns)
            begin(event_name, time_ns, *args, **kwargs)

        @functools.wraps(end)
        def log_event_end(event_name: str, time_ns: int, *args: Any, **kwargs: Any) -> None:
            if threading.get_ident() == thread:
                found.end(event_name, time_ns)
            end(event_name, time_ns, *args, **kwargs)

        logger.log_event_start, logger.log_event_end = log_event_start, log_event_end  # type: ignore[method-assign]
        return found

    def begin(self, name: str, time_ns: int) -> None:
        """An event begins, inside of those that are open."""
        event = Event(name, time_ns)
        (self._open[-1].inside if self._open else self.events).append(event)
        self._open.append(event)

    def end(self, name: str, time_ns: int) -> None:
        """The innermost event of that name ends, and with it what is open inside of it."""
        if name not in [event.name for event in self._open]:
            return
        while True:
            event = self._open.pop()
            event.end_ns = time_ns
            if event.name == name:
                return

    def seconds(self) -> dict[str, float]:
        """Of each phase."""
        found: Counter[str] = Counter()
        for event in self.events:
            _add(found, event, TRACING)
        return {phase: found[phase] / 1e9 for phase in PHASES}

    def write_chrome_trace(self, path: Path) -> None:
        """A flame chart, for ``chrome://tracing`` and Perfetto."""
        path.write_text(json.dumps({"traceEvents": _chrome_events(self.events)}))


def _add(found: Counter[str], event: Event, around: str) -> None:
    phase = _phase_of(event.name, around)
    found[phase] += event.end_ns - event.start_ns
    for inner in event.inside:
        found[phase] -= inner.end_ns - inner.start_ns
        _add(found, inner, phase)


def _phase_of(name: str, around: str) -> str:
    if around in _OURS.values():
        return around
    if name in _OURS:
        return _OURS[name]
    if name in _WAITING_FOR_KERNELS:
        return KERNELS
    return CODE if name in _INDUCTOR else around


def _chrome_events(events: list[Event]) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for event in events:
        found.append(
            {
                "name": event.name,
                "ph": "X",
                "ts": event.start_ns / 1e3,
                "dur": (event.end_ns - event.start_ns) / 1e3,
                "pid": 0,
                "tid": 0,
            }
        )
        found += _chrome_events(event.inside)
    return found
