"""The default split as one line of calls: forward's, then backward's.

What capture, grouping and verification ask of the two graphs together: what a call reads, through
the placeholders by which backward receives what forward saved, and who owns the memory of a value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from dtrcompile.passes.errors import CaptureError
from dtrcompile.passes.graphs.modules import calls_of, output_arguments, placeholders
from dtrcompile.passes.graphs.writes import final_writes
from dtrcompile.passes.nodes import (
    Role,
    is_mutating,
    is_symbolic_number,
    is_tensor,
    mutated_arguments,
    owner,
    role,
)
from dtrcompile.passes.torch_private import InputMutationAOTOutput


@dataclass(frozen=True)
class Split:
    """A forward graph and, for training, its backward graph.

    Attributes:
        forward, backward: the default split's modules (backward None for inference).
        num_fwd_outputs: how many of forward's outputs are the user's; the rest are saved.
        same_value: backward placeholder -> the forward node that it receives.
        calls: forward's calls, then backward's, in the order in which the baseline runs them.
        first_backward_call: index of the first of backward's; the number of calls for inference.
        position: index of each call.
        roles: what each call is.
        final_writes: copies of new values into inputs that no call reads afterwards -> these.
        user_outputs, gradients: the tensors that forward returns to the user, and those that
            backward returns.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    num_fwd_outputs: int
    same_value: Mapping[fx.Node, fx.Node]
    calls: Sequence[fx.Node]
    first_backward_call: int
    position: Mapping[fx.Node, int]
    roles: Mapping[fx.Node, Role]
    final_writes: Mapping[fx.Node, fx.Node]
    user_outputs: Sequence[fx.Node]
    gradients: Sequence[fx.Node]

    @staticmethod
    def of(
        forward: fx.GraphModule,
        backward: fx.GraphModule | None,
        num_fwd_outputs: int,
        draws: Sequence[fx.Node] = (),
    ) -> Split:
        """Read the two graphs.

        Args:
            draws: nodes that draw random numbers, in the order that they are to have.

        Raises:
            CaptureError: if backward does not take what forward saves.
        """
        same_value = _received(forward, backward, num_fwd_outputs)
        forward_calls = _ordered_calls(forward, same_value, draws)
        backward_calls = [] if backward is None else _ordered_calls(backward, same_value, draws)
        calls = [*forward_calls, *backward_calls]
        returned = output_arguments(forward)[:num_fwd_outputs]
        return Split(
            forward,
            backward,
            num_fwd_outputs,
            same_value,
            calls,
            len(forward_calls),
            {n: i for i, n in enumerate(calls)},
            {n: role(n) for n in calls},
            final_writes(calls) if backward is None else {},
            _tensors(returned, same_value),
            [] if backward is None else _tensors(output_arguments(backward), same_value),
        )

    @property
    def results(self) -> list[fx.Node]:
        """All tensors that leave the graphs to stay: the user's outputs, then the gradients."""
        return [*self.user_outputs, *self.gradients]

    @property
    def updated_after_forward(self) -> list[fx.Node]:
        """Inputs that AOTAutograd updates when forward has returned (running statistics)."""
        (out,) = self.forward.graph.find_nodes(op="output")
        updated = [
            kind.mutated_input
            for kind in out.meta.get("desc", ())
            if isinstance(kind, InputMutationAOTOutput)
        ]
        return [n for n in placeholders(self.forward) if n.meta.get("desc") in updated]

    def written_inputs(self, calls: Iterable[fx.Node]) -> list[fx.Node]:
        """What these calls write into, and what is updated after forward."""
        in_graphs = [
            self.owner(n) for call in calls if is_mutating(call) for n in mutated_arguments(call)
        ]
        return [*in_graphs, *self.updated_after_forward]

    def owner(self, node: fx.Node) -> fx.Node:
        """The node that owns the storage of a tensor node's value, through views."""
        return owner(node, self.same_value)

    def inputs_of(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that make what a call takes."""
        return [self.same_value.get(n, n) for n in node.all_input_nodes]

    def is_backward(self, call: fx.Node) -> bool:
        """Whether a call is one of backward's."""
        return self.position[call] >= self.first_backward_call


def _received(
    forward: fx.GraphModule, backward: fx.GraphModule | None, num_fwd_outputs: int
) -> dict[fx.Node, fx.Node]:
    """Backward placeholder -> forward node, by position: backward takes the numbers first."""
    if backward is None:
        return {}
    saved = output_arguments(forward)[num_fwd_outputs:]
    numbers = [a for a in saved if isinstance(a, fx.Node) and is_symbolic_number(a)]
    others = [a for a in saved if not (isinstance(a, fx.Node) and is_symbolic_number(a))]
    inputs = placeholders(backward)
    if len(inputs) < len(saved):
        raise CaptureError(
            f"backward takes {len(inputs)} inputs, forward saves {len(saved)} values for it"
        )
    return {
        node: source
        for node, source in zip(inputs, [*numbers, *others], strict=False)
        if isinstance(source, fx.Node)
    }


def _ordered_calls(
    gm: fx.GraphModule, same_value: Mapping[fx.Node, fx.Node], draws: Sequence[fx.Node]
) -> list[fx.Node]:
    """A graph's calls; a draw comes with all that it needs before the one that follows it."""
    calls = calls_of(gm)
    present = set(calls)
    draws = [n for n in draws if n in present]
    if not draws or any(is_mutating(n) for n in calls[: max(map(calls.index, draws))]):
        return calls  # what is moved might read what another call writes into
    rank = {n: i for i, n in enumerate(draws)}
    ordered: dict[fx.Node, None] = {}
    for call in calls:
        for draw in draws[: rank.get(call, 0)]:
            if draw not in ordered:
                needed = _needed_for(draw, calls, same_value)
                ordered.update(dict.fromkeys(n for n in calls if n in needed))
        ordered[call] = None
    return list(ordered)


def _needed_for(
    call: fx.Node, calls: Sequence[fx.Node], same_value: Mapping[fx.Node, fx.Node]
) -> set[fx.Node]:
    """A call and all that it needs."""
    needed = {call}
    for n in reversed(calls):
        if n in needed:
            needed.update(same_value.get(m, m) for m in n.all_input_nodes)
    return needed


def _tensors(arguments: Sequence[object], same_value: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    return [same_value.get(a, a) for a in arguments if isinstance(a, fx.Node) and is_tensor(a)]
