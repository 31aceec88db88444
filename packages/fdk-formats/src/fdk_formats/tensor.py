"""A quantised weight: codes, scales and codebook, with the format that explains them."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from fdk_formats.format import Format
from fdk_formats.packing import CODES_PER_CHUNK, packed_width, unpack
from fdk_formats.scales import decode_scale


@dataclass(frozen=True, eq=False)
class QuantisedTensor:
    """A weight ``[n, k]`` in canonical form: what a file holds and what a backend re-lays out.

        shape      :: (n, k)
        packed     :: [n, ceil(k*bits/8), uint8]      codes, see ``packing``
        scale      :: [n, k/G, scale dtype]           uint8 for e8m0, see ``decode_scale``
        codebook   :: [2^bits, float32] or None       ascending; an entry may repeat
        zero_point :: [n, k/G, scale dtype | uint8]   or None; affine formats only

    Raises:
        ValueError, TypeError: where a field does not have the type, shape or dtype above.
    """

    format: Format
    shape: tuple[int, int]
    packed: Tensor
    scale: Tensor
    codebook: Tensor | None = None
    zero_point: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.format, Format):
            raise TypeError(f"QuantisedTensor: format must be a Format, got {self.format!r}")
        if not isinstance(self.shape, tuple) or [type(size) for size in self.shape] != [int, int]:
            raise ValueError(f"{self.format}: shape must be two integers (n, k), got {self.shape}")
        n, k = self.shape
        groups = k // self.format.group_size_for(k)
        self._check("packed", torch.uint8, (n, packed_width(self.format.bits, k)))
        self._check("scale", self.format.stored_scale_dtype, (n, groups))
        if self.format.is_affine:
            self._check("zero_point", self.format.stored_zero_point_dtype, (n, groups))
            self._check_absent("codebook")
        else:
            self._check("codebook", torch.float32, (1 << self.format.bits,))
            self._check_absent("zero_point")

    def _check(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        tensor = getattr(self, name)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{self.format}: {name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype != dtype:
            raise TypeError(f"{self.format}: {name} must be {dtype}, got {tensor.dtype}")
        if tensor.shape != shape:
            raise ValueError(
                f"{self.format}: {name} of a {list(self.shape)} weight must be {list(shape)}, "
                f"got {list(tensor.shape)}"
            )
        if tensor.device != self.packed.device:
            raise ValueError(
                f"{self.format}: {name} must be on {self.packed.device}, got {tensor.device}"
            )

    def _check_absent(self, name: str) -> None:
        if getattr(self, name) is not None:
            raise ValueError(f"{self.format}: takes no {name}, got one")

    @property
    def group_size(self) -> int:
        """Weights that share a scale; k for whole rows."""
        return self.format.group_size_for(self.shape[1])

    @property
    def device(self) -> torch.device:
        """The device of every tensor."""
        return self.packed.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def bits_per_weight(self) -> float:
        """Bits of a code and its share of scale and zero point; the codebook is not counted."""
        return self.format.bits_per_weight(self.shape[1])

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by name, in the order of the class."""
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value for name, value in values if isinstance(value, Tensor)}

    def to(self, device: torch.device | str | int) -> "QuantisedTensor":
        """The same weight on another device."""
        moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)  # type: ignore[arg-type]

    def codes(self) -> Tensor:
        """The codes, ``[n, k, uint8]``."""
        return unpack(self.packed, self.format.bits, self.shape[1])

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight ``W_hat :: [n, k, dtype]`` that the codes stand for.

        The codebook is rounded to ``dtype`` first; everything after that is one float32 product
        (and, for affine, one float32 difference before it), rounded to ``dtype``. A kernel that
        multiplies by the scale before or after its accumulation gives these bits, for a bf16 or
        fp16 product is exact in float32.

        Raises:
            TypeError: for a dtype that is not floating.
        """
        _check_floating("dequantise", dtype)
        n, k = self.shape
        out = torch.empty((n, k), dtype=dtype, device=self.device)
        step = max(1, CODES_PER_CHUNK // k)
        for start in range(0, n, step):
            out[start : start + step] = self.rows(start, start + step, dtype)
        return out

    def rows(self, start: int, stop: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Rows ``start`` to ``stop`` of ``dequantise(dtype)``."""
        _check_floating("rows", dtype)
        rows = slice(start, stop)
        codes = unpack(self.packed[rows], self.format.bits, self.shape[1])
        codes = codes.view(len(codes), -1, self.group_size)  # [rows, k/G, G]
        scale = decode_scale(self.scale[rows])[..., None]  # [rows, k/G, 1]
        if self.codebook is not None:
            table = self.codebook.to(dtype).to(torch.float32)
            values = table.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)
        else:
            assert self.zero_point is not None
            values = codes.to(torch.float32) - self.zero_point[rows].to(torch.float32)[..., None]
        return (values * scale).view(len(codes), -1).to(dtype)


def _check_floating(caller: str, dtype: torch.dtype) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"{caller}: dtype must be a floating torch.dtype, got {dtype!r}")
