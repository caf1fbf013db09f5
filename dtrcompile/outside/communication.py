"""What data parallelism holds to communicate: no graph holds it, and it is there while graphs run.

``DistributedDataParallel`` copies gradients into buckets that together are as large as all of them,
and keeps the buckets (torch/csrc/distributed/c10d/reducer.cpp, ``initialize_buckets``).

``fully_shard`` gathers the parameters of one group (a block, as a rule) through a buffer of the
group's size, and copies its gradients into another, which it keeps until the next group's are sent
(torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, ``foreach_all_gather`` and
``foreach_reduce``).  Backward of one block runs beside the buffer of the block after it, and beside
the gradients that were copied into that: with torch 2.13, the allocator's events of a step show
that these are freed only later.  What stays from step to step are shards, of parameters and of
their gradients, which no graph reads.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

BUCKETS = "DistributedDataParallel's buckets"
GATHERED = "FSDP's buffer for gathered parameters"
REDUCED = "FSDP's buffer for gradients to reduce"
COPIED = "gradients that FSDP reduces"
SHARDS = "FSDP's shards of parameters"

# Gloo, which is what processes on CPU communicate by, gathers into a copy and reduces in another,
# which a thread of its own frees when it is done, maybe beside the next (ProcessGroupGloo.cpp,
# ``AsyncAllgatherWork`` and ``reduce_scatter_tensor_coalesced``).
_GLOO_GATHERED, _GLOO_REDUCED = 1, 2

# Imported by whoever shards, and by some who do not (accelerate); a group of processes is there
# where somebody does.  Looking for shards takes a look at every object that Python tracks.
_MODULE, _GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup"


def bucket_bytes(
    read: Container[int], device: torch.device, block_bytes: Callable[[int], int]
) -> dict[str, int]:
    """The buckets of every `DistributedDataParallel` whose parameters are read.

    Args:
        read: ``id`` of the parameters that graphs read.
        device: where memory is counted.
        block_bytes: what an allocator counts for a request, bytes -> bytes.

    Returns:
        what it is -> bytes.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    total_bytes = 0
    for parallel in gc.get_objects():
        if type(parallel) is not nn.parallel.DistributedDataParallel:
            continue
        ignored = parallel.parameters_to_ignore
        sent = {
            id(p): p
            for name, p in parallel.module.named_parameters()
            if p.requires_grad and name not in ignored and p.device.type == device.type
        }
        if any(i in read for i in sent):
            total_bytes += block_bytes(sum(p.numel() * p.element_size() for p in sent.values()))
    return {BUCKETS: total_bytes} if total_bytes else {}


def sharded_groups(read: Container[int], device: torch.device) -> list[Any]:
    """The groups (``FSDPParamGroup``) of every model that FSDP2 shards and graphs read.

    Args:
        read: ``id`` of the parameters that graphs read, which are whole ones.
        device: where memory is counted.
    """
    group_type = getattr(sys.modules.get(_MODULE), _GROUP, None)
    if group_type is None or not (dist.is_available() and dist.is_initialized()):
        return []
    groups = [
        group
        for group in gc.get_objects()
        if type(group) is group_type and group.device.type == device.type
    ]
    # The groups of a model share what they communicate by, once its first forward has begun.
    models = {id(group.comm_ctx) for group in groups if _is_read(group, read)}
    return [group for group in groups if id(group.comm_ctx) in models]


def communication_bytes(
    groups: Sequence[Any], read: Container[int], block_bytes: Callable[[int], int]
) -> dict[str, int]:
    """What the largest of the groups whose parameters are read takes to communicate.

    Args:
        groups: those of `sharded_groups`.
        read, block_bytes: as for `bucket_bytes`.

    Returns:
        what it is -> bytes.
    """
    found: dict[str, int] = {}
    for group in groups:
        if not _is_read(group, read):
            continue
        params = group.fsdp_params
        # One process gathers nothing, but copies its gradients all the same.
        sends = getattr(group.mesh_info, "shard_mesh_size", 1) > 1
        gloos = sends and group.device.type == "cpu"
        if sends:
            size_bytes = sum(_numel(p) * _gathered_dtype(p).itemsize for p in params)
            gathered_bytes = block_bytes(size_bytes) * (1 + gloos * _GLOO_GATHERED)
            found[GATHERED] = max(found.get(GATHERED, 0), gathered_bytes)
        trained = [p for p in params if p.sharded_param.requires_grad]
        size_bytes = sum(
            _numel(p) * (p.reduce_dtype or _gathered_dtype(p)).itemsize for p in trained
        )
        copied_bytes = sum(block_bytes(_numel(p) * _gathered_dtype(p).itemsize) for p in trained)
        found[COPIED] = max(found.get(COPIED, 0), copied_bytes)
        # Newer releases of PyTorch may keep more than one.
        count = getattr(group.comm_ctx, "reduce_scatter_max_input_buffers", 1)
        count += gloos * _GLOO_REDUCED
        found[REDUCED] = max(found.get(REDUCED, 0), count * block_bytes(size_bytes))
    return {name: size for name, size in found.items() if size}


def shards(groups: Sequence[Any]) -> list[tuple[str, torch.Tensor]]:
    """The shards of the groups' parameters, named."""
    return [(SHARDS, p.sharded_param) for group in groups for p in group.fsdp_params]


def shard_gradient_bytes(
    groups: Sequence[Any], block_bytes: Callable[[int], int]
) -> Mapping[int, int]:
    """``id`` of a whole parameter -> bytes that its gradient has once it was reduced."""
    return {
        id(whole): block_bytes(p._sharded_param_data.nbytes)
        for group in groups
        for p in group.fsdp_params
        if (whole := getattr(p, "_unsharded_param", None)) is not None
    }


def _is_read(group: Any, read: Container[int]) -> bool:
    return any(id(getattr(p, "_unsharded_param", None)) in read for p in group.fsdp_params)


def _numel(param: Any) -> int:
    """Of a whole parameter."""
    return int(param._orig_size.numel())


def _gathered_dtype(param: Any) -> torch.dtype:
    dtype: torch.dtype = param.param_dtype or param.orig_dtype
    return dtype
