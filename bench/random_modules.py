"""Do a thousand random modules train alike at any budget?

Each module (`workloads.random_modules`) takes two steps with plain PyTorch, unbudgeted and at
a random budget on the executor that counts bytes: counted bytes as predicted at every step,
results, gradients and buffers bitwise those of the unbudgeted run, and near plain PyTorch's where
nothing is drawn.  Every so many, one runs under Inductor as well: gradients those of plain
``torch.compile``, and the allocator within the promise.  A failure is one seed to repeat, and the
fewest moves at which it still fails.

A module that takes more CPU time than ``--limit-s`` is given up and listed: with symbolic sizes,
PyTorch's own tracing of nested views may take hours.

With ``--sizes`` each module is called with batches of random sizes instead, training and evaluation
mixed, at a random budget in bytes that must hold in every call.

    python -m bench.random_modules --count 1000 [--seed 0] [--inductor-every 50] [--sizes] [--quick]
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import gc
import logging
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import torch

from bench.measure import say
from dtrcompile.passes.torch_private import FakeTensorMode
from workloads.random_modules import (
    MOST_MOVES,
    Case,
    check,
    check_inductor,
    check_sizes,
    check_sizes_inductor,
)

_BUDGETS = ("min", "min", "20%", "30%", "50%", "70%", "90%")


class OutOfTime(BaseException):
    """A module takes too long.  No error, so that nothing on the way handles it."""


@contextlib.contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Raises `OutOfTime` inside of the ``with`` block when the time is up, and again if need be."""

    def stop(_number: int, _frame: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, limit_s, 5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def fewest_moves(seed: int, failing: Callable[[Case], object]) -> int:
    """How much of a failing module is needed to fail."""
    for moves in range(1, MOST_MOVES):
        try:
            failing(Case(seed, moves))
        except Exception:
            return moves
    return MOST_MOVES


def leave_earlier_modules() -> None:
    """Have Python's cycle collector look no more at what there is, which is no garbage.

    The ledger collects garbage often.  PyTorch remembers the fake tensors of earlier modules for
    the whole process, with all that it knows of their symbols: looking at that took half the time.
    """
    torch._dynamo.reset()
    FakeTensorMode.cache_clear()
    gc.collect()
    gc.freeze()


def main() -> int:
    """Command line; exits with 1 if anything was found."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=1000, help="modules to check")
    parser.add_argument("--seed", type=int, default=0, help="of the first; then one more each")
    parser.add_argument(
        "--inductor-every", type=int, default=50, help="one of so many under Inductor; 0: none"
    )
    parser.add_argument("--sizes", action="store_true", help="calls of random sizes")
    parser.add_argument("--limit-s", type=float, default=120, help="CPU seconds a module may take")
    parser.add_argument("--quick", action="store_true", help="two modules, none under Inductor")
    arguments = parser.parse_args()
    count = 2 if arguments.quick else arguments.count
    every = 0 if arguments.quick else arguments.inductor_every
    logging.getLogger("dtrcompile").setLevel(logging.ERROR)
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # several add an embedding's gradients in any order
    seen: collections.Counter[str] = collections.Counter()
    failed: list[str] = []
    given_up: list[int] = []
    start = time.perf_counter()

    def attempt(seed: int, what: str, run: Callable[[Case], object]) -> None:
        leave_earlier_modules()
        try:
            with limited(arguments.limit_s):
                word = run(Case(seed))
            seen[str(word)] += 1
        except OutOfTime:
            given_up.append(seed)
        except Exception:  # any exception is a finding, to be printed and counted
            moves = fewest_moves(seed, run)
            failed.append(f"{seed} ({what}, {moves} moves)")
            print(f"\nseed {seed}, {what}: {Case(seed, moves).made()[0].text}", flush=True)
            traceback.print_exc(limit=-3, file=sys.stdout)

    for done in range(count):
        seed = arguments.seed + done
        budget = _BUDGETS[random.Random(f"budget of {seed}").randrange(len(_BUDGETS))]
        if arguments.sizes:
            draw = random.Random(f"share of {seed}")
            share, dynamic = draw.choice((0, 0.3, 0.4, 0.5, 0.6, 0.8)), draw.choice((None, True))
            varied = functools.partial(check_sizes, share=share, dynamic=dynamic)
            attempt(seed, f"sizes, {share:.0%}", varied)
            if every and done % every == 0:
                varied = functools.partial(check_sizes_inductor, share=share, dynamic=dynamic)
                attempt(seed, f"sizes under Inductor, {share:.0%}", varied)
        else:
            attempt(seed, budget, functools.partial(check, budget=budget))
            if every and done % every == 0:
                compiled = functools.partial(check_inductor, budget=budget)
                attempt(seed, f"Inductor {budget}", compiled)
        if (done + 1) % 25 == 0:
            elapsed_s = time.perf_counter() - start
            say(
                f"{done + 1}/{count} modules, {len(failed)} failed, {len(given_up)} given up,"
                f" {elapsed_s:.0f} s; {dict(sorted(seen.items()))}"
            )
    print(
        f"{count} modules, {len(failed)} failed, {time.perf_counter() - start:.0f} s;"
        f" {dict(sorted(seen.items()))}; seeds: {', '.join(failed) or 'none'};"
        f" given up: {', '.join(map(str, given_up)) or 'none'}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
