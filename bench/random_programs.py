"""Do all planners hold their promises on ten thousand random programs?

The checks of `workloads.random_programs` from plain seeds, so that a failure is one number to
repeat.

    python -m bench.random_programs --count 10000 [--seed 0] [--operators 14] [--quick]
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback

from workloads.random_programs import check_everything


def main() -> int:
    """Command line; exits with 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--count", type=int, default=10_000, help="programs to check")
    parser.add_argument("--seed", type=int, default=0, help="of the first; then one more each")
    parser.add_argument("--operators", type=int, default=14, help="most operators of a program")
    parser.add_argument("--quick", action="store_true", help="ten programs")
    args = parser.parse_args()
    count = 10 if args.quick else args.count
    failed: list[int] = []
    start = time.perf_counter()
    for done in range(count):
        seed = args.seed + done
        try:
            check_everything(random.Random(seed).randint, args.operators)
        except Exception:  # any exception is a finding, to be printed and counted
            failed.append(seed)
            print(f"\nseed {seed}:", flush=True)
            traceback.print_exc(limit=-3)
        if sys.stderr.isatty() or (done + 1) % 1000 == 0:
            elapsed_s = time.perf_counter() - start
            print(
                f"\r{done + 1}/{count} programs, {len(failed)} failed, {elapsed_s:.0f} s",
                end="\n" if not sys.stderr.isatty() else "",
                file=sys.stderr,
                flush=True,
            )
    elapsed_s = time.perf_counter() - start
    print(f"\n{count} programs, {len(failed)} failed, {elapsed_s:.1f} s; seeds: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
