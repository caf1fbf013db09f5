"""The same training step with its largest values computed in chunks, where that is better.

`passes.chunking` proves which operators can be, and writes the graph; here it is decided whether
that is done.  A chunked graph is split, captured, planned and measured as every graph is.  It is
compiled if the graph as it is cannot be held within the budget, or only at a higher cost.

Sums of gradients that can be made in place (`graphs.scatters`) are, with chunks and without them,
since that takes no longer.  Where Inductor has padded operands of matrix products
(`graphs.padding`), the graph without the padding comes last, whole and in chunks: its products take
longer.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from dtrcompile.passes.chunking.regions import Refused, Region, bytes_of, regions_of
from dtrcompile.passes.chunking.rewrite import chunked
from dtrcompile.passes.errors import InfeasibleBudgetError, format_bytes
from dtrcompile.passes.fitting.fit import Fitter, Limits, Outcome
from dtrcompile.passes.fitting.measured import ApartSizeModel, Measured
from dtrcompile.passes.fitting.settings import (
    CHUNKED_PART_DIVISOR,
    CHUNKS,
    LEAST_CHUNKED_BYTES,
    MAX_CHUNKED_OPERATORS,
    WORTHWHILE_CHUNKING_SHARE,
    WORTHWHILE_OVERHEAD,
)
from dtrcompile.passes.graphs.capture import Captured
from dtrcompile.passes.graphs.modules import copied_module, output_arguments
from dtrcompile.passes.graphs.padding import without_padding
from dtrcompile.passes.graphs.scatters import into_gradients
from dtrcompile.passes.graphs.sources import place_of
from dtrcompile.passes.planning.planners import lower_bound_bytes
from dtrcompile.passes.program.replay import PlanStats

log = logging.getLogger("dtrcompile")

Split = tuple[fx.GraphModule, fx.GraphModule | None]


@dataclass
class ChunkedSteps:
    """The chunked forms of one training step, made when they are asked for.

    Attributes:
        joint: forward and backward as one graph.
        split: PyTorch's default split of such a graph.
        capture: the program of a split.
        make_fitter: finds plans for what was captured.
        n_outputs: how many of the outputs of ``joint`` are forward's.
    """

    joint: fx.GraphModule
    split: Callable[[fx.GraphModule], Split]
    capture: Callable[[fx.GraphModule, fx.GraphModule | None], Captured]
    make_fitter: Callable[[Captured], Fitter]
    n_outputs: int
    _made: dict[tuple[tuple[str, ...], int, int], ChunkedStep | None] = field(default_factory=dict)

    def better(
        self,
        found: Outcome | InfeasibleBudgetError,
        plain: Fitter,
        limits: Callable[[Measured], Limits],
    ) -> Outcome | InfeasibleBudgetError:
        """What was found for the graph as it is, or a chunked one that is better.

        Args:
            plain: of the graph as it is.
            limits: as of `Fitter.fit`.
        """
        baseline = plain.baseline
        if baseline is None or plain.captured.symbols or not _is_worth_a_try(found):
            return found
        agreed = limits(baseline)
        if agreed.more_follow or agreed.is_unlimited or plain.is_reordered:
            return found
        target_bytes = None
        if agreed.budget_bytes is not None:
            target_bytes = agreed.budget_bytes - agreed.others.outside_bytes
        start = time.perf_counter()
        joint, n_in_place = self._with_sums_in_place
        search = _Search(plain, baseline, agreed, n_in_place, start)
        best = found
        has_tried = not n_in_place
        if not has_tried and target_bytes is not None and _is_at_floor(found):
            step = self._in_place(plain, target_bytes)
            has_tried = step is not None
            best = search.better(best, step)
        refused: list[Refused] = []
        step = None
        if _is_worth_a_try(best):
            peak_bytes = _peak(found, agreed) - plain.captured.program.constant_bytes
            least_bytes = max(LEAST_CHUNKED_BYTES, peak_bytes // CHUNKED_PART_DIVISOR)
            regions, refused = regions_of(joint, least_bytes)
            forms = self._forms(regions, least_bytes)
            if isinstance(best, Outcome) and not _is_at_floor(best):
                step = self._cheapest(best.stats, next(forms))
            else:
                step = self._smallest(_Whole(plain, _peak(best, agreed)), forms, target_bytes)
            best = search.better(best, step)
        if not has_tried and step is None and _is_at_floor(best):
            best = search.better(best, self._in_place(plain, None))
        if isinstance(best, InfeasibleBudgetError):
            return best.with_advice(f"{best.advice} {self._advice(refused)}".strip())
        if best is found:
            return replace(best, planning_s=best.planning_s + time.perf_counter() - start)
        return best

    @functools.cached_property
    def _with_sums_in_place(self) -> tuple[fx.GraphModule, int]:
        """What all forms are made of, and how many sums are in place in it."""
        return into_gradients(self.joint, LEAST_CHUNKED_BYTES)

    def _in_place(self, plain: Fitter, target_bytes: int | None) -> ChunkedStep | None:
        """The step whole, with sums in place; None if it does not fit, or is hardly smaller.

        It differs by a few operators from the graph as it is, whose loops may write over what they
        read.  So the two are compared by what was seen of their schedules.
        """
        step = self._step(_Form(self._with_sums_in_place[0], 0, []), 1)
        if step is None:
            return None
        n_bytes = step.fitter.least_lowered_bytes
        log.debug("with sums in place: about %s at least", format_bytes(n_bytes))
        if target_bytes is None:
            is_worth = n_bytes <= plain.least_lowered_bytes * WORTHWHILE_CHUNKING_SHARE
        else:
            is_worth = n_bytes <= target_bytes
        return step if is_worth else None

    def _advice(self, refused: Sequence[Refused]) -> str:
        """What the user can do about a value that stays whole because the model returns it."""
        returned = output_arguments(self._with_sums_in_place[0])[: self.n_outputs]
        for refusal in refused:
            if refusal.whole in returned:
                return _RETURNED.format(
                    format_bytes(bytes_of(refusal.seed)), _located(refusal.seed)
                )
        return ""

    def _forms(self, regions: list[Region], least_bytes: int) -> Iterator[_Form]:
        """In the order in which their operators take longer; each is made when it is asked for.

        Args:
            regions: of the graph with sums in place.
            least_bytes: of a value that is computed in chunks.
        """
        joint = self._with_sums_in_place[0]
        yield _Form(joint, 0, regions)
        unpadded, n_unpadded = without_padding(joint)
        if n_unpadded:
            yield _Form(unpadded, n_unpadded, regions_of(unpadded, least_bytes)[0])

    def _cheapest(self, whole: PlanStats, form: _Form) -> ChunkedStep | None:
        """With as many chunks as make the cheapest plan, if that is cheaper than the step whole.

        The plans may hold as much as that of the step whole.  If a few chunks make it no cheaper,
        the largest values do not decide what is computed again, and more chunks are not tried.
        """
        best: ChunkedStep | None = None
        best_ns = whole.cost_ns
        for n_chunks in form.numbers_of_chunks:
            step = self._step(form, n_chunks)
            cost_ns = None if step is None else step.fitter.cost_within(whole.peak_bytes)
            if cost_ns is None or cost_ns >= best_ns:
                break
            log.debug("in %d chunks: %.3f of the cost whole", n_chunks, cost_ns / whole.cost_ns)
            best, best_ns = step, cost_ns
            if cost_ns <= WORTHWHILE_OVERHEAD * whole.baseline_cost_ns:
                break
        return best

    def _smallest(
        self, whole: _Whole, forms: Iterable[_Form], target_bytes: int | None
    ) -> ChunkedStep | None:
        """The first form with the fewest chunks that leaves room for a plan, or else the smallest.

        To see that there is room takes a plan or two; to find out what a form holds at least takes
        a search, the longest part of all.

        Args:
            forms: the cheapest first.
            target_bytes: what the step whole does not fit into; None for the smallest.
        """
        best: ChunkedStep | None = None
        best_bytes: int | None = None
        trials = ((form, n_chunks) for form in forms for n_chunks in form.numbers_of_chunks)
        for form, n_chunks in trials:
            step = self._step(form, n_chunks)
            if step is None:
                continue
            if target_bytes is not None:
                room_bytes = int(min(whole.bound_bytes, target_bytes) * WORTHWHILE_CHUNKING_SHARE)
                if best_bytes is not None:
                    room_bytes = min(room_bytes, best_bytes)
                if step.fitter.has_plan_within(room_bytes):
                    log.debug("in %d chunks: at most %s", n_chunks, format_bytes(room_bytes))
                    return step
            if best_bytes is None:
                best_bytes = int(whole.least_bytes * WORTHWHILE_CHUNKING_SHARE)
            if target_bytes is None and not step.fitter.has_plan_within(best_bytes):
                continue
            n_bytes = step.fitter.least_bytes
            log.debug(
                "in %d chunks, %d products without padding: about %s at least",
                *(n_chunks, form.n_unpadded, format_bytes(n_bytes)),
            )
            if n_bytes <= best_bytes:
                best, best_bytes = step, int(n_bytes * WORTHWHILE_CHUNKING_SHARE)
            if target_bytes is not None and n_bytes <= target_bytes * WORTHWHILE_CHUNKING_SHARE:
                break
        return best

    def _step(self, form: _Form, n_chunks: int) -> ChunkedStep | None:
        """In so many chunks; None if that is impossible, or would be too many operators."""
        if n_chunks * sum(len(region.nodes) for region in form.regions) > MAX_CHUNKED_OPERATORS:
            return None
        key = tuple(region.seed.name for region in form.regions), n_chunks, form.n_unpadded
        if key not in self._made:
            cuts = [(r, min(n_chunks, r.n_rows)) for r in form.regions if n_chunks > 1]
            # (PyTorch's partitioner writes into the graph that it splits.)
            graph = chunked(form.graph, cuts) if cuts else copied_module(form.graph)
            self._made[key] = None
            if graph is not None:
                captured = self.capture(*self.split(graph))
                texts = tuple(_told(region, n) for region, n in cuts)
                self._made[key] = ChunkedStep(self.make_fitter(captured), texts, form.n_unpadded)
        return self._made[key]


@dataclass(frozen=True)
class _Search:
    """Compares other forms of a step with what was found for it so far.

    Attributes:
        plain: of the graph as it is.
        baseline: what the default split of that one holds.
        agreed: the limits.
        n_in_place: as in `Outcome`, of all other forms.
        start_s: when it began.
    """

    plain: Fitter
    baseline: Measured
    agreed: Limits
    n_in_place: int
    start_s: float

    def better(
        self, best: Outcome | InfeasibleBudgetError, step: ChunkedStep | None
    ) -> Outcome | InfeasibleBudgetError:
        """The best so far, or another form of the step if that is better."""
        outcome = None if step is None else _fitted(step, self.agreed)
        if isinstance(outcome, Outcome):
            spent_s = time.perf_counter() - self.start_s
            planning_s, lowering_s = self.plain.spent_s
            outcome = replace(
                _beside(outcome, self.plain.captured),
                n_in_place=self.n_in_place,
                baseline_measured=_apart(self.baseline, self.plain.captured),
                planning_s=planning_s + spent_s - outcome.lowering_s,
                lowering_s=lowering_s + outcome.lowering_s,
            )
        return best if outcome is None or not _is_better(outcome, best) else outcome


@dataclass(frozen=True)
class _Whole:
    """The graph of a step without chunks, which has no plan that is small enough.

    Attributes:
        peak_bytes: the smallest peak of a schedule that was found for it.
    """

    fitter: Fitter
    peak_bytes: int

    @property
    def least_bytes(self) -> int:
        """About what it holds at least; its schedule may hold far more than the smallest plan."""
        return max(self.fitter.least_bytes, self.peak_bytes)

    @property
    def bound_bytes(self) -> int:
        """It holds no less than this, which takes no search."""
        return max(lower_bound_bytes(self.fitter.captured.program), self.peak_bytes)


@dataclass(frozen=True)
class _Form:
    """The graph of a step, with or without padded operands.

    Attributes:
        n_unpadded: as in `Outcome`.
        regions: of the graph, which can be computed in chunks.
    """

    graph: fx.GraphModule
    n_unpadded: int
    regions: list[Region]

    @property
    def numbers_of_chunks(self) -> tuple[int, ...]:
        """Those to try; 1 is the graph as it is, which needs no trial if nothing was left out."""
        return (*((1,) if self.n_unpadded else ()), *(CHUNKS if self.regions else ()))


@dataclass
class ChunkedStep:
    """A step with values computed in chunks.

    Attributes:
        texts: what is computed so, for the report.
        n_unpadded: as in `Outcome`.
    """

    fitter: Fitter
    texts: tuple[str, ...]
    n_unpadded: int


def _apart(measured: Measured, captured: Captured) -> Measured:
    """What other graphs than the chunked ones hold."""
    if measured.by_sizes is None:
        return measured
    return replace(measured, by_sizes=ApartSizeModel(measured.by_sizes, captured))


def _beside(outcome: Outcome, captured: Captured) -> Outcome:
    """The cost of a chunked graph's plan beside that of the graph as it was."""
    assert outcome.chosen is not None
    stats = replace(outcome.chosen.stats, baseline_cost_ns=captured.program.cost_ns)
    return replace(outcome, chosen=replace(outcome.chosen, stats=stats))


