"""The numbers by which planners search, each with its unit and with the reason for its value.

All of them are part of what makes a plan: the same program, budget and settings give the same plan
on any machine.  "Not measured" means that the history of the project names no measurement for a
number; `python -m bench.planner_quality` and `python -m bench.planner_gaps` measure what a change
to one is worth, and `python -m bench.planner_scaling` what it takes.

A *unit of work* is what the local search counts in place of time: very roughly 2 µs on one core of
a server of 2020.
"""

from __future__ import annotations

from typing import Final

# The smallest budget (`planners.minimum_plan`)

MAX_BISECTION_RUNS: Final = 22
"""Runs of a planner in the search for its smallest budget.  Not measured."""

MINIMUM_TOLERANCE_DIVISOR: Final = 1024
"""Divides a budget in bytes.  A smallest budget is searched until it is known to within the
result: a thousandth.  Not measured."""

NEXT_SEARCH_DIVISOR: Final = 128
"""Divides the smallest budget of one search (`Planner.minimum_searches`): the next one, in another
order of first runs, begins that much below it, and is as exact.  Of ten models, that order saves
nothing for six, which one try tells, and 1.1 to 2.7 % for four (`python -m
bench.planner_orders`)."""

MAX_KNOWN_MINIMUMS: Final = 32
"""Plans.  Smallest plans are remembered for the programs that are asked for most lately: those of
the graphs of one step, each beside the others and alone.  Not measured."""

# Planner `auto`: how much it works

WORK_PER_S: Final = 600_000
"""Units of work in a second of `planning_s`.  It was 500,000 when the count of work was fitted to
the measured cost of moves, so that planning takes about what `planning_s` says; no figure is known
for the step from there."""

WORK_PER_SIMULATED_STEP: Final = 12
"""Units of work that one step of the simulator stands for: about as much as it takes, with the
same history as `WORK_PER_S`."""

DEFAULT_S_PER_OPERATOR: Final = 2e-3
"""Seconds for each operator of a small program, where no `planning_s` is given.  Not measured."""

DEFAULT_S_PER_THOUSAND_OPERATORS: Final = 0.75
"""Seconds: the most for a program of up to a thousand operators, and for each thousand of a larger
one.  Chosen so that a thousand operators are planned in less than a second, candidates included."""

MAX_DEFAULT_S: Final = 5.0
"""Seconds: the most for any program where no `planning_s` is given.  Not measured."""

MAX_OPERATORS_IN_ALL_ORDERS: Final = 64
"""Operators.  Larger programs are planned in two orders of first runs, their own and the first of
`orders`, since each takes time.  A third one is worth little: `python -m
bench.planner_gaps` compares plans of tiny programs with the optimum over all orders."""

CANDIDATE_WORK_SHARE: Final = 0.3
"""Share of the work for running the simulator with one heuristic after another.  Not measured."""

TRIAL_WORK_SHARE: Final = 0.1
"""Share of the search's work for each of the plans that it may start from, before the best of them
gets what is left.  Not measured."""

MAX_SEEDS: Final = 3
"""Plans from which the search may start.  Not measured."""

MINIMUM_WORK_DIVISOR: Final = 4
"""Divides the work for repairing a plan where a smallest budget is searched, which takes many runs.
Not measured."""

# Planner `auto`: what it tries

MIN_CANDIDATES: Final = 4
"""Heuristics that are run even if none of them has found a plan and the work is used up; also the
heuristics that are run for a smallest budget.  Not measured."""

SIMULATOR_WALK_LIMIT: Final = 64
"""Evicted storages that the simulator looks at when it follows what one eviction changes
(`neighborhoods.make_tracker`).  Not measured."""

LOOSER_BUDGET_PERCENT: Final = (115, 160)
"""Percent of the budget.  Where no heuristic gets through, a plan for these budgets is repaired
down to the one asked for.  Not measured."""

TIGHTENING_STEPS: Final = 8
"""Steps in which the budget of such a plan is lowered.  Not measured."""

MAX_EXHAUSTED_OPERATORS: Final = 12
"""Operators, and storages that they compute.  All plans of programs with no more of either are
searched where the heuristics and the local search leave a doubt.  Of 360 budgets of random programs
with up to 12 operators, 7 were planned at more than 1.02 times the optimum without it."""

MAX_EXHAUSTED_STATES: Final = 20_000
"""States that such a search looks at before it gives up: none of these budgets took more, and the
longest search 0.2 s."""

MAX_PROVABLE_OPERATORS: Final = 2_000
"""Operators.  Plans of larger programs come near the bound of one stage, but hardly ever meet it,
so they are not asked.  (Of the Checkmate graphs, all small, 26 of 30 feasible budgets meet it.)"""

MAX_COVERS: Final = 256
"""Covers of the excess that no other beats in both cost and bytes.  Beyond that the last item is
split instead, which makes the bound a little lower.  Not measured."""

