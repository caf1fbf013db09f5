"""An explanation as a trace that Perfetto and ``chrome://tracing`` open.

The form is the Trace Event Format: a slice for each run of an operator, on one track a phase and
one for what is computed again, and counters of what the plan holds, by category.  Time is what the
cost model says that the runs take.
"""

from __future__ import annotations

import json
from typing import Any

from dtrcompile.explain.explained import CATEGORIES, Explained

_TRACKS = ("forward", "backward", "computed again")


def to_perfetto(found: Explained) -> str:
    """The trace, as JSON."""
    title = found.title or "dtrcompile"
    events: list[dict[str, Any]] = [_name("process_name", 0, title)]
    events += [_name("thread_name", track, name) for track, name in enumerate(_TRACKS)]
    held = live_bytes(found)
    seen: set[int] = set()
    at_ns = 0
    for run, o in enumerate(found.runs):
        operator = found.operators[o]
        is_again = o in seen
        seen.add(o)
        duration_ns = max(1, operator.cost_ns)
        track = "computed again" if is_again else operator.phase
        place = str(operator.frames[-1]) if operator.frames else ""
        events.append(
            {
                "name": operator.name,
                "cat": track,
                "ph": "X",
                "ts": at_ns / 1000,
                "dur": duration_ns / 1000,
                "pid": 0,
                "tid": _TRACKS.index(track),
                "args": {"run": run, "module": operator.module, "line": place},
            }
        )
        events.append(
            {
                "name": "live bytes",
                "ph": "C",
                "ts": at_ns / 1000,
                "pid": 0,
                "args": {name: held[name][run] for name in CATEGORIES},
            }
        )
        at_ns += duration_ns
    return json.dumps({"displayTimeUnit": "ns", "traceEvents": events}, ensure_ascii=False)


def _name(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 0, "tid": track, "args": {"name": name}}


def live_bytes(found: Explained) -> dict[str, list[int]]:
    """Category -> what the plan holds of it at each run."""
    n = len(found.runs)
    held = {name: [0] * (n + 1) for name in CATEGORIES}
    for tensor in found.tensors:
        change = held[tensor.category]
        for stay in tensor.stays:
            change[stay.first] += tensor.size_bytes
            change[stay.last + 1] -= tensor.size_bytes
    for change in held.values():
        for i in range(1, n):
            change[i] += change[i - 1]
        del change[n:]
    return held
