"""Instantiations of the Marlin kernels: source, macros and headers for NVRTC.

Names used in every kernel: a block is 32 x 64 weights (``BLOCK_N`` x ``BLOCK_K``), a fragment 16 of
its rows. ``TILE_M`` counts rows of x (or dy), ``TILE_N`` outputs, ``TILE_K`` inputs.
"""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from fdk_cuda.marlin.layout import Geometry
from fdk_cuda.nvrtc import Kernel, Program

KERNEL_DIRECTORY = Path(__file__).with_name("kernels")
SCALE_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
# The lookup table in shared memory: 256 entries of 256 bytes.
TABLE_BYTES = 256 * 256
# Shared memory of gemv_int8_limbs.cu for 64 inputs, by bits and rows of x: limbs and scale factors.
# The kernel asserts the same numbers.
LIMB_BYTES = {(1, 1): 400, (1, 4): 1056, (2, 1): 208}
# The same for gemv_bitplane.cu.
BITPLANE_BYTES = 528
# 1 bit: powers of two to which a bit adds exactly 1.0, as pairs, by tensor-core step (decode.cuh).
ONE_BIT_BASES = {
    torch.bfloat16: (0x41804180, 0x41004100, 0x40804080, 0x40004000),  # 16, 8, 4, 2
    torch.float16: (0x4C004C00, 0x48004800, 0x44004400, 0x40004000),
}
TWO_BIT_NIBBLES = 0x10101010


@dataclass(frozen=True)
class Variant:
    """Properties of a layout and its activations that a kernel is compiled for.

    Attributes:
        bits: width of a code.
        dtype: dtype of activations and codebook, bfloat16 or float16.
        scale_dtype: as stored.
        per_row: scales in a row of a block, 1 or 2.
        affine: True with zero points.
        whole_zero_point: True where zero points are integers from 0 to 255.
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
        """Returns the variant for a layout and a dtype of activations."""
        g = geometry
        zero_points = g.has_zero_point, g.whole_zero_point, g.grid_zero_point
        return cls(g.bits, dtype, g.scale_dtype, g.per_row, *zero_points, g.has_signs)

    @property
    def limb_rows(self) -> tuple[int, ...]:
        """Numbers of rows of x that gemv_int8_limbs.cu is compiled for; empty where it is not.

        The product of scale and zero point must be exact in float32. Two limbs, which four rows
        have, are too few for fp16 and for 2 bits.
        """
        is_exact = not self.affine or self.scale_dtype != torch.float32
        if self.bits > (2 if self.affine else 1) or self.per_row > 1 or not is_exact:
            return ()
        return (1,) if self.dtype == torch.float16 or self.bits == 2 else (1, 4)

    @property
    def has_bitplanes(self) -> bool:
        """True where gemv_bitplane.cu serves one row of x."""
        return self.bits == 1 and 1 in self.limb_rows

    @property
    def scales_weights(self) -> bool:
        """True where small_m.cu can scale weights instead of sums: see decode_1bit_scaled.cuh."""
        return self.bits == 1 and not self.affine and self.scale_dtype == self.dtype

    @property
    def constants(self) -> tuple[int, ...]:
        """The last fields of every kernel's Params: ``base`` and ``nibbles``."""
        return *ONE_BIT_BASES[self.dtype], TWO_BIT_NIBBLES

    def options(self, **more: int) -> tuple[str, ...]:
        """Returns the variant and further values as macros."""
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
    """Tile of small_m.cu, gemv_int8_limbs.cu or gemv_bitplane.cu.

    Attributes:
        fragments: number of fragments of 16 outputs that a warp computes.
        k_blocks: blocks of 64 inputs that a warp takes at a time.
        n_groups: groups of warps along n.
        m_tiles: tiles of 8 rows of x.
        warps: number of warps in a thread block.
        limb_rows: for gemv_int8_limbs.cu, the rows of x, 1 or 4 (``m_tiles`` and ``n_groups`` are
            1); for gemv_bitplane.cu 1; for small_m.cu 0.
        short_blocks: blocks of 32 outputs of a warp in tiles of the last pass, 0 where they are as
            high as the others.
        is_bitplane: True for gemv_bitplane.cu, which takes one row of x.
        is_spread: True for small_m.cu with up to 4 rows of x, in every other column of operand B;
            ``m_tiles`` is 1.
        scales_weights: True where small_m.cu scales weights, not sums; ``m_tiles`` is 2.
    """

    fragments: int
    k_blocks: int
    n_groups: int
    m_tiles: int
    warps: int
    limb_rows: int = 0
    short_blocks: int = 0
    is_bitplane: bool = False
    is_spread: bool = False
    scales_weights: bool = False

    @property
    def stage_blocks(self) -> int:
        """Blocks of 32 x 64 weights in a warp's stage."""
        return self.fragments // 2 * self.k_blocks

    @property
    def tile_n(self) -> int:
        """Outputs of a tile."""
        return 16 * self.fragments * self.n_groups


