"""Rounding to a codebook in C++, for searches for scales, training steps and error compensation.

Importing this module registers the kernels for CPU tensors.
"""

import torch
from torch import Tensor

from fdk_cpu import _native
from fdk_cpu.native_args import bytes_of, check_contiguous_cpu
from fdk_cpu.runtime import num_threads
from fdk_formats.rounding import (
    RoundingKernels,
    register_round_columns,
    register_rounding_kernels,
)


def round_groups(
    midpoints: Tensor, entries: Tensor, groups: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``RoundingKernels.round``."""
    codes, rounded = torch.empty_like(groups, dtype=torch.uint8), torch.empty_like(groups)
    _native.round_groups(
        bytes_of(midpoints),
        bytes_of(entries),
        bytes_of(groups),
        bytes_of(scale),
        bytes_of(codes),
        bytes_of(rounded),
        num_threads(),
    )
    return codes, rounded


def squared_errors(
    midpoints: Tensor, entries: Tensor, groups: Tensor, scale: Tensor, importance: Tensor | None
) -> Tensor:
    """See ``RoundingKernels.squared_errors``."""
    errors = torch.empty_like(scale)
    _native.group_errors(
        bytes_of(midpoints),
        bytes_of(entries),
        bytes_of(groups),
        bytes_of(scale),
        bytes_of(importance),
        bytes_of(errors),
        num_threads(),
    )
    return errors


def products(
    midpoints: Tensor, entries: Tensor, groups: Tensor, scale: Tensor, importance: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See ``RoundingKernels.products``."""
    product, square = torch.empty_like(scale), torch.empty_like(scale)
    _native.group_products(
        bytes_of(midpoints),
        bytes_of(entries),
        bytes_of(groups),
        bytes_of(scale),
        bytes_of(importance),
        bytes_of(product),
        bytes_of(square),
        num_threads(),
    )
    return product, square


def round_columns(
    midpoints: Tensor,
    entries: Tensor,
    wanted: Tensor,
    reference: Tensor,
    feedback: Tensor,
    scale: Tensor,
    zero: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See ``register_round_columns``."""
    for name, tensor in (("wanted", wanted), ("reference", reference), ("feedback", feedback)):
        check_contiguous_cpu("round_columns", name, tensor)
    codes, residual = torch.empty_like(wanted, dtype=torch.uint8), torch.empty_like(wanted)
    _native.round_columns(
        bytes_of(midpoints),
        bytes_of(entries),
        bytes_of(wanted),
        bytes_of(reference),
        bytes_of(feedback),
        bytes_of(scale),
        bytes_of(zero),
        bytes_of(codes),
        bytes_of(residual),
        num_threads(),
    )
    return codes, residual


KERNELS = RoundingKernels(round=round_groups, squared_errors=squared_errors, products=products)
register_rounding_kernels("cpu", KERNELS)
register_round_columns("cpu", round_columns)
