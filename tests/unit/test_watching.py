"""What the profiler tells of an allocation, where it tells nothing that can be read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dtrcompile.outside.watching import _users_line


class Caller:
    """Of a function that no longer exists: the profiler's name is bytes of something else."""

    line_number = 7

    @property
    def file_name(self) -> str:
        return b"\xff\xfe".decode()


def call_from(caller: Any) -> Any:
    return SimpleNamespace(extra_fields=SimpleNamespace(caller=caller))


def test_a_call_is_named_by_its_line() -> None:
    caller = SimpleNamespace(file_name=__file__, line_number=7)
    assert _users_line(call_from(caller)) == f"{__file__}:7"


def test_a_name_that_is_no_text_is_no_line_of_the_user() -> None:
    assert _users_line(call_from(Caller())) == ""