@dataclass(frozen=True)
class HopperShape:
    """Tile of hopper_gemm.cu or hopper_dgrad.cu.

    Attributes:
        tile_m: rows of x, or of dy.
        consumers: warpgroups that decode and multiply, 64 outputs of the product each.
        k_blocks: blocks of 64 along the summed dimension in a stage.
        stages: number of stages of the pipeline.
        cluster: thread blocks that share the summed dimension of a tile.
        has_table: True where codes are looked up in shared memory.
        k_groups: consumers that share outputs, each with half of a stage's blocks if 2.
    """

    tile_m: int
    consumers: int
    k_blocks: int
    stages: int
    cluster: int
    has_table: bool
    k_groups: int = 1

    @property
    def tile_n(self) -> int:
        """Outputs of a tile: rows of the weight, or its columns in dgrad."""
        return 64 * self.consumers // self.k_groups

    @property
    def threads(self) -> int:
        """Threads of a block: consumers and one producer warpgroup."""
        return 128 * (self.consumers + 1)


def small_m_program(variant: Variant, shape: TileShape) -> Program:
    """Returns small_m.cu, gemv_int8_limbs.cu or gemv_bitplane.cu for a variant and a tile."""
    options = variant.options(
        TILE_FRAGMENTS=shape.fragments,
        SHORT_BLOCKS=shape.short_blocks or shape.fragments // 2,
        K_BLOCKS=shape.k_blocks,
        N_GROUPS=shape.n_groups,
        WARPS=shape.warps,
    )
    if shape.is_bitplane:
        assert variant.has_bitplanes
        return _program("gemv_bitplane.cu", (*options, f"-DBITPLANE_BYTES={BITPLANE_BYTES}"))
    if rows := shape.limb_rows:
        assert rows in variant.limb_rows
        more = f"-DTILE_M={rows}", f"-DLIMB_BYTES={LIMB_BYTES[variant.bits, rows]}"
        return _program("gemv_int8_limbs.cu", (*options, *more))
    assert variant.scales_weights or not shape.scales_weights
    macros = {
        "M_TILES": shape.m_tiles,
        "SPREAD": shape.is_spread,
        "SCALES_WEIGHTS": shape.scales_weights,
        "SIGNS": shape.scales_weights and variant.has_signs,
    }
    options += tuple(f"-D{name}={int(value)}" for name, value in macros.items())
    return _program("small_m.cu", options)


def small_m_experts_program(variant: Variant, shape: TileShape) -> Program:
    """Returns small_m_experts.cu, the kernel for few rows of each expert of a stack."""
    macros = {
        "TILE_FRAGMENTS": shape.fragments,
        "K_BLOCKS": shape.k_blocks,
        "WARPS": shape.warps,
        "M_TILES": shape.m_tiles,
        "SPREAD": int(shape.is_spread),
        "SCALES_WEIGHTS": 0,
        "SIGNS": 0,
    }
    return _program("small_m_experts.cu", variant.options(**macros))


def dequantise_warps(variant: Variant) -> int:
    """Returns the warps in a thread block of dequantise.cu."""
    return 4 if variant.bits == 1 else 16


def dequantise_program(variant: Variant) -> Program:
    """Returns dequantise.cu for a variant."""
    return _program("dequantise.cu", variant.options(WARPS=dequantise_warps(variant)))


def repack_program(geometry: Geometry) -> Program:
    """Returns repack.cu, both directions. Dtypes of the same size share a program."""
    scale = torch.float32 if geometry.scale_dtype.itemsize == 4 else torch.bfloat16
    sizes = geometry.bits, torch.bfloat16, scale, geometry.per_row, geometry.has_zero_point
    return _program("repack.cu", Variant(*sizes).options())


