"""The fragment order as formula and as view; Marlin's and Triton's layouts follow it."""

import itertools

import pytest
import torch

from fdk_cuda.layout import column_axes, column_of, row_axes, row_of


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("steps", [2, 4, 8])
def test_view_has_the_columns_of_the_formula(steps, paired):
    columns = torch.arange(16 * steps).view(column_axes(steps, paired=paired))
    width = 2 if paired else 1
    for step, t, upper, pair in itertools.product(range(steps), range(4), range(2), range(2)):
        found = columns[step // width, t, step % width, upper, pair]
        assert found == column_of(step, t, upper, pair, paired=paired)


def test_rows():
    rows = torch.arange(16).view(row_axes())
    assert [[row_of(half, g) for g in range(8)] for half in range(2)] == rows.tolist()


def test_a_lane_reads_eight_neighbours_in_two_steps():
    lane = itertools.product(range(2), [3], range(2), range(2))
    assert [column_of(*place) for place in lane] == list(range(24, 32))


def test_odd_steps_have_no_paired_order():
    with pytest.raises(ValueError, match="even number of steps, got 3"):
        column_axes(3)
