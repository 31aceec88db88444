"""One token of a llama in one native call: products, norms, rotary positions and attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fdk_cpu import _native
from fdk_cpu.backend import CpuInt8Layout, CpuLayout
from fdk_cpu.linear import native_weight
from fdk_cpu.native_args import FLOAT_NAMES, bytes_of, check_contiguous_cpu
from fdk_cpu.runtime import num_threads
from fdk_formats import QuantisedLinear
from fdk_formats.fuse import FusedRows
from fdk_formats.rotated_layout import RotatedLayout

STRIPE = 4  # rows of a weight that the layout stores together


@dataclass(frozen=True)
class LlamaSizes:
    """Sizes and constants of a llama.

    Attributes:
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key and value heads, a divisor of ``heads``.
        head_dim: channels of a head, even.
        ffn: width of the gated MLP.
        vocabulary: outputs of the head.
        eps: of the RMSNorms.
        scale: factor of ``q @ k.T``.
        dtype: of activations, norms, biases and the cache: bf16, fp16 or fp32.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    eps: float
    scale: float
    dtype: torch.dtype


@dataclass(frozen=True)
class LlamaBlock:
    """The weights of a block. Layers are ``nn.Linear`` or ``QuantisedLinear`` on the CPU.

    Attributes:
        input_norm: ``[hidden]``, before attention.
        post_norm: ``[hidden]``, before the MLP.
        qkv: layers that give q, k and v, in this order.
        o: output layer of attention.
        gate_up: layers that give gate and up, in this order.
        down: output layer of the MLP.
        q_norm: ``[head_dim]``, or None.
        k_norm: ``[head_dim]``, or None.
    """

    input_norm: Tensor
    post_norm: Tensor
    qkv: Sequence[nn.Module]
    o: nn.Module
    gate_up: Sequence[nn.Module]
    down: nn.Module
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


def unsupported_layer(layer: nn.Module, dtype: torch.dtype) -> str | None:
    """Return the reason why a decode step cannot compute a layer in a dtype, or None."""
    if type(layer) is nn.Linear:
        weight = layer.weight
        if not weight.is_cpu or weight.dtype != dtype:
            return f"needs weights of {dtype} on the CPU, got {weight.dtype} on {weight.device}"
        return None
    if type(layer) is not QuantisedLinear:
        return f"needs nn.Linear or QuantisedLinear, got {type(layer).__name__}"
    if layer.input_permutation is not None:
        return "permutes its inputs"
    if layer.dtype != dtype or layer.backend_name != "cpu":
        return (
            f"needs the backend cpu and {dtype}, got {layer.backend_name} and {layer.dtype}: "
            "`model.to('cpu')`"
        )
    layout = _cpu_layout(layer)[0]
    if layout.batch_invariant:
        return "is packed for batch invariance"
    return None


