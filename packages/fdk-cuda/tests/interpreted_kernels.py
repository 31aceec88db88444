"""The Triton kernels in Triton's interpreter; test_interpreted.py runs this file."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from triton_cases import DTYPES, FORMATS, packed_weight
from triton_interpreter import fix_scalar_masks

from fdk_cuda.triton import TritonBackend, launch, ops
from fdk_cuda.triton.configs import (
    DgradConfig,
    GemmConfig,
    GemvConfig,
)
from fdk_cuda.triton.configs.gemm import GEMM_FUSED_BITS, GEMM_WGMMA_FUSED_BITS, DequantiseConfig
from fdk_cuda.triton.kernels.decode import two_values
from fdk_cuda.triton.layout import PackedLayout
from fdk_cuda.triton.rotation import rotate
from fdk_cuda.triton.round_columns import round_columns
from fdk_formats import Format
from fdk_formats.rotation import rotate_in_torch
from fdk_formats.testing import Case, cases, check_golden, check_in_place, check_numerics, nrmse
from fdk_formats.testing.rounding import check_round_columns

assert launch.INTERPRETED
fix_scalar_masks()


# The interpreter needs half a minute per case; a GPU runs the whole kit.
SOME = list(cases(dtypes=DTYPES, bits=(4, 8), group_sizes=(16,), ms=(3,)))


def affine_case(bits: int, scales: str, zeros: str, dtype: torch.dtype) -> Case:
    format = Format("affine", bits, 16, scale_dtype=scales, zero_point=zeros)
    return Case(format, 64, 137, 64, dtype)


@pytest.mark.parametrize("has_zero", [False, True])
@pytest.mark.parametrize(("columns", "rows"), [(1, 1), (20, 37)])
@pytest.mark.parametrize("entries", [2, 3, 16, 256])
def test_round_columns(entries: int, columns: int, rows: int, has_zero: bool) -> None:
    check_round_columns(round_columns, entries, columns, rows, has_zero=has_zero)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize(("rows", "k"), [(1, 16), (3, 48), (5, 576), (2, 768)])
def test_rotate(rows: int, k: int, dtype: torch.dtype, inverse: bool) -> None:
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(0)).to(dtype)
    block = min(k & -k, 256)
    assert torch.equal(rotate(x, block, inverse), rotate_in_torch(x, block, inverse))
    assert rotate(x.double(), block, inverse) is None


@pytest.mark.parametrize("case", SOME[::3], ids=str)
def test_conformance(case: Case) -> None:
    check_numerics(TritonBackend(), case)
    check_in_place(TritonBackend(), case)
    check_golden(TritonBackend(), case)


@pytest.mark.parametrize(("codebook", "bits"), FORMATS)
def test_one_hot(codebook: str, bits: int) -> None:
    case = Case(Format(codebook, bits, 24), 3, 21, 72, DTYPES[bits % 2])
    q = case.quantised()
    x = torch.zeros(3, 72, dtype=case.dtype)
    x[[0, 1, 2], [0, 30, 71]] = 1
    y = TritonBackend().pack(q, dtype=case.dtype)(x)
    assert torch.equal(y, q.dequantise(case.dtype).T[[0, 30, 71]])


@pytest.mark.parametrize(("codebook", "bits"), FORMATS)
def test_dequantise(codebook: str, bits: int) -> None:
    group_size = (16, 24, 64, None)[bits % 4]
    case = Case(Format(codebook, bits, group_size), 1, 37, 3 * (group_size or 30), DTYPES[bits % 2])
    q = case.quantised()
    for config in (DequantiseConfig(), DequantiseConfig(2, 2, ahead=True)):
        w_hat = launch.dequantise(packed_weight(q), case.dtype, config)
        assert torch.equal(w_hat, q.dequantise(case.dtype))


@pytest.mark.parametrize("config", [GemmConfig(1, 4, 32), GemmConfig(2, 4, 16, split_k=2)])
@pytest.mark.parametrize(
    ("codebook", "bits", "group_size"), [("custom", 4, 64), ("affine", 8, 24), ("custom", 8, 16)]
)
def test_gemm(codebook: str, bits: int, group_size: int, config: GemmConfig) -> None:
    case = Case(Format(codebook, bits, group_size), 19, 137, 9 * group_size, DTYPES[bits % 2])
    q = case.quantised()
    x, bias = case.random(case.m, case.k), case.random(case.n)
    y = launch.gemm(x, packed_weight(q), bias, config)
    w_hat = q.dequantise(case.dtype)
    oracle = x.double() @ w_hat.double().T + bias.double()
    torch_y = torch.nn.functional.linear(x, w_hat, bias)
    assert nrmse(y, oracle) <= 2 * nrmse(torch_y, oracle)  # the interpreter rounds no weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zeros", ["float", "int"])
@pytest.mark.parametrize("scales", ["bf16", "fp16", "fp32", "e8m0"])
@pytest.mark.parametrize("bits", GEMM_FUSED_BITS)
def test_gemm_fused(bits: int, scales: str, zeros: str, dtype: torch.dtype) -> None:
    """Gives the reference's bits by one multiply-add, except where float32 rounds the product."""
    q = affine_case(bits, scales, zeros, dtype).quantised()
    w = packed_weight(q)
    assert w.fused(GEMM_FUSED_BITS) == ({} if scales == "fp32" else {"AFFINE": 2})
    assert w.fused(GEMM_WGMMA_FUSED_BITS) == w.fused(GEMM_FUSED_BITS)
    one_hot = torch.eye(64, dtype=dtype)
    y = launch.gemm(one_hot, w, None, GemmConfig(1, 4, 32))
    assert torch.equal(y, q.dequantise(dtype).T)


