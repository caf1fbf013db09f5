"""On CUDA: warns of a step whose peak, as the allocator counts it, is above the budget.

The promise is for what the graphs hold.  Everything else on the device, an optimizer's state first
of all, is the user's to set aside.  The allocator keeps count at no cost, so its peak is compared
with the budget when the next step begins; the numbers are asked for once a step, not once a call.

PyTorch's peak is the user's to reset.  It is therefore left alone, and only a peak that rose in a
step is taken for the step's; but after a step in which graphs were compiled, which runs library
calls on tensors of its own and resets the peak as it is, the peak is begun anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from dtrcompile.outside.uncompiled import tell
from dtrcompile.passes.errors import format_bytes
from dtrcompile.report import compilations


class AllocatorStatistics(Protocol):
    """What a device's allocator counts, in bytes."""

    def allocated_bytes(self) -> int:
        """Live now."""

    def peak_bytes(self) -> int:
        """The most since the last reset."""

    def reset_peak(self) -> None:
        """Begin the peak anew."""


@dataclass(frozen=True)
class CudaStatistics:
    """PyTorch's caching allocator."""

    device: torch.device

    def allocated_bytes(self) -> int:
        return int(self._allocated()["current"])

    def peak_bytes(self) -> int:
        return int(self._allocated()["peak"])

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def _allocated(self) -> dict[str, int]:
        # (``torch.cuda.memory_allocated`` sorts hundreds of numbers to give one.)
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        return stats["allocated_bytes"]["all"]  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Expected:
    """What is known of a step when it begins.

    Attributes:
        allowed_bytes: the budget, with what is reserved of it.
        promised_bytes: what its graphs hold at most.
        constant_bytes: of these, what was there before: parameters, inputs, and what other graphs
            and a counted optimizer hold.
        called_at: ``file:line`` of the first call.
    """

    allowed_bytes: int
    promised_bytes: int
    constant_bytes: int
    called_at: str


@dataclass(frozen=True, slots=True)
class _Begun:
    expected: Expected
    peak_bytes: int
    allocated_bytes: int
    compilations: int
    is_first: bool  # what was compiled runs for the first time, and its backward is compiled


class StepCheck:
    """Compares the steps of one ledger with their budget."""

    def __init__(self, device: str, statistics: AllocatorStatistics) -> None:
        self.device = device
        self.statistics = statistics
        self.begun: _Begun | None = None

    def begin(self, expected: Expected) -> None:
        """A step begins, and with it the one before is over."""
        peak_bytes, compiled = self.statistics.peak_bytes(), compilations()
        begun = self.begun
        is_first = begun is None or begun.compilations != compiled
        if begun is None or is_first or begun.is_first:
            self.statistics.reset_peak()
            peak_bytes = self.statistics.peak_bytes()
        elif begun.peak_bytes < peak_bytes > begun.expected.allowed_bytes:
            self._tell(begun, peak_bytes)
        allocated_bytes = self.statistics.allocated_bytes()
        self.begun = _Begun(expected, peak_bytes, allocated_bytes, compiled, is_first)

    def _tell(self, begun: _Begun, peak_bytes: int) -> None:
        expected = begun.expected
        before_bytes = max(0, begun.allocated_bytes - expected.constant_bytes)
        during_bytes = max(0, peak_bytes - before_bytes - expected.promised_bytes)
        during = ""
        if during_bytes:
            during = f", and at least {format_bytes(during_bytes)} came while it ran"
        tell(
            "over",
            expected.called_at,
            f"the allocator of {self.device} saw {format_bytes(peak_bytes)} in a step that begins"
            f" here, {format_bytes(peak_bytes - expected.allowed_bytes)} above the budget of"
            f" {format_bytes(expected.allowed_bytes)}. Its graphs promise"
            f" {format_bytes(expected.promised_bytes)}; {format_bytes(before_bytes)} were there"
            f" before, and are not theirs (an optimizer's state, gradients, other models){during}."
            " Set them aside with 'reserve'; dtrcompile.watch() around a step says whose they are",
        )


def check_of(device: torch.device) -> StepCheck | None:
    """For graphs on this device; None where the allocator does not count."""
    if device.type != "cuda":
        return None
    return StepCheck(str(device), CudaStatistics(device))
