"""How does planning time grow?  A planner on transformer-like training steps.

    python -m bench.planner_scaling [--planner auto] [--quick] [--out results.jsonl]

Synthetic steps, and GPT-2's as captured (width 768, 8 x 1,024 tokens; where `transformers` is
installed).  Prints a table and the fitted exponents of time over operators; appends JSON lines with
the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dtrcompile.passes.errors import InfeasibleBudgetError
from dtrcompile.passes.planning.planners import keep_all, make_planner
from dtrcompile.passes.program.program import Program
from dtrcompile.passes.program.replay import replay
from workloads.synthetic import transformer

# 12, 48 and 96 layers are GPT-2 small, XL and twice that; 910 layers are 20,020 operators.
_LAYERS = (5, 12, 48, 96, 137, 455, 910)
_QUICK_LAYERS = (5, 12)
_GPT2_LAYERS = (12, 48, 96)
_QUICK_GPT2_LAYERS = (1, 2)
_SHARES = (0.5, 0.25)


def gpt2(layers: int) -> Program:
    """A training step of GPT-2 small with so many layers, captured."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from bench.zoo import LanguageModelLoss
    from workloads.captured import captured_of

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False))
    module = LanguageModelLoss(model, "ForCausalLM").to_empty(device="cpu")
    tokens = torch.zeros(8, 1024, dtype=torch.long)
    return captured_of(module, tokens, tokens.clone()).program


def programs(quick: bool) -> Iterator[tuple[str, Program]]:
    """Name of the family, program; the smallest of each family first."""
    for layers in _QUICK_LAYERS if quick else _LAYERS:
        yield "synthetic", transformer(layers)
    if importlib.util.find_spec("transformers") is None:
        print("GPT-2 is skipped: transformers is not installed")
        return
    for layers in _QUICK_GPT2_LAYERS if quick else _GPT2_LAYERS:
        yield "gpt2", gpt2(layers)


def machine() -> dict[str, object]:
    """What the times were taken on."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": platform.system(),
    }


def most_mb() -> int:
    """The most memory that this process has had, in MB; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="up to a few hundred operators")
    parser.add_argument("--planner", default="auto", help="a name in planners.PLANNERS")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each; the median counts")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    args = parser.parse_args()
    print(
        f"{'steps':10}{'operators':>10}{'share':>8}{'overhead':>10}"
        f"{'cpu s':>9}{'wall s':>9}{'ms/op':>8}{'MB':>7}"
    )
    points: dict[tuple[str, float], list[tuple[int, float]]] = defaultdict(list)
    for family, program in programs(args.quick):
        n = len(program.operators)
        baseline_bytes = replay(program, keep_all(program))[0].peak_bytes
        for share in _SHARES:
            planner = make_planner(args.planner)
            runs = []
            overhead = math.nan
            for _ in range(1 if args.quick else args.repeats):
                wall, cpu = time.perf_counter(), time.process_time()
                try:
                    plan = planner.plan(program, int(share * baseline_bytes))
                except InfeasibleBudgetError:
                    plan = None
                runs.append((time.process_time() - cpu, time.perf_counter() - wall))
                if plan is not None:
                    overhead = replay(program, plan)[1].overhead
            cpu_s, wall_s = sorted(runs)[len(runs) // 2]
            if not math.isnan(overhead):
                points[family, share].append((n, cpu_s))
            print(
                f"{family:10}{n:>10}{share:>8}{overhead:>10.4f}{cpu_s:>9.2f}{wall_s:>9.2f}"
                f"{1e3 * cpu_s / n:>8.2f}{most_mb():>7}",
                flush=True,
            )
            if args.out is not None:
                record = {
                    "bench": "planner_scaling",
                    "planner": args.planner,
                    "steps": family,
                    "operators": n,
                    "share": share,
                    "overhead": None if math.isnan(overhead) else overhead,
                    "cpu_s": cpu_s,
                    "wall_s": wall_s,
                    "process_mb": most_mb(),
                    **machine(),
                }
                with args.out.open("a") as lines:
                    lines.write(json.dumps(record) + "\n")
    for (family, share), measured in points.items():
        if len(measured) < 2:
            continue
        operators, seconds = np.log(np.array(measured)).T
        slope, _ = np.polyfit(operators, seconds, 1)
        print(f"{family}, share {share}: time grows as operators^{slope:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
