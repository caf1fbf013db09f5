"""Warns, once and with the user's line, of code that runs outside of the graphs and the budget.

A budget is kept by graphs.  Code that Dynamo does not put into one runs as it would without
``torch.compile``, and nothing limits what it holds.  The ways out, and where each is seen:

* a graph break: the backend is told why the graph ends (`graph_break`);
* a function that Dynamo cannot compile at all, an error that ``suppress_errors`` hides, the
  recompile limit: the backend is not called, but Dynamo calls whoever has registered when it begins
  and ends to compile a function (`listen`);
* a loss, or anything else, computed of what the graph returns: the autograd graph between the two
  is looked at once, when the first backward arrives (`look_at_backward`).

A function that Dynamo never looks at (``torch.compiler.disable`` around the whole model,
``TORCHDYNAMO_DISABLE``) leaves no trace; `dtrcompile.watch` sees what it holds.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import fx

from dtrcompile.outside.loss import (
    backward_calls,
    given_bytes,
    nodes_outside,
    output_bytes,
    saves,
)
from dtrcompile.passes.errors import DTRError, format_bytes
from dtrcompile.passes.torch_private import (
    BackendCompilerFailed,
    CallbackTrigger,
    Unsupported,
    UserError,
    callback_handler,
    counters,
    dynamo_config,
    exceeds_recompile_limit,
    frame_compilation_hooks,
    keeps_graph,
    output_codes,
    register_frame_compilation_hook,
)
from dtrcompile.passes.untraced import untraced

log = logging.getLogger("dtrcompile")

# Code that is not the user's.
_TORCH, _PACKAGE, _LIBRARY = (
    os.path.dirname(path) + os.sep
    for path in (torch.__file__, os.path.dirname(__file__), os.__file__)
)
_SITE_PACKAGES = _LIBRARY + "site-packages"
_CONVERT_FRAME = "torch._dynamo.convert_frame"
_RESUMED = "torch_dynamo_resume_in_"
# Nothing stands between the graphs of DDP's buckets, or before those of an optimizer's step, which
# PyTorch begins with a break of its own.
_DDP = "DDPOptimizer"
_OPTIMIZERS = os.path.dirname(torch.optim.__file__) + os.sep
_LOGGER_METHOD = re.compile(r"method: <Logger [^>]*>\.(\w+)")
# Dynamo's reason where it met the real one inside of a function that the line calls; the real one
# is then the last that it counted.
_INSIDE_A_CALL = "step_unsupported"
# What holds less than this part of what the graph does is not worth a word.
_WORTH_SAYING = 0.01

# Part of Dynamo's reason -> what to do about it, where its own hint is not the right one here.
_REMEDIES = {
    "RNN, GRU, or LSTM": (
        "Set torch._dynamo.config.allow_rnn = True before the model first runs: it is then unrolled"
        " into the graph"
    ),
    "logging.Logger": (
        "Run torch._dynamo.config.ignore_logging_functions.add(logging.Logger.{method}) before the"
        " model first runs, and the graph goes on past it"
    ),
    "builtin operator `print`": (
        "Take the print out, or add print to torch._dynamo.config.reorderable_logging_functions"
    ),
    "torch.compiler.disable": "Take torch.compiler.disable off the function",
    "Tensor.backward": (
        "Compile the model with its loss and call backward() outside of it, or compile the whole"
        " step with dtrcompile.train_step"
    ),
    "Tensor.item()": "Keep the value a tensor",
    "Dynamic shape operator": (
        "Write it so that no size depends on values, with torch.where and a mask for example"
    ),
    "Data-dependent": "Write the branch with torch.where or torch.cond",
    "generic_jump": "Write the branch with torch.where or torch.cond",
    "functorch": (
        "Compile the function that calls torch.func, in place of the model inside it:"
        ' torch.compile(step, backend="dtr", ...)'
    ),
}


class _Told:
    """The warnings so far, so that each is given once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.messages: dict[tuple[str, str], str] = {}
        self.eager: set[CodeType] = set()  # functions that run without a budget


_told = _Told()


