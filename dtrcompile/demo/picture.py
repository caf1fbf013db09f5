"""The picture: live memory over one step, one curve a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dtrcompile.demo.memory import LiveMemory

_MIB = 2**20


def draw(runs: Mapping[str, LiveMemory], path: Path, *, title: str) -> None:
    """Write a PNG to ``path``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, memory in runs.items():
        total_s = memory.at_s[-1] or 1.0
        (line,) = axes.step(
            [100 * at_s / total_s for at_s in memory.at_s],
            [size / _MIB for size in memory.live_bytes],
            where="post",
            linewidth=1.2,
            label=f"{name}: peak {memory.peak_bytes / _MIB:.1f} MiB",
        )
        axes.axhline(
            memory.peak_bytes / _MIB, color=line.get_color(), linewidth=0.7, linestyle="--"
        )
    axes.set_xlim(0, 100)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("time in the step, forward and backward (%)")
    axes.set_ylabel("live memory, parameters and inputs included (MiB)")
    axes.set_title(title)
    figure.legend(loc="outside lower center", ncols=len(runs), fontsize="small", frameon=False)
    figure.savefig(path, dpi=130)
