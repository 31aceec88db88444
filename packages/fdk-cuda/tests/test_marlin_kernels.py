"""Every kind of instantiation compiles without a GPU, and spills nothing."""

import itertools
import os
from dataclasses import replace

import pytest
import torch
from marlin_devices import DEVICES, check_resources, geometry_of

from fdk_cuda import nvrtc
from fdk_cuda.marlin.heuristics_hopper import (
    has_table,
    hopper_shapes,
    plan_hopper,
)
from fdk_cuda.marlin.heuristics_small_m import (
    MAX_M,
    plan_of_shape,
    plan_small,
    small_shapes,
)
from fdk_cuda.marlin.instantiations import (
    KERNEL_DIRECTORY,
    Variant,
    dequantise_program,
    hopper_program,
    repack_program,
    small_m_program,
    split_k_reduce_program,
    wgmma_header,
)
from fdk_cuda.marlin.layout import Geometry
from fdk_cuda.marlin.repack import REPACK_FIELDS
from fdk_cuda.marlin.runtime import DEQUANTISE_FIELDS, HOPPER_FIELDS, SMALL_FIELDS, SUM_FIELDS
from fdk_formats.format import BITS

# The plain one, and the one that needs the most registers.
VARIANTS = [
    Variant(bits, dtype, scale_dtype, per_row, affine)
    for bits in BITS
    for dtype, scale_dtype, per_row, affine in (
        (torch.bfloat16, torch.bfloat16, 1, False),
        (torch.float16, torch.float32, 2, True),
    )
]
# And gemv_int8_limbs.cu's with scales of the other types, scaled weights of 1 bit, and zero points
# in the widest tiles.
SMALL_VARIANTS = [
    *VARIANTS,
    Variant(1, torch.float16, torch.float32, 1, False),
    Variant(1, torch.bfloat16, torch.float16, 1, False),
    Variant(1, torch.float16, torch.float16, 1, True),
    Variant(1, torch.float16, torch.float16, 2, False),
    Variant(1, torch.bfloat16, torch.bfloat16, 1, False, has_signs=True),
    *(Variant(bits, torch.bfloat16, torch.bfloat16, 1, True) for bits in BITS),
]
# On Hopper, a third way to scale, integers of a grid, and signs.
HOPPER_VARIANTS = [
    *VARIANTS,
    *(Variant(bits, torch.bfloat16, torch.bfloat16, 1, True, True) for bits in (4, 8)),
    Variant(8, torch.bfloat16, torch.bfloat16, 1, False, False, 127),
    Variant(8, torch.float16, torch.float32, 2, False, False, 128),
    Variant(1, torch.bfloat16, torch.bfloat16, 1, False, has_signs=True),
    Variant(1, torch.float16, torch.float16, 2, False, has_signs=True),
]


def variant_id(variant):
    dtypes = str(variant.dtype)[6:], str(variant.scale_dtype)[6:]
    kind = "affine" if variant.affine else "grid" if variant.grid_zero_point else "lut"
    kind = "signs" if variant.has_signs else kind
    return f"{kind}{variant.bits}-{'-'.join(dtypes)}-{variant.per_row}"


@pytest.mark.slow
@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("variant", SMALL_VARIANTS, ids=variant_id)
def test_small_m_spills_nothing(variant, arch):
    """The instantiations that the plans of usual shapes take, each at its own number of warps."""
    shapes = set()
    for n, k in ((4096, 4096), (8192, 8192), (28672, 8192)):
        geometry = geometry_of(variant, n, k)
        assert Variant.of(geometry, variant.dtype) == variant
        for m in (1, 4, MAX_M):
            shapes.add(plan_small(geometry, variant.dtype, m, DEVICES[arch]).shape)
    for rows in variant.limb_rows:  # that these may leave to small_m.cu
        shapes |= {s for s in small_shapes(variant, rows, DEVICES[arch]) if s.limb_rows == rows}
    for shape in shapes:
        check_resources(small_m_program(variant, shape), arch, shape)


