"""The Marlin kernels' source and its instantiations."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from fdk_cuda.marlin.layout import Geometry
from fdk_cuda.nvrtc import Kernel, Program

KERNEL_DIRECTORY = Path(__file__).with_name("kernels")
SCALE_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
TABLE_BYTES = 256 * 256
# digits.cu, which holds itself to it, by bits and rows of x: the digits of 64 columns of x, and
# what their sums are scaled with.
DIGITS_BYTES = {(1, 1): 400, (1, 4): 1056, (2, 1): 208}
# The same of planes.cu.
PLANES_BYTES = 528
# 1 bit: powers of two to which a bit adds exactly 1.0, as pairs, by step. See decode.cuh.
ONE_BIT_BASES = {
    torch.bfloat16: (0x41804180, 0x41004100, 0x40804080, 0x40004000),  # 16, 8, 4, 2
    torch.float16: (0x4C004C00, 0x48004800, 0x44004400, 0x40004000),
}
TWO_BIT_NIBBLES = 0x10101010


@dataclass(frozen=True)
class Variant:
    """What of a layout and its activations the kernels are compiled for.

    Attributes:
        bits: width of a code.
        dtype: of activations and codebook, bfloat16 or float16.
        scale_dtype: as stored.
        per_row: scales that a row of a block holds.
        affine: whether there are zero points.
        whole_zero_point: whether they are integers from 0 to 255.
        grid_zero_point, has_signs: as in ``Geometry``.
    """

    bits: int
    dtype: torch.dtype
    scale_dtype: torch.dtype
    per_row: int
    affine: bool
    whole_zero_point: bool = False
    grid_zero_point: int | None = None
    has_signs: bool = False

    @classmethod
    def of(cls, geometry: Geometry, dtype: torch.dtype) -> "Variant":
        """The variant for a layout."""
        g = geometry
        zero_points = g.has_zero_point, g.whole_zero_point, g.grid_zero_point
        return cls(g.bits, dtype, g.scale_dtype, g.per_row, *zero_points, g.has_signs)

    @property
    def digit_rows(self) -> tuple[int, ...]:
        """Rows of x that instantiations of digits.cu take.

        Scale times zero point must be exact in float32; four rows have too few digits for fp16, or
        2 bits.
        """
        is_exact = not self.affine or self.scale_dtype != torch.float32
        if self.bits > (2 if self.affine else 1) or self.per_row > 1 or not is_exact:
            return ()
        return (1,) if self.dtype == torch.float16 or self.bits == 2 else (1, 4)

    @property
    def has_planes(self) -> bool:
        """Whether planes.cu takes a row of x."""
        return self.bits == 1 and 1 in self.digit_rows

    @property
    def scales_weights(self) -> bool:
        """Whether small_m.cu has instantiations that scale weights, not sums: see scaled.cuh."""
        return self.bits == 1 and not self.affine and self.scale_dtype == self.dtype

    @property
    def constants(self) -> tuple[int, ...]:
        """The last fields of every kernel's Params: ``base`` and ``nibbles``."""
        return *ONE_BIT_BASES[self.dtype], TWO_BIT_NIBBLES

    def options(self, **more: int) -> tuple[str, ...]:
        """As macros."""
        macros = {
            "BITS": self.bits,
            "FP16": int(self.dtype == torch.float16),
            "SCALE_TYPE": SCALE_TYPES[self.scale_dtype],
            "PER_ROW": self.per_row,
            "AFFINE": int(self.affine),
            **more,
        }
        return tuple(f"-D{name}={value}" for name, value in macros.items())


