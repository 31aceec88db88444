"""dy @ W_hat by Triton: its configurations, compiled and run."""

import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton_cases import DGRAD_CONFIGS, DTYPES, FORMATS, one_hot, packed_weight
from triton_compile import check_stack, compile_dgrad, layout_of, static_bytes

from fdk_cuda.triton import TritonLayout, launch
from fdk_cuda.triton.configs import GPUS, H200, DgradConfig, grad_config
from fdk_cuda.triton.configs.gpus import STATIC_SMEM_BYTES
from fdk_cuda.triton.kernels.dgrad import is_in_layout
from fdk_cuda.triton.layout import POSITIONS, TABLE_BYTES
from fdk_formats import Format
from fdk_formats.testing import Case, nrmse, poisoned


def check_warp_reduction(compiled: object) -> None:
    """``add_shares`` sums over the first dimension, of which each warp holds one element."""
    text = compiled.asm["ttgir"]
    uses = re.findall(r"st\.shared\.v4\.f32.*-> (tensor<.*>)", text)
    names = {name for use in uses for name in re.findall(r"x\w+, (#\w+)>", use)}
    assert len(names) == 1, names
    layout = re.search(rf"^{names.pop()} = (.*)", text, re.MULTILINE)[1]
    assert layout.startswith("#ttg.nvidia_mma<{versionMajor = 2"), layout
    assert f"warpsPerCTA = [{compiled.metadata.num_warps}, 1, 1]" in layout, layout


@pytest.mark.parametrize(
    ("target", "bits"),
    [
        *((target, bits) for target in (80, 120) for bits in range(1, 9)),
        *((target, 4) for target in (86, 89, 100)),
    ],
)
def test_spills_nothing(bits: int, target: int) -> None:
    """On Hopper: see the next test."""
    check_stack(compile_dgrad(bits, bits == 8, (1, 16, 64)[bits % 3], target))


@pytest.mark.parametrize(
    ("bits", "m"), [(bits, m) for bits in range(1, 9) for m in (1, (16, 64)[bits % 2])]
)
@pytest.mark.parametrize("affine", [False, True], ids=["codebook", "affine"])
def test_layouts_on_hopper(bits: int, affine: bool, m: int) -> None:
    """Codes are transposed where a lane holds four neighbours, sums where a warp has its own.

    Other layouts would give wrong answers. All shared memory is static.
    """
    compiled = compile_dgrad(bits, affine, m, 90)
    assert is_in_layout(compiled.asm["ttgir"])
    check_warp_reduction(compiled)
    assert compiled.metadata.shared + static_bytes(compiled) <= STATIC_SMEM_BYTES
    check_stack(compiled)


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS.values() if not gpu.is_measured])
def test_affine_7_bits_from_33_rows_elsewhere_dequantise(gpu: object) -> None:
    """Eight warps would spill, and four would decode each weight four times."""
    a = layout_of(7)
    assert grad_config(a, 64, gpu, affine=True) is None
    assert grad_config(a, 32, gpu, affine=True) is not None
    assert grad_config(a, 64, gpu) is not None


@pytest.mark.parametrize(
    ("n", "k", "bits", "group_size", "affine", "serves"),
    [
        (4096, 4096, 3, 64, False, True),
        (4096, 4096, 3, 32, False, False),  # too many scales for eight warps
        (4096, 4096, 3, 64, True, False),
        (4096, 4096, 6, 64, False, False),
        (8192, 4096, 6, 64, False, True),
        (8192, 4096, 6, 32, False, False),
        (8192, 8192, 6, 32, False, True),
        (8192, 4096, 6, 64, True, False),
    ],
)
def test_serves_units_of_several_words(
    n: int, k: int, bits: int, group_size: int, affine: bool, serves: bool
) -> None:
    config = grad_config(layout_of(bits, n, k, group_size), 64, H200, affine=affine)
    assert isinstance(config, DgradConfig) == serves
    assert serves or config is None


def test_serves_few_rows() -> None:
    for m, gpu in ((32, H200), (33, GPUS[8, 0])):
        config = grad_config(layout_of(4), m, gpu)
        assert isinstance(config, DgradConfig)


@pytest.mark.parametrize(
    ("bits", "m", "affine", "warps", "split_n"),
    [
        (4, 1, False, 8, 4),
        (2, 8, False, 4, 8),
        (8, 1, False, 4, 4),
        (4, 16, False, 4, 8),
        (4, 16, True, 4, 4),
        (7, 16, False, 4, 16),
        (4, 32, True, 4, 4),
        (3, 32, False, 8, 2),
        (6, 64, False, 8, 1),
        (7, 32, True, 8, 2),
        (5, 64, True, 4, 2),
        (5, 64, False, 8, 1),
        (7, 64, True, 8, 1),
    ],
)
def test_config(bits: int, m: int, affine: bool, warps: int, split_n: int) -> None:
    """Splits of n give as many programs as the GPU holds at once."""
    config = grad_config(layout_of(bits), m, H200, affine=affine)
    assert isinstance(config, DgradConfig)
    assert (config.warps, config.split_n, config.table) == (warps, split_n, bits not in (2, 5))
    assert POSITIONS[bits] % config.warps == 0