def tell(kind: str, where: str, text: str) -> str:
    """Warn, unless there was a warning of the same kind about the same place already.

    Args:
        where: ``file:line``.

    Returns:
        The whole message.
    """
    message = f"{where}: {text}"
    with _told.lock:
        is_new = (kind, where) not in _told.messages
        _told.messages.setdefault((kind, where), message)
    if is_new:
        log.warning("%s", message)
    return message


def told() -> tuple[str, ...]:
    """All warnings since `forget`, in order."""
    with _told.lock:
        return tuple(_told.messages.values())


def forget() -> None:
    """Give every warning anew: after ``torch._dynamo.reset`` the same code is compiled again."""
    with _told.lock:
        _told.messages.clear()
        _told.eager.clear()


# --- graph breaks ---------------------------------------------------------------------------------


def graph_break(gm: fx.GraphModule) -> str:
    """Warn of the break that a Dynamo graph ends in.

    Returns:
        The message, for the report; empty where there is none.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or reason.reason.startswith(_DDP):
        return ""
    if reason.user_stack and reason.user_stack[-1].filename.startswith(_OPTIMIZERS):
        return ""
    where, line = _place(reason.user_stack, gm.forward.__code__)
    why = reason.reason
    if why == _INSIDE_A_CALL:
        why = next(reversed(counters["graph_break"]), why)
    return tell(
        "break",
        where,
        f"{line}ends a graph{_called_from()}. What runs before the next graph is in no plan, and"
        f" what it holds does not count. {_why(why)}",
    )


# --- what is not compiled -------------------------------------------------------------------------


def listen() -> None:
    """Have Dynamo call this module when it begins and ends to compile a function."""
    if _begins not in (frame_compilation_hooks() or ()):
        register_frame_compilation_hook(_begins)
    _listen_for_the_end()


def _listen_for_the_end() -> None:
    # ``torch._dynamo.reset`` forgets these, unlike those that are called when it begins.
    if _ends not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_ends)


def _begins() -> str:
    """A function is about to be compiled: unless it has been compiled too often.

    Returns:
        Nothing: Dynamo notes what such hooks return beside its metrics.
    """
    _listen_for_the_end()
    compiling = _compilation()
    if compiling is None:
        return ""
    try:
        is_exceeded, limit = exceeds_recompile_limit(
            compiling["cache_size"], compiling["compile_id"]
        )
        raises = compiling["one_graph"] or dynamo_config.fail_on_recompile_limit_hit
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        log.debug("another Dynamo than expected: %r", error)
        return ""
    if is_exceeded and not raises:
        code: CodeType = compiling["code"]
        value = getattr(dynamo_config, limit)
        tell(
            "limit",
            f"{code.co_filename}:{code.co_firstlineno}",
            f"{_name(code)} was compiled {value} times, the torch._dynamo.config.{limit}. Calls"
            f" that none of its graphs fits{_called_from()} run without a budget from here on. Mark"
            " the sizes that vary with torch._dynamo.mark_dynamic, or pass dynamic=True;"
            " TORCH_LOGS=recompiles says what else it is compiled again for. Or raise the limit",
        )
    return ""


def _ends(args: Any) -> None:
    """A function was compiled, or an exception is on its way that says why it cannot be."""
    error = sys.exc_info()[1]
    if args.callback_trigger is not CallbackTrigger.DYNAMO or not _is_from_dynamo(error):
        return
    compiling = _compilation()
    if compiling is None or compiling.get("one_graph", False):
        return  # else the user sees the exception
    code: CodeType = compiling["code"]
    inner = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
    if isinstance(error, (Unsupported, UserError)):
        where, line = _place(getattr(error, "real_stack", None), code)
        if ("break", where) in _told.messages:
            return  # Dynamo tries the function again that it could not put into a graph
        if _is_inside_eager(code):
            return
        tell(
            "eager",
            where,
            f"{line}cannot be compiled, and all of {_name(code)}{_called_from()} runs without a"
            f" budget. {_why(str(error))}",
        )
    elif dynamo_config.suppress_errors and not _is_inside_eager(code):
        what = "dtrcompile" if isinstance(inner, DTRError) else "the compiler"
        tell(
            "error",
            f"{code.co_filename}:{code.co_firstlineno}",
            f"{_name(code)}{_called_from()} runs without a budget, because {what} raised"
            f" {type(inner).__name__} and torch._dynamo.config.suppress_errors hides it:"
            f" {_first_line(str(inner))} Leave suppress_errors off",
        )


def _is_inside_eager(code: CodeType) -> bool:
    """Whether a function is called by one of which all was said; if not, it is one from here on."""
    with _told.lock:
        callers = {frame.f_code for frame in _frames(sys._getframe())}
        if callers & _told.eager:
            return True
        _told.eager.add(code)
        return False


def _is_from_dynamo(error: BaseException | None) -> bool:
    """Whether an exception left Dynamo's compilation, and is not one that the user handles."""
    step: TracebackType | None = None if error is None else error.__traceback__
    while step is not None:
        if step.tb_frame.f_globals.get("__name__") == _CONVERT_FRAME:
            return True
        step = step.tb_next
    return False