@pytest.mark.parametrize(
    ("bits", "dtype", "scale", "per_row", "affine", "rows"),
    [
        (1, torch.bfloat16, torch.bfloat16, 1, False, (1, 4)),
        (1, torch.bfloat16, torch.float32, 1, False, (1, 4)),
        (1, torch.bfloat16, torch.float16, 1, True, (1, 4)),
        (1, torch.float16, torch.bfloat16, 1, True, (1,)),
        # A product of a scale and a zero point would be rounded.
        (1, torch.bfloat16, torch.float32, 1, True, ()),
        (1, torch.bfloat16, torch.bfloat16, 2, False, ()),
        (2, torch.bfloat16, torch.bfloat16, 1, False, ()),
        (2, torch.bfloat16, torch.float16, 1, True, (1,)),
        (2, torch.bfloat16, torch.float32, 1, True, ()),
        (2, torch.float16, torch.bfloat16, 2, True, ()),
        (3, torch.bfloat16, torch.bfloat16, 1, True, ()),
    ],
)
def test_what_is_taken_by_digits(bits, dtype, scale, per_row, affine, rows):
    variant = Variant(bits, dtype, scale, per_row, affine)
    assert variant.limb_rows == rows
    for m in range(1, 9):
        taken = {shape.limb_rows for shape in small_shapes(variant, m, DEVICES["sm_90a"])}
        assert taken == {0, *[r for r in rows if r >= m][:1]}


