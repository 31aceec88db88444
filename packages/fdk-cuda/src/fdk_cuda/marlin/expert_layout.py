"""A stack of experts in the Marlin layout, packed once for few and for many rows."""

import torch
from torch import Tensor

from fdk_cuda.marlin import repack
from fdk_cuda.marlin.expert_ops import (
    OCTET,
    is_interleaved,
    marlin_expert_linear_op,
    marlin_expert_mlp_op,
    stack_geometry,
)
from fdk_cuda.stream_sync import SyncedBuffers
from fdk_formats.backends import ExpertLayout
from fdk_formats.expert_ops import check_mlp_arguments
from fdk_formats.scales import decode_scale
from fdk_formats.tensor import QuantisedStack


class MarlinExpertLayout(SyncedBuffers, ExpertLayout):
    """Experts as ``MarlinLayout`` has one weight, with a first dimension for the experts.

    packed             :: [experts, padded_n / 32, padded_k / 64, block bytes, uint8]
    codebook           :: [experts or 1, 2^bits, dtype]    0, 1, 2, ... for affine formats
    canonical_codebook :: as the stack has it, float32, or None: what ``unpack`` returns

    Where 16 divides n, octets of rows are of the first and of the second half of the outputs in
    turns, so that gates and what they multiply are in the same lane.

    Args:
        stack: the quantised experts.
        dtype: dtype of the activations.
    """

    packed: Tensor
    codebook: Tensor
    canonical_codebook: Tensor | None

    def __init__(self, stack: QuantisedStack, dtype: torch.dtype) -> None:
        super().__init__()
        self.format, self.shape = stack.format, stack.shape
        _, n, k = stack.shape
        geometry = self.geometry = stack_geometry(stack.format, n, k)
        order = self._order(stack.device)
        codebook = stack.codebook
        if codebook is None:
            codebook = torch.arange(1 << geometry.bits, dtype=torch.float32, device=stack.device)
            codebook = codebook[None]
        packed = stack.packed.new_empty((stack.shape[0], *geometry.shape))
        # An expert at a time, which bounds temporaries.
        for own, q in zip(packed, stack.matrices(), strict=True):
            scale = q.scale
            if stack.format.has_power_of_two_scale:
                scale = decode_scale(scale).to(geometry.scale_dtype)
            zero = None if q.zero_point is None else q.zero_point.to(scale.dtype)[order]
            own.copy_(repack.pack(geometry, q.packed[order], scale[order], zero))
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("codebook", codebook.to(dtype), persistent=False)
        self.register_buffer("canonical_codebook", stack.codebook, persistent=False)
        self._format = str(stack.format)
        self.synchronise()

    def _order(self, device: torch.device) -> Tensor:
        """Returns the outputs in the order of packed rows."""
        n = self.shape[1]
        outputs = torch.arange(n, device=device)
        if not is_interleaved(n):
            return outputs
        return outputs.view(2, -1, OCTET).transpose(0, 1).flatten()

    def forward(
        self,
        x: Tensor,
        expert_ids: Tensor,
        bias: Tensor | None = None,
        routing_weights: Tensor | None = None,
    ) -> Tensor:
        """See ``ExpertLayout``."""
        layout = self.packed, self.codebook, self._format
        y: Tensor = marlin_expert_linear_op(
            x, expert_ids, *layout, bias, routing_weights, *self.shape
        )
        return y

    def mlp(
        self,
        down: ExpertLayout,
        x: Tensor,
        expert_ids: Tensor,
        routing_weights: Tensor,
        bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor:
        """See ``ExpertLayout``. Without gradients, SwiGLU is part of the first product."""
        given = x, routing_weights, bias, down_bias
        needs_grad = torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad for tensor in given
        )
        both = self.shape[1]
        is_fused = is_interleaved(both) and not needs_grad and x.ndim == 2
        if not isinstance(down, MarlinExpertLayout) or not is_fused:
            return super().mlp(down, x, expert_ids, routing_weights, bias, down_bias)
        tensors = x, expert_ids, self.packed, routing_weights, bias, down_bias
        check_mlp_arguments(self.shape, down.shape, *tensors)
        if down.codebook.dtype != self.codebook.dtype:
            raise TypeError(
                f"mlp: down must be packed for {self.codebook.dtype}, got {down.codebook.dtype}"
            )
        first = self.packed, self.codebook, self._format, bias
        second = down.packed, down.codebook, down._format, down_bias
        y: Tensor = marlin_expert_mlp_op(
            x, expert_ids, routing_weights, *first, *second, both // 2, down.shape[1]
        )
        return y

    def unpack(self) -> QuantisedStack:
        """See ``ExpertLayout``."""
        g, place = self.geometry, self._order(self.packed.device).argsort()
        packed, scales, zeros = [], [], []
        for own in self.packed:
            canonical, scale, zero_point = repack.unpack(g, own)
            if self.format.has_power_of_two_scale:
                scale = (scale.view(torch.int16) >> 7).to(torch.uint8)
            packed.append(canonical[place])
            scales.append(scale[place])
            if zero_point is not None:
                zeros.append(zero_point.to(self.format.stored_zero_point_dtype)[place])
        return QuantisedStack(
            format=self.format,
            shape=self.shape,
            packed=torch.stack(packed),
            scale=torch.stack(scales),
            codebook=self.canonical_codebook,
            zero_point=torch.stack(zeros) if zeros else None,
        )
