"""Which releases of PyTorch are supported, and what happens on others.

The emission and the schedule check use private parts of PyTorch, which may change with any release.
A changed name raises; a changed *meaning* behind the same name could break a promise without a
word.  So a release that nobody has tried is refused, in one line, before any private name is
imported (`torch_private` asks first).  pip cannot do this: an upper bound in the package's metadata
would make it replace the PyTorch that is there.

`docs/releases.md` says what differs between the releases, and how the next one is added.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

from dtrcompile.passes.errors import UnsupportedTorchError

log = logging.getLogger("dtrcompile")

# The first two numbers of the oldest and of the newest release that the tests pass on.
OLDEST = (2, 11)
NEWEST = (2, 15)
# Tries another release all the same.
TRY_VARIABLE = "DTRCOMPILE_TRY_TORCH"


def require_supported(version: str, environment: Mapping[str, str]) -> None:
    """Refuse a release of PyTorch that nobody has tried.

    Args:
        version: ``torch.__version__``.
        environment: the process's environment; `TRY_VARIABLE` set to anything but ``0`` there lets
            the release pass, with a warning in the log.

    Raises:
        UnsupportedTorchError: if the release is older than `OLDEST` or newer than `NEWEST`.
    """
    if is_supported(version):
        return
    if environment.get(TRY_VARIABLE, "").strip() in ("", "0"):
        raise UnsupportedTorchError(version, OLDEST, NEWEST, TRY_VARIABLE)
    log.warning(
        "nobody has tried dtrcompile on PyTorch %s; it runs because %s is set",
        version,
        TRY_VARIABLE,
    )


def is_supported(version: str) -> bool:
    """Whether a version, such as ``2.13.0+cpu``, belongs to a supported release.

    Its patches and its builds do, those made before it was released included.
    """
    return OLDEST <= release_of(version) <= NEWEST


def release_of(version: str) -> tuple[int, int]:
    """The first two numbers of a version; zeros where there are none."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (0, 0) if numbers is None else (int(numbers[1]), int(numbers[2]))
