"""The GPUs that can be planned for without being there, and the one that is planned for now.

What a schedule depends on is one line a device.  Capability, multiprocessors, threads and shared
memory are those of the vendors' data sheets and of NVIDIA's CUDA C++ Programming Guide ("Compute
Capabilities"); memory is what `torch.cuda.get_device_properties` says of such a device, which is a
little less than the data sheet's.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass

from dtrcompile.passes.errors import OptionError

_GIB = 1 << 30
# A process's context, with the code of its kernels, is in no allocator's statistics.
CONTEXT_BYTES = _GIB // 2


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU, as far as a schedule depends on it.

    Attributes:
        name: as `torch.cuda.get_device_properties` gives it.
        memory_bytes: all of it.
        capability: CUDA's compute capability; of AMD's, what PyTorch gives in its place.
        multiprocessors: streaming multiprocessors, or compute units.
        threads_per_multiprocessor: that can be resident.
        shared_memory_bytes: the most that a block can ask for.
        warp_size: threads that run in step.
        architecture: AMD's name of it; empty for NVIDIA's.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    threads_per_multiprocessor: int
    shared_memory_bytes: int
    warp_size: int = 32
    architecture: str = ""

    @property
    def is_rocm(self) -> bool:
        """Whether PyTorch runs there on ROCm."""
        return bool(self.architecture)

    @property
    def has_bfloat16(self) -> bool:
        """Whether Inductor compiles bfloat16 for it."""
        return self.capability >= (8, 0)

    @property
    def available_bytes(self) -> int:
        """What the allocator can get, where nobody else uses the device."""
        return self.memory_bytes - CONTEXT_BYTES


def _nvidia(
    name: str, gib: float, capability: tuple[int, int], n: int, threads: int, shared_kib: int
) -> Target:
    return Target(name, int(gib * _GIB), capability, n, threads, shared_kib << 10)


TARGETS: Mapping[str, Target] = {
    "V100-16GB": _nvidia("Tesla V100-SXM2-16GB", 15.77, (7, 0), 80, 2048, 96),
    "V100-32GB": _nvidia("Tesla V100-SXM2-32GB", 31.73, (7, 0), 80, 2048, 96),
    "T4": _nvidia("Tesla T4", 14.56, (7, 5), 40, 1024, 64),
    "A100-40GB": _nvidia("NVIDIA A100-SXM4-40GB", 39.38, (8, 0), 108, 2048, 163),
    "A100-80GB": _nvidia("NVIDIA A100-SXM4-80GB", 79.15, (8, 0), 108, 2048, 163),
    "RTX-3090": _nvidia("NVIDIA GeForce RTX 3090", 23.57, (8, 6), 82, 1536, 99),
    "RTX-4090": _nvidia("NVIDIA GeForce RTX 4090", 23.52, (8, 9), 128, 1536, 99),
    "RTX-5090": _nvidia("NVIDIA GeForce RTX 5090", 31.36, (12, 0), 170, 1536, 99),
    "L4": _nvidia("NVIDIA L4", 22.03, (8, 9), 58, 1536, 99),
    "L40S": _nvidia("NVIDIA L40S", 44.39, (8, 9), 142, 1536, 99),
    "H100-80GB": _nvidia("NVIDIA H100 80GB HBM3", 79.11, (9, 0), 132, 2048, 227),
    "H200": _nvidia("NVIDIA H200", 139.72, (9, 0), 132, 2048, 227),
    "B200": _nvidia("NVIDIA B200", 178.35, (10, 0), 148, 2048, 227),
    "MI300X": Target(
        "AMD Instinct MI300X", int(191.98 * _GIB), (9, 4), 304, 2048, 64 << 10, 64, "gfx942"
    ),
}


def target_of(device: str) -> Target:
    """The target that a user names, such as ``"cuda:H100-80GB"``, ``"h200"`` or ``"RTX 4090"``.

    Raises:
        OptionError: if the table has none of that name, or several.
    """
    asked = _key(device.strip().removeprefix("cuda:"))
    exact = [target for name, target in TARGETS.items() if _key(name) == asked]
    found = exact or [t for name, t in TARGETS.items() if asked and _key(name).startswith(asked)]
    if len(found) != 1:
        what = "names several devices" if found else "is no device that is known"
        raise OptionError(f"device {device!r} {what}: name one of {', '.join(TARGETS)}.")
    return found[0]


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


_CURRENT: ContextVar[Target | None] = ContextVar("dtrcompile_target", default=None)


def current_target() -> Target | None:
    """The GPU that is planned for although it is not there; None: what is planned is for here."""
    return _CURRENT.get()


@contextlib.contextmanager
def planning_for(target: Target) -> Iterator[None]:
    """Inside of the ``with`` block, what is asked of CUDA devices is answered for ``target``."""
    token = _CURRENT.set(target)
    try:
        yield
    finally:
        _CURRENT.reset(token)
