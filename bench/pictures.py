"""Pictures of plans, for the documents; needs matplotlib (``pip install dtrcompile[demo]``).

* Pareto curves: extra compute against the budget, one curve a planner, on a transformer's training
  step and on a unit chain (`synthetic`).
* DTR in pictures: which layer's value is in memory when, on chains of 80, 128 and 200 layers with
  2 √N and log2 N + 4 tensors.  Checkpoints show as horizontal lines, segments that are computed
  again as triangles, the gradient as the line that comes down at the end.  Beside DTR, the binomial
  schedule with the same memory.
* Step time against peak, one curve a method (`rivals`), from the rows in bench/results.

The same programs give the same bytes, on one version of matplotlib.  The figures that the curves
of planners are drawn from are printed.

    python -m bench.pictures [--folder docs/pictures] [--quick]
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.rivals_rows import draw_all, read_rows
from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.planning.planners import keep_all, make_planner
from dtrcompile.passes.planning.planners.base import Planner
from dtrcompile.passes.program.plan import Compute, Free, Plan
from dtrcompile.passes.program.program import Program
from dtrcompile.passes.program.replay import replay
from workloads.synthetic import training_chain, transformer, unit_chain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
_RIVALS = Path(__file__).resolve().parent / "results" / "rivals-cpu.jsonl"

# Name in the legend -> planner and options.  A new planner is one line.
CURVES: dict[str, tuple[str, dict[str, object]]] = {
    "auto": ("auto", {}),
    "dtr, h_dtr": ("dtr", {"heuristic": "h_dtr"}),
    "dtr, h_dtr_eq": ("dtr", {"heuristic": "h_dtr_eq"}),
    "dtr, h_lru": ("dtr", {"heuristic": "h_lru"}),
    "chen-sqrt": ("chen-sqrt", {}),
    "chen-greedy": ("chen-greedy", {}),
    "treeverse": ("treeverse", {}),
}
_STYLES = ("-", "--", "--", "--", ":", ":", "-.")
_MARKERS = "osvD^Px"


# Pareto curves


def pareto(program: Program, shares: Iterable[float]) -> dict[str, list[tuple[float, float]]]:
    """For each of `CURVES`: (budget / baseline peak, extra compute / baseline compute)."""
    peak_bytes = replay(program, keep_all(program))[0].peak_bytes
    curves: dict[str, list[tuple[float, float]]] = {name: [] for name in CURVES}
    for share in shares:
        budget_bytes = int(share * peak_bytes)
        for name, (planner, options) in CURVES.items():
            try:
                plan = make_planner(planner, **options).plan(program, budget_bytes)
            except InfeasibleBudgetError:
                continue
            curves[name].append((share, replay(program, plan)[1].overhead - 1))
    return curves


def print_curves(title: str, curves: dict[str, list[tuple[float, float]]]) -> None:
    """The figures of a picture: extra compute in percent, ``-`` where there is no plan."""
    shares = sorted({share for points in curves.values() for share, _ in points}, reverse=True)
    print(f"{title}: extra compute (%) at each share of the baseline peak (%)")
    print(f"{'':16}" + "".join(f"{100 * share:8.0f}" for share in shares))
    for name, points in curves.items():
        found = dict(points)
        cells = (f"{100 * found[s]:8.1f}" if s in found else f"{'-':>8}" for s in shares)
        print(f"{name:16}" + "".join(cells))


def draw_pareto(panels: dict[str, dict[str, list[tuple[float, float]]]]) -> Figure:
    """One panel a program."""
    figure = _figure(9.5, 4.6)
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, curves) in zip(all_axes, panels.items(), strict=True):
        for k, (name, points) in enumerate(curves.items()):
            axes.plot(
                [100 * share for share, _ in points],
                [100 * extra for _, extra in points],
                linestyle=_STYLES[k % len(_STYLES)],
                marker=_MARKERS[k % len(_MARKERS)],
                markersize=3.5,
                linewidth=1.1,
                label=name,
            )
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel("budget (% of the baseline peak)")
        axes.set_yscale("symlog", linthresh=10)
        axes.set_yticks([0, 5, 10, 20, 50, 100, 200], ["0", "5", "10", "20", "50", "100", "200"])
        axes.set_ylim(0, 300)
        axes.grid(linewidth=0.3)
    all_axes[0].set_ylabel("extra compute (% of the baseline)")
    figure.legend(
        *all_axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        fontsize="small",
        frameon=False,
    )
    return figure


# Traces


@dataclass(frozen=True, slots=True)
class Life:
    """One copy of a storage in memory, from one run of an operator to another.

    Attributes:
        storage: its id.
        start, stop: how many operators had run when it was made, and when it was freed.
        again: whether it had been in memory before.
    """

    storage: int
    start: int
    stop: int
    again: bool


def lives(plan: Plan, program: Program) -> list[Life]:
    """All copies that a plan makes, in the order in which they end."""
    runs = 0
    made_at: dict[int, int] = {}
    seen: set[int] = set()
    ended: list[Life] = []
    for step in plan.steps:
        if isinstance(step, Compute):
            for t in program.operators[step.operator].outputs:
                made_at.setdefault(program.tensors[t].storage, runs)
            runs += 1
        elif isinstance(step, Free):
            s = step.storage
            ended.append(Life(s, made_at.pop(s), runs, s in seen))
            seen.add(s)
    ended.extend(Life(s, start, runs, s in seen) for s, start in made_at.items())
    return ended


def draw_traces(planner: Planner, chains: Sequence[int], label: str) -> Figure:
    """Two rows, 2 √N and log2 N + 4 tensors; one column a chain."""
    from matplotlib.collections import LineCollection

    figure = _figure(10, 6.2)
    rows = figure.subplots(2, len(chains), squeeze=False)
    for column, layers in enumerate(chains):
        program = training_chain(layers)
        for axes, (memory, name) in zip(rows[:, column], memories(layers), strict=True):
            plan = planner.plan(program, memory)
            runs = replay(program, plan)[1].cost_ns
            groups: dict[str, list[list[tuple[int, int]]]] = {"#20639b": [], "#f0a202": []}
            gradients = []
            for life in lives(plan, program):
                layer = int(program.storages[life.storage].name[1:])
                line = [(life.start, layer), (life.stop, layer)]
                if program.storages[life.storage].name.startswith("g"):
                    gradients.append(line)
                else:
                    groups["#f0a202" if life.again else "#20639b"].append(line)
            width = min(1.6, 160 / layers)
            for color, lines in (*groups.items(), ("#c0392b", gradients)):
                axes.add_collection(LineCollection(lines, colors=color, linewidths=width))
            axes.set_xlim(0, runs)
            axes.set_ylim(0, layers + 1)
            axes.set_title(
                f"{layers} layers, {memory} tensors ({name}): {runs} runs", fontsize="small"
            )
            axes.tick_params(labelsize="x-small")
            print(f"{label:>16} {layers:7} {memory:8} {name:>12} {runs:8} {2 * layers:9}")
    for axes in rows[:, 0]:
        axes.set_ylabel("layer")
    for axes in rows[-1]:
        axes.set_xlabel("operators run")
    figure.suptitle(
        f"{label}: values in memory (blue: first copy, yellow: computed again, red: gradient)",
        fontsize="medium",
    )
    return figure


def memories(layers: int) -> tuple[tuple[int, str], tuple[int, str]]:
    """The two memories of section 3 of the DTR paper, with what they are called."""
    return (
        (2 * math.ceil(math.sqrt(layers)), "2 √N"),
        (math.ceil(math.log2(layers)) + 4, "log2 N + 4"),
    )


# Files


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a PNG without the name and version of what made it, so that it is the same file."""
    figure.savefig(path, dpi=100, metadata={"Software": None})
    print(f"{path.name}: {path.stat().st_size // 1024} kB")


