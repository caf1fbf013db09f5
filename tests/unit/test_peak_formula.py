"""The peak as a maximum of sums, evaluated at any sizes and pruned to what can be the largest."""

from __future__ import annotations

import itertools
import random

import pytest
import sympy

from dtrcompile.passes.device.allocators import EXACT, Allocator
from dtrcompile.passes.fitting.peak_formula import (
    Measurable,
    Moment,
    Moments,
    PeakFormula,
    StepFormulas,
)
from dtrcompile.passes.program.sizes import Sizes

S, T = sympy.symbols("s t", integer=True, positive=True)
CUDA = Allocator(512, splits_all=False)


def _at(**values: int) -> Sizes:
    return Sizes.of({S: values["s"], **({T: values["t"]} if "t" in values else {})})


def test_the_largest_sum_counts() -> None:
    # 4 s + 100 is the larger one up to s = 25, 8 s from there on.
    formula = PeakFormula.of([{4 * S: 1, sympy.Integer(100): 1}, {4 * S: 2}], EXACT, {S: 1})
    assert [formula.at(_at(s=s)) for s in (1, 25, 50)] == [104, 200, 400]
    assert str(formula) == "max(100 B + 4 B·s, 8 B·s)"


def test_a_moment_that_another_dominates_is_dropped() -> None:
    # 4 s is below 8 s - 4 for all s from 1 on, as 4 s + 4 (s - 1) has no negative coefficient.
    smaller, larger = {4 * S: 1}, {8 * S - 4: 1}
    assert len(PeakFormula.of([smaller, larger], EXACT, {S: 1}).counts) == 1
    # At s = 0 it is not.
    assert len(PeakFormula.of([smaller, larger], EXACT, {}).counts) == 2


def test_the_smallest_value_of_a_symbol_drops_moments() -> None:
    constant, growing = {sympy.Integer(300): 1}, {4 * S: 1}
    assert len(PeakFormula.of([constant, growing], EXACT, {S: 2}).counts) == 2
    assert len(PeakFormula.of([constant, growing], EXACT, {S: 75}).counts) == 1


def test_pruning_changes_no_value() -> None:
    draw = random.Random(0)
    terms = [4 * S, 4 * S * T, 4 * T, 16 * S**2, sympy.Integer(64), 4 * S * (T - 1)]
    for _ in range(30):
        moments: list[Moment] = [
            {term: draw.randint(1, 3) for term in draw.sample(terms, 3)} for _ in range(12)
        ]
        formula = PeakFormula.of(moments, EXACT, {S: 2, T: 2})
        for s, t in itertools.product((2, 3, 17), (2, 5, 40)):
            values = {S: s, T: t}
            wanted = max(
                sum(count * int(term.subs(values)) for term, count in moment.items())
                for moment in moments
            )
            assert formula.at(_at(s=s, t=t)) == wanted


def test_blocks_of_the_allocator_are_counted_not_requests() -> None:
    formula = PeakFormula.of([{4 * S: 2}], CUDA, {S: 1})
    assert formula.at(_at(s=1)) == 2 * 512
    assert formula.at(_at(s=1 << 20)) == 2 * ((4 << 20) + (1 << 20))


def test_a_term_that_has_to_be_measured() -> None:
    asked: list[int] = []

    def bytes_at(sizes: Sizes) -> int:
        (value,) = (v for _, v in sizes.values)
        asked.append(value)
        return 1000 if value > 10 else 0

    workspace = Measurable("convolution", bytes_at)
    formula = PeakFormula.of([{4 * S: 1, workspace: 1}, {6 * S: 1}], EXACT, {S: 1})
    assert [formula.at(_at(s=s)) for s in (10, 20)] == [60, 1080]
    assert asked == [10, 20]
    assert "workspace of convolution" in str(formula)


@pytest.mark.parametrize("value", [7, 8, 9])
def test_integer_division(value: int) -> None:
    from torch.utils._sympy.functions import FloorDiv

    formula = PeakFormula.of([{4 * FloorDiv(S - 1, 2) + 4: 1, 4 * S: 1}], EXACT, {S: 2})
    assert formula.at(_at(s=value)) == 4 * ((value - 1) // 2) + 4 + 4 * value


def test_a_step_has_a_peak_of_each_phase() -> None:
    moments = Moments([{4 * S: 1}], [{4 * S: 3}, {sympy.Integer(8): 1}], {4 * S: 1}, {})
    measured = StepFormulas.of(moments, EXACT, {S: 1}).at(_at(s=5))
    assert measured.forward_peak_bytes == measured.boundary_bytes == 20
    assert measured.backward_peak_bytes == measured.peak_bytes == 60
    assert measured.saved_bytes == 0


def test_formulas_hold_only_under_their_conditions() -> None:
    moments = Moments([{4 * S: 1}], [], {}, {})
    formulas = StepFormulas.of(moments, EXACT, {S: 1}, [sympy.Ge(S, 4)])
    assert formulas.hold_at(_at(s=4))
    assert not formulas.hold_at(_at(s=3))
