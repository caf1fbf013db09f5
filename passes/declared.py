"""What users say of operators of their own: `torch.library` knows a schema, and no more.

An operator that nobody has spoken for is not computed a second time, because it may count, print or
send; and what it takes and gives back inside is measured by running it (`passes.workspaces`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from dtrcompile.passes.errors import OptionError


@dataclass(frozen=True, slots=True)
class Declaration:
    """What is known of one operator, all its overloads.

    Attributes:
        is_pure: running it again on the same inputs gives the same outputs and does nothing else.
        workspace_bytes: what it holds inside beside inputs and outputs, or a function of its
            arguments that says so; None if that is to be measured.
    """

    is_pure: bool
    workspace_bytes: int | Callable[..., int] | None


class _Declared:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by_name: dict[str, Declaration] = {}


_declared = _Declared()


def declare_operator(
    operator: object,
    *,
    pure: bool = False,
    workspace_bytes: int | Callable[..., int] | None = None,
) -> None:
    """Say of a custom operator what a plan may do with it; before the model first runs.

        @torch.library.custom_op("mylib::blur", mutates_args=())
        def blur(image: torch.Tensor) -> torch.Tensor: ...

        dtrcompile.declare_operator(blur, pure=True)

    What is declared holds for all overloads, and replaces what was declared before.

    Args:
        operator: what `torch.library.custom_op` gave, ``torch.ops.mylib.blur``, an overload of
            it, or its name, ``"mylib::blur"``.
        pure: it may be computed again: the same inputs give the same outputs, to the bit, and
            nothing else happens.
        workspace_bytes: what it holds only while it runs, beside inputs and outputs: bytes, or a
            function that is called with its arguments (without data: only sizes and types may be
            looked at).  None: it is run once on zeros for each form of its arguments, and
            measured; give the bytes if it must not be run then.

    Raises:
        OptionError: if ``operator`` is none, or the bytes are negative.
    """
    if isinstance(workspace_bytes, int) and workspace_bytes < 0:
        raise OptionError(f"workspace_bytes is {workspace_bytes}; give 0 or more bytes.")
    name = operator if isinstance(operator, str) else _name_of(operator)
    if name.count("::") != 1:
        raise OptionError(
            f"{operator!r} is not an operator. Give what torch.library.custom_op returned,"
            " torch.ops.<namespace>.<name>, or '<namespace>::<name>'."
        )
    with _declared.lock:
        _declared.by_name[name.partition(".")[0]] = Declaration(pure, workspace_bytes)


def declaration(name: str) -> Declaration | None:
    """What was declared of the operator ``"namespace::name"``."""
    return _declared.by_name.get(name)


def _name_of(operator: object) -> str:
    # Each of torch's three kinds of operator has its name under another attribute.
    for attribute in ("_qualname", "_qualified_op_name"):
        name = getattr(operator, attribute, None)
        if isinstance(name, str):
            return name
    schema = getattr(operator, "_schema", None)
    return str(getattr(schema, "name", ""))
