"""A hash of source files, so that compiled code and plans of another version are never served."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def hash_of_folders(*roots: Path) -> str:
    """Hex digest over every Python file below the ``roots``, names and contents."""
    digest = hashlib.sha256()
    for root in roots:
        for path in python_files(root):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0")
            digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def python_files(root: Path) -> list[Path]:
    """Every Python file below ``root``, in one order on every machine.

    No folder is named here, so none can be forgotten.  ``passes`` is a link in a checkout and a
    folder in an installation; ``Path.rglob`` follows no links.
    """
    return sorted(
        Path(folder, name)
        for folder, _, names in os.walk(root, followlinks=True)
        for name in names
        if name.endswith(".py")
    )
