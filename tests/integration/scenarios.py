"""Small training scripts, one for each feature that a user's model may have.

Each is registered under its name and is given ``compile``; see `training.Scenario`.  Most put the
feature between layers whose activations are worth evicting, so that the feature's own tensors are
evicted and computed again at a small budget.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from workloads.training import RELEASE, Compile, Observed, Scenario, state_of

WIDTH = 16
BATCH = 64


class Against(enum.Enum):
    """How a scenario's observations compare with plain eager PyTorch."""

    CLOSE = "close"
    LOOSE = "loose"  # low precision
    RANDOM = "random"  # other random numbers than eager's: compared with themselves only


@dataclass(frozen=True)
class Registered:
    """A scenario, how to compare it, and whether the smallest budget must recompute something."""

    name: str
    run: Scenario
    against: Against
    recomputes: bool


SCENARIOS: dict[str, Registered] = {}


def scenario(
    against: Against = Against.CLOSE, *, recomputes: bool = False
) -> Callable[[Scenario], Scenario]:
    def register(function: Scenario) -> Scenario:
        name = function.__name__
        assert name not in SCENARIOS
        SCENARIOS[name] = Registered(name, function, against, recomputes)
        return function

    return register


def layers(count: int = 3, width: int = WIDTH) -> nn.Sequential:
    """Linear and GELU, ``count`` times: the activations dominate the parameters."""
    return nn.Sequential(*(m for _ in range(count) for m in (nn.Linear(width, width), nn.GELU())))


class Between(nn.Module):
    """``function`` between evictable layers; it maps (BATCH, WIDTH) to (BATCH, WIDTH)."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.before, self.after = layers(), layers()
        self.function = function  # registered when it is a module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.function(self.before(x)))


def batch(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*(shape or (BATCH, WIDTH)), dtype=dtype, requires_grad=grad)


def train(module: nn.Module, compile_: Compile, *inputs: Any, steps: int = 1) -> Observed:
    """``steps`` steps of SGD; observes outputs, inputs' gradients, gradients, buffers, weights."""
    compiled = compile_(module)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.01)
    outputs = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        out = compiled(*inputs)
        outputs.append(out.detach().clone())
        (out.square().mean() + out.sum() * 0.01).backward()
        optimizer.step()
    return {
        "outputs": outputs,
        **state_of(module),
        "parameters": dict(module.named_parameters()),
        "input_gradients": [i.grad for i in inputs if isinstance(i, torch.Tensor)],
    }


# ------------------------------------------------------------------ plain layers and training


@scenario(recomputes=True)
def mlp(compile_: Compile) -> Observed:
    return train(layers(6), compile_, batch(grad=True))


@scenario(recomputes=True)
def mlp_trained_for_several_steps(compile_: Compile) -> Observed:
    return train(layers(6), compile_, batch(), steps=5)


@scenario()
def no_bias_no_activation(compile_: Compile) -> Observed:
    """Nothing but matrix products: every activation is an input of the next gradient."""
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    return train(module, compile_, batch(grad=True))


@scenario()
def single_operator(compile_: Compile) -> Observed:
    x = batch(grad=True)
    out = compile_(torch.sin)(x)
    out.sum().backward()
    return {"out": out, "gradient": x.grad}


@scenario()
def nothing_but_a_view(compile_: Compile) -> Observed:
    x = batch(grad=True)
    out = compile_(lambda x: x.view(-1))(x)
    out.sum().backward()
    return {"out": out, "gradient": x.grad}


@scenario(recomputes=True)
def normalizations(compile_: Compile) -> Observed:
    module = nn.Sequential(
        *layers(2),
        nn.LayerNorm(WIDTH),
        *layers(2),
        nn.RMSNorm(WIDTH),
        *layers(2),
        nn.GroupNorm(4, WIDTH),
        *layers(1),
    )
    return train(module, compile_, batch(grad=True))


def conv_net(normalization: bool = True) -> nn.Sequential:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        norm = [nn.BatchNorm2d(outputs)] if normalization else []
        return [nn.Conv2d(inputs, outputs, 3, padding=1), *norm, nn.ReLU()]

    return nn.Sequential(*block(3, 8), *block(8, 8), *block(8, 8), nn.Conv2d(8, 4, 1))


@scenario(recomputes=True)
def convolutions(compile_: Compile) -> Observed:
    return train(conv_net(normalization=False), compile_, batch(4, 3, 8, 8, grad=True))


@scenario(recomputes=True)
def batch_norm_running_statistics(compile_: Compile) -> Observed:
    """Recomputing a batch norm must not update its statistics a second time."""
    return train(conv_net(), compile_, batch(4, 3, 8, 8, grad=True), steps=3)


@scenario()
def batch_norm_train_eval_switch(compile_: Compile) -> Observed:
    module = conv_net()
    x = batch(4, 3, 8, 8)
    first = train(module, compile_, x)
    module.eval()
    evaluated = compile_(module)(x)
    evaluated.sum().backward()
    second = state_of(module)
    module.train()
    third = train(module, compile_, x)
    return {"first": first, "evaluated": evaluated, "second": second, "third": third}


@scenario()
def batch_norm_momentum_none(compile_: Compile) -> Observed:
    """A cumulative average reads ``num_batches_tracked`` in Python, which breaks the graph."""

    class Cumulative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = layers(2), layers(2)
            self.norm = nn.BatchNorm1d(WIDTH, momentum=None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(self.norm(self.before(x)))

    return train(Cumulative(), compile_, batch(), steps=3)


@scenario(recomputes=True)
def unrolled_lstm(compile_: Compile) -> Observed:
    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = c = torch.zeros(x.shape[1], WIDTH)
            outputs = []
            for step in x:
                h, c = self.cell(step, (h, c))
                outputs.append(h)
            return torch.stack(outputs)

    return train(Unrolled(), compile_, batch(6, BATCH, WIDTH, grad=True))


class UNet(nn.Module):
    """Long skip connections: the first activations are needed last."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(depth))
        self.up = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        skips = []
        for down in self.down:
            x = F.relu(down(x))
            skips.append(x)
            x = F.max_pool2d(x, 2)
        for up, skip in zip(self.up, reversed(skips), strict=True):
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = F.relu(up(torch.cat([x, skip], dim=1)))
        return x


@scenario(recomputes=True)
def unet(compile_: Compile) -> Observed:
    return train(UNet(), compile_, batch(2, 3, 16, 16, grad=True))


# ------------------------------------------------------------------ views, in place, aliases


@scenario(recomputes=True)
def views_and_slices(compile_: Compile) -> Observed:
    def function(x: torch.Tensor) -> torch.Tensor:
        a = x.view(BATCH // 2, 2, WIDTH).transpose(0, 1)[0]
        b = x.narrow(0, 0, BATCH // 2)[:, ::2].repeat_interleave(2, dim=1)
        c = x.t().select(0, 3)[: BATCH // 2].unsqueeze(1).expand(-1, WIDTH)
        d = x.unfold(0, 2, 2)[..., 1]
        half = a.sin() * b.cos() + c.tanh() * d
        return torch.cat([half, half.flip(0)]).reshape(BATCH, WIDTH).permute(1, 0).t()

    return train(Between(function), compile_, batch(grad=True))


@scenario()
def view_chain_without_copies(compile_: Compile) -> Observed:
    """Views of views of one storage, read long after the base was last named."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        row, column, grid = y[1], y[:, 1], y.view(4, -1, WIDTH)
        z = x.sin().cos().tanh()
        return z + row + column.unsqueeze(1) + grid.transpose(0, 1).reshape(BATCH, WIDTH)

    return train(Between(function), compile_, batch(grad=True))


@scenario(recomputes=True)
def in_place_updates(compile_: Compile) -> Observed:
    def function(x: torch.Tensor) -> torch.Tensor:
        h = x * 1.5
        h.add_(1).mul_(0.5)
        h[:, 0] = 0
        h[1:3].clamp_(min=-0.5)
        h.masked_fill_(x > 2, 0.25)
        h[:, 4:8].copy_(h[:, 8:12].clone())
        h.t()[2].add_(x[:, 2])
        return h.sigmoid_()

    return train(Between(function), compile_, batch(grad=True))


@scenario()
def in_place_activation(compile_: Compile) -> Observed:
    module = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.SiLU(True)
    )
    return train(module, compile_, batch(grad=True))


