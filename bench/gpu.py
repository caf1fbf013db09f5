"""Does what is promised for CUDA hold on the GPU that is here?

One command that settles it in an hour that somebody lends a GPU for, with nothing but PyTorch:

    python -m bench.gpu
    python -m bench.gpu --parts promise --limit-s 480 --out folder --side-by-side 6
    python -m bench.gpu --rows folder/gpu-nvidia-h100-80gb-hbm3.jsonl     # judge, measure nothing
    python -m bench.gpu --quick                  # no GPU: plans a step for one that is not here

The parts, in the order of their worth:

* promise: models that fill a few GB, in bf16 autocast and float32, at four budgets, with expandable
  segments and without: the allocator's peak against budget and promise; gradients against float64;
  and whether `dtrcompile.plan` says the same without the device.
* tests: those of tests/gpu, if pytest is there.
* rivals: checkpointed blocks, selective checkpoints and ``activation_memory_budget``, each with a
  step of dtr at the same peak; the two take turns.
* largest: the largest batch with Adam in 16, 24, 40 and 80 GB, and how fast it trains.
* compile: the first step at 50 % and by plain ``torch.compile``, with empty caches and again.
* costs: what operators take, against what the planner thinks that they take.

Each row is written as soon as it is known, and rows that are there for the same device, release and
source are not measured again: a run that was stopped goes on.  Every process frees the device when
it ends, and one that crashes costs one row.  Exits with 1 if a budget or a promise was exceeded, a
gradient or a forecast is wrong, or something failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench.gpu_jobs import Runner
from bench.gpu_parts import RIVALS, Where, jobs_of
from bench.gpu_rows import (
    PARTS,
    ROOT,
    RowFile,
    file_name,
    identity_of_machine,
    machine,
    read,
    verdict,
)
from bench.measure import say, use_kernel_cache
from bench.plain_models import PLAIN
from dtrcompile.passes.target.devices import TARGETS

LIMIT_S = 480.0
QUICK_TARGET, QUICK_LIMIT_S = "H100-80GB", 300.0
RESULTS = ROOT / "bench" / "results"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; lists come apart."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--parts", help=f"comma-separated, of: {', '.join(PARTS)}; default: all")
    parser.add_argument("--models", help=f"comma-separated, of: {', '.join(PLAIN)}; default: all")
    parser.add_argument("--rivals", help=f"comma-separated, of: {', '.join(RIVALS)}; default: all")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds of each part")
    parser.add_argument("--total-s", type=float, help="seconds of all parts together")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the rows and the log")
    parser.add_argument(
        "--side-by-side",
        type=int,
        default=1,
        help="processes at a time, of those that are not timed; default: 1",
    )
    parser.add_argument(
        "--forecast-for",
        choices=sorted(TARGETS),
        help="only what dtrcompile.plan says of this GPU, which need not be here",
    )
    parser.add_argument("--no-forecasts", action="store_true", help="only what the GPU says")
    parser.add_argument("--retry", action="store_true", help="measure again what failed")
    parser.add_argument("--rows", type=Path, help="judge the rows of a file, measure nothing")
    parser.add_argument("--quick", action="store_true", help="plan a step for a GPU, run nothing")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: try the script, all small"
    )
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    lists = (("parts", PARTS, PARTS), ("models", PLAIN, ()), ("rivals", RIVALS, ()))
    for name, allowed, default in lists:
        given = getattr(arguments, name)
        chosen = given.split(",") if given else default
        setattr(arguments, name, tuple(chosen))
        for one in chosen:
            if one not in allowed:
                parser.error(f"unknown name {one!r}; allowed: {', '.join(allowed)}")
    if arguments.forecast_for is not None:
        arguments.parts = ("promise",)
    return arguments


def run(arguments: argparse.Namespace, file: RowFile, where: Where) -> int:
    """Measure what is not there yet, part by part, as long as there is time; then as `judge`."""
    log = file.path.with_suffix(".log")
    runner = Runner(file, log, arguments.retry, arguments.side_by_side)
    total_s = arguments.total_s or float("inf")
    start_s, status = time.monotonic(), 0
    for part in arguments.parts:
        left_s = total_s - (time.monotonic() - start_s)
        unfinished = runner.run(jobs_of(part, where), min(arguments.limit_s, left_s))
        if unfinished:
            say(f"{part}: not finished: {len(unfinished)} processes are left for the next run")
        status |= judge(file, (part,))
    return status


def judge(file: RowFile, parts: Sequence[str]) -> int:
    """Print a line for each part; 1 if something is broken, and then what."""
    verdicts = {part: verdict(part, file.rows(part)) for part in parts}
    for part, found in verdicts.items():
        print(f"{part}: {found.text}", flush=True)
        for text in found.broken:
            print(f"  BROKEN {text}", flush=True)
    return int(any(found.broken for found in verdicts.values()))


def judge_all(path: Path, parts: Sequence[str]) -> int:
    """As `judge`, for each source and release that the rows of a file were measured with."""
    machines = {identity_of_machine(row.machine): row.machine for row in read(path)}
    status = 0
    for found in machines.values():
        file = RowFile(path, found)
        print(f"{found['device']}, torch {found['torch']}, source {found['source'][:8]}:")
        status |= judge(file, [part for part in parts if file.rows(part)])
    return status


def where_of(arguments: argparse.Namespace) -> Where | None:
    """What is measured on; None if that is not here."""
    where = Where(
        arguments.device,
        models=arguments.models,
        rivals=arguments.rivals,
        is_shared=arguments.side_by_side > 1,
    )
    if arguments.forecast_for is not None:
        return replace(where, device="none", target=arguments.forecast_for)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        return None
    if arguments.no_forecasts:
        return where
    device = name_of(where)
    target = next((name for name, of in TARGETS.items() if of.name == device), None)
    return replace(where, target=target)


def name_of(where: Where) -> str:
    """The name of the GPU, or what stands in its place."""
    if where.device == "none":
        assert where.target is not None
        return TARGETS[where.target].name
    return torch.cuda.get_device_name() if where.device == "cuda" else "cpu"


def quick() -> int:
    """Plan a step for a GPU that is not here, by the same way as on it; then nothing is left."""
    where = Where("none", QUICK_TARGET, is_quick=True)
    jobs = jobs_of("promise", where)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, file_name(QUICK_TARGET))
        file = RowFile(path, machine(QUICK_TARGET))
        unfinished = Runner(file, path.with_suffix(".log")).run(jobs, QUICK_LIMIT_S)
        again = RowFile(path, file.machine)
        is_kept = len(again.rows("promise")) == len(jobs[0].names)
        status = judge(again, ("promise",))
        if unfinished:
            print(path.with_suffix(".log").read_text(encoding="utf-8")[-2000:])
    return int(bool(status or unfinished or not is_kept))


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print a verdict for each part, return the exit status."""
    arguments = parse(argv)
    if arguments.worker:
        from bench.gpu_workers import work_as

        return work_as(*arguments.worker)
    if arguments.rows is not None:
        return judge_all(arguments.rows, arguments.parts)
    if arguments.quick:
        return quick()
    use_kernel_cache()
    where = where_of(arguments)
    if where is None:
        print("bench.gpu needs a CUDA device, and there is none; --quick needs none")
        return 1
    device = name_of(where)
    file = RowFile(arguments.out / file_name(device), machine(device))
    return run(arguments, file, where)


if __name__ == "__main__":
    sys.exit(main())
