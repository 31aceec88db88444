"""Every family of Marlin kernels compiles for the GPUs that it serves, and spills nothing.

test_every_kernel.py compiles every configuration; here is a sample for each width and GPU.
"""

import itertools
import re
from dataclasses import replace

import pytest
import torch
from cuda.bindings import nvrtc
from marlin_compile import (
    BF16,
    DEVICES,
    FP16,
    FP32,
    HOPPER,
    HOPPER_VARIANTS,
    SHAPES,
    SMALL_VARIANTS,
    VARIANTS,
    check_dgrad,
    check_hopper,
    check_spills,
    check_wgmma,
    geometry_of,
    variant_id,
    widest_shapes,
)

from fdk_cuda.marlin.dgrad import DGRAD_FIELDS
from fdk_cuda.marlin.heuristics_hopper import hopper_shapes, plan_grouped, plan_hopper
from fdk_cuda.marlin.heuristics_small_m import BITPLANE_WARPS, MAX_M, plan_small, small_shapes
from fdk_cuda.marlin.instantiations import (
    KERNEL_DIRECTORY,
    HopperShape,
    Variant,
    dequantise_program,
    hopper_program,
    repack_program,
    small_m_program,
    split_k_reduce_program,
    wgmma_header,
)
from fdk_cuda.marlin.repack import REPACK_FIELDS
from fdk_cuda.marlin.runtime import (
    DEQUANTISE_FIELDS,
    GROUPED_FIELDS,
    HOPPER_FIELDS,
    SMALL_EXPERTS_FIELDS,
    SMALL_FIELDS,
    SUM_FIELDS,
)
from fdk_formats.format import BITS


@pytest.mark.slow
@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("variant", SMALL_VARIANTS, ids=variant_id)
def test_small_m(variant, arch):
    """Plans of usual shapes, and every GEMV by int8 limbs on one GPU."""
    device, shapes = DEVICES[arch], set()
    for n, k in SHAPES[::2] if arch == "sm_90a" else SHAPES[1:2]:
        geometry = geometry_of(variant, n, k)
        assert Variant.of(geometry, variant.dtype) == variant
        for m in (1, 4, MAX_M):
            shapes.add(plan_small(geometry, variant.dtype, m, device).shape)
    if arch == "sm_80":
        for m in variant.limb_rows:
            shapes |= {s for s in small_shapes(variant, m, device) if s.limb_rows == m}
    for shape in shapes:
        check_spills(small_m_program(variant, shape), arch)


@pytest.mark.parametrize("arch", DEVICES)
def test_short_tiles_of_1_bit(arch):
    """64 x 64 weights per warp; compute capability 12.0 lacks registers for 16 unpaired warps."""
    variant = Variant(1, BF16, BF16, 1, False)
    shapes = [
        shape
        for shape in widest_shapes(variant, DEVICES[arch])
        if (shape.fragments, shape.k_blocks, shape.is_spread) == (4, 1, True)
    ]
    assert {shape.short_blocks for shape in shapes} == {0, 1}
    warps = {shape.n_groups: shape.warps for shape in shapes}
    assert warps == {1: 12 if arch == "sm_120" else 16, 2: 16}
    for shape in shapes:
        check_spills(small_m_program(variant, shape), arch)


