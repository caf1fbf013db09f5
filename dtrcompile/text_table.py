"""Rows of text, laid out in columns."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_CELL = 64


def text_table(
    header: Sequence[str],
    cells: Sequence[Sequence[str]],
    most: int | None = None,
    *,
    is_right: bool = False,
) -> str:
    """A header and rows, each a line.

    Args:
        most: rows that are shown; how many more there are is said below.  None: all.
        is_right: columns are aligned at their right edges.
    """
    shown = [header, *(tuple(map(_cut, row[:-1])) + tuple(row[-1:]) for row in cells[:most])]
    widths = [max(len(row[i]) for row in shown) for i in range(len(header))]
    justify = str.rjust if is_right else str.ljust
    lines = [
        "  ".join(justify(c, w) for c, w in zip(row, widths, strict=True)).rstrip() for row in shown
    ]
    if most is not None and len(cells) > most:
        lines.append(f"and {len(cells) - most} more")
    return "\n".join(lines)


def indented(text: str) -> str:
    """Each line two columns further to the right."""
    return "\n".join(f"  {line}" for line in text.splitlines())


def _cut(cell: str) -> str:
    """For all columns but the last."""
    return cell if len(cell) <= _MAX_CELL else f"{cell[: _MAX_CELL - 1]}…"
