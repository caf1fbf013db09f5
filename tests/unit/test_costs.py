"""Prices of operators: arithmetic by hand for the roofline, a cache that survives for the rest."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from dtrcompile.passes.device import costs
from dtrcompile.passes.device.costs import (
    COST_MODELS,
    GPU_PEAKS,
    CostCache,
    DevicePeaks,
    MeasuredCostModel,
    RooflineCostModel,
    bytes_moved,
    make_cost_model,
    matrix_flops,
    operator_key,
    round_cost,
)
from dtrcompile.passes.errors import OptionError
from dtrcompile.passes.torch_private import FakeTensorMode

aten = torch.ops.aten
CPU = torch.device("cpu")

# Efficiencies are 0.7 and 0.8, so that these give 1e9 useful FLOP/s and 1e9 useful bytes/s: one
# operation, or one byte, is one nanosecond.
ROUND_PEAKS = DevicePeaks(
    {"float32": 1e9 / 0.7, "bfloat16": 2e9 / 0.7, "tf32": 4e9 / 0.7},
    vector_flops=1e9,
    bandwidth=1e9 / 0.8,
    launch_ns=100,
    random_ops=50,
)


def trace(function: Callable[..., object], *args: torch.Tensor) -> list[fx.Node]:
    """The call nodes of ``function`` traced on ``args``."""
    graph = make_fx(function, tracing_mode="fake")(*args).graph
    return [n for n in graph.nodes if n.op == "call_function"]


def outside(nodes: list[fx.Node]) -> list[fx.Node]:
    """The nodes that a group reads and does not hold, each once."""
    inputs = {i: None for n in nodes for i in n.all_input_nodes if i not in nodes}
    return list(inputs)


def roofline(nodes: list[fx.Node], output: fx.Node | None = None) -> int:
    model = RooflineCostModel(CPU, ROUND_PEAKS)
    return model.cost_ns(nodes, outside(nodes), [output or nodes[-1]])


def test_matrix_product_is_bound_by_arithmetic() -> None:
    nodes = trace(aten.mm, torch.ones(30, 50), torch.ones(50, 40))
    # 2 * 30 * 50 * 40 = 120,000 operations; 4 * (1500 + 2000 + 1200) = 18,800 bytes.
    assert matrix_flops(nodes[0]) == 120_000
    assert roofline(nodes) == 100 + 120_000


def test_thin_matrix_product_is_bound_by_bytes() -> None:
    nodes = trace(aten.mm, torch.ones(1000, 1), torch.ones(1, 1))
    # 2,000 operations; 4 * (1000 + 1 + 1000) = 8,004 bytes.
    assert roofline(nodes) == 100 + 8_004


def test_narrow_dtype_uses_its_own_peak() -> None:
    a = torch.ones(100, 100, dtype=torch.bfloat16)
    # 2,000,000 operations at two a nanosecond.
    assert roofline(trace(aten.mm, a, a)) == 100 + 1_000_000


def test_tf32_counts_where_the_user_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = trace(aten.mm, torch.ones(100, 100), torch.ones(100, 100))
    monkeypatch.setattr(costs, "_tf32_allowed", lambda _: True)
    # 2,000,000 operations at four a nanosecond; 120,000 bytes.
    assert roofline(nodes) == 100 + 500_000


@pytest.mark.parametrize(
    ("width", "dtype", "slowdown"),
    [
        (1024, torch.bfloat16, 1),
        (1026, torch.bfloat16, 3),  # 4 bytes more than a multiple of 16
        (1025, torch.bfloat16, 6),
        (1025, torch.float32, 1),  # no tensor core
    ],
)
def test_products_of_misaligned_rows_take_longer_on_tensor_cores(
    width: int, dtype: torch.dtype, slowdown: int
) -> None:
    graph = fx.Graph()
    operands = [graph.placeholder(name) for name in "ab"]
    node = graph.call_function(aten.mm.default, tuple(operands))
    with FakeTensorMode():
        values = [torch.empty(s, dtype=dtype, device="cuda") for s in ((64, 64), (64, width))]
        for operand, fake in zip(operands, values, strict=True):
            operand.meta["val"] = fake
        node.meta["val"] = aten.mm(*values)
    peaks = replace(ROUND_PEAKS, vector_flops=1e9 / 0.7)
    seconds = RooflineCostModel(CPU, peaks).compute_s([node])
    operations = 2 * 64 * 64 * width
    each_ns = 0.5 if dtype is torch.bfloat16 else 1
    assert seconds * 1e9 == pytest.approx(slowdown * each_ns * operations)


def test_fused_cone_moves_each_byte_once() -> None:
    nodes = trace(lambda x, y: ((x + y) * x).relu(), torch.ones(1000), torch.ones(1000))
    assert len(nodes) == 3
    # Reads x and y once, writes one value: 12,000 bytes; 3,000 operations.
    assert roofline(nodes) == 100 + 12_000


def test_transcendental_functions_cost_more() -> None:
    nodes = trace(lambda x: x.tanh(), torch.ones(1000))
    # 16 operations an element against 8,000 bytes.
    assert roofline(nodes) == 100 + 16_000


def test_random_numbers_cost_what_the_device_says() -> None:
    nodes = trace(lambda x: torch.rand_like(x) > 0.1, torch.ones(1000))
    # 50 operations a number and one comparison, against some 1,000 bytes.
    assert roofline(nodes) == 100 + 51_000


def test_slice_reads_only_its_part() -> None:
    nodes = trace(lambda x: x[:10] * 2, torch.ones(1000))
    # A view and a product: reads 40 bytes of the base's 4,000 and writes 40.
    assert bytes_moved(nodes, outside(nodes), nodes[-1:]) == 80


def test_slices_together_never_read_more_than_the_base() -> None:
    nodes = trace(lambda x: x[:8] * x[1:9] * x[2:], torch.ones(10))
    # 3 * 32 bytes of views lie over 40 bytes; 32 bytes are written.
    assert bytes_moved(nodes, outside(nodes), nodes[-1:]) == 40 + 32


def test_expanded_dimension_is_read_once() -> None:
    nodes = trace(lambda x: x.expand(100, 10) * 2, torch.ones(1, 10))
    assert bytes_moved(nodes, outside(nodes), nodes[-1:]) == 40 + 4_000


def test_gather_reads_the_rows_that_it_takes() -> None:
    nodes = trace(aten.embedding, torch.ones(5000, 8), torch.zeros(3, dtype=torch.int64))
    # 3 rows of 32 bytes read, as many written, and 3 indices of 8 bytes.
    assert bytes_moved(nodes, outside(nodes), nodes[-1:]) == 96 + 96 + 24


def test_views_cost_nothing_to_speak_of() -> None:
    assert roofline(trace(lambda x: x.view(10, 10).t(), torch.ones(100))) == 1


def test_reduction_counts_what_it_reads() -> None:
    nodes = trace(lambda x: x.sum(), torch.ones(1000))
    assert roofline(nodes) == 100 + 4_004


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_has_flops_on_cpu(dropout: float) -> None:
    q = torch.ones(2, 4, 64, 16)
    attention = aten._scaled_dot_product_flash_attention_for_cpu
    nodes = trace(lambda x: attention(x, x, x, dropout)[0], q)
    # Two products, each of 2 * (2*4) * 64 * 64 * 16 operations.
    assert matrix_flops(nodes[0]) == 2 * 2 * 8 * 64 * 64 * 16


def test_convolution_and_its_backward_have_flops() -> None:
    x = torch.ones(2, 3, 8, 8)
    w = torch.ones(5, 3, 3, 3, requires_grad=True)

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.conv2d(x, w, padding=1)
        return torch.autograd.grad(y.sum(), w)[0]

    flops = {n.name: matrix_flops(n) for n in trace(step, x, w)}
    # 2 * (2*5*8*8 outputs) * (3*3*3 products each); backward makes the weight's gradient alone.
    assert flops["convolution"] == 2 * 640 * 27
    assert flops["convolution_backward"] == 2 * 640 * 27


def test_symbolic_sizes_count_at_their_hints_and_add_no_guard() -> None:
    traced = make_fx(lambda x: x @ x.t(), tracing_mode="symbolic")(torch.ones(30, 50))
    node = next(n for n in traced.graph.nodes if n.target is aten.mm.default)
    shape_env = node.meta["val"].shape[0].node.shape_env
    guards = len(shape_env.guards)
    assert matrix_flops(node) == 2 * 30 * 50 * 30
    assert roofline([node]) == 100 + 90_000
    assert "float32[30, 50]" in operator_key(node)
    assert len(shape_env.guards) == guards


def test_broken_formula_falls_back_to_bytes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_args: object, **_kwargs: object) -> int:
        raise TypeError("signature changed")

    monkeypatch.setitem(costs.flop_registry, aten.mm, broken)
    nodes = trace(aten.mm, torch.ones(30, 50), torch.ones(50, 40))
    with caplog.at_level(logging.WARNING, "dtrcompile.costs"):
        assert roofline(nodes) == 100 + 18_800
    assert "signature changed" in caplog.text


def test_cpu_price_does_not_depend_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = trace(aten.mm, torch.ones(30, 50), torch.ones(50, 40))
    before = RooflineCostModel(CPU).cost_ns(nodes, outside(nodes), nodes)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr("platform.processor", lambda: "another")
    assert RooflineCostModel(CPU).cost_ns(nodes, outside(nodes), nodes) == before


def test_gpu_names_find_their_own_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    def peaks_of(name: str) -> DevicePeaks:
        properties = type("Properties", (), {"name": name})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        return costs.device_peaks(torch.device("cuda"))

    assert peaks_of("NVIDIA H100 80GB HBM3") is GPU_PEAKS["H100"]
    assert peaks_of("NVIDIA H100 PCIe") is GPU_PEAKS["H100 PCIe"]
    assert peaks_of("NVIDIA H200") is GPU_PEAKS["H200"]
    assert peaks_of("NVIDIA GH200 480GB") is GPU_PEAKS["GH200"]
    assert peaks_of("NVIDIA A10G") is GPU_PEAKS["A10G"]
    assert peaks_of("NVIDIA A100-SXM4-80GB") is GPU_PEAKS["A100"]
    assert peaks_of("NVIDIA L40S") is GPU_PEAKS["L40S"]
    assert peaks_of("Tesla T4") is GPU_PEAKS["T4"]


def test_unknown_gpu_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    properties = type("Properties", (), {"name": "Frobnicator 9000"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    costs.device_peaks(torch.device("cuda"))
    assert "Frobnicator 9000" in caplog.text


def test_table_of_models() -> None:
    assert set(COST_MODELS) == {"roofline", "measured"}
    assert isinstance(make_cost_model("roofline", CPU), RooflineCostModel)
    with pytest.raises(OptionError, match="Did you mean 'roofline'"):
        make_cost_model("rooflin", CPU)


# --- measured -----------------------------------------------------------------------------------


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MeasuredCostModel:
    monkeypatch.setenv("DTRCOMPILE_CACHE_DIR", str(tmp_path))
    model = make_cost_model("measured", CPU)
    assert isinstance(model, MeasuredCostModel)
    return model


def mm_nodes() -> list[fx.Node]:
    return trace(aten.mm, torch.ones(30, 50), torch.ones(50, 40))


def price(model: MeasuredCostModel, nodes: list[fx.Node]) -> int:
    return model.cost_ns(nodes, outside(nodes), nodes[-1:])


def test_each_distinct_operator_is_measured_once(
    measured: MeasuredCostModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "dtrcompile.costs"):
        first = price(measured, mm_nodes())
        again = price(measured, mm_nodes())
        fresh = price(MeasuredCostModel(CPU), mm_nodes())
    assert first == again == fresh >= 1
    assert caplog.text.count("measuring aten.mm") == 1
    lines = (tmp_path / "costs.jsonl").read_text().split("\n")
    (record,) = [json.loads(line) for line in lines if line]
    assert record["torch"] == torch.__version__
    assert record["cost_ns"] == first


def test_random_states_that_a_kernel_reads_on_the_cpu_are_there() -> None:
    """Their fake tensors say that they are on the GPU, and none is here."""
    graph = fx.Graph()
    states = [graph.placeholder(name) for name in ("seed", "offset")]
    with FakeTensorMode():
        for state in states:
            state.meta["val"] = torch.empty((), dtype=torch.long, device="cuda")
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    before = (None,) * 7  # the tensors, which would be on the GPU
    node = graph.call_function(backward, (*before, *states, 0.1, [True] * 4))
    assert callable(costs._node_call(node))


def test_timing_runs_outside_the_fake_mode(measured: MeasuredCostModel) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    nodes = mm_nodes()
    with FakeTensorMode():
        assert price(measured, nodes) >= 1
    assert measured.cache.get(operator_key(nodes[0])) is not None


def test_timing_leaves_random_state_alone(measured: MeasuredCostModel) -> None:
    nodes = trace(lambda x: aten.bernoulli(x), torch.full((8,), 0.5))
    before = torch.random.get_rng_state()
    price(measured, nodes)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_what_cannot_run_is_priced_by_the_roofline_with_one_warning(
    measured: MeasuredCostModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("too big")

    monkeypatch.setattr(costs, "time_ns", out_of_memory)
    nodes = mm_nodes()
    expected = measured.roofline.cost_ns(nodes, outside(nodes), nodes)
    assert price(measured, nodes) == price(measured, nodes) == expected
    assert caplog.text.count("cannot measure") == 1


def test_index_operators_run_on_valid_indices(measured: MeasuredCostModel) -> None:
    indices = torch.full((3,), 7, dtype=torch.int64)
    nodes = trace(lambda x, i: x.index_add(0, i, x[:3]), torch.ones(8, 4), indices)
    kernel = nodes[-1:]
    assert price(measured, kernel) >= 1
    assert measured.cache.get(operator_key(kernel[0])) is not None


def test_cone_is_priced_by_a_copy_of_its_bytes(
    measured: MeasuredCostModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 2^20 elements: 8 MiB read, 4 MiB written; the copy measured is the next power of two's.
    nodes = trace(lambda x, y: (x + y) * x, torch.ones(1 << 20), torch.ones(1 << 20))
    monkeypatch.setattr(costs, "time_ns", lambda _: 1_603_000.0)
    # round_cost gives 1,600,000 for 16 MiB, 3,000 of it the launch; 12 MiB take 3/4 of the rest.
    assert price(measured, nodes) == 3_000 + (1_600_000 - 3_000) * 3 // 4
    assert measured.cache.get(f"copy {1 << 24}") == 1_600_000


def test_corrupt_lines_are_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = {"device": "d", "torch": "t", "operator": "o", "cost_ns": 5}
    lines = [
        json.dumps(good),
        "{torn",
        "[1, 2]",
        json.dumps({**good, "operator": "p", "cost_ns": -1}),
        json.dumps({**good, "torch": "another", "operator": "q"}),
        json.dumps(good)[:-8],  # a killed process's unfinished line
    ]
    (tmp_path / "costs.jsonl").write_text("\n".join(lines))
    cache = CostCache(tmp_path, "d", "t")
    assert (cache.get("o"), cache.get("p"), cache.get("q")) == (5, None, None)
    assert len(caplog.records) == 4
    cache.put("r", 7)
    assert CostCache(tmp_path, "d", "t").get("r") == 7


def test_unwritable_cache_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    cache = CostCache(occupied, "d", "t")
    caplog.clear()
    cache.put("o", 5)
    cache.put("p", 6)
    assert (cache.get("o"), cache.get("p")) == (5, 6)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [(12_345, 12_000), (0.2, 1), (99.6, 100), (7, 7), (1.96e9, 2_000_000_000)],
)
def test_two_digits(given: float, expected: int) -> None:
    assert round_cost(given) == expected