def _compilation() -> Mapping[str, Any] | None:
    """What Dynamo compiles at this moment, if it is for this backend: its function's variables.

    Dynamo tells its listeners no more than a number.
    """
    for frame in _frames(sys._getframe()):
        is_compile = frame.f_code.co_name == "_compile"
        if is_compile and frame.f_globals.get("__name__") == _CONVERT_FRAME:
            variables = frame.f_locals
            return variables if _is_this_backend(variables.get("compiler_fn")) else None
    return None


def _is_this_backend(compiler: Any) -> bool:
    """Whether what Dynamo calls ends in `dtrcompile.backend.dtr`."""
    while compiler is not None:
        if getattr(compiler, "__module__", "") == "dtrcompile.backend":
            return True
        owner = getattr(compiler, "__self__", None)  # the optimizer for DDP is a bound method
        compiler = (
            getattr(compiler, "_torchdynamo_orig_backend", None)
            or getattr(compiler, "compiler_fn", None)
            or getattr(compiler, "func", None)
            or getattr(owner, "backend_compile_fn", None)
        )
    return False


# --- the loss -------------------------------------------------------------------------------------


def look_at_backward(node: Any, peak_bytes: int, saved_bytes: int, called_at: str) -> None:
    """When backward arrives at a graph for the first time, see what it came through, and whether
    what the graph saved is kept.

    Args:
        node: the graph's autograd node.
        peak_bytes: what the graph holds.
        saved_bytes: what it saved.
        called_at: ``file:line`` of the call of the model.
    """

    # A hook that held the node would hold what is saved for a backward that never comes.
    reference = weakref.ref(node)

    @untraced
    def arrived(_gradients: Any) -> None:
        handle.remove()
        calls = backward_calls()
        for frame, roots in calls:
            outside = _computed_outside(roots, reference())
            if outside is not None:
                if keeps_graph():
                    _tell_of_retained(saved_bytes, peak_bytes, _where(frame))
                _tell_of_loss(outside, peak_bytes, _where(frame), called_at)
                # (Where a backward runs inside of another, autograd computed what it was given.)
                if len(calls) == 1:
                    _tell_of_given(given_bytes(frame), peak_bytes, _where(frame), called_at)
                return

    handle = node.register_prehook(arrived)


def _tell_of_retained(saved_bytes: int, peak_bytes: int, where: str) -> None:
    if saved_bytes >= _WORTH_SAYING * peak_bytes:
        tell(
            "retained",
            where,
            "backward(retain_graph=True) keeps what the compiled graph saved, also after it was"
            " read, where the promise counts it as freed: the step may hold"
            f" {format_bytes(saved_bytes)} more. Leave retain_graph out of the last backward of a"
            " graph, or set the bytes aside with 'reserve'",
        )


