"""dy @ W_hat by Marlin on Hopper: the index maps of its decoder, bank conflicts, plans."""

import itertools
from dataclasses import replace

import pytest
import torch
from marlin_compile import BF16, FP32, HOPPER

from fdk_cuda.marlin.dgrad import dgrad_plan, dgrad_plans
from fdk_cuda.marlin.layout import Geometry, pack_layout
from fdk_cuda.marlin.ops import max_dgrad_rows
from fdk_formats.format import BITS
from fdk_formats.packing import pack

FEW = replace(HOPPER, sm_count=6)
WORD = (1 << 32) - 1


def rotate_right(word: int, places: int) -> int:
    places %= 32
    return (word >> places | word << (32 - places)) & WORD


def lane_codes(bits: int, block: bytes, warp: int, lane: int) -> dict[tuple[int, int, int], int]:
    """Returns codes by (fragment, register, half of it), as hopper_dgrad_decode.cuh reads them."""

    def load(offset: int) -> int:
        assert offset % 4 == 0
        return int.from_bytes(block[offset : offset + 4], "little")

    g, t = divmod(lane, 4)
    half, j, unit, turned = warp >> 1, 2 * (warp & 1) + (g >> 2), g & 3, g >= 4
    codes = {}
    for f, r in itertools.product(range(2), range(2)):
        row = 1 - r if turned else r
        slot = 8 * j + ((2 * t + row) ^ 2 * j)
        for i, c in itertools.product(range(2), range(2)):
            if bits == 8:
                word = load(half * 512 + slot * 16 + unit * 4 + 1024 * f)
                code = word >> 8 * (2 * i + c) & 0xFF
            elif bits == 5:
                byte = load(slot * 16 + unit * 4 + 512 * f) >> 8 * (2 * half + i) & 0xFF
                four = rotate_right(load(1024 + slot * 8 + 4 * f), 2 * unit - 6 + 16 * half)
                code = byte >> 4 * c & 0xF | (four >> 8 * i + 6 + c & 1) << 4
            elif bits > 5:
                word = rotate_right(load(slot * 16 + unit * 4 + 512 * f), bits * half)
                if half:
                    two = load(1024 + slot * 16 + 8 * (unit >> 1) + 4 * f)
                    two = rotate_right(two, 4 * (unit & 1) + bits - 8)
                    left = ((0x100 >> bits) - 1) * 0x01010101
                    word = word & left | two & WORD - left
                if half and bits == 7:
                    four = rotate_right(load(1536 + slot * 8 + 4 * f), 2 * unit - 5)
                    word = word & 0x1F1F1F1F | four & 0xE0E0E0E0
                code = word >> 8 * (2 * i + c) & (1 << bits) - 1
            elif bits == 4:
                byte = load(slot * 16 + unit * 4 + 512 * f) >> 8 * (2 * half + i) & 0xFF
                code = byte >> 4 * c & 0xF
            elif bits == 3:
                first = load(slot * 16 + 12 * f)
                rest = 512 + slot * 8 if f else slot * 16 + 4
                second, third = load(rest), load(rest + 4)
                fourth = first >> 6 & 0x03030303 | second >> 4 & 0x0C0C0C0C
                fourth |= third >> 2 & 0x30303030
                pairs = (third, fourth) if half else (first, second)
                code = pairs[i] >> 8 * unit >> 3 * c & 7
            elif bits == 2:
                turn = 2 * unit if half else 16 * (unit >> 1) + 8 * (unit & 1)
                word = rotate_right(load(slot * 16 + half * 4 + 8 * f), turn)
                spread = (word & 0x33) * 0x2002 + (word & 0xCC) * 0x80080
                twice = (word if half else spread) & 0x06060606
                code = (twice >> 8 * (2 * i + c) & 0xFF) >> 1
            else:
                turn = 16 * half + 8 * (unit >> 1) + 4 * (unit & 1)
                if f:
                    turn = 3 + 2 * half + (unit >> 1) + 8 * (unit & 1)
                word = rotate_right(load(slot * 8 + 4 * f), turn)
                code = word >> (16 * c + 4 * i if f else 2 * i + c) & 1
            codes[f, 2 * i + c, row] = code
    return codes


