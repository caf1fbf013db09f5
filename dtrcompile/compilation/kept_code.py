"""Compiled code that an earlier process left in AOTAutograd's cache, and what is known of it.

AOTAutograd's cache hands out compiled graphs without tracing, and so without the partitioner: no
graph is captured, planned or counted.  What the earlier process knew of the code is kept beside it,
in an entry of `disk_cache` that is signed with a hash of the code; AOTAutograd's own key covers the
key of that entry (`DTRPartitioner.uuid`).  Code without an entry, or with that of other code, is
not used: the graph is then compiled as in the first process, from whatever else was kept.

Nothing is kept of graphs with symbolic sizes, of which the ledger asks more than plain values, nor
of operators that only this process knows what they do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from dtrcompile import artifacts
from dtrcompile.compilation.probing import is_probing
from dtrcompile.compilation.settings import inductor_patches
from dtrcompile.options import BudgetKind, Options
from dtrcompile.passes.errors import InfeasibleBudgetError, PlanError
from dtrcompile.passes.fitting.kept_choices import refusal_entry, refusal_of_entry
from dtrcompile.passes.fitting.measured import Measured
from dtrcompile.passes.graphs.capture import NOTHING_HANDED_ON, HandedOn
from dtrcompile.passes.graphs.recompute_tags import SCOPE
from dtrcompile.passes.inductor import disk_cache
from dtrcompile.passes.inductor.lowering import has_text
from dtrcompile.passes.nodes import is_custom
from dtrcompile.passes.program.plan import Plan
from dtrcompile.passes.torch_private import FakeTensor, functorch_config, inductor_config
from dtrcompile.source_hash import package_hash
from dtrcompile.steps.planned import Assignment, HeldBytes
from dtrcompile.steps.step_peak import StepPeak
from dtrcompile.steps.summary import Summary, handed_on_entry, measured_entry


def is_asked() -> bool:
    """Whether the user lets AOTAutograd's cache be asked."""
    return bool(functorch_config.enable_autograd_cache)


TOO_LARGE = "the default split was estimated to fit, and does not"


@dataclass(frozen=True)
class KeptCode:
    """The place of one compilation among what is kept.

    Attributes:
        key: covers all that the code and what is known of it depend on.
        entry: what an earlier process wrote; None where none did.
        lines: covers the lines of the user's program that the graph comes from, which the key
            leaves out.
    """

    key: str
    entry: Mapping[str, Any] | None
    lines: str = ""

    @staticmethod
    def of(
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        options: Options,
        assignment: Assignment,
        step_peak: StepPeak,
        *,
        may_estimate: bool,
    ) -> KeptCode | None:
        """The place of a Dynamo graph that is compiled so; None where nothing is kept of it."""
        is_wanted = (
            is_asked()
            and options.verify
            # What an operator costs, or what is free, is another in each process.
            and "measured" not in (options.cost_model, options.offload)
            and options.budget.kind is not BudgetKind.AUTO
            and assignment.sizes is None
            and not is_probing()
            and not artifacts.are_wanted()
        )
        if not is_wanted or not _is_known(gm, example_inputs):
            return None
        with inductor_config.patch(inductor_patches(options)):
            key = disk_cache.key_of(
                "code",
                package_hash(),
                _graph_text(gm),
                [_input_text(value) for value in example_inputs],
                torch.is_grad_enabled(),
                options.cache_key(),
                replace(assignment, handed_on=NOTHING_HANDED_ON),
                handed_on_entry(assignment.handed_on),
                step_peak,
                may_estimate,
            )
        return None if key is None else KeptCode(key, disk_cache.read(key), _lines(gm))

    @property
    def is_useless(self) -> bool:
        """Whether an earlier process found that the code cannot be taken up."""
        return self.entry is not None and "unusable_because" in self.entry

    @property
    def was_too_large(self) -> bool:
        """Whether the default split was estimated to fit, compiled, and found not to."""
        return self.entry is not None and self.entry.get("unusable_because") == TOO_LARGE

    @property
    def refusal(self) -> InfeasibleBudgetError | None:
        """That an earlier process found no plan; None where it did not.

        It names lines of the user's program only if these are the same today.
        """
        refusal = refusal_of_entry(self.entry)
        if refusal is None or self.entry is None or self.entry.get("lines") != self.lines:
            return refusal
        return refusal.with_places(self.entry.get("places") or {})

    @property
    def around_bytes(self) -> int:
        """Of a graph that was refused, what is there when an optimizer steps."""
        found = 0 if self.entry is None else self.entry.get("around_bytes", 0)
        return found if isinstance(found, int) else 0

    def summary_of(self, sources: Sequence[str]) -> Summary | None:
        """What is known of code that was loaded; None where it is other code."""
        if self.entry is None or self.entry.get("code") != disk_cache.digest_of(*sources):
            return None
        return Summary.of_entry(self.entry.get("summary") or {})

    def write(self, summary: Summary, sources: Sequence[str]) -> None:
        """Keep what is known of compiled code."""
        entry = {"code": disk_cache.digest_of(*sources), "summary": summary.entry()}
        if self.entry != entry:
            disk_cache.write(self.key, entry)

    def write_off(self, why: str) -> None:
        """Let later processes not load the code, because it cannot be taken up."""
        if not self.is_useless:
            disk_cache.write(self.key, {"unusable_because": why})

    def write_refusal(self, refusal: InfeasibleBudgetError, around_bytes: int) -> None:
        """Keep that there is no plan, unless it is only that a planner's time was up."""
        if type(refusal) is InfeasibleBudgetError:
            named = {refusal.operator, *(name for name, _ in refusal.largest)}
            entry = {
                **refusal_entry(refusal),
                "around_bytes": around_bytes,
                "places": {n: place for n, place in refusal.places.items() if n in named},
                "lines": self.lines,
            }
            disk_cache.write(self.key, entry)

    def memory_of(self, summary: Summary) -> HeldMemory:
        """What the code holds where its caller gives something up."""
        return HeldMemory(disk_cache.digest_of(self.key, *summary.measured_entries()))


