"""``dgrad_wgmma_kernel`` on a GPU of compute capability 9.0: no interpreter takes Gluon."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton_cases import weight

from fdk_cuda.triton import TritonLayout, launch
from fdk_cuda.triton.configs import DgradWgmmaConfig
from fdk_formats import Format
from fdk_formats.testing import Case, nrmse, poisoned

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float16)
FORMATS = [(codebook, bits) for codebook in ("custom", "affine") for bits in (1, 2, 4, 8)]


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not launch.gpu_at(torch.cuda.current_device()).limits.dgrad_wgmma_m:
        pytest.skip("needs a GPU of compute capability 9.0 and a Triton with Gluon")


@pytest.mark.parametrize(("codebook", "bits"), FORMATS)
def test_many_transposed(codebook: str, bits: int) -> None:
    """Rows, outputs and columns that end within a tile; whole rows as a group; parts of n."""
    for group_size, m, n, k, config in (
        (64, 100, 328, 64 * 41, DgradWgmmaConfig(64, 2)),
        (128, 77, 136, 128 * 9, DgradWgmmaConfig(64)),
        (None, 130, 264, 1000, DgradWgmmaConfig(64)),
        (None, 40, 1208, 2000, DgradWgmmaConfig(64, 4)),
        (64, 100, 328, 64 * 41, DgradWgmmaConfig(128, 2, n_tiles=2)),
        (128, 130, 264, 128 * 9, DgradWgmmaConfig(128)),
        (None, 40, 1208, 1000, DgradWgmmaConfig(128, 4, n_tiles=2)),
        (64, 300, 328, 64 * 41, DgradWgmmaConfig(256, 2, n_tiles=2)),
        (None, 77, 136, 1000, DgradWgmmaConfig(256, n_tiles=2)),
        (192, 130, 1208, 192 * 5, DgradWgmmaConfig(256, 4, n_tiles=2)),
    ):
        dtype = DTYPES[m == 100]
        case = Case(Format(codebook, bits, group_size), m, n, k, dtype, "cuda")
        q = case.quantised()
        w, w_hat = weight(TritonLayout(q)), q.dequantise(case.dtype)
        rows = torch.arange(0, n, max(1, n // m))[:m]
        one_hot = torch.zeros(len(rows), n, dtype=case.dtype, device="cuda")
        one_hot[torch.arange(len(rows)), rows] = 1
        grad_y = case.random(m, n)
        oracle = grad_y.double() @ w_hat.double()
        with poisoned():
            assert torch.equal(launch.dgrad_wgmma(one_hot, w, config), w_hat[rows])
            grad_x = launch.dgrad_wgmma(grad_y, w, config)
            assert nrmse(grad_x, oracle) <= 1.1 * nrmse(grad_y @ w_hat, oracle)
            assert torch.equal(grad_x, launch.dgrad_wgmma(grad_y, w, config))


@pytest.mark.parametrize("scales", ["bf16", "fp16", "fp32", "e8m0"])
@pytest.mark.parametrize(
    ("codebook", "bits"), [("custom", 2), ("custom", 8), ("affine", 1), ("affine", 4)]
)
def test_many_transposed_scales(codebook: str, bits: int, scales: str) -> None:
    """Of dy's dtype and of others, zero points alike: the reference's weights, bit for bit."""
    n, k = 328, 64 * 9
    for dtype in DTYPES:
        case = Case(Format(codebook, bits, 64, scale_dtype=scales), 66, n, k, dtype, "cuda")
        q = case.quantised()
        w, w_hat = weight(TritonLayout(q)), q.dequantise(dtype)
        one_hot = torch.eye(n, dtype=dtype, device="cuda")[::5].contiguous()
        for config in (DgradWgmmaConfig(64, 2), DgradWgmmaConfig(128, n_tiles=2)):
            with poisoned():
                grad_x = launch.dgrad_wgmma(one_hot, w, config)
            assert torch.equal(grad_x, w_hat[::5]), (dtype, config)
