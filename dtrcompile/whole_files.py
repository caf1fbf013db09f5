"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, in place of one that is there; if that fails, nothing has changed.

    Raises:
        OSError: if it cannot be written.
    """
    with replacing(path) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside ``path``, with the same end; what is written there takes its place afterwards.

    Raises:
        OSError: if that is not possible.
    """
    if path.is_dir():
        raise IsADirectoryError(21, "is a folder, not a file", str(path))
    unfinished = path.with_name(f".{os.getpid()}.unfinished.{path.name}")
    try:
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        # What the user named, not what it was to be written to first.
        raise type(error)(error.errno, error.strerror, str(path)) from error
    finally:
        unfinished.unlink(missing_ok=True)
