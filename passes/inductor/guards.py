"""What compiling a graph again takes for granted about its symbolic sizes.

Dynamo checks before each call what the first compilation took for granted.  A later one, when
Dynamo is done, may add to that; each plan then says itself at which sizes it is right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import sympy


@contextlib.contextmanager
def noting_guards(shape_env: Any | None) -> Iterator[list[sympy.Basic]]:
    """Collect the conditions that are added inside; the environment is left as it was.

    Args:
        shape_env: the `torch.fx.experimental.symbolic_shapes.ShapeEnv` of the graph; None where
            nothing is to be collected.
    """
    found: list[sympy.Basic] = []
    if shape_env is None:
        yield found
        return
    was_frozen, count = shape_env.frozen, len(shape_env.guards)
    replacements = dict(shape_env.replacements)
    ranges = dict(shape_env.var_to_range)
    shape_env.frozen = False
    try:
        yield found
    finally:
        found += [guard.expr for guard in shape_env.guards[count:]]
        del shape_env.guards[count:]
        shape_env.replacements.clear()
        shape_env.replacements.update(replacements)
        shape_env.var_to_range.clear()
        shape_env.var_to_range.update(ranges)
        shape_env.frozen = was_frozen
        # Newer releases than 2.11: sizes remember for each count what they are replaced by.
        if hasattr(shape_env, "_replacements_version_counter"):
            shape_env._replacements_version_counter += 1
        shape_env._update_version_counter()
