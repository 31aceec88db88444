"""The Triton GEMM with mma.sync: compiled for every GPU generation, and run."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton_cases import GEMM_CONFIGS, packed_weight
from triton_compile import TARGETS, check_stack, compile_gemm, layout_of

from fdk_cuda.triton import launch
from fdk_cuda.triton.configs import GPUS, H200, GemmConfig
from fdk_cuda.triton.configs.gemm import fit, gemm_config, takes_table
from fdk_cuda.triton.configs.gpus import STATIC_SMEM_BYTES
from fdk_cuda.triton.kernels.ptx_smem import table_bytes
from fdk_formats import Format
from fdk_formats.testing import Case, nrmse


@pytest.mark.parametrize(
    ("target", "bits", "config"),
    [(90, 4, config) for config in GEMM_CONFIGS]
    + [(target, bits, GEMM_CONFIGS[1]) for target in TARGETS for bits in (4, 8)],
    ids=str,
)
def test_spills_nothing(target: int, bits: int, config: GemmConfig) -> None:
    config = fit(config, bits, TARGETS[target])
    check_stack(compile_gemm(config, bits, bits == 8, target))


@pytest.mark.parametrize(
    ("target", "bits"), [(80, 2), (80, 6), (90, 1), (90, 5), (90, 7), (120, 3)]
)
def test_other_widths_spill_nothing(target: int, bits: int) -> None:
    """The configuration that is chosen for 64 rows."""
    config = gemm_config(layout_of(bits), 64, GPUS[divmod(target, 10)])
    check_stack(compile_gemm(replace(config, split_k=1), bits, bits % 2 == 0, target))


@pytest.mark.parametrize(("bits", "m"), [(4, 64), (4, 128), (6, 64), (8, 64), (8, 128)])
def test_table_fits(bits: int, m: int) -> None:
    """More than static shared memory, so that Triton asks for the rest."""
    config = gemm_config(layout_of(bits), m, H200)
    assert takes_table(config, bits, 64, TARGETS[90])
    assert not takes_table(config, bits, 16, TARGETS[90])
    compiled = compile_gemm(config, bits, False, 90)
    assert compiled.metadata.shared > STATIC_SMEM_BYTES
    assert compiled.metadata.shared + table_bytes(bits, False) <= TARGETS[90]
    check_stack(compiled)


@pytest.mark.gpu
@pytest.mark.parametrize("config", GEMM_CONFIGS, ids=str)
@pytest.mark.parametrize(
    ("codebook", "bits"),
    [("custom", 3), ("custom", 4), ("affine", 4), ("affine", 6), ("affine", 8)],
)
def test_gemm(codebook: str, bits: int, config: GemmConfig) -> None:
    dtype = torch.float16
    for group_size, split_k in ((16, 1), (64, 2), (24, 3)):
        case = Case(Format(codebook, bits, group_size), 77, 137, 9 * group_size, dtype, "cuda")
        q = case.quantised()
        x, bias = case.random(case.m, case.k), case.random(case.n)
        fitting = fit(replace(config, split_k=split_k), bits, launch.gpu_at(0).shared_bytes)
        y = launch.gemm(x, packed_weight(q), bias, fitting)
        w_hat = q.dequantise(case.dtype)
        oracle = x.double() @ w_hat.double().T + bias.double()
        torch_y = torch.nn.functional.linear(x, w_hat, bias)
        assert nrmse(y, oracle) <= 1.1 * nrmse(torch_y, oracle)