@pytest.mark.slow
@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("variant", SMALL_VARIANTS, ids=variant_id)
def test_dequantise_spills_nothing(variant, arch):
    check_resources(dequantise_program(variant), arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_layout_spills_nothing(variant, arch):
    check_resources(repack_program(geometry_of(variant)), arch)


def check_hopper(variant, shape):
    compiled = nvrtc.compile_program(hopper_program(variant, shape), "sm_90a")
    resources = compiled.resources
    assert (resources.stack_bytes, resources.spill_bytes) == (0, 0), (variant, shape)
    # What the assembler says where it cannot keep wgmmas in flight.
    assert "serialized" not in compiled.log, (variant, shape, compiled.log)


@pytest.mark.slow
@pytest.mark.parametrize("variant", HOPPER_VARIANTS, ids=variant_id)
def test_hopper_spills_nothing(variant):
    """The instantiations that the plans of usual shapes take; the widest is among them."""
    shapes = set()
    for n, k in ((4096, 4096), (8192, 8192), (28672, 8192)):
        geometry = geometry_of(variant, n, k)
        for m in (17, 64, 128, 256, 1024):
            shapes.add(plan_hopper(geometry, m, DEVICES["sm_90a"]).shape)
    assert max(shape.tile_m for shape in shapes) == 256
    assert max(shape.cluster for shape in shapes) == 2
    for shape in shapes:
        check_hopper(variant, shape)


@pytest.mark.parametrize(
    ("bits", "affine", "scale", "columns", "wanted"),
    [
        (1, False, torch.bfloat16, 128, True),
        (2, False, torch.bfloat16, 160, False),
        (1, True, torch.bfloat16, 64, False),
        (2, False, torch.float32, 64, False),
        (4, True, torch.float32, 256, True),
        (8, True, torch.bfloat16, 64, False),
        (8, False, torch.bfloat16, 256, True),
    ],
)
def test_what_is_looked_up(bits, affine, scale, columns, wanted):
    geometry = Geometry(bits, 8192, 8192, 64, scale, affine)
    assert has_table(geometry, columns) == wanted
    shapes = [s for s in hopper_shapes(geometry, DEVICES["sm_90a"]) if s.tile_m == columns]
    assert shapes
    assert all(shape.has_table == wanted for shape in shapes)


def test_stages_are_shorter_where_long_ones_do_not_fit():
    """Three stages of 128 columns do not, at 8 bits with a table, 128 rows of x, three groups."""
    geometry = Geometry(8, 8192, 8192, 64, torch.bfloat16, False)
    k_blocks = {
        (shape.tile_m, shape.consumers, shape.k_groups): shape.k_blocks
        for shape in hopper_shapes(geometry, DEVICES["sm_90a"])
    }
    assert k_blocks[128, 3, 1] == 1
    assert k_blocks[128, 2, 1] == 2
    # Groups that share rows take a block each.
    assert k_blocks[64, 4, 2] == 2


@pytest.mark.parametrize("bits", BITS)
def test_tiles_of_three_groups_and_of_pairs(bits):
    """192 rows; and 128 whose groups share rows, with 64 columns in clusters only."""
    geometry = Geometry(bits, 8192, 8192, 64, torch.bfloat16, False)
    shapes = hopper_shapes(geometry, DEVICES["sm_90a"])
    assert {s.tile_n for s in shapes if s.consumers == 3} == {192}
    pairs = {(s.tile_n, s.tile_m, s.cluster) for s in shapes if s.k_groups == 2}
    assert pairs == {(128, 32, 1), (128, 32, 2), (128, 64, 2)}


def test_signs_are_not_looked_up():
    """Nor is there a table in shared memory: as many stages as there may be."""
    geometry = Geometry(1, 8192, 8192, 64, torch.bfloat16, False, has_signs=True)
    assert not has_table(geometry, 64)
    shapes = hopper_shapes(geometry, DEVICES["sm_90a"])
    assert {s.stages for s in shapes if s.tile_m == 64} == {8}
    for signs in (0, 1):
        told = replace(geometry, has_signs=bool(signs))
        shape = plan_hopper(told, 64, DEVICES["sm_90a"]).shape
        options = hopper_program(Variant.of(told, torch.bfloat16), shape).options
        assert {f"-DSIGNS={signs}", f"-DHAS_TABLE={1 - signs}"} <= set(options)


def test_a_grid_is_computed():
    geometry = Geometry(8, 8192, 8192, 64, torch.bfloat16, False, False, 127)
    assert not has_table(geometry, 64)
    assert not any(shape.has_table for shape in hopper_shapes(geometry, DEVICES["sm_90a"]))
    options = hopper_program(VARIANTS[-2], plan_hopper(geometry, 64, DEVICES["sm_90a"]).shape)
    assert "-DGRID_ZERO_POINT=-1" in options.options
    variant = Variant.of(geometry, torch.bfloat16)
    options = hopper_program(variant, plan_hopper(geometry, 64, DEVICES["sm_90a"]).shape)
    assert "-DGRID_ZERO_POINT=127" in options.options


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sum_splits_spills_nothing(dtype):
    for shape in hopper_shapes(geometry_of(VARIANTS[0]), DEVICES["sm_90a"]):
        check_resources(split_k_reduce_program(dtype, shape), "sm_90a", shape)


def test_wgmma_header_names_every_register():
    header = wgmma_header(64, torch.float16)
    assert "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " in header
    # 32 sums, then the four registers of a, then the descriptor of b.
    assert "%31}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;" in header
    assert header.count('"+f"(d[') == 32
    assert header.count('"r"(a[') == 4


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("FDK_TEST_EVERY_KERNEL"),
    reason="compiles for minutes: set FDK_TEST_EVERY_KERNEL=1 to run it",
)
@pytest.mark.parametrize("bits", BITS)
def test_every_hopper_instantiation_spills_nothing(bits):
    scales = (torch.bfloat16, torch.float16, torch.float32)
    kinds = [(False, False, None), (True, False, None), (True, True, None)]
    if bits == 8:
        kinds += [(False, False, 127), (False, False, 128)]
    if bits == 1:
        kinds.append((False, False, None, True))
    for dtype, scale, per_row, kind in itertools.product(
        (torch.bfloat16, torch.float16), scales, (1, 2), kinds
    ):
        variant = Variant(bits, dtype, scale, per_row, *kind)
        for shape in hopper_shapes(geometry_of(variant), DEVICES["sm_90a"]):
            check_hopper(variant, shape)


@pytest.mark.parametrize("arch", DEVICES)
def test_short_tiles_of_1_bit_spill_nothing(arch):
    """Codebooks of bf16, 64 x 64 a warp: 12.0 has no registers for 16 warps that are no pairs."""
    variant, device = Variant(1, torch.bfloat16, torch.bfloat16, 1, False), DEVICES[arch]
    shapes = [
        shape
        for shape in widest_shapes(variant, device)
        if (shape.fragments, shape.k_blocks, shape.is_spread) == (4, 1, True)
    ]
    assert {shape.short_blocks for shape in shapes} == {0, 1}
    warps = {shape.n_groups: shape.warps for shape in shapes}
    assert warps == {1: 12 if arch == "sm_120" else 16, 2: 16}
    for shape in shapes:
        check_resources(small_m_program(variant, shape), arch, shape)


