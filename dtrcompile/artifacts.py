"""What a compilation planned and what its code holds, as files and as PyTorch's trace artifacts.

With ``DTRCOMPILE_ARTIFACTS=FOLDER`` in the environment, each graph leaves its program, its plan and
its schedule there, which ``python -m dtrcompile replay`` and ``gap`` read, and its report.  Under
``TORCH_TRACE`` the same are artifacts that ``tlparse`` shows.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from dtrcompile.passes.torch_private import trace_structured
from dtrcompile.whole_files import write_whole

log = logging.getLogger("dtrcompile")

VARIABLE = "DTRCOMPILE_ARTIFACTS"


def are_wanted() -> bool:
    """Whether anybody reads them."""
    return bool(os.environ.get(VARIABLE) or os.environ.get("TORCH_TRACE"))


def leave(name: str, texts: Mapping[str, str]) -> None:
    """Write the artifacts of a graph.

    Args:
        name: of the graph, such as ``"graph0"``.
        texts: the end of a file's name -> what is in it.
    """
    for end, text in texts.items():
        kind = "json" if end.endswith(".json") else "string"
        trace_structured(
            "artifact",
            metadata_fn=lambda end=end, kind=kind: {  # type: ignore[misc]
                "name": f"dtrcompile_{name}_{end}",
                "encoding": kind,
            },
            payload_fn=lambda text=text: text,  # type: ignore[misc]
        )
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for end, text in texts.items():
            write_whole(Path(folder, f"{name}-{end}"), text)
    except OSError as error:
        # A compilation does not fail because what it leaves for people cannot be written.
        log.warning("%s=%s: %s", VARIABLE, folder, error)
