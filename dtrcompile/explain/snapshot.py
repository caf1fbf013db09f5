"""An explanation as a snapshot of the CUDA caching allocator, which PyTorch's memory viewer opens.

The form is that of ``torch.cuda.memory._snapshot()`` (``torch/cuda/_memory_viz.py`` and
``torch/utils/viz/MemoryViz.js`` of PyTorch read it).  The viewer puts the blocks of a segment one
after the other, so that they have to tile it; it reads pickles up to protocol 4; and where events
have categories, it needs one that is called ``unknown``.
"""

from __future__ import annotations

import bisect
import pickle
from typing import Any

from dtrcompile.explain.explained import Explained, ScheduledBuffer

_PROTOCOL = 4
_BASE_ADDRESS = 0x7F0000000000
_UNKNOWN = "unknown"


def to_snapshot(found: Explained) -> bytes:
    """The pickle; of the schedule, or of the plan where there is no schedule."""
    buffers = _buffers(found)
    events = _events(found, buffers)
    space = _Space()
    trace: list[dict[str, Any]] = []
    addresses: dict[int, int] = {}
    for time_us, (is_taken, index) in enumerate(events):
        buffer = buffers[index]
        common = {
            "size": buffer.size_bytes,
            "stream": 0,
            "time_us": time_us,
            "frames": _frames(found, buffer),
            "category": buffer.category,
        }
        if is_taken:
            addresses[index] = space.take(buffer.size_bytes)
            trace.append({"action": "alloc", "addr": addresses[index], **common})
        else:
            address = addresses.pop(index)
            space.give(address, buffer.size_bytes)
            for action in ("free_requested", "free_completed"):
                trace.append({"action": action, "addr": address, **common})
    if trace:
        nothing = {"size": 0, "stream": 0, "time_us": len(events), "frames": []}
        trace.append({"action": "snapshot", "addr": 0, "category": _UNKNOWN, **nothing})
    segment = _segment(found, buffers, addresses, space.end_bytes)
    snapshot = {
        "segments": [segment],
        "device_traces": [trace],
        "allocator_settings": {},
        "external_annotations": [],
    }
    return pickle.dumps(snapshot, protocol=_PROTOCOL)


def _buffers(found: Explained) -> list[ScheduledBuffer]:
    """What is in memory and has bytes; of a plan alone, each stay of a tensor by itself."""
    if found.buffers:
        return [b for b in found.buffers if b.size_bytes]
    return [
        ScheduledBuffer(
            t.name, t.kind, t.category, t.size_bytes, stay.first, stay.last, t.operator, i
        )
        for i, t in enumerate(found.tensors)
        for stay in t.stays
        if t.size_bytes
    ]


def _events(found: Explained, buffers: list[ScheduledBuffer]) -> list[tuple[bool, int]]:
    """Whether a buffer is taken or given back, and which: in order.

    What is given back at a moment is gone before anything is taken at it.
    """
    end = (found.moments if found.buffers else len(found.runs)) - 1
    keyed = []
    for index, buffer in enumerate(buffers):
        keyed.append((buffer.first, 1, index, True))
        if buffer.last < end:
            keyed.append((buffer.last + 1, 0, index, False))
    return [(is_taken, index) for _, _, index, is_taken in sorted(keyed)]


def _frames(found: Explained, buffer: ScheduledBuffer) -> list[dict[str, Any]]:
    """The innermost first, as the viewer shows them; on top, the tensor and its operator."""
    if buffer.tensor is None:
        label = f"{buffer.name} ({buffer.cause})"
    else:
        label = found.tensors[buffer.tensor].name
    if buffer.operator is None:
        return [{"name": buffer.cause, "filename": label, "line": 0}]
    operator = found.operators[buffer.operator]
    top = {"name": f"{operator.name} ({operator.phase})", "filename": label, "line": 0}
    if operator.module:
        top["filename"] = f"{label} of {operator.module}"
    return [
        top,
        *(
            {"name": f"{frame.function}: {frame.code}", "filename": frame.file, "line": frame.line}
            for frame in reversed(operator.frames)
        ),
    ]


class _Space:
    """Addresses, the lowest that has room first."""

    def __init__(self) -> None:
        self.gaps: list[tuple[int, int]] = []  # offset and bytes, ascending, never adjacent
        self.end_bytes = 0

    def take(self, size_bytes: int) -> int:
        for i, (offset, gap_bytes) in enumerate(self.gaps):
            if gap_bytes >= size_bytes:
                self.gaps[i : i + 1] = (
                    [(offset + size_bytes, gap_bytes - size_bytes)]
                    if gap_bytes > size_bytes
                    else []
                )
                return _BASE_ADDRESS + offset
        offset = self.end_bytes
        if self.gaps and sum(self.gaps[-1]) == self.end_bytes:
            offset, _ = self.gaps.pop()
        self.end_bytes = offset + size_bytes
        return _BASE_ADDRESS + offset

    def give(self, address: int, size_bytes: int) -> None:
        offset = address - _BASE_ADDRESS
        i = bisect.bisect_left(self.gaps, (offset, 0))
        if i < len(self.gaps) and self.gaps[i][0] == offset + size_bytes:
            size_bytes += self.gaps.pop(i)[1]
        if i and sum(self.gaps[i - 1]) == offset:
            i -= 1
            offset, before_bytes = self.gaps.pop(i)
            size_bytes += before_bytes
        self.gaps.insert(i, (offset, size_bytes))


def _segment(
    found: Explained, buffers: list[ScheduledBuffer], addresses: dict[int, int], end_bytes: int
) -> dict[str, Any]:
    """All of memory as one segment, with what is in it at the end."""
    blocks: list[dict[str, Any]] = []

    def gap(start: int, end: int) -> None:
        if end > start:
            blocks.append(
                {
                    "address": start,
                    "size": end - start,
                    "requested_size": 0,
                    "state": "inactive",
                    "frames": [],
                }
            )

    at = _BASE_ADDRESS
    for index, address in sorted(addresses.items(), key=lambda item: item[1]):
        size_bytes = buffers[index].size_bytes
        gap(at, address)
        blocks.append(
            {
                "address": address,
                "size": size_bytes,
                "requested_size": size_bytes,
                "state": "active_allocated",
                "frames": _frames(found, buffers[index]),
            }
        )
        at = address + size_bytes
    gap(at, _BASE_ADDRESS + end_bytes)
    active_bytes = sum(buffers[index].size_bytes for index in addresses)
    return {
        "device": 0,
        "address": _BASE_ADDRESS,
        "total_size": end_bytes,
        "allocated_size": active_bytes,
        "active_size": active_bytes,
        "requested_size": active_bytes,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }
