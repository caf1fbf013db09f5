"""Steps of several graphs: the forms that a model can have, and what training them shows.

The same blocks, compiled as one graph, with graph breaks, one by one, as modules apart, or called
several times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dtrcompile
from dtrcompile.demo.memory import static_bytes, trace_step

WIDTH, BATCH, BLOCKS, STEPS = 96, 1024, 8, 4
QUICK_WIDTH, QUICK_BATCH = 32, 256
SEED = 3

Compile = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]


class Block(nn.Module):
    """A layer of a transformer without its attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


def loss_of(x: Tensor) -> Tensor:
    return x.square().mean()


def trunk(width: int, blocks: int) -> nn.Sequential:
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


@dataclass
class Form:
    """A model in parts: what is trained, its inputs, and its step's forward.

    Attributes:
        beside_bytes: what else is there before a step.
    """

    module: nn.Module
    inputs: Sequence[Tensor]
    forward: Callable[[], Tensor]
    beside_bytes: int = 0


def whole(compile_: Compile, width: int, batch: int) -> Form:
    """One graph."""
    module, x = trunk(width, BLOCKS), torch.randn(batch, width)
    compiled = compile_(lambda x: loss_of(module(x)))
    return Form(module, [x], lambda: compiled(x))


def breaks(compile_: Compile, width: int, batch: int) -> Form:
    """Three graph breaks.  (In a loop they would make Dynamo leave the whole frame to Python.)"""
    parts = nn.ModuleList(trunk(width, BLOCKS // 4) for _ in range(4))
    x = torch.randn(batch, width)

    def forward(x: Tensor) -> Tensor:
        x = parts[0](x)
        torch._dynamo.graph_break()
        x = parts[1](x)
        torch._dynamo.graph_break()
        x = parts[2](x)
        torch._dynamo.graph_break()
        return loss_of(parts[3](x))

    compiled = compile_(forward)
    return Form(parts, [x], lambda: compiled(x))


def head(compile_: Compile, width: int, batch: int) -> Form:
    """One graph break, before the last block."""
    parts = nn.ModuleList([trunk(width, BLOCKS - 1), Block(width)])
    x = torch.randn(batch, width)

    def forward(x: Tensor) -> Tensor:
        x = parts[0](x)
        torch._dynamo.graph_break()
        return loss_of(parts[1](x))

    compiled = compile_(forward)
    return Form(parts, [x], lambda: compiled(x))


def one_by_one(compile_: Compile, width: int, batch: int) -> Form:
    """Each block compiled by itself."""
    module, x = trunk(width, BLOCKS), torch.randn(batch, width)
    blocks, loss = [compile_(block) for block in module], compile_(loss_of)

    def forward() -> Tensor:
        y = x
        for block in blocks:
            y = block(y)
        return loss(y)

    return Form(module, [x], forward)


def apart(compile_: Compile, width: int, batch: int) -> Form:
    """An encoder and a decoder, compiled apart."""
    parts = nn.ModuleList(trunk(width, BLOCKS // 2) for _ in range(2))
    x = torch.randn(batch, width)
    encoder, decoder = compile_(parts[0]), compile_(lambda y: loss_of(parts[1](y)))
    return Form(parts, [x], lambda: decoder(encoder(x)))


def thrice(compile_: Compile, width: int, batch: int) -> Form:
    """A trunk that runs on three inputs."""
    module = trunk(width, BLOCKS // 2)
    inputs = [torch.randn(batch, width) for _ in range(3)]
    compiled = compile_(lambda x: loss_of(module(x)))
    return Form(module, inputs, lambda: torch.stack([compiled(x) for x in inputs]).sum())


def cell(compile_: Compile, width: int, batch: int) -> Form:
    """A recurrent cell, compiled by itself, for sixteen steps."""
    module = nn.GRUCell(width, width)
    inputs, state = torch.randn(16, batch, width), torch.zeros(batch, width)
    compiled, loss = compile_(module), compile_(loss_of)

    def forward() -> Tensor:
        h = state
        for x in inputs:
            h = compiled(x, h)
        return loss(h)

    return Form(module, [inputs, state], forward)


def scores(compile_: Compile, width: int, batch: int) -> Form:
    """A graph break between scores and loss, as in a language model."""
    module = nn.Sequential(trunk(width, BLOCKS // 2), nn.Linear(width, 16 * width))
    x, labels = torch.randn(batch, width), torch.randint(0, 16 * width, (batch,))

    def forward(x: Tensor, labels: Tensor) -> Tensor:
        found = module(x)
        torch._dynamo.graph_break()
        return F.cross_entropy(found, labels)

    compiled = compile_(forward)
    return Form(module, [x, labels], lambda: compiled(x, labels))


def twice(compile_: Compile, width: int, batch: int) -> Form:
    """Two forwards before one backward, whose loss is outside of the graph."""
    module = trunk(width, BLOCKS // 2)
    inputs = [torch.randn(batch, width) for _ in range(2)]
    compiled = compile_(module)
    return Form(module, inputs, lambda: torch.stack([loss_of(compiled(x)) for x in inputs]).sum())


def outside(compile_: Compile, width: int, batch: int) -> Form:
    """The scores are returned, and the loss is computed outside of the graph."""
    module = nn.Sequential(trunk(width, BLOCKS // 2), nn.Linear(width, 2 * width))
    x, labels = torch.randn(batch, width), torch.randint(0, 2 * width, (batch,))
    compiled = compile_(module)
    # The labels are no input of a graph, so no budget counts them.
    return Form(module, [x], lambda: F.cross_entropy(compiled(x), labels))


def buckets(compile_: Compile, width: int, batch: int) -> Form:
    """`DistributedDataParallel` over one process: a graph for each bucket of gradients."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    module, x = trunk(width, BLOCKS), torch.randn(batch, width)
    parallel = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1)
    for _ in range(2):
        # It makes its buckets anew in the second step; a profile sees that, and not that the old
        # ones are freed.
        loss_of(parallel(x)).backward()  # type: ignore[no-untyped-call]
    module.zero_grad(set_to_none=True)
    compiled = compile_(lambda x: loss_of(parallel(x)))
    bucket_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    return Form(module, [x], lambda: compiled(x), bucket_bytes)


def gpt2(compile_: Compile, width: int, batch: int) -> Form:
    """The GPT-2 of transformers as it is: it logs a warning before its loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    small = batch == QUICK_BATCH
    length, vocabulary = (64, 500) if small else (256, 8000)
    config = GPT2Config(
        n_layer=2 if small else 4,
        n_embd=width if small else 256,
        n_head=4,
        vocab_size=vocabulary,
        n_positions=length,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    module, tokens = GPT2LMHeadModel(config).train(), torch.randint(vocabulary, (8, length))
    compiled: Any = compile_(module)
    return Form(module, [tokens], lambda: compiled(input_ids=tokens, labels=tokens).loss)


FORMS: dict[str, Callable[[Compile, int, int], Form]] = {
    "whole": whole,
    "breaks": breaks,
    "head": head,
    "one by one": one_by_one,
    "apart": apart,
    "thrice": thrice,
    "cell": cell,
    "scores": scores,
    "twice": twice,
    "outside": outside,
    "buckets": buckets,
    "gpt2": gpt2,
}


@dataclass(frozen=True)
class Seen:
    """What training showed.

    Attributes:
        peaks: bytes held in the first steps, compilation included.
        promised_bytes: for the last of them; 0 without a budget.
        gradients: the last.
    """

    peaks: list[int]
    promised_bytes: int
    gradients: dict[str, Any]


def train(name: str, compile_: Compile, *, quick: bool) -> Seen:
    """The first steps of a form, and one more that is watched."""
    torch._dynamo.reset()
    dtrcompile.clear_reports()
    torch.manual_seed(SEED)
    width, batch = (QUICK_WIDTH, QUICK_BATCH) if quick else (WIDTH, BATCH)
    form = FORMS[name](compile_, width, batch)
    before_bytes = static_bytes(form.module, *form.inputs) + form.beside_bytes
    peaks = []

    def step() -> None:
        form.forward().backward()  # type: ignore[no-untyped-call]

    for _ in range(STEPS):
        form.module.zero_grad(set_to_none=True)
        peaks.append(trace_step(step, before_bytes, torch.device("cpu")).peak_bytes)
    gradients = {n: p.grad for n, p in form.module.named_parameters()}
    form.module.zero_grad(set_to_none=True)
    with dtrcompile.watch() as seen:
        step()
    return Seen(peaks, seen.promised_bytes or 0, gradients)
