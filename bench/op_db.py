"""How many of PyTorch's operators run at the smallest budget and agree with eager PyTorch.

    python -m bench.op_db [--quick] [name ...]

One line for each operator that does not, then counts.  ``--quick`` runs a few operators.  The
exit status is 1 if any operator differs.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter

from workloads import op_db


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="every hundredth operator")
    parser.add_argument("names", nargs="*", help="operators, by name; all by default")
    arguments = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    names = arguments.names or list(op_db.operators())[:: 100 if arguments.quick else 1]
    for name in (n for n in names if n in op_db.NOT_COMPILED):
        print(f"{name}: left out: {op_db.NOT_COMPILED[name]}")
    names = [n for n in names if n not in op_db.NOT_COMPILED]

    counts: Counter[str] = Counter()
    start = time.monotonic()
    for name in names:
        try:
            outcome = op_db.check(name)
        except Exception as error:
            counts["failed"] += 1
            text = " ".join(str(error).split())[:300]
            print(f"{name}: {type(error).__name__}: {text}", flush=True)
            continue
        counts["passed"] += 1
        counts["of these with recomputed operators"] += outcome.recomputed > 0
        if outcome.breaks:
            counts["of these with a graph break"] += 1
            print(f"{name}: {outcome.breaks} graph breaks", flush=True)
    for what, count in counts.items():
        print(f"{count:5} {what}")
    print(f"{len(names)} operators in {time.monotonic() - start:.0f} s")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
