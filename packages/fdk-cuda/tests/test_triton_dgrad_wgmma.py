"""dy @ W_hat in Gluon for Hopper: its configurations, compiled and run.

No interpreter runs Gluon: answers are checked on a GPU only.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

from triton_cases import DTYPES, one_hot, packed_weight
from triton_compile import check_hopper, compile_dgrad_wgmma, layout_of, operands_of

from fdk_cuda.triton import launch
from fdk_cuda.triton.configs import H200, DgradWgmmaConfig, grad_config
from fdk_cuda.triton.configs.dgrad import dgrad_wgmma_config
from fdk_cuda.triton.layout import TABLE_BYTES
from fdk_formats import Format
from fdk_formats.testing import Case, nrmse, poisoned


@pytest.mark.parametrize("m", [64, 128, 256])
@pytest.mark.parametrize("affine", [False, True], ids=["codebook", "affine"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_pipeline(bits: int, affine: bool, m: int) -> None:
    """Nothing spills, a table fits, and wgmmas run while the next weights are decoded."""
    config = dgrad_wgmma_config(layout_of(bits), m, H200, affine=affine)
    config = replace(config, split_n=1 + (bits.bit_length() + affine + m.bit_length()) % 2)
    compiled = compile_dgrad_wgmma(bits, config, affine=affine)
    ptx = compiled.asm["ptx"]
    check_hopper(compiled)
    assert compiled.metadata.shared + TABLE_BYTES.get(bits, 0) <= H200.shared_bytes
    assert len(operands_of(ptx)) == 4 * config.positions
    running = config.positions * config.n_tiles
    assert ptx.count(f"wgmma.wait_group.sync.aligned {running}") == 4 // config.n_tiles


@pytest.mark.parametrize(
    ("bits", "affine", "scale"),
    [
        *((1, True, "*fp32"), (2, False, "*fp16"), (4, False, "*u8"), (4, False, "*fp32")),
        *((4, True, "*fp16"), (8, False, "*fp32"), (8, False, "*u8")),
    ],
)
def test_scales_of_another_dtype_spill_nothing(bits: int, affine: bool, scale: str) -> None:
    """Zero points have the scale's dtype; bytes are exponents."""
    config = dgrad_wgmma_config(layout_of(bits), 128, H200, affine=affine)
    check_hopper(compile_dgrad_wgmma(bits, config, affine=affine, scale=scale))


@pytest.mark.parametrize(
    ("n", "bits", "m", "config"),
    [
        (8192, 4, 64, DgradWgmmaConfig(64, 8)),
        (8192, 4, 128, DgradWgmmaConfig(128, 4)),
        (8192, 1, 65, DgradWgmmaConfig(128, 4, n_tiles=2)),
        (8192, 4, 129, DgradWgmmaConfig(256, 2, n_tiles=2)),
        (8192, 2, 256, DgradWgmmaConfig(128, 2)),
        (8192, 3, 65, None),  # three words per unit
        (8192, 4, 257, None),
        (4096, 4, 256, DgradWgmmaConfig(256, 2, n_tiles=2)),
        (2048, 4, 64, DgradWgmmaConfig(64, 4)),  # splits of 512 rows of W
        (2048, 4, 128, DgradWgmmaConfig(128, 4)),
        (2048, 4, 129, None),
        (1024, 4, 64, None),
    ],
)
def test_config(n: int, bits: int, m: int, config: DgradWgmmaConfig | None) -> None:
    assert grad_config(layout_of(bits, n), m, H200) == config


@pytest.mark.parametrize(
    ("n", "bits", "m", "serves"),
    [
        (8192, 1, 128, True),
        (8192, 1, 129, False),
        (8192, 2, 256, True),
        (4096, 4, 64, True),
        (2048, 4, 64, False),
    ],
)
def test_serves_affine(n: int, bits: int, m: int, serves: bool) -> None:
    config = grad_config(layout_of(bits, n), m, H200, affine=True)
    assert isinstance(config, DgradWgmmaConfig) == serves


@pytest.fixture
def hopper() -> None:
    if not launch.gpu_at(torch.cuda.current_device()).limits.dgrad_wgmma_m:
        pytest.skip("needs a GPU of compute capability 9.0 and a Triton with Gluon")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("codebook", ["custom", "affine"])
def test_dgrad_wgmma(codebook: str, bits: int) -> None:
    """Sizes that end within a tile, groups of whole rows, split n."""
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
        w, w_hat = packed_weight(q), q.dequantise(case.dtype)
        rows = torch.arange(0, n, max(1, n // m))[:m]
        grad_y = case.random(m, n)
        oracle = grad_y.double() @ w_hat.double()
        with poisoned():
            grad_x = launch.dgrad_wgmma(one_hot(rows, n, dtype), w, config)
            assert torch.equal(grad_x, w_hat[rows])
            grad_x = launch.dgrad_wgmma(grad_y, w, config)
            assert nrmse(grad_x, oracle) <= 1.1 * nrmse(grad_y @ w_hat, oracle)
            assert torch.equal(grad_x, launch.dgrad_wgmma(grad_y, w, config))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("scales", ["bf16", "fp16", "fp32", "e8m0"])
@pytest.mark.parametrize(
    ("codebook", "bits"), [("custom", 2), ("custom", 8), ("affine", 1), ("affine", 4)]
)
def test_decodes_exactly(codebook: str, bits: int, scales: str) -> None:
    """Scales and zero points of dy's dtype and of others."""
    n, k = 328, 64 * 9
    rows = torch.arange(0, n, 5)
    for dtype in DTYPES:
        case = Case(Format(codebook, bits, 64, scale_dtype=scales), 66, n, k, dtype, "cuda")
        q = case.quantised()
        w, w_hat = packed_weight(q), q.dequantise(dtype)
        for config in (DgradWgmmaConfig(64, 2), DgradWgmmaConfig(128, n_tiles=2)):
            with poisoned():
                grad_x = launch.dgrad_wgmma(one_hot(rows, n, dtype), w, config)
            assert torch.equal(grad_x, w_hat[rows]), (dtype, config)
