"""The layers that precompile and tune_layers accept, and the kernels that precompile compiles."""

import importlib
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from marlin_compile import HOPPER

from fdk_cuda.gpu import unsupported_gpu
from fdk_cuda.marlin import ops, precompile
from fdk_cuda.marlin.cost_model import DGRAD_STEP_COST
from fdk_cuda.nvrtc import Program
from fdk_cuda.precompile_args import check_activations, checked_layers
from fdk_formats.format import Format


def test_layers_without_outputs_are_skipped():
    layers = [("int4-g64", 0, 64), ["int4-g64", 3, 64], (Format("nf", 4, 32), 1, 32)]
    assert checked_layers("caller", layers) == [
        (Format("int", 4, 64), 3, 64),
        (Format("nf", 4, 32), 1, 32),
    ]


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (("int4-g64", -1, 64), ValueError, "caller: n of int4-g64 must be at least 0, got -1"),
        (("int4-g64", 8, -64), ValueError, "int4-g64: k must be a positive .* of 64, got k=-64"),
        (("int4-g64", 0, 96), ValueError, "int4-g64: k must be a positive .* of 64, got k=96"),
        (("int4-g64", 8.0, 64), TypeError, "n and k of int4-g64 must be int, got 8.0 and 64"),
        (("int4-g64", 8), TypeError, r"a layer must be \(format, n, k\), got \('int4-g64', 8\)"),
        ("int4-g64", TypeError, r"a layer must be \(format, n, k\), got 'int4-g64'"),
        ((4, 8, 64), TypeError, "wanted a string or a Format, got int"),
    ],
)
def test_bad_layers(layer, error, message):
    with pytest.raises(error, match=message):
        checked_layers("caller", [layer])


def test_activations():
    check_activations("caller", torch.float16, (torch.bfloat16, torch.float16))
    with pytest.raises(TypeError, match=r"caller: dtype must be torch\.bfloat16, got torch\.int8"):
        check_activations("caller", torch.int8, (torch.bfloat16,))


@pytest.mark.parametrize(
    ("capability", "hip", "reason"),
    [
        ((8, 0), None, None),
        ((12, 0), None, None),
        ((7, 5), None, "needs compute capability 8.0 or later, got 7.5"),
        ((9, 4), "6.4", "needs an NVIDIA GPU, got one of AMD"),
    ],
)
def test_gpus(capability, hip, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert unsupported_gpu(torch.device("cuda")) == reason
    assert unsupported_gpu(torch.device("cpu")) == "needs an NVIDIA GPU, got cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch finds none on this machine" in str(unsupported_gpu(torch.device("cuda")))


@pytest.fixture
def precompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Program]]:
    """Collects what ``precompile`` would compile on an H200."""
    module = importlib.import_module("fdk_cuda.marlin.precompile")
    programs: list[Program] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    for of in (module, ops):
        monkeypatch.setattr(of, "device_limits", lambda index: HOPPER)
    monkeypatch.setattr(module, "cached_cubin", lambda program, arch: programs.append(program))
    ops.small_m_limit.cache_clear()
    yield programs
    ops.small_m_limit.cache_clear()


def test_gradient_is_compiled_on_request(precompiled: list[Program]) -> None:
    layers = [("custom4-g64", 4096, 4096)]
    precompile(layers)
    assert "hopper_dgrad.cu" not in [program.name for program in precompiled]
    without = len(precompiled)
    count = precompile(layers, gradient=True)
    assert len(precompiled) == without + count
    names = [program.name for program in precompiled]
    assert names.count("hopper_dgrad.cu") == 2 * len(DGRAD_STEP_COST)


@pytest.mark.parametrize(("n", "most_tiles"), [(4096, 2), (28672, 1)])
def test_small_m_ends_where_hopper_begins(
    precompiled: list[Program], n: int, most_tiles: int
) -> None:
    """With 9 or more rows, large weights of 8 bits never use small_m.cu."""
    precompile([("custom8-g64", n, 8192)])
    few = [program for program in precompiled if program.name == "small_m.cu"]
    tiles = {o for program in few for o in program.options if o.startswith("-DM_TILES")}
    assert tiles == {f"-DM_TILES={i}" for i in range(1, most_tiles + 1)}
    assert [program.name for program in precompiled].count("repack.cu") == 1


def test_1_bit_compiles_signs_and_codebooks(precompiled: list[Program]) -> None:
    precompile([("int1-g64", 4096, 4096)])
    options = {o for p in precompiled if p.name == "hopper_gemm.cu" for o in p.options}
    assert {"-DSIGNS=0", "-DSIGNS=1"} <= options
    assert [program.name for program in precompiled].count("repack.cu") == 1


def test_grids_compile_computed_and_looked_up_codes(precompiled: list[Program]) -> None:
    """Only a packed weight shows whether codes of int8 can be computed."""
    precompile([("int8-g64", 4096, 4096)], gradient=True)
    for name in ("hopper_gemm.cu", "hopper_dgrad.cu"):
        options = {o for p in precompiled if p.name == name for o in p.options}
        assert {"-DGRID_ZERO_POINT=127", "-DGRID_ZERO_POINT=-1"} <= options


def test_unsupported_layers_are_refused(precompiled: list[Program]) -> None:
    layers = [("nf4-g64", 64, 128), ("nf4-g16", 64, 128)]
    with pytest.raises(ValueError, match=r"nf4-g16 \[n=64, k=128\]: needs groups of .*, got 16"):
        precompile(layers)
    with pytest.raises(TypeError, match=r"bfloat16 or torch\.float16, got torch\.float32"):
        precompile(layers[:1], dtype=torch.float32)
    with pytest.raises(ValueError, match=r"precompile: n of nf4-g64 must be at least 0, got -64"):
        precompile([("nf4-g64", -64, 128)])
    assert precompiled == []