def hopper_program(
    variant: Variant,
    shape: HopperShape,
    *,
    experts: bool = False,
    swiglu: bool = False,
    interleaved: bool = False,
) -> Program:
    """Returns hopper_gemm.cu for a variant and a tile.

    Args:
        variant: properties of the weight; for experts without signs.
        shape: the tile; for experts without clusters and K groups.
        experts: whether the weight is a stack of experts, which rows of x have in order.
        swiglu: whether the first half of the outputs are gates of the second; rows of the weight
            are interleaved then.
        interleaved: whether octets of rows are of the first and of the second half in turns.
    """
    extra = {"CONSUMERS": shape.consumers, "K_GROUPS": shape.k_groups, "K_BLOCKS": shape.k_blocks}
    extra |= {"SIGNS": variant.has_signs, "EXPERTS": experts, "SWIGLU": swiglu}
    extra["INTERLEAVED"] = interleaved and not swiglu
    return _hopper_program("hopper_gemm.cu", variant, shape, extra)


def hopper_dgrad_program(variant: Variant, shape: HopperShape) -> Program:
    """Returns hopper_dgrad.cu for a variant and a tile of two consumers, ``k_blocks`` 1."""
    assert (shape.consumers, shape.k_blocks) == (2, 1), shape
    extra = {"SIGNS": 0, "EXPERTS": 0, "SWIGLU": 0, "INTERLEAVED": 0}
    return _hopper_program("hopper_dgrad.cu", variant, shape, extra)


def _hopper_program(
    name: str, variant: Variant, shape: HopperShape, extra: dict[str, int]
) -> Program:
    options = variant.options(
        TILE_M=shape.tile_m,
        **{name: int(value) for name, value in extra.items()},
        STAGES=shape.stages,
        CLUSTER=shape.cluster,
        HAS_TABLE=int(shape.has_table),
        WHOLE_ZERO_POINT=int(variant.whole_zero_point),
        GRID_ZERO_POINT=-1 if variant.grid_zero_point is None else variant.grid_zero_point,
    )
    wgmma = ("common/wgmma.cuh", wgmma_header(shape.tile_m, variant.dtype))
    program = _program(name, options)
    return replace(program, headers=(*program.headers, wgmma))


def split_k_reduce_program(dtype: torch.dtype, shape: HopperShape) -> Program:
    """Returns split_k_reduce.cu for a dtype of activations and a tile."""
    any_weight = Variant(4, dtype, torch.bfloat16, 1, False)
    options = any_weight.options(TILE_M=shape.tile_m, TILE_N=shape.tile_n)
    return _program("split_k_reduce.cu", options)


def wgmma_header(tile_m: int, dtype: torch.dtype) -> str:
    """Returns the source of ``wgmma(d, a, b)``: d += a b.

    a :: [64, 16] is in registers, b :: [16, tile_m] in shared memory. The instruction names every
    accumulator register, which C++ cannot write for a number that is a macro.
    """
    count = tile_m // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(4))
    kind = "f16" if dtype == torch.float16 else "bf16"
    return f"""#pragma once
__forceinline__ void wgmma(float (&d)[{count}], const uint32 (&a)[4], uint64 b) {{
  asm volatile(
      "{{\\n.reg .pred p;\\nsetp.eq.b32 p, 0, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{tile_m}k16.f32.{kind}.{kind} "
      "{{{sums}}}, {{{a}}}, %{count + 4}, p, 1, 1, 0;\\n}}"
      : {outputs} : {inputs}, "l"(b));
}}
"""


@cache
def shared_kernel(program: Program, entry: str | None = None) -> Kernel:
    """Returns the kernel of a program, shared by all launches.

    Args:
        program: a program of this module.
        entry: name of the kernel, by default that of the file.
    """
    return Kernel(program, entry or program.name.removesuffix(".cu"))


def _program(name: str, options: tuple[str, ...]) -> Program:
    return Program(name, _read(name), _headers(), options)


@cache
def _read(name: str) -> str:
    return (KERNEL_DIRECTORY / name).read_text(encoding="utf-8")


@cache
def _headers() -> tuple[tuple[str, str], ...]:
    """Returns name and text of each header. NVRTC finds an include by exactly this name."""
    names = (f"common/{path.name}" for path in sorted(KERNEL_DIRECTORY.glob("common/*.cuh")))
    return tuple((name, _read(name)) for name in names)