def make_pictures(folder: Path, quick: bool) -> None:
    """Write all pictures into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    shares = (0.8, 0.4) if quick else tuple(percent / 100 for percent in range(95, 4, -5))
    panels = {}
    for title, program in (
        ("transformer, 6 layers", transformer(1 if quick else 6)),
        ("unit chain, 64 layers", unit_chain(8 if quick else 64)),
    ):
        panels[title] = pareto(program, shares)
        print_curves(title, panels[title])
    save(draw_pareto(panels), folder / "pareto.png")

    print(f"{'':16} {'layers':>7} {'tensors':>8} {'':12} {'runs':>8} {'baseline':>9}")
    chains = (16, 20) if quick else (80, 128, 200)
    for name, file, planner in (
        ("DTR, h_dtr", "dtr", make_planner("dtr", heuristic="h_dtr")),
        ("treeverse", "treeverse", make_planner("treeverse", way="linearized", window=1)),
    ):
        save(draw_traces(planner, chains, name), folder / f"trace-{file}.png")
    draw_all(folder, read_rows(_RIVALS), save)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=_FOLDER, help="where to write them")
    parser.add_argument("--quick", action="store_true", help="small programs, nothing is kept")
    args = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is missing; pip install 'dtrcompile[demo]'")
        return 1
    if args.quick:
        with tempfile.TemporaryDirectory() as folder:
            make_pictures(Path(folder), quick=True)
    else:
        make_pictures(args.folder, quick=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