def _is_worth_a_try(found: Outcome | InfeasibleBudgetError) -> bool:
    if isinstance(found, InfeasibleBudgetError):
        return type(found) is InfeasibleBudgetError and found.minimum_bytes is not None
    if found.is_guess or found.chosen is None:
        return False
    return found.budget_bytes is None or found.stats.overhead > WORTHWHILE_OVERHEAD


def _is_at_floor(found: Outcome | InfeasibleBudgetError) -> bool:
    """Whether what matters is the smallest peak that there is."""
    return isinstance(found, InfeasibleBudgetError) or found.budget_bytes is None


def _peak(found: Outcome | InfeasibleBudgetError, limits: Limits) -> int:
    """What the graph as it is holds, with a plan, beside the other graphs of the step."""
    if isinstance(found, InfeasibleBudgetError):
        return _minimum(found) - limits.others.outside_bytes
    return found.measured.peak_with(found.others)


def _fitted(step: ChunkedStep, limits: Limits) -> Outcome | InfeasibleBudgetError | None:
    """None if other random numbers would be drawn from one seed than without chunks."""
    found: Outcome | InfeasibleBudgetError
    try:
        fitted = step.fitter.fit(lambda _: limits)
        found = replace(fitted, chunks=step.texts, n_unpadded=step.n_unpadded)
    except InfeasibleBudgetError as refusal:
        found = refusal
    return None if step.fitter.is_reordered else found


def _minimum(refusal: InfeasibleBudgetError) -> int:
    assert refusal.minimum_bytes is not None
    return refusal.minimum_bytes


def _is_better(
    outcome: Outcome | InfeasibleBudgetError, found: Outcome | InfeasibleBudgetError
) -> bool:
    if isinstance(outcome, InfeasibleBudgetError):
        return isinstance(found, InfeasibleBudgetError) and _minimum(outcome) < _minimum(found)
    if isinstance(found, InfeasibleBudgetError):
        return True
    if outcome.budget_bytes is None:
        return outcome.measured.peak_with(outcome.others) < found.measured.peak_with(found.others)
    return outcome.stats.cost_ns < found.stats.cost_ns


def _told(region: Region, n_chunks: int) -> str:
    """Which value is computed in chunks, in terms of the user's modules and lines."""
    return f"{_located(region.seed)}, {format_bytes(bytes_of(region.seed))}: {n_chunks} chunks"


def _located(node: fx.Node) -> str:
    place = place_of(node)
    return f"{node.name} ({place})" if place else node.name


_RETURNED = (
    "The model returns {} of {}, which therefore cannot be computed in chunks. It can, if what is"
    " compiled computes the loss and returns nothing else."
)
