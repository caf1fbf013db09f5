"""Random modules, and what must hold for each: no wrong gradient, no broken promise, no error.

A module is a list of *moves* on the values made so far, so that the first few moves of a failing
one are a smaller module to try (``most_moves``).  Plain eager PyTorch decides which modules mean
anything: one that it refuses, such as an update in place of what backward needs, is left out.
"""

from __future__ import annotations

import collections
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import dtrcompile
from dtrcompile.passes.graphs.executor import executor_log
from dtrcompile.report import compilations
from workloads.training import (
    UNBUDGETED,
    Compile,
    Observed,
    assert_bitwise,
    assert_close,
    compile_dtr,
    live_peak_bytes,
    observe,
    observe_dtr,
    relative_error,
    smallest_that_works,
    state_of,
    static_bytes,
)

Pick = Callable[[int, int], int]
Values = list[Tensor]
Move = Callable[[Values], Tensor]

MOST_MOVES = 14
WIDTH, LENGTH, BATCH, EDGE, HEADS = 8, 6, 4, 8, 2
# Calls of a module at changing sizes, and plans that a graph of it may have at once.
VARIED_CALLS, MOST_PLANS = 6, 4
# Of the gradient's norm: what other kernels, and what only fusion, may round differently.
NEAR, SAME = 1e-4, 1e-5
# Where plain PyTorch's own rounding is larger, because the gradient is zero in theory (before a
# normalization, say), so many times that.
ROUNDING = 4


