"""Two training jobs share the memory of one device, and each takes all of it while it is alone.

python docs/examples/shared_device.py

A job that starts gets its part as soon as the others have given theirs up, between two of their
steps; a job that ends leaves its part to the others.  Budgets that a job had before are not planned
or compiled again.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import dtrcompile

TOTAL_BYTES = 24 * 2**20
# So that a job does not lose its part whenever another one comes or goes for a moment.
POLL_S = 0.05


class Share:
    """This process's part of a number of bytes, agreed on with other processes through a folder.

    Each process has a file there that says how many bytes it holds to.
    """

    def __init__(self, folder: Path, total_bytes: int) -> None:
        self.folder, self.total_bytes = folder, total_bytes
        self.own = folder / f"{os.getpid()}.json"
        self.bytes = 0
        self._hold_to(0)

    def _hold_to(self, n_bytes: int) -> None:
        unfinished = self.own.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(n_bytes))
        unfinished.replace(self.own)
        self.bytes = n_bytes

    def _others(self) -> list[int]:
        """What each other process that is alive holds to."""
        found = []
        for path in self.folder.glob("*.json"):
            if path != self.own and Path(f"/proc/{path.stem}").exists():
                found.append(int(json.loads(path.read_text())))
        return found

    def current(self) -> int:
        """The bytes to hold to from here on; waits until the others leave at least a part."""
        while True:
            others = self._others()
            part = self.total_bytes // (1 + len(others))
            free = self.total_bytes - sum(others)
            if self.bytes > part:
                self._hold_to(part)  # somebody else is waiting for it
            elif free >= part:
                self._hold_to(part)
            if self.bytes:
                return self.bytes
            time.sleep(POLL_S)

    def leave(self) -> None:
        self.own.unlink(missing_ok=True)


class Net(nn.Module):
    def __init__(self, width: int = 128, blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def job(name: str, folder: Path, begins: object, ends: object) -> None:
    """Train until ``ends`` is set, and set ``begins`` after three steps."""
    torch.manual_seed(0)
    share = Share(folder, TOTAL_BYTES)
    model = Net()
    compiled = torch.compile(model, backend="dtr", options={"budget": share.current()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(768, 128)
    steps = steps_within = budget = 0
    while not (ends.is_set() and steps_within >= 2):
        if share.current() != budget:
            budget, steps_within = share.bytes, 0
            dtrcompile.set_budget(model, budget)
        optimizer.zero_grad()
        # The first step within a budget compiles; the second is looked at.
        with dtrcompile.watch() if steps_within == 1 else contextlib.nullcontext() as seen:
            compiled(x).backward()
        optimizer.step()
        if seen is not None:
            held = f"{seen.observed_bytes / 2**20:.1f} MiB"
            print(f"{name}: budget {budget / 2**20:.0f} MiB, a step holds {held}", flush=True)
        steps, steps_within = steps + 1, steps_within + 1
        if steps == 3:
            begins.set()
    share.leave()


def wait_for(event: object, *jobs: multiprocessing.Process) -> None:
    """Until a job has set the event; where one has failed instead, all of them end."""
    while not event.wait(POLL_S):
        if any(job.exitcode for job in jobs):
            for job in jobs:
                job.kill()
            raise SystemExit("a job has failed")


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        first_runs, second_runs, first_ends, second_ends = (context.Event() for _ in range(4))
        first = context.Process(target=job, args=("first", Path(folder), first_runs, first_ends))
        second = context.Process(
            target=job, args=("second", Path(folder), second_runs, second_ends)
        )
        first.start()
        wait_for(first_runs, first)
        second.start()
        wait_for(second_runs, first, second)
        second_ends.set()
        second.join()
        first_ends.set()
        first.join()


if __name__ == "__main__":
    main()
