"""Graphs whose large values are computed in chunks give the same results."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from dtrcompile.passes.chunking.regions import Refused, Region, bytes_of, region_of, regions_of
from dtrcompile.passes.chunking.rewrite import chunked
from dtrcompile.passes.chunking.rows import Rows
from dtrcompile.passes.nodes import packet
from dtrcompile.passes.torch_private import select_decomp_table
from tests.unit.padded_products import pad_products
from workloads.training import RELEASE

ROWS, WIDTH, WORDS = 37, 8, 160

Step = Callable[..., Tensor]


def joint_of(step: Step, *inputs: Tensor) -> fx.GraphModule:
    """Loss and gradients of a training step as one graph."""
    wanted = tuple(i for i, x in enumerate(inputs) if x.is_floating_point())

    def both(*given: Tensor) -> Any:
        return torch.func.grad_and_value(step, argnums=wanted)(*given)

    return traced(both, *inputs)


def traced(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    pure = torch.func.functionalize(function)
    gm = make_fx(pure, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    gm.graph.eliminate_dead_code()
    return gm


def regions_in(gm: fx.GraphModule, least_bytes: int) -> list[Region]:
    return regions_of(gm, least_bytes)[0]


def largest_bytes(gm: fx.GraphModule) -> int:
    return max(bytes_of(n) for n in gm.graph.nodes if n.op == "call_function")


def in_chunks(gm: fx.GraphModule, regions: list[Region], n_chunks: int) -> fx.GraphModule:
    found = chunked(gm, [(region, min(n_chunks, region.n_rows)) for region in regions])
    assert found is not None
    return found


def assert_same(
    gm: fx.GraphModule, other: fx.GraphModule, inputs: tuple[Tensor, ...], tolerance: float = 1e-11
) -> None:
    expected = torch.utils._pytree.tree_leaves(fx.Interpreter(gm).run(*inputs))
    found = torch.utils._pytree.tree_leaves(fx.Interpreter(other).run(*inputs))
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def text(rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    """Features, the weights of a head, and labels, some of which are not to be counted."""
    torch.manual_seed(0)
    x = torch.randn(rows, WIDTH, dtype=torch.float64)
    head = torch.randn(WORDS, WIDTH, dtype=torch.float64)
    labels = torch.randint(WORDS, (rows,))
    labels[3] = -100
    return x, head, labels


def plain(x: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x @ head.T, labels)


def smoothed(x: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x @ head.T, labels, label_smoothing=0.1)


def summed(x: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x @ head.T, labels, reduction="sum")


def with_z_loss(x: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    scores = x @ head.T
    return F.cross_entropy(scores, labels) + 1e-4 * scores.logsumexp(-1).square().mean()


def capped(x: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(30 * torch.tanh((x @ head.T) / 30), labels)


def with_three_dimensions(x: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    scores = F.linear(x.view(1, ROWS, WIDTH), head)
    return F.cross_entropy(scores.flatten(0, 1), labels)


def tied(x: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    words = F.embedding(labels.clamp(min=0), head)
    return F.cross_entropy(torch.tanh(x + words) @ head.T, labels)


@pytest.mark.parametrize("n_chunks", [2, 4, 37, 50])
@pytest.mark.parametrize(
    "step", [plain, smoothed, summed, with_z_loss, capped, with_three_dimensions, tied]
)
def test_scores_and_their_loss_in_chunks(step: Step, n_chunks: int) -> None:
    inputs = text()
    gm = joint_of(step, *inputs)
    regions = regions_in(gm, ROWS * WORDS * 8)
    assert len(regions) == 1 and regions[0].n_rows == ROWS
    other = in_chunks(gm, regions, n_chunks)
    assert_same(gm, other, inputs)
    # What is left whole is not the scores: the head's gradient is the largest.
    rows = -(-ROWS // min(n_chunks, ROWS))
    assert largest_bytes(other) <= max(rows * WORDS, WORDS * WIDTH) * 8


@pytest.mark.parametrize("step", [plain, with_z_loss, tied])
def test_scores_of_padded_products_in_chunks(step: Step) -> None:
    """As Inductor pads them on a GPU, where the vocabulary has an odd number of words."""
    inputs = text()
    gm = joint_of(step, *inputs)
    expected = gm(*inputs)
    assert pad_products(gm, alignment=ROWS) == 3
    torch.testing.assert_close(gm(*inputs), expected)
    (region,) = regions_in(gm, ROWS * WORDS * 8)
    assert region.n_rows == ROWS
    other = in_chunks(gm, [region], 4)
    assert_same(gm, other, inputs)
    products = other.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    assert max(len(n.meta["val"]) for n in products if n.meta["val"].shape[1] > WORDS) == 10


def test_the_operators_of_one_chunk_are_together() -> None:
    """The scores of one chunk are not needed any more when those of the next are made."""
    gm = joint_of(plain, *text())
    other = in_chunks(gm, regions_in(gm, ROWS * WORDS * 8), 4)
    place = {node: i for i, node in enumerate(other.graph.nodes)}
    scores = [n for n in place if n.name.startswith("mm") and n.meta["val"].shape[-1] == WORDS]
    assert len(scores) == 4

    def last_use(node: fx.Node, seen: set[fx.Node]) -> int:
        users = [u for u in node.users if u.meta["val"].shape == node.meta["val"].shape]
        return max([place[node], *(last_use(u, seen) for u in users)])

    ends = [last_use(node, set()) for node in scores]
    assert all(end < place[following] for end, following in zip(ends, scores[1:], strict=False))


def test_sums_over_chunks_in_low_precision_are_rounded_once() -> None:
    x, head, labels = text(512)
    inputs = x.bfloat16(), head.bfloat16(), labels
    gm = joint_of(plain, *inputs)
    other = in_chunks(gm, regions_in(gm, 512 * WORDS * 2), 64)
    (_, exact), _ = fx.Interpreter(joint_of(plain, x, head, labels)).run(x, head, labels)

    def error(graph: fx.GraphModule) -> float:
        (_, found), _ = fx.Interpreter(graph).run(*inputs)
        return ((found.double() - exact).norm() / exact.norm()).item()

    assert error(other) < 1.2 * error(gm)


def hidden(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    h = F.gelu(F.linear(x, up))
    return (x + F.linear(h, down)).square().mean()


def gated(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    h = F.silu(F.linear(x, up)) * F.linear(x, up.flip(0))
    return (x + F.linear(h, down)).square().mean()


@pytest.mark.parametrize("step", [hidden, gated])
def test_the_hidden_layer_of_an_mlp_in_chunks(step: Step) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 10, WIDTH, dtype=torch.float64)
    up = torch.randn(32 * WIDTH, WIDTH, dtype=torch.float64)
    down = torch.randn(WIDTH, 32 * WIDTH, dtype=torch.float64)
    gm = joint_of(step, x, up, down)
    regions = regions_in(gm, 30 * 32 * WIDTH * 8)
    assert [region.n_rows for region in regions] == [30]
    assert_same(gm, in_chunks(gm, regions, 5), (x, up, down))


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return (weights @ v).square().sum()


def test_scores_of_attention_in_chunks() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 50, 4, dtype=torch.float64) for _ in range(3))
    gm = joint_of(attention, q, k, v)
    regions = regions_in(gm, 2 * 3 * 50 * 50 * 8)
    assert [region.n_rows for region in regions] == [6]
    assert_same(gm, in_chunks(gm, regions, 3), (q, k, v))


def test_values_of_several_layers_in_chunks() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, WIDTH, dtype=torch.float64)
    up = torch.randn(16 * WIDTH, WIDTH, dtype=torch.float64)
    down = torch.randn(WIDTH, 16 * WIDTH, dtype=torch.float64)

    def layers(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        for _ in range(3):
            x = F.layer_norm(x, (WIDTH,)) @ x.T @ x  # every row depends on every other one
            x = x + F.linear(F.gelu(F.linear(x, up)), down)
        return x.square().mean()

    gm = joint_of(layers, x, up, down)
    regions = regions_in(gm, 20 * 16 * WIDTH * 8)
    assert len(regions) == 3
    assert_same(gm, in_chunks(gm, regions, 4), (x, up, down), 1e-9)


def images() -> tuple[Tensor, Tensor, Tensor]:
    """Six images, and the weights of two convolutions."""
    torch.manual_seed(0)
    x = torch.randn(6, 3, 8, 8, dtype=torch.float64)
    up = torch.randn(16, 3, 3, 3, dtype=torch.float64)
    return x, up, torch.randn(16, 16, 3, 3, dtype=torch.float64)


IMAGE_BYTES = 6 * 16 * 8 * 8 * 8  # what the first convolution makes


def convolutions(x: Tensor, up: Tensor, again: Tensor) -> Tensor:
    h = F.silu(F.group_norm(F.conv2d(x, up, padding=1), 4))
    return F.conv2d(h, again, padding=1, bias=again[0, :, 0, 0]).square().mean()


def pooled(x: Tensor, up: Tensor, again: Tensor) -> Tensor:
    h = F.avg_pool2d(F.gelu(F.conv2d(x, up, padding=1)), 2)
    h = F.pad(F.interpolate(h, scale_factor=2), (1, 1, 1, 1))
    return F.conv2d(h, again).tanh().sum()


def of_the_first_layer(_x: Tensor, up: Tensor, again: Tensor) -> Tensor:
    constant = torch.ones(6, 3, 8, 8, dtype=torch.float64)  # has no gradient
    return F.conv2d(F.relu(F.conv2d(constant, up, padding=1)), again).square().sum()


def frozen(x: Tensor, up: Tensor, again: Tensor) -> Tensor:
    h = F.conv2d(x, up.detach(), padding=1)
    return F.conv2d(h.sin(), again.detach(), again[0, :, 0, 0]).square().sum()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("step", [convolutions, pooled, of_the_first_layer, frozen])
def test_images_in_chunks_of_samples(step: Step, memory_format: torch.memory_format) -> None:
    x, up, again = (t.contiguous(memory_format=memory_format) for t in images())
    gm = joint_of(step, x, up, again)
    regions = regions_in(gm, IMAGE_BYTES)
    assert regions and all(region.n_rows == 6 for region in regions)
    other = in_chunks(gm, regions, 3)
    assert_same(gm, other, (x, up, again), 1e-9)
    assert largest_bytes(other) < largest_bytes(gm)


def _strided(h: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(h, w, w[:, 0, 0, 0], stride=2, padding=1)


def _dilated(h: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(h, w, dilation=2, padding=2)


def _grouped(h: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(h, w[:, :4], groups=4, padding=1)


def _of_each_channel(h: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(h, w[:, :1], groups=16, padding=1)


def _transposed(h: Tensor, w: Tensor) -> Tensor:
    bias = w[:8, 0, 0, 0]
    return F.conv_transpose2d(h, w[:, :4], bias, stride=2, output_padding=1, groups=2)


def _of_lines(h: Tensor, w: Tensor) -> Tensor:
    return F.conv1d(h.flatten(2), w[:, :, 0], padding=1)


def _of_volumes(h: Tensor, w: Tensor) -> Tensor:
    volume = F.conv3d(h.unflatten(2, (2, 4)), w.unsqueeze(2), padding=(0, 1, 1))
    return F.avg_pool3d(volume, 2, 1)


def _averaged(h: Tensor, _w: Tensor) -> Tensor:
    return F.avg_pool2d(h, 3, 2, 1, ceil_mode=True, count_include_pad=False)


def _averaged_to_size(h: Tensor, _w: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(h, (5, 3))


def _bilinear(h: Tensor, _w: Tensor) -> Tensor:
    return F.interpolate(h, size=(9, 13), mode="bilinear", align_corners=True)


def _bicubic(h: Tensor, _w: Tensor) -> Tensor:
    return F.interpolate(h, scale_factor=2, mode="bicubic")


def _indexed(h: Tensor, _w: Tensor) -> Tensor:
    twice = torch.arange(16) // 2  # its gradient writes two values into each place
    return h[:, :, twice.unsqueeze(-1), twice][:, torch.tensor([3, 1, 3])]


def _cropped(h: Tensor, _w: Tensor) -> Tensor:
    return F.pad(h, (-1, 2, 0, -1, 1, 0), value=0.5)


@pytest.mark.parametrize(
    "operator",
    [
        _strided,
        _dilated,
        _grouped,
        _of_each_channel,
        _transposed,
        _of_lines,
        _of_volumes,
        _averaged,
        _averaged_to_size,
        _bilinear,
        _bicubic,
        _indexed,
        _cropped,
    ],
)
def test_operators_on_images_in_chunks(operator: Callable[[Tensor, Tensor], Tensor]) -> None:
    def step(x: Tensor, up: Tensor, again: Tensor) -> Tensor:
        return operator(F.conv2d(x, up, padding=1).sin(), again).square().mean()

    inputs = images()
    gm = joint_of(step, *inputs)
    regions = regions_in(gm, IMAGE_BYTES)
    assert regions and all(region.n_rows == 6 for region in regions)
    other = in_chunks(gm, regions, 3)
    assert_same(gm, other, inputs, 1e-9)
    assert largest_bytes(other) < largest_bytes(gm)


@pytest.mark.skipif(RELEASE < (2, 12), reason="the gradient of max pooling is one operator")
def test_max_pooling_in_chunks() -> None:
    """Its gradient is scattered into one value of all samples and channels, which stays whole."""

    def step(x: Tensor, up: Tensor, again: Tensor) -> Tensor:
        h = F.max_pool2d(F.relu(F.conv2d(x, up, padding=1)), 3, 2, 1)
        return F.conv2d(h, again).square().mean()

    inputs = images()
    gm = joint_of(step, *inputs)
    regions = regions_in(gm, IMAGE_BYTES)
    assert any("max_pool" in node.name for region in regions for node in region.rows)
    assert_same(gm, in_chunks(gm, regions, 3), inputs, 1e-9)


def test_places_of_images_in_chunks() -> None:
    """A product of matrices has all places of all images as rows, a convolution only images."""

    def step(x: Tensor, up: Tensor, again: Tensor) -> Tensor:
        h = F.conv2d(x, up, padding=1)
        wide = again.flatten(1).T  # nine times as wide
        y = F.gelu(F.linear(F.layer_norm(h.permute(0, 2, 3, 1), (16,)), wide))
        return (h + F.linear(y, wide.T).permute(0, 3, 1, 2)).square().mean()

    inputs = images()
    gm = joint_of(step, *inputs)
    regions = regions_in(gm, 9 * IMAGE_BYTES)
    assert [region.n_rows for region in regions] == [6 * 8 * 8]
    assert_same(gm, in_chunks(gm, regions, 4), inputs, 1e-9)
    for region in regions_in(gm, IMAGE_BYTES):
        assert_same(gm, in_chunks(gm, [region], 4), inputs, 1e-9)


put = torch.ops.aten.index_put


@pytest.mark.parametrize(
    "operator",
    [
        lambda h: F.pad(h, (0, 0, 0, 0, 0, 0, 1, 1)),
        lambda h: h[:, torch.tensor([0, 1]), :, torch.tensor([2, 3])],
        lambda h: h[torch.tensor([0, 2, 1, 1, 1, 1])],
        lambda h: put(h, [None, torch.tensor([1, 2])], h[0, :2], True),
        lambda h: put(h, [None, torch.tensor([1, 2])], h[:1, :2]),
        lambda h: F.conv2d(h, h[:2]),
        lambda h: h.flip(0) * h,
    ],
)
def test_what_mixes_samples_is_not_cut(operator: Callable[[Tensor], Tensor]) -> None:
    def step(x: Tensor, up: Tensor) -> Tensor:
        return operator(F.conv2d(x, up, padding=1)).square().sum()

    x, up, _ = images()
    gm = joint_of(step, x, up)
    for region in regions_in(gm, IMAGE_BYTES // 8):
        assert_same(gm, in_chunks(gm, [region], 3), (x, up), 1e-9)


def test_samples_that_are_normalized_together_stay_together() -> None:
    def step(x: Tensor, up: Tensor, again: Tensor) -> Tensor:
        h = F.batch_norm(F.conv2d(x, up, padding=1), None, None, training=True)
        return F.conv2d(F.relu(h), again).square().mean()

    inputs = images()
    gm = joint_of(step, *inputs)
    for region in regions_in(gm, IMAGE_BYTES // 2):
        assert not any(packet(n) is torch.ops.aten.var_mean for n in region.rows)
        assert_same(gm, in_chunks(gm, [region], 3), inputs, 1e-9)


def refusal(step: Step, *inputs: Tensor) -> Refused:
    gm = joint_of(step, *inputs)
    seed = max((n for n in gm.graph.nodes if n.op == "call_function"), key=bytes_of)
    found = region_of(seed)
    assert isinstance(found, Refused)
    return found


def test_scores_that_are_returned_stay_whole() -> None:
    def step(x: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        scores = x @ head.T
        return F.cross_entropy(scores, labels), scores

    x, head, labels = text()

    def both(x: Tensor, head: Tensor, labels: Tensor) -> Any:
        return torch.func.grad_and_value(step, argnums=(0, 1), has_aux=True)(x, head, labels)

    gm = traced(both, x, head, labels)
    scores = next(n for n in gm.graph.nodes if packet(n) is torch.ops.aten.mm)
    found = region_of(scores)
    assert isinstance(found, Refused)
    assert str(found) == f"output reads all of {scores.name} at once"
    assert found.whole is scores


def test_statistics_of_a_batch_are_never_of_a_chunk() -> None:
    """Features have rows of their own, each with all of the batch; samples have none."""

    def step(x: Tensor, head: Tensor) -> Tensor:
        return F.batch_norm(x @ head.T, None, None, training=True).relu().square().sum()

    x, head, _ = text()
    gm = joint_of(step, x, head)
    regions = regions_in(gm, ROWS * WORDS * 8)
    assert [region.n_rows for region in regions] == [WORDS]
    assert_same(gm, in_chunks(gm, regions, 4), (x, head))


def test_random_numbers_are_drawn_whole() -> None:
    def step(x: Tensor, head: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.dropout(x @ head.T, 0.5), labels)

    gm = joint_of(step, *text())
    for region in regions_in(gm, ROWS * WORDS * 4):
        for node in region.nodes:
            assert torch.Tag.nondeterministic_seeded not in node.target.tags


def test_an_operator_without_a_rule_stays_whole() -> None:
    def step(x: Tensor, head: Tensor) -> Tensor:
        return (x @ head.T).cummax(1).values.square().mean()

    x, head, _ = text()
    assert "cummax" in str(refusal(step, x, head))


def test_regions_that_wait_for_each_other_are_refused() -> None:
    """Each of two regions would have to be whole before the other one begins."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.randn(8, 8)
    nodes = [x]
    for source in (x, x):
        nodes.append(graph.call_function(torch.ops.aten.sin.default, (source,)))
    a, b = nodes[1:]
    a2 = graph.call_function(torch.ops.aten.mm.default, (x, b))
    b2 = graph.call_function(torch.ops.aten.mm.default, (x, a))
    graph.output((a2, b2))
    for node in (a, b, a2, b2):
        node.meta["val"] = torch.randn(8, 8)
    first = Region(a, 8, {a: Rows(0), a2: Rows(0)}, {})
    second = Region(b, 8, {b: Rows(0), b2: Rows(0)}, {})
    assert chunked(fx.GraphModule({}, graph), [(first, 2), (second, 2)]) is None


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("reduce", [torch.sum, torch.mean])
def test_reductions_over_rows_add_up(reduce: Callable[..., Tensor], keepdim: bool) -> None:
    def step(x: Tensor, head: Tensor) -> Tensor:
        scores = F.linear(x, head).tanh()
        features = reduce(scores, (0, 1), keepdim=keepdim)
        one = reduce(scores.square(), (0, 1, 2), keepdim=keepdim)
        return features.square().sum() + one.sum() + scores.mean()

    torch.manual_seed(0)
    x = torch.randn(3, 12, WIDTH, dtype=torch.float64)
    head = torch.randn(WORDS, WIDTH, dtype=torch.float64)
    gm = joint_of(step, x, head)
    regions = regions_in(gm, 36 * WORDS * 8)
    assert [region.n_rows for region in regions] == [36]
    assert_same(gm, in_chunks(gm, regions, 5), (x, head))


