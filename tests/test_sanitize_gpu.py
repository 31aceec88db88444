"""tools/sanitize_gpu.py without a GPU: which kernels its cases need, and that it sees errors."""

from itertools import product

import pytest
import sanitize_gpu
import torch
from sanitize_gpu import EVERY_TILE, SIZES, WrongAnswerError, marlin_weight

from fdk_cuda.marlin.cost_model import DGRAD_STEP_COST, STEP_COST
from fdk_cuda.marlin.testing import exact_weight
from fdk_formats.format import BITS, Format


@pytest.fixture
def on_cpu(monkeypatch):
    """Tensors stay on the CPU."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    marlin_weight.cache_clear()
    yield
    marlin_weight.cache_clear()


def options(family):
    """Yield the macros of each program of a family, with its name."""
    programs = [p for case in sanitize_gpu.FAMILIES[family]() for p in case.programs]
    for program in dict.fromkeys(programs):
        macros = dict(option.removeprefix("-D").split("=") for option in program.options)
        yield {"name": program.name} | {name: int(value) for name, value in macros.items()}


def test_small_m_cases_cover_every_kind_of_plan():
    found = list(options("small_m"))
    limbs = {
        (o["BITS"], o["AFFINE"], o["TILE_M"]) for o in found if o["name"] == "gemv_int8_limbs.cu"
    }
    assert limbs == {(1, 0, 1), (1, 0, 4), (1, 1, 1), (1, 1, 4), (2, 1, 1)}
    assert any(o["name"] == "gemv_bitplane.cu" for o in found)
    small = [o for o in found if o["name"] == "small_m.cu"]
    assert {(o["BITS"], o["M_TILES"]) for o in small} >= set(product(BITS, (1, 2)))
    assert {o["WARPS"] for o in small} == {2, 4, 8, 12, 16}
    assert any(o["TILE_FRAGMENTS"] == 8 for o in small)
    assert any(o["SHORT_BLOCKS"] < o["TILE_FRAGMENTS"] // 2 for o in small)
    clusters = [case for case in sanitize_gpu.small_m_cases() if "cluster=4" in case.name]
    assert len(clusters) >= len(BITS)


def test_repack_cases_cover_every_program():
    assert len(list(options("repack"))) == 64


def test_hopper_cases_cover_every_tile():
    found = list(options("hopper"))
    kinds = {(Format.parse(name).bits, int("binary" in name)) for name in EVERY_TILE}
    forward = {
        (o["BITS"], o["SIGNS"], o["TILE_M"], o["CONSUMERS"], o["K_GROUPS"])
        for o in found
        if o["name"] == "hopper_gemm.cu"
    }
    assert kinds == {(1, 1), *((bits, 0) for bits in BITS)}
    assert forward >= {(*kind, *tile) for kind in kinds for tile in STEP_COST}
    dgrad = {o["TILE_M"] for o in found if o["name"] == "hopper_dgrad.cu"}
    assert dgrad == {tile_m for tile_m, *_ in DGRAD_STEP_COST}
    for name in ("hopper_gemm.cu", "hopper_dgrad.cu"):
        assert {o["CLUSTER"] for o in found if o["name"] == name} == {1, 2}
    assert any(o["name"] == "split_k_reduce.cu" for o in found)


def test_triton_cases_cover_every_kernel():
    pytest.importorskip("triton")
    kernels = {case.name.partition(" ")[0] for case in sanitize_gpu.triton_cases()}
    assert kernels == {"gemv", "gemm", "gemm_wgmma", "dgrad", "wide", "dgrad_wgmma", "dequantise"}


def test_repack_cases_check_bytes(on_cpu, monkeypatch):
    """The cases accept torch's functions and reject zeros."""
    cases = list(sanitize_gpu.repack_cases())[::7]
    for case in cases:
        case.run()
    monkeypatch.setattr(sanitize_gpu.repack, "pack", lambda *given: torch.zeros(1))
    with pytest.raises(WrongAnswerError):
        cases[0].run()


@pytest.mark.parametrize("factor", [1.0, 1.02])
def test_small_m_cases_check_answers(on_cpu, monkeypatch, factor):
    """The cases reject a product that is 2 % too large."""
    case = next(case for case in sanitize_gpu.small_m_cases() if "m16" in case.name)
    format, dtype, m, *_ = case.run.args
    q = marlin_weight(format, *SIZES, dtype)[0]
    n, k = SIZES
    out = torch.empty(m, n, dtype=dtype)

    def launch(*values):
        x = sanitize_gpu.normal(m, k, dtype=dtype).double()
        bias = sanitize_gpu.normal(n, dtype=dtype, seed=2).double()
        out.copy_(factor * (x @ exact_weight(q, dtype).T + bias))

    monkeypatch.setattr(sanitize_gpu, "nan_on_gpu", lambda *shape, dtype: out)
    monkeypatch.setattr(sanitize_gpu.runtime, "small_launch", lambda *given: launch)
    if factor == 1.0:
        case.run()
    else:
        with pytest.raises(WrongAnswerError, match=r"error 2\.0"):
            case.run()


def test_unknown_family(capsys):
    with pytest.raises(SystemExit):
        sanitize_gpu.main(["--only", "small_m,machete"])
    assert "no machete; there are small_m, repack, hopper, triton" in capsys.readouterr().err
