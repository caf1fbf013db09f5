"""Every operator of PyTorch's test database, forward and backward, at the smallest budget.

Every fifth runs in ``make test``, and those that break the graph or are compared otherwise; all run
in ``make test-all``.  ``bench/op_db.py`` prints a summary.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

from workloads import op_db
from workloads.training import RELEASE

# Operators that run, but outside of the graph, which Dynamo breaks there whatever the backend.
BREAKS_THE_GRAPH = {
    "corrcoef": "checks its input's values",
    "cov": "checks its input's values",
    "masked_select": "the output's shape depends on the data",
    "tensor_split": "reads the indices from a tensor",
    "to_sparse": "the output is sparse",
    "nn.functional.ctc_loss": "the output's shape depends on the data",
    "nn.functional.gaussian_nll_loss": "checks its input's values",
    "linalg.lstsq": "the output's shape depends on the data",
    "linalg.lstsq.grad_oriented": "the output's shape depends on the data",
}

# What older releases of PyTorch do otherwise, and the first that does not: Dynamo breaks the graph,
# to check the values of quantiles, or where combinations are taken by a mask; and Inductor draws
# other numbers than eager PyTorch, although its fallback is on.
BREAKS_THE_GRAPH_BEFORE = {"quantile": (2, 12), "nanquantile": (2, 12), "combinations": (2, 14)}
DRAWS_OTHERWISE_BEFORE = {"nn.functional.rrelu": (2, 13)}

# (rtol, atol) where Inductor's decompositions round differently from eager PyTorch.
LOOSER: dict[str, tuple[float, float]] = {}

# The operators of the database and their samples warn of what they are: deprecated, ambiguous.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


SPECIAL = {*BREAKS_THE_GRAPH, *BREAKS_THE_GRAPH_BEFORE, *DRAWS_OTHERWISE_BEFORE, *LOOSER}


def operators() -> list[Any]:
    """The names, most of them marked as part of the sweep."""

    def marks(index: int, name: str) -> Any:
        if index % 10 == 0 or name in SPECIAL:
            return ()
        return pytest.mark.slow if index % 5 == 0 else pytest.mark.sweep

    return [
        pytest.param(name, marks=marks(index, name))
        for index, name in enumerate(op_db.operators())
        if name not in op_db.NOT_COMPILED
    ]


@pytest.mark.parametrize("name", operators())
def test_the_smallest_budget_agrees_with_eager_pytorch(name: str) -> None:
    rtol, atol = LOOSER.get(name, (1e-4, 1e-4))
    draws_otherwise = DRAWS_OTHERWISE_BEFORE.get(name, RELEASE) > RELEASE
    breaks = name in BREAKS_THE_GRAPH or BREAKS_THE_GRAPH_BEFORE.get(name, RELEASE) > RELEASE
    outcome = op_db.check(name, rtol=rtol, atol=atol, draws_as_eager=not draws_otherwise)
    assert (outcome.breaks > 0) == breaks


@pytest.mark.parametrize("name", op_db.NOT_COMPILED)
def test_the_operators_that_are_left_out_are_not_compiled_by_aot_eager(name: str) -> None:
    compiled: list[torch.fx.GraphModule] = []

    def counting_aot_eager(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compiled.append(gm)
        return lookup_backend("aot_eager")(gm, inputs)

    case = op_db.make_case(name)
    op_db.run(torch.compile(op_db.make_step(case), backend=counting_aot_eager), case)
    assert not compiled


def test_the_lists_name_operators_of_the_database() -> None:
    listed = {*op_db.NOT_COMPILED, *BREAKS_THE_GRAPH, *BREAKS_THE_GRAPH_BEFORE, *LOOSER}
    assert listed | DRAWS_OTHERWISE_BEFORE.keys() <= op_db.operators().keys()