def test_one_of_several_results_is_used_whole() -> None:
    def step(x: Tensor, head: Tensor) -> Tensor:
        scores = x @ head.T
        variance, mean = torch.var_mean(scores, -1, keepdim=True)
        return (scores.square() * variance).mean() + (mean @ mean.T).sum()

    x, head, _ = text()
    gm = joint_of(step, x, head)
    regions = regions_in(gm, ROWS * WORDS * 8)
    assert len(regions) == 1
    assert_same(gm, in_chunks(gm, regions, 4), (x, head))


def test_a_write_in_between_keeps_its_place() -> None:
    """What is read before a tensor is written into must not be read afterwards."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    first = graph.call_function(torch.ops.aten.sin.default, (x,))
    written = graph.call_function(torch.ops.aten.copy_.default, (x, y))
    product = graph.call_function(torch.ops.aten.mm.default, (y, y))
    second = graph.call_function(torch.ops.aten.mul.Tensor, (first, product))
    graph.output((second, written))
    for node in (x, y, first, written, product, second):
        node.meta["val"] = torch.randn(8, 8)
    region = Region(first, 8, {first: Rows(0), second: Rows(0)}, {})
    assert chunked(fx.GraphModule({}, graph), [(region, 2)]) is None


def _normalized(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _moved(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().sin().transpose(0, -1)


def _reshaped(x: Tensor) -> Tensor:
    return x.reshape(-1, 2, x.shape[-1] // 2).softmax(1).reshape(x.shape)


def _selected(x: Tensor) -> Tensor:
    return x * x[..., 3:4] + x.select(-1, 0).unsqueeze(-1)


def _gathered(x: Tensor) -> Tensor:
    return x.gather(-1, x.argsort(-1)[..., :2]).sum(-1, keepdim=True) * x


def _reduced(x: Tensor) -> Tensor:
    return x - x.amax(-1, keepdim=True) + x.mean(-1, keepdim=True) + x.sum(0)


def _summed_up(x: Tensor) -> Tensor:
    return torch.cat([x.cumsum(-1), x.flip(-1)], -1)[..., ::2]


def _masked(x: Tensor) -> Tensor:
    # (At most 1, because several of them, one after the other, would magnify what is rounded.)
    position = x.argmax(-1, keepdim=True) / x.shape[-1]
    return x.masked_fill((x < 0).all(-1, keepdim=True), 0.5) * position


_OPERATORS = (
    torch.tanh,
    F.gelu,
    _normalized,
    _moved,
    _reshaped,
    _selected,
    _gathered,
    _reduced,
    _summed_up,
    _masked,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    operators=st.lists(st.sampled_from(_OPERATORS), min_size=1, max_size=4),
    shape=st.sampled_from([(12,), (3, 4), (2, 1, 6), (1, 5)]),
    n_chunks=st.integers(2, 7),
)
def test_random_steps(
    operators: list[Callable[[Tensor], Tensor]], shape: tuple[int, ...], n_chunks: int
) -> None:
    torch.manual_seed(0)
    # Small, because some operators multiply what they are given by itself.
    x = 0.2 * torch.randn(*shape, 4, dtype=torch.float64)
    up = torch.randn(64, 4, dtype=torch.float64)

    def step(x: Tensor, up: Tensor) -> Tensor:
        h = F.linear(x, up)
        for operator in operators:
            h = operator(h)
        return h.square().mean()

    gm = joint_of(step, x, up)
    regions = regions_in(gm, math.prod(shape) * 64 * 2)
    if regions:
        assert_same(gm, in_chunks(gm, regions, n_chunks), (x, up), 1e-9)