@pytest.mark.slow
@pytest.mark.parametrize("has_signs", [False, True])
@pytest.mark.parametrize("per_row", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scaled_weights_spill_nothing(dtype, per_row, has_signs):
    """Of 1 bit with more than 8 rows of x, on Hopper alone; at the most warps, in short tiles too.

    Not where a scale is of another dtype, or there are zero points.
    """
    hopper, scale_of_other = DEVICES["sm_90a"], {torch.bfloat16: torch.float16}
    variant = Variant(1, dtype, dtype, per_row, False, has_signs=has_signs)
    for other in (
        replace(variant, scale_dtype=scale_of_other.get(dtype, torch.float32)),
        replace(variant, affine=True),
        replace(variant, bits=2),
    ):
        assert not any(shape.scales_weights for shape in small_shapes(other, MAX_M, hopper))
    assert not any(s.scales_weights for s in small_shapes(variant, 8, hopper))
    assert not any(s.scales_weights for s in small_shapes(variant, MAX_M, DEVICES["sm_120"]))
    shapes = [s for s in widest_shapes(variant, hopper) if s.m_tiles == 2]
    assert all(shape.scales_weights for shape in shapes)
    # Two scales to a row of a block leave twelve warps of 128 x 128 too little shared memory.
    assert {shape.warps for shape in shapes} == {16, 12 if per_row == 1 else 8}
    for shape in shapes:
        check_resources(small_m_program(variant, shape), "sm_90a", shape)


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("FDK_TEST_EVERY_KERNEL"),
    reason="compiles for minutes: set FDK_TEST_EVERY_KERNEL=1 to run it",
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("arch", DEVICES)
def test_every_instantiation_spills_nothing(arch, bits, dtype):
    """All variants and shapes at the most warps that plans may give them: minutes of compiling."""
    spilling = {}
    scales = (torch.bfloat16, torch.float16, torch.float32)
    for scale, per_row, affine in itertools.product(scales, (1, 2), (False, True)):
        variant = Variant(bits, dtype, scale, per_row, affine)
        for shape in widest_shapes(variant, DEVICES[arch]):
            program = small_m_program(variant, shape)
            resources = nvrtc.compile_program(program, arch).resources
            if (found := (resources.stack_bytes, resources.spill_bytes)) != (0, 0):
                spilling[variant_id(variant), shape] = found
    assert not spilling


def widest_shapes(variant, device):
    """Each shape with the most warps, so the fewest registers, that plans may give it."""
    geometry = geometry_of(variant, 4096, 4096)
    widest = {}
    for m in (1, 4, 8, MAX_M):
        for shape in small_shapes(variant, m, device):
            # The first takes the most warps.
            if plan_of_shape(geometry, m, device, shape, 1):
                widest.setdefault(replace(shape, warps=0), shape)
    for shape in widest.values():
        for short_blocks in range(shape.fragments // 2):
            yield replace(shape, short_blocks=short_blocks)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("common/small_m_mainloop.cuh", SMALL_FIELDS),
        ("dequantise.cu", DEQUANTISE_FIELDS),
        ("repack.cu", REPACK_FIELDS),
        ("hopper_gemm.cu", HOPPER_FIELDS),
        ("split_k_reduce.cu", SUM_FIELDS),
    ],
)
def test_params_struct_has_the_fields_that_are_launched(name, fields):
    """Counts the members of Params against the launcher's format."""
    source = (KERNEL_DIRECTORY / name).read_text()
    body = source.split("struct Params {")[1].split("};")[0]
    counts = {"s": 0, "P": 0, "i": 0, "I": 0}
    for line in body.splitlines():
        declaration = line.split("//")[0].strip().rstrip(";")
        if not declaration:
            continue
        if declaration.startswith("TensorMap"):
            counts["s"] += 128
        elif "*" in declaration:
            counts["P"] += 1
        elif declaration.startswith("int"):
            counts["i"] += len(declaration.split(","))
        else:
            counts["I"] += 4 if "[STEPS]" in declaration else 1
    assert "".join(f"{count}{kind}" for kind, count in counts.items() if count) == fields
