"""The parts of `bench.gpu`: which processes each has, in the order of their worth.

What trains a model is the process of `bench.rivals`; `bench.gpu_workers` has the others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.gpu_jobs import Job
from bench.gpu_rows import ROOT, SMALLEST
from bench.plain_models import PLAIN

ALL = "all"
"""The row of a process that finds the names of its rows by itself: it comes when all are there."""

BUDGETS = ("60%", "40%", "min", "100%")
BF16, FLOAT32 = "bf16-autocast", "float32"
# Of the promise, the one that tells the most first.
_FIRST = "plain_gpt"
_FURTHER = ("plain_llama", "mixture", "plain_vit", "plain_unet", "resnet50")
# Of the comparison: the model, its scale, and whether its blocks are layers.
_COMPARED = (
    ("plain_llama", "2k"),
    ("plain_gpt", "2k"),
    ("plain_vit", "large"),
    ("plain_unet", "large"),
    ("plain_llama", "8k"),
    ("plain_gpt", "8k"),
)
_TIMED = ("blocks", "selective", "memory_budget 0.3")
RIVALS = (*_TIMED, SMALLEST)
# What users have at a peak that is smaller by a fifth, or at the smallest that they can have.
_LESS_THAN, _LESS = "blocks", "80% as blocks"
_SMALLEST_RIVAL = "memory_budget 0.0"
_MEMORIES = {"cuda": ("24GB", "40GB", "16GB", "80GB"), "cpu": ("8MB", "6MB")}
_COMPILED = (_FIRST, "plain_llama", "mixture")
_SEGMENTS = {True: "expandable_segments:True", False: "expandable_segments:False"}


@dataclass(frozen=True)
class Where:
    """What is measured on.

    Attributes:
        device: "cuda", "cpu" to try the script, or "none" if nothing is run.
        target: the name under which `dtrcompile.plan` knows the GPU; None if it does not.
        models, rivals: those that are wanted; empty: all.
        is_quick: everything is small.
        is_shared: processes run side by side, so that what is told first is of no interest.
    """

    device: str = "cuda"
    target: str | None = None
    models: tuple[str, ...] = ()
    rivals: tuple[str, ...] = ()
    is_quick: bool = False
    is_shared: bool = False

    def scale(self, name: str) -> str:
        """The scale that stands for a scale of a GPU."""
        return "quick" if self.is_quick or self.device == "cpu" else name

    def wants(self, model: str) -> bool:
        return not self.models or model in self.models


def jobs_of(part: str, where: Where) -> list[Job]:
    """The processes of a part."""
    return list(_JOBS[part](where))


def _settings(model: str, scale: str, dtype: str, **others: Any) -> dict[str, Any]:
    sizes = asdict(PLAIN[model].sizes[scale])
    return {"model": model, "scale": scale, "dtype": dtype, **others, "sizes": sizes}


def _worker(what: str, **given: Any) -> list[str]:
    """The command of a process that `bench.gpu_workers` describes."""
    return [sys.executable, "-m", "bench.gpu", "--worker", what, json.dumps(given)]


def _of_rivals(where: Where, model: str, scale: str, dtype: str, *more: str) -> list[str]:
    command = [sys.executable, "-m", "bench.rivals", "--worker", "--models", model]
    command += ["--scale", scale, "--dtype", dtype, "--device", where.device]
    return [*command, *more]


# --- the promise --------------------------------------------------------------------------------


def _promise(where: Where) -> Iterator[Job]:
    """One model at all budgets, one step of each other model, then the rest."""
    if where.is_quick:
        yield from _promised(where, _FIRST, BF16, True, ("80%",))
        return
    if not where.is_shared:  # or two processes would measure the same
        yield from _promised(where, _FIRST, BF16, True, BUDGETS)
        for model in _FURTHER:
            yield from _promised(where, model, BF16, True, BUDGETS[:1])
        yield from _promised(where, _FIRST, BF16, False, BUDGETS)
        yield from _promised(where, _FIRST, FLOAT32, True, BUDGETS)
    for dtype, is_expandable in ((BF16, True), (BF16, False), (FLOAT32, True), (FLOAT32, False)):
        for model in (_FIRST, *_FURTHER):
            yield from _promised(where, model, dtype, is_expandable, BUDGETS)


def _promised(
    where: Where, model: str, dtype: str, is_expandable: bool, budgets: Sequence[str]
) -> Iterator[Job]:
    """A process that trains, and one that says beforehand what it will hold."""
    if not where.wants(model):
        return
    scale = where.scale("few-gb")
    settings = _settings(model, scale, dtype, allocator=_SEGMENTS[is_expandable])
    environment = {"PYTORCH_CUDA_ALLOC_CONF": _SEGMENTS[is_expandable]}
    if where.device != "none":
        yield Job(
            "promise",
            settings,
            ("compile", *(f"dtr {budget}" for budget in budgets)),
            _training(where, settings, budgets),
            environment,
            is_alone=False,
        )
    if where.target is not None:
        yield Job(
            "promise",
            settings,
            tuple(f"forecast {budget}" for budget in budgets),
            _telling(where.target, settings, budgets),
            # As where there is none.
            {**environment, "CUDA_VISIBLE_DEVICES": ""},
            is_on_device=False,
        )


def _training(
    where: Where, settings: Mapping[str, Any], budgets: Sequence[str]
) -> Callable[[Collection[str]], list[str]]:
    def command(measured: Collection[str]) -> list[str]:
        left = [budget for budget in budgets if f"dtr {budget}" not in measured]
        methods = "compile,dtr" if left else "compile"
        return _of_rivals(
            where,
            *(settings[name] for name in ("model", "scale", "dtype")),
            *("--methods", methods, "--budgets", ",".join(left), "--rounds", "0"),
        )

    return command


def _telling(
    target: str, settings: Mapping[str, Any], budgets: Sequence[str]
) -> Callable[[Collection[str]], list[str]]:
    def command(measured: Collection[str]) -> list[str]:
        left = [budget for budget in budgets if f"forecast {budget}" not in measured]
        of = {name: settings[name] for name in ("model", "scale", "dtype")}
        return _worker("forecast", **of, budgets=left, target=target)

    return command


# --- the tests ----------------------------------------------------------------------------------


# These fill the device.
_TESTED_ALONE = ("test_auto_budget",)
# What tells the most, of the tests.
_TESTED_FIRST = ("test_semantics", "test_attention", "test_out_of_memory")


def _tests(_where: Where) -> Iterator[Job]:
    """A process for each file."""
    paths = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    first = [path for name in _TESTED_FIRST for path in paths if path.stem == name]
    for path in dict.fromkeys([*first, *paths]):
        file = path.relative_to(ROOT).as_posix()

        def command(measured: Collection[str], file: str = file) -> list[str]:
            return _worker("tests", file=file, measured=sorted(measured))

        is_alone = path.stem in _TESTED_ALONE
        yield Job("tests", {"file": file}, (ALL,), command, is_alone=is_alone)


# --- against the alternatives -------------------------------------------------------------------


def _rivals(where: Where) -> Iterator[Job]:
    """A process for each rival: that one, dtr at its peak, and plain torch.compile take turns; and
    one for the smallest peaks."""
    for model, named in _COMPARED:
        for rival in _TIMED:
            if not where.wants(model) or (where.rivals and rival not in where.rivals):
                continue
            settings = _settings(model, where.scale(named), BF16, rival=rival)
            budgets = [f"as {rival}", *([_LESS] if rival == _LESS_THAN else [])]
            yield Job(
                "rivals",
                settings,
                ("compile", rival, *(f"dtr {budget}" for budget in budgets)),
                _against(where, settings, rival, budgets),
                _EXPANDABLE,
                is_alone=False,
                is_timed=True,
            )
    for model, named in _COMPARED:
        if where.wants(model) and (not where.rivals or SMALLEST in where.rivals):
            settings = _settings(model, where.scale(named), BF16, rival=SMALLEST)
            yield Job(
                "rivals",
                settings,
                (_SMALLEST_RIVAL, "dtr min"),
                _against(where, settings, _SMALLEST_RIVAL, ["min"], is_timed=False),
                _EXPANDABLE,
                is_alone=False,
            )


_EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": _SEGMENTS[True]}


def _against(
    where: Where,
    settings: Mapping[str, Any],
    rival: str,
    budgets: Sequence[str],
    *,
    is_timed: bool = True,
) -> Callable[[Collection[str]], list[str]]:
    method, _, share = rival.partition(" ")
    methods = f"compile,{method},dtr" if is_timed else f"{method},dtr"
    command = _of_rivals(
        where,
        *(settings[name] for name in ("model", "scale", "dtype")),
        *("--methods", methods, "--budgets", ",".join(budgets)),
        *("--rounds", "9" if is_timed else "0", "--reference", "none"),
    )
    # (Without a share there is no method that takes one.)
    return lambda _measured: [*command, "--shares", share or "0"]


# --- the largest batch --------------------------------------------------------------------------


def _largest(where: Where) -> Iterator[Job]:
    """A process for each method, which looks for the batches of all sizes."""
    model, memories = _FIRST, _MEMORIES[where.device]
    if not where.wants(model):
        return
    for method in ("dtr", "blocks", "compile"):
        settings = _settings(model, where.scale("2k"), BF16, method=method)

        def command(measured: Collection[str], settings: Mapping[str, Any] = settings) -> list[str]:
            left = [size for size in memories if size not in measured]
            of = {name: settings[name] for name in ("model", "scale", "dtype", "method")}
            return _worker("largest", **of, memories=left, device=where.device)

        yield Job("largest", settings, memories, command, _EXPANDABLE)


# --- compile time -------------------------------------------------------------------------------


def _compile(where: Where) -> Iterator[Job]:
    """A process for each way to compile, which starts one with empty caches and one with these."""
    for model in filter(where.wants, _COMPILED):
        for budget in ("plain", "50%"):
            settings = _settings(model, where.scale("few-gb"), BF16, budget=budget)

            def command(
                _measured: Collection[str], settings: Mapping[str, Any] = settings
            ) -> list[str]:
                of = {name: settings[name] for name in ("model", "scale", "budget")}
                return _worker("compile", **of, device=where.device)

            yield Job("compile", settings, ("cold", "warm"), command, _EXPANDABLE)


# --- costs --------------------------------------------------------------------------------------


def _costs(where: Where) -> Iterator[Job]:
    def command(measured: Collection[str]) -> list[str]:
        return _worker("costs", device=where.device, measured=sorted(measured))

    yield Job("costs", {"operators": "alone"}, (ALL,), command)


_JOBS: Mapping[str, Callable[[Where], Iterator[Job]]] = {
    "promise": _promise,
    "tests": _tests,
    "rivals": _rivals,
    "largest": _largest,
    "compile": _compile,
    "costs": _costs,
}
