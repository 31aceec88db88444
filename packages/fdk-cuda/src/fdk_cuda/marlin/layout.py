"""The Marlin layout: a weight in the order in which tensor-core fragments take it.

A weight ``[n, k]`` is padded to ``[rows, columns]`` and cut into blocks of 32 rows x 64 columns,
stored one after another along k, then along n. A block holds its codes, then its scales:

    packed :: [rows / 32, columns / 64, block bytes, uint8]
    block  =  codes 256 * bits bytes | scales 32 * per_row * (scale bytes [+ zero point bytes])

The codes of a block are two fragments of 16 rows x 64 columns. ``mma.m16n8k16`` gives lane
``4 * g + t`` (g = 0..7, t = 0..3) rows g and g + 8 of a fragment, as four registers i of two values
e each, for four steps s. Within a row, the 64 columns are dealt so that a lane's columns for two
steps are eight neighbours (its activations are then plain 16-byte loads):

    row    = 16 * fragment + 8 * (i & 1) + g
    column = 32 * (s >> 1) + 8 * t + 4 * (s & 1) + 2 * (i >> 1) + e

So a lane has 32 codes of a fragment, in ``bits`` words of 32 bits; ``_fields`` says where in them.
A lane's words of both fragments lie in 16-byte pieces, piece after piece, 32 lanes to a piece (a
last piece of 8 bytes where bits are odd): a warp's loads are contiguous.

Hopper's wgmma reads x from shared memory as it lies, so there the lane t' of four must have columns
8 * j + 2 * t' + e: of each of its neighbours j = 0..3 the unit t' = 2 * (s & 1) + (i >> 1). The
order serves both: what lies side by side in a word (at 4 bits), in a byte of every word (at 3)
or the like is a unit. From 5 to 7 bits it is a word, and some bits of each byte of words that two
or four units share. Pieces lie in the order ``SLOTS_OF_LANES``, 8 * t + (g ^ 2 * t), in which
neither a lane's own pieces nor those of the neighbours j share banks of shared memory.

The scales of a block lie by g, so that a lane finds its own side by side: for each g first the
scales, then the zero points, each ordered [half of the 64 columns, where per_row is 2][fragment]
[row g, row g + 8].
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from fdk_formats.format import Format
from fdk_formats.packing import pack, unpack

BLOCK_ROWS, BLOCK_COLUMNS = 32, 64
FRAGMENTS = 2
STEPS, REGISTERS, PAIR = 4, 4, 2
LANES, WORD_BITS = 32, 32
# Where the piece of lane 4 * g + t lies among 32.
SLOTS_OF_LANES = tuple(8 * t + (g ^ 2 * t) for g in range(8) for t in range(4))
LANES_OF_SLOTS = tuple(SLOTS_OF_LANES.index(slot) for slot in range(LANES))
# Codes that a lane has of a block, and the words of a 16-byte piece.
SLOTS = FRAGMENTS * STEPS * REGISTERS * PAIR
PIECE_WORDS = 4
# What a kernel takes at a time; a weight is padded to whole ones.
ROWS_MULTIPLE, COLUMNS_MULTIPLE = 64, 128
# Codes laid out at a time, so that temporaries stay small: about 20 bytes per code are alive.
CODES_PER_CHUNK = 1 << 26

# What scales (and zero points) are stored as: e8m0 is exact in bf16, so are integer zero points.
STORED_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "e8m0": torch.bfloat16,
}

# Of grids of integers, by scale rule: with signmax they have all 256 values.
GRID_ZERO_POINTS = {"signmax": 128}


def has_grid(format: Format) -> bool:
    """Whether kernels may compute what codes of 8 bits stand for, from the format alone."""
    return format.codebook == "int" and format.bits == 8


def has_signs(format: Format) -> bool:
    """Whether codes of 1 bit are signs of one value: what backend.py tells kernels of such."""
    return format.codebook == "binary"


@dataclass(frozen=True)
class Geometry:
    """Sizes of the layout of a weight ``[n, k]``.

    Attributes:
        bits: width of a code.
        n, k: of the weight.
        group_size: weights that share a scale.
        scale_dtype: what scales and zero points are stored as.
        has_zero_point: whether there are zero points.
        whole_zero_point: whether they are integers from 0 to 255.
        grid_zero_point: what the value of a code is less than it, for codebooks of 8 bits that are
            grids of integers: 127, where no code is 255, or 128.
        has_signs: whether the two values of 1 bit are -c and c.
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
        """The geometry of a weight of this format."""
        size, dtype = format.group_size_for(k), STORED_DTYPES[format.scale_dtype]
        whole = format.zero_point == "int"
        grid = GRID_ZERO_POINTS.get(str(format.scale_rule), 127) if has_grid(format) else None
        signs = has_signs(format)
        return cls(format.bits, n, k, size, dtype, format.is_affine, whole, grid, signs)

    @property
    def has_table(self) -> bool:
        """Whether what a code stands for can only be looked up."""
        return not self.has_zero_point and self.grid_zero_point is None

    @property
    def rows(self) -> int:
        """n, padded."""
        return -(-self.n // ROWS_MULTIPLE) * ROWS_MULTIPLE

    @property
    def columns(self) -> int:
        """k, padded."""
        return -(-self.k // COLUMNS_MULTIPLE) * COLUMNS_MULTIPLE

    @property
    def per_row(self) -> int:
        """Scales that a row of a block holds: 2 where a group ends inside 64 columns, else 1.

        A longer group's scale is stored once for each 64 columns.
        """
        return 1 if self.group_size % BLOCK_COLUMNS == 0 or self.group_size == self.k else 2

    @property
    def repeats(self) -> int:
        """How often a scale is stored along a row."""
        return -(-self.group_size // (BLOCK_COLUMNS // self.per_row))

    @property
    def code_bytes(self) -> int:
        """Bytes of a block's codes."""
        return BLOCK_ROWS * BLOCK_COLUMNS * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of a block's scales and zero points."""
        each = self.scale_dtype.itemsize * (2 if self.has_zero_point else 1)
        return BLOCK_ROWS * self.per_row * each

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the packed tensor."""
        blocks = self.rows // BLOCK_ROWS, self.columns // BLOCK_COLUMNS
        return *blocks, self.code_bytes + self.scale_bytes


def why_not(format: Format, k: int) -> str | None:
    """Why the layout cannot hold a weight of this format, or None."""
    size = format.group_size_for(k)
    if size % 32 and size != k:
        return f"needs groups of a multiple of 32 or whole rows, got {size}"
    return None


def pack_layout(
    geometry: Geometry, packed: Tensor, scale: Tensor, zero_point: Tensor | None
) -> Tensor:
    """Lays a canonical weight out, on its own device.

    # packed     :: [n, ceil(k * bits / 8), uint8]   canonical
    # scale      :: [n, k / G, geometry.scale_dtype]
    # zero_point :: [n, k / G, geometry.scale_dtype] or None
    # out        :: geometry.shape, uint8
    """
    g = geometry
    out = packed.new_empty(g.shape)
    kinds = torch.stack([scale] if zero_point is None else [scale, zero_point])
    step = _rows_per_chunk(g)
    for start in range(0, g.rows, step):
        stop = min(start + step, g.rows)
        codes = packed.new_zeros((stop - start, g.columns))
        filled = max(0, min(stop, g.n) - start)
        codes[:filled, : g.k] = unpack(packed[start : start + filled], g.bits, g.k)
        blocks = out[start // BLOCK_ROWS : stop // BLOCK_ROWS]
        blocks[..., : g.code_bytes] = _codes_to_bytes(g, codes)
        padded = kinds.new_zeros((len(kinds), stop - start, _scale_columns(g)))
        padded[:, :filled, : _real_scales(g)] = _repeat(g, kinds[:, start : start + filled])
        blocks[..., g.code_bytes :] = _scales_to_bytes(g, padded)
    return out


def unpack_layout(geometry: Geometry, laid_out: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """The inverse of ``pack_layout``: packed, scale and zero_point as it took them."""
    g = geometry
    packed, kinds = [], []
    step = _rows_per_chunk(g)
    # Once at least: nothing of a weight without rows has shapes, too.
    for start in range(0, max(g.rows, 1), step):
        blocks = laid_out[start // BLOCK_ROWS : (start + step) // BLOCK_ROWS]
        filled = max(0, min(start + step, g.n) - start)
        codes = _bytes_to_codes(g, blocks[..., : g.code_bytes])
        packed.append(pack(codes[:filled, : g.k], g.bits))
        padded = _bytes_to_scales(g, blocks[..., g.code_bytes :])
        kinds.append(_unrepeat(g, padded[:, :filled, : _real_scales(g)]))
    scale, *zero_point = torch.cat(kinds, dim=1)
    return torch.cat(packed), scale, zero_point[0] if zero_point else None


def _rows_per_chunk(g: Geometry) -> int:
    return max(1, CODES_PER_CHUNK // (g.columns * ROWS_MULTIPLE)) * ROWS_MULTIPLE


# codes [rows, columns] as [tile, fragment, row half, g, block, step half, t, step, i half, e]
# to planes [fragment, step half, step, i half, row half, e, tile, block, g, t]: one per slot
_TO_PLANES = (1, 5, 7, 8, 2, 9, 0, 4, 3, 6)
_FROM_PLANES = tuple(_TO_PLANES.index(axis) for axis in range(len(_TO_PLANES)))


def _codes_to_bytes(g: Geometry, codes: Tensor) -> Tensor:
    blocks = g.columns // BLOCK_COLUMNS
    axes = codes.view(-1, FRAGMENTS, 2, 8, blocks, 2, 4, 2, 2, PAIR)
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
    blocks = g.columns // BLOCK_COLUMNS
    axes = slots.view(FRAGMENTS, 2, 2, 2, 2, PAIR, -1, blocks, 8, 4).permute(_FROM_PLANES)
    return axes.reshape(-1, g.columns)


def _interleave(words: Tensor) -> Tensor:
    """Words by plane ``[words, blocks * 32]`` to pieces of 16 bytes, ``[blocks, words * 32]``."""
    planes = words.view(len(words), -1, LANES)[..., LANES_OF_SLOTS]
    groups = planes.split(PIECE_WORDS)
    return torch.cat([piece.permute(1, 2, 0).flatten(1) for piece in groups], dim=1)


def _deinterleave(pieces: Tensor) -> Tensor:
    """The inverse of ``_interleave``."""
    groups = pieces.split(PIECE_WORDS * LANES, dim=1)
    planes = [piece.unflatten(1, (LANES, -1)).permute(2, 0, 1) for piece in groups]
    return torch.cat(planes)[..., SLOTS_OF_LANES].flatten(1)


@dataclass(frozen=True)
class Field:
    """Where some bits of a code lie: ``(code >> code_shift) & mask`` at ``word_shift`` of a word.

    ``slot`` counts a lane's codes of a block, 32 * fragment + 8 * s + 2 * i + e; ``word`` its
    words.
    """

    slot: int
    code_shift: int
    mask: int
    word: int
    word_shift: int


@cache
def _fields(bits: int) -> tuple[Field, ...]:
    """Every field of a lane's words; the kernels' ``decode`` is its inverse."""
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
    """Word and position of each bit of a code, the lowest first."""
    fragment, s, i, e = slot >> 5, slot >> 3 & 3, slot >> 1 & 3, slot & 1
    first, unit = fragment * bits, 2 * (s & 1) + (i >> 1)
    if 4 < bits < 8:
        return _split_positions(bits, fragment, unit, s >> 1, i & 1, e)
    if bits == 1 and fragment == 0:
        # Looked up: a byte for a step.
        return [(first, 8 * s + 2 * i + e)]
    if bits == 1:
        # Computed: rotated right by 4 * i, the pair lies at bits 3 + s and 19 + s.
        return [(first, (3 + s + 16 * e + 4 * i) % WORD_BITS)]
    if bits == 2 and s < 2:
        # Looked up: a nibble for a register.
        return [(first, 16 * s + 4 * i + 2 * e + b) for b in range(2)]
    if bits == 2:
        # Computed: rotated right by 2 * unit, four codes lie at bits 1 and 2 of each byte.
        byte = 2 * (i & 1) + e
        return [(first + 1, (8 * byte + 1 + 2 * unit + b) % WORD_BITS) for b in range(2)]
    if bits == 3:
        # A unit has a byte of each of three words: six bits of each for a pair, and for the fourth
        # pair the two bits that are left over in each.
        pair, places = 2 * (s >> 1) + (i & 1), [3 * e + b for b in range(3)]
        if pair < 3:
            return [(first + pair, 8 * unit + place) for place in places]
        return [(first + (place >> 1), 8 * unit + 6 + (place & 1)) for place in places]
    if bits == 4:
        # A word for a unit, a byte for a pair.
        return [(first + unit, 16 * (s >> 1) + 8 * (i & 1) + 4 * e + b) for b in range(4)]
    assert bits == 8
    # Two words for a step, a byte for a code.
    return [(first + 2 * s + (i >> 1), 16 * (i & 1) + 8 * e + b) for b in range(8)]


def _split_positions(
    bits: int, fragment: int, unit: int, half: int, row: int, e: int
) -> list[tuple[int, int]]:
    """``_bit_positions`` of 5 to 7 bits: the units' words of both fragments, then shared ones.

    At 5 bits the words are as at 4, and the last bits lie in a word that the four units of a
    fragment share, two for each pair. At 6 and 7 bits each byte of a unit's word is a code of the
    first 32 columns, and with what bits are left begins one of the second; four more are in a word
    that two units share, and at 7 bits another two in a word that four do.
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


def _scale_columns(g: Geometry) -> int:
    return g.columns // BLOCK_COLUMNS * g.per_row


def _real_scales(g: Geometry) -> int:
    return g.k // g.group_size * g.repeats


def _repeat(g: Geometry, kinds: Tensor) -> Tensor:
    return kinds.repeat_interleave(g.repeats, dim=-1)


def _unrepeat(g: Geometry, kinds: Tensor) -> Tensor:
    return kinds[..., :: g.repeats]


# scales [kinds, rows, columns] as [kind, tile, fragment, row half, g, block, half]
# to [tile, block, g, kind, half, fragment, row half]
_SCALES_TO_LANES = (1, 5, 4, 0, 6, 2, 3)
_SCALES_FROM_LANES = tuple(_SCALES_TO_LANES.index(axis) for axis in range(7))


def _scales_to_bytes(g: Geometry, kinds: Tensor) -> Tensor:
    axes = kinds.view(len(kinds), -1, FRAGMENTS, 2, 8, g.columns // BLOCK_COLUMNS, g.per_row)
    return axes.permute(_SCALES_TO_LANES).contiguous().flatten(2).view(torch.uint8)


def _bytes_to_scales(g: Geometry, data: Tensor) -> Tensor:
    kinds = 2 if g.has_zero_point else 1
    values = data.contiguous().view(g.scale_dtype)
    axes = values.view(*values.shape[:-1], 8, kinds, g.per_row, FRAGMENTS, 2)
    return axes.permute(_SCALES_FROM_LANES).reshape(kinds, -1, _scale_columns(g))
