"""A journal of changes, so that a series of them can be taken back.

Every change notes the call that takes it back, and that call is again a change of the same kind
with other arguments: one more is taken back by one less, a new value by the old one.  So there is
one function for each kind of change, and none that mirrors another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

Call = tuple[Callable[..., None], tuple[Any, ...]]
"""A function and its arguments."""


class Journal:
    """The changes since the journal was last cleared.

    Attributes:
        note: takes the `Call` that takes a change back; to be called by the change itself.
    """

    def __init__(self) -> None:
        self._calls: list[Call] = []
        # The list's own method: it is called for every change, and a method around it takes longer
        # than many changes do.
        self.note = self._calls.append

    def __len__(self) -> int:
        """The number of changes: what `roll_back` takes to come back to this point."""
        return len(self._calls)

    def assign(self, values: dict[Key, Value], key: Key, value: Value | None) -> None:
        """``values[key] = value``; where that is 0, empty or None, there is no such key."""
        self.note((self.assign, (values, key, values.get(key))))
        if value:
            values[key] = value
        else:
            values.pop(key, None)

    def roll_back(self, length: int) -> None:
        """Take back, latest first, all changes since the journal had this length."""
        calls = self._calls[length:]
        for change, arguments in reversed(calls):
            change(*arguments)
        # Taking back notes how to do it all again, which nobody asks for.
        del self._calls[length:]

    def clear(self) -> None:
        """Forget the changes: they stay."""
        self._calls.clear()
