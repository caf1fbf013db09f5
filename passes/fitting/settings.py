"""The numbers by which `fit` searches, each with its unit and with the reason for its value.

"Not measured" means that the history of the project names no measurement for a number.  A change to
one of them changes which plans are made; compare `python -m bench.promises` before and after it.
"""

from __future__ import annotations

from typing import Final

# One search for a budget (`targets.next_target`)

MAX_REPLANNING_ROUNDS: Final = 4
"""Targets that are tried for one budget.  Nearly every graph needs one or two; not measured."""

WELL_FILLED_SHARE: Final = 0.97
"""Share of the budget.  A plan that holds at least this much of it ends the search: a looser plan
could use 3 % more at most.  Not measured."""

WORTHWHILE_SAVING_SHARE: Final = 0.005
"""Share of the best plan's cost.  Measuring a plan takes seconds of compile time, so a looser plan
that saves less than this is not measured.  The value itself was not measured."""

MIN_STEP_DIVISOR: Final = 256
"""Divides the budget.  Where a plan did not fit, the next target is lower by at least the result.
Not measured."""

MIN_INTERVAL_DIVISOR: Final = 128
"""Divides the budget.  The search ends once the targets that are left span less than the result.
Not measured."""

FALLBACK_STEP_DIVISOR: Final = 64
"""Divides the budget.  Where a correction leads out of the targets that are left, and no target is
known to fit, the next one is the least that did not, less the result.  Not measured."""

# The search for the smallest plan (`targets.next_smaller_target`)

MAX_LEARNING_ROUNDS: Final = 2
"""Plans of the planner's minimum that are made after the first, each knowing what the one before
was measured to hold.  Not measured."""

LOOSER_THAN_MINIMUM_PERCENT: Final = (104, 112)
"""Targets in percent of the planner's minimum.  They are tried where the schedule still holds more
than the plan: a looser plan may lose less.  Not measured."""

AGREEMENT_PERCENT: Final = 102
"""Percent of the planned peak.  A schedule that holds no more than this has lost next to nothing.
It is the 2 % within which a predicted peak has to lie."""

MAX_SMALLER_PLANS: Final = 6
"""Plans for less than the smallest measured so far, in all.  Not measured."""

MAX_PLANS_PER_SMALLER_TARGET: Final = 2
"""Of these, plans for one target: the first, and one that knows what the first was measured to
hold.  Looking for the target by halves with two plans each took the Siamese model of `bench.rivals`
from 73.1 to 53.4 MiB, with as many plans as steps of 1/64 took before."""

NEAR_THE_PLAN_PERCENT: Final = 110
"""Percent of what the planner's smallest plan holds, by the plan.  If the smallest schedule is
within this, a plan that holds more by what was learned of other plans is not lowered: BERT,
ResNet-50 and the U-Net of `bench.rivals` (scale quick), whose smallest schedules are within 7 %,
had four such plans, and all of them were larger.  Further above the plan, what was learned tells
less, and there is more to gain: a small convolutional net held 92,664 bytes where 152,864 were
expected (torch 2.12)."""

SMALLER_STEP_DIVISOR: Final = 64
"""Divides the smallest measured peak.  No target is nearer below that peak than the result.  Such
targets are tried because BERT at 40 % of its peak was once smaller than its named minimum; the
step itself was not measured."""

HOPELESS_SHARE: Final = 0.95
"""Share of what the planner's smallest plan holds beside constants.  With less than this, no plan
is searched for a graph that others follow: its forward runs, and all graphs of the step are planned
together when the first backward begins.  The smallest schedule of the demo's small GPT holds 0.86
times that plan, so a search might have found one; then the step is found to fit a little later."""

# What a kernel may hold for its speed (`inductor.layouts`)

SPEED_WORKSPACE_DIVISOR: Final = 6
"""Divides the budget.  One kernel may hold as much as the result for the sake of its speed, where a
plan is found all the same.  Gradients of grouped convolutions take two to three times as long
without it (measured on ConvNeXt); the divisor itself was not measured."""

SPEED_WORKSPACE_COST_SHARE: Final = 0.1
"""Share of a step's compute that may be computed again for that.  On ConvNeXt at 80 % of its peak
the default layouts took a quarter of the step; the share itself was not measured."""

# Lowering

NODES_LOWERED_PER_S: Final = 250
"""Operators of emitted graphs that are lowered in a second of option `lowering_s`.  Lowering took
3.7 to 6.9 ms for each on two cores that other jobs shared (BERT, ViT, the mixture of experts; scale
quick)."""

# Ample budgets

AMPLE: Final = 2
"""Multiple of a guess from which on a budget is ample, so that the default split is compiled
without being measured beforehand.  The schedules of default splits were seen to hold 0.6 to 1.3
times the guess, and measuring beforehand took a third of the compile time."""

# Values that are computed in chunks (`dtrcompile.compilation.in_chunks`)

WORTHWHILE_OVERHEAD: Final = 1.1
"""Multiple of the baseline's compute.  A graph that stays within its budget for less than this is
compiled as it is, without a look at chunks.  Not measured."""

CHUNKED_PART_DIVISOR: Final = 4
"""Divides the peak, less constants.  Values of at least the result are computed in chunks.  Not
measured."""

LEAST_CHUNKED_BYTES: Final = 4 << 20
"""Smaller values are never computed in chunks: the kernels for their chunks would take longer to
start than to run.  Nor are smaller sums of gradients made in place.  Not measured."""

CHUNKS: Final = (4, 16)
"""Numbers of chunks that are tried, in this order.  On a language model with a vocabulary of 32,000
and 2,048 tokens, 4 chunks took the smallest peak from 274 to 94 MiB, and 16 took it to 48 MiB."""

MAX_CHUNKED_OPERATORS: Final = 6000
"""Operators that chunks may add to a graph, because planning and lowering take time for each.  Not
measured."""

WORTHWHILE_CHUNKING_SHARE: Final = 0.95
"""Share of the smallest peak without chunks, or with fewer.  Chunks have to get below it.  Not
measured."""
