"""Work on a graph in another process, while this process works on a second graph.

The other process is forked, so it has the graphs and all of PyTorch at once.  A graph is lowered
there, or compiled (`compiled_beside`).  The other process says what comes of it in lines that it
writes into a pipe, a wrapper as JSON.  Where it fails, or where the wrapper cannot be written as
JSON, this process does the work itself, with the same result.

The other process lets go of every file that it inherited.  Where another thread starts a program
at that moment, among these files are the ends of its pipes: the thread would wait until the forked
process ends, with its locks, for which the forked process and this one may wait in turn.

It takes a lock of its own in place of one that forked processes share (tqdm's, which PyTorch takes
whenever it interprets a graph): a process that is ended while it holds a shared lock never gives it
back.

Where memory runs out, Linux ends the other process, not this one.

No process is forked once an accelerator or `torch.distributed` is in use: CUDA cannot be used after
a fork, and a fork may move the memory that a network card was told of.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn
from unittest import mock

import torch

from dtrcompile.passes.inductor.dry_run import Wrapper
from dtrcompile.passes.torch_private import inductor_config

# Lowering the largest graphs takes minutes, and a process that is stuck only costs time: it is
# waited for so many times as long as this process took for its own graph.
_PATIENCE = 5.0
_LEAST_PATIENCE_S = 30.0


def may_fork() -> bool:
    """Whether a graph can be lowered in a process of its own, and whether that would be faster."""
    if inductor_config.compile_threads < 2 or len(os.sched_getaffinity(0)) < 2:
        return False
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not (is_distributed or torch.cuda.is_initialized() or torch.xpu.is_initialized())


Say = Callable[[bytes], None]


class OtherProcess:
    """A forked process, and what it says.

    Args:
        work: what the process does, given how it says a line.
        patience_s: how long it may take at least, until it counts as stuck.

    Raises:
        OSError: if there can be no other process.
    """

    def __init__(self, work: Callable[[Say], None], patience_s: float = 0.0) -> None:
        self._patience_s = patience_s
        self._said = bytearray()
        self._started_s = time.perf_counter()
        self._pipe, pipe = os.pipe()
        n_threads = torch.get_num_threads()
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns of threads that hold locks; the wait for the process is bounded.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._process = os.fork()
        except OSError:
            os.close(self._pipe)
            os.close(pipe)
            raise
        if self._process == 0:
            _write_and_exit(pipe, work, n_threads)
        os.close(pipe)

    def line(self) -> bytes | None:
        """The next line that the process says; None if it ended without, or is stuck."""
        since_start_s = time.perf_counter() - self._started_s
        patience_s = max(_LEAST_PATIENCE_S, self._patience_s, _PATIENCE * since_start_s)
        deadline_s = time.perf_counter() + patience_s
        while b"\n" not in self._said:
            left_s = deadline_s - time.perf_counter()
            if left_s <= 0 or not select.select([self._pipe], [], [], left_s)[0]:
                return None
            part = os.read(self._pipe, 1 << 20)
            if not part:
                return None
            self._said += part
        line, _, self._said = self._said.partition(b"\n")
        return bytes(line)

    def close(self) -> None:
        """End the process, whether it is done or not."""
        os.close(self._pipe)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # somebody waits for all processes
            os.waitpid(self._process, 0)


class GraphBeside(OtherProcess):
    """A process that works on a graph, and says its wrapper.

    Args:
        key: what the wrapper is made from, as `lowering` identifies it.
        work: as of `OtherProcess`; the wrapper is a line of what it says (`as_line`).
        patience_s: as of `OtherProcess`.

    Raises:
        OSError: if there can be no other process.
    """

    def __init__(self, key: object, work: Callable[[Say], None], patience_s: float = 0.0) -> None:
        self.key = key
        super().__init__(work, patience_s)

    def wrapper(self) -> Wrapper | None:
        """The wrapper, once it is written; None if the process failed or is stuck."""
        return of_line(self.line())


class LoweredBeside(GraphBeside):
    """A graph that another process lowers.

    Args:
        key: as of `GraphBeside`.
        lower: gives the wrapper; it is called in the other process.

    Raises:
        OSError: if there can be no other process.
    """

    def __init__(self, key: object, lower: Callable[[], Wrapper]) -> None:
        super().__init__(key, lambda say: say(as_line(lower())))


def as_line(wrapper: Wrapper) -> bytes:
    """A wrapper as the other process says it: empty if it cannot be said."""
    return b"" if wrapper.constants else json.dumps(wrapper.entry()).encode()


def of_line(line: bytes | None) -> Wrapper | None:
    """The wrapper that was said."""
    return Wrapper.of_entry(json.loads(line)) if line else None


def _write_and_exit(pipe: int, work: Callable[[Say], None], n_threads: int) -> NoReturn:
    """What the other process does; it exits without flushing or closing what it inherited."""
    status = 1
    try:
        _let_go_of_files(pipe)
        _share_no_lock()
        _be_ended_first()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches both
        # OpenMP's threads are not there after a fork.  Inductor must see their number all the same.
        torch.set_num_threads(1)
        with mock.patch.object(torch, "get_num_threads", lambda: n_threads):
            work(functools.partial(_say, pipe))
        status = 0
    except BaseException:
        pass  # the other process does the work itself, and says what is wrong with it
    finally:
        os._exit(status)


def _say(pipe: int, line: bytes) -> None:
    left = memoryview(line + b"\n")
    while left:
        left = left[os.write(pipe, left) :]


def _be_ended_first() -> None:
    """Where memory runs out, let the kernel end this process, whose work another one can do."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _share_no_lock() -> None:
    """Give tqdm a lock that is this process's alone."""
    tqdm = sys.modules.get("tqdm.std")
    if tqdm is not None:
        tqdm.tqdm.set_lock(threading.RLock())


def _let_go_of_files(but: int) -> None:
    """Put `os.devnull` in the place of every open file but the standard streams and one more.

    The numbers stay in use: an object that closes its own file later closes no other.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        file = int(name)
        if file > 2 and file not in (but, null):
            os.dup2(null, file, inheritable=False)
    os.close(null)
