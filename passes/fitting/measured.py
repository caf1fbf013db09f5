"""What the graphs of a step hold, in the words that every memory model answers in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dtrcompile.passes.fitting.sharing import GraphBytes, OtherGraphs
from dtrcompile.passes.inductor.schedule_trace import ScheduleTrace, is_floor, split_of
from dtrcompile.passes.program.program import Phase
from dtrcompile.passes.program.sizes import Sizes

if TYPE_CHECKING:
    from dtrcompile.passes.fitting.peak_formula import StepFormulas
    from dtrcompile.passes.graphs.capture import Captured


class SizeModel(ABC):
    """What graphs hold at other sizes: what they allocate, and when, is the same at any."""

    @abstractmethod
    def at(self, sizes: Sizes) -> Measured:
        """What the graphs hold at these sizes."""

    @abstractmethod
    def of(self, captured: Captured) -> Measured:
        """What they hold where the same graphs hand on other outputs and tangents."""

    @property
    @abstractmethod
    def formulas(self) -> StepFormulas | None:
        """The same in the graphs' symbols; None where it cannot be written so."""


@dataclass(frozen=True)
class ApartSizeModel(SizeModel):
    """Of other graphs than those that it is asked about, with the same inputs and outputs.

    Attributes:
        captured: the graphs that ``model`` is of.
    """

    model: SizeModel
    captured: Captured

    def at(self, sizes: Sizes) -> Measured:
        return self.model.at(sizes)

    def of(self, captured: Captured) -> Measured:
        return self.model.of(self.captured.handing_on(captured.handed_on))

    @property
    def formulas(self) -> StepFormulas | None:
        return self.model.formulas


@dataclass(frozen=True)
class Measured:
    """What graphs hold, as a memory model sees it.

    Attributes:
        peak_bytes: the most at any moment.
        peak_at: what was being computed or allocated there.
        split: bytes at the peak by the report's categories.
        forward_peak_bytes, backward_peak_bytes: of each phase; 0 for a missing backward.
        boundary_bytes: held when forward has returned: constants, saved tensors, outputs.
        saved_bytes: held between forward and backward.
        is_floor: no plan holds less: at the peak there are constants and results alone.
        step_bytes: step of the plan -> the most held in it, where it is known step by step and may
            differ from the referee's; empty for the default split.
        workspace_bytes: operator -> the most that one of its library calls held beside what it
            reads and returns, where calls are known and the referee does not count it.
        written_over: operators whose result takes the place of an input that is read for the last
            time, which the referee does not know.
        draws: operators that draw random numbers, in the order that the compiler gives them.
        by_sizes: tells the same at other values of the graphs' symbols; None where not known.
    """

    peak_bytes: int
    peak_at: str
    split: dict[str, int]
    forward_peak_bytes: int
    backward_peak_bytes: int
    boundary_bytes: int
    saved_bytes: int
    is_floor: bool = False
    step_bytes: Mapping[int, int] = field(default_factory=dict)
    workspace_bytes: Mapping[int, int] = field(default_factory=dict)
    written_over: frozenset[int] = frozenset()
    draws: tuple[int, ...] = ()
    by_sizes: SizeModel | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def of(trace: ScheduleTrace) -> Measured:
        """What a schedule holds."""
        forward, backward = trace.peak(Phase.FORWARD), trace.peak(Phase.BACKWARD)
        assert forward is not None
        peak = forward
        if backward is not None and backward.live_bytes > forward.live_bytes:
            peak = backward
        return Measured(
            peak_bytes=peak.live_bytes,
            peak_at=peak.taken.line,
            split=split_of(trace, peak.taken.moment),
            forward_peak_bytes=forward.live_bytes,
            backward_peak_bytes=0 if backward is None else backward.live_bytes,
            boundary_bytes=trace.boundary_bytes(),
            saved_bytes=trace.saved_bytes(),
            is_floor=is_floor(trace, peak.taken.moment),
            step_bytes=trace.step_bytes(),
            workspace_bytes=trace.workspace_bytes(),
            written_over=trace.written_over,
            draws=trace.draws,
        )

    def peak_with(self, others: OtherGraphs) -> int:
        """As `GraphBytes.peak_with`."""
        return self.graph_bytes(0, 0).peak_with(others)

    def with_backward(self, other: Measured) -> Measured:
        """What is known of forward, and backward as in ``other``."""
        if other.backward_peak_bytes <= self.forward_peak_bytes:
            return replace(self, backward_peak_bytes=other.backward_peak_bytes)
        return replace(
            other,
            forward_peak_bytes=self.forward_peak_bytes,
            boundary_bytes=self.boundary_bytes,
            saved_bytes=self.saved_bytes,
        )

    def graph_bytes(self, constant_bytes: int, gradient_bytes: int) -> GraphBytes:
        """For the account of a step of several graphs."""
        return GraphBytes(
            constant_bytes,
            self.forward_peak_bytes,
            self.backward_peak_bytes,
            self.boundary_bytes,
            gradient_bytes,
        )