@dataclass(frozen=True)
class HeldMemory:
    """`steps.planned.Memory`, on disk: under the key of the code and what is known of it."""

    key: str

    def _key_of(self, handed_on: HandedOn) -> str:
        return disk_cache.digest_of(self.key, handed_on_entry(handed_on))

    def read_held(self, handed_on: HandedOn) -> HeldBytes | None:
        """What the code holds then."""
        entry = disk_cache.read(self._key_of(handed_on))
        if entry is None:
            return None
        try:
            return HeldBytes(
                tuple(entry["given_storages"]),
                Measured(**entry["baseline"]),
                Measured(**entry["chosen"]),
                Plan.from_text(entry["plan"]),
            )
        except (KeyError, TypeError, AttributeError, PlanError):
            return None

    def write_held(self, handed_on: HandedOn, held: HeldBytes) -> None:
        """Keep what was counted."""
        entry = {
            "given_storages": list(held.given_storages),
            "baseline": measured_entry(held.baseline),
            "chosen": measured_entry(held.chosen),
            "plan": held.plan.to_text(),
        }
        disk_cache.write(self._key_of(handed_on), entry)


def _graphs_of(gm: fx.GraphModule) -> list[tuple[str, fx.GraphModule]]:
    return [(n, m) for n, m in gm.named_modules() if isinstance(m, fx.GraphModule)]


def _is_known(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether the graph's text and inputs tell all: no symbols, no operators of the user's."""
    if not all(type(v) in _PLAIN_TENSORS and not _has_symbols(v) for v in example_inputs):
        return False
    return has_text(gm) and not any(
        is_custom(node.target) for _, module in _graphs_of(gm) for node in module.graph.nodes
    )


_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, FakeTensor)


def _has_symbols(tensor: torch.Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in (*tensor.shape, *tensor.stride()))


def _graph_text(gm: fx.GraphModule) -> list[str]:
    """The graph without the places in the user's source, and what capture reads of its nodes."""
    parts = []
    for name, module in _graphs_of(gm):
        parts += [name, module.code]
        for node in module.graph.nodes:
            scope = (node.meta.get("custom") or {}).get(SCOPE)
            if scope is not None:
                parts.append(f"{node.name}: {scope}")
            if node.op == "get_attr":
                attribute = getattr(module, str(node.target), None)
                if isinstance(attribute, torch.Tensor):
                    parts.append(f"{node.target}: {_input_text(attribute)}")
    return parts


def _lines(gm: fx.GraphModule) -> str:
    traces = (n.meta.get("stack_trace") for _, module in _graphs_of(gm) for n in module.graph.nodes)
    return disk_cache.digest_of(*(trace or "" for trace in traces))


def _input_text(tensor: torch.Tensor) -> str:
    kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
    return (
        f"{kind} {tensor.dtype} {tensor.device} {tuple(tensor.shape)} {tensor.stride()}"
        f" {tensor.storage_offset()} {tensor.requires_grad} {tensor.is_leaf}"
    )
