"""The Marlin layout on the CPU: round trips, positions by hand, golden digests, kernel formats."""

import hashlib
from dataclasses import replace

import pytest
import torch

from fdk_cuda.marlin import MARLIN, MARLIN_LUT
from fdk_cuda.marlin.backend import _kernel_format
from fdk_cuda.marlin.layout import Geometry, _fields, pack_layout, unsupported_reason
from fdk_formats.codebooks import named_codebook
from fdk_formats.format import BITS, Format
from fdk_formats.packing import pack
from fdk_formats.quantise import quantise
from fdk_formats.testing import cases, random_quantised

CASES = list(
    cases(
        bits=BITS,
        codebooks=("custom", "affine"),
        group_sizes=(32, 64, 96, 128, None),
        dtypes=(torch.bfloat16,),
        ms=(1,),
    )
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layout_round_trip(case):
    q = case.quantised()
    backend = MARLIN if q.format.is_affine else MARLIN_LUT
    unpacked = backend.pack(q, dtype=torch.bfloat16).unpack()
    assert (unpacked.format, unpacked.shape) == (q.format, q.shape)
    for name, tensor in q.tensors().items():
        assert torch.equal(unpacked.tensors()[name], tensor), name


@pytest.mark.parametrize(
    ("format", "zero_point"),
    [("int8-g64", 127), ("int8-g64-signmax", 128), ("int4-g64", None), ("uniform8-g64", None)],
)
def test_grids_of_8_bits_are_known(format, zero_point):
    """Codes of integer grids are computed, unless the table differs or a code has no grid value.

    ``quantise`` never gives that code, which would be the higher of two that are 127.
    """
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(8))
    made = MARLIN_LUT.pack(quantise(weight, format), dtype=torch.bfloat16)
    assert made.geometry.grid_zero_point == zero_point
    q = random_quantised(Format.parse(format), 64, 128)
    grid = named_codebook(q.format, 128).tensor()
    q = replace(q, packed=q.packed.clamp(max=254), codebook=grid)
    layout = MARLIN_LUT.pack(q, dtype=torch.bfloat16)
    assert layout.geometry.grid_zero_point == zero_point
    if zero_point is None:
        return
    codes = torch.arange(255 if zero_point == 127 else 256)
    assert torch.equal(grid[codes], codes - float(zero_point))
    q.packed[5, 7] = 255
    layout = MARLIN_LUT.pack(q, dtype=torch.bfloat16)
    assert layout.geometry.grid_zero_point == (None if zero_point == 127 else 128)
    assert layout.format == layout.unpack().format == q.format
    other = replace(q, codebook=grid.clone().index_fill_(0, torch.tensor([3]), -124.5))
    assert MARLIN_LUT.pack(other, dtype=torch.bfloat16).geometry.grid_zero_point is None


@pytest.mark.parametrize(
    ("format", "codebook", "signs"),
    [
        ("int1-g64", (-1.0, 1.0), True),
        ("kmeans1-g64", (0.3, -0.3), True),
        ("kmeans1-g64", (-0.3, 0.4), False),
        ("int1-g64-signmax", (-1.0, 0.0), False),
        ("custom2-g64", (-1.0, -0.5, 0.5, 1.0), False),
    ],
)
def test_signs_are_known(format, codebook, signs):
    """The codebook of a weight decides, not its name."""
    q = random_quantised(Format.parse(format), 64, 128)
    layout = MARLIN_LUT.pack(replace(q, codebook=torch.tensor(codebook)), dtype=torch.bfloat16)
    assert layout.geometry.has_signs == signs
    assert layout.format == layout.unpack().format == q.format


@pytest.mark.parametrize("bits", BITS)
def test_fields_cover_every_bit_once(bits):
    places = [
        (field.word, field.word_shift + i)
        for field in _fields(bits)
        for i in range(field.mask.bit_length())
    ]
    assert sorted(places) == [(word, bit) for word in range(2 * bits) for bit in range(32)]


