"""Copies to the host and back, as operators of an emitted graph.

``dtrcompile::offload`` starts a copy to memory that counts against no budget, ``prefetch`` starts
one back, and ``wait_for_copy`` is where compute needs a copy to be complete: before the bytes that
were copied are freed, and before what comes back is read.  On a GPU that memory is the host's,
page-locked, and the copies run beside compute, on one stream for each direction (the two engines of
`host_link.LinkClock`).  On the CPU, where plans with copies are tested, it is memory that PyTorch's
allocator does not hand out, and a copy is complete when its operator returns.

PyTorch has private operators of the same three kinds (``torch/_functorch/_activation_offloading``).
Theirs copy both ways on one stream, copy dense tensors only, and empty the storage that was copied,
which Inductor's wrapper takes for the next buffer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("dtrcompile", "DEF")
for schema in (
    "offload(Tensor tensor) -> Tensor",
    "prefetch(Tensor on_host, Device device) -> Tensor",
    # A copy is written into until it is complete: who reads it has to come after this.
    "wait_for_copy(Tensor(a!) copy, Tensor? source=None) -> ()",
):
    # In whatever layout a tensor has become a buffer: else Inductor would copy it into another one.
    _LIBRARY.define(schema, tags=(torch.Tag.flexible_layout,))

offload = torch.ops.dtrcompile.offload.default
prefetch = torch.ops.dtrcompile.prefetch.default
wait_for_copy = torch.ops.dtrcompile.wait_for_copy.default


@torch.library.impl(_LIBRARY, "offload", "CompositeExplicitAutograd")
def _offload(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        on_host = _uncounted_like(tensor)
        _bytes_in(on_host).copy_(_bytes_in(tensor))
        return on_host
    on_host = _like(tensor, torch.device("cpu"), pin_memory=True)
    _start(tensor, on_host, tensor.device, _streams(tensor.device)[0])
    return on_host


@torch.library.impl(_LIBRARY, "prefetch", "CompositeExplicitAutograd")
def _prefetch(on_host: Tensor, device: torch.device) -> Tensor:
    tensor = _like(on_host, device)
    if device.type == "cpu":
        _bytes_in(tensor).copy_(_bytes_in(on_host))
    else:
        _start(on_host, tensor, device, _streams(device)[1])
    return tensor


@torch.library.impl(_LIBRARY, "wait_for_copy", "CompositeExplicitAutograd")
def _wait_for_copy(copy: Tensor, source: Tensor | None = None) -> None:  # noqa: ARG001
    # (None: of a CPU, of no bytes, or waited for before, by a backward that runs a second time.)
    found = _UNDER_WAY.pop(copy.data_ptr(), None)
    if found is not None:
        torch.cuda.current_stream(found.device).wait_event(found.end)


@torch.library.register_fake("dtrcompile::offload", lib=_LIBRARY)
def _fake_offload(tensor: Tensor) -> Tensor:
    return _like(tensor, torch.device("cpu"))


@torch.library.register_fake("dtrcompile::prefetch", lib=_LIBRARY)
def _fake_prefetch(on_host: Tensor, device: torch.device) -> Tensor:
    return _like(on_host, device)


@torch.library.register_fake("dtrcompile::wait_for_copy", lib=_LIBRARY)
def _fake_wait_for_copy(copy: Tensor, source: Tensor | None = None) -> None:  # noqa: ARG001
    return None


@dataclass(frozen=True)
class _Copy:
    """A copy that compute has not waited for.

    Attributes:
        source, copy: kept alive: if a step ends with an error in between, as it does when memory
            runs out, nobody else may be given their bytes before the copy is complete.
    """

    source: Tensor
    copy: Tensor
    device: torch.device
    end: torch.cuda.Event


# By the address of the copy: the tensor itself is another one in backward.
_UNDER_WAY: dict[int, _Copy] = {}


def _start(source: Tensor, copy: Tensor, device: torch.device, stream: torch.cuda.Stream) -> None:
    """Copy beside compute, after what has been computed so far."""
    # What is complete needs no waiting for; of a step that ended with an error, nobody will.
    for address, earlier in list(_UNDER_WAY.items()):
        if earlier.end.query():
            _UNDER_WAY.pop(address, None)
    stream.wait_stream(torch.cuda.current_stream(device))
    arriving = _UNDER_WAY.get(source.data_ptr())
    if arriving is not None:
        stream.wait_event(arriving.end)
    with torch.cuda.stream(stream):
        _bytes_in(copy).copy_(_bytes_in(source), non_blocking=True)
        end = stream.record_event()
    _UNDER_WAY[copy.data_ptr()] = _Copy(source, copy, device, end)


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """To the host, and back."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def _like(tensor: Tensor, device: torch.device, *, pin_memory: bool = False) -> Tensor:
    """Of the same layout, whether it is dense or not."""
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device, pin_memory=pin_memory
    )


def _extent(tensor: Tensor) -> int:
    """From the first element to the last one, in elements."""
    if not tensor.numel():
        return 0
    return 1 + sum(
        (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _bytes_in(tensor: Tensor) -> Tensor:
    """All that lies between the first element and the last one: a copy of it moves bytes only."""
    return tensor.as_strided((_extent(tensor),), (1,))


def _uncounted_like(tensor: Tensor) -> Tensor:
    """The same on the host, in memory that no allocator of PyTorch counts."""
    n_bytes = tensor.element_size() * _extent(tensor)
    memory = torch.frombuffer(bytearray(max(n_bytes, 1)), dtype=torch.uint8).untyped_storage()
    made = torch.empty(0, dtype=tensor.dtype)
    return made.set_(memory, 0, tensor.shape, tensor.stride())  # type: ignore[arg-type]
