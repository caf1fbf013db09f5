"""One Dynamo graph under the budgets that it is given one after the other.

`dtrcompile.set_budget` changes the budget of a model that is compiled already.  Each budget has a
`SharedGraph` of its own, in a ledger of its own, and all of them come from the same Dynamo graph.
The latest are kept, so that a budget that comes back is not planned for, and compiled for, again.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from dtrcompile.options import Budget, Options
from dtrcompile.passes.errors import OptionError
from dtrcompile.steps.shared_graph import SharedGraph

log = logging.getLogger("dtrcompile")

# Budgets that a graph is kept for; of more, the one goes that was left longest ago.
_MAX_BUDGETS = 8

Make = Callable[[Options], SharedGraph]


class BudgetedGraph:
    """The callable that Dynamo runs: a graph compiled for the present budget.

    A new budget holds from the next step on: while a call waits for its backward, the graphs of the
    step go on under the budget that it began with.
    """

    def __init__(self, options: Options, make: Make) -> None:
        """
        Args:
            make: compiles the graph for options, for the first time or once more.
        """
        self._make = make
        self._lock = threading.RLock()
        self._options = options
        self._current = make(options)
        self._by_options = {options.cache_key(): self._current}
        self._wanted: Options | None = None

    @property
    def graph(self) -> int:
        """The index of its present graph in reports."""
        return self._current.graph

    def want(self, budget: Budget) -> None:
        """Have another budget from the next step on."""
        with self._lock:
            wanted = replace(self._options, budget=budget)
            self._wanted = None if wanted == self._options else wanted

    def __call__(self, *args: Any) -> Any:
        if self._wanted is not None:
            self._take_up()
        return self._current(*args)

    def _take_up(self) -> None:
        with self._lock:
            wanted = self._wanted
            if wanted is None or self._current.ledger.anything_waits():
                return
            key = wanted.cache_key()
            if key not in self._by_options:
                log.info("graph %d is compiled for the budget %s", self.graph, wanted.budget)
                self._by_options[key] = self._make(wanted)
            self._current, self._options = self._by_options.pop(key), wanted
            self._by_options[key] = self._current  # the last, which is the latest
            max_budgets = 1 if _may_hold_memory(wanted) else _MAX_BUDGETS
            while len(self._by_options) > max_budgets:
                self._by_options.pop(next(iter(self._by_options)))
            self._wanted = None


def _may_hold_memory(options: Options) -> bool:
    """Whether code holds memory of the device when it does not run, as CUDA graphs do."""
    return (
        options.inductor_mode in ("reduce-overhead", "max-autotune")
        or options.inductor_patches.get("triton.cudagraphs", False) is True
    )


class _Budgets:
    """The graphs of each model, and the budgets that were set, known by the parameters."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.graphs: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.budgets: WeakIdKeyDictionary = WeakIdKeyDictionary()


_budgets = _Budgets()


def options_with_budget(options: Options, parameters: Iterable[nn.Parameter]) -> Options:
    """The options of a new graph: with the budget that was set for the model, if one was."""
    with _budgets.lock:
        found = [_budgets.budgets[p] for p in parameters if p in _budgets.budgets]
    return replace(options, budget=found[0]) if found else options


def register(graph: BudgetedGraph, parameters: Iterable[nn.Parameter]) -> None:
    """Let `set_budget` find a graph by the parameters that it reads."""
    with _budgets.lock:
        for parameter in parameters:
            _budgets.graphs.setdefault(parameter, weakref.WeakSet()).add(graph)


def set_budget(model: nn.Module, budget: object) -> None:
    """Change the budget of a model that ``torch.compile(model, backend="dtr")`` compiled.

    The budget holds from the next step on, for all graphs that read a parameter of the model, those
    that are compiled later included.  Each graph is compiled for a new budget when it is next
    called; what was compiled for the last eight budgets is kept, so going back to one of them
    compiles nothing.  (With CUDA graphs, which hold memory, only the present one is kept.)  Other
    options stay as they are.

    A budget that cannot be met raises `InfeasibleBudgetError` when the model is next called; set
    another one then.

    Args:
        model: the model, compiled or not, or a part of it.
        budget: in any form that option ``budget`` has, such as ``"6GiB"``.

    Raises:
        OptionError: for a budget in another form, or a model without parameters.
    """
    wanted = Budget.parse(budget)
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    if not parameters:
        raise OptionError(
            "set_budget finds the graphs of a model by its parameters, and"
            f" {type(model).__name__} has none. Pass the nn.Module that was compiled, or pass"
            " options={'budget': ...} to torch.compile."
        )
    with _budgets.lock:
        graphs = {g for p in parameters for g in _budgets.graphs.get(p, ())}
        for parameter in parameters:
            _budgets.budgets[parameter] = wanted
    for graph in graphs:
        graph.want(wanted)
    if not graphs and any(_budgets.graphs.values()):
        log.warning(
            "set_budget found no compiled graph that reads a parameter of %s. The budget applies to"
            " graphs that are compiled from now on and that read one. If the model is sharded"
            " (FSDP), or if other tensors took the place of its parameters, compile it again with"
            " options={'budget': ...}.",
            type(model).__name__,
        )


def forget_graphs() -> None:
    """``torch._dynamo.reset`` was called: no graph will be called again.  Budgets stay."""
    with _budgets.lock:
        _budgets.graphs = WeakIdKeyDictionary()
