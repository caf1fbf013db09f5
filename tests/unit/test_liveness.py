"""What is live after each step, walked from the last step to the first."""

from __future__ import annotations

from dtrcompile.passes.program.liveness import Liveness


def test_a_storage_is_live_while_any_of_its_tensors_is() -> None:
    # Tensors 0 and 1 are views of storage 0, tensor 2 is storage 1.
    live = Liveness([0, 0, 1], 2)
    assert live.dead([1, 0]) == [1, 0]
    assert live.read([2]) == [1]
    assert (live.dead([0, 1]), live.any_live([0, 1]), live.any_live([1, 2])) == ([0], False, True)
    assert live.read([0]) == [0]
    assert live.read([1]) == []  # its storage is live already
    assert live.n_live == [2, 1]
    assert live.define([0]) == []  # the view is still to be read
    assert live.define([1]) == [0]
    assert live.is_live == [False, False, True]


def test_what_is_read_twice_ends_once() -> None:
    live = Liveness([0], 1)
    assert (live.read([0, 0]), live.read([0])) == ([0], [])
    assert (live.define([0]), live.define([0])) == ([0], [])


def test_a_line_of_steps() -> None:
    """x = a(); y = b(x); z = c(x, y), and z is read at the end: x and y are free after c."""
    x, y, z = range(3)
    steps = [([x], []), ([y], [x]), ([z], [x, y])]
    live = Liveness([x, y, z], 3)
    live.read([z])
    freed = []
    for defines, reads in reversed(steps):
        freed.append(live.dead([*reads, *defines]))
        live.define(defines)
        live.read(reads)
    assert freed[::-1] == [[], [], [x, y]]
    assert live.n_live == [0, 0, 0]


def test_a_definition_that_nothing_reads_ends_nothing() -> None:
    live = Liveness([0], 1)
    assert live.define([0]) == []
    assert live.n_live == [0]
