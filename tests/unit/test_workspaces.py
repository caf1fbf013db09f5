"""What library calls hold inside: measured, and only where they may hold anything."""

from __future__ import annotations

import pytest
import torch

from dtrcompile.passes.workspaces import workspace_bytes

mm = torch.ops.aten.mm.default
ROWS, INNER, COLUMNS = 8, 24, 5
MATRIX_BYTES = 4 * ROWS * INNER


@pytest.mark.parametrize(
    ("left", "size_bytes"),
    [
        (torch.zeros(ROWS, INNER), 0),
        (torch.zeros(INNER, ROWS).t(), 0),
        (torch.zeros(ROWS, 2 * INNER)[:, :INNER], 0),
        # The gradient of a sum is one row, or column, expanded: BLAS needs it written out.
        (torch.zeros(1, INNER).expand(ROWS, INNER), MATRIX_BYTES),
        (torch.zeros(ROWS, 1).expand(ROWS, INNER), MATRIX_BYTES),
        (torch.zeros(ROWS, 2 * INNER)[:, ::2], MATRIX_BYTES),
    ],
)
def test_products_copy_operands_that_blas_does_not_take(
    left: torch.Tensor, size_bytes: int
) -> None:
    right = torch.zeros(INNER, COLUMNS)
    assert workspace_bytes(mm, (left, right), {}, torch.zeros(ROWS, COLUMNS)) == size_bytes


def test_measuring_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    image, weight = torch.zeros(2, 4, 8, 8), torch.zeros(4, 4, 3, 3)
    convolution = torch.ops.aten.convolution.default
    args = (image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    workspace_bytes(convolution, args, {}, convolution(*args))
    assert capfd.readouterr() == ("", "")
