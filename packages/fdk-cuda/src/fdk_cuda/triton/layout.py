"""How the Triton kernels hold a weight: codes in the order of tensor-core fragments.

Rows come in tiles of 16, the inner dimension in tiles of 16 * positions, and a tile holds, for
each of its 16 rows and 16 units, one stack of ``words`` 32-bit words with ``positions`` codes:

    row within a tile    = 8 * half + g
    unit                 = (t, upper, pair)
    column within a tile = 32 * (position // 2) + 8 * t + 4 * (position % 2) + 2 * upper + pair
                  or     = 16 * position + 4 * t + 2 * upper + pair
    words :: [n_tiles, k_tiles, words, half 2, g 8, t 4, (upper, pair) 4, int32]

A lane of a warp is (g, t): 32 lanes read 16 contiguous bytes each, and what a lane then holds of a
position is its part of operand A of a 16 x 8 x 16 tensor-core product. No data moves between
lanes. The columns of a position lie in one group, so a scale is applied once a group, to the sums.
The first order of columns lets a lane read its part of x for two positions as 16 bytes; it wants
groups of whole 32 columns, and others take the second.

How the codes of a unit lie in its words, first position in the least significant bits:

    1, 2, 4, 8 bits  one word
    3 bits  words 0 to 2: positions 0 to 23 in the lower three bits of each nibble; positions 24
            to 31 in the bits that are left, bit i of the code in word i
    5 bits  words 0 to 3: the lower four bits; word 4: bit 4
    6 bits  words 0 and 1: the lower four bits; word 2: bits 4 and 5
    7 bits  words 0 to 3: the lower four bits; words 4 and 5: bits 4 and 5; word 6: bit 6
            Upper bits lie in the byte that their lower four are in, so that one shift and one mask
            complete four codes: of position p, bits 4 and 5 at 8 * (p % 8 // 2) + 2 * (2 * (p // 8
            % 2) + p % 2) of word p // 16, the fifth or seventh alone at 8 * (p % 8 // 2) + 2 *
            (p // 8) + p % 2

A group that is no multiple of 16 columns is padded to one, rows and tiles likewise; what is padded
has code 0 and meets x = 0.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

TILE_N = 16
UNITS = 16
# A table in shared memory: by the bits of a code, those of an index, and the bytes from one entry
# to the next. Every lane reads a copy of its own, in banks of its own. An index of 3 and 4 bits is
# two codes, and of 1 bit eight: the codes that lie at the bits of ``INDEX_SHIFTS``, in the order of
# the values of an entry. With 256 bytes an address is one byte permute, but 256 entries then take
# 64 KiB.
INDEX_BITS = {1: 8, 3: 6, 4: 8, 6: 6, 7: 7, 8: 8}
# Of 1 bit, in the order in which the tensor cores take the units of a lane.
INDEX_SHIFTS = {1: (0, 1, 4, 5, 2, 3, 6, 7), 3: (0, 3), 4: (0, 4), 6: (0,), 7: (0,), 8: (0,)}
STRIDES = {1: 128, 3: 256, 4: 128, 6: 256, 7: 256, 8: 128}
TABLE_BYTES = {bits: stride << INDEX_BITS[bits] for bits, stride in STRIDES.items()}
POSITIONS = {1: 32, 2: 16, 3: 32, 4: 8, 5: 32, 6: 16, 7: 32, 8: 4}


def words_of(bits: int) -> int:
    """Words of a unit."""
    return bits * POSITIONS[bits] // 32


@dataclass(frozen=True)
class Arrangement:
    """The sizes that follow from a weight's shape, width and group size.

    Attributes:
        n, k: of the weight.
        bits: of a code.
        group_size: weights of a row that share a scale.
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
        """Columns that a group takes: a multiple of 16."""
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
        """Columns of a tile that surely share a scale."""
        return self.tile_k if self.groups == 1 else math.gcd(self.padded_group, self.tile_k)

    @property
    def paired(self) -> bool:
        """Whether columns are in the first of the two orders, two positions at a time."""
        return self.groups == 1 or self.padded_group % 32 == 0

    @property
    def words_shape(self) -> tuple[int, ...]:
        """Of the arranged codes."""
        return (self.n_tiles, self.k_tiles, self.words, 2, 32, 4)


