"""A hash of the package's own source, so that compiled code of another version is never served."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from dtrcompile.passes.source_hash import hash_of_folder


@lru_cache(maxsize=1)
def package_hash() -> str:
    """Hex digest of the source that was imported."""
    return hash_of_folder(Path(__file__).parent)
