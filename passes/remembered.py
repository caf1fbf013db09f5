"""Results that are remembered: those that were asked for most lately."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

Key = TypeVar("Key")
Result = TypeVar("Result")


class Remembered(Generic[Key, Result]):
    """Results by what they were made from, for all threads.

    ``functools.lru_cache`` does not do where the key is a digest of the arguments.

    Args:
        most: results; the one that nobody asked for the longest is forgotten.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._results: OrderedDict[Key, Result] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key) -> Result | None:
        """The result, if it is remembered."""
        with self._lock:
            if key not in self._results:
                return None
            self._results.move_to_end(key)
            return self._results[key]

    def put(self, key: Key, result: Result) -> None:
        """Remember a result."""
        with self._lock:
            self._results[key] = result
            self._results.move_to_end(key)
            if len(self._results) > self._most:
                self._results.popitem(last=False)

    def clear(self) -> None:
        """Forget all results."""
        with self._lock:
            self._results.clear()
