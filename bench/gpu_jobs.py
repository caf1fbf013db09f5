"""The processes of `bench.gpu`, each with a limit of its time.

They run one after the other, or side by side: then what is timed waits until nothing else uses the
device (`bench.measure.device_turn`).  A process prints what it found line by line, and each line
becomes a row at once.  One that crashes, that says nothing for too long, or whose CUDA context is
lost, ends at that row; what is left of its rows is measured in a new process.  Where the time of a
part is over, what was being measured is left for the next run.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu_rows import ROOT, Row, RowFile
from bench.measure import TURNS, say

BEGIN, ROW = "begin ", "row "
"""How a process says that it begins with a row, and what it found."""

# What takes longer is stuck: the longest is one plan and one compilation.
STUCK_S = 300.0
# A process imports PyTorch, and has to compile something.
_LEAST_S = 20.0
_POLL_S = 0.5
# After such an error, everything else that a process does on the device fails.
_LOST_CONTEXT = ("AcceleratorError", "CUDA error", "cudaError")


@dataclass(frozen=True)
class Job:
    """A process and the rows that it makes.

    Attributes:
        settings: of all of its rows.
        names: of its rows, in their order; there may be others.
        command: what makes the rows, given the names of those that are there.
        environment: variables that are set for it.
        is_on_device: others run beside those that are.
        is_alone: nothing else may use the device meanwhile.
        is_timed: a row that trained is final when it says how long a step takes.
    """

    part: str
    settings: Mapping[str, Any]
    names: tuple[str, ...]
    command: Callable[[Collection[str]], Sequence[str]]
    environment: Mapping[str, str] = field(default_factory=dict)
    is_on_device: bool = True
    is_alone: bool = True
    is_timed: bool = False

    @property
    def title(self) -> str:
        return Row(self.part, self.settings, "", {}).title.rstrip()


@dataclass(frozen=True)
class Runner:
    """Runs jobs until their rows are there, or the time is over.

    Attributes:
        log: a file for what the processes print beside their rows.
        retry: rows that failed are measured again.
        side_by_side: so many processes run at the same time, where none of them is to be alone.
    """

    file: RowFile
    log: Path
    retry: bool = False
    side_by_side: int = 1

    @property
    def _turns(self) -> dict[str, str]:
        """What processes side by side take turns by, as a variable of theirs."""
        return {TURNS: str(self.log.with_suffix(".turns"))} if self.side_by_side > 1 else {}

    def run(self, jobs: Sequence[Job], limit_s: float) -> list[Job]:
        """Run them in their order; returns those that are not finished.

        Those that need no device run in lines of their own, beside the others.
        """
        deadline_s = time.monotonic() + limit_s
        alone = [job for job in jobs if job.is_on_device and job.is_alone]
        together = [job for job in jobs if job.is_on_device and not job.is_alone]
        others = [job for job in jobs if not job.is_on_device]
        with ThreadPoolExecutor(self.side_by_side) as beside:
            elsewhere = [beside.submit(self._finish, job, deadline_s) for job in others]
            with ThreadPoolExecutor(self.side_by_side) as lines:
                counted = [lines.submit(self._finish, job, deadline_s) for job in together]
            are_finished = [future.result() for future in counted]
            are_finished += [self._finish(job, deadline_s) for job in alone]
            are_finished += [future.result() for future in elsewhere]
        all_jobs = (*together, *alone, *others)
        return [job for job, done in zip(all_jobs, are_finished, strict=True) if not done]

    def _finish(self, job: Job, deadline_s: float) -> bool:
        """Whether all rows of a job are there in the end."""
        measured = self.file.names(job.part, job.settings, retry=self.retry)
        while not set(job.names) <= measured:
            left_s = deadline_s - time.monotonic()
            if left_s < _LEAST_S:
                return False
            say(f"{job.part}: {job.title}")
            new = self._run_process(job, measured, deadline_s)
            if not new - measured:
                return False
            measured |= new
        return True

    def _run_process(self, job: Job, measured: Collection[str], deadline_s: float) -> set[str]:
        """One process of a job; returns the names of the rows that need not be measured again."""
        at = _At([name for name in job.names if name not in measured])
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log, _started(job, measured, log, self._turns) as process:
            for line in _lines(process, deadline_s):
                if line is None:
                    at.measured.add(self._end(job, at.name, "stuck", f"after {STUCK_S:.0f} s"))
                elif line.startswith(BEGIN):
                    at.begin(line.removeprefix(BEGIN).rstrip())
                elif line.startswith(ROW) and self._keep(job, line, at):
                    return at.measured
            status = process.poll()
        if status and not set(job.names) <= at.measured.union(measured):
            reason = f"the process ended with status {status}: see {self.log.name}"
            at.measured.add(self._end(job, at.name, "crashed", reason))
        return at.measured

    def _keep(self, job: Job, line: str, at: _At) -> bool:
        """Write a row; returns whether the process can make no other."""
        row = json.loads(line.removeprefix(ROW))
        name = row.pop("name", None) or f"{row['method']} {row['setting']}".rstrip()
        status = row.get("status", "ok")
        if job.is_timed and status == "ok" and row["step_s"] is None:
            row["is_final"] = False
        self.file.add(Row(job.part, job.settings, name, row))
        at.end(name, is_final=row.get("is_final", True))
        reason = str(row.get("reason") or "")
        say(f"  {name}: {status} {reason}".rstrip())
        return any(text in reason for text in _LOST_CONTEXT)

    def _end(self, job: Job, name: str, status: str, reason: str) -> str:
        """Write a row about what went wrong; returns its name."""
        say(f"  {name}: {status} {reason}")
        self.file.add(Row(job.part, job.settings, name, {"status": status, "reason": reason}))
        return name


@dataclass
class _At:
    """Where a process is.

    Attributes:
        waiting: names of rows that are to come, in their order.
        measured: names of rows that need not be measured again.
    """

    waiting: list[str]
    measured: set[str] = field(default_factory=set)
    _last: str = ""

    @property
    def name(self) -> str:
        """The row that it is at; the last one once all are there."""
        return self.waiting[0] if self.waiting else self._last

    def begin(self, name: str) -> None:
        if name in self.waiting:
            self.waiting.remove(name)
        self.waiting.insert(0, name)

    def end(self, name: str, *, is_final: bool) -> None:
        self._last = name
        if name in self.waiting:
            self.waiting.remove(name)
        if is_final:
            self.measured.add(name)


@contextlib.contextmanager
def _started(
    job: Job, measured: Collection[str], log: Any, turns: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """A process; at the end of the block, it and all that it started have ended."""
    process = subprocess.Popen(
        job.command(measured),
        cwd=ROOT,
        env={**os.environ, **job.environment, **turns},
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        # A group of its own, in which the processes are that compile for it.
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _lines(process: subprocess.Popen[str], deadline_s: float) -> Iterator[str | None]:
    """What a process prints, line by line, until it ends or the time is over.

    Yields:
        None, at last, if it said nothing for too long.
    """
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.put(line)

    threading.Thread(target=read, daemon=True).start()
    said_s = time.monotonic()
    while time.monotonic() < deadline_s:
        try:
            yield lines.get(timeout=_POLL_S)
            said_s = time.monotonic()
        except queue.Empty:
            # (What it started may still have its output open.)
            if process.poll() is not None:
                return
            if time.monotonic() - said_s > STUCK_S:
                yield None
                return