def arrange_codes(codes: Tensor, a: Arrangement) -> Tensor:
    """``codes :: [n, k, uint8]`` to ``words_shape``, int32."""
    padded = codes.new_zeros(a.n_tiles * TILE_N, a.k_tiles * a.tile_k)
    columns = padded[: a.n, : a.groups * a.padded_group].view(a.n, a.groups, a.padded_group)
    columns[:, :, : a.group_size] = codes.view(a.n, a.groups, a.group_size)
    # [n_tiles, half, g, k_tiles, position // 2, t, position % 2, upper, pair], or with every
    # position before t
    odd = 2 if a.paired else 1
    split = padded.view(a.n_tiles, 2, 8, a.k_tiles, POSITIONS[a.bits] // odd, 4, odd, 2, 2)
    # [n_tiles, k_tiles, half, g, t, upper, pair, position]
    units = split.permute(0, 3, 1, 2, 5, 7, 8, 4, 6).flatten(-2).to(torch.int64)
    stacked = [_to_int32(word) for word in _words_of(units, a.bits)]
    return torch.stack(stacked, dim=2).reshape(a.words_shape)


def restore_codes(words: Tensor, a: Arrangement) -> Tensor:
    """The inverse of ``arrange_codes``."""
    stacked = words.view(a.n_tiles, a.k_tiles, a.words, 2, 8, 4, 2, 2).to(torch.int64)
    units = _codes_of([word & 0xFFFFFFFF for word in stacked.unbind(2)], a.bits).to(torch.uint8)
    units = units.unflatten(-1, (-1, 2 if a.paired else 1))
    split = units.permute(0, 2, 3, 1, 7, 4, 8, 5, 6)
    padded = split.reshape(a.n_tiles * TILE_N, a.k_tiles * a.tile_k)
    columns = padded[: a.n, : a.groups * a.padded_group].view(a.n, a.groups, a.padded_group)
    codes: Tensor = columns[:, :, : a.group_size].reshape(a.n, a.k)
    return codes


def arrange_scale(scale: Tensor, a: Arrangement) -> Tensor:
    """Scales or zero points ``[n, groups]`` to ``[n_tiles, groups, g 8, half 2]``."""
    padded = scale.new_zeros(a.n_tiles * TILE_N, a.groups)
    padded[: a.n] = scale
    return padded.view(a.n_tiles, 2, 8, a.groups).permute(0, 3, 2, 1).contiguous()


def restore_scale(arranged: Tensor, a: Arrangement) -> Tensor:
    """The inverse of ``arrange_scale``."""
    return arranged.permute(0, 3, 2, 1).reshape(-1, a.groups)[: a.n].contiguous()


def _fields(codes: Tensor, width: int) -> Tensor:
    """``[..., count]`` codes as fields of one word, the first in the lowest bits."""
    shifts = torch.arange(codes.shape[-1], device=codes.device) * width
    word: Tensor = (codes << shifts).sum(-1)
    return word


def _unfields(word: Tensor, width: int, count: int) -> Tensor:
    shifts = torch.arange(count, device=word.device) * width
    return (word[..., None] >> shifts) & ((1 << width) - 1)


def _words_of(units: Tensor, bits: int) -> list[Tensor]:
    """The words, int64, of ``units :: [..., positions]``."""
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
    """``[..., (word, byte 4, odd 2)]`` positions as ``[..., (byte, word, odd)]``."""
    positions: Tensor = units.unflatten(-1, (-1, 4, 2)).transpose(-3, -2).flatten(-3)
    return positions


def _from_bytes(fields: Tensor) -> Tensor:
    """The inverse of ``_in_bytes``."""
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