MAX_CHAIN_RUNS: Final = 300_000
"""Runs of operators in a binomial schedule.  Longer ones are not made.  Not measured."""

# The local search (`planners.search` and `planners.intervals`)

MAX_TRIES: Final = 4
"""Evictions whose true cost is found by trying them, of those that are likely to cost least, once
one of them has been found to help.  Not measured."""

MAX_TRIES_UNTIL_ONE_HELPS: Final = 48
"""Evictions that are tried as long as none of them makes the stage hold less.  Not measured."""

REPAIRS_PER_UNDONE_EVICTION: Final = 3
"""Evictions that may make up for each one that was undone, beside `EXTRA_REPAIRS`.  Not
measured."""

EXTRA_REPAIRS: Final = 8
"""Evictions, see `REPAIRS_PER_UNDONE_EVICTION`.  Not measured."""

MEAN_FURTHER_UNDONE_EVICTIONS: Final = 5.0
"""Evictions that are undone at once are 1 and a geometric number of this mean.  Not measured."""

MAX_UNDONE_EVICTIONS: Final = 40
"""Evictions that are undone at once.  Not measured."""

ONE_LOCKED_PROBABILITY: Final = 0.5
"""Probability that only one of the undone evictions is ruled out in the repair that follows,
instead of all.  Not measured."""

ACCEPTED_WORSENING_SHARE: Final = 0.003
"""Share of the best plan's extra cost by which a plan may cost more and still be searched on from;
it falls to 0 at the end.  Not measured."""

DETOUR_SHARE: Final = 0.1
"""Share of the best plan's extra cost that a repair may cost beyond that, because the slack that it
leaves is filled afterwards.  Not measured."""

SCORE_NOISES: Final = (0.05, 0.3)
"""Shares by which chance may raise an eviction's score; one is drawn for each repair.  Not
measured."""

DURATION_POWERS: Final = (0.0, 0.5, 1.0)
"""Powers of the number of stages that an eviction relieves; one is drawn for each repair.  Only
these three are rounded in the same way on every machine."""

MAX_JOURNAL_CHANGES: Final = 400_000
"""Changes since the best plan, after which the search goes back to it: they take memory.  Not
measured."""

MAX_SEARCHED_STAGE_RUNS: Final = 64
"""Operators that run again in one stage.  Beyond that a new one takes its place in the program's
order: looking for its first reader would be quadratic.  Not measured."""

WORK_PER_NEW_TOUCH: Final = 7
"""Units of work for a touch that changes what is kept, beside the one for any touch.  It follows
the measured cost of moves, for which no figure is known."""

# Planner `offload`

COPY_LATENCY_NS: Final = 10_000
"""What a copy to the host or back takes beside its bytes: about a launch, and an event that another
stream waits for.  Not measured."""

OFFLOAD_LINK_PRICES: Final = (0.0, 0.005, 0.02, 0.06, 0.15)
"""Prices of the link's time (`link_forecast.LinkForecast`) with which the simulator is run.  Not
measured."""

OFFLOAD_PRICE_FACTORS: Final = (0.6, 1.6)
"""Multiples of the best of these prices that are tried afterwards.  Not measured."""

OFFLOAD_COPIED_SHARES: Final = (1.0, 0.75, 0.5, 0.375, 0.25, 0.125, 0.0625)
"""Shares of the base plan's recomputations that become copies; the numbers around the best one are
tried afterwards.  Not measured."""

OFFLOAD_STEPS_PER_OPERATOR: Final = 20
"""Steps that all runs of the simulator together may record, for each operator of the program.  Not
measured; fixed work, so that the plan is the same on every machine."""

MIN_OFFLOAD_STEPS: Final = 40_000
"""Steps: what `OFFLOAD_STEPS_PER_OPERATOR` comes to at least.  Not measured."""

# Planners `checkmate` and `checkmate-lp`

MAX_TOLERANCE_RETRIES: Final = 3
"""Solutions that are asked for.  One may pass the budget by the solver's tolerance; then the next
is for a little less.  Not measured."""

TOLERANCE_SHARE: Final = 1e-5
"""Share of the budget by which it is then lowered: ten times the solver's tolerance."""

SOLVER_ZERO_SHARE: Final = 1e-6
"""Share of a whole variable at or below which it is 0: the solver's tolerance."""

MAX_SIZE_UNITS: Final = 1 << 20
"""Units in the budget.  Sizes are whole multiples of a unit, so that the solver's tolerance (1e-6)
cannot pass for a byte."""

MAX_NODES_IN_FULL: Final = 128
"""Nodes up to which each row of `Memory.LIVE` names all that is held: a knapsack, which solvers
know to cut.  Such rows take n³ entries and running sums n², so above it the sums are used."""

MAX_NODES: Final = 700
"""Nodes of the largest program that is taken.  Variables grow with the square: a million and a half
here."""
