"""An explanation, in the forms that people use."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dtrcompile.explain.compare import comparison_text
from dtrcompile.explain.explained import Explained
from dtrcompile.explain.files import from_json, to_json
from dtrcompile.explain.page import page
from dtrcompile.explain.perfetto import to_perfetto
from dtrcompile.explain.snapshot import to_snapshot
from dtrcompile.explain.text import DEFAULT_ROWS, explanation_text
from dtrcompile.passes.errors import OptionError
from dtrcompile.whole_files import write_whole


@dataclass(frozen=True)
class Explanation:
    """What a plan does with each tensor of a graph, and why.

    ``print`` shows it as text; `save` writes a file in the form that the file's name asks for.

    Attributes:
        data: all that is known, as plain values.
    """

    data: Explained

    def __str__(self) -> str:
        return self.text()

    def text(self, rows: int = DEFAULT_ROWS) -> str:
        """What is live at the peak, what becomes of the largest tensors, what each module pays.

        Args:
            rows: of each table.
        """
        return explanation_text(self.data, rows)

    def compared_with(self, other: Explanation, rows: int = DEFAULT_ROWS) -> str:
        """What another explanation, of the same model, has otherwise.

        Args:
            rows: of each table.
        """
        return comparison_text(self.data, other.data, rows)

    def to_json(self) -> str:
        """All of it, as ``docs/explain.md`` describes."""
        return to_json(self.data)

    @staticmethod
    def from_json(text: str) -> Explanation:
        """What `to_json` wrote.

        Raises:
            ProgramError: if it is something else.
        """
        return Explanation(from_json(text))

    def to_html(self) -> str:
        """One page that needs nothing else: live memory over the step, to hover over and search."""
        return page(self.data)

    def to_perfetto(self) -> str:
        """A trace for https://ui.perfetto.dev or ``chrome://tracing``, with counters."""
        return to_perfetto(self.data)

    def to_snapshot(self) -> bytes:
        """A pickled snapshot for https://pytorch.org/memory_viz, as of the CUDA allocator."""
        return to_snapshot(self.data)

    @staticmethod
    def check_name(path: str | os.PathLike[str]) -> str:
        """The end of a file's name that says in which form `save` writes it.

        Raises:
            OptionError: for any other.
        """
        for end in _ENDS:
            if os.fspath(path).endswith(end):
                return end
        raise OptionError(
            f"{os.fspath(path)!r} does not say in which form to write. Let its name end in one of"
            f" {', '.join(_ENDS)}."
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file, whole or not at all.

        Args:
            path: ends in ``.txt``, ``.json``, ``.html``, ``.perfetto.json`` or ``.pickle`` (a
                snapshot).

        Raises:
            OptionError: for any other end.
        """
        form: Mapping[str, Callable[[], str | bytes]] = {
            ".perfetto.json": self.to_perfetto,
            ".json": self.to_json,
            ".html": self.to_html,
            ".pickle": self.to_snapshot,
            ".txt": lambda: f"{self}\n",
        }
        write_whole(Path(path), form[self.check_name(path)]())


# The first that a name ends in counts.
_ENDS = (".perfetto.json", ".json", ".html", ".pickle", ".txt")
