"""Packed layout of the Triton kernels: codes in tensor-core fragment order, as bit fields of words.

Rows come in tiles of 16, columns in tiles of 16 * positions. A tile holds a unit for each of its
16 x 16 (row, column) pairs of one tensor-core step: the codes at that place of every step, which
this package calls positions, in ``words`` 32-bit words:

    row    = 8 * half + g                     within a tile
    column = fragment_order.column_of(position, t, upper, pair)
    words :: [n_tiles, k_tiles, words, half 2, g 8, t 4, (upper, pair) 4, int32]

A lane of a warp is (g, t). It reads 16 contiguous bytes, and its codes of a position are then
its fragment of operand A of a 16 x 8 x 16 product: no data moves between lanes. All columns of a
position are in one group, so a scale is applied once per group, to the sums. The paired order of
columns, which needs groups of whole 32 columns, lets a lane read x for two positions by one 16-byte
load; other groups use the single order.

Bit fields of a unit, the first position in the least significant bits:

    1, 2, 4, 8 bits  one word
    3 bits  words 0 to 2: positions 0 to 23 in the lower three bits of each nibble; positions 24
            to 31 in the bits that are left, bit i of the code in word i
    5 bits  words 0 to 3: the lower four bits; word 4: bit 4
    6 bits  words 0 and 1: the lower four bits; word 2: bits 4 and 5
    7 bits  words 0 to 3: the lower four bits; words 4 and 5: bits 4 and 5; word 6: bit 6
            Upper bits are in the same byte as their lower four, so that one shift and one mask
            complete four codes. Of position p, bits 4 and 5 are at 8 * (p % 8 // 2) + 2 * (2 *
            (p // 8 % 2) + p % 2) of word p // 16; a single bit (the fifth or seventh) is at
            8 * (p % 8 // 2) + 2 * (p // 8) + p % 2

A group is padded to a multiple of 16 columns, rows and columns to whole tiles. Padding has code 0
and is multiplied by x = 0.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fdk_cuda.layout.fragment_order import column_axes

TILE_N = 16
UNITS = 16  # columns of a position
# Lookup tables in shared memory, by the bits of a code: bits of an index, and bytes from one entry
# to the next. Every lane reads its own copy, in its own banks. An index has two codes at 3 and
# 4 bits and eight at 1 bit: those at the bits INDEX_SHIFTS, in the order of the values of an entry.
# With 256 bytes an address is one byte permute, but 256 entries would take 64 KiB.
INDEX_BITS = {1: 8, 3: 6, 4: 8, 6: 6, 7: 7, 8: 8}
# At 1 bit in the order in which the tensor cores read the units of a lane.
INDEX_SHIFTS = {1: (0, 1, 4, 5, 2, 3, 6, 7), 3: (0, 3), 4: (0, 4), 6: (0,), 7: (0,), 8: (0,)}
STRIDES = {1: 128, 3: 256, 4: 128, 6: 256, 7: 256, 8: 128}
TABLE_BYTES = {bits: stride << INDEX_BITS[bits] for bits, stride in STRIDES.items()}
# Codes of a unit, by their bits.
POSITIONS = {1: 32, 2: 16, 3: 32, 4: 8, 5: 32, 6: 16, 7: 32, 8: 4}


def words_of(bits: int) -> int:
    """Returns the 32-bit words of a unit."""
    return bits * POSITIONS[bits] // 32


@dataclass(frozen=True)
class PackedLayout:
    """The sizes of a packed weight.

    Attributes:
        n, k: outputs and inputs of the weight.
        bits: bits of a code.
        group_size: columns that share a scale.
    """

    n: int
    k: int
    bits: int
    group_size: int

    @property
    def groups(self) -> int:
        """Groups of a row."""
        return self.k // self.group_size

    @property
    def padded_group(self) -> int:
        """Columns of a group with its padding: a multiple of 16."""
        return -(-self.group_size // UNITS) * UNITS

    @property
    def tile_k(self) -> int:
        """Columns of a tile."""
        return UNITS * POSITIONS[self.bits]

    @property
    def words(self) -> int:
        """Words of a unit."""
        return words_of(self.bits)

    @property
    def n_tiles(self) -> int:
        """Tiles along n."""
        return -(-self.n // TILE_N)

    @property
    def k_tiles(self) -> int:
        """Tiles along k."""
        return -(-self.groups * self.padded_group // self.tile_k)

    @property
    def segment(self) -> int:
        """Columns of a tile that always share a scale."""
        return self.tile_k if self.groups == 1 else math.gcd(self.padded_group, self.tile_k)

    @property
    def paired(self) -> bool:
        """True where columns are in the paired order of ``fragment_order``."""
        return self.groups == 1 or self.padded_group % 32 == 0

    @property
    def words_shape(self) -> tuple[int, ...]:
        """Shape of the packed codes."""
        return (self.n_tiles, self.k_tiles, self.words, 2, 32, 4)


def pack_codes(codes: Tensor, layout: PackedLayout) -> Tensor:
    """Packs ``codes :: [n, k, uint8]`` into ``words_shape``, int32."""
    a, positions = layout, POSITIONS[layout.bits]
    padded = codes.new_zeros(a.n_tiles * TILE_N, a.k_tiles * a.tile_k)
    columns = padded[: a.n, : a.groups * a.padded_group].view(a.n, a.groups, a.padded_group)
    columns[:, :, : a.group_size] = codes.view(a.n, a.groups, a.group_size)
    # [n_tiles, half, g, k_tiles, position // width, t, position % width, upper, pair]
    axes = column_axes(positions, paired=a.paired)
    split = padded.view(a.n_tiles, 2, 8, a.k_tiles, *axes)
    # [n_tiles, k_tiles, half, g, t, upper, pair, position]
    units = split.permute(0, 3, 1, 2, 5, 7, 8, 4, 6).flatten(-2).to(torch.int64)
    stacked = [_to_int32(word) for word in _words_of(units, a.bits)]
    return torch.stack(stacked, dim=2).reshape(a.words_shape)


def unpack_codes(words: Tensor, layout: PackedLayout) -> Tensor:
    """Inverts ``pack_codes``."""
    a, positions = layout, POSITIONS[layout.bits]
    stacked = words.view(a.n_tiles, a.k_tiles, a.words, 2, 8, 4, 2, 2).to(torch.int64)
    units = _codes_of([word & 0xFFFFFFFF for word in stacked.unbind(2)], a.bits).to(torch.uint8)
    outer, _, inner, *_ = column_axes(positions, paired=a.paired)
    split = units.unflatten(-1, (outer, inner)).permute(0, 2, 3, 1, 7, 4, 8, 5, 6)
    padded = split.reshape(a.n_tiles * TILE_N, a.k_tiles * a.tile_k)
    columns = padded[: a.n, : a.groups * a.padded_group].view(a.n, a.groups, a.padded_group)
    codes: Tensor = columns[:, :, : a.group_size].reshape(a.n, a.k)
    return codes


def pack_scale(scale: Tensor, layout: PackedLayout) -> Tensor:
    """Packs scales or zero points ``[n, groups]`` into ``[n_tiles, groups, g 8, half 2]``."""
    padded = scale.new_zeros(layout.n_tiles * TILE_N, layout.groups)
    padded[: layout.n] = scale
    return padded.view(layout.n_tiles, 2, 8, layout.groups).permute(0, 3, 2, 1).contiguous()


def unpack_scale(packed: Tensor, layout: PackedLayout) -> Tensor:
    """Inverts ``pack_scale``."""
    return packed.permute(0, 3, 2, 1).reshape(-1, layout.groups)[: layout.n].contiguous()


def _fields(codes: Tensor, width: int) -> Tensor:
    """Joins ``[..., count]`` codes as bit fields of one word, the first in the lowest bits."""
    shifts = torch.arange(codes.shape[-1], device=codes.device) * width
    word: Tensor = (codes << shifts).sum(-1)
    return word


def _unfields(word: Tensor, width: int, count: int) -> Tensor:
    shifts = torch.arange(count, device=word.device) * width
    return (word[..., None] >> shifts) & ((1 << width) - 1)


def _words_of(units: Tensor, bits: int) -> list[Tensor]:
    """Packs ``units :: [..., positions]`` into int64 words."""
    if bits in (1, 2, 4, 8):
        return [_fields(units, bits)]
    if bits == 3:
        spare = units[..., 24:]
        low = [_fields(units[..., 8 * i : 8 * i + 8], 4) for i in range(3)]
        return [low[i] | _fields((spare >> i) & 1, 4) << 3 for i in range(3)]
    words = [_fields(part & 15, 4) for part in units.split(8, -1)]
    if bits >= 6:
        words += [_fields(_in_bytes(part) >> 4 & 3, 2) for part in units.split(16, -1)]
    if bits != 6:
        words.append(_fields(_in_bytes(units) >> (bits - 1) & 1, 1))
    return words


def _in_bytes(units: Tensor) -> Tensor:
    """Reorders positions from ``[..., (word, byte 4, odd 2)]`` to ``[..., (byte, word, odd)]``."""
    positions: Tensor = units.unflatten(-1, (-1, 4, 2)).transpose(-3, -2).flatten(-3)
    return positions


def _from_bytes(fields: Tensor) -> Tensor:
    """Inverts ``_in_bytes``."""
    positions: Tensor = fields.unflatten(-1, (4, -1, 2)).transpose(-3, -2).flatten(-3)
    return positions


def _codes_of(words: list[Tensor], bits: int) -> Tensor:
    positions = POSITIONS[bits]
    if bits in (1, 2, 4, 8):
        return _unfields(words[0], bits, positions)
    if bits == 3:
        low = [_unfields(word, 4, 8) & 7 for word in words]
        spare = [_unfields(word >> 3, 4, 8) & 1 for word in words]
        return torch.cat([*low, spare[0] | spare[1] << 1 | spare[2] << 2], dim=-1)
    nibbles = positions // 8
    codes = torch.cat([_unfields(word, 4, 8) for word in words[:nibbles]], dim=-1)
    if bits >= 6:
        pairs = words[nibbles : nibbles + positions // 16]
        upper = [_from_bytes(_unfields(word, 2, 16)) for word in pairs]
        codes = codes | torch.cat(upper, dim=-1) << 4
    if bits != 6:
        codes = codes | _from_bytes(_unfields(words[-1], 1, 32)) << (bits - 1)
    return codes


def _to_int32(word: Tensor) -> Tensor:
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)
