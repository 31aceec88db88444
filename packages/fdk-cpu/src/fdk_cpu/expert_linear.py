"""Stacks of experts: the op ``torch.ops.fdk_cpu.expert_linear`` and its layout."""

import torch
from torch import Tensor
from torch.library import Library

from fdk_cpu import _native
from fdk_cpu.linear import native_tensors
from fdk_cpu.memory import weight_memory
from fdk_cpu.native_args import FLOAT_NAMES, bytes_of
from fdk_cpu.runtime import num_threads
from fdk_cpu.tiles import Tiles, supported_dtypes
from fdk_formats.backends import ExpertLayout
from fdk_formats.expert_ops import define_expert_op
from fdk_formats.tensor import QuantisedStack


def expert_linear(
    x: Tensor,  # [t, k, bf16 | fp16 | fp32] or [t, top_k, k]
    expert_ids: Tensor,  # [t, top_k, int32 | int64]
    codes: Tensor,  # [experts, ...], see native/common/layout.h
    scale: Tensor,
    codebook: Tensor | None,  # [experts or 1, 2^bits, fp32]; None for affine formats
    zero_point: Tensor | None,
    group_size: int,
    bits: int,
    batch_invariant: bool,
    bias: Tensor | None,  # [experts, n, dtype of x]
    routing_weights: Tensor | None,  # [t, top_k]
    experts: int,
    n: int,
    k: int,
) -> Tensor:
    """Compute ``x @ W_hat[expert_ids].T + bias``, ``[t, top_k, n]``; see ``ExpertLayout``."""
    stack = _stack(codes, scale, codebook, zero_point, group_size, bits, experts, n, k)
    tokens, top_k = expert_ids.shape
    is_summed = routing_weights is not None
    y = x.new_empty((tokens, n) if is_summed else (tokens, top_k, n))
    ids = expert_ids.to(torch.int64)
    weights = None if routing_weights is None else routing_weights.to(torch.float32)
    kind, given, threads = _activation("x", x), bytes_of(x), num_threads()
    added, weighted, out = bytes_of(bias), bytes_of(weights), bytes_of(y)
    stack.linear(
        kind, given, bytes_of(ids), tokens, top_k, added, weighted, out, threads, batch_invariant
    )
    return y


def expert_linear_grad_x(
    grad_y: Tensor,  # [t, top_k, n, bf16 | fp16 | fp32]
    expert_ids: Tensor,
    codes: Tensor,
    scale: Tensor,
    codebook: Tensor | None,
    zero_point: Tensor | None,
    group_size: int,
    bits: int,
    batch_invariant: bool,  # ignored, as for lut_linear
    experts: int,
    n: int,
    k: int,
) -> Tensor:
    """Compute ``grad_y @ W_hat[expert_ids]``, ``[t, top_k, k]``."""
    stack = _stack(codes, scale, codebook, zero_point, group_size, bits, experts, n, k)
    tokens, top_k = expert_ids.shape
    grad_x = grad_y.new_empty((tokens, top_k, k))
    ids = expert_ids.to(torch.int64)
    kind, given, out = _activation("grad_y", grad_y), bytes_of(grad_y), bytes_of(grad_x)
    stack.grad_x(kind, given, bytes_of(ids), tokens, top_k, out, num_threads())
    return grad_x


def _activation(name: str, x: Tensor) -> str:
    if x.dtype not in FLOAT_NAMES:
        wanted = ", ".join(map(str, FLOAT_NAMES))
        raise TypeError(f"expert_linear: {name} must be one of {wanted}, got {x.dtype}")
    return FLOAT_NAMES[x.dtype]


def _stack(
    codes: Tensor,
    scale: Tensor,
    codebook: Tensor | None,
    zero_point: Tensor | None,
    group_size: int,
    bits: int,
    experts: int,
    n: int,
    k: int,
) -> _native.ExpertStack:
    """Check the tensors of a layout and return a native stack that points to them."""
    tensors = native_tensors("expert_linear", codes, scale, codebook, zero_point)
    return _native.ExpertStack(experts, n, k, group_size, bits, *tensors)


_library = Library("fdk_cpu", "FRAGMENT")
expert_linear_op = define_expert_op(
    _library,
    "expert_linear",
    layout=(
        "Tensor codes, Tensor scale, Tensor? codebook, Tensor? zero_point, int group_size, "
        "int bits, bool batch_invariant"
    ),
    forward=expert_linear,
    grad_x=expert_linear_grad_x,
    dispatch_keys=("CPU",),
)


class CpuExpertLayout(ExpertLayout):
    """Weights of experts one after another, each in the tiles of ``CpuLayout``.

    codes      :: [experts, code bytes, uint8]
    scale      :: [experts, stored scales, scale dtype]
    zero_point :: like scale, or None
    codebook   :: [experts or 1, 2^bits, float32], or None for affine formats

    Args:
        stack: the weights.
        batch_invariant: see ``CpuLayout``.

    Attributes:
        dtypes: the dtypes of x that ``forward`` supports; the bytes are the same for each.
    """

    codes: Tensor
    scale: Tensor
    codebook: Tensor | None
    zero_point: Tensor | None

    def __init__(self, stack: QuantisedStack, *, batch_invariant: bool = False) -> None:
        super().__init__()
        self.batch_invariant, self.dtypes = batch_invariant, supported_dtypes(stack)
        self.format, self.shape, self.group_size = stack.format, stack.shape, stack.group_size
        experts, tiles = len(stack), self._tiles
        code_bytes, scales = tiles.sizes
        codes = weight_memory(experts * code_bytes, torch.uint8).view(experts, code_bytes)
        for own, packed in zip(codes, stack.packed, strict=True):
            tiles.pack_codes(packed, own)
        self.register_buffer("codes", codes, persistent=False)
        for name in ("scale", "zero_point"):
            tensor: Tensor | None = getattr(stack, name)
            groups = None
            if tensor is not None:
                groups = weight_memory(experts * scales, tensor.dtype).view(experts, scales)
                for to, given in zip(groups, tensor, strict=True):
                    tiles.pack_groups(given, to)
            self.register_buffer(name, groups, persistent=False)
        codebook = None if stack.codebook is None else stack.codebook.contiguous()
        self.register_buffer("codebook", codebook, persistent=False)

    @property
    def _tiles(self) -> Tiles:
        return Tiles(self.shape[1:], self.group_size, self.format.bits)

    def forward(
        self,
        x: Tensor,
        expert_ids: Tensor,
        bias: Tensor | None = None,
        routing_weights: Tensor | None = None,
    ) -> Tensor:
        """See ``ExpertLayout``."""
        tensors = (self.codes, self.scale, self.codebook, self.zero_point)
        options = self.group_size, self.format.bits, self.batch_invariant
        return expert_linear_op(
            x, expert_ids, *tensors, *options, bias, routing_weights, *self.shape
        )

    def unpack(self) -> QuantisedStack:
        """See ``ExpertLayout``."""
        tiles, zero_point = self._tiles, self.zero_point
        return QuantisedStack(
            self.format,
            self.shape,
            torch.stack([tiles.unpack_codes(codes) for codes in self.codes]),
            torch.stack([tiles.unpack_groups(scale) for scale in self.scale]),
            self.codebook,
            None
            if zero_point is None
            else torch.stack([tiles.unpack_groups(zero) for zero in zero_point]),
        )
