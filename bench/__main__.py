"""Every benchmark, small: that it runs and that what it judges holds, in seconds each.

    python -m bench [name ...] [--jobs 2]

Each runs with ``--quick`` in a process of its own, which is forked from one that has imported
PyTorch and Inductor: imports cost more than most of what these benchmarks do.  Exits with 1 if any
of them does not exit with 0.
"""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

# What most of the benchmarks import; nothing in it starts a thread.
_SHARED = (
    "bench.measure",
    "workloads.kernels",
    "workloads.models",
    "dtrcompile.backend",
    "torch._inductor.compile_fx",
)


def benchmarks() -> list[str]:
    """The modules of this folder that can be run, by name."""
    return sorted(
        path.stem
        for path in Path(__file__).parent.glob("[!_]*.py")
        if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
    )


def start(name: str, output: Path) -> int:
    """Fork a process that runs a benchmark and writes into a file; returns its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        _run(name, output)
    return pid


def _run(name: str, output: Path) -> NoReturn:
    status: object = 1
    try:
        with output.open("wb") as file:
            os.dup2(file.fileno(), sys.stdout.fileno())
            os.dup2(file.fileno(), sys.stderr.fileno())
        from workloads.kernels import compiled_lightly

        sys.argv = [name, "--quick"]
        with compiled_lightly():
            runpy.run_module(f"bench.{name}", run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:  # whatever it is, it must not return into the copy of the caller
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exits with 1 if a benchmark failed."""
    description = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser("python -m bench", description=description)
    parser.add_argument("names", nargs="*", metavar="name", help="all by default")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="at once; default: one a core"
    )
    arguments = parser.parse_args(argv)
    known = benchmarks()
    for name in arguments.names:
        if name not in known:
            parser.error(f"unknown benchmark {name!r}; there are: {', '.join(known)}")
    for name in _SHARED:
        importlib.import_module(name)
    waiting = arguments.names or known
    running: dict[int, str] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < max(1, arguments.jobs):
                name, *waiting = waiting
                running[start(name, Path(folder, name))] = name
            pid, status = os.wait()
            name = running.pop(pid)
            text = Path(folder, name).read_text(encoding="utf-8", errors="replace")
            print(f"== bench.{name} --quick\n{text}", end="", flush=True)
            if status:
                failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
