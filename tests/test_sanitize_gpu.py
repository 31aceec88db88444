"""tools/sanitize_gpu.py without a GPU: which kernels its cases take, and that it sees errors."""

from itertools import product

import pytest
import sanitize_gpu
import sanitize_marlin
import torch
from sanitize_marlin import EVERY_TILE, SMALL_K, SMALL_N, WrongAnswerError, packed_weight

from fdk_cuda.marlin.cost_model import DGRAD_STEP_COST, STEP_COST
from fdk_cuda.marlin.testing import exact_weight
from fdk_formats.format import BITS, Format


@pytest.fixture
def on_cpu(monkeypatch):
    """Tensors stay where they are."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    packed_weight.cache_clear()
    yield
    packed_weight.cache_clear()


def options(family):
    """The macros of each program of a family, with its name."""
    programs = [p for case in sanitize_gpu.FAMILIES[family]() for p in case.programs]
    for program in dict.fromkeys(programs):
        macros = dict(option.removeprefix("-D").split("=") for option in program.options)
        yield {"name": program.name} | {name: int(value) for name, value in macros.items()}


def test_every_kind_of_small_plan_is_among_the_cases():
    found = list(options("marlin"))
    digits = {
        (o["BITS"], o["AFFINE"], o["TILE_M"]) for o in found if o["name"] == "gemv_int8_limbs.cu"
    }
    assert digits == {(1, 0, 1), (1, 0, 4), (1, 1, 1), (1, 1, 4), (2, 1, 1)}
    small = [o for o in found if o["name"] == "small_m.cu"]
    assert {(o["BITS"], o["M_TILES"]) for o in small} >= set(product(BITS, (1, 2)))
    assert {o["WARPS"] for o in small} == {2, 4, 8, 12, 16}
    assert any(o["TILE_FRAGMENTS"] == 8 for o in small)
    assert any(o["SHORT_BLOCKS"] < o["TILE_FRAGMENTS"] // 2 for o in small)
    clusters = [case for case in sanitize_gpu.marlin_cases() if "cluster of 4" in case.name]
    assert len(clusters) >= len(BITS)


def test_every_program_of_layout_is_among_the_cases():
    assert len(list(options("layout"))) == 64


def test_every_tile_of_hopper_is_among_the_cases():
    found = list(options("hopper"))
    kinds = {(Format.parse(name).bits, int("binary" in name)) for name in EVERY_TILE}
    forward = {
        (o["BITS"], o["SIGNS"], o["TILE_M"], o["CONSUMERS"], o["K_GROUPS"])
        for o in found
        if o["name"] == "hopper_gemm.cu"
    }
    assert kinds == {(1, 1), *((bits, 0) for bits in BITS)}
    assert forward >= {(*kind, *tile) for kind in kinds for tile in STEP_COST}
    backward = {o["TILE_M"] for o in found if o["name"] == "hopper_dgrad.cu"}
    assert backward == {columns for columns, *_ in DGRAD_STEP_COST}
    for name in ("hopper_gemm.cu", "hopper_dgrad.cu"):
        assert {o["CLUSTER"] for o in found if o["name"] == name} == {1, 2}
    assert any(o["name"] == "split_k_reduce.cu" for o in found)


def test_layout_cases_check_bytes(on_cpu, monkeypatch):
    """By torch's functions, which are right; and by one that is not."""
    cases = list(sanitize_gpu.layout_cases())[::7]
    for case in cases:
        case.run()
    monkeypatch.setattr(sanitize_marlin.repack, "pack", lambda *given: torch.zeros(1))
    with pytest.raises(WrongAnswerError):
        cases[0].run()


@pytest.mark.parametrize("factor", [1.0, 1.02])
def test_small_cases_check_answers(on_cpu, monkeypatch, factor):
    """A product a fiftieth too large is not right."""
    case = next(case for case in sanitize_gpu.marlin_cases() if "m16" in case.name)
    format, dtype, m, *_ = case.run.args
    w = packed_weight(format, SMALL_N, SMALL_K, dtype)
    out = torch.empty(m, SMALL_N, dtype=dtype)

    def launch(*values):
        x = sanitize_marlin.normal(m, SMALL_K, dtype=dtype).double()
        bias = sanitize_marlin.normal(SMALL_N, dtype=dtype, seed=2).double()
        out.copy_(factor * (x @ exact_weight(w.q, dtype).T + bias))

    monkeypatch.setattr(sanitize_marlin, "poison", lambda *shape, dtype: out)
    monkeypatch.setattr(sanitize_marlin, "small_launch", lambda *given: launch)
    if factor == 1.0:
        case.run()
    else:
        with pytest.raises(WrongAnswerError, match=r"error 2\.0"):
            case.run()


def test_what_is_cut_is_named(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert sanitize_gpu.main(["--only", "marlin", "-k", "dequantise", "--seconds", "0"]) == 1
    printed = capsys.readouterr().out
    assert "cut: marlin: custom4-g64 bfloat16, dequantise\n" in printed
    assert "all answers right: marlin 0; cut: 16; 0 s on a GPU\n" in printed


def test_unknown_family(capsys):
    with pytest.raises(SystemExit):
        sanitize_gpu.main(["--only", "marlin,machete"])
    assert "no machete; there are marlin, layout, hopper, triton" in capsys.readouterr().err
