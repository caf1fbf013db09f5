"""What library calls hold inside: measured, and only where they may hold anything."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from dtrcompile.passes.device import workspaces
from dtrcompile.passes.device.workspaces import workspace_bytes
from dtrcompile.passes.inductor.wrapper_run import Recorder
from dtrcompile.passes.nodes import is_on_cpu
from dtrcompile.passes.program.program import Phase
from dtrcompile.passes.program.sizes import Measurable
from dtrcompile.passes.torch_private import FakeTensorMode

mm = torch.ops.aten.mm.default
ROWS, INNER, COLUMNS = 8, 24, 5
MATRIX_BYTES = 4 * ROWS * INNER


@pytest.mark.parametrize(
    ("left", "size_bytes"),
    [
        (torch.zeros(ROWS, INNER), 0),
        (torch.zeros(INNER, ROWS).t(), 0),
        (torch.zeros(ROWS, 2 * INNER)[:, :INNER], 0),
        # The gradient of a sum is one row, or column, expanded: BLAS needs it written out.
        (torch.zeros(1, INNER).expand(ROWS, INNER), MATRIX_BYTES),
        (torch.zeros(ROWS, 1).expand(ROWS, INNER), MATRIX_BYTES),
        (torch.zeros(ROWS, 2 * INNER)[:, ::2], MATRIX_BYTES),
    ],
)
def test_products_copy_operands_that_blas_does_not_take(
    left: torch.Tensor, size_bytes: int
) -> None:
    right = torch.zeros(INNER, COLUMNS)
    assert workspace_bytes(mm, (left, right), {}, torch.zeros(ROWS, COLUMNS)) == size_bytes


def test_products_are_measured_where_a_library_may_take_a_workspace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[object] = []
    monkeypatch.setattr(workspaces, "_CACHE", {})
    monkeypatch.setattr(workspaces, "_measure", lambda func, *_: measured.append(func) or 32)
    with FakeTensorMode():
        for device, dtype in (("cpu", torch.float32), ("cpu", torch.bfloat16), ("cuda", None)):
            left = torch.empty(ROWS, INNER, device=device, dtype=dtype)
            right = torch.empty(INNER, COLUMNS, device=device, dtype=dtype)
            workspace_bytes(mm, (left, right), {}, left.new_empty(ROWS, COLUMNS))
    assert measured == [mm, mm]


@pytest.fixture
def precision_is_restored() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("precision_is_restored")
@pytest.mark.parametrize(
    ("precision", "is_measured"), [("highest", False), ("high", True), ("medium", True)]
)
def test_products_of_float32_are_measured_where_a_library_may_round_them(
    monkeypatch: pytest.MonkeyPatch, precision: str, is_measured: bool
) -> None:
    """oneDNN computes them in bfloat16 where the processor can, with copies in its own layout."""
    monkeypatch.setattr(workspaces, "_CACHE", {})
    monkeypatch.setattr(workspaces, "_measure", lambda *_: 32)
    torch.set_float32_matmul_precision(precision)
    left, right = torch.zeros(ROWS, INNER), torch.zeros(INNER, COLUMNS)
    found = workspace_bytes(mm, (left, right), {}, torch.zeros(ROWS, COLUMNS))
    assert found == (32 if is_measured else 0)


def test_fused_attention_is_measured_and_draws_no_random_numbers() -> None:
    heads = torch.zeros(2, 4, 512, 16)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    state = torch.get_rng_state()
    # It keeps the scores of one block at a time, in a buffer of its own.
    assert workspace_bytes(attention, (heads, heads, heads), {}, attention(heads, heads, heads)) > 0
    assert torch.equal(torch.get_rng_state(), state)


def test_another_number_of_threads_is_measured_anew() -> None:
    """Each thread of attention on a CPU has a buffer of its own, and Dynamo compiles again."""
    heads = torch.zeros(2, 4, 512, 16)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    result = attention(heads, heads, heads)
    n_threads = torch.get_num_threads()
    found = {}
    try:
        for n in (1, 2, 1):
            torch.set_num_threads(n)
            found[n] = workspace_bytes(attention, (heads, heads, heads), {}, result)
    finally:
        torch.set_num_threads(n_threads)
    assert found[2] == 2 * found[1] > 0


def test_a_profile_that_the_user_takes_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = torch.ops.aten.convolution_backward.default
    images = torch.zeros(4, 32, 8, 8).to(memory_format=torch.channels_last)
    weight = torch.zeros(32, 32, 3, 3).to(memory_format=torch.channels_last)
    where = ([32], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True])
    args = (images, images, weight, *where)
    found = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        monkeypatch.setattr(workspaces, "_CACHE", {})
        found.append(workspace_bytes(backward, args, {}, (images, weight, torch.zeros(32))))
    monkeypatch.setattr(workspaces, "_CACHE", {})
    found.append(workspace_bytes(backward, args, {}, (images, weight, torch.zeros(32))))
    assert found[0] == found[1] > 0
    assert not any("convolution" in event.key for event in profiler.key_averages())


def test_measuring_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    image, weight = torch.zeros(2, 4, 8, 8), torch.zeros(4, 4, 3, 3)
    convolution = torch.ops.aten.convolution.default
    args = (image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    workspace_bytes(convolution, args, {}, convolution(*args))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("_scaled_dot_product_efficient_attention_backward", ["philox_seed", "philox_offset"]),
        ("_efficient_attention_backward", ["philox_seed", "philox_offset"]),
        ("_scaled_dot_product_flash_attention_backward", []),
        ("_scaled_dot_product_cudnn_attention_backward", []),
        ("mm", []),
    ],
)
def test_random_states_that_a_kernel_reads_on_the_cpu(name: str, places: list[str]) -> None:
    operator = getattr(torch.ops.aten, name).default
    arguments = [argument.name for argument in operator._schema.arguments]
    assert [a for a in arguments if is_on_cpu(operator, a)] == places


def test_calls_that_are_alike_at_any_sizes_share_a_term() -> None:
    func, kwargs = torch.ops.aten.convolution.default, {}
    recorder = Recorder(is_symbolic=True)
    recorder.begin(Phase.FORWARD)
    for channels in (3, 3, 5):
        x, weight = torch.randn(2, channels, 8, 8), torch.randn(4, channels, 3, 3)
        args = (x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        recorder.use_workspace(func, args, kwargs, func(*args), "line")
    terms = [e.size for e in recorder.events if isinstance(e.size, Measurable)]
    assert len(terms) == 2 * 3  # taken and given back
    assert len(set(terms)) == 2
