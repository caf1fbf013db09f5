"""Devices that are planned for without being there: their names, and the choices made for them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtrcompile.passes.device.costs import GPU_PEAKS
from dtrcompile.passes.device.padding import is_faster
from dtrcompile.passes.errors import OptionError
from dtrcompile.passes.target.attention import attend
from dtrcompile.passes.target.devices import TARGETS, Target, target_of
from dtrcompile.passes.target.stand_in import standing_in
from dtrcompile.passes.target.tracing import traced
from dtrcompile.passes.target.workspaces import foreseen_bytes
from dtrcompile.passes.torch_private import FakeTensorMode

aten = torch.ops.aten
A100, H100, T4 = (TARGETS[name] for name in ("A100-80GB", "H100-80GB", "T4"))


@pytest.mark.parametrize("asked", ["cuda:H100-80GB", "h100", "H100 80GB", "H100-80gb"])
def test_a_device_is_named_in_any_spelling(asked: str) -> None:
    assert target_of(asked) is H100


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("A100", "names several devices"),
        ("H900", "no device that is known"),
        ("cuda:", "no device"),
    ],
)
def test_other_names_are_refused_with_those_there_are(asked: str, told: str) -> None:
    with pytest.raises(OptionError, match=told) as refusal:
        target_of(asked)
    assert "RTX-4090" in str(refusal.value)


def test_an_exact_name_is_no_other_devices_prefix() -> None:
    assert target_of("L4").name == "NVIDIA L4"


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_has_a_data_sheet(name: str) -> None:
    target = TARGETS[name]
    assert any(known.lower() in target.name.lower() for known in GPU_PEAKS)
    assert 0 < target.available_bytes < target.memory_bytes


def _operators_of(function: Any, *shapes: tuple[int, ...], target: Target = H100) -> list[str]:
    """Names of the operators that a function comes to on fake CUDA tensors."""
    with standing_in(target), traced(target), FakeTensorMode():
        inputs = [torch.empty(s, device="cuda", dtype=torch.float16) for s in shapes]
        seen: list[str] = []

        class Seeing(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                seen.append(func._schema.name.removeprefix("aten::"))
                return func(*args, **(kwargs or {}))

        with Seeing():
            function(*inputs)
    return seen


_HEADS = (2, 4, 128, 64)
_CUDNN, _FLASH, _EFFICIENT = (
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
)


@pytest.mark.parametrize(
    ("target", "shapes", "arguments", "expected"),
    [
        (H100, [_HEADS] * 3, {}, _CUDNN),
        (H100, [_HEADS] * 3, {"is_causal": True, "dropout_p": 0.125}, _CUDNN),
        (H100, [*[_HEADS] * 3, (128, 128)], {}, _CUDNN),  # with a mask
        (H100, [(2, 8, 128, 64), _HEADS, _HEADS], {"enable_gqa": True}, _CUDNN),
        (H100, [_HEADS] * 3, {"dropout_p": 0.1}, _FLASH),  # no sixteenth
        (H100, [(2, 4, 128, 60)] * 3, {}, _FLASH),  # padded to a multiple of eight
        (A100, [_HEADS] * 3, {}, _FLASH),
        (A100, [(2, 8, 128, 64), _HEADS, _HEADS], {"enable_gqa": True}, _FLASH),
        (A100, [_HEADS, (2, 4, 64, 64), (2, 4, 64, 64)], {}, _FLASH),
        (A100, [_HEADS, (2, 4, 64, 64), (2, 4, 64, 64)], {"is_causal": True}, _EFFICIENT),
        (A100, [*[_HEADS] * 3, (128, 128)], {}, _EFFICIENT),
        (A100, [(2, 4, 128, 512)] * 3, {}, _EFFICIENT),  # too wide for flash attention
        (T4, [_HEADS] * 3, {}, _EFFICIENT),
        (T4, [(2, 4, 128, 60)] * 3, {}, "bmm"),  # not aligned: the formula
    ],
)
def test_attention_takes_the_kernel_of_the_device(
    target: Target, shapes: list[tuple[int, ...]], arguments: dict[str, Any], expected: str
) -> None:
    function = functools.partial(attend, target, **arguments)
    assert expected in _operators_of(function, *shapes, target=target)


def test_attention_gives_what_pytorch_gives() -> None:
    query, key, value = (torch.randn(2, 4, 16, 8) for _ in range(3))
    mask = torch.rand(16, 16) > 0.2
    for arguments in ({}, {"attn_mask": mask}, {"is_causal": True}):
        with sdpa_kernel(SDPBackend.MATH):
            found = attend(H100, query, key, value, **arguments)  # type: ignore[arg-type]
        expected = functional.scaled_dot_product_attention(query, key, value, **arguments)  # type: ignore[arg-type]
        torch.testing.assert_close(found, expected)


def _dtypes_under_autocast() -> dict[str, torch.dtype]:
    from torch._dispatch.python import enable_python_dispatcher

    found: dict[str, torch.dtype] = {}
    with standing_in(H100), traced(H100), FakeTensorMode(), enable_python_dispatcher():
        x = torch.empty(4, 8, device="cuda")
        half = torch.empty(4, 8, device="cuda", dtype=torch.bfloat16)
        with torch.autocast("cuda", torch.bfloat16):
            found["linear"] = functional.linear(x, torch.empty(8, 8, device="cuda")).dtype
            found["matmul"] = (x @ half.t()).dtype
            found["softmax"] = half.softmax(-1).dtype
            found["layer_norm"] = functional.layer_norm(half, (8,)).dtype
            found["sum"] = half.sum().dtype
            found["sum of integers"] = torch.ones(3, device="cuda", dtype=torch.int64).sum().dtype
            found["cat"] = torch.cat([x, half]).dtype
            found["relu"] = half.relu().dtype
            found["double"] = functional.linear(x.double(), x.double()).dtype
            found["exp"] = half.exp().dtype
            asked = half.softmax(-1, dtype=torch.bfloat16).dtype
            found["softmax, asked for bfloat16"] = asked
    return found


def test_autocast_casts_as_on_a_gpu() -> None:
    assert _dtypes_under_autocast() == {
        "linear": torch.bfloat16,
        "matmul": torch.bfloat16,
        "softmax": torch.float32,
        "layer_norm": torch.float32,
        "sum": torch.float32,
        "sum of integers": torch.int64,
        "cat": torch.float32,
        "relu": torch.bfloat16,
        "double": torch.float64,
        "exp": torch.float32,
        "softmax, asked for bfloat16": torch.bfloat16,
    }


def test_gradients_are_traced_without_cuda() -> None:
    with standing_in(H100), traced(H100), FakeTensorMode():
        layer = nn.Linear(8, 8, device="cuda")
        loss = layer(torch.empty(4, 8, device="cuda")).sum()
        loss.backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.device == torch.device("cuda", 0)
        assert layer.weight.grad.shape == (8, 8)


def test_convolutions_keep_channels_last_as_cudnn_does() -> None:
    with standing_in(H100), traced(H100), FakeTensorMode():
        layer = nn.Conv2d(4, 8, 3, device="cuda")
        images = torch.empty(2, 4, 16, 16, device="cuda")
        assert layer(images).is_contiguous()
        last = layer(images.to(memory_format=torch.channels_last))
        assert last.is_contiguous(memory_format=torch.channels_last)


def test_pytorch_is_as_it_was_afterwards() -> None:
    before = torch.cuda.is_available(), torch.cuda.get_device_properties, torch.version.cuda
    with pytest.raises(KeyError), standing_in(H100), traced(H100):
        assert torch.cuda.get_device_properties(0).name == H100.name
        raise KeyError
    assert (torch.cuda.is_available(), torch.cuda.get_device_properties) == before[:2]
    assert torch.version.cuda == before[2]
    with FakeTensorMode():
        assert torch.empty(2, device="cpu").device.type == "cpu"


@pytest.mark.parametrize(
    ("columns", "is_copied"), [(128, False), (1000, False), (197, True), (8, False)]
)
def test_masks_are_padded_where_their_rows_do_not_begin_in_step(
    columns: int, is_copied: bool
) -> None:
    shapes = [(2, 4, 32, 64), (2, 4, columns, 64), (2, 4, columns, 64), (32, columns)]
    seen = _operators_of(functools.partial(attend, A100), *shapes)
    assert ("constant_pad_nd" in seen) is is_copied


def test_float32_needs_no_alignment_without_tensor_cores() -> None:
    with standing_in(T4), traced(T4), FakeTensorMode():
        query = torch.empty(2, 4, 128, 61, device="cuda", requires_grad=True)
        found = attend(T4, query, query, query)
        assert "EfficientAttention" in type(found.grad_fn).__name__


_META: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}


def _heads(batch: int, heads: int, rows: int, width: int, **kwargs: Any) -> torch.Tensor:
    """With the heads inside of the rows, as a projection's result has them."""
    shape = (batch, rows, heads, width)
    return torch.empty(shape, **{**_META, **kwargs}).transpose(1, 2)


