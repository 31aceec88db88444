"""The Triton GEMV: compiled for every GPU generation, and run."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton_cases import packed_weight
from triton_compile import (
    check_stack,
    check_warp_reduction,
    compile_gemv,
    layout_of,
    registers_and_stack,
    static_bytes,
)

from fdk_cuda.triton import launch
from fdk_cuda.triton.configs import H200, GemvConfig
from fdk_cuda.triton.configs.gemv import gemv_config
from fdk_cuda.triton.configs.gpus import H200_PROCESSORS, STATIC_SMEM_BYTES
from fdk_cuda.triton.kernels.ptx_smem import gemv_smem_bytes, table_bytes
from fdk_cuda.triton.layout import STRIDES
from fdk_formats import Format
from fdk_formats.testing import Case, nrmse, random_quantised


def check(compiled: object) -> None:
    check_stack(compiled)
    check_warp_reduction(compiled)


@pytest.mark.parametrize(
    ("target", "bits"),
    [
        *((target, bits) for target in (80, 90, 120) for bits in range(1, 9)),
        *((target, bits) for target in (86, 89, 100) for bits in (4, 8)),
    ],
)
def test_spills_nothing(bits: int, target: int) -> None:
    """Few and many outputs, up to 8 rows of x and up to 16, in turns; 8 bits are affine."""
    n, m = ((4096, 8), (28672, 16), (4096, 16), (28672, 8))[(bits + target // 10) % 4]
    check(compile_gemv(layout_of(bits, n, 4096), m, target, affine=bits == 8))


@pytest.mark.parametrize(
    ("bits", "affine", "target"),
    [(4, True, 80), (5, True, 120), (6, True, 90), (7, True, 80), (8, False, 120)],
)
def test_codes_without_a_table_spill_nothing(bits: int, affine: bool, target: int) -> None:
    """Affine codes, and the widest codebook, up to 16 rows."""
    check(compile_gemv(layout_of(bits, 28672, 4096), 16, target, affine=affine))


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("bits", range(1, 8))
def test_affine_programs_run_in_one_wave(bits: int, m: int) -> None:
    layout = layout_of(bits)
    config = gemv_config(layout, m, H200, affine=True)
    compiled = compile_gemv(layout, m, 90, affine=True)
    check_stack(compiled)
    if m == 1 and bits <= 4:
        programs = -(-8192 // (16 * config.n_tiles))
        registers, _ = registers_and_stack(compiled)
        # Compute capability 9.0 allocates registers in units of eight per thread.
        resident = 65536 // (32 * config.warps * 8 * triton.cdiv(registers, 8))
        assert programs <= resident * H200_PROCESSORS


@pytest.mark.parametrize("n", [4096, 8192, 28672])
@pytest.mark.parametrize("bits", STRIDES)
def test_table_fits_in_static_shared_memory(bits: int, n: int) -> None:
    """The table fits with the sums of the warps and the memory that Triton allocates."""
    for m in (8, 16):
        compiled = compile_gemv(layout_of(bits, n, 4096), m, 90, affine=False)
        assert static_bytes(compiled) >= table_bytes(bits, False)
        assert compiled.metadata.shared + static_bytes(compiled) <= STATIC_SMEM_BYTES
        check(compiled)


@pytest.mark.parametrize("whole_row", [True, False], ids=["row", "groups"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_shared_memory_is_counted(bits: int, whole_row: bool) -> None:
    """Shapes of the conformance kit: one tile of k, or few; x ends within a tile."""
    affine, m = (bits // 2 + whole_row) % 2 == 0, (1, 16)[bits % 2]
    group_size = 88 if whole_row else (16, 24)[(bits + m) % 2]
    layout = layout_of(bits, 37, 88 if whole_row else 3 * group_size, group_size)
    config = gemv_config(layout, m, H200, affine=affine)
    compiled = compile_gemv(layout, m, 90, affine=affine)
    m_tiles = 1 if m <= 8 else 2
    counted, _ = gemv_smem_bytes(config.n_tiles, m_tiles, config.warps, table_bytes(bits, affine))
    assert compiled.metadata.shared + static_bytes(compiled) <= counted <= STATIC_SMEM_BYTES


@pytest.mark.parametrize("target", [80, 120])
@pytest.mark.parametrize(("bits", "m"), [(1, 1), (1, 16), (2, 1), (3, 1), (4, 1)])
def test_affine_spills_nothing_elsewhere(bits: int, m: int, target: int) -> None:
    """GPUs without Hopper's register limits and second tile."""
    check(compile_gemv(layout_of(bits), m, target, affine=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("codebook", "m", "bits", "config"),
    [
        (codebook, m, bits, config)
        for codebook in ("custom", "affine")
        for m in (3, 16)
        for bits in range(1, 9)
        for config in dict.fromkeys(
            gemv_config(layout_of(bits, n, 4096), m, H200, affine=codebook == "affine")
            for n in (4096, 8192, 28672)
        )
    ],
    ids=str,
)
def test_every_config(codebook: str, m: int, bits: int, config: GemvConfig) -> None:
    """Each configuration runs where it is chosen, and gives the same bits twice."""
    case = Case(Format(codebook, bits, 64), m, 333, 64 * 67, torch.bfloat16, "cuda")
    q = case.quantised()
    x = case.random(case.m, case.k)
    oracle = x.double() @ q.dequantise(torch.float64).T
    y = launch.gemv(x, packed_weight(q), None, config)
    assert nrmse(y, oracle) < 6e-3
    assert torch.equal(y, launch.gemv(x, packed_weight(q), None, config))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("n_tiles", [1, 2])
def test_dependent_launches_overlap(n_tiles: int, m: int) -> None:
    """Each kernel starts before the previous one ends, whose output it reads as x."""
    if not launch.can_overlap(torch.cuda.current_device()):
        pytest.skip("needs a GPU of compute capability 9.0 or later")
    config = GemvConfig(n_tiles, warps=4, fetch=2, overlap=True)
    ws = []
    for seed, name in enumerate(["custom3", "custom1", "custom8", "affine4", "custom2", "custom4"]):
        q = random_quantised(Format.parse(f"{name}-g64"), 2048, 2048, seed=seed).to("cuda")
        ws.append(packed_weight(q))
    # Every x differs: stale memory of an output is never the right answer.
    generator = torch.Generator("cuda").manual_seed(0)
    xs = torch.randn(8, m, 2048, device="cuda", generator=generator).bfloat16()

    def run(x: Tensor, config: GemvConfig) -> Tensor:
        for w in ws:
            x = launch.gemv(x, w, None, config)
        return x

    wanted = [run(x, replace(config, overlap=False)) for x in xs]
    assert all(y.isfinite().all() and y.any() for y in wanted)
    run(xs[0], config)  # compiles
    for _ in range(50):
        torch.cuda._sleep(2_000_000)  # so that launches queue up and kernels overlap
        ys = [run(x, config) for x in xs]
        assert all(map(torch.equal, ys, wanted))
