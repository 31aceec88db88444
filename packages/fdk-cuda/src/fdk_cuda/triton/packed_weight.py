"""Packed weight: the tensors that the kernels read, with the sizes of their layout."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from fdk_cuda.triton.compiled_launch import INTERPRETED
from fdk_cuda.triton.layout import POSITIONS, TILE_N, PackedLayout

TL_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class PackedWeight(NamedTuple):
    """A weight, or a stack of experts, as every kernel reads it.

    The tensors of a stack have a first dimension for the experts, which tables may share: then it
    is 1. ``layout`` has the sizes of one expert.

    Attributes:
        words: packed codes, ``layout.words_shape``, int32.
        scale: ``[n_tiles, groups, 8, 2]``.
        zero_point: like scale, or None for codebooks.
        values, lanes: lookup tables, see ``decode.lookup_tables``.
        layout: sizes.
    """

    words: Tensor
    scale: Tensor
    zero_point: Tensor | None
    values: Tensor
    lanes: Tensor
    layout: PackedLayout

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The arguments of every kernel after x; without zero points, scale again."""
        zero = self.scale if self.zero_point is None else self.zero_point
        return self.words, self.scale, zero, self.values, self.lanes

    @property
    def key(self) -> tuple[object, ...]:
        """Sizes and dtypes, which distinguish launches."""
        a, zero = self.layout, self.zero_point
        zero_dtype = None if zero is None else zero.dtype
        # Field by field: hashing the layout takes longer.
        return a.n, a.k, a.bits, a.group_size, self.scale.dtype, zero_dtype

    def has_exact_zeros(self, dtype: torch.dtype) -> bool:
        """Returns whether there are zero points and a dtype holds them all exactly."""
        return self.zero_point is not None and self.zero_point.dtype in (dtype, torch.uint8)

    def outputs(self, part: slice) -> "PackedWeight":
        """Returns the weight of a slice of outputs, which starts and ends at tiles (or at n)."""
        a = self.layout
        rows = range(a.n)[part]
        tiles = slice(rows.start // TILE_N, -(-rows.stop // TILE_N))
        return self._replace(
            words=self.words[tiles],
            scale=self.scale[tiles],
            zero_point=None if self.zero_point is None else self.zero_point[tiles],
            layout=replace(a, n=len(rows)),
        )

    def expert(self, index: int) -> "PackedWeight":
        """Returns the weight of one expert of a stack, as views."""
        table = index if len(self.values) > 1 else 0
        return self._replace(
            words=self.words[index],
            scale=self.scale[index],
            zero_point=None if self.zero_point is None else self.zero_point[index],
            values=self.values[table],
            lanes=self.lanes[table],
        )

    def fused(self, bits: tuple[int, ...]) -> dict[str, int]:
        """Returns the constants that scale affine weights of these widths by one multiply-add.

        None for float32 scales or zero points: the product of both must be exact in float32.
        """
        if self.zero_point is None or self.layout.bits not in bits:
            return {}
        is_exact = max(self.scale.itemsize, self.zero_point.itemsize) <= 2
        return {"AFFINE": 2} if is_exact else {}

    def constants(self, dtype: torch.dtype) -> dict[str, Any]:
        """Returns the compile-time arguments of the kernels, for activations of a dtype."""
        a, x_dtype = self.layout, TL_DTYPES[dtype]
        return {
            "BITS": a.bits,
            "WORDS": a.words,
            "POSITIONS": POSITIONS[a.bits],
            # Columns of a group without padding; one group per row is bounded by k.
            "GROUP": a.padded_group if a.groups == 1 else a.group_size,
            "PADDED_GROUP": a.padded_group,
            "SEGMENT": a.segment,
            "ONE_GROUP": a.groups == 1,
            "EXACT": a.k == a.k_tiles * a.tile_k,
            "PAIRED": a.paired,
            "AFFINE": self.zero_point is not None,
            "ASSEMBLY": not INTERPRETED,
            "X_DTYPE": x_dtype,
            "DOT_DTYPE": tl.float32 if INTERPRETED else x_dtype,
        }
