"""A stack of experts in the layout of the Triton kernels."""

from typing import Any

import torch
from torch import Tensor

from fdk_cuda.stream_sync import SyncedBuffers
from fdk_cuda.triton.configs.experts import fits_swiglu
from fdk_cuda.triton.expert_ops import triton_expert_linear_op, triton_expert_mlp_op
from fdk_cuda.triton.kernels.decode import lookup_tables
from fdk_cuda.triton.layout import (
    PackedLayout,
    pack_codes,
    pack_scale,
    unpack_codes,
    unpack_scale,
)
from fdk_cuda.triton.packed_weight import PackedWeight
from fdk_formats.backends import ExpertLayout
from fdk_formats.expert_ops import check_mlp_arguments
from fdk_formats.packing import pack
from fdk_formats.tensor import QuantisedStack


class TritonExpertLayout(SyncedBuffers, ExpertLayout):
    """Experts as ``TritonLayout`` has one weight, with a first dimension for the experts.

    Args:
        stack: the quantised experts.
        batch_invariant: see ``TritonLayout``.
    """

    words: Tensor
    scale: Tensor
    zero_point: Tensor | None
    values: Tensor
    lanes: Tensor
    codebook: Tensor | None

    def __init__(self, stack: QuantisedStack, *, batch_invariant: bool = False) -> None:
        super().__init__()
        self.format, self.shape = stack.format, stack.shape
        self.batch_invariant = batch_invariant
        _, n, k = stack.shape
        group_size = stack.format.group_size_for(k)
        a = self.packed_layout = PackedLayout(n, k, stack.format.bits, group_size)
        codebooks = stack.codebook
        if codebooks is None:
            codebooks = torch.arange(1 << a.bits, dtype=torch.float32, device=stack.device)[None]
        tables = [lookup_tables(codebook) for codebook in codebooks]
        # An expert at a time: codes take 8 bytes each while they are packed.
        experts = list(stack.matrices())
        zeros = [pack_scale(q.zero_point, a) for q in experts if q.zero_point is not None]
        tensors = {
            "words": torch.stack([pack_codes(q.codes(), a) for q in experts]),
            "scale": torch.stack([pack_scale(q.scale, a) for q in experts]),
            "zero_point": torch.stack(zeros) if zeros else None,
            "values": torch.stack([values for values, _ in tables]),
            "lanes": torch.stack([lanes for _, lanes in tables]),
            "codebook": stack.codebook,
        }
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)
        self.synchronise()

    def forward(
        self,
        x: Tensor,
        expert_ids: Tensor,
        bias: Tensor | None = None,
        routing_weights: Tensor | None = None,
    ) -> Tensor:
        """See ``ExpertLayout``."""
        a, experts = self.packed_layout, self.shape[0]
        tensors: Any = self.words, self.scale, self.zero_point, self.values, self.lanes
        layout = *tensors, a.bits, a.group_size, self.batch_invariant
        y: Tensor = triton_expert_linear_op(
            x, expert_ids, *layout, bias, routing_weights, experts, a.n, a.k
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
        is_fused = fits_swiglu(self.packed_layout) and not needs_grad and not self.batch_invariant
        if not isinstance(down, TritonExpertLayout) or not is_fused:
            return super().mlp(down, x, expert_ids, routing_weights, bias, down_bias)
        a, b = self.packed_layout, down.packed_layout
        tensors = x, expert_ids, self.words, routing_weights, bias, down_bias
        check_mlp_arguments(self.shape, down.shape, *tensors)
        first = self._tensors(), bias, a.bits, a.group_size
        second = down._tensors(), down_bias, b.bits, b.group_size
        y: Tensor = triton_expert_mlp_op(
            x, expert_ids, routing_weights, *first, *second, a.n // 2, b.n
        )
        return y

    def _weight(self) -> PackedWeight:
        """Returns the experts as the kernels read them."""
        tensors = self.words, self.scale, self.zero_point, self.values, self.lanes
        return PackedWeight(*tensors, self.packed_layout)

    def _tensors(self) -> list[Tensor]:
        zeros = [] if self.zero_point is None else [self.zero_point]
        return [self.words, self.scale, self.values, self.lanes, *zeros]

    def unpack(self) -> QuantisedStack:
        """See ``ExpertLayout``."""
        a, experts = self.packed_layout, self.shape[0]
        packed = [pack(unpack_codes(words, a), a.bits) for words in self.words]
        zero_point = None
        if self.zero_point is not None:
            zero_point = torch.stack([unpack_scale(zeros, a) for zeros in self.zero_point])
        return QuantisedStack(
            format=self.format,
            shape=(experts, a.n, a.k),
            packed=torch.stack(packed),
            scale=torch.stack([unpack_scale(scale, a) for scale in self.scale]),
            codebook=self.codebook,
            zero_point=zero_point,
        )
