"""The entry point: ``torch.compile(model, backend="dtr", options={"budget": "8GiB"})``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dtrcompile.compilation.probing import ProbedPlan, is_probing
from dtrcompile.compilation.source import GraphSource
from dtrcompile.dynamo_errors import for_dynamo
from dtrcompile.options import Options, defaults_used, forget_defaults_used
from dtrcompile.outside.uncompiled import forget, graph_break, listen
from dtrcompile.passes.errors import wrapped_error
from dtrcompile.passes.graphs.modules import output_arguments, placeholders
from dtrcompile.passes.graphs.recurrent import unroll_recurrent
from dtrcompile.passes.graphs.regions import inline_regions
from dtrcompile.passes.nodes import hint
from dtrcompile.steps.budgeted import (
    BudgetedGraph,
    forget_graphs,
    options_with_budget,
    register,
)
from dtrcompile.steps.calls import is_counted, views_all
from dtrcompile.steps.ledger import Ledger, forget_steps, ledger_of, more_graphs_follow
from dtrcompile.steps.shared_graph import Returned, SharedGraph
from dtrcompile.steps.step_peak import StepPeak
from dtrcompile.steps.symbols import Symbols


def dtr(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph so that a step stays within a byte budget.

    Args:
        gm: the graph; owned by this function from here on.
        example_inputs: its inputs.
        options: see `dtrcompile.options.Options`.
        mode: Inductor's mode, as in ``options={"inductor": {"mode": ...}}``.

    Raises:
        OptionError: for an unknown or unusable option.
        InfeasibleBudgetError: if no plan stays within the budget; names the smallest budget for
            which a plan does.
        UnknownOptimizerError: if an optimizer that is to be counted cannot be counted.
    """
    if mode is not None and (options is None or isinstance(options, Mapping)):
        inductor = (options or {}).get("inductor") or {}
        options = {**(options or {}), "inductor": {"mode": mode, **inductor}}
    listen()
    try:
        parsed = Options.parse(options)
        compiled = compile_graph(gm, example_inputs, parsed)
        defaults_used(compiled.graph, options, parsed)
    except Exception as error:
        ours = wrapped_error(error)
        if ours is None:
            raise
        raise for_dynamo(ours, dtr) from None
    return compiled


def compile_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options
) -> BudgetedGraph:
    """As `dtr`, with options that have been parsed."""
    inline_regions(gm)
    if torch.is_grad_enabled():
        unroll_recurrent(gm)
    parameters = _parameters(gm)
    if not is_probing():
        options = options_with_budget(options, parameters)
    parts = _Parts(
        GraphSource(gm, example_inputs, Symbols.of_graph(gm), graph_break(gm)),
        more_graphs_follow(gm),
        _device_of(parameters, example_inputs),
        [weakref.ref(p) for p in parameters],
        _storages_read(gm),
        _received_bytes(gm),
        _returned(gm),
    )
    compiled = BudgetedGraph(options, parts.compiled)
    register(compiled, parameters)
    return compiled


@dataclass
class _Parts:
    """A Dynamo graph, and what is known of it under any budget.

    Attributes:
        step_peak: of the model, under the options that it was last compiled with.
    """

    source: GraphSource
    more_follow: bool
    device: torch.device
    parameters: list[weakref.ref[nn.Parameter]]
    read: dict[int, StorageWeakRef]
    received: list[int]
    returned: Returned
    step_peak: StepPeak | None = None

    def compiled(self, options: Options) -> SharedGraph:
        """The graph compiled for options, for the first time or once more."""
        ledger = Ledger(options) if is_probing() else ledger_of(options)
        parameters = [p for ref in self.parameters if (p := ref()) is not None]
        step_peak = ledger.step_peaks.of(parameters)
        if self.step_peak is not None:
            step_peak.see_all(self.step_peak)
        self.step_peak = step_peak
        source = self.source.under(options, step_peak)
        symbols = source.symbols
        try:
            with ledger.surroundings.seeing(parameters, self.device, options):
                return SharedGraph(
                    ledger,
                    source.compile,
                    self.more_follow,
                    graph=source.graph,
                    symbols=symbols,
                    step_peak=step_peak,
                    parameters=parameters,
                    read=self.read,
                    received=self.received,
                    returned=self.returned,
                )
        except ProbedPlan as planned:
            planned.loss_bytes = self.returned.loss_bytes
            raise


def _received_bytes(gm: fx.GraphModule) -> list[int]:
    """Of the inputs that were computed from what needs gradients, by another graph or outside."""
    inputs = (n.meta.get("example_value") for n in placeholders(gm))
    return [
        hint(v.untyped_storage().nbytes())
        for v in inputs
        if isinstance(v, torch.Tensor) and v.layout is torch.strided and not v.is_leaf
    ]


def _returned(gm: fx.GraphModule) -> Returned:
    """The outputs that the graph computes, where there will be a backward."""
    made = [
        v
        for n in output_arguments(gm)
        if isinstance(n, fx.Node)
        and n.op not in ("placeholder", "get_attr")
        and isinstance(v := n.meta.get("example_value"), torch.Tensor)
        and v.layout is torch.strided
    ]
    if not any(v.requires_grad for v in made):
        return Returned()
    storages = {s._cdata: hint(s.nbytes()) for s in (v.untyped_storage() for v in made)}
    # (Losses are computed in float32 of results that are less exact.)
    values = {
        v.untyped_storage()._cdata: hint(v.numel()) * max(v.itemsize, torch.float32.itemsize)
        for v in made
        if v.requires_grad
    }
    has_loss = any(v.requires_grad and v.numel() == 1 for v in made)
    return Returned(sum(storages.values()), sum(values.values()), has_loss=has_loss)


def _reset() -> None:
    """``torch._dynamo.reset`` was called: all will be compiled again."""
    forget()
    forget_defaults_used()
    forget_steps()
    forget_graphs()


dtr.reset = _reset  # type: ignore[attr-defined]
# From here on, because a model that Dynamo does not compile at all does not reach the backend.
listen()


def _device_of(parameters: Iterable[torch.Tensor], inputs: Iterable[object]) -> torch.device:
    for tensor in (*parameters, *inputs):
        if isinstance(tensor, torch.Tensor) and tensor.device.type not in ("cpu", "meta"):
            return tensor.device
    return torch.device("cpu")


def _parameters(gm: fx.GraphModule) -> list[nn.Parameter]:
    """The user's own parameters that a Dynamo graph reads, inputs or attributes of it."""
    inputs = (value for value in _inputs(gm) if isinstance(value, nn.Parameter))
    return [*gm.parameters(), *inputs]


def _storages_read(gm: fx.GraphModule) -> dict[int, StorageWeakRef]:
    """The storages of the user's tensors that a Dynamo graph is about to read whole, by identity.

    Of a slice, the graph knows no more than its own bytes.
    """
    tensors = filter(is_counted, (*gm.parameters(), *gm.buffers(), *_inputs(gm)))
    storages = (StorageWeakRef(t.untyped_storage()) for t in tensors if views_all(t))
    return {storage.cdata: storage for storage in storages}


def _inputs(gm: fx.GraphModule) -> Iterator[object]:
    """What the user's program gives a Dynamo graph in the call for which it is compiled."""
    for node in placeholders(gm):
        argument = node.meta.get("grapharg")
        if argument is not None:
            yield argument.example
