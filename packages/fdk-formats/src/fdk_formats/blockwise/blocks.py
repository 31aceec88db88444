"""QuantisedBlocks: a tensor as codes in blocks, an absmax per block and a table."""

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from fdk_formats.blockwise.codebooks import CODES_8BIT, KINDS_4BIT

# At 8 bits, as in bitsandbytes, a block may have any size.
BLOCK_SIZES_4BIT = (32, 64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KINDS = ("8bit", *KINDS_4BIT)


@dataclass(frozen=True, eq=False)
class NestedAbsmax:
    """The second level of an absmax that is itself stored in 8 bits.

    ``absmax of block i = code[q.absmax[i]] * absmax[i // block_size] + offset``.

    Attributes:
        absmax: ``[ceil(blocks / block_size), float32]``.
        code: ``[256, float32]``.
        offset: the mean of the absmax, ``[]``, float32.
        block_size: blocks that share an entry of ``absmax``.
    """

    absmax: Tensor
    code: Tensor
    offset: Tensor
    block_size: int


@dataclass(frozen=True, eq=False)
class QuantisedBlocks:
    """A tensor of n elements in row-major order, in blocks that share a largest magnitude.

    ``value = code[packed] * absmax``. The tensors equal those of bitsandbytes under the same names
    (``code`` is its ``quant_map``).

    Attributes:
        packed: ``[*shape, uint8]`` at 8 bits; ``[ceil(n/2), 1, uint8]`` at 4, first code in the
            high bits.
        absmax: ``[ceil(n / block_size), float32]``, or uint8 with ``nested``.
        code: ``[256, float32]`` or ``[16, float32]``, the value of each code in [-1, 1].
        shape: shape of the original tensor.
        dtype: dtype of the original tensor, and the default of dequantising.
        block_size: any positive number at 8 bits, a power of two from 32 to 4096 at 4.
        kind: ``8bit``, ``nf4`` or ``fp4``.
        nested: the second level, if the absmax is stored in 8 bits.

    Raises:
        ValueError: if a tensor has another shape or device, or kind or block size are unknown.
        TypeError: if a tensor has another dtype.
    """

    packed: Tensor
    absmax: Tensor
    code: Tensor
    shape: torch.Size
    dtype: torch.dtype
    block_size: int
    kind: str
    nested: NestedAbsmax | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"blocks: kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        check_block_size("blocks", self.block_size, self.bits)
        check_dtype("blocks", self.dtype)
        object.__setattr__(self, "shape", torch.Size(self.shape))
        blocks = -(-self.numel // self.block_size)
        packed_shape = self.shape if self.bits == 8 else torch.Size(((self.numel + 1) // 2, 1))
        self._check("packed", self.packed, torch.uint8, packed_shape)
        self._check("code", self.code, torch.float32, (1 << self.bits,))
        if self.nested is None:
            self._check("absmax", self.absmax, torch.float32, (blocks,))
            return
        check_block_size("blocks.nested", self.nested.block_size, bits=8)
        groups = -(-blocks // self.nested.block_size)
        self._check("absmax", self.absmax, torch.uint8, (blocks,))
        self._check("nested.absmax", self.nested.absmax, torch.float32, (groups,))
        self._check("nested.code", self.nested.code, torch.float32, (CODES_8BIT,))
        self._check("nested.offset", self.nested.offset, torch.float32, ())

    def _check(self, name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        if not isinstance(tensor, Tensor) or tensor.dtype != dtype:
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"blocks: {name} must be {dtype}, got {got}")
        if tensor.shape != shape:
            raise ValueError(
                f"blocks: {name} of a {list(self.shape)} tensor in {self.kind} blocks of "
                f"{self.block_size} must be {list(shape)}, got {list(tensor.shape)}"
            )
        if tensor.device != self.packed.device:
            raise ValueError(f"blocks: {name} must be on {self.packed.device}, got {tensor.device}")

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 if self.kind == "8bit" else 4

    @property
    def numel(self) -> int:
        """Elements of the original tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, tables included."""
        tensors = [self.packed, self.absmax, self.code]
        if self.nested is not None:
            tensors += [self.nested.absmax, self.nested.code, self.nested.offset]
        return sum(tensor.nbytes for tensor in tensors)

    def to(self, device: torch.device | str | int) -> "QuantisedBlocks":
        """Returns the same blocks on another device."""
        nested = self.nested
        if nested is not None:
            nested = replace(
                nested,
                absmax=nested.absmax.to(device),
                code=nested.code.to(device),
                offset=nested.offset.to(device),
            )
        return replace(
            self,
            packed=self.packed.to(device),
            absmax=self.absmax.to(device),
            code=self.code.to(device),
            nested=nested,
        )


def check_block_size(caller: str, block_size: int, bits: int) -> None:
    """Raises ValueError for a block size that bitsandbytes does not accept."""
    if bits == 4 and (type(block_size) is not int or block_size not in BLOCK_SIZES_4BIT):
        sizes = ", ".join(map(str, BLOCK_SIZES_4BIT))
        raise ValueError(f"{caller}: block_size must be one of {sizes}, got {block_size!r}")
    if type(block_size) is not int or block_size < 1:
        raise ValueError(f"{caller}: block_size must be a positive integer, got {block_size!r}")


def check_dtype(caller: str, dtype: torch.dtype) -> None:
    """Raises TypeError unless ``dtype`` is float32, float16 or bfloat16."""
    if dtype not in DTYPES:
        raise TypeError(f"{caller}: dtype must be float32, float16 or bfloat16, got {dtype}")