class RandomModule(nn.Module):
    """Moves over (batch, length, width) or (batch, width, edge, edge).

    Attributes:
        text: the moves, for error messages.
        draws: whether there is dropout in it.
        remembers: whether a value is scaled by a buffer that the forward writes into as well.
    """

    def __init__(self, pick: Pick, most_moves: int) -> None:
        super().__init__()
        self.pick = pick
        self.layers = nn.ModuleList()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("order", torch.arange(WIDTH).flip(0))
        self.register_buffer("remembered", torch.ones(WIDTH))
        self.text: list[str] = []
        self.draws = False
        self.is_rounded = False  # to bfloat16: then float64 says nothing about wrong gradients
        self.moves: list[Move] = []
        self.is_image = bool(pick(0, 1))
        kinds = _SHARED + (_IMAGES if self.is_image else _TOKENS)
        # All numbers are drawn first: the shorter module is the start of the longer one.
        for made in range(pick(3, MOST_MOVES)):
            kind = kinds[pick(0, len(kinds) - 1)]
            source = made - min(pick(0, 5) // 3, made)
            other = pick(0, made)
            move = kind(self, source, other)
            if made < most_moves:
                self.moves.append(move)
                self.text.append(f"{kind.__name__.lstrip('_')}({source}, {other})")
        self.ending = pick(0, 2)
        self.counts = bool(pick(0, 3) == 0)
        for parameter in self.parameters():
            if pick(0, 9) == 0:
                parameter.requires_grad_(False)
        self.remembers = self.writes_first = False

    def add(self, layer: nn.Module) -> nn.Module:
        self.layers.append(layer)
        return layer

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        values = [x]
        for move in self.moves:
            values.append(move(values))
        if self.counts:
            self.calls += 1
        last = self._scaled(values[-1]) if self.remembers else values[-1]
        if self.ending == 0:
            return last.square().mean()
        if self.ending == 1:
            return last.float().sum(-1), values[len(values) // 2] * 1.0
        return last + values[0]

    def _scaled(self, x: Tensor) -> Tensor:
        others = (0, 2, 3) if self.is_image else (0, 1)
        mean = x.detach().mean(others).tanh()
        if self.writes_first:
            self.remembered.lerp_(mean, 0.5)
        scale = self.remembered.exp()
        if not self.writes_first:
            self.remembered.mul_(0.5).add_(mean)
        return x * (scale[:, None, None] if self.is_image else scale)

    def inputs(self) -> Tensor:
        shape = (BATCH, WIDTH, EDGE, EDGE) if self.is_image else (BATCH, LENGTH, WIDTH)
        return torch.randn(shape, requires_grad=self.pick(0, 2) == 0)

    def pick_memory(self) -> None:
        """Decide, after all else, whether a value is scaled by a buffer that is written into.

        Plain `torch.compile` gives wrong gradients for that, so it must not be needed to compare.
        """
        self.remembers = self.pick(0, 3) == 0 and not (self.draws or self.is_rounded)
        self.writes_first = bool(self.pick(0, 1))


Kind = Callable[[RandomModule, int, int], Move]


# --- moves on any shape -------------------------------------------------------------------------


def _activation(m: RandomModule, a: int, _b: int) -> Move:
    function = (F.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, F.elu)[m.pick(0, 5)]
    return lambda v: function(v[a])


def _residual(_m: RandomModule, a: int, b: int) -> Move:
    return lambda v: v[a] + v[b]


def _product(_m: RandomModule, a: int, b: int) -> Move:
    return lambda v: v[a] * v[b].sigmoid()


def _dropout(m: RandomModule, a: int, _b: int) -> Move:
    m.draws = True
    p = m.pick(1, 5) / 10
    return lambda v: F.dropout(v[a], p, m.training)


def _update_in_place(m: RandomModule, a: int, _b: int) -> Move:
    kind = m.pick(0, 3)

    def move(v: Values) -> Tensor:
        x = v[a] * 1.5 if kind < 2 else v[a].clone()
        if kind == 0:
            return x.add_(1.0)
        if kind == 1:
            return F.relu(x, inplace=True)
        if kind == 2:
            x[:, 0].mul_(2.0)
            return x
        return x.mul_(0.5).tanh_()

    return move


def _update_value(_m: RandomModule, a: int, _b: int) -> Move:
    """In place on a value that others may have read: eager refuses where backward needs it."""
    return lambda v: v[a].add_(0.25) if a else v[a] + 0.25


def _view_and_back(m: RandomModule, a: int, _b: int) -> Move:
    kind = m.pick(0, 3)

    def move(v: Values) -> Tensor:
        x = v[a]
        if kind == 0:
            return x.flatten(1).view(x.shape[0], -1).unflatten(1, x.shape[1:]) * 1.25
        if kind == 1:
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        if kind == 2:
            return x.reshape(-1)[None].reshape(x.shape)
        return x.movedim(1, -1).movedim(-1, 1).clone()

    return move


def _slices(_m: RandomModule, a: int, b: int) -> Move:
    def move(v: Values) -> Tensor:
        first, second = v[a].chunk(2, -1)
        return torch.cat([second.tanh(), first * v[b][..., : first.shape[-1]]], -1)

    return move


def _stack(_m: RandomModule, a: int, b: int) -> Move:
    return lambda v: torch.stack([v[a], v[b], v[a] * v[b]]).mean(0)


def _where(_m: RandomModule, a: int, b: int) -> Move:
    return lambda v: torch.where(v[a] > 0, v[a], v[b].exp().clamp(max=2.0))


def _normalize(_m: RandomModule, a: int, _b: int) -> Move:
    def move(v: Values) -> Tensor:
        variance, mean = torch.var_mean(v[a], 1, keepdim=True)
        return (v[a] - mean) * torch.rsqrt(variance + 1)

    return move


def _softmax(m: RandomModule, a: int, _b: int) -> Move:
    function = (F.softmax, F.log_softmax)[m.pick(0, 1)]
    return lambda v: function(v[a], -1)


def _scan(m: RandomModule, a: int, _b: int) -> Move:
    kind = m.pick(0, 2)

    def move(v: Values) -> Tensor:
        x = v[a]
        if kind == 0:
            return x.cumsum(-1) * 0.25
        if kind == 1:
            return x.sort(-1).values
        return x + x.max(-1, keepdim=True).values + x.amin(1, keepdim=True)

    return move


def _detached(_m: RandomModule, a: int, b: int) -> Move:
    return lambda v: v[a] + v[b].detach().abs()


def _scale(m: RandomModule, a: int, _b: int) -> Move:
    m.layers.append(nn.ParameterList([torch.randn(())]))
    layer = m.layers[-1]
    return lambda v: v[a] * layer[0]


# --- tokens -------------------------------------------------------------------------------------


def _linear(m: RandomModule, a: int, _b: int) -> Move:
    layer = m.add(nn.Linear(WIDTH, WIDTH, bias=bool(m.pick(0, 1))))
    return lambda v: layer(v[a])


def _same_linear(m: RandomModule, a: int, _b: int) -> Move:
    """Weights that another layer has too, transposed now and then."""
    linears = [layer for layer in m.layers if isinstance(layer, nn.Linear)]
    is_transposed = bool(m.pick(0, 1))
    layer = linears[m.pick(0, len(linears) - 1)] if linears else m.add(nn.Linear(WIDTH, WIDTH))
    return lambda v: F.linear(v[a], layer.weight.t() if is_transposed else layer.weight)


def _wide(m: RandomModule, a: int, _b: int) -> Move:
    up, down = m.add(nn.Linear(WIDTH, 3 * WIDTH)), m.add(nn.Linear(3 * WIDTH, WIDTH))
    return lambda v: down(F.gelu(up(v[a])))


def _layer_norm(m: RandomModule, a: int, _b: int) -> Move:
    layer = m.add(nn.LayerNorm(WIDTH, elementwise_affine=bool(m.pick(0, 1))))
    return lambda v: layer(v[a])


def _batch_norm(m: RandomModule, a: int, _b: int) -> Move:
    layer = m.add(nn.BatchNorm1d(LENGTH))
    return lambda v: layer(v[a])


def _attention(m: RandomModule, a: int, b: int) -> Move:
    layer = m.add(nn.Linear(WIDTH, 3 * WIDTH))
    dropout = 0.25 * m.pick(0, 1)
    m.draws |= dropout > 0
    is_causal = bool(m.pick(0, 1))

    def move(v: Values) -> Tensor:
        q, k, _ = layer(v[a]).chunk(3, -1)
        q, k, w = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v[b]))
        p = dropout if m.training else 0.0
        found = F.scaled_dot_product_attention(q, k, w, dropout_p=p, is_causal=is_causal)
        return found.transpose(1, 2).flatten(2)

    return move


