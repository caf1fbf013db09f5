"""A hash of the package's own source, so that compiled code of another version is never served."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=1)
def package_hash() -> str:
    """Hex digest of the source that was imported."""
    return hash_of_folder(Path(__file__).parent)


def hash_of_folder(root: Path) -> str:
    """Hex digest over every Python file below ``root``, names and contents."""
    digest = hashlib.sha256()
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
