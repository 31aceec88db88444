"""The Marlin layout: a weight in the order of tensor-core fragments.

A weight ``[n, k]`` is padded to ``[padded_n, padded_k]`` and cut into blocks of 32 x 64, stored one
after another along k, then along n. A block holds its codes, then its scales:

    packed :: [padded_n / 32, padded_k / 64, block bytes, uint8]
    block  =  codes 256 * bits bytes | scales 32 * per_row * (scale bytes [+ zero point bytes])

The codes of a block are two fragments of 16 rows x 64 columns, in the paired order of
``fdk_cuda.layout.fragment_order``: four steps s; register i = 2 * upper + half of a lane holds row
``8 * half + g``, two columns e each. So a lane has 32 codes of a fragment, in ``bits`` words of 32
bits; ``_fields`` gives their places. A lane's words of both fragments are stored in pieces of 16
bytes, piece after piece, 32 lanes to a piece (a last piece of 8 bytes where bits are odd), so that
a warp's loads are contiguous.

Hopper's wgmma reads x from shared memory in its own order, so lane t' of four needs columns
``8 * j + 2 * t' + e``: from each of its neighbours j = 0..3 the unit t' = 2 * (s & 1) + upper. The
layout serves both: a unit is contiguous in a word (4 bits), in a byte of every word (3 bits), or
similar. From 5 to 7 bits it is a word, plus some bits of each byte of words that two or four units
share. Pieces are stored in the order ``SLOTS_OF_LANES``, ``8 * t + (g ^ 2 * t)``, which has no bank
conflicts, neither for a lane's own pieces nor for those of its neighbours.

The scales of a block are ordered by g, so that those of a lane are contiguous: for each g first the
scales, then the zero points, each as [half of the 64 columns, if per_row is 2][fragment][row g,
row g + 8].
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from fdk_cuda.layout import column_axes, row_axes
from fdk_formats.format import Format
from fdk_formats.packing import pack, unpack

BLOCK_N, BLOCK_K = 32, 64
FRAGMENTS = 2
STEPS, REGISTERS, PAIR = 4, 4, 2
LANES, WORD_BITS = 32, 32
# Place of the piece of lane 4 * g + t among 32.
SLOTS_OF_LANES = tuple(8 * t + (g ^ 2 * t) for g in range(8) for t in range(4))
LANES_OF_SLOTS = tuple(SLOTS_OF_LANES.index(slot) for slot in range(LANES))
# Codes of a lane in a block, and words of a 16-byte piece.
SLOTS = FRAGMENTS * STEPS * REGISTERS * PAIR
PIECE_WORDS = 4
# A weight is padded to multiples of the tile that a kernel reads at a time.
N_MULTIPLE, K_MULTIPLE = 64, 128
# Codes packed at a time, which bounds temporaries: about 20 bytes per code.
CODES_PER_CHUNK = 1 << 26

# Dtypes of stored scales and zero points: e8m0 is exact in bf16, and so are integer zero points.
STORED_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e8m0": torch.bfloat16,
}


def stored_dtype(format: Format) -> torch.dtype:
    """Returns the dtype in which the layout stores scales and zero points."""
    return STORED_DTYPES[format.scale_dtype]


def has_grid(format: Format) -> bool:
    """Returns True where kernels may compute the value of an 8-bit code from the format alone."""
    return format.is_grid and format.bits == 8


@dataclass(frozen=True)
class Geometry:
    """Sizes of the layout of a weight ``[n, k]``.

    Attributes:
        bits: width of a code.
        n, k: outputs and inputs of the weight.
        group_size: weights that share a scale.
        scale_dtype: dtype of stored scales and zero points.
        has_zero_point: True with zero points.
        whole_zero_point: True where they are integers from 0 to 255.
        grid_zero_point: for 8-bit codebooks that are integer grids, the integer to subtract from a
            code to get its value: 127, where no code is 255, or 128. Else None.
        has_signs: True where the two values of 1 bit are -c and c.
    """

    bits: int
    n: int
    k: int
    group_size: int
    scale_dtype: torch.dtype
    has_zero_point: bool
    whole_zero_point: bool = False
    grid_zero_point: int | None = None
    has_signs: bool = False

    @classmethod
    def of(cls, format: Format, n: int, k: int) -> "Geometry":
        """Returns the geometry of a weight of this format."""
        return cls(
            format.bits,
            n,
            k,
            format.group_size_for(k),
            stored_dtype(format),
            format.is_affine,
            format.has_integer_zero_point,
            format.grid_zero_point if has_grid(format) else None,
            format.is_binary,
        )

    @property
    def has_table(self) -> bool:
        """True where the value of a code can only be looked up."""
        return not self.has_zero_point and self.grid_zero_point is None

    @property
    def padded_n(self) -> int:
        """n, padded."""
        return -(-self.n // N_MULTIPLE) * N_MULTIPLE

    @property
    def padded_k(self) -> int:
        """k, padded."""
        return -(-self.k // K_MULTIPLE) * K_MULTIPLE

    @property
    def per_row(self) -> int:
        """Scales in a row of a block: 2 where a group ends inside 64 columns, else 1.

        A longer group's scale is stored once for each 64 columns.
        """
        return 1 if self.group_size % BLOCK_K == 0 or self.group_size == self.k else 2

    @property
    def repeats(self) -> int:
        """Times that a scale is stored along a row."""
        return -(-self.group_size // (BLOCK_K // self.per_row))

    @property
    def code_bytes(self) -> int:
        """Bytes of a block's codes."""
        return BLOCK_N * BLOCK_K * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of a block's scales and zero points."""
        each = self.scale_dtype.itemsize * (2 if self.has_zero_point else 1)
        return BLOCK_N * self.per_row * each

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the packed tensor."""
        blocks = self.padded_n // BLOCK_N, self.padded_k // BLOCK_K
        return *blocks, self.code_bytes + self.scale_bytes


def unsupported_reason(format: Format, k: int) -> str | None:
    """Returns why the layout cannot hold a weight of this format, or None."""
    size = format.group_size_for(k)
    if size % 32 and size != k:
        return f"needs groups of a multiple of 32 or whole rows, got {size}"
    return None


def pack_layout(
    geometry: Geometry, canonical: Tensor, scale: Tensor, zero_point: Tensor | None
) -> Tensor:
    """Packs a canonical weight, on its own device.

    Args:
        geometry: geometry of the weight.
        canonical: ``[n, ceil(k * bits / 8), uint8]``.
        scale: ``[n, k / G, geometry.scale_dtype]``.
        zero_point: the same shape and dtype, or None.

    Returns:
        ``packed``, of shape ``geometry.shape``, uint8.
    """
    g = geometry
    packed = canonical.new_empty(g.shape)
    kinds = torch.stack([scale] if zero_point is None else [scale, zero_point])
    step = _rows_per_chunk(g)
    for start in range(0, g.padded_n, step):
        stop = min(start + step, g.padded_n)
        codes = canonical.new_zeros((stop - start, g.padded_k))
        filled = max(0, min(stop, g.n) - start)
        codes[:filled, : g.k] = unpack(canonical[start : start + filled], g.bits, g.k)
        blocks = packed[start // BLOCK_N : stop // BLOCK_N]
        blocks[..., : g.code_bytes] = _codes_to_bytes(g, codes)
        padded = kinds.new_zeros((len(kinds), stop - start, _scales_per_row(g)))
        repeated = kinds[:, start : start + filled].repeat_interleave(g.repeats, dim=-1)
        padded[:, :filled, : _filled_scales(g)] = repeated
        blocks[..., g.code_bytes :] = _scales_to_bytes(g, padded)
    return packed


def unpack_layout(geometry: Geometry, packed: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns canonical bytes, scale and zero point: the inverse of ``pack_layout``."""
    g = geometry
    canonical, kinds = [], []
    step = _rows_per_chunk(g)
    # At least once, so that an empty weight gets its shapes too.
    for start in range(0, max(g.padded_n, 1), step):
        blocks = packed[start // BLOCK_N : (start + step) // BLOCK_N]
        filled = max(0, min(start + step, g.n) - start)
        codes = _bytes_to_codes(g, blocks[..., : g.code_bytes])
        canonical.append(pack(codes[:filled, : g.k], g.bits))
        padded = _bytes_to_scales(g, blocks[..., g.code_bytes :])
        kinds.append(padded[:, :filled, : _filled_scales(g) : g.repeats])
    scale, *zero_point = torch.cat(kinds, dim=1)
    return torch.cat(canonical), scale, zero_point[0] if zero_point else None


def _rows_per_chunk(g: Geometry) -> int:
    return max(1, CODES_PER_CHUNK // (g.padded_k * N_MULTIPLE)) * N_MULTIPLE


# Axes of codes [padded_n, padded_k]:
#   [tile, fragment, half, g, block, step // 2, t, step % 2, upper, e]
# and of planes, one per slot: [fragment, step // 2, step % 2, upper, half, e, tile, block, g, t]
_TO_PLANES = (1, 5, 7, 8, 2, 9, 0, 4, 3, 6)
_FROM_PLANES = tuple(_TO_PLANES.index(axis) for axis in range(len(_TO_PLANES)))


def _codes_to_bytes(g: Geometry, codes: Tensor) -> Tensor:
    blocks = g.padded_k // BLOCK_K
    axes = codes.view(-1, FRAGMENTS, *row_axes(), blocks, *column_axes(STEPS))
    slots = axes.permute(_TO_PLANES).reshape(SLOTS, -1)
    words = codes.new_zeros((FRAGMENTS * g.bits, slots.shape[1]), dtype=torch.int32)
    for field in _fields(g.bits):
        part = slots[field.slot].to(torch.int32)
        words[field.word] |= (part >> field.code_shift & field.mask) << field.word_shift
    return _interleave(words).view(torch.uint8).view(-1, blocks, g.code_bytes)


def _bytes_to_codes(g: Geometry, data: Tensor) -> Tensor:
    words = _deinterleave(data.contiguous().view(torch.int32).flatten(0, 1))
    slots = data.new_zeros((SLOTS, words.shape[1]))
    for field in _fields(g.bits):
        part = words[field.word] >> field.word_shift & field.mask
        slots[field.slot] |= (part << field.code_shift).to(torch.uint8)
    blocks = g.padded_k // BLOCK_K
    axes = slots.view(FRAGMENTS, 2, 2, 2, 2, PAIR, -1, blocks, 8, 4).permute(_FROM_PLANES)
    return axes.reshape(-1, g.padded_k)


def _interleave(words: Tensor) -> Tensor:
    """Reorders planes of words ``[words, blocks * 32]`` to pieces, ``[blocks, words * 32]``."""
    planes = words.view(len(words), -1, LANES)[..., LANES_OF_SLOTS]
    pieces = planes.split(PIECE_WORDS)
    return torch.cat([piece.permute(1, 2, 0).flatten(1) for piece in pieces], dim=1)


def _deinterleave(blocks: Tensor) -> Tensor:
    """Reorders pieces to planes of words: the inverse of ``_interleave``."""
    pieces = blocks.split(PIECE_WORDS * LANES, dim=1)
    planes = [piece.unflatten(1, (LANES, -1)).permute(2, 0, 1) for piece in pieces]
    return torch.cat(planes)[..., SLOTS_OF_LANES].flatten(1)


@dataclass(frozen=True)
class Field:
    """Place of some bits of a code: ``(code >> code_shift) & mask`` at ``word_shift`` of a word.

    ``slot`` counts a lane's codes in a block, 32 * fragment + 8 * s + 2 * i + e; ``word`` its
    words.
    """

    slot: int
    code_shift: int
    mask: int
    word: int
    word_shift: int


@cache
def _fields(bits: int) -> tuple[Field, ...]:
    """Returns every field of a lane's words; ``decode`` of the kernels is its inverse."""
    fields: list[Field] = []
    for slot in range(SLOTS):
        start = len(fields)
        for bit, (word, position) in enumerate(_bit_positions(bits, slot)):
            last = fields[-1] if len(fields) > start else None
            if last and (last.word, last.word_shift + last.mask.bit_length()) == (word, position):
                fields[-1] = replace(last, mask=2 * last.mask + 1)
            else:
                fields.append(Field(slot, bit, 1, word, position))
    return tuple(fields)


def _bit_positions(bits: int, slot: int) -> list[tuple[int, int]]:
    """Returns word and position of each bit of a code, the lowest first."""
    fragment, s, i, e = slot >> 5, slot >> 3 & 3, slot >> 1 & 3, slot & 1
    first, unit = fragment * bits, 2 * (s & 1) + (i >> 1)
    if 4 < bits < 8:
        return _split_positions(bits, fragment, unit, s >> 1, i & 1, e)
    if bits == 1 and fragment == 0:
        # Looked up: a byte per step.
        return [(first, 8 * s + 2 * i + e)]
    if bits == 1:
        # Computed: rotated right by 4 * i, the pair is at bits 3 + s and 19 + s.
        return [(first, (3 + s + 16 * e + 4 * i) % WORD_BITS)]
    if bits == 2 and s < 2:
        # Looked up: a nibble per register.
        return [(first, 16 * s + 4 * i + 2 * e + b) for b in range(2)]
    if bits == 2:
        # Computed: rotated right by 2 * unit, four codes lie at bits 1 and 2 of each byte.
        byte = 2 * (i & 1) + e
        return [(first + 1, (8 * byte + 1 + 2 * unit + b) % WORD_BITS) for b in range(2)]
    if bits == 3:
        # A unit has a byte in each of three words: six bits for a pair, and two of the fourth pair.
        pair, places = 2 * (s >> 1) + (i & 1), [3 * e + b for b in range(3)]
        if pair < 3:
            return [(first + pair, 8 * unit + place) for place in places]
        return [(first + (place >> 1), 8 * unit + 6 + (place & 1)) for place in places]
    if bits == 4:
        # A word per unit, a byte per pair.
        return [(first + unit, 16 * (s >> 1) + 8 * (i & 1) + 4 * e + b) for b in range(4)]
    assert bits == 8
    # Two words per step, a byte per code.
    return [(first + 2 * s + (i >> 1), 16 * (i & 1) + 8 * e + b) for b in range(8)]


def _split_positions(
    bits: int, fragment: int, unit: int, half: int, row: int, e: int
) -> list[tuple[int, int]]:
    """Returns ``_bit_positions`` for 5 to 7 bits: units' own words of both fragments, then shared.

    At 5 bits the own words are those of 4 bits; the fifth bits are in a word that the four units of
    a fragment share, two per pair. At 6 and 7 bits each byte of an own word is a code of the first
    32 columns, and its spare bits begin a code of the second 32; four more bits of that are in a
    word that two units share, and at 7 bits another two in a word that four share.
    """
    own = 4 * fragment + unit
    if bits == 5:
        byte = 8 * (2 * half + row)
        return [*((own, byte + 4 * e + b) for b in range(4)), (8 + fragment, byte + 2 * unit + e)]
    byte = 8 * (2 * row + e)
    if half == 0:
        return [(own, byte + b) for b in range(bits)]
    left = [(own, byte + b) for b in range(bits, 8)]
    of_two = [(8 + 2 * (unit >> 1) + fragment, byte + 4 * (unit & 1) + b) for b in range(4)]
    of_four = [(12 + fragment, byte + 2 * unit + b) for b in range(2)]
    return [*left, *of_two, *of_four][:bits]


def _scales_per_row(g: Geometry) -> int:
    return g.padded_k // BLOCK_K * g.per_row


def _filled_scales(g: Geometry) -> int:
    return g.k // g.group_size * g.repeats


# Axes of scales [kinds, padded_n, scales]: [kind, tile, fragment, half, g, block, half of columns]
# and of lanes: [tile, block, g, kind, half of columns, fragment, half]
_SCALES_TO_LANES = (1, 5, 4, 0, 6, 2, 3)
_SCALES_FROM_LANES = tuple(_SCALES_TO_LANES.index(axis) for axis in range(7))


def _scales_to_bytes(g: Geometry, kinds: Tensor) -> Tensor:
    axes = kinds.view(len(kinds), -1, FRAGMENTS, *row_axes(), g.padded_k // BLOCK_K, g.per_row)
    return axes.permute(_SCALES_TO_LANES).contiguous().flatten(2).view(torch.uint8)


def _bytes_to_scales(g: Geometry, data: Tensor) -> Tensor:
    kinds = 2 if g.has_zero_point else 1
    values = data.contiguous().view(g.scale_dtype)
    axes = values.view(*values.shape[:-1], 8, kinds, g.per_row, FRAGMENTS, 2)
    return axes.permute(_SCALES_FROM_LANES).reshape(kinds, -1, _scales_per_row(g))
