"""The rules of `Program`, each broken once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtrcompile.passes.errors import ProgramError
from dtrcompile.passes.program.program import Operator, Phase, Program, Storage, StorageKind, Tensor
from workloads.synthetic import ProgramBuilder, training_chain


def linear() -> Program:
    """x -> a -> (view v of a) -> b | tangent dy -> g; b and g are outputs."""
    b = ProgramBuilder()
    x = b.constant("x", 8, StorageKind.INPUT)
    dy = b.constant("dy", 4, StorageKind.TANGENT)
    (a,) = b.operator("a", [x], [16], 3)
    v = b.view("v", a)
    (out,) = b.operator("b", [v], [32], 5)
    b.begin_backward()
    (g,) = b.operator("g", [dy, a], [64], 7)
    return b.build([out, g])


def test_what_a_program_knows_of_itself() -> None:
    program = linear()
    names = [s.name for s in program.storages]
    assert names == ["x", "dy", "a", "b", "g"]
    assert program.constant_bytes == 8  # x; the tangent arrives at the boundary
    assert program.cost_ns == 3 + 0 + 5 + 7
    a, b, g = (names.index(n) for n in "abg")
    assert program.readers[a] == (1, 2, 3)  # the view, b through the view, g
    assert program.readers[b] == ()
    assert program.held_from_boundary == {b}
    assert program.output_storages == {b, g}
    assert [program.tensors[t].name for t in program.tensors_of[a]] == ["a", "v"]


def test_the_fingerprint_ignores_names_and_nothing_else() -> None:
    program = linear()
    renamed = replace(
        program, operators=tuple(replace(o, name=o.name + "!") for o in program.operators)
    )
    assert renamed.fingerprint == program.fingerprint
    slower = replace(
        program, operators=tuple(replace(o, cost_ns=o.cost_ns + 1) for o in program.operators)
    )
    bigger = replace(
        program,
        storages=tuple(replace(s, size_bytes=s.size_bytes + 1) for s in program.storages),
    )
    assert len({program.fingerprint, slower.fingerprint, bigger.fingerprint}) == 3


def test_a_program_without_operators_is_one() -> None:
    assert Program((), (), (), ()).cost_ns == 0


S = Storage
T = Tensor
F = Phase.FORWARD


@pytest.mark.parametrize(
    ("storages", "tensors", "operators", "outputs", "boundary", "message"),
    [
        ([S(1, "s", 1)], [], [], [], None, "ids are indices"),
        ([S(0, "s", 1)], [], [], [], None, "has no tensor"),
        ([S(0, "s", -1)], [T(0, "t", 0, 0)], [], [], None, "negative size"),
        ([S(0, "s", 1)], [T(0, "t", 0)], [], [], None, "has no producer"),
        ([S(0, "s", 1)], [T(0, "t", 1, 0)], [], [], None, "does not exist"),
        ([S(0, "s", 1)], [T(0, "t", 0, 0)], [], [], None, "not an output of its producer"),
        (
            [S(0, "s", 1, StorageKind.INPUT)],
            [T(0, "t", 0, 0)],
            [Operator(0, "o", F, (), (0,), 1)],
            [],
            None,
            "is computed by an operator",
        ),
        (
            [S(0, "s", 1)],
            [T(0, "t", 0, 0)],
            [Operator(0, "o", F, (0,), (0,), 1)],
            [],
            None,
            "before it is computed",
        ),
        (
            [S(0, "s", 1)],
            [T(0, "t", 0, 0)],
            [Operator(0, "o", F, (), (0, 0), 1)],
            [],
            None,
            "produced twice",
        ),
        (
            [S(0, "s", 1)],
            [T(0, "t", 0, 0), T(1, "v", 0, 1)],
            [Operator(0, "o", F, (), (0,), 1), Operator(1, "p", F, (), (1,), 1)],
            [],
            None,
            "a view of a storage that it does not read",
        ),
        (
            [S(0, "s", 1)],
            [T(0, "t", 0, 0)],
            [Operator(0, "o", F, (), (0,), -1)],
            [],
            None,
            "negative cost",
        ),
        (
            [S(0, "s", 1)],
            [T(0, "t", 0, 0)],
            [Operator(0, "o", F, (), (0,), 1, -2)],
            [],
            None,
            "negative workspace",
        ),
        (
            [S(0, "s", 1)],
            [T(0, "t", 0, 0)],
            [Operator(0, "o", F, (), (0,), 1)],
            [],
            0,
            "wrong side of the boundary",
        ),
        (
            [S(0, "dy", 1, StorageKind.TANGENT)],
            [T(0, "t", 0)],
            [Operator(0, "o", F, (0,), (), 1)],
            [],
            1,
            "reads the tangent",
        ),
        ([], [], [], [0], None, "output 0 does not exist"),
        ([], [], [], [], 1, "is not an operator index"),
    ],
)
def test_each_rule(
    storages: list[Storage],
    tensors: list[Tensor],
    operators: list[Operator],
    outputs: list[int],
    boundary: int | None,
    message: str,
) -> None:
    with pytest.raises(ProgramError, match=message):
        Program(tuple(storages), tuple(tensors), tuple(operators), tuple(outputs), boundary)


def test_the_synthetic_chain_is_the_papers() -> None:
    program = training_chain(3)
    assert [o.name for o in program.operators] == ["f1", "f2", "f3", "g3", "g2", "g1"]
    assert program.cost_ns == 6


def test_the_last_reader_of_each_storage() -> None:
    b = ProgramBuilder()
    (x,) = b.operator("a", [], [4])
    (y,) = b.operator("b", [x], [4])
    (z,) = b.operator("c", [b.view("view of y", y), x], [4])
    # x is read by b and c (3), y by its view's maker (2) and through the view by c, z by nobody.
    assert b.build([z]).last_reader == (3, 3, -1)
