"""One graph, as Inductor compiles it or finds it in its cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from torch import fx

from dtrcompile.passes.inductor.lowering import donated_indices, marks_text
from dtrcompile.passes.inductor.patches import Purpose, applied
from dtrcompile.passes.inductor.step import is_planned, planned_config
from dtrcompile.passes.torch_private import compile_fx_inner


def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
    """Inductor's ``compile_fx_inner``, which keeps the order of a plan's graph."""
    as_planned = planned_config() if is_planned(gm) else contextlib.nullcontext()
    marks = marks_text(gm) if is_planned(gm) else ""
    # Inductor's cache would hand out a backward that writes over saved tensors to one that may not.
    donated = donated_indices() if kwargs.get("is_backward") else None
    _put_in_order(gm)
    with applied(Purpose.EVERY_COMPILATION), as_planned, asking_for(f"{marks} {donated}"):
        return compile_fx_inner(gm, example_inputs, **kwargs)


def _put_in_order(gm: fx.GraphModule) -> None:
    """The key of Inductor's cache covers the order of a module's attributes, which depends on when
    its Python code was written."""
    assert gm.code  # written now, if it is not yet
    for name in sorted(vars(gm)):
        vars(gm)[name] = vars(gm).pop(name)


_ASKED_FOR: ContextVar[str | None] = ContextVar("dtrcompile_asked_for", default="")


def asked_for() -> str | None:
    """What PyTorch's caches are asked for at present: see `DTRPartitioner.uuid`."""
    return _ASKED_FOR.get()


@contextlib.contextmanager
def asking_for(identity: str | None) -> Iterator[None]:
    """Within it, PyTorch's caches are asked for this."""
    token = _ASKED_FOR.set(identity)
    try:
        yield
    finally:
        _ASKED_FOR.reset(token)