@scenario()
def input_mutation(compile_: Compile) -> Observed:
    module = layers()

    def function(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
        out = module(x * 1)
        x.add_(1).mul_(2)
        counter += 1
        return out * (x * 1)

    compiled = compile_(function)
    x, counter = batch(), torch.zeros(3, dtype=torch.int64)
    outputs = []
    for _ in range(3):
        out = compiled(x, counter)
        out.sum().backward()
        outputs.append(out)
    return {"outputs": outputs, "x": x, "counter": counter, **state_of(module)}


@scenario()
def input_mutation_that_gradients_need(compile_: Compile) -> Observed:
    """What was computed from the old value must not be computed again from the new one.

    Matrix products, because the stock partitioner computes cheaper things again in backward, and
    then AOTAutograd's own version check raises.
    """
    mix = batch(WIDTH, WIDTH)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = ((x @ mix) * w).sin()
        z = (y @ mix).cos() * w
        x.mul_(3)
        return (z * w).tanh()

    x, w = batch(), batch(grad=True)
    out = compile_(function)(x, w)
    out.sum().backward()
    return {"out": out, "x": x, "gradient": w.grad}


@scenario()
def mutation_of_a_non_leaf_input(compile_: Compile) -> Observed:
    """Autograd sees through an in-place update of an input that requires a gradient."""
    mix = batch(WIDTH, WIDTH)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = (x @ mix).sin().exp()
        x.mul_(2)
        return y.cos() * 2

    leaf = batch(grad=True)
    x = leaf + 0
    out = compile_(function)(x)
    (out.sum() + x.square().sum()).backward()
    return {"out": out, "x": x, "gradient": leaf.grad}


@scenario()
def mutation_of_a_slice_of_an_input(compile_: Compile) -> Observed:
    def function(cache: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        cache[2:5] = new.detach().sin()
        return (cache.exp() * new.sum()).sum(1)

    cache, new = batch(8, 4), batch(3, 4, grad=True)
    out = compile_(function)(cache, new)
    out.sum().backward()
    return {"out": out, "cache": cache, "gradient": new.grad}


@scenario()
def outputs_that_alias_inputs(compile_: Compile) -> Observed:
    module = layers()

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x, x.view(-1), x.t(), module(x), x[2:4]

    x = batch(grad=True)
    same, flat, transposed, out, rows = compile_(function)(x)
    (out.sum() + flat.sin().sum() + (transposed * 2).sum() + rows.exp().sum()).backward()
    return {
        "outputs": [same, flat, transposed, out, rows],
        "aliases": [
            t.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            for t in (same, flat, transposed, out, rows)
        ],
        "same": same is x,
        "gradient": x.grad,
        **state_of(module),
    }


@scenario()
def outputs_that_alias_each_other(compile_: Compile) -> Observed:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.sin().exp()
        return y, y.view(-1), y[3], y.t().cos()

    x = batch(grad=True)
    y, flat, row, other = compile_(function)(x)
    alias = [t.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() for t in (flat, row)]
    (flat.square().sum() + row.sum() + other.sum()).backward()
    return {"outputs": [y, flat, row, other], "alias": alias, "gradient": x.grad}


@scenario()
def an_output_is_saved_and_the_caller_overwrites_nothing(compile_: Compile) -> Observed:
    """``exp`` saves its own output: the caller's tensor and the saved one are one storage."""
    x = batch(grad=True)
    out = compile_(lambda x: x.sin().exp())(x)
    kept = out.detach().clone()
    out.sum().backward()
    return {"out": out, "kept": kept, "gradient": x.grad}


@scenario()
def the_same_input_twice(compile_: Compile) -> Observed:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.sin() * b.cos()).exp() + a

    x = batch(grad=True)
    out = compile_(function)(x, x)
    out.sum().backward()
    return {"out": out, "gradient": x.grad}


@scenario()
def inputs_that_alias_each_other(compile_: Compile) -> Observed:
    mix = batch(WIDTH, WIDTH) * 0.1

    def function(a: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = ((a @ mix) * w).exp()
        b.add_(1)
        return y * (b @ mix).sigmoid() * w

    base = batch(BATCH + 1, WIDTH)
    w = batch(grad=True)
    out = compile_(function)(base[:-1], base[1:], w)
    out.sum().backward()
    return {"out": out, "base": base, "gradient": w.grad}


@scenario(recomputes=True)
def non_contiguous_inputs(compile_: Compile) -> Observed:
    module = layers(5)
    leaf = batch(WIDTH, BATCH * 2, grad=True)
    out = compile_(module)(leaf.t()[::2])
    out.square().sum().backward()
    return {"out": out, "gradient": leaf.grad, **state_of(module)}


@scenario()
def channels_last(compile_: Compile) -> Observed:
    module = conv_net().to(memory_format=torch.channels_last)
    x = batch(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    return train(module, compile_, x, steps=2)


@scenario()
def broadcasting(compile_: Compile) -> Observed:
    """Gradients that are sums of expanded views, and an expanded output."""

    def function(x: torch.Tensor, row: torch.Tensor, one: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x * row + one).sin() * one.expand(BATCH, WIDTH).exp()
        return y, row.cos().expand(3, WIDTH)

    x, row, one = batch(grad=True), batch(WIDTH, grad=True), batch(1, 1, grad=True)
    y, expanded = compile_(function)(x, row, one)
    (y.sum() + expanded.square().sum()).backward()
    return {"out": [y, expanded], "gradients": [x.grad, row.grad, one.grad]}


# ------------------------------------------------------------------ parameters and buffers


@scenario()
def tied_weights(compile_: Compile) -> Observed:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(32, WIDTH)
            self.body = layers(4)
            self.head = nn.Linear(WIDTH, 32, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.embedding(ids)))

    return train(Tied(), compile_, torch.randint(32, (4, 16)), steps=2)


@scenario(recomputes=True)
def one_layer_used_many_times(compile_: Compile) -> Observed:
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layers(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(6):
                x = self.layer(x)
            return x

    return train(Repeated(), compile_, batch(grad=True))


@scenario()
def frozen_parameters(compile_: Compile) -> Observed:
    module = layers(6)
    for layer in (module[0], module[6]):
        layer.requires_grad_(False)
    module[2].bias.requires_grad_(False)
    return train(module, compile_, batch(), steps=2)


@scenario()
def only_a_bias_is_trained(compile_: Compile) -> Observed:
    module = layers(5).requires_grad_(False)
    module[0].bias.requires_grad_(True)
    return train(module, compile_, batch())


@scenario()
def unused_parameters(compile_: Compile) -> Observed:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = layers(4), layers(1)
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.unused(x)
            return self.used(x)

    observed = train(Unused(), compile_, batch(grad=True))
    assert observed["gradients"]["scale"] is None
    assert observed["gradients"]["unused.0.weight"] is None
    return observed


@scenario()
def unused_input(compile_: Compile) -> Observed:
    module = layers()

    def function(x: torch.Tensor, unused: torch.Tensor, factor: int) -> torch.Tensor:
        del unused
        return module(x) * factor

    x, unused = batch(grad=True), batch(grad=True)
    out = compile_(function)(x, unused, 3)
    out.sum().backward()
    return {"out": out, "gradients": [x.grad, unused.grad], **state_of(module)}


@scenario()
def buffers(compile_: Compile) -> Observed:
    class MovingAverage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = layers(), layers(2)
            self.register_buffer("average", torch.zeros(WIDTH))
            self.register_buffer("steps", torch.tensor(0))
            self.register_buffer("last", torch.zeros(BATCH, WIDTH), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.body(x)
            self.average.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
            self.steps += 1
            self.last.copy_(h.detach())
            return self.head(h - self.average)

    return train(MovingAverage(), compile_, batch(grad=True), steps=3)


@scenario(Against.RANDOM)
def a_counter_that_gradients_need(compile_: Compile) -> Observed:
    """Not compared with eager: here ``torch.compile`` itself is wrong (torch 2.13).

    Its partitioner computes ``steps + 1`` again in backward, from the buffer that was already
    incremented.  At an ample budget its graphs are ours; smaller budgets must at least agree.
    """

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = layers(4)
            self.register_buffer("steps", torch.tensor(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return self.body(x) / self.steps

    return train(Counted(), compile_, batch(grad=True), steps=3)


@scenario()
def a_replaced_buffer(compile_: Compile) -> Observed:
    """``self.state = ...``: the new buffer leaves the graph as an output."""

    class Replaced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = layers()
            self.register_buffer("state", torch.zeros(BATCH, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.body(x + self.state)
            self.state = (h.detach() * 0.5).tanh()
            return h

    return train(Replaced(), compile_, batch(), steps=3)


@scenario()
def weight_normalization(compile_: Compile) -> Observed:
    module = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), *layers()
    )
    return train(module, compile_, batch(), steps=2)


@scenario()
def parameter_updated_inside(compile_: Compile) -> Observed:
    """A weight is clamped in place under no_grad before it is used."""

    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = layers(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.body[0].weight.clamp_(-0.1, 0.1)
            return self.body(x)

    return train(Clamped(), compile_, batch(), steps=2)


# ------------------------------------------------------------------ operators


@scenario(recomputes=True)
def multi_output_operators(compile_: Compile) -> Observed:
    def function(x: torch.Tensor) -> torch.Tensor:
        a, b, c = x.split([4, 4, 8], dim=1)
        d, e = (c * 2).chunk(2, dim=1)
        values, indices = x.topk(4, dim=1)
        largest, where = x.max(dim=1, keepdim=True)
        variance, mean = torch.var_mean(x, dim=1, keepdim=True)
        ordered, _ = x.sort(dim=0)
        columns = x.unbind(1)
        with torch.set_grad_enabled(RELEASE >= (2, 12)):  # (before, it has no derivative)
            low, high = torch.aminmax(x, dim=0)
        middle, _ = x.median(dim=1, keepdim=True)
        running, _ = x.cummax(dim=0)
        y = torch.cat([a * b, d + values, e * (indices % 2), columns[3].unsqueeze(1) * a], 1)
        y = (y - mean) * (variance + 1).rsqrt() + largest * where.float() * 0.1
        return y + ordered * 0.1 + (high - low) + middle + running * 0.1

    return train(Between(function), compile_, batch(grad=True))


@scenario()
def only_one_output_of_many_is_used(compile_: Compile) -> Observed:
    def function(x: torch.Tensor) -> torch.Tensor:
        _, b, _ = x.exp().split([4, 8, 4], dim=1)
        return torch.cat([b, torch.sort(x.sin(), dim=1)[0][:, :8]], dim=1)

    return train(Between(function), compile_, batch(grad=True))


class Attention(nn.Module):
    def __init__(self, *, dropout: float = 0.0, causal: bool = False, mask: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout, self.causal, self.mask = dropout, causal, mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length, width = x.shape
        q, k, v = (
            t.view(size, length, 2, width // 2).transpose(1, 2)
            for t in self.qkv(x).split(width, dim=2)
        )
        y = self.attend(q, k, v)
        return self.out(y.transpose(1, 2).reshape(size, length, width))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        length = q.shape[2]
        mask = torch.ones(length, length, dtype=torch.bool).tril() if self.mask else None
        return F.scaled_dot_product_attention(
            q, k, v, mask, self.dropout if self.training else 0.0, is_causal=self.causal
        )


class Block(nn.Module):
    def __init__(self, *, dropout: float = 0.0, **attention: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(dropout=dropout, **attention)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


@scenario(recomputes=True)
def attention(compile_: Compile) -> Observed:
    module = nn.Sequential(*(Block() for _ in range(3)))
    return train(module, compile_, batch(2, 16, WIDTH, grad=True))


@scenario(recomputes=True)
def causal_attention(compile_: Compile) -> Observed:
    module = nn.Sequential(*(Block(causal=True) for _ in range(3)))
    return train(module, compile_, batch(2, 16, WIDTH, grad=True))


@scenario(recomputes=True)
def masked_attention(compile_: Compile) -> Observed:
    module = nn.Sequential(*(Block(mask=True) for _ in range(3)))
    return train(module, compile_, batch(2, 16, WIDTH, grad=True))


@scenario(Against.RANDOM, recomputes=True)
def attention_with_dropout(compile_: Compile) -> Observed:
    module = nn.Sequential(*(Block(dropout=0.2, causal=True) for _ in range(3)))
    return train(module, compile_, batch(2, 16, WIDTH, grad=True))


@scenario()
def multihead_attention_module(compile_: Compile) -> Observed:
    module = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
    return train(module, compile_, batch(2, 16, WIDTH, grad=True))


@scenario()
def embeddings(compile_: Compile) -> Observed:
    class Embeddings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(32, WIDTH, padding_idx=0)
            self.positions = nn.Embedding(16, WIDTH)
            self.body = layers(4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(ids.shape[1], device=ids.device)
            return self.body(self.tokens(ids) + self.positions(positions))

    ids = torch.randint(32, (4, 16))
    ids[:, -3:] = 0
    return train(Embeddings(), compile_, ids, steps=2)


@scenario()
def a_bag_of_embeddings(compile_: Compile) -> Observed:
    """By itself: its fake kernel is wrong about bytes, so those of its graph are not compared."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(32, WIDTH, mode="mean")
            self.body = layers(4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.body(self.bag(ids))

    return train(Bag(), compile_, torch.randint(32, (4, 16)), steps=2)


@scenario()
def language_model_loss(compile_: Compile) -> Observed:
    """The loss is computed in the compiled module; ignored targets; logits are large."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(64, WIDTH)
            self.blocks = nn.Sequential(Block(causal=True), Block(causal=True))
            self.head = nn.Linear(WIDTH, 64, bias=False)

        def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.blocks(self.embedding(ids)))
            return F.cross_entropy(logits.view(-1, 64), targets.view(-1), ignore_index=-100)

    ids = torch.randint(64, (2, 16))
    targets = ids.roll(-1, 1).clone()
    targets[:, -4:] = -100
    return train(Model(), compile_, ids, targets, steps=3)


@scenario()
def integers_and_booleans(compile_: Compile) -> Observed:
    module = layers(2)

    def function(x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> tuple[Any, ...]:
        h = module(x)
        keep = (h > 0) & mask | (ids % 2 == 0).unsqueeze(1)
        one_hot = F.one_hot(ids % 4, 4)
        counts = one_hot.cumsum(0)
        chosen = torch.where(keep, h.exp(), h.sin())
        gathered = chosen.gather(1, (ids % WIDTH).unsqueeze(1))
        order = h.argsort(1)
        return chosen * gathered * counts.sum(1, keepdim=True), keep, counts, order, keep.any()

    x, ids, mask = batch(grad=True), torch.randint(100, (BATCH,)), torch.rand(BATCH, WIDTH) > 0.5
    out, *rest = compile_(function)(x, ids, mask)
    out.sum().backward()
    return {"out": out, "rest": rest, "gradient": x.grad, **state_of(module)}


@scenario()
def scatter_and_index(compile_: Compile) -> Observed:
    index = torch.randint(BATCH, (BATCH,))

    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x).scatter_add(0, index.unsqueeze(1).expand_as(x), x.exp())
        z = x.sin().index_put((index,), x.cos(), accumulate=True)
        return y.tanh() + z.tanh() + x[index] + x.index_select(0, index).sigmoid()

    return train(Between(function), compile_, batch(grad=True))


@scenario()
def pooling_and_interpolation(compile_: Compile) -> Observed:
    class Pools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = F.relu(self.conv(x))
            pooled, indices = F.max_pool2d(h, 2, return_indices=True)
            unpooled = F.interpolate(pooled.sin(), scale_factor=2, mode="bilinear")
            return unpooled + h * F.adaptive_avg_pool2d(h, 1) + indices.sum() * 1e-6

    return train(Pools(), compile_, batch(2, 3, 8, 8, grad=True))


@scenario()
def complex_tensors(compile_: Compile) -> Observed:
    """Rotary embeddings as complex products, and a Fourier transform."""

    def function(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.view(BATCH, WIDTH // 2, 2))
        angle = torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2.0))
        rotated = torch.view_as_real(pairs * angle).reshape(BATCH, WIDTH)
        return rotated + torch.fft.irfft(torch.fft.rfft(x.sin(), dim=1) * 0.5, n=WIDTH, dim=1)

    return train(Between(function), compile_, batch(grad=True))


@scenario(Against.LOOSE, recomputes=True)
def bf16_autocast(compile_: Compile) -> Observed:
    module = nn.Sequential(*layers(4), nn.LayerNorm(WIDTH), *layers(2))

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(x).float()

    x = batch(grad=True)
    out = compile_(function)(x)
    out.square().sum().backward()
    return {"out": out, "gradient": x.grad, **state_of(module)}


@scenario(Against.LOOSE)
def autocast_outside_of_the_compiled_module(compile_: Compile) -> Observed:
    module = nn.Sequential(Block(causal=True), Block(causal=True))
    x = batch(2, 16, WIDTH, grad=True)
    compiled = compile_(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = compiled(x)
    out.float().square().sum().backward()
    return {"out": out, "gradient": x.grad, **state_of(module)}


@scenario(Against.LOOSE, recomputes=True)
def bf16_parameters(compile_: Compile) -> Observed:
    return train(layers(5).bfloat16(), compile_, batch(dtype=torch.bfloat16))


@scenario(recomputes=True)
def double_precision(compile_: Compile) -> Observed:
    return train(layers(5).double(), compile_, batch(grad=True, dtype=torch.float64))


@scenario()
def zero_element_tensors(compile_: Compile) -> Observed:
    module = layers(2)

    def function(x: torch.Tensor, empty: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = module(torch.cat([x, empty]))
        nothing = h[:0].exp()
        return h.sin() + nothing.sum(), torch.cat([nothing, h[:0]])

    x, empty = batch(grad=True), batch(0, WIDTH, grad=True)
    out, nothing = compile_(function)(x, empty)
    (out.sum() + nothing.sum()).backward()
    return {"outs": [out, nothing], "gradients": [x.grad, empty.grad], **state_of(module)}


@scenario()
def empty_batch(compile_: Compile) -> Observed:
    return train(layers(3), compile_, batch(0, WIDTH, grad=True))


@scenario()
def creation_inside(compile_: Compile) -> Observed:
    """Constants made in the graph: cheap to make again."""

    def function(x: torch.Tensor) -> torch.Tensor:
        ramp = torch.arange(WIDTH, dtype=x.dtype) * 0.1
        eye = torch.eye(WIDTH)
        mask = torch.ones(BATCH, WIDTH).tril().bool()
        return torch.where(mask, x.exp() @ eye + ramp, x.sin() * torch.full_like(x, 0.5))

    return train(Between(function), compile_, batch(grad=True))


@scenario()
def tensor_constants(compile_: Compile) -> Observed:
    """Tensors that the graph captures by value."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([0.5, 1.0] * (WIDTH // 2)) + torch.tensor(3.0)

    return train(Between(function), compile_, batch(grad=True))


@scenario(recomputes=True)
def tensor_constants_that_only_forward_reads(compile_: Compile) -> Observed:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i, layer in enumerate(self.layers):
                x = torch.tanh(layer(x) + torch.tensor([float(i + j) for j in range(WIDTH)]))
            return x

    return train(Shifted(), compile_, batch(grad=True))


@scenario(recomputes=True)
def flex_attention(compile_: Compile) -> Observed:
    """A higher-order operator with a graph of its own; only on other devices may users train it."""
    from torch.nn.attention import flex_attention as flex

    class FlexAttention(Attention):
        def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return flex.flex_attention(q, k, v, score_mod=lambda s, _b, _h, i, j: s - 0.1 * (i - j))

    blocks = [Block() for _ in range(3)]
    for block in blocks:
        block.attention = FlexAttention()
    with mock.patch.object(flex, "_validate_device", lambda *_: None):
        return train(nn.Sequential(*blocks), compile_, batch(2, 32, WIDTH, grad=True))


class Doubled(nn.Module):
    """A region that calls another, holds a constant, and draws random numbers where asked."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = dropout

    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(self.first(x)) * torch.tensor([0.5, 1.5]).repeat(WIDTH)
        return x + F.dropout(self.second(h), self.dropout, self.training)

    @torch.compiler.nested_compile_region
    def inner(self, h: torch.Tensor) -> torch.Tensor:
        return F.gelu(h) * h.sigmoid()


@scenario(recomputes=True)
def regions_compiled_once(compile_: Compile) -> Observed:
    return train(nn.Sequential(*(Doubled() for _ in range(4))), compile_, batch(grad=True))


@scenario(Against.RANDOM)
def regions_with_dropout(compile_: Compile) -> Observed:
    return train(nn.Sequential(*(Doubled(0.3) for _ in range(4))), compile_, batch(grad=True))


@scenario()
def no_grad_regions(compile_: Compile) -> Observed:
    module = nn.Sequential(*(Doubled() for _ in range(4)))
    with torch.no_grad():
        return {"output": compile_(module)(batch())}


@scenario()
def linear_algebra(compile_: Compile) -> Observed:
    def function(x: torch.Tensor) -> torch.Tensor:
        square = x.t() @ x + 3 * torch.eye(WIDTH)
        factor = torch.linalg.cholesky(square)
        solved = torch.linalg.solve_triangular(factor, x.t(), upper=False)
        return solved.t() + torch.einsum("bi,ij->bj", x, torch.linalg.inv(square))

    return train(Between(function), compile_, batch(grad=True))


# ------------------------------------------------------------------ autograd


@scenario()
def gradient_accumulation(compile_: Compile) -> Observed:
    module = layers(5)
    compiled = compile_(module)
    for _ in range(3):
        compiled(batch()).square().mean().backward()
    return state_of(module)


@scenario()
def several_forwards_before_backward(compile_: Compile) -> Observed:
    module = layers(5)
    compiled = compile_(module)
    inputs = [batch(grad=True) for _ in range(3)]
    outputs = [compiled(x) for x in inputs]
    for index in (1, 0, 2):  # neither first-in-first-out nor last-in-first-out
        (outputs[index] * (index + 1)).square().sum().backward()
    return {"outputs": outputs, "inputs": [x.grad for x in inputs], **state_of(module)}


@scenario()
def output_fed_back_in(compile_: Compile) -> Observed:
    module = layers(3)
    compiled = compile_(module)
    x = batch(grad=True)
    out = compiled(compiled(compiled(x)) + x)
    out.square().sum().backward()
    return {"out": out, "gradient": x.grad, **state_of(module)}


@scenario()
def a_forward_whose_backward_never_comes(compile_: Compile) -> Observed:
    module = layers(4)
    compiled = compile_(module)
    ignored = compiled(batch())
    out = compiled(batch())
    out.sum().backward()
    return {"ignored": ignored, "out": out, **state_of(module)}


@scenario()
def retain_graph(compile_: Compile) -> Observed:
    """Backward twice over what one forward saved: nothing saved may be freed the first time."""
    module = layers(5)
    x = batch(grad=True)
    out = compile_(module)(x)
    loss = out.square().sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in module.parameters()]
    loss.backward(retain_graph=True)
    (out.sin().sum()).backward()
    return {"once": once, "out": out, "gradient": x.grad, **state_of(module)}


@scenario()
def gradients_of_some_outputs_only(compile_: Compile) -> Observed:
    module = layers(2)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = module(x)
        return h.sin(), h.exp().sum(0)

    x = batch(grad=True)
    compiled = compile_(function)
    first, _ = compiled(x)
    first.sum().backward()
    kept = x.grad.clone()
    _, second = compiled(x)
    second.sum().backward()
    return {"first": first, "second": second, "kept": kept, "gradient": x.grad, **state_of(module)}


@scenario()
def autograd_grad_of_inputs(compile_: Compile) -> Observed:
    module = layers(4)
    x = batch(grad=True)
    out = compile_(module)(x)
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    return {"out": out, "gradient": gradient, **state_of(module)}


@scenario()
def detached_branches(compile_: Compile) -> Observed:
    def function(x: torch.Tensor) -> torch.Tensor:
        frozen = x.exp().detach()
        with torch.no_grad():
            scale = x.square().mean(1, keepdim=True).rsqrt()
        return x.sin() * frozen * scale

    return train(Between(function), compile_, batch(grad=True))


@scenario()
def custom_autograd_function(compile_: Compile) -> Observed:
    class Clipped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            out = x.exp()
            ctx.save_for_backward(x, out)
            return out

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            x, out = ctx.saved_tensors
            return (gradient * out * x.cos()).clamp(-0.5, 0.5)

    return train(Between(lambda x: Clipped.apply(x)), compile_, batch(grad=True))


@scenario(recomputes=True)
def checkpoint_inside(compile_: Compile) -> Observed:
    """What the user checkpoints is recomputed as the user said; the rest is DTR's."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(layers(2) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.blocks[0], x, use_reentrant=False)
            x = self.blocks[1](x)
            return checkpoint(self.blocks[2], x, use_reentrant=False)

    return train(Checkpointed(), compile_, batch(grad=True))


@scenario(Against.RANDOM)
def checkpoint_with_dropout_inside(compile_: Compile) -> Observed:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(*layers(2), nn.Dropout(0.3), *layers(2))
            self.rest = nn.Sequential(*layers(2), nn.Dropout(0.3), *layers(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rest(checkpoint(self.block, x, use_reentrant=False))

    return train(Checkpointed(), compile_, batch(grad=True))


@scenario()
def checkpointed_attention(compile_: Compile) -> Observed:
    """Attention's kernel counts as random even without dropout: its state is saved."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(causal=True), Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.first, x, use_reentrant=False)
            return checkpoint(self.second, x, use_reentrant=False)

    return train(Checkpointed(), compile_, batch(2, 16, WIDTH, grad=True))


@scenario()
def tensor_hooks(compile_: Compile) -> Observed:
    module = layers(4)
    seen: list[torch.Tensor] = []
    module[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    module[2].weight.register_hook(lambda gradient: gradient * 2)
    out = compile_(module)(batch())
    out.sum().backward()
    return {"seen": seen, **state_of(module)}


@scenario()
def functional_gradient_inside(compile_: Compile) -> Observed:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        inner = torch.func.grad(lambda t: (t.sin() * w).exp().sum())(x)
        return (inner * w).cos()

    x, w = batch(), batch(grad=True)
    out = compile_(function)(x, w)
    out.sum().backward()
    return {"out": out, "gradient": w.grad}


# ------------------------------------------------------------------ structure of the call


@scenario()
def output_returned_twice(compile_: Compile) -> Observed:
    module = layers(3)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = module(x)
        return h, h, h.sin(), h

    x = batch(grad=True)
    a, b, c, d = compile_(function)(x)
    (a.sum() + (b * 2).sum() + c.sum() + (d * 3).sum()).backward()
    return {"outputs": [a, b, c, d], "gradient": x.grad, **state_of(module)}


@scenario()
def returned_intermediates(compile_: Compile) -> Observed:
    """Every hidden state leaves the graph: none may be evicted, some are saved as well."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(layers(1) for _ in range(4))

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            hidden = []
            for block in self.blocks:
                x = block(x)
                hidden.append(x)
            return hidden

    module = Hidden()
    x = batch(grad=True)
    hidden = compile_(module)(x)
    sum((h.square().sum() for h in hidden[1:]), hidden[0].sum()).backward()
    return {"hidden": hidden, "gradient": x.grad, **state_of(module)}


@scenario()
def dicts_none_and_nesting(compile_: Compile) -> Observed:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = layers()

        def forward(self, inputs: dict[str, Any], *, scale: float = 1.0) -> dict[str, Any]:
            h = self.body(inputs["x"]) * scale
            return {
                "logits": h.exp(),
                "nothing": None,
                "flag": True,
                "nested": [h.sum(), {"mean": h.mean(0)}, (h > 0,)],
                "extra": inputs["extra"],
            }

    module = Nested()
    x = batch(grad=True)
    out = compile_(module)({"x": x, "extra": None}, scale=0.5)
    (out["logits"].sum() + out["nested"][0] + out["nested"][1]["mean"].sum()).backward()
    return {"out": out, "gradient": x.grad, **state_of(module)}


@scenario()
def scalar_outputs(compile_: Compile) -> Observed:
    module = layers(4)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = module(x)
        return h.square().mean(), (h > 0).sum()

    loss, count = compile_(function)(batch())
    loss.backward()
    return {"loss": loss, "count": count, **state_of(module)}


@scenario()
def graph_break(compile_: Compile) -> Observed:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = layers(), layers()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            torch._dynamo.graph_break()
            self.calls += 1
            return self.second(h) + h

    return train(Broken(), compile_, batch(grad=True), steps=2)


@scenario()
def data_dependent_branch(compile_: Compile) -> Observed:
    module = layers(3)

    def function(x: torch.Tensor) -> torch.Tensor:
        h = module(x)
        return (h * 2).sin() if h.detach().sum() > 0 else (h * 3).cos()

    x = batch(grad=True)
    compiled = compile_(function)
    outputs = [compiled(x), compiled(-x)]
    sum(o.sum() for o in outputs).backward()
    return {"outputs": outputs, "gradient": x.grad, **state_of(module)}


@scenario()
def sizes_that_values_decide(compile_: Compile) -> Observed:
    """Dynamo ends the graph at each; the next one's sizes are symbols."""
    first, second = layers(2), layers(2)

    def function(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        h = first(x)
        h = second(h[h.detach()[:, 0] > 0])
        parts = [second(part).square().sum() for part in h[:4].split(lengths.tolist())]
        return h.sum() + sum(parts)

    compiled = compile_(function)
    outputs = []
    for _ in range(3):
        out = compiled(batch(), torch.tensor([1, 3]))
        out.backward()
        outputs.append(out)
    return {"outputs": outputs, "first": state_of(first), "second": state_of(second)}


@scenario()
def two_models(compile_: Compile) -> Observed:
    first, second = layers(4), nn.Sequential(*layers(2), nn.LayerNorm(WIDTH))
    compiled_first, compiled_second = compile_(first), compile_(second)
    x = batch(grad=True)
    for _ in range(2):
        fake = compiled_first(x)
        compiled_second(fake.detach()).sum().backward()
        compiled_second(fake).square().sum().backward()
    return {"first": state_of(first), "second": state_of(second), "gradient": x.grad}


def train_on_shapes(
    module: nn.Module, compile_: Compile, shapes: list[tuple[int, ...]]
) -> Observed:
    """A step for each shape of the batch; gradients add up."""
    compiled = compile_(module)
    outputs = []
    for shape in shapes:
        out = compiled(batch(*shape))
        out.square().sum().backward()
        outputs.append(out)
    return {"outputs": outputs, **state_of(module)}


@scenario()
def changing_batch_size(compile_: Compile) -> Observed:
    """The second size makes Dynamo compile again with a symbolic batch; the third reuses that."""
    return train_on_shapes(layers(4), compile_, [(size, WIDTH) for size in (8, 12, 20, 5)])


@scenario()
def changing_sequence_length(compile_: Compile) -> Observed:
    module = nn.Sequential(Block(causal=True), Block(causal=True))
    return train_on_shapes(module, compile_, [(2, length, WIDTH) for length in (8, 12, 16)])


class Shortened(nn.Module):
    """Lengths that are not the input's: of a view of a convolution, and of a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3)
        self.layers = layers(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        size, length, _ = x.shape
        x = self.layers(x.reshape(size * length, WIDTH)).view(size, length, WIDTH)
        x = torch.cat([x, x[:, : length // 2].sin()], 1)
        return self.layers(x * x.shape[1] ** -0.5)


@scenario(recomputes=True)
def changing_length_of_what_is_computed(compile_: Compile) -> Observed:
    return train_on_shapes(Shortened(), compile_, [(4, length, WIDTH) for length in (12, 16, 20)])


@scenario(Against.RANDOM)
def changing_batch_size_with_dropout(compile_: Compile) -> Observed:
    module = nn.Sequential(*layers(2), nn.Dropout(0.4), *layers(2), nn.Dropout(0.4))
    return train_on_shapes(module, compile_, [(size, WIDTH) for size in (8, 12, 20)])


@scenario()
def no_grad_inference(compile_: Compile) -> Observed:
    module = nn.Sequential(Block(causal=True), Block(causal=True)).eval()
    compiled = compile_(module)
    x = batch(2, 16, WIDTH)
    with torch.no_grad():
        first = compiled(x)
    with torch.inference_mode():
        second = compiled(x).clone()
    return {"first": first, "second": second}


@scenario()
def no_grad_unet(compile_: Compile) -> Observed:
    module = UNet().eval()
    with torch.no_grad():
        out = compile_(module)(batch(2, 3, 16, 16))
    return {"out": out}


@scenario()
def no_grad_input_mutation_and_aliases(compile_: Compile) -> Observed:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.sin().exp()
        x.add_(1)
        return y.view(-1), x, y.t()

    x = batch()
    with torch.no_grad():
        flat, same, transposed = compile_(function)(x)
    return {"outs": [flat, same, transposed], "x": x, "same": same is x}


@scenario()
def inference_then_training(compile_: Compile) -> Observed:
    module = conv_net()
    compiled = compile_(module)
    x = batch(4, 3, 8, 8)
    with torch.no_grad():
        before = compiled(x)
    out = compiled(x)
    out.square().sum().backward()
    with torch.no_grad():
        after = compiled(x)
    return {"before": before, "out": out, "after": after, **state_of(module)}


# ------------------------------------------------------------------ random numbers


@scenario(Against.RANDOM, recomputes=True)
def dropout(compile_: Compile) -> Observed:
    module = nn.Sequential(
        *(m for _ in range(5) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.4)))
    )
    return train(module, compile_, batch(grad=True), steps=2)


@scenario(Against.RANDOM)
def dropout_train_eval_switch(compile_: Compile) -> Observed:
    module = nn.Sequential(*layers(2), nn.Dropout(0.5), *layers(2))
    compiled = compile_(module)
    x = batch(grad=True)
    observed: Observed = {}
    for index, training in enumerate((True, False, True)):
        module.train(training)
        out = compiled(x)
        out.square().sum().backward()
        observed[f"out{index}"] = out
    return {**observed, "gradient": x.grad, **state_of(module)}


@scenario(Against.RANDOM)
def random_numbers_of_every_kind(compile_: Compile) -> Observed:
    def function(x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x) * 0.1
        gate = torch.rand(BATCH, WIDTH) > 0.3
        shift = torch.randint(0, 3, (WIDTH,))
        coins = torch.bernoulli(torch.full_like(x, 0.7))
        return torch.where(gate, (x + noise).exp(), x.sin()) * coins + shift

    return train(Between(function), compile_, batch(grad=True))


@scenario(Against.RANDOM)
def dropout_variants(compile_: Compile) -> Observed:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Dropout2d(0.3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.AlphaDropout(0.3),
        nn.RReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
    )
    return train(module, compile_, batch(2, 3, 8, 8, grad=True))


@scenario(Against.RANDOM)
def several_forwards_with_dropout_before_backward(compile_: Compile) -> Observed:
    """Each forward's masks are its own, whatever ran in between."""
    module = nn.Sequential(*layers(2), nn.Dropout(0.5), *layers(2), nn.Dropout(0.5))
    compiled = compile_(module)
    inputs = [batch(grad=True) for _ in range(2)]
    outputs = [compiled(x) for x in inputs]
    torch.rand(5)  # the generator moves on between forward and backward
    for out in outputs:
        out.square().sum().backward()
    after = torch.rand(3)
    return {"outputs": outputs, "after": after, "in": [x.grad for x in inputs], **state_of(module)}


@scenario(Against.RANDOM)
def retain_graph_with_dropout(compile_: Compile) -> Observed:
    module = nn.Sequential(*layers(2), nn.Dropout(0.5), *layers(2), nn.Dropout(0.5))
    x = batch(grad=True)
    loss = compile_(module)(x).square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)
    return {"first": first, "second": second}
