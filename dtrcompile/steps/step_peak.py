"""The unbudgeted peak of a model's training step: what a budget given as a share is a share of.

One model makes several graphs: of other sizes, for evaluation, or because it was compiled again.
They know each other by the parameters that they read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from dtrcompile.options import Options
from dtrcompile.outside.surroundings import NO_SURROUNDINGS, SurroundingBytes


@dataclass(eq=False)
class StepPeak:
    """Of one model; compared by identity.

    Attributes:
        size_bytes: the largest that was seen of one graph, 0 before the first training step.
        of_several_bytes: of a step of several graphs, once such a step was over.
        around_bytes: what is there when an optimizer steps: constants and results.
        of_models_bytes: for a graph that reads no parameters, and so belongs to no model: the
            largest of all models.
        may_train: a parameter of the model wants a gradient, so a training step may come.
    """

    size_bytes: int = 0
    of_several_bytes: int = 0
    may_train: bool = False
    around_bytes: int = 0
    of_models_bytes: int = 0

    def see(self, size_bytes: int, around_bytes: int = 0) -> None:
        """A training step holds this much without a budget, and this when an optimizer steps."""
        self.size_bytes = max(self.size_bytes, size_bytes)
        self.around_bytes = max(self.around_bytes, around_bytes)

    def see_several(self, size_bytes: int) -> None:
        """A training step of several graphs held this much without a budget."""
        self.of_several_bytes = max(self.of_several_bytes, size_bytes)

    def see_all(self, other: StepPeak) -> None:
        """What was seen of the same model under other options."""
        self.see(other.size_bytes, other.around_bytes)
        self.see_several(other.of_several_bytes)

    def has_to_wait(self, options: Options, *, trains: bool) -> bool:
        """Whether a graph's budget is a share of a training step that is still to come."""
        is_part = options.is_share and not options.is_whole_peak
        return is_part and not trains and self.may_train and not self.size_bytes

    def budget_bytes(
        self,
        options: Options,
        unbudgeted_bytes: int,
        available_bytes: int | None,
        *,
        trains: bool,
        beside: SurroundingBytes = NO_SURROUNDINGS,
    ) -> int | None:
        """The budget of a graph, less the reserve; None for the smallest.

        Args:
            unbudgeted_bytes: what the graph holds without a budget.
            available_bytes: what the device can give.
            trains: whether the graph is a training step's.
            beside: what no graph holds; it is a part of the step.

        Raises:
            OptionError: as `Options.resolve_budget_bytes`.
        """
        if not trains and (options.is_whole_peak or self.has_to_wait(options, trains=trains)):
            return beside.whole_bytes(unbudgeted_bytes, 0)
        step_bytes = unbudgeted_bytes
        if self.size_bytes:
            seen_bytes = max(self.size_bytes, self.of_several_bytes)
            step_bytes = max(seen_bytes, unbudgeted_bytes if trains else 0)
        elif not trains:
            step_bytes = max(unbudgeted_bytes, self.of_models_bytes)
        whole_bytes = beside.whole_bytes(step_bytes, self.around_bytes)
        return options.resolve_budget_bytes(whole_bytes, available_bytes)


class StepPeaks:
    """The models of one set of options."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_parameter: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def of(self, parameters: Iterable[nn.Parameter]) -> StepPeak:
        """The one that graphs which read any of these parameters share."""
        parameters = list(parameters)
        with self._lock:
            if not parameters:
                models = list(self._by_parameter.values())
                peaks = (max(p.size_bytes, p.of_several_bytes) for p in models)
                return StepPeak(of_models_bytes=max(peaks, default=0))
            known = [self._by_parameter[p] for p in parameters if p in self._by_parameter]
            peak = max(known, key=lambda p: p.size_bytes, default=StepPeak())
            for parameter in parameters:
                self._by_parameter[parameter] = peak
            peak.may_train |= any(p.requires_grad for p in parameters)
        return peak