def lone_code(bits, row, column, code):
    """Returns the one nonzero byte of a 64 x 128 weight with one nonzero code."""
    codes = torch.zeros(64, 128, dtype=torch.uint8)
    codes[row, column] = code
    geometry = Geometry(bits, 64, 128, 64, torch.bfloat16, has_zero_point=False)
    laid_out = pack_layout(
        geometry, pack(codes, bits), torch.zeros(64, 2, dtype=torch.bfloat16), None
    )
    ((tile, block, byte),) = laid_out.nonzero().tolist()
    return tile, block, byte, int(laid_out[tile, block, byte])


def test_positions_by_hand():
    # Row 45 = 32 + 8 + 5: tile 1, fragment 0, row g + 8 with g = 5. Column 64 + 32 + 2 * 8 + 4 + 3:
    # block 1, step 2 + 1 = 3, t = 2, i = 2 + 1 = 3, e = 1. Slot 8 * 2 + (5 ^ 4) = 17 of the first
    # piece; unit 2 * 1 + 1 = 3 is its word 3, pair 2 * 1 + 1 its byte 3, e the upper nibble.
    assert lone_code(4, 45, 64 + 32 + 16 + 4 + 3, 0xB) == (1, 1, 17 * 16 + 15, 0xB0)
    # Row 16: tile 0, fragment 1, g = 0. 8 bits: words 8 to 15, column 0 is byte 0 of word
    # 8: the third piece of 512 bytes, slot 0.
    assert lone_code(8, 16, 0, 0xA5) == (0, 0, 2 * 512, 0xA5)
    # 1 bit: a piece of 8 bytes per lane. Row 16 + 8 + 1: g = 1, t = 0, slot 1. Column 4: step 1,
    # i = 1, e = 0: bit 3 + 1 + 4 = 8 of word 1.
    assert lone_code(1, 25, 4, 1) == (0, 0, 1 * 8 + 4 + 1, 1)
    # 3 bits, row 0, column 32 + 8 * 3 + 4: step 3, t = 3, i = 0, e = 0. Slot 8 * 3 + (0 ^ 6) = 30,
    # unit 2, pair 2: byte 2 of word 2, its low bits.
    assert lone_code(3, 0, 32 + 24 + 4, 5) == (0, 0, 30 * 16 + 2 * 4 + 2, 5)
    # 6 bits, row 16 + 8, column 6 + 1: fragment 1, g = 0, t = 0, slot 0; half 0, step 1, i = 3,
    # e = 1, so unit 3 and byte 2 * 1 + 1 of its word, in the second piece.
    assert lone_code(6, 24, 7, 0x2D) == (0, 0, 512 + 3 * 4 + 3, 0x2D)
    # Half 1: the first two bits are the last of that byte, the others are four from bit 4 * (3 % 2)
    # on of byte 3 of word 2 * (3 // 2) + 1 of the third piece.
    assert lone_code(6, 24, 39, 0x03) == (0, 0, 512 + 3 * 4 + 3, 0xC0)
    assert lone_code(6, 24, 39, 0x24) == (0, 0, 2 * 512 + 3 * 4 + 3, 0x90)
    # 7 bits: one bit is left over there, and the last two are from bit 2 * 3 on of byte 3 of the
    # second word of a piece of 8 bytes.
    assert lone_code(7, 24, 39, 0x01) == (0, 0, 512 + 3 * 4 + 3, 0x80)
    assert lone_code(7, 24, 39, 0x60) == (0, 0, 3 * 512 + 4 + 3, 0xC0)
    # 5 bits: as at 4, the upper nibble of byte 2 * 1 + 1 of unit 3's word; and bit 2 * 3 + 1 of
    # byte 3 of the second word of the last piece.
    assert lone_code(5, 24, 39, 0x0D) == (0, 0, 512 + 3 * 4 + 3, 0xD0)
    assert lone_code(5, 24, 39, 0x10) == (0, 0, 2 * 512 + 4 + 3, 0x80)