@pytest.mark.parametrize(
    ("n", "group_size", "bits", "affine", "m", "positions", "ahead", "split_n"),
    [
        (8192, 64, 1, False, 8, 32, 1, 8),
        (8192, 64, 3, False, 1, 32, 1, 8),
        (8192, 64, 3, True, 1, 32, 0, 8),
        (8192, 128, 5, False, 1, 16, 1, 4),
        (8192, 64, 4, False, 32, 8, 1, 4),
        (8192, 64, 4, True, 32, 8, 1, 4),
        (8192, 64, 7, False, 64, 8, 1, 1),
        (4096, 64, 5, False, 64, 8, 1, 1),
        (4096, 64, 5, False, 32, 8, 0, 4),
        (8192, 64, 7, False, 8, 16, 2, 4),
        (8192, 32, 3, False, 1, 8, 1, 4),  # too many scales
        (8192, 64, 3, False, 9, 16, 0, 16),
        (8192, 64, 2, False, 16, 16, 1, 8),
        (8192, 64, 1, True, 16, 8, 2, 4),
        (8192, 64, 4, True, 16, 8, 2, 4),
        (4096, 64, 3, False, 9, 8, 0, 16),
        (4096, 64, 3, False, 1, 8, 1, 4),
    ],
)
def test_positions_per_program(
    n: int,
    group_size: int,
    bits: int,
    affine: bool,
    m: int,
    positions: int,
    ahead: int,
    split_n: int,
) -> None:
    config = grad_config(layout_of(bits, n, 8192, group_size), m, H200, affine=affine)
    assert isinstance(config, DgradConfig)
    assert (config.positions, config.ahead, config.split_n) == (positions, ahead, split_n)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [*DGRAD_CONFIGS, replace(DGRAD_CONFIGS[2], warps=8)], ids=str)
@pytest.mark.parametrize(("codebook", "bits"), FORMATS)
def test_dgrad(codebook: str, bits: int, config: DgradConfig) -> None:
    bf16, fp16 = DTYPES
    for group_size, split_n, dtype in ((64, 2, bf16), (24, 1, fp16), (None, 3, bf16)):
        k = 9 * (group_size or 30)
        case = Case(Format(codebook, bits, group_size), 37, 333, k, dtype, "cuda")
        chosen = replace(
            config,
            warps=min(config.warps, POSITIONS[bits]),
            split_n=split_n,
            ahead=split_n % 2,
            table=bits in TABLE_BYTES,
            overlap=split_n == 2,
        )
        check_dgrad(case, chosen, step=9)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("codebook", "bits", "positions"),
    [("custom", 1, 32), ("custom", 3, 32), ("affine", 3, 32), ("affine", 5, 16), ("custom", 7, 16)],
)
def test_many_positions(codebook: str, bits: int, positions: int, dtype: torch.dtype) -> None:
    case = Case(Format(codebook, bits, 64), 5, 333, 9 * 64, dtype, "cuda")
    for ahead, split_n in ((0, 2), (1, 1)):
        config = replace(DGRAD_CONFIGS[0], positions=positions, ahead=ahead, split_n=split_n)
        check_dgrad(case, replace(config, table=bits in TABLE_BYTES and bits != 1), step=67)


def check_dgrad(case: Case, config: DgradConfig, step: int) -> None:
    """Checks every ``step``-th row of W_hat bit for bit, and a random dy."""
    q = case.quantised()
    w, w_hat = packed_weight(q), q.dequantise(case.dtype)
    rows = torch.arange(0, case.n, step, device="cuda")
    grad_y = case.random(case.m, case.n)
    # The kernel may scale grad_y instead of the weight, which torch rounds.
    oracle = grad_y.double() @ q.dequantise(torch.float64)
    with poisoned():
        assert torch.equal(launch.dgrad(one_hot(rows, case.n, case.dtype), w, config), w_hat[rows])
        error = nrmse(launch.dgrad(grad_y, w, config), oracle)
    assert error <= 2 * nrmse(grad_y @ w_hat, oracle)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", ["custom4-g64", "affine4-g64", "affine4-g64-e8m0"])
def test_layout_gradient(format: str, dtype: torch.dtype) -> None:
    """The kernel or, for formats that it cannot transpose, cuBLAS; the second call is cached."""
    case = Case(Format.parse(format), 5, 2048, 2048, dtype, "cuda")
    q = case.quantised()
    layout = TritonLayout(q)
    grad_y = case.random(case.m, case.n)
    oracle = grad_y.double() @ q.dequantise(torch.float64)
    limit = 2 * nrmse(grad_y @ q.dequantise(dtype), oracle)
    assert nrmse(layout.grad_x(grad_y), oracle) <= limit
    assert nrmse(layout.grad_x(grad_y), oracle) <= limit
