"""``gemm_wgmma_kernel`` on compute capability 9.0: there is no interpreter for Gluon."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton_cases import weight

from fdk_cuda.triton import TritonLayout, launch
from fdk_cuda.triton.configs import GemmConfig, GemmWgmmaConfig
from fdk_cuda.triton.configs.gemm import GEMM_WGMMA_FUSED_BITS, WORDY_BITS, last_wave
from fdk_cuda.triton.layout import POSITIONS
from fdk_formats import Format
from fdk_formats.testing import Case, nrmse, poisoned

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float16)
FORMATS = [(codebook, bits) for codebook in ("custom", "affine") for bits in range(1, 9)]


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not launch.gpu_at(torch.cuda.current_device()).limits.gemm_wgmma_m:
        pytest.skip("needs a GPU of compute capability 9.0 and a Triton with Gluon")


@pytest.mark.parametrize(("codebook", "bits"), FORMATS)
def test_many(codebook: str, bits: int) -> None:
    """Rows, outputs and columns that end within a tile; whole rows as a group; parts of k.

    The last of four parts of nine tiles is empty.
    """
    widest = 128 if bits in WORDY_BITS else 256
    for group_size, m, n, k, config in (
        (64, 200, 328, 64 * 41, GemmWgmmaConfig(widest, 2, 2)),
        (128, 77, 136, 128 * 9, GemmWgmmaConfig(128)),
        (None, 300, 264, 1000, GemmWgmmaConfig(widest)),
        (64, 65, 136, 9 * 16 * POSITIONS[bits], GemmWgmmaConfig(64, 4, 1 + bits % 2)),
    ):
        case = Case(Format(codebook, bits, group_size), m, n, k, DTYPES[m == 200], "cuda")
        q = case.quantised()
        w, w_hat = weight(TritonLayout(q)), q.dequantise(case.dtype)
        rows = torch.arange(0, k, k // m)[:m]
        one_hot = torch.zeros(len(rows), k, dtype=case.dtype, device="cuda")
        one_hot[torch.arange(len(rows)), rows] = 1
        x, bias = case.random(m, k), case.random(n)
        oracle = x.double() @ w_hat.double().T + bias.double()
        torch_y = torch.nn.functional.linear(x, w_hat, bias)
        with poisoned():
            assert torch.equal(launch.gemm_wgmma(one_hot, w, None, config), w_hat.T[rows])
            y = launch.gemm_wgmma(x, w, bias, config)
            assert nrmse(y, oracle) <= 1.1 * nrmse(torch_y, oracle)
            assert torch.equal(y, launch.gemm_wgmma(x, w, bias, config))


@pytest.mark.parametrize("zeros", ["float", "int"])
@pytest.mark.parametrize("scales", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("bits", [1, *GEMM_WGMMA_FUSED_BITS])
def test_affine_scales(bits: int, scales: str, zeros: str) -> None:
    """The reference's weights: by two values, by one multiply-add, or, of float32, without it."""
    format = Format("affine", bits, 64, scale_dtype=scales, zero_point=zeros)
    for m, dtype in ((64, DTYPES[0]), (256, DTYPES[1])):
        case = Case(format, m, 264, 64 * 9, dtype, "cuda")
        q = case.quantised()
        w, w_hat = weight(TritonLayout(q)), q.dequantise(dtype)
        one_hot = torch.eye(case.k, dtype=dtype, device="cuda")[:: case.k // m][:m].contiguous()
        with poisoned():
            for config in (GemmWgmmaConfig(64), GemmWgmmaConfig(256, 2, 2)):
                y = launch.gemm_wgmma(one_hot, w, None, config)
                assert torch.equal(y, w_hat.T[:: case.k // m][:m])
            y = launch.gemm(one_hot, w, None, GemmConfig(1, 4, 32))
            assert torch.equal(y, w_hat.T[:: case.k // m][:m])


@pytest.mark.parametrize("codebook", ["custom", "affine"])
def test_last_wave(codebook: str) -> None:
    """A last round of few programs is a launch of its own, in pairs that share k."""
    processors = launch.gpu_at(torch.cuda.current_device()).processors
    m, n, k = 300, (processors // 2 + 3) * 128 - 56, 64 * 9
    assert last_wave(m, n, GemmWgmmaConfig(256), launch.gpu_at(0)) == processors // 2 * 128
    case = Case(Format(codebook, 4, 64), m, n, k, torch.bfloat16, "cuda")
    q = case.quantised()
    w, w_hat = weight(TritonLayout(q)), q.dequantise(case.dtype)
    x, bias = case.random(m, k), case.random(n)
    for own, torch_own in ((None, 0), (bias, bias.double())):
        oracle = x.double() @ w_hat.double().T + torch_own
        torch_y = torch.nn.functional.linear(x, w_hat, own)
        with poisoned():
            y = launch.gemm_wgmma(x, w, own, GemmWgmmaConfig(256))
            assert nrmse(y, oracle) <= 1.1 * nrmse(torch_y, oracle)
            assert torch.equal(y, launch.gemm_wgmma(x, w, own, GemmWgmmaConfig(256)))


def test_many_in_a_row() -> None:
    """Each kernel starts while the one before still runs, and reads as x what that one writes."""
    case = Case(Format("custom", 4, 64), 300, 2048, 2048, torch.bfloat16, "cuda")
    ws = [weight(TritonLayout(case.quantised())) for _ in range(3)]
    configs = (GemmWgmmaConfig(256, 2, 2), GemmWgmmaConfig(128), GemmWgmmaConfig(128, 4, 2))
    generator = torch.Generator("cuda").manual_seed(0)
    xs = torch.randn(4, case.m, case.k, device="cuda", generator=generator).bfloat16()

    def run(x: torch.Tensor, synchronise: bool) -> torch.Tensor:
        for w, config in zip(ws, configs, strict=True):
            x = launch.gemm_wgmma(x, w, None, config)
            if synchronise:
                torch.cuda.synchronize()
        return x

    wanted = [run(x, True) for x in xs]
    assert all(y.isfinite().all() and y.any() for y in wanted)
    for _ in range(20):
        torch.cuda._sleep(2_000_000)  # so that the launches queue up, and the kernels meet
        ys = [run(x, False) for x in xs]
        assert all(map(torch.equal, ys, wanted))


def test_scales_end_with_the_groups() -> None:
    """Past the last group x is 0, and so is the scale: 0 times infinity would not be."""
    case = Case(Format("custom", 3, 64), 80, 136, 64 * 9, torch.bfloat16, "cuda")
    # Values and x of one sign: with others, infinities of both signs would add up to NaN.
    codebook = torch.arange(1.0, 9.0, device="cuda") / 8
    w = weight(TritonLayout(replace(case.quantised(), codebook=codebook)))
    w.scale[:, -1] = torch.inf
    x = torch.ones(case.m, case.k, device="cuda", dtype=torch.bfloat16)
    y = launch.gemm_wgmma(x, w, None, GemmWgmmaConfig(128))
    assert y is not None
    assert y.isposinf().all()
    assert torch.equal(y, launch.gemm(x, w, None, GemmConfig(1, 4, 32)))