def test_scale_positions():
    geometry = Geometry(4, 64, 128, 32, torch.bfloat16, has_zero_point=True)
    scale = torch.zeros(64, 4, dtype=torch.bfloat16)
    zero_point = torch.zeros(64, 4, dtype=torch.bfloat16)
    scale[16 + 8 + 2, 1] = 1.0  # block 0, half 1, fragment 1, row g + 8, g = 2
    zero_point[0, 2] = 2.0  # block 1, half 0, fragment 0, row g, g = 0
    packed = torch.zeros(64, 64, dtype=torch.uint8)
    laid_out = pack_layout(geometry, packed, scale, zero_point)
    values = laid_out[..., 1024:].contiguous().view(torch.bfloat16)  # [tile, block, 8 * 16]
    assert values.nonzero().tolist() == [[0, 0, 2 * 16 + 4 + 3], [0, 1, 8]]


# First 16 digits of SHA-256 over the packed bytes of random_quantised(format, 37, 384).
GOLDEN = {
    "custom1-g64": "3cbed1c32bd467cf",
    "custom2-g64": "e1ec56a731a9e8c8",
    "custom3-g32": "4135201ee2a09bba",
    "custom4-g64": "43ebff1217da2e64",
    "custom5-g64": "b911acef5bb25f87",
    "custom6-g64": "cb3702dbabf03240",
    "affine7-g64-zint": "2056dfa7af13a321",
    "custom8-g128": "cfc63278a9c2e9d7",
    "affine4-g32-fp32-zint": "6daa5f816b903b2e",
    "affine3-row-e8m0": "99e6779a6be73713",
}


@pytest.mark.parametrize("format", GOLDEN)
def test_golden_digest(format):
    q = random_quantised(Format.parse(format), 37, 384)
    backend = MARLIN if q.format.is_affine else MARLIN_LUT
    packed = backend.pack(q, dtype=torch.bfloat16).packed
    assert hashlib.sha256(packed.numpy().tobytes()).hexdigest()[:16] == GOLDEN[format]


def test_padding_is_zero():
    q = random_quantised(Format("custom", 4, 64), 37, 192)
    layout = MARLIN_LUT.pack(q, dtype=torch.bfloat16)
    assert layout.packed.shape == (2, 4, 1024 + 64)  # 64 rows, 256 columns
    assert not layout.packed[:, 3].any()
    assert layout.packed[1, :3].any()


def test_longer_groups_are_repeated():
    q = random_quantised(Format("custom", 4, 128), 64, 256)
    short = Format("custom", 4, 64)
    scale = q.scale.repeat_interleave(2, dim=1)
    repeated = type(q)(short, q.shape, q.packed, scale, q.codebook)
    packed = [MARLIN_LUT.pack(w, dtype=torch.bfloat16).packed for w in (q, repeated)]
    assert torch.equal(*packed)


@pytest.mark.parametrize(
    ("format", "k", "reason"),
    [
        ("custom4-g64", 192, None),
        ("custom4-row", 88, None),
        ("custom4-g96", 192, None),
        ("custom5-g64", 192, None),
        ("custom4-g16", 192, "needs groups of a multiple of 32 or whole rows, got 16"),
    ],
)
def test_why_not(format, k, reason):
    assert unsupported_reason(Format.parse(format), k) == reason


NORMAL = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("pair", "signs"),
    [
        ((-1.0, 1.0), {torch.float16, torch.bfloat16}),
        ((-1.0, 1.0002), {torch.float16, torch.bfloat16}),
        ((-1.0, 1.003), {torch.bfloat16}),
        ((-1.0, 1.01), set()),
        ((0.5, 1.0), set()),
    ],
)
def test_signs_are_those_of_the_dtype(
    pair: tuple[float, float], signs: set[torch.dtype], dtype: torch.dtype
) -> None:
    q = quantise(NORMAL, "custom1-g64", codebook=torch.tensor(pair))
    assert _kernel_format(q, dtype).codebook == ("binary" if dtype in signs else "custom")


def test_kmeans_of_normal_weights_has_signs() -> None:
    assert _kernel_format(quantise(NORMAL, "kmeans1-g64"), torch.float16).codebook == "binary"
