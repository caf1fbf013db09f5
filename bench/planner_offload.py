"""What does a way to the host save?  Overhead against the budget, with no link and with two.

Planner ``offload`` on `auto`: without a link, which is `auto`; over one like PCIe 4 x16 (25 GB/s in
each direction); over one like NVLink-C2C (400 GB/s).  Overhead is planned cost, waits for copies
included, over baseline cost; ``-`` means that no plan was found.  Beside it: what compute waits
(stall) and what is copied to the host, as shares of the baseline's cost and peak.

The transformer is `synthetic.transformer` with its formula's units set to a model of width 1024 on
8192 tokens in bf16: an activation is 16 MiB, and a unit of cost 3500 ns, which puts the products of
its MLP at 150 TFLOP/s.  The public graphs are DTR's own logs, with the times and bytes in them (a
Titan V); they are left out where they are absent (see `public_graphs.shared_data`).

    python -m bench.planner_offload [--quick] [--out results.jsonl]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.planning.planners import keep_all, make_planner
from dtrcompile.passes.program.host_link import HostLink
from dtrcompile.passes.program.program import Program
from dtrcompile.passes.program.replay import replay
from workloads.public_graphs import from_simrd_log, shared_data
from workloads.synthetic import transformer

_ACTIVATION_BYTES = 8192 * 1024 * 2
_UNIT_NS = 3500
_LATENCY_NS = 10_000
LINKS: dict[str, HostLink | None] = {
    "none": None,
    "25 GB/s": HostLink(25.0, _LATENCY_NS),
    "400 GB/s": HostLink(400.0, _LATENCY_NS),
}
_RATIOS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15)
_LOGS = ("resnet32", "transformer")


@dataclass(frozen=True, slots=True)
class Row:
    """One program at one budget over one link; the costs are None where no plan was found."""

    program: str
    ratio: float
    link: str
    overhead: float | None
    stall: float | None
    copied: float | None
    planning_s: float


def sized_transformer(layers: int) -> Program:
    """See the module docstring."""
    program = transformer(layers, _ACTIVATION_BYTES)
    operators = tuple(replace(op, cost_ns=_UNIT_NS * op.cost_ns) for op in program.operators)
    return replace(program, operators=operators, name=program.name)


def programs(quick: bool) -> Iterator[Program]:
    """The programs, one after the other."""
    yield sized_transformer(2 if quick else 24)
    data = shared_data()
    if data is None:
        print("no shared data beside the repository; set DTRCOMPILE_SHARED", file=sys.stderr)
        return
    if not quick:
        for name in _LOGS:
            yield from_simrd_log(data / "simrd" / f"{name}.log.gz")


def measure(program: Program, ratio: float, link: str, baseline_bytes: int) -> Row:
    """Plan and replay."""
    start = time.perf_counter()
    try:
        plan = make_planner("offload", host_link=LINKS[link]).plan(
            program, int(ratio * baseline_bytes)
        )
    except InfeasibleBudgetError:
        return Row(program.name, ratio, link, None, None, None, time.perf_counter() - start)
    planning_s = time.perf_counter() - start
    _, stats = replay(program, plan)
    return Row(
        program.name,
        ratio,
        link,
        stats.overhead,
        stats.stall_ns / program.cost_ns,
        stats.offloaded_bytes / baseline_bytes,
        planning_s,
    )


def cells(row: Row) -> str:
    """A row's part of the table."""
    if row.overhead is None or row.stall is None or row.copied is None:
        return f"{'-':>10}{'':>8}{'':>8}"
    return f"{row.overhead:>10.4f}{row.stall:>8.3f}{row.copied:>8.2f}"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small program and few budgets")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    args = parser.parse_args()
    for program in programs(args.quick):
        baseline_bytes = replay(program, keep_all(program))[0].peak_bytes
        print(f"{program.name}: {len(program.operators)} operators")
        print(f"{'budget':>8}" + "".join(f"{name:>10}{'stall':>8}{'copied':>8}" for name in LINKS))
        for ratio in (0.7, 0.4) if args.quick else _RATIOS:
            rows = [measure(program, ratio, link, baseline_bytes) for link in LINKS]
            seconds = " ".join(f"{row.planning_s:.1f}" for row in rows)
            print(
                f"{ratio:>8.0%}" + "".join(cells(r) for r in rows) + f"   {seconds} s", flush=True
            )
            if args.out is not None:
                with args.out.open("a") as lines:
                    lines.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
