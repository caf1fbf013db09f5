"""Graphs that other processes compile, while this process does something else.

AOTAutograd has forward compiled when it is first called, and backward when that is.  As soon as it
is known what they will be, other processes can compile them as this process would, into Inductor's
code cache, where this process then finds them:

- backward, while this process compiles forward and runs it;
- both graphs of a plan that is likely to be chosen, instead of lowering them only to read their
  wrappers: the processes say the wrappers when they are written, and go on to compile the kernels
  while the wrappers are looked at.

The key of Inductor's cache covers all that compiled code depends on.  So a graph that turns out to
be another than was expected is compiled here, as ever.

It is done on a CPU, where a process can be forked (`side_by_side`), for graphs without symbols, and
only if Inductor keeps what it compiles, measures no kernels, and nobody reads what it logs of its
work.  No more of these processes run at a time than there are cores.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from torch import fx

from dtrcompile.passes.inductor import kernels_together
from dtrcompile.passes.inductor.dry_run import Wrapper, wrapper_of
from dtrcompile.passes.inductor.lowering import CompileGraph, Request, identity_of
from dtrcompile.passes.inductor.side_by_side import (
    GraphBeside,
    Say,
    as_line,
    may_fork,
    of_line,
)
from dtrcompile.passes.torch_private import (
    AsyncCompile,
    GraphLowering,
    HigherOrderOperator,
    V,
    inductor_config,
    should_use_remote_fx_graph_cache,
)
from dtrcompile.passes.untraced import untraced

log = logging.getLogger("dtrcompile")

_COMPILED = b"compiled"
# A slow machine lowers and compiles twenty operators a second.
_PATIENCE_S_PER_OPERATOR = 0.05


class CompiledBeside(GraphBeside):
    """A graph that another process lowers, and then compiles.

    Args:
        compile_graph: it is called in the other process.
        n_threads: that run the C++ compiler there.

    Raises:
        OSError: if there can be no other process.
    """

    def __init__(self, request: Request, compile_graph: CompileGraph, n_threads: int) -> None:
        self._identity = request.identity
        self._is_compiled = False
        super().__init__(
            request.key,
            lambda say: _compile(request, compile_graph, n_threads, say),
            _PATIENCE_S_PER_OPERATOR * len(request.graph.graph.nodes),
        )
        _PROCESSES.add(self._process)
        self._end = weakref.finalize(self, _end, self._process, self._pipe)

    def wrapper(self) -> Wrapper | None:
        """As of `GraphBeside`; the process goes on."""
        line = self.line()
        self._is_compiled = line == _COMPILED
        return None if self._is_compiled else of_line(line)

    def wait_for(
        self, gm: fx.GraphModule, example_inputs: Sequence[object], kwargs: Mapping[str, Any]
    ) -> None:
        """Wait until the graph is compiled, if it is the one that was expected; once.

        Args:
            kwargs: what Inductor is told about it.
        """
        if not self._end.alive:
            return
        identity = identity_of(
            gm,
            example_inputs,
            kwargs.get("static_input_idxs", ()),
            is_backward=kwargs.get("is_backward", False),
            is_inference=kwargs.get("is_inference", False),
        )
        if identity != self._identity:
            log.debug("another graph is compiled than was compiled beforehand")
        elif not self._is_compiled and _COMPILED not in iter(self.line, None):
            log.debug("the graph could not be compiled beforehand")
        self.close()

    def close(self) -> None:
        """Let the process end: at once, or where it runs the C++ compiler, after that.

        The file that the compiler writes would be taken for a whole one.  Nobody needs to call
        this: it is called when the object is gone, or this process ends.
        """
        self._end()


@untraced
def _end(process: int, pipe: int) -> None:
    os.close(pipe)
    if process in _running():
        os.kill(process, signal.SIGTERM)


# Those that were not yet seen to end.
_PROCESSES: set[int] = set()


def _running() -> set[int]:
    for process in tuple(_PROCESSES):
        try:
            ended, _ = os.waitpid(process, os.WNOHANG)
        except ChildProcessError:  # somebody waits for all processes
            ended = process
        if ended:
            _PROCESSES.discard(process)
    return _PROCESSES


def begin_to_compile(
    requests: Sequence[Request], compile_graph: CompileGraph
) -> list[CompiledBeside] | None:
    """Begin to compile graphs, each in a process; None if it is not worth it, or not possible.

    Args:
        compile_graph: it is called in the other processes.
    """
    n_cores = len(os.sched_getaffinity(0))
    n_free = n_cores - len(_running())
    if len(requests) > n_free or not _is_possible() or not all(map(_is_kept, requests)):
        return None
    n_threads = min(inductor_config.compile_threads, n_cores // len(requests))
    found: list[CompiledBeside] = []
    try:
        for request in requests:
            found.append(CompiledBeside(request, compile_graph, n_threads))
    except OSError as error:
        log.debug("no process to compile a graph in: %s", error)
        for process in found:
            process.close()
        return None
    return found


def _is_kept(request: Request) -> bool:
    """Whether Inductor's cache keeps the graph."""
    return all(
        not isinstance(node.target, HigherOrderOperator) for node in request.graph.graph.nodes
    )


def _is_possible() -> bool:
    """Whether a graph comes out of another process's work as out of this one's."""
    config = inductor_config
    keeps = config.fx_graph_cache and not config.force_disable_caches
    keeps = keeps and not should_use_remote_fx_graph_cache()
    measures = config.max_autotune or config.max_autotune_gemm or config.max_autotune_pointwise
    return may_fork() and keeps and not measures and not _is_read()


def _is_read() -> bool:
    """Whether somebody reads what Inductor logs when it compiles a graph, and not when it loads
    it."""
    if inductor_config.trace.enabled or os.environ.get("TORCH_TRACE"):
        return True
    loggers = logging.root.manager.loggerDict.items()
    return any(
        isinstance(logger, logging.Logger) and logger.isEnabledFor(logging.INFO)
        for name, logger in loggers
        if name.startswith("torch._inductor")
    )


def _compile(request: Request, compile_graph: CompileGraph, n_threads: int, say: Say) -> None:
    """What the other process does."""
    AsyncCompile.pool.cache_clear()  # of threads, which are not there after a fork
    with (
        inductor_config.patch(compile_threads=n_threads),
        mock.patch.object(kernels_together, "_compile", _ending_later(kernels_together._compile)),
        _saying_wrapper(say),
    ):
        request.compiled(compile_graph)
    say(_COMPILED)


@contextlib.contextmanager
def _saying_wrapper(say: Say) -> Iterator[None]:
    """Say the wrapper when it is written, before its kernels are compiled."""
    before = GraphLowering.save_output_code

    def say_wrapper(source: str) -> None:
        is_written = isinstance(V.graph, GraphLowering)  # and not loaded
        say(as_line(wrapper_of(V.graph, source)) if is_written else b"")
        if before is not None:
            before(source)

    with mock.patch.object(GraphLowering, "save_output_code", say_wrapper):
        yield


def _ending_later(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, during which this process does not end although it is told to."""

    def called(*args: Any) -> Any:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            return function(*args)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    return called
