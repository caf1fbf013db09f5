"""Inductor: what it lowers, what its wrappers hold, and what is replaced in it.

`lower` takes a step's graphs to a `LoweredStep`, `trace` a lowered step to a `ScheduleTrace`:
nothing else is asked of Inductor when a plan is measured.
"""

from dtrcompile.passes.inductor.dry_run import Wrapper
from dtrcompile.passes.inductor.schedule_trace import ScheduleTrace
from dtrcompile.passes.inductor.step import LoweredStep, keep, lower, trace, trace_in_symbols

__all__ = ["LoweredStep", "ScheduleTrace", "Wrapper", "keep", "lower", "trace", "trace_in_symbols"]
