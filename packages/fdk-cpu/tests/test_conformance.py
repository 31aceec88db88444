"""The conformance kit of fdk-formats on every instruction set that this machine runs."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import fdk_cpu
from fdk_formats import Format
from fdk_formats.testing import (
    Case,
    cases,
    check_backend,
)

BACKEND = fdk_cpu.CpuBackend()
CASES = list(cases())
# Groups that straddle tiles or need padding, rows that end within a tile, every kernel's m, more
# rows and depth than a block of W_hat has (64 x 2048 at most, 256 x 512 for backward), and more
# rows than two pieces of the kernels that take one row of x (128 each).
AWKWARD = [
    Case(Format(codebook, bits, group), m=m, n=n, k=k, dtype=dtype, seed=bits)
    for bits, (codebook, group, m, n, k, dtype) in zip(
        (1, 2, 3, 4, 5, 6, 7, 8, 4, 3, 8, 4, 8, 4, 1, 2, 2, 4, 3, 4),
        [
            ("custom", 24, 1, 5, 72, torch.bfloat16),
            ("custom", 48, 8, 9, 240, torch.float32),
            ("affine", 40, 9, 53, 200, torch.bfloat16),
            ("custom", 256, 17, 51, 768, torch.bfloat16),
            ("affine", 200, 33, 4, 600, torch.float16),
            ("custom", None, 49, 61, 1, torch.bfloat16),
            ("affine", 384, 5, 3, 1152, torch.bfloat16),
            ("custom", 64, 70, 97, 1088, torch.bfloat16),
            ("affine", None, 2, 1, 333, torch.bfloat16),
            ("custom", 17, 4, 7, 34, torch.float16),
            ("custom", 128, 12, 50, 640, torch.float32),
            ("affine", 16, 40, 100, 144, torch.bfloat16),
            ("custom", 64, 70, 131, 2112, torch.bfloat16),
            ("affine", 32, 33, 70, 4160, torch.bfloat16),
            ("custom", 64, 1, 301, 384, torch.bfloat16),
            ("custom", 64, 1, 301, 384, torch.bfloat16),
            ("affine", 32, 1, 301, 384, torch.bfloat16),
            ("custom", 64, 1, 301, 384, torch.bfloat16),
            ("custom", 64, 20, 519, 640, torch.bfloat16),
            ("affine", 32, 5, 262, 544, torch.bfloat16),
        ],
        strict=True,
    )
]
# More rows of x than are worked on at once.
AWKWARD.append(Case(Format("custom", 4, 64), m=1030, n=9, k=128, dtype=torch.bfloat16))
# One to three rows past the panels, which meet more than one block of tiles, and of rows.
AWKWARD += [
    Case(Format("custom", bits, 64), m=m, n=70, k=2304, dtype=torch.bfloat16, seed=m)
    for bits, m in ((8, 9), (7, 10), (6, 11), (4, 19))
]


@pytest.fixture(params=fdk_cpu.instruction_sets())
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    fdk_cpu.set_instruction_set(request.param)
    yield request.param
    fdk_cpu.set_instruction_set("auto")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kit(instruction_set: str, case: Case) -> None:
    check_backend(BACKEND, case)


@pytest.mark.parametrize("case", AWKWARD, ids=str)
def test_awkward(instruction_set: str, case: Case) -> None:
    check_backend(BACKEND, case)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_do_not_change_a_bit(instruction_set: str, threads: int) -> None:
    case = replace(AWKWARD[3], n=1031)
    layout = BACKEND.pack(case.quantised(), dtype=case.dtype)
    x = case.random(case.m, case.k)
    expected, alone = layout(x), layout(x[:1])
    fdk_cpu.set_num_threads(threads)
    try:
        assert torch.equal(layout(x), expected)
        assert torch.equal(layout(x[:1]), alone)
    finally:
        fdk_cpu.set_num_threads(None)
