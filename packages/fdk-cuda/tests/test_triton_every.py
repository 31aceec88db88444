"""Every configuration of the Triton kernels compiles and spills nothing: set FDK_TEST_EVERY_KERNEL.

Of the kernels in Gluon, which are for compute capability 9.0 alone, the other tests compile all.
"""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from test_triton_compiled import (
    TARGETS,
    compile_dequantise,
    compile_gemm,
    compile_small,
    compile_transposed,
)
from triton_cases import MAX_STACK, registers_and_stack

from fdk_cuda.triton.configs import GPUS
from fdk_cuda.triton.configs.dgrad import dgrad_config
from fdk_cuda.triton.configs.gemm import gemm_config
from fdk_cuda.triton.configs.gemv import gemv_config
from fdk_cuda.triton.layout import PackedLayout

pytestmark = pytest.mark.skipif(
    not os.environ.get("FDK_TEST_EVERY_KERNEL"),
    reason="compiles for minutes: set FDK_TEST_EVERY_KERNEL=1 to run it",
)
KINDS = [(bits, affine) for bits in range(1, 9) for affine in (False, True)]
# Few outputs, some and many on an H200; on GPUs with fewer processors 4096 are more than few.
WIDTHS = (2048, 4096, 8192, 28672)
Compiled = tuple[object, object]  # what was compiled, and for what


def every_small(bits: int, affine: bool, target: int) -> Iterator[Compiled]:
    done = set()
    for n in WIDTHS:
        for m in (1, 16):
            layout = PackedLayout(n, 8192, bits, 64)
            config = gemv_config(layout, m, GPUS[divmod(target, 10)], affine=affine)
            if (config, m) not in done:
                done.add((config, m))
                yield compile_small(bits, affine, n, m, target, 8192), (m, config)


def every_gemm(bits: int, affine: bool, target: int) -> Iterator[Compiled]:
    a = PackedLayout(8192, 8192, bits, 64)
    for m in (32, 64, 128):
        config = gemm_config(a, m, GPUS[divmod(target, 10)])
        yield compile_gemm(replace(config, split_k=1), bits, affine, target), (m, config)


def every_transposed(bits: int, affine: bool, target: int) -> Iterator[Compiled]:
    a = PackedLayout(8192, 8192, bits, 64)
    for m in (1, 16, 32):
        gpu = GPUS[divmod(target, 10)]
        config = dgrad_config(a, m, gpu, affine=affine)
        yield compile_transposed(bits, affine, m, target), (m, config)


def every_dequantise(bits: int, affine: bool, target: int) -> Iterator[Compiled]:
    yield compile_dequantise(bits, affine, target), None


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("bits", "affine"), KINDS)
@pytest.mark.parametrize(
    "every", [every_small, every_gemm, every_transposed, every_dequantise], ids=lambda f: f.__name__
)
def test_no_configuration_spills(every: object, bits: int, affine: bool, target: int) -> None:
    kernels = every(bits, affine, target)
    stacks = {str(of): registers_and_stack(kernel)[1] for kernel, of in kernels}
    assert max(stacks.values()) <= MAX_STACK, stacks
