"""Dequantising by Triton: compiled for every GPU generation, and run."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton_cases import DTYPES, FORMATS, packed_weight
from triton_compile import check_stack, compile_dequantise, layout_of, static_bytes

from fdk_cuda.triton import launch
from fdk_cuda.triton.configs.gpus import STATIC_SMEM_BYTES
from fdk_formats import Format
from fdk_formats.testing import Case


@pytest.mark.parametrize("target", [80, 90, 120])
@pytest.mark.parametrize("bits", range(1, 9))
def test_spills_nothing(bits: int, target: int) -> None:
    """Codebook and affine in turns; a table and Triton's memory fit in static shared memory."""
    affine = (bits + target // 10) % 2 == 0
    compiled = compile_dequantise(layout_of(bits, 4096, 4096), affine, target)
    check_stack(compiled)
    assert compiled.metadata.shared + static_bytes(compiled) <= STATIC_SMEM_BYTES


@pytest.mark.parametrize("bits", [1, 3, 4, 8])
def test_compiles_for_one_tile(bits: int) -> None:
    """Triton compiles sizes of 1 as constants."""
    compile_dequantise(layout_of(bits, 37, 64), bits % 2 == 0, 90)


@pytest.mark.gpu
@pytest.mark.parametrize(("codebook", "bits"), FORMATS)
def test_dequantise(codebook: str, bits: int) -> None:
    for group_size in (16, 24, 64, None):
        format = Format(codebook, bits, group_size)
        case = Case(format, 1, 37, 9 * (group_size or 30), DTYPES[bits % 2], "cuda")
        q = case.quantised()
        w_hat = launch.dequantise(packed_weight(q), case.dtype)
        assert torch.equal(w_hat, q.dequantise(case.dtype))
