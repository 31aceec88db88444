"""Checks of a kernel that rounds columns one after the other."""

from typing import Any

import torch
from torch import Tensor

from fdk_formats import compensate
from fdk_formats.rounding import RoundColumns


def check_round_columns(
    kernel: RoundColumns,
    entries: int,
    columns: int,
    rows: int,
    *,
    has_zero: bool = False,
    device: torch.device | str = "cpu",
) -> None:
    """Checks that a kernel gives the codes and values of torch, bit for bit.

    All numbers are multiples of 1/8 whose sums are exact, so that their order does not show. A
    scale is zero, and one of the values is a midpoint.

    Args:
        kernel: see ``register_round_columns``.
        entries: of the codebook.
        columns: in the block.
        rows: of the weight.
        has_zero: whether there are zero points.
        device: where the kernel runs.

    Raises:
        AssertionError: if they differ.
    """
    generator = torch.Generator().manual_seed(entries)

    def eighths(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 8).round() / 8

    table = torch.arange(entries) - entries / 2
    midpoints = (table[1:] + table[:-1]) / 2
    scale = 2.0 ** eighths(columns, rows).round().clamp(-1, 1)
    wanted = eighths(columns, rows)
    wanted[0, -1] = midpoints[0] * scale[0, -1]
    scale[0, 0] = 0
    # Few and small, or the values would grow beyond all bounds, and out of exact sums.
    feedback = (eighths(columns, columns).sign() / 8).tril(-1).triu(-3)
    given = midpoints, table, wanted, eighths(columns, rows), feedback, scale
    zero = eighths(columns, rows) if has_zero else None
    wanted_codes, wanted_residual = compensate.round_columns(*given, zero)
    moved: list[Any] = [None if each is None else each.to(device) for each in (*given, zero)]
    codes, residual = kernel(*moved)
    torch.testing.assert_close(codes.cpu(), wanted_codes, rtol=0, atol=0)
    torch.testing.assert_close(residual.cpu(), wanted_residual, rtol=0, atol=0)