@pytest.mark.parametrize("bits", BITS)
def test_lanes_hold_the_a_fragments_of_wgmma(bits: int) -> None:
    """Register 2 i + c of lane 4 g + t: row g + 8 c of A; columns 2 t, 2 t + 1, plus 8 i."""
    n, k = 64, 128
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(1 << bits, (n, k), dtype=torch.uint8, generator=generator)
    geometry = Geometry(bits, n, k, 64, BF16, False)
    scale = torch.ones(n, k // 64, dtype=BF16)
    packed = pack_layout(geometry, pack(codes, bits), scale, None)
    for row_block, column_block in itertools.product(range(2), range(2)):
        block = packed[row_block, column_block].numpy().tobytes()
        for warp, lane in itertools.product(range(4), range(32)):
            g, t = divmod(lane, 4)
            found = lane_codes(bits, block, warp, lane)
            assert len(found) == 16
            for (f, register, e), code in found.items():
                i, c = divmod(register, 2)
                row = 32 * row_block + 16 * f + 8 * i + 2 * t + e
                column = 64 * column_block + 16 * warp + 2 * g + c
                assert code == codes[row, column]


@pytest.mark.parametrize("bits", BITS)
def test_loads_have_no_bank_conflicts(bits: int) -> None:
    """No two lanes of a warp load different words of one bank."""
    for warp, r in itertools.product(range(4), range(2)):
        words = set()
        for lane in range(32):
            g, t = divmod(lane, 4)
            j, unit = 2 * (warp & 1) + (g >> 2), g & 3
            slot = 8 * j + ((2 * t + (1 - r if g >= 4 else r)) ^ 2 * j)
            piece = 8 if bits == 1 else 16
            words.add((slot * piece + (unit * 4 if bits >= 4 else 0)) // 4)
        assert len({word % 32 for word in words}) == len(words)


@pytest.mark.parametrize("bits", [5, 6, 7])
def test_loads_of_shared_words_have_no_bank_conflicts(bits: int) -> None:
    """5 to 7 bits load 8 bytes for both fragments, from 16 bytes per two units or 8 per four.

    The hardware serves 16 lanes at a time. The forward loads 4 of these bytes.
    """
    for warp, r, sixteen in itertools.product(range(4), range(2), range(2)):
        words = set()
        for lane in range(16 * sixteen, 16 * sixteen + 16):
            g, t = divmod(lane, 4)
            j, unit = 2 * (warp & 1) + (g >> 2), g & 3
            slot = 8 * j + ((2 * t + (1 - r if g >= 4 else r)) ^ 2 * j)
            start = slot * 8 if bits == 5 else slot * 16 + 8 * (unit >> 1)
            words |= {start // 4, start // 4 + 1}
        assert len({word % 32 for word in words}) == len(words)
    for j, f in itertools.product(range(4), range(2)):
        words = {
            (slot * 8 if bits == 5 else slot * 16 + 8 * (t >> 1)) // 4 + f
            for g, t in itertools.product(range(8), range(4))
            for slot in [8 * j + (g ^ 2 * j)]
        }
        assert len({word % 32 for word in words}) == len(words)


def test_stores_have_no_bank_conflicts() -> None:
    """Stores to a tile of dx: pairs of columns, rows 2 t + e, swizzled 16-byte chunks."""
    for warp, c, e in itertools.product(range(4), (0, 8), range(2)):
        banks = set()
        for lane in range(32):
            g, t = divmod(lane, 4)
            row, chunk = c + 2 * t + e, 2 * warp + g // 4
            address = row * 128 + ((chunk ^ row % 8) << 4) + 4 * (g % 4)
            banks.add(address // 4 % 32)
        assert len(banks) == 32


@pytest.mark.parametrize("bits", BITS)
def test_plans_cover_everything_once(bits: int) -> None:
    """Tiles cover dx, whole and split ones together, and shared memory suffices."""
    for device, affine, (n, k), m in itertools.product(
        (HOPPER, FEW),
        (False, True),
        ((1, 64), (1000, 1088), (8192, 8192), (28672, 8192), (4096, 14336)),
        (17, 64, 65, 256, 1024, 5000),
    ):
        scale = FP32 if affine else BF16
        geometry = Geometry(bits, n, k, 32 if affine else 64, scale, affine)
        plans = list(dgrad_plans(geometry, m, device))
        assert dgrad_plan(geometry, m, device) in plans
        for plan in plans:
            shape, tiles = plan.shape, plan.n_tiles * plan.m_tiles
            assert plan.n_tiles * shape.tile_n == geometry.padded_k
            assert (plan.m_tiles - 1) * shape.tile_m < m <= plan.m_tiles * shape.tile_m
            blocks = shape.tile_n // 32 * geometry.shape[2]
            stage = shape.tile_m * 128 + blocks + 16
            assert shape.stages * stage < plan.shared_bytes <= device.shared_bytes
            assert plan.grid <= device.sm_count
            # Every split has a step.
            assert geometry.padded_n // 64 >= plan.splits * shape.cluster
            assert plan.whole_tiles + plan.partial_tiles // plan.splits == tiles
            assert shape.cluster == 1 or plan.grid == tiles * shape.cluster


# The fastest plans, as timed on an H200 (docs/design/hopper.md).
FASTEST = [
    *((bits, 8192, 8192, 256, (256, 2, 1)) for bits in BITS),
    *((1, 4096, 14336, 512, (256, 1, 1)), (2, 8192, 8192, 768, (256, 1, 2))),
    *((2, 4096, 14336, 1024, (256, 1, 2)), (3, 4096, 4096, 128, (128, 1, 4))),
]


@pytest.mark.parametrize(("bits", "n", "k", "m", "wanted"), FASTEST)
def test_chosen_plan_is_the_fastest_timed(
    bits: int, n: int, k: int, m: int, wanted: tuple[int, int, int]
) -> None:
    plan = dgrad_plan(Geometry(bits, n, k, 64, BF16, False), m, HOPPER)
    assert (plan.shape.tile_m, plan.shape.cluster, plan.splits) == wanted


@pytest.mark.parametrize(
    ("format", "most"),
    [
        ("nf4-g64", 2048),
        ("custom1-g64", 2048),
        ("custom3-g64", 2048),
        ("affine3-g32", 2048),
        ("custom8-g64", 1024),
        ("affine8-g64", 2048),
        ("int8-g64", 2048),
    ],
)
def test_largest_m_from_packed_bytes(format: str, most: int) -> None:
    """Above some m, dequantising with cuBLAS is faster."""
    assert max_dgrad_rows(format) == most