def _embedding(m: RandomModule, a: int, _b: int) -> Move:
    layer = m.add(nn.Embedding(4 * WIDTH, WIDTH))

    def move(v: Values) -> Tensor:
        # Sums that are 0 or 1 in theory must not fall on both sides of a whole number.
        tokens = (v[a].detach().sum(-1).abs() * 7 + 0.37).long() % (4 * WIDTH)
        return layer(tokens) + v[a]

    return move


def _permuted(m: RandomModule, a: int, _b: int) -> Move:
    return lambda v: v[a].index_select(-1, m.order) + v[a].gather(-1, m.order.expand_as(v[a]))


def _checkpointed(m: RandomModule, a: int, _b: int) -> Move:
    up, down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
    layer = m.add(nn.Sequential(up, nn.SiLU(), down))
    return lambda v: checkpoint(layer, v[a], use_reentrant=False)


def _recurrent(m: RandomModule, a: int, _b: int) -> Move:
    cell = m.add(nn.GRUCell(WIDTH, WIDTH))

    def move(v: Values) -> Tensor:
        state = v[a].new_zeros(BATCH, WIDTH)
        states = []
        for x in v[a].unbind(1)[:3]:
            state = cell(x, state)
            states.append(state)
        return torch.stack(states, 1).mean(1, keepdim=True) + v[a]

    return move


def _low_precision(m: RandomModule, a: int, _b: int) -> Move:
    m.is_rounded = True
    layer = m.add(nn.Linear(WIDTH, WIDTH))

    def move(v: Values) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(v[a]).to(v[a].dtype)

    return move


# --- images -------------------------------------------------------------------------------------


