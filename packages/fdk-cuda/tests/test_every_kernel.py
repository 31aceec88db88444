"""Every configuration of the GPU kernels compiles and spills nothing: `nox -s every-kernel`.

Of the kernels in Gluon, which are for Hopper alone, the other tests compile every configuration.
"""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from triton_compile import (
    MAX_STACK,
    TARGETS,
    compile_dequantise,
    compile_dgrad,
    compile_gemm,
    compile_gemv,
    layout_of,
    registers_and_stack,
)

from fdk_cuda.triton.configs import GPUS
from fdk_cuda.triton.configs.dgrad import dgrad_config
from fdk_cuda.triton.configs.gemm import gemm_config
from fdk_cuda.triton.configs.gemv import gemv_config

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


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("bits", "affine"), KINDS)
@pytest.mark.parametrize(
    "kernels",
    [gemv_kernels, gemm_kernels, dgrad_kernels, dequantise_kernels],
    ids=lambda f: f.__name__,
)
def test_triton_spills_nothing(kernels: object, bits: int, affine: bool, target: int) -> None:
    compiled = kernels(bits, affine, target)
    stacks = {str(config): registers_and_stack(kernel)[1] for kernel, config in compiled}
    assert max(stacks.values()) <= MAX_STACK, stacks
