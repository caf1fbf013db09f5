"""Inductor's C++ kernels compiled together for plain ``torch.compile`` as well.

``backend="dtr"`` compiles the kernels of a wrapper together
(`dtrcompile.passes.inductor.kernels_together`).  `make test` and `make bench-quick` compile their
references so too, where kernels have no vector instructions either; `make test-all` and the
benchmarks themselves run what users run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

from torch._inductor.async_compile import AsyncCompile

from dtrcompile.passes.inductor.kernels_together import collect, compile_collected


def compiled_lightly() -> contextlib.AbstractContextManager[None]:
    """`compiled_together` where the Makefile asks for kernels that are compiled in little time."""
    is_light = os.environ.get("TORCHINDUCTOR_VEC_ISA_OK") == "0"
    return compiled_together() if is_light else contextlib.nullcontext()


@contextlib.contextmanager
def compiled_together() -> Iterator[None]:
    """Compile the kernels of each wrapper together while this is active, whoever compiles it."""
    with (
        mock.patch.object(AsyncCompile, "cpp_pybinding", collect),
        mock.patch.object(AsyncCompile, "wait", compile_collected),
    ):
        yield
