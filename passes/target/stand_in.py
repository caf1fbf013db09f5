"""Answers for a GPU that is not there, to those who ask while a graph is lowered for it.

Inductor asks PyTorch for the properties of the device that it generates code for, and makes it
current before it does.  Inside of `standing_in`, both work for a `Target`; nothing is run there.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

from dtrcompile.passes.target.devices import Target
from dtrcompile.passes.torch_private import (
    CudaInterface,
    DeviceProperties,
    FakeTensorMode,
    TritonSplitScanKernel,
    device_interface,
    fake_tensor_module,
    inductor_scheduler,
    suggest_memory_format,
    triton_availability,
)

# Of CUDA, where this build of PyTorch has none; nothing that is read of it changes a schedule.
_CUDA_VERSION, _HIP_VERSION = "12.8", "6.4"
_REGISTERS = 65_536
_LOCK = threading.RLock()


@contextlib.contextmanager
def standing_in(target: Target) -> Iterator[None]:
    """Inside of the ``with`` block, PyTorch takes the target for the only CUDA device.

    That is so for all threads of the process, so none of them may use a real one meanwhile.  One
    thread at a time is inside.
    """
    properties = _properties(target)
    has_bf16 = target.has_bfloat16

    def get_properties(_device: Any = None) -> Any:
        return properties

    interface = _interface(target, get_properties)
    generator = _Generator()
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (torch.cuda, "is_available", lambda: True),
        # Else Dynamo asks a build for CUDA for the current stream, which no driver gives.
        (torch.accelerator, "is_available", lambda: False),
        (
            torch.cuda,
            "is_bf16_supported",
            lambda including_emulation=True: including_emulation or has_bf16,
        ),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "set_device", lambda _device: None),
        (torch.cuda, "_exchange_device", lambda _device: 0),
        (torch.cuda, "_maybe_exchange_device", lambda _device: 0),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "synchronize", lambda _device=None: None),
        (torch.cuda, "get_device_properties", get_properties),
        (torch.cuda, "get_device_capability", lambda _device=None: target.capability),
        (torch.cuda, "get_device_name", lambda _device=None: target.name),
        (torch.cuda, "default_generators", (generator,)),
        # (From PyTorch 2.15 on.)
        (torch._C, "_accelerator_getDefaultGenerator", lambda _device=0: generator),
        (torch.cuda, "get_rng_state", lambda _device="cuda": torch.zeros(16, dtype=torch.uint8)),
        (torch.cuda, "set_rng_state", lambda _state, _device="cuda": None),
        (torch.version, "cuda", None if target.is_rocm else torch.version.cuda or _CUDA_VERSION),
        (torch.version, "hip", _HIP_VERSION if target.is_rocm else None),
        (torch._C, "_cuda_getCurrentRawStream", lambda _device: 0),
        (torch._C, "_select_conv_backend", _convolution_backend),
        (torch._C, "_conv_determine_backend_memory_format", _convolution_format),
        (fake_tensor_module, "init_gpu_context", lambda _device: None),
        (inductor_scheduler, "has_triton", lambda: True),
        (TritonSplitScanKernel, "scan", _scan),
        (triton_availability, "triton_hash_with_backend", lambda: ""),
    )
    interfaces = device_interface.device_interfaces
    device_interface.get_interface_for_device("cuda")  # which fills the table
    with _LOCK, contextlib.ExitStack() as stack:
        stack.enter_context(_forgetting())
        # It is said when the model is compiled there.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        for owner, name, replacement in replaced:
            stack.enter_context(mock.patch.object(owner, name, replacement, create=True))
        names = dict.fromkeys(("cuda", "cuda:0"), interface)
        stack.enter_context(mock.patch.dict(interfaces, names))
        yield


@contextlib.contextmanager
def _forgetting() -> Iterator[None]:
    """Drop what PyTorch remembers of devices and of fake kernels, before and after."""

    def forget() -> None:
        DeviceProperties.create.cache_clear()
        FakeTensorMode.cache_clear()

    forget()
    try:
        yield
    finally:
        forget()


class _Generator(torch.Generator):
    """The device's random numbers, of which the partitioner and Inductor copy the state for
    attention inside of `torch.utils.checkpoint`.  None are drawn."""

    device = torch.device("cuda", 0)  # type: ignore[misc]

    def clone_state(self) -> _Generator:
        return self


_SCAN = TritonSplitScanKernel.scan


def _scan(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Code for a scan that several blocks share, which asks Triton how wide its types are."""
    if triton_availability.has_triton_package():
        return _SCAN(self, *args, **kwargs)
    modules = {"triton": ModuleType("triton"), "triton.language": _TritonTypes("triton.language")}
    with mock.patch.dict(sys.modules, modules):
        return _SCAN(self, *args, **kwargs)