def test_workspaces_of_flash_attention() -> None:
    query = _heads(2, 4, 100, 64)
    backward = aten._scaled_dot_product_flash_attention_backward.default
    # The query's gradient in float32, and a number a row; rows are rounded up to 128.
    expected = 2 * 4 * 128 * (64 + 1) * 4
    assert foreseen_bytes(A100, backward, [query] * 5) == expected
    key = _heads(2, 2, 100, 64)
    grouped = foreseen_bytes(A100, backward, [query, query, key, key, query])
    assert grouped == expected + 2 * (2 * 4 * 100 * 64) * 2
    apart = torch.empty(2, 4, 100, 64, **_META)  # the heads outside of the rows
    assert foreseen_bytes(A100, backward, [apart, query, query, query, query]) == (
        expected + 2 * 4 * 100 * 64 * 2
    )


def test_flash_attention_splits_the_keys_of_small_batches() -> None:
    forward = aten._scaled_dot_product_flash_attention.default
    one, many, long = _heads(1, 4, 128, 64), _heads(64, 16, 128, 64), _heads(1, 4, 4096, 64)
    assert foreseen_bytes(H100, forward, [many, many, many, 0.0]) == 0
    assert foreseen_bytes(H100, forward, [one, long, long, 0.1]) == 0
    splits = 4096 // 256
    assert foreseen_bytes(H100, forward, [one, long, long, 0.0]) == splits * 4 * 128 * 65 * 4


