"""A weight as the kernels take it: tensors, and the sizes that go with them."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from fdk_cuda.triton.layout import POSITIONS, TILE_N, Arrangement
from fdk_cuda.triton.remembered import INTERPRETED

TL_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Weight(NamedTuple):
    """The tensors of a layout and the sizes that go with them."""

    words: Tensor
    scale: Tensor
    zero_point: Tensor | None
    values: Tensor
    lanes: Tensor
    arrangement: Arrangement

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The first arguments of every kernel after x."""
        zero = self.scale if self.zero_point is None else self.zero_point
        return self.words, self.scale, zero, self.values, self.lanes

    @property
    def key(self) -> tuple[object, ...]:
        """What kernels are compiled for."""
        a, zero = self.arrangement, self.zero_point
        zero_dtype = None if zero is None else zero.dtype
        # Not the arrangement itself, which takes longer to hash.
        return a.n, a.k, a.bits, a.group_size, self.scale.dtype, zero_dtype

    def has_exact_zeros(self, dtype: torch.dtype) -> bool:
        """Whether there are zero points, and a dtype holds them all."""
        return self.zero_point is not None and self.zero_point.dtype in (dtype, torch.uint8)

    def outputs(self, part: slice) -> "Weight":
        """That of some outputs: of whole tiles, but for the last."""
        a = self.arrangement
        rows = range(a.n)[part]
        tiles = slice(rows.start // TILE_N, -(-rows.stop // TILE_N))
        return self._replace(
            words=self.words[tiles],
            scale=self.scale[tiles],
            zero_point=None if self.zero_point is None else self.zero_point[tiles],
            arrangement=replace(a, n=len(rows)),
        )

    def fused(self, bits: tuple[int, ...]) -> dict[str, int]:
        """Constants by which affine weights of these widths are one multiply-add each.

        Not those with scales or zero points of float32: a product of both must be exact in it.
        (Two values of 1 bit subtract and multiply as the reference does, whatever the dtypes.)
        """
        if self.zero_point is None or self.arrangement.bits not in bits:
            return {}
        is_exact = max(self.scale.itemsize, self.zero_point.itemsize) <= 2
        return {"AFFINE": 2} if is_exact else {}

    def constants(self, dtype: torch.dtype) -> dict[str, Any]:
        """Compile-time arguments of the kernels, for activations of a dtype."""
        a, x_dtype = self.arrangement, TL_DTYPES[dtype]
        return {
            "BITS": a.bits,
            "WORDS": a.words,
            "POSITIONS": POSITIONS[a.bits],
            # Columns of a group that hold weights; one group needs no more than the end of k.
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
