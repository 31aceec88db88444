"""GPUs, kernel variants and compilation of the Marlin kernels, without a GPU."""

from dataclasses import replace
from functools import cache

import torch

from fdk_cuda.marlin.dgrad import dgrad_shapes
from fdk_cuda.marlin.heuristics_small_m import MAX_M, Device, plan_of_shape, small_shapes
from fdk_cuda.marlin.instantiations import Variant, hopper_dgrad_program, hopper_program
from fdk_cuda.marlin.layout import Geometry
from fdk_cuda.nvrtc import compile_program
from fdk_formats.format import BITS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICES = {
    "sm_80": Device(sm_count=108, shared_bytes=166912, has_clusters=False),
    "sm_90a": Device(sm_count=132, shared_bytes=232448, has_clusters=True, is_hopper=True),
    "sm_120": Device(sm_count=170, shared_bytes=101376, has_clusters=True),
}
HOPPER = DEVICES["sm_90a"]
SHAPES = ((4096, 4096), (8192, 8192), (28672, 8192))
# For each width the plain variant, and the one that needs the most registers.
VARIANTS = [
    Variant(bits, dtype, scale_dtype, per_row, affine)
    for bits in BITS
    for dtype, scale_dtype, per_row, affine in ((BF16, BF16, 1, False), (FP16, FP32, 2, True))
]
# Also scales of other types for gemv_int8_limbs.cu, scaled weights of 1 bit, and zero points in the
# widest tiles.
SMALL_VARIANTS = [
    *VARIANTS,
    Variant(1, FP16, FP32, 1, False),
    Variant(1, BF16, FP16, 1, False),
    Variant(1, FP16, FP16, 1, True),
    Variant(1, FP16, FP16, 2, False),
    Variant(1, BF16, BF16, 1, False, has_signs=True),
    *(Variant(bits, BF16, BF16, 1, True) for bits in BITS),
]
# On Hopper also integer zero points, codes of a grid, and signs.
HOPPER_VARIANTS = [
    *VARIANTS,
    *(Variant(bits, BF16, BF16, 1, True, True) for bits in (4, 8)),
    Variant(8, BF16, BF16, 1, False, False, 127),
    Variant(8, FP16, FP32, 2, False, False, 128),
    Variant(1, BF16, BF16, 1, False, has_signs=True),
    Variant(1, FP16, FP16, 2, False, has_signs=True),
]


def variant_id(variant):
    dtypes = str(variant.dtype)[6:], str(variant.scale_dtype)[6:]
    kind = "affine" if variant.affine else "grid" if variant.grid_zero_point else "lut"
    kind = "signs" if variant.has_signs else kind
    return f"{kind}{variant.bits}-{'-'.join(dtypes)}-{variant.per_row}"


def geometry_of(variant, n=8192, k=8192):
    group_size = 32 if variant.per_row == 2 else 64
    zero_points = variant.affine, variant.whole_zero_point, variant.grid_zero_point
    return Geometry(
        variant.bits, n, k, group_size, variant.scale_dtype, *zero_points, variant.has_signs
    )


def widest_shapes(variant, device):
    """Yields each shape with the most warps, hence the fewest registers, that plans may give it."""
    geometry = geometry_of(variant, 4096, 4096)
    widest = {}
    for m in (1, 4, 8, MAX_M):
        for shape in small_shapes(variant, m, device):
            # The first has the most warps.
            if plan_of_shape(geometry, m, device, shape, 1):
                widest.setdefault(replace(shape, warps=0), shape)
    for shape in widest.values():
        for short_blocks in range(shape.fragments // 2):
            yield replace(shape, short_blocks=short_blocks)


@cache
def compile_log(program, arch):
    """Returns the compiler's log and the resources; a process compiles each program once."""
    compiled = compile_program(program, arch)
    return compiled.log, compiled.resources


def check_spills(program, arch="sm_90a"):
    _, resources = compile_log(program, arch)
    assert (resources.stack_bytes, resources.spill_bytes) == (0, 0), program.options


def check_wgmma(program):
    """Nothing spills, and the assembler can keep wgmmas in flight."""
    check_spills(program)
    log, _ = compile_log(program, "sm_90a")
    assert "serialized" not in log, (program.options, log)


def check_hopper(variant, shape):
    check_wgmma(hopper_program(variant, shape))


def check_dgrad(variant, tile_ms, clusters=(1, 2)):
    """Tiles of a number of rows of dy, in clusters of these sizes."""
    shapes = [s for s in dgrad_shapes(geometry_of(variant), HOPPER) if s.tile_m in tile_ms]
    assert {(s.tile_m, s.cluster) for s in shapes} == {(m, c) for m in tile_ms for c in (1, 2)}
    for shape in shapes:
        if shape.cluster in clusters:
            check_wgmma(hopper_dgrad_program(variant, shape))