@triton.jit
def two_values_kernel(
    values_ptr, scale_ptr, zero_ptr, out_ptr, COUNT: tl.constexpr, CODES: tl.constexpr
):
    at = tl.arange(0, COUNT)
    scale, zero = tl.load(scale_ptr + at), tl.load(zero_ptr + at)
    value, other = two_values(values_ptr, scale, zero, CODES)
    tl.store(out_ptr + at, value)
    tl.store(out_ptr + COUNT + at, value ^ other)


@pytest.mark.parametrize("zeros", ["float", "int"])
@pytest.mark.parametrize("scales", ["fp16", "fp32"])
def test_two_values(scales: str, zeros: str) -> None:
    """Gives the reference's values for any dtype of scale, by subtracting, then multiplying."""
    q = affine_case(1, scales, zeros, torch.float16).quantised()
    w = packed_weight(q)
    scale, zero = q.scale[:32, 0].contiguous(), q.zero_point[:32, 0].contiguous()
    out = torch.zeros(2, 32, dtype=torch.int32)
    codes = (1, True, False, True, tl.float16, tl.float32)
    two_values_kernel[(1,)](w.values, scale, zero, out, COUNT=32, CODES=codes)
    pair = (torch.tensor([[0.0], [1.0]]) - zero.float()) * scale.float()
    expected = pair.half().view(torch.int16).int() & 0xFFFF
    assert torch.equal(out, expected | expected << 16)


@pytest.mark.parametrize(
    "config", [GemvConfig(1, 2), GemvConfig(2, 4, ahead=0), GemvConfig(1, 4, ahead=3)]
)
@pytest.mark.parametrize("m", [1, 9, 17])
def test_small(m: int, config: GemvConfig) -> None:
    case = Case(Format("custom", 4, 32), m, 41, 32 * 11, torch.float16)
    q = case.quantised()
    x = case.random(m, case.k)
    y = launch.gemv(x, packed_weight(q), None, config)
    oracle = x.double() @ q.dequantise(torch.float64).T
    assert nrmse(y, oracle) < 1e-3


@pytest.mark.parametrize(
    ("bits", "group_size", "m", "zeros"),
    [(1, 24, 3, "int"), (2, 64, 1, "float"), (3, 128, 9, "float"), (3, None, 2, "int")],
)
@pytest.mark.parametrize("config", [GemvConfig(1, 2), GemvConfig(2, 4, ahead=0)], ids=str)
def test_small_minus(
    bits: int, group_size: int | None, m: int, zeros: str, config: GemvConfig
) -> None:
    """Negated zero points are an operand, for groups smaller and larger than a tile."""
    format = Format("affine", bits, group_size, zero_point=zeros)
    case = Case(format, m, 37, 5 * (group_size or 90), DTYPES[zeros == "int"])
    q = case.quantised()
    w, x, bias = packed_weight(q), case.random(m, case.k), case.random(case.n)
    assert w.has_exact_zeros(case.dtype)
    y = launch.gemv(x, w, bias, replace(config, minus=True))
    oracle = x.double() @ q.dequantise(torch.float64).T + bias.double()
    assert nrmse(y, oracle) <= 1.1 * nrmse(oracle.to(case.dtype), oracle)


