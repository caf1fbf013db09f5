"""A hash of the package's own source, so that compiled code of another version is never served."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=1)
def package_hash() -> str:
    """Hex digest over every Python file of the package, names and contents."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    # `passes` is a link in a checkout, a folder in an installation; rglob does not follow links.
    for folder in (root, root / "passes", root / "passes" / "planners"):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0")
            digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()