@pytest.mark.slow
@pytest.mark.parametrize("has_signs", [False, True])
@pytest.mark.parametrize("per_row", [1, 2])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_scaled_weights(dtype, per_row, has_signs):
    """Weights are scaled only on Hopper: 1-bit codebooks, scales of x's dtype, m from 9 to 16."""
    variant = Variant(1, dtype, dtype, per_row, False, has_signs=has_signs)
    for other in (
        replace(variant, scale_dtype=FP16 if dtype == BF16 else FP32),
        replace(variant, affine=True),
        replace(variant, bits=2),
    ):
        assert not any(shape.scales_weights for shape in small_shapes(other, MAX_M, HOPPER))
    assert not any(s.scales_weights for s in small_shapes(variant, 8, HOPPER))
    assert not any(s.scales_weights for s in small_shapes(variant, MAX_M, DEVICES["sm_120"]))
    shapes = [s for s in widest_shapes(variant, HOPPER) if s.m_tiles == 2]
    assert all(shape.scales_weights for shape in shapes)
    # Two scales per row of a block leave too little shared memory for twelve warps of 128 x 128.
    assert {shape.warps for shape in shapes} == {16, 12 if per_row == 1 else 8}
    for shape in shapes:
        # A sample: signs with short tiles, codebooks with whole ones.
        if (shape.short_blocks > 0) == has_signs:
            check_spills(small_m_program(variant, shape))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "affine"), [(BF16, True), (FP16, False)])
def test_bitplanes(dtype, affine):
    """Every shape of the bit-plane GEMV with the most warps; only Hopper runs it."""
    variant = Variant(1, dtype, BF16, 1, affine)
    assert not any(s.is_bitplane for s in small_shapes(variant, 1, DEVICES["sm_120"]))
    assert not any(s.is_bitplane for s in small_shapes(variant, 2, HOPPER))
    shapes = [s for s in small_shapes(variant, 1, HOPPER) if s.is_bitplane]
    assert {s.warps for s in shapes} == set(BITPLANE_WARPS)
    for shape in shapes:
        if shape.warps == max(BITPLANE_WARPS):
            check_spills(small_m_program(variant, shape))


@pytest.mark.slow
@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("variant", VARIANTS, ids=variant_id)
def test_dequantise_and_repack(variant, arch):
    check_spills(dequantise_program(variant), arch)
    check_spills(repack_program(geometry_of(variant)), arch)


@pytest.mark.slow
@pytest.mark.parametrize("variant", HOPPER_VARIANTS, ids=variant_id)
def test_hopper(variant):
    """Plans of usual shapes; the widest tile and clusters are among them."""
    shapes = set()
    for n, k in SHAPES[:2]:
        geometry = geometry_of(variant, n, k)
        for m in (17, 64, 128, 256, 1024):
            shapes.add(plan_hopper(geometry, m, HOPPER).shape)
    assert max(shape.tile_m for shape in shapes) == 256
    assert max(shape.cluster for shape in shapes) == 2
    for shape in shapes:
        check_hopper(variant, shape)


@pytest.mark.slow
@pytest.mark.parametrize("epilogue", [{}, {"swiglu": True}, {"interleaved": True}], ids=str)
@pytest.mark.parametrize(
    "variant",
    [v for v in HOPPER_VARIANTS if not v.has_signs and v.grid_zero_point is None],
    ids=variant_id,
)
def test_hopper_of_experts(variant, epilogue):
    """Plans of experts with few and with many rows; stacks look codes of grids up."""
    shapes = set()
    for (n, k), rows in itertools.product(((1536, 2048), (28672, 4096)), (64, 128, 1024)):
        shapes.add(plan_grouped(geometry_of(variant, n, k), 8 * rows, 8, HOPPER).shape)
    assert len({shape.tile_m for shape in shapes}) > 1
    for shape in shapes:
        assert (shape.cluster, shape.k_groups) == (1, 1)
        check_wgmma(hopper_program(variant, shape, experts=True, **epilogue))


@pytest.mark.slow
@pytest.mark.parametrize("bits", BITS)
def test_dgrad(bits):
    """The plain variant and the one that needs the most registers, narrow and wide tiles."""
    for variant in (Variant(bits, BF16, BF16, 1, False), Variant(bits, FP16, FP32, 2, True)):
        check_dgrad(variant, (64,), clusters=(1 + bits % 2,))
        check_dgrad(variant, (256,), clusters=(2 - bits % 2,) if variant.affine else (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "zero_point"), [(BF16, 127), (FP32, 128)])
