"""An explanation as one HTML page that needs nothing else.

The template is ``page.html`` beside this module.  What it draws is embedded as columns of JSON,
with each text that occurs more than once written once, and compressed, so that a page of 20,000
operators stays small.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Iterable
from importlib import resources
from typing import Any

from dtrcompile.explain.explained import CATEGORIES, Explained, Fate

_PHASES = ("forward", "backward")


class _Table:
    """Texts by number, each once."""

    def __init__(self, texts: Iterable[Any] = ()) -> None:
        self.numbers: dict[Any, int] = {}
        for text in texts:
            self.number(text)

    def number(self, text: Any) -> int:
        return self.numbers.setdefault(text, len(self.numbers))

    @property
    def texts(self) -> list[Any]:
        return list(self.numbers)


def page(found: Explained) -> str:
    """The page."""
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    columns = json.dumps(_columns(found), ensure_ascii=False, separators=(",", ":"))
    # (Without a time, so that the same explanation is the same page.)
    data = base64.b64encode(gzip.compress(columns.encode(), mtime=0)).decode()
    title = html.escape(found.title or "dtrcompile")
    return template.replace("<title>dtrcompile</title>", f"<title>{title}</title>", 1).replace(
        "@DATA@", data, 1
    )


def _columns(found: Explained) -> dict[str, Any]:
    modules, dtypes, stacks, why = _Table([""]), _Table(), _Table(), _Table()
    causes, categories = _Table(), _Table(CATEGORIES)
    fates = _Table(fate.value for fate in Fate)
    operators, tensors, buffers = found.operators, found.tensors, found.buffers
    return {
        "title": found.title,
        "facts": list(found.facts.items()),
        "peak_bytes": found.peak_bytes,
        "planned_peak_bytes": found.planned_peak_bytes,
        "runs": found.runs,
        "boundary": found.boundary,
        "peak_run": found.peak_run,
        "moments": found.moments,
        "peak_moment": found.peak_moment,
        "boundary_moment": found.boundary_moment,
        "phases": _PHASES,
        "ops": {
            "name": [o.name for o in operators],
            "phase": [_PHASES.index(o.phase) for o in operators],
            "module": [modules.number(o.module) for o in operators],
            "stack": [
                stacks.number(tuple(f"{f} {f.function}  {f.code}".rstrip() for f in o.frames))
                for o in operators
            ],
            "cost": [o.cost_ns for o in operators],
            "runs": [o.runs for o in operators],
            "workspace": [o.workspace_bytes for o in operators],
        },
        "tensors": {
            "name": [t.name for t in tensors],
            "shape": [", ".join(map(str, t.shape)) for t in tensors],
            "dtype": [dtypes.number(t.dtype) for t in tensors],
            "size": [t.size_bytes for t in tensors],
            "category": [categories.number(t.category) for t in tensors],
            "op": [_index(t.operator) for t in tensors],
            "module": [modules.number(t.module) for t in tensors],
            "fate": [fates.number(t.fate.value) for t in tensors],
            "why": [why.number(t.why) for t in tensors],
            "stays": [
                [end for stay in t.stays for end in (stay.first, stay.last)] for t in tensors
            ],
        },
        "buffers": {
            "name": [b.name for b in buffers],
            "cause": [causes.number(b.cause) for b in buffers],
            "category": [categories.number(b.category) for b in buffers],
            "size": [b.size_bytes for b in buffers],
            "first": [b.first for b in buffers],
            "last": [b.last for b in buffers],
            "op": [_index(b.operator) for b in buffers],
            "tensor": [_index(b.tensor) for b in buffers],
        },
        "accounts": [
            [a.module, a.kept_bytes, a.default_kept_bytes, a.peak_bytes, a.cost_ns, a.recompute_ns]
            for a in found.modules
        ],
        # (Filled by the columns above.)
        "modules": modules.texts,
        "dtypes": dtypes.texts,
        "stacks": stacks.texts,
        "why": why.texts,
        "causes": causes.texts,
        "categories": categories.texts,
        "fates": fates.texts,
    }


def _index(number: int | None) -> int:
    return -1 if number is None else number
