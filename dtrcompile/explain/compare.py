"""Two explanations side by side: of two budgets, two planners, or of a model that was changed.

Tensors are matched by name, and modules by path; what only one of them has is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from dtrcompile.explain.explained import Explained, ExplainedTensor, format_ns
from dtrcompile.passes.errors import format_bytes
from dtrcompile.text_table import indented, text_table

_Pairs: TypeAlias = list[tuple[ExplainedTensor, ExplainedTensor]]


def comparison_text(first: Explained, second: Explained, rows: int) -> str:
    """Totals, the tensors of which different things become, and what each module keeps and pays.

    Args:
        rows: of each table, the largest.
    """
    pairs = _pairs(first, second)
    parts = [
        _totals(first, second),
        _fates(pairs, rows),
        _sizes(pairs, rows),
        _only(first, second),
        _modules(first, second, rows),
    ]
    return "\n\n".join(part for part in parts if part)


def _totals(first: Explained, second: Explained) -> str:
    def row(name: str, value: Callable[[Explained], int], form: Callable[[int], str]) -> list[str]:
        before, after = value(first), value(second)
        return [name, form(before), form(after), _change(before, after)]

    cells = [
        row("peak", lambda e: e.peak_bytes, format_bytes),
        row("peak of the plan", lambda e: e.planned_peak_bytes, format_bytes),
        row("without a budget", lambda e: e.baseline_peak_bytes, format_bytes),
        row("time of operators", _cost_ns, format_ns),
        row("operators run again", lambda e: len(e.runs) - len(e.operators), str),
    ]
    titles = [e.title or name for e, name in ((first, "first"), (second, "second"))]
    return text_table(["", *titles, "change"], cells)


def _change(before: int, after: int) -> str:
    return f"{after / before - 1:+.1%}" if before else ""


def _cost_ns(explained: Explained) -> int:
    return sum(operator.cost_ns * operator.runs for operator in explained.operators)


def _pairs(first: Explained, second: Explained) -> _Pairs:
    """The tensors of both, the largest first."""
    named = {tensor.name: tensor for tensor in second.tensors}
    pairs = [(t, named[t.name]) for t in first.tensors if t.name in named]
    return sorted(pairs, key=lambda pair: -max(t.size_bytes for t in pair))


def _fates(pairs: _Pairs, rows: int) -> str:
    changed = [(a, b) for a, b in pairs if a.fate is not b.fate]
    if not changed:
        return "The same becomes of every tensor."
    cells = [
        (format_bytes(b.size_bytes), b.name, b.module, f"{a.fate.value} -> {b.fate.value}")
        for a, b in changed
    ]
    total = format_bytes(sum(b.size_bytes for _, b in changed))
    table = text_table(("bytes", "tensor", "module", "becomes"), cells, rows)
    return f"Other things become of {len(changed)} tensors, {total}\n{indented(table)}"


def _sizes(pairs: _Pairs, rows: int) -> str:
    changed = [(a, b) for a, b in pairs if a.size_bytes != b.size_bytes]
    if not changed:
        return ""
    cells = [
        (format_bytes(a.size_bytes), format_bytes(b.size_bytes), b.name, b.module)
        for a, b in changed
    ]
    table = text_table(("first", "second", "tensor", "module"), cells, rows)
    return f"{len(changed)} tensors have another size\n{indented(table)}"


def _only(first: Explained, second: Explained) -> str:
    lines = []
    for one, other, name in ((first, second, "first"), (second, first, "second")):
        names = {tensor.name for tensor in other.tensors}
        only = [tensor for tensor in one.tensors if tensor.name not in names]
        if only:
            total = format_bytes(sum(tensor.size_bytes for tensor in only))
            lines.append(f"{len(only)} tensors, {total}, are in the {name} alone")
    return "\n".join(lines)


def _modules(first: Explained, second: Explained, rows: int) -> str:
    before = {account.module: account for account in first.modules}
    pairs = [(before[b.module], b) for b in second.modules if b.module in before]
    changed = [
        (a, b) for a, b in pairs if (a.kept_bytes, a.recompute_ns) != (b.kept_bytes, b.recompute_ns)
    ]
    if not changed:
        return ""
    changed.sort(key=lambda pair: -abs(pair[1].kept_bytes - pair[0].kept_bytes))
    cells = [
        (
            b.module or "(the model itself)",
            f"{format_bytes(a.kept_bytes)} -> {format_bytes(b.kept_bytes)}",
            f"{format_ns(a.recompute_ns)} -> {format_ns(b.recompute_ns)}",
        )
        for a, b in changed
    ]
    table = text_table(("module", "keeps", "computes again for"), cells, rows)
    return f"{len(changed)} modules keep or pay something else\n{indented(table)}"
