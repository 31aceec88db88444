"""The dense baselines on every instruction set, against float64."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

import fdk_cpu
from fdk_cpu.dense import gemm, gemv

# Relative to the largest sum of magnitudes: rounding to bf16, and float32 sums.
UNIT = {torch.bfloat16: 2**-8, torch.float32: 2**-20}


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(m * 1000 + n + k)
    x, weight = (torch.randn(rows, k, generator=generator).to(dtype) for rows in (m, n))
    return x, weight


def check(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    wanted = x.double() @ weight.double().T
    scale = (x.double().abs() @ weight.double().abs().T).max().item()
    assert got.dtype == x.dtype
    assert got.shape == wanted.shape
    error = (got.double() - wanted).abs() - UNIT[x.dtype] * wanted.abs()
    assert error.max().item() <= 2**-20 * scale


@pytest.mark.parametrize("dtype", UNIT)
def test_gemv_by_hand(isa: str, dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, 2, 3], dtype=dtype)
    weight = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0.5], [-1, -2, -3]], dtype=dtype)
    assert gemv(x, weight).tolist() == [1, 3, -14]
    assert gemv(x.view(1, 3), weight).tolist() == [[1, 3, -14]]


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (17, 31), (33, 64), (50, 193), (200, 1000)])
def test_gemv(isa: str, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight = operands(1, n, k, dtype)
    check(gemv(x, weight), x, weight)


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 1), (2, 49, 33), (16, 48, 512), (17, 97, 513), (33, 50, 1025), (70, 5, 7)],
)
def test_gemm(isa: str, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight = operands(m, n, k, dtype)
    check(gemm(x, weight), x, weight)


def test_nothing_to_do() -> None:
    weight = torch.ones(3, 4)
    assert gemm(torch.ones(0, 4), weight).shape == (0, 3)
    assert gemm(torch.ones(2, 4), weight[:0]).shape == (2, 0)
    assert gemm(torch.ones(2, 0), weight[:, :0].contiguous()).tolist() == [[0, 0, 0]] * 2


def test_bad_input() -> None:
    x, weight = torch.ones(2, 4), torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"gemv: x must be \[k\] or \[1, k\], got \[2, 4\]"):
        gemv(x, weight)
    with pytest.raises(TypeError, match="gemv: x must be a plain tensor, got NoneType"):
        gemv(None, weight)
    with pytest.raises(TypeError, match="gemm: weight must be a plain tensor, got list"):
        gemm(x, weight.tolist())
    with pytest.raises(ValueError, match=r"gemm: x must be \[m, k\], got \[4\]"):
        gemm(x[0], weight)
    with pytest.raises(ValueError, match=r"gemm: weight must be \[n, 4\], got \[3, 5\]"):
        gemm(x, torch.ones(3, 5))
    with pytest.raises(ValueError, match=r"gemm: weight must be \[n, 4\], got \[\]"):
        gemm(x, torch.ones(()))
    with pytest.raises(TypeError, match=r"both be bfloat16 or float32, got torch\.float16"):
        gemm(x.half(), weight.half())
    with pytest.raises(TypeError, match=r"got torch\.float32 and torch\.bfloat16"):
        gemv(x[0], weight.bfloat16())
    with pytest.raises(ValueError, match="weight must be contiguous and on the CPU"):
        gemm(x, torch.ones(4, 3).T)


def test_negative_views_and_fake_tensors() -> None:
    x, weight = torch.complex(torch.zeros(1, 1), torch.ones(1, 1)).conj().imag, torch.ones(3, 1)
    assert x.is_neg()
    assert gemm(x, weight).tolist() == [[-1.0] * 3]
    assert gemv(x, weight).tolist() == [[-1.0] * 3]
    with FakeTensorMode(), pytest.raises(TypeError, match=r"gemm: x must be .* got FakeTensor"):
        gemm(torch.ones(2, 3), torch.eye(3))
    with FakeTensorMode(), pytest.raises(TypeError, match=r"read_sum: .* got FakeTensor"):
        fdk_cpu.read_sum(torch.ones(3))
    with FakeTensorMode(), pytest.raises(TypeError, match=r"copy_memory: .* got FakeTensor"):
        fdk_cpu.copy_memory(torch.ones(3), torch.ones(3))