class _TritonTypes(ModuleType):
    """Triton's types, as far as their widths go."""

    def __getattr__(self, name: str) -> Any:
        width = re.search(r"\d+$", name)
        if width is None:
            raise AttributeError(name)
        return SimpleNamespace(primitive_bitwidth=int(width[0]))


_SELECT_BACKEND = torch._C._select_conv_backend
_DETERMINE_FORMAT = torch._C._conv_determine_backend_memory_format


def _convolution_backend(input: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> Any:
    """The library that a convolution runs in: cuDNN's."""
    if input.device.type != "cuda":
        return _SELECT_BACKEND(input, weight, **kwargs)
    return torch._C._ConvBackend.Cudnn


def _convolution_format(input: torch.Tensor, weight: torch.Tensor, backend: Any) -> Any:
    """The layout of what it returns (``aten/src/ATen/native/ConvUtils.h``,
    ``cudnn_conv_suggest_memory_format``)."""
    if input.device.type != "cuda":
        return _DETERMINE_FORMAT(input, weight, backend)
    if torch.version.hip is not None:  # MIOpen's rule is another
        return torch.contiguous_format
    formats = [suggest_memory_format(t) for t in (input, weight)]
    last = torch.channels_last_3d if weight.dim() == 5 else torch.channels_last
    is_last = last in formats and torch.float64 not in (input.dtype, weight.dtype)
    return last if is_last else torch.contiguous_format


def _properties(target: Target) -> SimpleNamespace:
    return SimpleNamespace(
        name=target.name,
        major=target.capability[0],
        minor=target.capability[1],
        total_memory=target.memory_bytes,
        multi_processor_count=target.multiprocessors,
        max_threads_per_multi_processor=target.threads_per_multiprocessor,
        max_threads_per_block=1024,
        regs_per_multiprocessor=_REGISTERS,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=target.shared_memory_bytes,
        # On NVIDIA's, a KiB of each multiprocessor is the system's.
        shared_memory_per_multiprocessor=target.shared_memory_bytes
        + (1024 if target.capability >= (8, 0) and not target.is_rocm else 0),
        warp_size=target.warp_size,
        gcnArchName=target.architecture,
        is_integrated=False,
    )


def _interface(target: Target, get_properties: Any) -> type:
    """What Dynamo and Inductor ask of a kind of device."""
    major, minor = target.capability
    has_bf16 = target.has_bfloat16
    capability: Any = target.architecture or major * 10 + minor

    class Interface(CudaInterface):  # type: ignore[misc]
        class Worker:
            set_device = staticmethod(lambda _device: None)
            current_device = staticmethod(lambda: 0)
            get_device_properties = staticmethod(get_properties)

        current_device = staticmethod(lambda: 0)
        device_count = staticmethod(lambda: 1)
        set_device = staticmethod(lambda _device: None)
        exchange_device = staticmethod(lambda _device: 0)
        maybe_exchange_device = staticmethod(lambda _device: 0)
        get_raw_stream = staticmethod(lambda _device: 0)
        synchronize = staticmethod(lambda _device=None: None)
        is_available = staticmethod(lambda: True)
        is_bf16_supported = staticmethod(
            lambda including_emulation=False: including_emulation or has_bf16
        )
        get_device_properties = staticmethod(get_properties)
        get_compute_capability = staticmethod(lambda _device=None: capability)
        is_triton_capable = staticmethod(lambda _device=None: True)
        raise_if_triton_unavailable = staticmethod(lambda _device=None: None)

    return Interface
