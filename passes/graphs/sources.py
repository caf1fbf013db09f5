"""Where in the user's program each operator and tensor of a capture comes from.

Dynamo notes the lines and the modules of what it traces on each node (``stack_trace``,
``nn_module_stack``), and AOTAutograd carries them over to the nodes that differentiate it
(``fwd_nn_module_stack``).  A tensor that is computed comes from where its operator does, a
parameter from the name that Dynamo reads it by.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import fx

from dtrcompile.passes.graphs.capture import Captured
from dtrcompile.passes.nodes import hint, value
from dtrcompile.passes.program.sources import NOWHERE, Frame, Source, Sources, TensorForm
from dtrcompile.passes.torch_private import PlainAOTInput


def sources_of(captured: Captured, input_names: Sequence[str] = ()) -> Sources:
    """Where the operators and tensors of a capture come from.

    Args:
        input_names: of the traced graph's inputs, in order, as the user's program reads them.
    """
    parsed: dict[str, tuple[Frame, ...]] = {}
    return Sources(
        tuple(_source(operator.nodes, parsed) for operator in captured.operators),
        tuple(_form(node, input_names) for node in captured.storage_nodes),
    )


def places_of(captured: Captured, input_names: Sequence[str] = ()) -> dict[str, str]:
    """Name of an operator or of a storage -> where it comes from, in a few words.

    Args:
        input_names: as for `sources_of`.
    """
    sources, program = sources_of(captured, input_names), captured.program
    found = {
        operator.name: str(source)
        for operator, source in zip(program.operators, sources.operators, strict=True)
    }
    for storage, form in zip(program.storages, sources.storages, strict=True):
        producer = program.tensors[program.root_tensor[storage.id]].producer
        found[storage.name] = form.name if producer is None else str(sources.operators[producer])
    return found


def place_of(node: fx.Node) -> str:
    """Where a node comes from, in a few words; empty where that is not known."""
    return str(_source([node], {}))


def _source(nodes: Sequence[fx.Node], parsed: dict[str, tuple[Frame, ...]]) -> Source:
    """Of an operator: where its last node that tells comes from, which gives the result."""
    for node in reversed(nodes):
        trace = node.meta.get("stack_trace")
        paths = _module_paths(node)
        if not trace and not paths:
            continue
        if trace and trace not in parsed:
            parsed[trace] = _without_torch(frames_of(trace))
        return Source(_module(paths), parsed.get(trace, ()) if trace else ())
    return NOWHERE


def _module_paths(node: fx.Node) -> tuple[str, ...]:
    """Paths of the modules that a node is in, the outermost first.

    Autograd adds up the gradients of a tensor that is read several times, which no line of the
    user's does: a sum belongs to the innermost module that all of these readers are in.
    """
    if not node.meta.get("is_gradient_acc"):
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        return tuple(path for path, _ in stack.values())
    common: tuple[str, ...] | None = None
    seen, waiting = {node}, [node]
    while waiting:
        for summand in waiting.pop().all_input_nodes:
            if summand in seen:
                continue
            seen.add(summand)
            if summand.meta.get("is_gradient_acc"):
                waiting.append(summand)
            elif (paths := _module_paths(summand)) or common is None:
                common = paths if common is None else _common(common, paths)
    return common or ()


def _common(first: Sequence[str], second: Sequence[str]) -> tuple[str, ...]:
    """What two lists begin with alike."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return tuple(path for path, _ in alike)


def _without_torch(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Without the innermost frames that are PyTorch's own, such as of ``nn.Sequential``."""
    n = len(frames)
    while n and frames[n - 1].file.startswith(_TORCH):
        n -= 1
    return frames[:n] or frames


_TORCH = f"{os.path.dirname(torch.__file__)}{os.sep}"
_FRAME = re.compile(r'^ *File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)$')


def frames_of(stack_trace: str) -> tuple[Frame, ...]:
    """The frames of a stack trace as Python prints it, the outermost first."""
    frames: list[Frame] = []
    is_code = False
    for text in stack_trace.splitlines():
        found = _FRAME.match(text)
        if found is not None:
            frames.append(Frame(found["file"], int(found["line"]), found["function"]))
        elif is_code and text.strip():
            last = frames[-1]
            frames[-1] = Frame(last.file, last.line, last.function, text.strip())
        is_code = found is not None
    return tuple(frames)


# Dynamo names a module or an input by how the function that is compiled reads it.
_ROOT = re.compile(r"^[LG]\['([^']*)'\]")
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")


def _module(paths: Sequence[str]) -> str:
    return readable_path(paths[-1]) if paths else ""


def readable_path(path: str) -> str:
    """A path of Dynamo's, such as ``L['self']._modules['head']``, as attributes: ``head``."""
    path = _MEMBER.sub(r".\1", _ROOT.sub(r"\1", path))
    return _MODEL.sub("", path)


# What the compiled model is called: in its own ``forward``, or where that is PyTorch's.
_MODEL = re.compile(r"^(self|fn)(\.|$)")


def input_source(node: fx.Node) -> str:
    """How the user's program reads an input of Dynamo's graph; its name where that is not known."""
    name = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", None)
    # (A method until PyTorch 2.10.)
    found = name() if callable(name) else name
    return found if isinstance(found, str) else str(node.target)


def _form(node: fx.Node, input_names: Sequence[str]) -> TensorForm:
    description = node.meta.get("desc")
    name = ""
    if isinstance(description, PlainAOTInput) and description.idx < len(input_names):
        name = input_names[description.idx]
    tensor = value(node)
    if not isinstance(tensor, torch.Tensor):
        return TensorForm(name, (), "")
    shape = tuple(hint(size) for size in tensor.shape)
    return TensorForm(name, shape, str(tensor.dtype).removeprefix("torch."))
