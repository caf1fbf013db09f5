"""A hash of the package's own source, so that compiled code of another version is never served."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from dtrcompile.passes import source_hash


@lru_cache(maxsize=1)
def package_hash() -> str:
    """Hex digest of the source that was imported.

    The passes are named besides: where a checkout has no symbolic links, they are not in the
    package's folder.
    """
    return source_hash.hash_of_folders(
        Path(__file__).parent, Path(source_hash.__file__).resolve().parent
    )