class DecodeStep:
    """Computes the logits of one token of each sequence, with a static cache.

    All products, norms and attention run in one call, on ``fdk_cpu.num_threads`` threads that meet
    at barriers: nothing of it is Python. Results are rounded to the dtype where the models of
    transformers round them. The step keeps the weights that the layers had when it was made.

    Args:
        sizes: sizes of the model.
        blocks: its blocks.
        norm: weight of the last norm, ``[hidden]``.
        head: layer that gives the logits.

    Raises:
        ValueError: for layers whose shapes do not fit the sizes, or that a step cannot compute
            (see ``unsupported_layer``).
    """

    def __init__(
        self, sizes: LlamaSizes, blocks: Sequence[LlamaBlock], norm: Tensor, head: nn.Module
    ) -> None:
        self.sizes, self.blocks = sizes, len(blocks)
        self._kept: list[object] = []  # tensors whose addresses the native step has
        self._weights: dict[int, _native.Weight] = {}  # by id of a layout, which is kept
        self._native = _native.DecodeStep(
            sizes.hidden,
            sizes.heads,
            sizes.kv_heads,
            sizes.head_dim,
            sizes.ffn,
            sizes.vocabulary,
            sizes.eps,
            sizes.scale,
            FLOAT_NAMES[sizes.dtype],
        )
        for block in blocks:
            norms = block.input_norm, block.post_norm, block.q_norm, block.k_norm
            self._native.add_block(
                tuple(map(self._bytes, norms)),
                list(map(self._rows, block.qkv)),
                [self._rows(block.o)],
                list(map(self._rows, block.gate_up)),
                [self._rows(block.down)],
            )
        self._native.set_head(self._bytes(norm), [self._rows(head)])

    def new_cache(self, batch: int, length: int) -> Tensor:
        """Return keys and values, ``[blocks, 2, batch, kv_heads, length, head_dim]``, zero."""
        s = self.sizes
        return torch.zeros(self.blocks, 2, batch, s.kv_heads, length, s.head_dim, dtype=s.dtype)

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, starts: Tensor, cache: Tensor, slot: int
    ) -> Tensor:
        """Compute the logits, ``[batch, vocabulary]``, and write keys and values to the cache.

        Args:
            x: ``[batch, hidden]``, the embeddings of the tokens.
            cos: ``[length, head_dim]``, the cosines of every position.
            sin: the sines.
            starts: ``[batch, int64]``, the slot of each sequence's first token. The position of a
                token is its slot less that.
            cache: from ``new_cache``; slots before ``slot`` are read, and ``slot`` is written.
            slot: index of the tokens in the cache.

        Raises:
            ValueError: for tensors of other sizes, or that are not contiguous on the CPU.
            TypeError: for another dtype.
        """
        s = self.sizes
        batch, length = len(x), len(cos)
        for name, tensor, dtype in (
            ("x", x, s.dtype),
            ("cos", cos, s.dtype),
            ("sin", sin, s.dtype),
            ("starts", starts, torch.int64),
            ("cache", cache, s.dtype),
        ):
            check_contiguous_cpu("DecodeStep", name, tensor)
            if tensor.dtype != dtype:
                raise TypeError(f"DecodeStep: {name} must be {dtype}, got {tensor.dtype}")
        x, logits = x.clone(), x.new_empty(batch, s.vocabulary)  # the native step overwrites x
        self._native.run(
            batch,
            length,
            slot,
            bytes_of(x),
            bytes_of(cos),
            bytes_of(sin),
            bytes_of(starts),
            bytes_of(cache),
            bytes_of(logits),
            num_threads(),
        )
        return logits

    def _bytes(self, tensor: Tensor | None) -> tuple[int, int]:
        if tensor is None:
            return 0, 0
        tensor = tensor.detach()
        if tensor.dtype != self.sizes.dtype:
            raise ValueError(f"DecodeStep: needs {self.sizes.dtype}, got {tensor.dtype}")
        tensor = tensor.contiguous()
        check_contiguous_cpu("DecodeStep", "a weight", tensor)
        self._kept.append(tensor)
        return bytes_of(tensor)

    def _rows(self, layer: Any) -> tuple[object, ...]:
        """Return the arguments of ``rows_of`` in native/api/python.cpp."""
        reason = unsupported_layer(layer, self.sizes.dtype)
        if reason is not None:
            raise ValueError(f"DecodeStep: a layer {reason}")
        bias = self._bytes(layer.bias)
        if not isinstance(layer, QuantisedLinear):
            return self._bytes(layer.weight), *layer.weight.shape, bias
        layout, first = _cpu_layout(layer)
        if id(layout) not in self._weights:
            self._kept.append(layout)
            tensors = layout.codes, layout.scale, layout.codebook, layout.zero_point
            self._weights[id(layout)] = native_weight(
                *tensors, layout.group_size, layout.format.bits, *layout.shape
            )
        int8 = None
        if isinstance(layout, CpuInt8Layout):
            int8 = bytes_of(layout.levels), layout.step, layout.offset
        is_rotated = layer.format.rotation is not None
        return self._weights[id(layout)], first, layer.out_features, bias, int8, is_rotated


def _cpu_layout(layer: QuantisedLinear) -> tuple[CpuLayout, int]:
    """Return the packed weight that has the rows of a layer, and the first of them.

    That of a layer that rotates x is the one in the unrotated format.
    """
    layout, first = layer.layout, 0
    if isinstance(layout, FusedRows):
        first, product = layout.product.spans[layout.index][0], _unrotated(layout.product.layout)
        if first % STRIPE == 0:
            layout = product
        else:  # rows from within a stripe on
            kind = type(product)
            assert issubclass(kind, CpuLayout)
            layout, first = kind(layer.quantised.unrotated), 0
    layout = _unrotated(layout)
    assert isinstance(layout, CpuLayout)
    return layout, first


def _unrotated(layout: Any) -> Any:
    return layout.layout if isinstance(layout, RotatedLayout) else layout