@dataclass(frozen=True)
class TileShape:
    """What small_m.cu, digits.cu or planes.cu is compiled for beside the variant.

    Attributes:
        fragments: of 16 rows that a warp takes.
        k_blocks: blocks of 64 columns that a warp takes at a time.
        row_groups: groups of warps, one below the other.
        column_tiles: tiles of 8 rows of x.
        warps: of a block.
        digit_rows: rows of x that digits.cu takes, 1 or 4, where it is its; ``column_tiles`` and
            ``row_groups`` are 1. 0 where it is small_m.cu's.
        by_planes: whether it is planes.cu's, which takes one row of x; ``digit_rows`` is 1.
        short_blocks: blocks of 32 rows that a warp takes of the tiles of the last pass, 0 where
            they are as high as the others.
        is_spread: whether x has up to 4 rows, of which small_m.cu makes a sum less for each it
            makes; ``column_tiles`` is 1.
        scales_weights: whether small_m.cu scales weights, not sums; ``column_tiles`` is 2.
    """

    fragments: int
    k_blocks: int
    row_groups: int
    column_tiles: int
    warps: int
    digit_rows: int = 0
    short_blocks: int = 0
    by_planes: bool = False
    is_spread: bool = False
    scales_weights: bool = False

    @property
    def stage_blocks(self) -> int:
        """Blocks of 32 x 64 weights that a warp takes at a time."""
        return self.fragments // 2 * self.k_blocks

    @property
    def rows(self) -> int:
        """Of a tile."""
        return 16 * self.fragments * self.row_groups


@dataclass(frozen=True)
class HopperShape:
    """What hopper_gemm.cu or hopper_backward.cu is compiled for beside the variant.

    Attributes:
        columns: rows of x, or of dy, in a tile.
        consumers: groups of four warps that decode and multiply, 64 rows of the weight each, or
            64 columns backward.
        k_blocks: of 64 columns, or rows backward, in a stage.
        stages: of the ring.
        cluster: blocks that share what is summed over in a tile.
        has_table: whether codes are looked up in shared memory.
        k_groups: groups of consumers that share rows, each with half of a stage's blocks if 2.
    """

    columns: int
    consumers: int
    k_blocks: int
    stages: int
    cluster: int
    has_table: bool
    k_groups: int = 1

    @property
    def rows(self) -> int:
        """Of a tile: rows of the weight, or its columns backward."""
        return 64 * self.consumers // self.k_groups

    @property
    def threads(self) -> int:
        """Of a block: consumers and producers."""
        return 128 * (self.consumers + 1)


def small_m_program(variant: Variant, shape: TileShape) -> Program:
    """small_m.cu, digits.cu or planes.cu for a variant and a shape of tile."""
    options = variant.options(
        TILE_FRAGMENTS=shape.fragments,
        SHORT_BLOCKS=shape.short_blocks or shape.fragments // 2,
        K_BLOCKS=shape.k_blocks,
        ROW_GROUPS=shape.row_groups,
        WARPS=shape.warps,
    )
    if shape.by_planes:
        assert variant.has_planes
        return _program("planes.cu", (*options, f"-DPLANES_BYTES={PLANES_BYTES}"))
    if rows := shape.digit_rows:
        assert rows in variant.digit_rows
        more = f"-DX_ROWS={rows}", f"-DDIGITS_BYTES={DIGITS_BYTES[variant.bits, rows]}"
        return _program("digits.cu", (*options, *more))
    assert variant.scales_weights or not shape.scales_weights
    macros = {
        "COLUMN_TILES": shape.column_tiles,
        "SPREAD": shape.is_spread,
        "SCALES_WEIGHTS": shape.scales_weights,
        "SIGNS": shape.scales_weights and variant.has_signs,
    }
    options += tuple(f"-D{name}={int(value)}" for name, value in macros.items())
    return _program("small_m.cu", options)


def dequantise_warps(variant: Variant) -> int:
    """Of a block of dequantise.cu."""
    return 4 if variant.bits == 1 else 16


def dequantise_program(variant: Variant) -> Program:
    """dequantise.cu for a variant."""
    return _program("dequantise.cu", variant.options(WARPS=dequantise_warps(variant)))


def layout_program(geometry: Geometry) -> Program:
    """layout.cu, both directions: only sizes count, so all dtypes of so many bytes share it."""
    scale = torch.float32 if geometry.scale_dtype.itemsize == 4 else torch.bfloat16
    sizes = geometry.bits, torch.bfloat16, scale, geometry.per_row, geometry.has_zero_point
    return _program("layout.cu", Variant(*sizes).options())


