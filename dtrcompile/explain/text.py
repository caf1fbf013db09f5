"""An explanation as text."""

from __future__ import annotations

from collections import Counter

from dtrcompile.explain.explained import (
    CATEGORIES,
    Explained,
    ExplainedTensor,
    Fate,
    ModuleAccount,
    format_ns,
)
from dtrcompile.passes.errors import format_bytes
from dtrcompile.text_table import indented, text_table

DEFAULT_ROWS = 15


def explanation_text(found: Explained, rows: int = DEFAULT_ROWS) -> str:
    """What is live at the peak, what becomes of the largest tensors, and what each module pays.

    Args:
        rows: of each table, the largest.
    """
    parts = [_head(found), _at_peak(found, rows)]
    for fate, heading in _HEADINGS.items():
        parts.append(_tensors(found, fate, heading, rows))
    parts.append(_modules(found, rows))
    return "\n\n".join(part for part in parts if part)


def _head(found: Explained) -> str:
    lines = [found.title] if found.title else []
    width = max((len(name) for name in found.facts), default=0)
    lines += [f"  {name:<{width}}  {value}" for name, value in found.facts.items()]
    return "\n".join(lines)


def _at_peak(found: Explained, rows: int) -> str:
    """Of the schedule where there is one, else of the plan."""
    if found.buffers:
        live = [
            (
                b.size_bytes,
                b.category,
                _buffer_name(found, b.tensor, b.name),
                _place(found, b.operator),
            )
            for b in found.at_peak
        ]
        what = f"the compiled code holds {format_bytes(found.peak_bytes)}"
        operator = next((b.operator for b in found.buffers if b.first == found.peak_moment), None)
    else:
        live = [
            (t.size_bytes, t.category, _tensor_name(t), _place(found, t.operator))
            for t in found.tensors
            if t.is_at_peak
        ]
        live.sort(key=lambda row: -row[0])
        what = f"the plan holds {format_bytes(found.planned_peak_bytes)}"
        operator = found.runs[found.peak_run] if found.peak_run >= 0 else None
    at = f" at {found.operators[operator].name}" if operator is not None else ""
    by_category: Counter[str] = Counter()
    for size_bytes, category, *_ in live:
        by_category[category] += size_bytes
    split = ", ".join(
        f"{name} {format_bytes(by_category[name])}" for name in CATEGORIES if by_category[name]
    )
    cells = [(format_bytes(n), category, name, place) for n, category, name, place in live]
    table = text_table(("bytes", "category", "tensor", "computed at"), cells, rows)
    return f"At the peak, {what}{at}: {split}\n{indented(table)}"


_HEADINGS = {
    Fate.RECOMPUTED: "Freed and computed again",
    Fate.OFFLOADED: "Copied to the host and back",
    Fate.KEPT: "Kept from forward to backward",
}


def _tensors(found: Explained, fate: Fate, heading: str, rows: int) -> str:
    tensors = sorted((t for t in found.tensors if t.fate is fate), key=lambda t: -t.size_bytes)
    if not tensors:
        return ""
    total = format_bytes(sum(t.size_bytes for t in tensors))
    cells = [
        (format_bytes(t.size_bytes), _tensor_name(t), t.module, _place(found, t.operator), t.why)
        for t in tensors
    ]
    table = text_table(("bytes", "tensor", "module", "computed at", "why"), cells, rows)
    return f"{heading}: {len(tensors)} tensors, {total}\n{indented(table)}"


def _modules(found: Explained, rows: int) -> str:
    def weight(account: ModuleAccount) -> tuple[int, int]:
        return (-max(account.saved_bytes, account.kept_bytes), -account.recompute_ns)

    accounts = sorted(found.modules, key=weight)
    cells = [
        (
            account.module or "(the model itself)",
            format_bytes(account.default_kept_bytes),
            format_bytes(account.kept_bytes),
            format_bytes(account.peak_bytes),
            format_ns(account.cost_ns),
            format_ns(account.recompute_ns),
        )
        for account in accounts
    ]
    header = ("module", "kept by default", "kept", "at the peak", "cost", "computed again")
    table = indented(text_table(header, cells, rows))
    return f"What each module keeps and pays\n{table}"


def _tensor_name(tensor: ExplainedTensor) -> str:
    shape = ", ".join(map(str, tensor.shape))
    return f"{tensor.name} {tensor.dtype}[{shape}]" if tensor.dtype else tensor.name


def _buffer_name(found: Explained, tensor: int | None, name: str) -> str:
    return name if tensor is None else _tensor_name(found.tensors[tensor])


def _place(found: Explained, operator: int | None) -> str:
    """The innermost line of the user's program."""
    if operator is None:
        return ""
    explained = found.operators[operator]
    if not explained.frames:
        return explained.module
    frame = explained.frames[-1]
    return f"{frame}  {frame.code}".rstrip()