def _convolution(m: RandomModule, a: int, _b: int) -> Move:
    groups = (1, 2, WIDTH)[m.pick(0, 2)]
    size = (1, 3)[m.pick(0, 1)]
    layer = m.add(nn.Conv2d(WIDTH, WIDTH, size, padding=size // 2, groups=groups))
    return lambda v: layer(v[a])


def _transposed_convolution(m: RandomModule, a: int, _b: int) -> Move:
    layer = m.add(nn.ConvTranspose2d(WIDTH, WIDTH, 2, 2))
    return lambda v: layer(F.avg_pool2d(v[a], 2))


def _batch_norm_2d(m: RandomModule, a: int, _b: int) -> Move:
    layer = m.add(nn.BatchNorm2d(WIDTH, momentum=(0.1, None)[m.pick(0, 1)]))
    return lambda v: layer(v[a])


def _group_norm(m: RandomModule, a: int, _b: int) -> Move:
    layer = m.add((nn.GroupNorm(2, WIDTH), nn.InstanceNorm2d(WIDTH, affine=True))[m.pick(0, 1)])

    def move(v: Values) -> Tensor:
        # PyTorch's backward crashes where a channels-last input asks for no gradient.
        return layer(v[a] if v[a].requires_grad else v[a].contiguous())

    return move


def _pool(m: RandomModule, a: int, _b: int) -> Move:
    pool = (F.max_pool2d, F.avg_pool2d)[m.pick(0, 1)]
    mode = ("nearest", "bilinear")[m.pick(0, 1)]
    return lambda v: F.interpolate(pool(v[a], 2), scale_factor=2, mode=mode)


def _shuffle(_m: RandomModule, a: int, _b: int) -> Move:
    return lambda v: F.pixel_shuffle(F.pixel_unshuffle(v[a], 2).tanh(), 2)


def _skip(m: RandomModule, a: int, b: int) -> Move:
    layer = m.add(nn.Conv2d(2 * WIDTH, WIDTH, 1))
    return lambda v: layer(torch.cat([v[a], v[b]], 1))


def _squeeze(m: RandomModule, a: int, _b: int) -> Move:
    layer = m.add(nn.Linear(WIDTH, WIDTH))
    return lambda v: v[a] * layer(v[a].mean((2, 3)))[..., None, None].sigmoid()


def _dropout_2d(m: RandomModule, a: int, _b: int) -> Move:
    m.draws = True
    return lambda v: F.dropout2d(v[a], 0.25, m.training)


def _channels_last(_m: RandomModule, a: int, _b: int) -> Move:
    return lambda v: v[a].contiguous(memory_format=torch.channels_last) * 0.75


_SHARED: tuple[Kind, ...] = (
    _activation,
    _activation,
    _residual,
    _product,
    _dropout,
    _update_in_place,
    _update_value,
    _view_and_back,
    _slices,
    _stack,
    _where,
    _normalize,
    _softmax,
    _scan,
    _detached,
    _scale,
)
_TOKENS: tuple[Kind, ...] = (
    _linear,
    _linear,
    _same_linear,
    _wide,
    _layer_norm,
    _batch_norm,
    _attention,
    _embedding,
    _permuted,
    _checkpointed,
    _recurrent,
    _low_precision,
)
_IMAGES: tuple[Kind, ...] = (
    _convolution,
    _convolution,
    _convolution,
    _transposed_convolution,
    _batch_norm_2d,
    _group_norm,
    _pool,
    _shuffle,
    _skip,
    _squeeze,
    _dropout_2d,
    _channels_last,
)


# --- what must hold -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A module to be made again and again, always the same.

    Attributes:
        seed: of all its numbers.
        most_moves: only so many of the module's.
    """

    seed: int
    most_moves: int = MOST_MOVES

    def made(self) -> tuple[RandomModule, Tensor]:
        pick = random.Random(self.seed).randint
        torch.manual_seed(pick(0, 1 << 30))
        module = RandomModule(pick, self.most_moves)
        inputs = module.inputs()
        module.pick_memory()
        return module, inputs

    def steps(self, compile_: Compile, dtype: torch.dtype = torch.float32) -> Observed:
        """Two training steps without zeroing gradients between."""
        module, x = self.made()
        x = x.detach().to(dtype).requires_grad_(x.requires_grad)
        compiled = compile_(module.to(dtype))
        seen: Observed = {}
        for step in range(2):
            torch.manual_seed(step)
            results = _results(compiled, x)
            seen[f"results {step}"] = results
            loss = sum(r.square().sum() for r in results if r.requires_grad)
            if isinstance(loss, Tensor):
                loss.backward()
        return {**seen, **state_of(module), "input's gradient": x.grad}

    def varied(self) -> list[tuple[int, bool]]:
        """Batch sizes, and whether each is for training; the others are for evaluation."""
        draw = random.Random(f"sizes of {self.seed}")
        return [(draw.randint(1, 4 * BATCH), draw.random() < 0.7) for _ in range(VARIED_CALLS)]

    def calls(self, compile_: Compile, dtype: torch.dtype = torch.float32) -> Observed:
        """Calls with batches of other sizes, training and evaluation mixed, gradients of each."""
        module, given = self.made()
        compiled = compile_(module.to(dtype))
        seen: Observed = {}
        for call, (batch, trains) in enumerate(self.varied()):
            torch.manual_seed(call)
            x = torch.randn(batch, *given.shape[1:]).to(dtype)
            x.requires_grad_(given.requires_grad and trains)
            module.zero_grad(set_to_none=True)
            with torch.set_grad_enabled(trains):
                results = _results(compiled, x)
            seen[f"results {call}"] = [r.detach() for r in results]
            loss = sum(r.square().sum() for r in results if r.requires_grad)
            if isinstance(loss, Tensor):
                loss.backward()
            gradients = [*(p.grad for p in module.parameters()), x.grad]
            seen[f"gradients {call}"] = [g.clone() for g in gradients if g is not None]
        module.zero_grad(set_to_none=True)
        return {**seen, **state_of(module)}


def _results(compiled: Callable[[Tensor], Any], x: Tensor) -> list[Tensor]:
    results = compiled(x)
    return list(results) if isinstance(results, tuple) else [results]


def _as_it_is(target: Callable[..., Any]) -> Callable[..., Any]:
    return target


def check(case: Case, budget: object) -> str:
    """Check a module on the eager executor; returns what was seen, in a word or two.

    Raises:
        AssertionError, or what the package raised: the finding.
    """
    module, _ = case.made()
    try:
        plain = observe(case.steps, _as_it_is)
    except RuntimeError:
        return "refused by PyTorch"
    if all(gradient is None for gradient in plain["gradients"].values()):
        return "nothing to train"
    expected = observe_dtr(case.steps, UNBUDGETED)
    if not module.draws:
        compile_: Compile = _as_it_is
        if module.is_rounded:
            # PyTorch's decompositions round to bfloat16 where its kernels do not.
            compile_ = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
            plain = observe(case.steps, compile_)
        _assert_near(case, expected, plain, compile_, NEAR)
    smallest_that_works(lambda named: _same(case, named, expected), budget)
    return "recomputed" if any(r.recomputed for r in dtrcompile.reports()) else "kept"


def check_sizes(case: Case, share: float, dynamic: bool | None) -> str:
    """Check a module at changing batch sizes, in training and in evaluation, at a budget in bytes.

    Args:
        share: of the most that one of its graphs holds without a budget.
        dynamic: as ``torch.compile`` takes it.

    Returns:
        What was seen, in a word or two.
    """
    module, _ = case.made()
    try:
        plain = observe(case.calls, _as_it_is)
    except RuntimeError:
        return "refused by PyTorch"
    if not any(plain[f"gradients {call}"] for call in range(VARIED_CALLS)):
        return "nothing to train"
    try:
        expected = observe_dtr(case.calls, UNBUDGETED, dynamic=dynamic)
    except TorchRuntimeError:
        if _is_compiled(case, "eager", dynamic):
            raise
        return "refused by Dynamo"
    if not module.draws and not module.is_rounded:
        _assert_calls_near(case, expected, plain)
    unbudgeted_bytes = max(
        max(record.counted_bytes, default=0) for record in executor_log() if record.is_sized
    )
    budget: object = "min" if share == 0 else int(share * unbudgeted_bytes)

    def run(named: object) -> None:
        assert_bitwise(observe_dtr(case.calls, named, dynamic=dynamic), expected)
        if isinstance(named, int):
            held = max((b for r in executor_log() for b in r.counted_bytes), default=0)
            assert held <= named, f"held {held} of a budget of {named} bytes"

    smallest_that_works(run, budget)
    plans = collections.Counter(report.graph for report in dtrcompile.reports())
    assert max(plans.values()) <= MOST_PLANS
    if max(plans.values()) > 1:
        return "several plans"
    return "recomputed" if any(r.recomputed for r in dtrcompile.reports()) else "kept"


def _is_compiled(case: Case, backend: str, dynamic: bool | None) -> bool:
    """Whether PyTorch itself compiles the module; with backend ``eager``, Dynamo only traces it."""
    try:
        observe(case.calls, lambda c: torch.compile(c, backend=backend, dynamic=dynamic))
    except (TorchRuntimeError, BackendCompilerFailed):
        return False
    return True


def _assert_calls_near(case: Case, actual: Observed, expected: Observed) -> None:
    """Gradients of each call as one vector, as in `_assert_near`."""
    exact: Observed = {}
    for call in range(VARIED_CALLS):
        names = [f"results {call}"]
        assert_close(
            {name: actual[name] for name in names},
            {name: expected[name] for name in names},
            rtol=10 * NEAR,
            atol=10 * NEAR,
        )
        found, wanted = (_gradients_of_call(seen, call) for seen in (actual, expected))
        if not any(g.norm() for g in wanted.values()):
            continue
        error = relative_error(found, wanted)
        if error > 10 * NEAR:
            exact = exact or observe(lambda c: case.calls(c, torch.float64), _as_it_is)
            true = _gradients_of_call(exact, call)
            rounding = relative_error(wanted, true)
            assert relative_error(found, true) <= ROUNDING * rounding, (
                f"the gradient of call {call} is off by {error:.1e}, plain PyTorch's by"
                f" {rounding:.1e}"
            )


def _gradients_of_call(seen: Observed, call: int) -> dict[str, Tensor]:
    return {str(i): g for i, g in enumerate(seen[f"gradients {call}"])}


def check_sizes_inductor(case: Case, share: float, dynamic: bool | None) -> str:
    """The same under Inductor: gradients near plain PyTorch's, the allocator within the budget."""
    module, _ = case.made()
    try:
        plain = observe(case.calls, _as_it_is)
    except RuntimeError:
        return "refused by PyTorch"
    if not any(plain[f"gradients {call}"] for call in range(VARIED_CALLS)):
        return "nothing to train"
    try:
        observe(
            case.calls, lambda c: compile_dtr(c, UNBUDGETED, compiler="inductor", dynamic=dynamic)
        )
    except BackendCompilerFailed:
        if _is_compiled(case, "inductor", dynamic):
            raise
        return "refused by Inductor"
    unbudgeted_bytes = max(r.baseline_peak_bytes for r in dtrcompile.reports())

    def run(named: object) -> None:
        compiled: list[Any] = []

        def compile_(target: nn.Module) -> Any:
            compiled.append(compile_dtr(target, named, compiler="inductor", dynamic=dynamic))
            return compiled[0]

        counters.clear()
        actual = observe(case.calls, compile_)
        if not module.draws and not module.is_rounded:
            _assert_calls_near(case, actual, plain)
        if counters["frames"]["ok"] < counters["frames"]["total"] or not isinstance(named, int):
            return  # what Dynamo leaves to eager PyTorch is counted nowhere
        read_bytes = max(r.promised_split["parameters"] for r in dtrcompile.reports())
        for batch, trains in case.varied():
            held = _held_in_call(compiled[0], case, batch, trains) + read_bytes
            assert held <= named, f"held {held} of {named} bytes at a batch of {batch}"

    smallest_that_works(run, "min" if share == 0 else int(share * unbudgeted_bytes))
    return "Inductor"


def _held_in_call(compiled: Any, case: Case, batch: int, trains: bool) -> int:
    """The allocator's peak of one more call, the input included.

    Of one that compiles nothing: a call may plan its step anew, and planning runs library calls.
    """
    module, (_, given) = compiled._orig_mod, case.made()
    x = torch.randn(batch, *given.shape[1:], requires_grad=given.requires_grad and trains)
    module.zero_grad(set_to_none=True)

    def call() -> None:
        with torch.set_grad_enabled(trains):
            results = [r for r in _results(compiled, x) if r.requires_grad]
        if results:
            torch.autograd.backward(results, [torch.ones_like(r) for r in results])

    while True:
        before = compilations()
        held = live_peak_bytes(call) + static_bytes(x)
        if compilations() == before:
            return held
        module.zero_grad(set_to_none=True)
        x.grad = None


def _assert_near(
    case: Case, actual: Observed, expected: Observed, compile_: Compile, tolerance: float
) -> None:
    """Results and buffers one by one, gradients as one vector: some are zero in theory.

    Args:
        compile_: what ``expected`` was observed with.
    """
    names = [name for name in expected if name != "gradients"]
    assert_close(
        {name: actual[name] for name in names},
        {name: expected[name] for name in names},
        rtol=10 * tolerance,
        atol=10 * tolerance,
    )
    if not any(g is not None and g.norm() for g in expected["gradients"].values()):
        return
    error = relative_error(actual["gradients"], expected["gradients"])
    if error > tolerance:
        assert not case.made()[0].is_rounded, f"the gradient is off by {error:.1e}"
        exact = observe(lambda c: case.steps(c, torch.float64), compile_)["gradients"]
        rounding = relative_error(expected["gradients"], exact)
        assert relative_error(actual["gradients"], exact) <= ROUNDING * rounding, (
            f"the gradient is off by {error:.1e}, plain PyTorch's by {rounding:.1e}"
        )


def _same(case: Case, budget: object, expected: Observed) -> None:
    assert_bitwise(observe_dtr(case.steps, budget), expected)


def check_inductor(case: Case, budget: object) -> str:
    """Check a module under Inductor: the gradient, and the allocator against the promise.

    Returns:
        What was seen, in a word or two.
    """
    module, _ = case.made()
    try:
        observe(case.steps, _as_it_is)
    except RuntimeError:
        return "refused by PyTorch"
    reference: Compile = _as_it_is if module.remembers else torch.compile
    tolerance = NEAR if module.remembers else SAME
    plain = observe(case.steps, reference)
    beyond: list[int] = []

    def run(named: object) -> None:
        compiled: list[Callable[[Tensor], object]] = []

        def compile_(target: nn.Module) -> object:
            compiled.append(compile_dtr(target, named, compiler="inductor"))
            return compiled[0]

        counters.clear()
        actual = observe(case.steps, compile_)
        # A budget holds in any step; without one, the promise is for steps like those before.
        held = _measured(compiled[0], case, steps_before=0 if named != "min" else 2)
        reports = dtrcompile.reports()
        # The module may have parameters and buffers that no graph reads; those count nowhere.
        read_bytes = sum(r.promised_split["parameters"] for r in reports)
        held += min(read_bytes, static_bytes(compiled[0]._orig_mod))  # type: ignore[attr-defined]
        _assert_near(case, actual, plain, reference, tolerance)
        # A graph's promise is its own; several are held to the budget that they share.
        if len(reports) == 1:
            allowed = reports[0].promised_peak_bytes
        elif named != "min":
            allowed = max(r.budget_bytes or 0 for r in reports)
        else:
            return
        if held > allowed and counters["frames"]["ok"] < counters["frames"]["total"]:
            # Dynamo left a function to eager PyTorch: nobody counts what that allocates.
            beyond.append(held - allowed)
            return
        assert held <= allowed, f"promised {allowed} bytes, held {held}"

    smallest_that_works(run, budget)
    return "Inductor, more held beside its graphs" if beyond else "Inductor"


def _measured(compiled: Callable[[Tensor], object], case: Case, *, steps_before: int) -> int:
    """The allocator's peak of one more step, the input included.

    The step holds the gradients of the results throughout backward, which `Case.steps` does not.

    Args:
        steps_before: steps of the same form that run first.  The first shows what it holds, and the
            second is planned for it.
    """
    module = compiled._orig_mod  # type: ignore[attr-defined]
    _, x = case.made()

    def step() -> None:
        module.zero_grad(set_to_none=True)
        results = [r for r in _results(compiled, x) if r.requires_grad]
        torch.autograd.backward(results, [torch.ones_like(r) for r in results])

    for _ in range(steps_before):
        step()
    module.zero_grad(set_to_none=True)
    return live_peak_bytes(step) + static_bytes(x)
