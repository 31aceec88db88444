"""The conformance tests of fdk-formats and the C++ tests, on every instruction set."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fdk_cpu
from fdk_formats import Format
from fdk_formats.testing import Case, cases, check_backend, check_in_place

BACKEND = fdk_cpu.CpuBackend()
CASES = list(cases())
# Groups that straddle tiles or need padding, rows that end within a tile, an m for each kernel,
# more than one block of W_hat (64 x 2048; 256 x 512 for dgrad), and more than two pieces of a
# two-pass GEMV (128 rows each).
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
# More rows of x than one pass handles.
AWKWARD.append(Case(Format("custom", 4, 64), m=1030, n=9, k=128, dtype=torch.bfloat16))
# One to three rows after the panels, with more than one block of tiles and of rows.
AWKWARD += [
    Case(Format("custom", bits, 64), m=m, n=70, k=2304, dtype=torch.bfloat16, seed=m)
    for bits, m in ((8, 9), (7, 10), (6, 11), (4, 19))
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kit(isa: str, case: Case) -> None:
    check_backend(BACKEND, case)


@pytest.mark.parametrize("case", AWKWARD, ids=str)
def test_awkward(isa: str, case: Case) -> None:
    check_backend(BACKEND, case)


def test_int8_activations_in_place(isa: str) -> None:
    for case in AWKWARD[:8]:
        check_in_place(BACKEND, case, "int8")


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_result_does_not_depend_on_threads(isa: str, threads: int) -> None:
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


@pytest.mark.parametrize("test", ["fdk_native_test", "fdk_fuzz_random"])
def test_native(native_build: Path, test: str) -> None:
    run = subprocess.run([native_build / test, "--cases", "300"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("300 cases passed")