@pytest.mark.parametrize(
    ("format", "exact"), [("affine2-g32-zint", True), ("affine2-g32", False), ("custom2-g32", None)]
)
def test_exact_zeros(format: str, exact: bool | None) -> None:
    """bf16 zero points do not survive rounding to fp16: sums of x are used instead."""
    w = packed_weight(Case(Format.parse(format), 3, 37, 96, torch.bfloat16).quantised())
    assert w.has_exact_zeros(torch.bfloat16) is (exact is not None)
    assert w.has_exact_zeros(torch.float16) is (exact is True)


@pytest.mark.parametrize(
    ("codebook", "bits", "group_size", "config"),
    [
        ("custom", 4, 64, DgradConfig(n_tiles=1, warps=2, m_tiles=1, split_n=2)),
        ("affine", 4, 24, DgradConfig(n_tiles=2, warps=2, m_tiles=2)),
        ("custom", 3, 16, DgradConfig(n_tiles=1, warps=1, m_tiles=1, split_n=3)),
        ("affine", 8, None, DgradConfig(n_tiles=1, warps=4, m_tiles=1)),
        ("custom", 1, 32, DgradConfig(n_tiles=2, warps=1, m_tiles=1)),
        ("custom", 1, 64, DgradConfig(n_tiles=1, warps=4, m_tiles=1, positions=32)),
        ("affine", 3, 24, DgradConfig(n_tiles=1, warps=4, m_tiles=1, positions=16)),
    ],
)
def test_transposed(codebook: str, bits: int, group_size: int | None, config: DgradConfig) -> None:
    k = 5 * (group_size or 30)
    case = Case(Format(codebook, bits, group_size), 11, 137, k, DTYPES[bits % 2])
    q = case.quantised()
    w, w_hat = packed_weight(q), q.dequantise(case.dtype)
    rows = torch.tensor([0, 7, 8, 15, 16, 31, 90, 127, 128, 135, 136])
    one_hot = torch.zeros(11, case.n, dtype=case.dtype)
    one_hot[range(11), rows] = 1
    assert torch.equal(launch.dgrad(one_hot, w, config), w_hat[rows])
    grad_y = case.random(case.m, case.n)
    oracle = grad_y.double() @ w_hat.double()
    error = nrmse(launch.dgrad(grad_y, w, config), oracle)
    assert error <= 2 * nrmse(grad_y @ w_hat, oracle)  # the interpreter rounds no weights


@pytest.mark.parametrize("format", ["custom3-g64", "affine1-g64"])
def test_batch_invariant(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(Format.parse(format), 20, 37, 192, torch.bfloat16)
    layout = TritonBackend(batch_invariant=True).pack(case.quantised(), dtype=case.dtype)
    x = case.random(20, case.k)
    whole = layout(x)
    for m in (1, 8, 9, 17):
        assert torch.equal(layout(x[:m]), whole[:m])
    monkeypatch.setattr(ops, "MAX_OFFSET", 7 * case.k)
    assert torch.equal(layout(x), whole)


def test_fp32_activations_are_refused() -> None:
    case = Case(Format("custom", 4, 16), 2, 16, 16, torch.bfloat16)
    problem = replace(case, dtype=torch.float32).problem
    assert "needs activations of torch.bfloat16 or torch.float16" in str(
        TritonBackend().unsupported(problem)
    )
    layout = TritonBackend().pack(case.quantised(), dtype=case.dtype)
    with pytest.raises(TypeError, match=r"x must be torch\.bfloat16 or torch\.float16, got"):
        layout(torch.zeros(2, 16))


def test_arrangement_sizes() -> None:
    # 3 groups of 24 columns, each padded to 32, in tiles of 128 columns at 4 bits
    a = PackedLayout(n=37, k=72, bits=4, group_size=24)
    assert (a.groups, a.padded_group, a.tile_k, a.k_tiles, a.n_tiles) == (3, 32, 128, 1, 3)
    assert (a.segment, a.paired, a.words_shape) == (32, True, (3, 1, 1, 2, 32, 4))
