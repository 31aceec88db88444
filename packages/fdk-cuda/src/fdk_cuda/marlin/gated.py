"""``silu(gate) * up`` of one product with the weights of both, written by the product itself."""

from dataclasses import replace
from functools import cache
from typing import TypeGuard

import torch
from torch import Tensor

from fdk_cuda.marlin.backend import MarlinLayout
from fdk_cuda.marlin.launches import device_limits, small_fields, small_launch
from fdk_cuda.marlin.layout import BLOCK_COLUMNS, Geometry
from fdk_cuda.marlin.ops import few_rows
from fdk_cuda.marlin.plan import plan_small
from fdk_cuda.marlin.programs import Variant
from fdk_cuda.nvrtc import Launch
from fdk_cuda.ready import ALIGNMENT
from fdk_formats.format import Format

# Rows of gate, then as many of up, and so on: see gated.cuh.
GATE_ROWS = 16
LANES = 32
# Bits, n, k and rows where a step is faster with a kernel between the two products. 31b at 1 bit,
# one sequence: 3239 us a step for 3121 without, whatever plans both had (H200, docs/benchmarks.md).
SLOWER = {(1, 43008, 6144, 1)}


def in_turns(gate: Tensor, up: Tensor) -> Tensor:
    """The rows of both, as ``gated_linear`` wants them.

    gate, up :: [ffn, ...]    of a weight, its codes, scales or zero points; ffn a multiple of 16
    returns  :: [2 * ffn, ...]

    Raises:
        ValueError: where the shapes differ or ffn is no multiple of 16.
    """
    if gate.shape != up.shape or gate.ndim < 1 or gate.shape[0] % GATE_ROWS:
        raise ValueError(
            f"in_turns: gate and up must be alike with a multiple of {GATE_ROWS} rows, got "
            f"{list(gate.shape)} and {list(up.shape)}"
        )
    turns = -1, GATE_ROWS, *gate.shape[1:]
    return torch.stack((gate.reshape(turns), up.reshape(turns)), dim=1).flatten(0, 2)


def takes_gated(layout: torch.nn.Module, x: Tensor) -> TypeGuard[MarlinLayout]:
    """Whether ``gated_linear`` takes a layout and x, and was not found to make the next one slower.

    Without it: ``silu(gate) * up`` of the layer's outputs, whose channels are in turns too.
    """
    if not isinstance(layout, MarlinLayout) or layout.batch_invariant or not x.is_cuda:
        return False
    n, k = layout.shape
    if (layout.format.bits, n, k, x.numel() // k) in SLOWER:
        return False
    weight = layout.packed, layout.codebook, layout.kernel_format
    return x.shape[-1] == k and _launch_for(x, *weight, n, k) is not None


def gated_linear(layout: MarlinLayout, x: Tensor) -> Tensor:
    """``silu(gate) * up`` for the halves of ``y = x @ W_hat.T``, ``[..., n / 2]``; no gradient.

    Both halves are rounded to x's dtype first, then ``silu(gate)``, then the result.

    Args:
        layout: of a weight whose rows are ``in_turns``.
        x: ``[..., k]``; what ``takes_gated`` says yes to.

    Raises:
        ValueError: for others.
    """
    weight = layout.packed, layout.codebook, layout.kernel_format
    out: Tensor = marlin_gated(x, *weight, *layout.shape)
    return out


@torch.library.custom_op("fdk_cuda::marlin_gated", mutates_args=(), device_types="cuda")
def marlin_gated(
    x: Tensor, packed: Tensor, codebook: Tensor, format: str, n: int, k: int
) -> Tensor:
    """``gated_linear`` by its tensors: see there, and layout.py for them."""
    found = _launch_for(x, packed, codebook, format, n, k)
    if found is None:
        raise ValueError(
            f"marlin_gated: takes few rows of contiguous {codebook.dtype} [..., {k}] and n of a "
            f"multiple of {2 * GATE_ROWS} (see takes_gated), got {x.dtype} {list(x.shape)}, n = {n}"
        )
    y = x.new_empty((*x.shape[:-1], n // 2))
    launch, fields = found
    launch(packed.data_ptr(), codebook.data_ptr(), x.data_ptr(), 0, y.data_ptr(), *fields)
    return y


@marlin_gated.register_fake
def _(x: Tensor, packed: Tensor, codebook: Tensor, format: str, n: int, k: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], n // 2))


def _launch_for(
    x: Tensor, packed: Tensor, codebook: Tensor, format: str, n: int, k: int
) -> tuple[Launch, tuple[int, ...]] | None:
    """What runs x, and the fields after its pointers; None where it is not taken."""
    has_rows = n % (2 * GATE_ROWS) == 0 and packed.shape[1] * BLOCK_COLUMNS == k == x.shape[-1]
    is_plain = x.dtype == codebook.dtype and x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0
    m, device = x.numel() // k, x.get_device()
    if not (has_rows and is_plain and 0 < m <= few_rows(format, n, k, device)):
        return None
    return _launch_for_rows(format, x.dtype, m, n, k, device)


@cache
def _launch_for_rows(
    format: str, dtype: torch.dtype, m: int, n: int, k: int, device: int
) -> tuple[Launch, tuple[int, ...]] | None:
    """The same by sizes; None where no warp would finish gate and up of a row together."""
    geometry = Geometry.of(Format.parse(format), n, k)
    variant = Variant.of(geometry, dtype)
    plan = plan_small(geometry, dtype, m, device_limits(device))
    if 1 << plan.log_share < LANES:
        return None
    plan = replace(plan, shape=replace(plan.shape, gated=True))
    return small_launch(variant, plan, device), small_fields(variant, plan, geometry, m)