def hopper_program(variant: Variant, shape: HopperShape) -> Program:
    """hopper_gemm.cu for a variant and a shape of tile."""
    extra = {"CONSUMERS": shape.consumers, "K_GROUPS": shape.k_groups, "K_BLOCKS": shape.k_blocks}
    extra["SIGNS"] = int(variant.has_signs)
    return _hopper_program("hopper_gemm.cu", variant, shape, extra)


def hopper_backward_program(variant: Variant, shape: HopperShape) -> Program:
    """hopper_backward.cu for a variant and a shape of two groups of consumers, k_blocks 1."""
    assert (shape.consumers, shape.k_blocks) == (2, 1), shape
    return _hopper_program("hopper_backward.cu", variant, shape, {"SIGNS": 0})


def _hopper_program(
    name: str, variant: Variant, shape: HopperShape, extra: dict[str, int]
) -> Program:
    """What both directions are compiled with, and macros that one alone has."""
    options = variant.options(
        TILE_COLUMNS=shape.columns,
        **extra,
        STAGES=shape.stages,
        CLUSTER=shape.cluster,
        HAS_TABLE=int(shape.has_table),
        WHOLE_ZERO_POINT=int(variant.whole_zero_point),
        GRID_ZERO_POINT=-1 if variant.grid_zero_point is None else variant.grid_zero_point,
    )
    wgmma = ("wgmma.cuh", wgmma_header(shape.columns, variant.dtype))
    program = _program(name, options)
    return replace(program, headers=(*program.headers, wgmma))


def sum_splits_program(dtype: torch.dtype, shape: HopperShape) -> Program:
    """sum_splits.cu for activations' dtype and a shape of tile."""
    any_weight = Variant(4, dtype, torch.bfloat16, 1, False)
    options = any_weight.options(TILE_COLUMNS=shape.columns, TILE_ROWS=shape.rows)
    return _program("sum_splits.cu", options)


def wgmma_header(columns: int, dtype: torch.dtype) -> str:
    """``wgmma(d, a, b)``: d += a b for a :: [64, 16] in registers and b :: [16, columns].

    The instruction names every register of its accumulator, which C++ cannot write for a number
    that is a macro.
    """
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
    kind = "f16" if dtype == torch.float16 else "bf16"
    return f"""#pragma once
__device__ __forceinline__ void wgmma(float (&d)[{count}], const uint32 (&a)[4], uint64 b) {{
  asm volatile(
      "{{\\n.reg .pred p;\\nsetp.eq.b32 p, 0, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
      "{{{sums}}}, {{{a}}}, %{count + 4}, p, 1, 1, 0;\\n}}"
      : {outputs} : {inputs}, "l"(b));
}}
"""


@cache
def small_m_kernel(variant: Variant, shape: TileShape) -> Kernel:
    """The kernel, shared by all launches."""
    program = small_m_program(variant, shape)
    return Kernel(program, program.name.removesuffix(".cu"))


@cache
def hopper_kernel(variant: Variant, shape: HopperShape) -> Kernel:
    """The kernel, shared by all launches."""
    return Kernel(hopper_program(variant, shape), "hopper_gemm")


@cache
def hopper_backward_kernel(variant: Variant, shape: HopperShape) -> Kernel:
    """The kernel, shared by all launches."""
    return Kernel(hopper_backward_program(variant, shape), "hopper_backward")


@cache
def sum_splits_kernel(dtype: torch.dtype, shape: HopperShape) -> Kernel:
    """The kernel, shared by all launches."""
    return Kernel(sum_splits_program(dtype, shape), "sum_splits")


@cache
def dequantise_kernel(variant: Variant) -> Kernel:
    """The kernel, shared by all launches."""
    return Kernel(dequantise_program(variant), "dequantise")


@cache
def layout_kernel(program: Program, entry: str) -> Kernel:
    """``lay_out`` or ``take_back``, shared by all launches."""
    return Kernel(program, entry)


def _program(name: str, options: tuple[str, ...]) -> Program:
    return Program(name, _read(name), _headers(), options)


@cache
def _read(name: str) -> str:
    return (KERNEL_DIRECTORY / name).read_text(encoding="utf-8")


@cache
def _headers() -> tuple[tuple[str, str], ...]:
    return tuple((path.name, _read(path.name)) for path in sorted(KERNEL_DIRECTORY.glob("*.cuh")))
