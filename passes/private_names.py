"""Which private names of torch the package uses, and whether the installed torch has them.

Reads ``torch_private.py`` instead of importing it, so that it also tells of a release in which that
cannot be imported.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path


def private_names() -> list[tuple[str, str]]:
    """Module and name of all that ``torch_private.py`` imports, in its order."""
    source = Path(__file__).with_name("torch_private.py").read_text(encoding="utf-8")
    return [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch")
        for alias in node.names
    ]


def is_there(module: str, name: str) -> bool:
    """Whether the installed torch has it."""
    try:
        found = importlib.import_module(module)
    except ImportError:
        return False
    if hasattr(found, name):
        return True
    try:
        importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False
    return True