def _tell_of_loss(outside: Mapping[str, int], peak_bytes: int, where: str, called_at: str) -> None:
    total_bytes = sum(outside.values())
    if total_bytes < _WORTH_SAYING * peak_bytes:
        return
    names = ", ".join(sorted(outside, key=lambda name: (-outside[name], name))[:3])
    tell(
        "loss",
        where,
        f"backward comes through operators that ran outside of the graph ({names}). They made up to"
        f" {format_bytes(total_bytes)} of what the model returned at {called_at}, which is"
        " estimated and not planned. Compute the loss in the compiled model or function, and it is"
        " planned too",
    )


def _tell_of_given(gradient_bytes: int, peak_bytes: int, where: str, called_at: str) -> None:
    if gradient_bytes >= _WORTH_SAYING * peak_bytes:
        tell(
            "loss",
            where,
            f"backward is given a gradient of {format_bytes(gradient_bytes)} for what the model"
            f" returned at {called_at}. What computed the gradient is not known to autograd here,"
            " so what that held is neither planned nor part of the promise. Compute the loss in the"
            " compiled model or function, or set the bytes aside with 'reserve'",
        )


def _computed_outside(roots: list[Any], node: Any) -> dict[str, int] | None:
    """Operators from ``roots`` to the first compiled graphs that keep something for backward.

    Returns:
        Bytes of their outputs by operator; None if ``node`` is not among the graphs.
    """
    nodes = nodes_outside(roots, node)
    if nodes is None:
        return None
    outside: dict[str, int] = {}
    for found in filter(saves, nodes):
        name = found.name().removesuffix("Backward0")
        outside[name] = outside.get(name, 0) + output_bytes(found)
    return outside


# --- lines --------------------------------------------------------------------------------------


def called_at() -> str:
    """``file:line`` of the user's code that is running; empty where there is none."""
    return _where(sys._getframe())


def _called_from() -> str:
    place = called_at()
    return f" (called at {place})" if place else ""


def _where(frame: FrameType | None) -> str:
    for outer in _frames(frame):
        name = outer.f_code.co_filename
        # What Dynamo made of a function says that it is of the function's file.
        if is_users_code(name) and outer.f_code not in output_codes:
            return f"{name}:{outer.f_lineno}"
    return ""


def is_users_code(filename: str) -> bool:
    """Whether a file is neither Python's, torch's nor this package's."""
    is_library = filename.startswith(_LIBRARY) and not filename.startswith(_SITE_PACKAGES)
    is_ours = filename.startswith((_TORCH, _PACKAGE))
    return not is_library and not is_ours and os.path.exists(filename)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(
    stack: traceback.StackSummary | list[traceback.FrameSummary] | None, code: CodeType
) -> tuple[str, str]:
    """The innermost line outside of torch, and its text, quoted."""
    users = [line for line in stack or () if is_users_code(line.filename)]
    if not users:
        return f"{code.co_filename}:{code.co_firstlineno}", f"{_name(code)} "
    return f"{users[-1].filename}:{users[-1].lineno}", f"`{users[-1].line}` "


def _name(code: CodeType) -> str:
    if code.co_name.startswith(_RESUMED):
        name, _, line = code.co_name.removeprefix(_RESUMED).rpartition("_at_")
        return f"the rest of {name} after line {line}"
    return code.co_name


def _why(reason: str) -> str:
    """Dynamo's reason, and what to do about it."""
    remedies = [remedy for part, remedy in _REMEDIES.items() if part in reason]
    hints = [
        line.removeprefix("Hint:").strip()
        for line in map(str.strip, reason.splitlines())
        if line.startswith("Hint:") and "report an issue" not in line
    ]
    explanations = [
        line.removeprefix("Explanation:").strip()
        for line in map(str.strip, reason.splitlines())
        if line.startswith("Explanation:")
    ]
    why = _first_line(explanations[0] if explanations else reason)
    if why.endswith(":."):  # a list follows; the headline is shorter
        why = _first_line(reason)
    method = _LOGGER_METHOD.search(reason)
    remedies = [r.replace("{method}", method[1] if method else "warning") for r in remedies]
    what_to_do = (remedies or hints or ["Move it out of the model"])[0].rstrip(".")
    return f"Dynamo says: {why} {what_to_do}"


def _first_line(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else "no reason"
    return line if line.endswith((".", "!", "?")) else f"{line}."
