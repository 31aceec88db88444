"""dy @ W_hat on Hopper: the index maps of its decoding emulated, its plans, its instantiations."""

import importlib
import itertools
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from marlin_devices import DEVICES, geometry_of

from fdk_cuda import nvrtc
from fdk_cuda.marlin import ops, precompile
from fdk_cuda.marlin.cost_model import DGRAD_STEP_COST
from fdk_cuda.marlin.dgrad import (
    DGRAD_FIELDS,
    dgrad_plan,
    dgrad_plans,
    dgrad_shapes,
)
from fdk_cuda.marlin.instantiations import KERNEL_DIRECTORY, Variant, hopper_dgrad_program
from fdk_cuda.marlin.layout import Geometry, pack_layout
from fdk_cuda.marlin.ops import max_dgrad_rows
from fdk_cuda.nvrtc import Program
from fdk_formats.format import BITS
from fdk_formats.packing import pack

HOPPER = DEVICES["sm_90a"]
FEW = replace(HOPPER, sm_count=6)
WORD = (1 << 32) - 1


def rotate_right(word: int, places: int) -> int:
    places %= 32
    return (word >> places | word << (32 - places)) & WORD


def lane_codes(bits: int, block: bytes, warp: int, lane: int) -> dict[tuple[int, int, int], int]:
    """Codes by (fragment, register, half of it) as hopper_dgrad_decode.cuh's decoder picks them."""

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
def test_lanes_have_the_weights_that_wgmma_wants(bits: int) -> None:
    """Register 2 i + c of lane 4 g + t: row g + 8 c of A; columns 2 t, 2 t + 1, plus 8 i."""
    n, k = 64, 128
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(1 << bits, (n, k), dtype=torch.uint8, generator=generator)
    geometry = Geometry(bits, n, k, 64, torch.bfloat16, False)
    scale = torch.ones(n, k // 64, dtype=torch.bfloat16)
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
def test_loads_meet_no_bank_conflict(bits: int) -> None:
    """In a load of units no two lanes of a warp want different words of one bank."""
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
def test_loads_of_shared_words_meet_no_bank_conflict(bits: int) -> None:
    """Of 5 to 7 bits, 8 bytes for both fragments: pieces of 16 of two units, of 8 of four.

    16 lanes are served at a time, in both directions; the forward's take 4 bytes of these.
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


def test_stores_meet_no_bank_conflict() -> None:
    """A store to a piece of dx: pairs of columns, rows 2 t + e, chunks of 16 bytes swizzled."""
    for warp, c, e in itertools.product(range(4), (0, 8), range(2)):
        banks = set()
        for lane in range(32):
            g, t = divmod(lane, 4)
            row, chunk = c + 2 * t + e, 2 * warp + g // 4
            address = row * 128 + ((chunk ^ row % 8) << 4) + 4 * (g % 4)
            banks.add(address // 4 % 32)
        assert len(banks) == 32


@pytest.mark.parametrize("bits", BITS)
def test_backward_plans_take_everything_once(bits: int) -> None:
    """Tiles cover dx, whole ones and parts make all of them, shared memory suffices."""
    for device, affine, (n, k), m in itertools.product(
        (HOPPER, FEW),
        (False, True),
        ((1, 64), (1000, 1088), (8192, 8192), (28672, 8192), (4096, 14336)),
        (17, 64, 65, 256, 1024, 5000),
    ):
        scale = torch.float32 if affine else torch.bfloat16
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
            # No part is without a step.
            assert geometry.padded_n // 64 >= plan.splits * shape.cluster
            assert plan.whole_tiles + plan.partial_tiles // plan.splits == tiles
            assert shape.cluster == 1 or plan.grid == tiles * shape.cluster


# The fastest of every plan that was timed on an H200 (docs/kernels/hopper-gemm.md).
FASTEST = [
    *((bits, 8192, 8192, 256, (256, 2, 1)) for bits in BITS),
    *((1, 4096, 14336, 512, (256, 1, 1)), (2, 8192, 8192, 768, (256, 1, 2))),
    *((2, 4096, 14336, 1024, (256, 1, 2)), (3, 4096, 4096, 128, (128, 1, 4))),
]


@pytest.mark.parametrize(("bits", "n", "k", "m", "wanted"), FASTEST)
def test_the_plan_of_the_gradient_is_the_fastest_timed(
    bits: int, n: int, k: int, m: int, wanted: tuple[int, int, int]
) -> None:
    plan = dgrad_plan(Geometry(bits, n, k, 64, torch.bfloat16, False), m, HOPPER)
    assert (plan.shape.tile_m, plan.shape.cluster, plan.splits) == wanted


def check(variant: Variant, *columns: int) -> None:
    shapes = [s for s in dgrad_shapes(geometry_of(variant), HOPPER) if s.tile_m in columns]
    assert len(shapes) == 2 * len(columns)
    for shape in shapes:
        compiled = nvrtc.compile_program(hopper_dgrad_program(variant, shape), "sm_90a")
        resources = compiled.resources
        assert (resources.stack_bytes, resources.spill_bytes) == (0, 0), (variant, shape)
        # What the assembler says where it cannot keep wgmmas in flight.
        assert "serialized" not in compiled.log, (variant, shape, compiled.log)


@pytest.mark.slow
@pytest.mark.parametrize("bits", BITS)
def test_backward_spills_nothing(bits: int) -> None:
    """The plain variant and the one that needs the most registers, narrow and wide tiles."""
    for variant in (
        Variant(bits, torch.bfloat16, torch.bfloat16, 1, False),
        Variant(bits, torch.float16, torch.float32, 2, True),
    ):
        check(variant, 64, 256)


@pytest.mark.slow
def test_grid_backward_spills_nothing() -> None:
    for scale, zero_point in ((torch.bfloat16, 127), (torch.float32, 128)):
        check(Variant(8, torch.bfloat16, scale, 2, False, False, zero_point), 64, 256)


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("FDK_TEST_EVERY_KERNEL"),
    reason="compiles for minutes: set FDK_TEST_EVERY_KERNEL=1 to run it",
)
@pytest.mark.parametrize("bits", BITS)
def test_every_backward_instantiation_spills_nothing(bits: int) -> None:
    scales = (torch.bfloat16, torch.float16, torch.float32)
    kinds = [(False, False, None), (True, False, None), (True, True, None)]
    if bits == 8:
        kinds += [(False, False, 127), (False, False, 128)]
    dtypes = torch.bfloat16, torch.float16
    for dtype, scale, per_row, kind in itertools.product(dtypes, scales, (1, 2), kinds):
        variant = Variant(bits, dtype, scale, per_row, *kind)
        check(variant, *(tile.tile_m for tile in DGRAD_STEP_COST))


def test_params_struct_has_the_fields_that_are_launched() -> None:
    body = (KERNEL_DIRECTORY / "hopper_dgrad.cu").read_text().split("struct Params {")[1]
    lines = [line.split("//")[0].strip() for line in body.split("};")[0].splitlines()]
    pointers = sum("*" in line for line in lines)
    numbers = sum(len(line.split(",")) for line in lines if line.startswith("int "))
    assert f"128s{pointers}P{numbers}i" == DGRAD_FIELDS


@pytest.fixture
def precompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Program]]:
    """What ``precompile`` compiles on a Hopper, one after another; nothing is."""
    module = importlib.import_module("fdk_cuda.marlin.precompile")
    programs: list[Program] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    for of in (module, ops):
        monkeypatch.setattr(of, "device_limits", lambda index: HOPPER)
    monkeypatch.setattr(module, "cached_cubin", lambda program, arch: programs.append(program))
    ops.small_m_limit.cache_clear()
    yield programs
    ops.small_m_limit.cache_clear()


def test_precompile_takes_the_gradient_where_asked(precompiled: list[Program]) -> None:
    layers = [("custom4-g64", 4096, 4096)]
    precompile(layers)
    assert "hopper_dgrad.cu" not in [program.name for program in precompiled]
    without = len(precompiled)
    count = precompile(layers, gradient=True)
    assert len(precompiled) == without + count
    names = [program.name for program in precompiled]
    assert names.count("hopper_dgrad.cu") == 2 * len(DGRAD_STEP_COST)


@pytest.mark.parametrize(("n", "most_tiles"), [(4096, 2), (28672, 1)])
def test_precompile_leaves_rows_to_hopper(
    precompiled: list[Program], n: int, most_tiles: int
) -> None:
    """From 9 rows on, large weights of 8 bits never go by small_m.cu."""
    precompile([("custom8-g64", n, 8192)])
    few = [program for program in precompiled if program.name == "small_m.cu"]
    tiles = {o for program in few for o in program.options if o.startswith("-DM_TILES")}
    assert tiles == {f"-DM_TILES={i}" for i in range(1, most_tiles + 1)}
    assert [program.name for program in precompiled].count("repack.cu") == 1


def test_precompile_takes_both_ways_of_1_bit(precompiled: list[Program]) -> None:
    precompile([("int1-g64", 4096, 4096)])
    options = {o for p in precompiled if p.name == "hopper_gemm.cu" for o in p.options}
    assert {"-DSIGNS=0", "-DSIGNS=1"} <= options
    assert [program.name for program in precompiled].count("repack.cu") == 1


def test_precompile_takes_both_ways_of_a_grid(precompiled: list[Program]) -> None:
    """Whether codes of int8 are computed is known when a weight is packed."""
    precompile([("int8-g64", 4096, 4096)], gradient=True)
    for name in ("hopper_gemm.cu", "hopper_dgrad.cu"):
        options = {o for p in precompiled if p.name == name for o in p.options}
        assert {"-DGRID_ZERO_POINT=127", "-DGRID_ZERO_POINT=-1"} <= options


def test_precompile_refuses_what_marlin_does_not_take(precompiled: list[Program]) -> None:
    layers = [("nf4-g64", 64, 128), ("nf4-g16", 64, 128)]
    with pytest.raises(ValueError, match=r"nf4-g16 \[n=64, k=128\]: needs groups of .*, got 16"):
        precompile(layers)
    with pytest.raises(TypeError, match=r"bfloat16 or torch\.float16, got torch\.float32"):
        precompile(layers[:1], dtype=torch.float32)
    with pytest.raises(ValueError, match=r"precompile: n of nf4-g64 must be at least 0, got -64"):
        precompile([("nf4-g64", -64, 128)])
    assert precompiled == []


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
def test_most_rows_from_packed_bytes(format: str, most: int) -> None:
    """Codebooks of 256 values are slower than dequantising and cuBLAS before the others."""
    assert max_dgrad_rows(format) == most