def test_workspaces_of_memory_efficient_attention() -> None:
    forward = aten._scaled_dot_product_efficient_attention.default
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    narrow, wide = _heads(2, 4, 128, 64), _heads(2, 4, 128, 256)
    assert foreseen_bytes(T4, forward, [narrow] * 3) == 0
    assert foreseen_bytes(T4, forward, [wide] * 3) == 2 * 4 * 128 * 256 * 4
    single = _heads(2, 4, 128, 64, dtype=torch.float32)
    # The query's gradient, its width rounded up to a tile, and a number a row.
    assert foreseen_bytes(T4, backward, [single] * 4) == 2 * 4 * (128 * 128 + 128) * 4
    of_wide = foreseen_bytes(T4, backward, [wide] * 4)
    assert of_wide == 2 * 4 * (3 * 128 * 256 + 128) * 4


def test_workspaces_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.empty(64, 64, **_META)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    assert foreseen_bytes(H100, aten.mm.default, [matrix, matrix]) == 0
    monkeypatch.setattr(torch, "__version__", "2.15.0+cu132")
    assert foreseen_bytes(H100, aten.mm.default, [matrix, matrix]) == 32 << 20
    assert foreseen_bytes(T4, aten.mm.default, [matrix, matrix]) == 8 * 2**20 + 2**17
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8:16:8")
    assert foreseen_bytes(H100, aten.mm.default, [matrix, matrix]) == (4096 * 8 + 16 * 8) << 10
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    assert foreseen_bytes(H100, aten.mm.default, [matrix, matrix]) == 0
    assert foreseen_bytes(H100, aten.convolution.default, [matrix, matrix]) is None


def test_nobody_is_asked_for_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for CUDA has none where there is no driver; Dynamo asks one that is available."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    with standing_in(H100):
        assert torch.cuda.is_available()
        assert not torch.accelerator.is_available()


def _matrices(m: int, k: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The features and the weight of a head, as a matrix product reads them."""
    weight = torch.empty(n, k, dtype=dtype, device="meta")
    return torch.empty(m, k, dtype=dtype, device="meta"), weight.t()


@pytest.mark.parametrize(
    ("gpu", "sizes", "dtype", "is_padded"),
    [
        ("H100", (8192, 1024, 50257), torch.bfloat16, True),
        ("H100", (8192, 1024, 30522), torch.bfloat16, True),
        ("H100", (8192, 1024, 50264), torch.bfloat16, False),  # as tensor cores read it
        ("H100", (8191, 1024, 50264), torch.bfloat16, False),  # rows may be of any number
        ("H100", (8192, 1023, 4096), torch.bfloat16, True),
        ("H100", (64, 64, 63), torch.bfloat16, False),  # too small to pay for copies
        ("H100", (8192, 1024, 50257), torch.float32, False),  # by no tensor core
    ],
)
def test_products_are_padded_where_that_is_faster(
    gpu: str, sizes: tuple[int, int, int], dtype: torch.dtype, is_padded: bool
) -> None:
    assert is_faster(*_matrices(*sizes, dtype), GPU_PEAKS[gpu]) == is_padded
