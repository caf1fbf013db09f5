"""How often a process does what one that finds everything on disk need not do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtrcompile.compilation.session import Session
from dtrcompile.passes.fitting.fit import _Fit
from dtrcompile.passes.inductor import lowering


class Counted:
    """Searches for a plan, graphs lowered, graphs planned at all, and code taken up from disk."""

    def __init__(self, set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
        """
        Args:
            set_attribute: puts the counting functions in place, such as `MonkeyPatch.setattr`.
        """
        self.seen: dict[str, int] = {}
        for what, owner, name in (
            ("searches", _Fit, "chosen_for"),
            ("lowerings", lowering, "_lowered"),
            ("fits", _Fit, "run"),
            ("loads", Session, "take_up"),
        ):
            self.seen[what] = 0
            set_attribute(owner, name, self._counting(what, getattr(owner, name)))

    def _counting(self, what: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.seen[what] += 1
            return original(*args, **kwargs)

        return counted

    def taken(self) -> dict[str, int]:
        """Since it was asked last."""
        found = self.seen
        self.seen = dict.fromkeys(found, 0)
        return found

    def searched_and_lowered(self) -> tuple[int, int]:
        """Of `taken`, what a process that finds a plan on disk does not do."""
        found = self.taken()
        return found["searches"], found["lowerings"]
