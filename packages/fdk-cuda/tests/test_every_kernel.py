"""Every configuration of the GPU kernels compiles and spills nothing: `nox -s every-kernel`.

The Gluon kernels run on Hopper only; other tests compile every configuration of them.
"""

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from marlin_compile import (
    BF16,
    DEVICES,
    FP16,
    FP32,
    HOPPER,
    SHAPES,
    check_dgrad,
    check_hopper,
    check_spills,
    check_wgmma,
    compile_log,
    geometry_of,
    variant_id,
    widest_shapes,
)
from triton_compile import (
    MAX_STACK,
    TARGETS,
    compile_dequantise,
    compile_dgrad,
    compile_expert_gemm,
    compile_expert_gemv,
    compile_gemm,
    compile_gemv,
    layout_of,
    registers_and_stack,
)

from fdk_cuda.marlin.cost_model import DGRAD_STEP_COST
from fdk_cuda.marlin.heuristics_experts import TILE_ROWS, expert_plans
from fdk_cuda.marlin.heuristics_hopper import grouped_plans, hopper_shapes
from fdk_cuda.marlin.heuristics_small_m import MAX_M, plan_small
from fdk_cuda.marlin.instantiations import (
    Variant,
    dequantise_program,
    hopper_program,
    small_m_experts_program,
    small_m_program,
)
from fdk_cuda.triton.configs import GPUS, GemvConfig
from fdk_cuda.triton.configs.dgrad import dgrad_config
from fdk_cuda.triton.configs.experts import expert_config, fits_swiglu
from fdk_cuda.triton.configs.gemm import gemm_config
from fdk_cuda.triton.configs.gemv import gemv_config
from fdk_formats.format import BITS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get("FDK_TEST_EVERY_KERNEL"),
        reason="compiles for hours: set FDK_TEST_EVERY_KERNEL=1 to run it",
    ),
]
KINDS = [(bits, affine) for bits in range(1, 9) for affine in (False, True)]
# Few, some and many outputs on an H200; on GPUs with fewer processors 4096 are more than few.
OUTPUTS = (2048, 4096, 8192, 28672)
Compiled = tuple[object, object]  # a kernel and its configuration


def gemv_kernels(bits: int, affine: bool, target: int) -> Iterator[Compiled]:
    done = set()
    for n in OUTPUTS:
        for m in (1, 16):
            layout = layout_of(bits, n)
            config = gemv_config(layout, m, GPUS[divmod(target, 10)], affine=affine)
            if (config, m) not in done:
                done.add((config, m))
                yield compile_gemv(layout, m, target, affine=affine), (m, config)


def gemm_kernels(bits: int, affine: bool, target: int) -> Iterator[Compiled]:
    for m in (32, 64, 128):
        config = gemm_config(layout_of(bits), m, GPUS[divmod(target, 10)])
        yield compile_gemm(replace(config, split_k=1), bits, affine, target), (m, config)


def dgrad_kernels(bits: int, affine: bool, target: int) -> Iterator[Compiled]:
    for m in (1, 16, 32):
        config = dgrad_config(layout_of(bits), m, GPUS[divmod(target, 10)], affine=affine)
        yield compile_dgrad(bits, affine, m, target), (m, config)


def dequantise_kernels(bits: int, affine: bool, target: int) -> Iterator[Compiled]:
    yield compile_dequantise(layout_of(bits, 4096, 4096), affine, target), None


def expert_kernels(bits: int, affine: bool, target: int) -> Iterator[Compiled]:
    layout, gpu = layout_of(bits, 1536, 2048), GPUS[divmod(target, 10)]
    for tokens, swiglu in itertools.product((32, 128, 1024), (False, True)):
        if swiglu and not fits_swiglu(layout):
            continue
        config = expert_config(layout, tokens, 8, 128, gpu, affine=affine, swiglu=swiglu)
        is_gemv = isinstance(config.kernel, GemvConfig)
        compile_one = compile_expert_gemv if is_gemv else compile_expert_gemm
        made = compile_one(layout, config, target, affine=affine, swiglu=swiglu)
        yield made, (tokens, swiglu, config)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("bits", "affine"), KINDS)
@pytest.mark.parametrize(
    "kernels",
    [gemv_kernels, gemm_kernels, dgrad_kernels, dequantise_kernels, expert_kernels],
    ids=lambda f: f.__name__,
)
def test_triton_spills_nothing(kernels: object, bits: int, affine: bool, target: int) -> None:
    compiled = kernels(bits, affine, target)
    stacks = {str(config): registers_and_stack(kernel)[1] for kernel, config in compiled}
    assert max(stacks.values()) <= MAX_STACK, stacks


def every_variant(bits: int, dtype: object, *, hopper: bool) -> Iterator[Variant]:
    """Yields Marlin variants of a width; for Hopper with integer zero points, grids and signs."""
    kinds = [(False, False, None), (True, False, None)]
    kinds += [(True, True, None)] if hopper else []
    kinds += [(False, False, 127), (False, False, 128)] if hopper and bits == 8 else []
    kinds += [(False, False, None, True)] if bits == 1 else []
    for scale, per_row, kind in itertools.product((BF16, FP16, FP32), (1, 2), kinds):
        yield Variant(bits, dtype, scale, per_row, *kind)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("arch", DEVICES)
def test_small_m_spills_nothing(arch: str, bits: int, dtype: object) -> None:
    """Shapes with the most warps that plans allow, and the plans of usual weights."""
    spilling = {}
    for variant in every_variant(bits, dtype, hopper=False):
        shapes = set(widest_shapes(variant, DEVICES[arch]))
        for (n, k), m in itertools.product(SHAPES, (1, 4, MAX_M)):
            shapes.add(plan_small(geometry_of(variant, n, k), dtype, m, DEVICES[arch]).shape)
        for shape in shapes:
            _, resources = compile_log(small_m_program(variant, shape), arch)
            if (found := (resources.stack_bytes, resources.spill_bytes)) != (0, 0):
                spilling[variant_id(variant), shape] = found
        check_spills(dequantise_program(variant), arch)
    assert not spilling


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_hopper_spills_nothing(bits: int, dtype: object) -> None:
    for variant in every_variant(bits, dtype, hopper=True):
        for shape in hopper_shapes(geometry_of(variant), HOPPER):
            check_hopper(variant, shape)
        if not variant.has_signs:
            check_dgrad(variant, [tile_m for tile_m, *_ in DGRAD_STEP_COST])
        if variant.has_signs or variant.grid_zero_point is not None:
            continue  # stacks look these up
        for plan, epilogue in itertools.product(
            grouped_plans(geometry_of(variant), HOPPER),
            ({}, {"swiglu": True}, {"interleaved": True}),
        ):
            check_wgmma(hopper_program(variant, plan.shape, experts=True, **epilogue))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_small_m_of_experts_spills_nothing(bits: int, dtype: object) -> None:
    for variant in every_variant(bits, dtype, hopper=False):
        if variant.has_signs:
            continue  # stacks look these up
        shapes = set()
        for rows in (1, TILE_ROWS):
            plans = expert_plans(geometry_of(variant), variant, rows, HOPPER)
            shapes |= {plan.shape for plan in plans}
        for shape in shapes:
            check_spills(small_m_experts_program(variant, shape))
