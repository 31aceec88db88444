"""Rotation: the inputs of a layer turned by fixed signs and Hadamard matrices, in blocks.

A format with ``rotation="hadamard"`` stores the codes of ``W R^T``, so that

    W_hat = decode(codes) @ R        x @ W_hat.T = rotate(x) @ decode(codes).T

R is orthogonal and block diagonal. Blocks have B inputs, the largest power of two that divides k,
256 at most (``Format.rotation_block``), and are all the same:

    rotate(x)[i] = (1 / sqrt(B)) sum_j H[i, j] sign[j] x[j]    H[i, j] = (-1)^popcount(i & j)

``sign`` is the rule of ``is_negative``, which files depend on. These are the online rotations of
QuaRot (Ashkboos et al. 2024): outliers spread over their block, and codes fit better.

Sums are float32 butterflies over neighbours 1, 2, 4, ... apart, scaled and rounded once at the end.
Every kernel adds in this order, so that all devices give the same bits.

A part of k that is a multiple of B and divides k has the same B: it needs to know nothing of the
whole.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from fdk_formats.device_constants import constant_on
from fdk_formats.format import MAX_ROTATION_BLOCK, power_of_two_in
from fdk_formats.ops import Op, define_op
from fdk_formats.rounding import find_kernel
from fdk_formats.torch_internals import is_plain_call

# (x :: [..., k], contiguous, block, inverse) -> a new contiguous [..., k], or None for a dtype
# without a kernel.
RotationKernel = Callable[[Tensor, int, bool], Tensor | None]

_KERNELS: dict[str, RotationKernel] = {}


def register_rotation_kernel(device_type: str, kernel: RotationKernel) -> None:
    """Registers the kernel of a device type; packages with kernels do so on import.

    Args:
        device_type: ``cpu``, ``cuda`` or another.
        kernel: gives the bits of ``rotate_in_torch``.
    """
    _KERNELS[torch.device(device_type).type] = kernel


def is_negative(index: int) -> bool:
    """Returns whether an input of a block changes its sign: the lowest bit of a hash of its index.

    The hash is the finaliser of MurmurHash3 (32 bits) of ``index + 1``.
    """
    word = index + 1
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return bool((word ^ (word >> 16)) & 1)


SIGNS = tuple(-1.0 if is_negative(index) else 1.0 for index in range(MAX_ROTATION_BLOCK))


@cache  # of its own: hashing 256 values takes 2 us (Xeon with AMX)
def signs_on(device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the signs of a block of inputs, ``[256]`` of +-1; smaller blocks use the first."""
    return constant_on(device, SIGNS, dtype)


def rotate(x: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotates the last dimension of a tensor.

    One op of torch, differentiable: its gradient is rotated back.

    Args:
        x: ``[..., k]``, floating.
        inverse: True to rotate back, which turns ``decode(codes)`` into ``W_hat``.

    Returns:
        ``[..., k]`` in the dtype of x, rounded once from float32 (or float64).

    Raises:
        ValueError: if x has no dimension.
        TypeError: if it is not floating.

    Example:
        >>> x = torch.randn(3, 768)
        >>> torch.allclose(rotate(rotate(x), inverse=True), x, atol=1e-5)
        True
    """
    rotated: Tensor = _op(x, inverse)
    return rotated


def rotated_importance(importance: Tensor) -> Tensor:
    """Returns the importance of rotated weights ``[..., k]``: its mean over each block.

    That is the diagonal of ``R diag(importance) R^T``: what the rotated inputs have as second
    moments if the inputs are uncorrelated.
    """
    block = power_of_two_in(importance.shape[-1])
    blocks: Tensor = importance.to(torch.float64).unflatten(-1, (-1, block))
    return blocks.mean(-1, keepdim=True).expand(blocks.shape).flatten(-2)


def rotate_in_torch(x: Tensor, block: int, inverse: bool) -> Tensor:
    """Rotates ``x :: [..., k]``, contiguous, with functions of torch."""
    wide = torch.promote_types(x.dtype, torch.float32)
    signs = signs_on(x.device, wide)[:block, None]
    # Butterflies over rows of a matrix [B, blocks] are long vectors, those within a block are not.
    values = torch.empty(block, x.numel() // block, dtype=wide, device=x.device)
    values.copy_(x.view(-1, block).T)
    if not inverse:
        values.mul_(signs)
    other = torch.empty_like(values)
    distance = 1
    while distance < block:
        low, high = values.view(-1, 2, distance * values.shape[1]).unbind(1)
        sums, differences = other.view(-1, 2, distance * values.shape[1]).unbind(1)
        torch.add(low, high, out=sums)
        torch.sub(low, high, out=differences)
        values, other, distance = other, values, 2 * distance
    values = values.mul_(1 / math.sqrt(block))
    if inverse:
        values = values.mul_(signs)
    result = torch.empty_like(x)
    result.view(-1, block).copy_(values.T)
    return result


def _run(x: Tensor, inverse: bool) -> Tensor:
    _check(x)
    if x.numel() == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    x, block = x.contiguous(), power_of_two_in(x.shape[-1])
    kernel = find_kernel(_KERNELS, x.device)
    y = None if kernel is None else kernel(x, block, inverse)
    return rotate_in_torch(x, block, inverse) if y is None else y


def _fake(x: Tensor, inverse: bool) -> Tensor:
    _check(x)
    return x.new_empty(x.shape)


def _check(x: Tensor) -> None:
    if x.ndim < 1:
        raise ValueError("rotate: x must be [..., k], got []")
    if not x.is_floating_point():
        raise TypeError(f"rotate: x must be floating, got {x.dtype}")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.inverse = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _op(grad, not ctx.inverse), None


class _RotateOp(Op):
    """The op, whose plain calls run the kernel without torch's dispatcher."""

    def __call__(self, x: Tensor, inverse: bool) -> Any:
        """Returns ``op(x, inverse)``."""
        if is_plain_call(x, None):
            return _run(x, inverse)
        return super().__call__(x, inverse)


_library = Library("fdk_formats", "FRAGMENT")
_defined = define_op(
    _library,
    "rotate(Tensor x, bool inverse) -> Tensor",
    run=_run,
    fake=_fake,
    backward=_backward,
    setup_context=_setup_context,
    batches_rows=True,
)
_op = _RotateOp(_defined.op, _defined.function)
