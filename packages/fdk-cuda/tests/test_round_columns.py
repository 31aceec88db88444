"""Rounding columns for error compensation; interpreted_kernels.py compares it with torch."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton_compile import MAX_STACK, compile_kernel, layout_of, registers_and_stack

from fdk_cuda.triton.kernels.round_columns import round_columns_kernel
from fdk_cuda.triton.round_columns import ROWS, WARPS, round_columns
from fdk_formats import quantise, rounding
from fdk_formats.compensate import BLOCK, Hessian, add_moments
from fdk_formats.testing.rounding import check_round_columns


@pytest.mark.parametrize("has_zero", [False, True])
@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("target", [80, 90])
def test_spills_nothing(target: int, bits: int, has_zero: bool) -> None:
    arguments = {"BITS": bits, "HAS_ZERO": has_zero, "COLUMNS": BLOCK, "ROWS": ROWS}
    made = compile_kernel(
        round_columns_kernel, target, layout_of(4), False, arguments | {"WARPS": WARPS}
    )
    assert registers_and_stack(made)[1] <= MAX_STACK


@pytest.mark.gpu
@pytest.mark.parametrize("has_zero", [False, True])
@pytest.mark.parametrize(("columns", "rows"), [(1, 1), (20, 37), (128, 1000)])
@pytest.mark.parametrize("entries", [2, 3, 16, 256])
def test_equals_torch(entries: int, columns: int, rows: int, has_zero: bool) -> None:
    check_round_columns(round_columns, entries, columns, rows, has_zero=has_zero, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["kmeans2-g64", "kmeans4-g64", "affine4-g64", "int8-row"])
def test_compensation_equals_torchs(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = torch.randn(2000, 576, device="cuda")
    x = x @ (torch.eye(576) + 0.1 * torch.randn(576, 576)).cuda()
    hessian = Hessian(x.T @ x / len(x))
    weight = torch.randn(300, 576, device="cuda")

    def error() -> float:
        found = quantise(weight, format, hessian=hessian)
        return float(hessian.row_errors(weight - found.dequantise()).sum())

    found = error()
    assert rounding.round_columns_for(weight.device, 16) is round_columns
    monkeypatch.delitem(rounding._COLUMNS, "cuda")
    assert found == pytest.approx(error(), rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_moments(dtype: torch.dtype, rows: int) -> None:
    x = torch.randn(rows, 320, device="cuda").to(dtype)
    total = torch.ones(320, 320, device="cuda")
    add_moments(total, x)
    exact = 1 + x.double().T @ x.double()
    torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-3)