def test_dgrad_of_grids(scale, zero_point):
    check_dgrad(Variant(8, BF16, scale, 2, False, False, zero_point), (64, 256))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_split_k_reduce(dtype):
    for shape in hopper_shapes(geometry_of(VARIANTS[0]), HOPPER):
        check_spills(split_k_reduce_program(dtype, shape))


def test_wgmma_header_names_every_register():
    header = wgmma_header(64, torch.float16)
    assert "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " in header
    # 32 sums, then the four registers of a, then the descriptor of b.
    assert "%31}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;" in header
    assert header.count('"+f"(d[') == 32
    assert header.count('"r"(a[') == 4


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("common/small_m_mainloop.cuh", SMALL_FIELDS),
        ("small_m_experts.cu", SMALL_EXPERTS_FIELDS),
        ("dequantise.cu", DEQUANTISE_FIELDS),
        ("repack.cu", REPACK_FIELDS),
        ("hopper_gemm.cu", HOPPER_FIELDS),
        ("hopper_gemm.cu", GROUPED_FIELDS),
        ("hopper_dgrad.cu", DGRAD_FIELDS),
        ("split_k_reduce.cu", SUM_FIELDS),
    ],
)
def test_launched_fields_are_those_of_params(name, fields):
    """Counts the members of Params against the launcher's format."""
    source = (KERNEL_DIRECTORY / name).read_text()
    body = source.split("struct Params {")[1].split("};")[0]
    if fields == HOPPER_FIELDS:
        body = body.split("#if EXPERTS")[0]
    elif fields == GROUPED_FIELDS:  # the members of stacks come last
        body = body.split("#if EXPERTS")[1]
        fields = fields.removeprefix(HOPPER_FIELDS)
    counts = {"s": 0, "P": 0, "i": 0, "I": 0}
    for line in body.splitlines():
        declaration = line.split("//")[0].strip().rstrip(";")
        if not declaration or declaration.startswith("#"):
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


SMEM_INSTRUCTIONS = {
    "st.shared.v4.f32": "send",
    "ld.shared.v4.f32": "receive",
    "bar.sync": "sync",
    "barrier.cluster.wait": "cluster",
    "stmatrix": "store",
}


def smem_order(program):
    """Returns the names of ``SMEM_INSTRUCTIONS`` in the order of the program's PTX."""
    names = [name.encode() for name, _ in program.headers]
    texts = [text.encode() for _, text in program.headers]
    status, handle = nvrtc.nvrtcCreateProgram(
        program.source.encode(), program.name.encode(), len(names), texts, names
    )
    assert not status.value
    common = "-arch=compute_90a", "--std=c++17", "--device-as-default-execution-space"
    options = [option.encode() for option in (*common, *program.options)]
    assert not nvrtc.nvrtcCompileProgram(handle, len(options), options)[0].value
    ptx = bytearray(nvrtc.nvrtcGetPTXSize(handle)[1])
    nvrtc.nvrtcGetPTX(handle, ptx)
    nvrtc.nvrtcDestroyProgram(handle)
    found = re.findall("|".join(map(re.escape, SMEM_INSTRUCTIONS)), ptx.decode())
    return [SMEM_INSTRUCTIONS[instruction] for instruction in found]


@pytest.mark.parametrize(("tile_m", "cluster"), [(32, 1), (32, 2), (64, 2)])
def test_partial_sums_are_read_before_y_overwrites_them(tile_m, cluster):
    """One warp must not store its part of y before another has read its partial sums."""
    variant = Variant(4, BF16, BF16, 1, False)
    shape = HopperShape(tile_m, 4, 2, 4, cluster, has_table=True, k_groups=2)
    order = smem_order(hopper_program(variant, shape))
    last_sent = len(order) - 1 - order[::-1].index("send")
    between = order[last_sent : order.index("store")]
    assert between[1:3] == ["sync", "receive"]
    after = between[2:]
    assert {"sync", "cluster"} & set(after[after.index("receive") :]), order
