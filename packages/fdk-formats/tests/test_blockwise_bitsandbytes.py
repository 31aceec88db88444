"""Blockwise ops compared with bitsandbytes. docs/guide/blockwise.md lists the differences.

bitsandbytes has three implementations. Its torch backend is the oracle, without an exception. Its
CPU library and its CUDA kernels are compared too, wherever they mean the same thing.
"""

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch

from fdk_formats.blockwise import (
    NestedAbsmax,
    QuantisedBlocks,
    dequantise_4bit,
    dequantise_blockwise,
    dynamic_map,
    four_bit_code,
    quantise_4bit,
    quantise_blockwise,
)
from fdk_formats.testing.blockwise import beside_midpoints

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes, the oracle, is missing")
default_ops = pytest.importorskip("bitsandbytes.backends.default.ops")

# Block sizes of bitsandbytes at 4 bits. At 8 bits it accepts any, its CUDA kernels these except 32.
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
BLOCK_SIZES_8BIT = (*BLOCK_SIZES, 1, 7, 16, 48, 100, 8192, 500_000)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CUDA_BYTES = Path(__file__).parent / "data" / "bitsandbytes_cuda.npz"

_OPS = {
    name: getattr(torch.ops.bitsandbytes, name).default
    for name in ("quantize_4bit", "quantize_blockwise", "dequantize_4bit", "dequantize_blockwise")
}
_TORCH_BACKEND = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)


def torch_backend(name, *arguments):
    return _OPS[name].redispatch(_TORCH_BACKEND, *arguments)


def cpu_library(name, *arguments):
    return _OPS[name](*arguments)


def awkward(size, dtype, scale=1.0):
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)) * scale
    values[64:256] = 0
    values[300:330] = -0.0
    values[-1:] = 0  # also a tail of one element
    return values.to(dtype)


def assert_same_bytes(got, wanted):
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    assert got.contiguous().view(-1).view(torch.uint8).equal(wanted.view(-1).view(torch.uint8))


def tables():
    return {
        "signed": bitsandbytes.functional.create_dynamic_map(),
        "unsigned": bitsandbytes.functional.create_dynamic_map(signed=False),
        "linear": bitsandbytes.functional.create_linear_map(),
        "fp8": bitsandbytes.functional.create_fp8_map(),
    }


def test_tables():
    assert_same_bytes(dynamic_map(), tables()["signed"])
    assert_same_bytes(dynamic_map(signed=False), tables()["unsigned"])
    for kind in ("nf4", "fp4"):
        wanted = bitsandbytes.functional.get_4bit_type(kind, device="cpu")
        assert_same_bytes(four_bit_code(kind), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_quantise_4bit_equals_torch(kind, block_size, dtype):
    for size in (0, 1, 2, 31, 64, 65, 4095, 4097, 300_001):
        for scale in (1.0, 1e-4, 1e-39):
            x = awkward(size, dtype, scale)
            packed, absmax = torch_backend("quantize_4bit", x, block_size, kind, torch.uint8)
            q = quantise_4bit(x, block_size, kind)
            assert_same_bytes(q.packed, packed)
            assert_same_bytes(q.absmax, absmax)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES_8BIT)
@pytest.mark.parametrize("table", ["signed", "unsigned", "linear", "fp8"])
def test_quantise_blockwise_equals_torch(table, block_size, dtype):
    code = tables()[table]
    for size in (0, 1, 31, 64, 65, 4097, 300_001):
        for scale in (1.0, 1e-4, 1e-39):
            x = awkward(size, dtype, scale)
            packed, absmax = torch_backend("quantize_blockwise", x, code, block_size)
            q = quantise_blockwise(x, code, block_size)
            assert_same_bytes(q.packed, packed)
            assert_same_bytes(q.absmax, absmax)


def test_midpoints_equal_torch():
    for kind in ("nf4", "fp4"):
        x = beside_midpoints(four_bit_code(kind).sort().values)
        packed, _ = torch_backend("quantize_4bit", x, 4096, kind, torch.uint8)
        assert_same_bytes(quantise_4bit(x, 4096, kind).packed, packed)
    for code in tables().values():
        x = beside_midpoints(code)
        packed, _ = torch_backend("quantize_blockwise", x, code, 4096)
        assert_same_bytes(quantise_blockwise(x, code).packed, packed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 64, 65, 16_384, 100_001])
def test_nested_equals_torch(size, dtype, monkeypatch):
    # The functions of bitsandbytes, with their op redirected to the torch implementation.
    def redirected(x, code, block_size):
        return torch_backend("quantize_blockwise", x, code, block_size)

    x = awkward(size, dtype)
    monkeypatch.setattr(torch.ops.bitsandbytes.quantize_blockwise, "default", redirected)
    for kind in ("nf4", "fp4"):
        packed, state = bitsandbytes.functional.quantize_4bit(
            x, quant_type=kind, compress_statistics=True
        )
        assert_same_nested(quantise_4bit(x, kind=kind, nested=True), packed, state)
    for block_size in BLOCK_SIZES_8BIT:
        packed, state = bitsandbytes.functional.quantize_blockwise(
            x, blocksize=block_size, nested=True
        )
        assert_same_nested(quantise_blockwise(x, None, block_size, nested=True), packed, state)


def assert_same_nested(q, packed, state):
    assert_same_bytes(q.packed, packed)
    assert_same_bytes(q.absmax, state.absmax)
    assert_same_bytes(q.code, state.code)
    assert_same_bytes(q.nested.absmax, state.state2.absmax)
    assert_same_bytes(q.nested.code, state.state2.code)
    assert_same_bytes(q.nested.offset, state.offset)
    assert q.nested.block_size == state.state2.blocksize
    assert q.block_size == state.blocksize
    assert q.dtype == state.dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_dequantise_4bit_equals_both_implementations(block_size, dtype):
    for kind in ("nf4", "fp4"):
        for shape in ((3, 700), (5, 4096), (1, 2)):
            x = awkward(shape[0] * shape[1], torch.float32).view(shape)
            q = quantise_4bit(x, block_size, kind)
            arguments = q.absmax, block_size, kind, x.shape, dtype
            back = dequantise_4bit(q, dtype)
            assert torch.equal(back, cpu_library("dequantize_4bit", q.packed, *arguments))
            # Not compiled, which would take seconds.
            plain = inspect.unwrap(default_ops._dequantize_4bit_compute)
            code = q.code, block_size, x.shape, dtype
            assert_same_bytes(back, plain(q.packed.view(-1), q.absmax, *code))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES_8BIT)
def test_dequantise_blockwise_equals_both_implementations(block_size, dtype):
    for code in tables().values():
        x = awkward(10_001, torch.float32)
        q = quantise_blockwise(x, code, block_size)
        arguments = q.packed, q.absmax, q.code, block_size, dtype
        back = dequantise_blockwise(q, dtype)
        assert_same_bytes(back, cpu_library("dequantize_blockwise", *arguments))
        plain = inspect.unwrap(default_ops._dequantize_blockwise_compute)
        assert_same_bytes(back, plain(*arguments))


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_dequantise_nested_equals_bitsandbytes(kind):
    x = awkward(100_000, torch.bfloat16).view(100, 1000)
    packed, state = bitsandbytes.functional.quantize_4bit(
        x, quant_type=kind, compress_statistics=True
    )
    wanted = bitsandbytes.functional.dequantize_4bit(packed, state)
    assert torch.equal(dequantise_4bit(quantised_from(packed, state)), wanted)


def quantised_from(packed, state):
    """Converts a state of bitsandbytes to QuantisedBlocks."""
    nested = NestedAbsmax(
        absmax=state.state2.absmax,
        code=state.state2.code,
        offset=state.offset,
        block_size=state.state2.blocksize,
    )
    return QuantisedBlocks(
        packed=packed,
        absmax=state.absmax,
        code=state.code,
        shape=state.shape,
        dtype=state.dtype,
        block_size=state.blocksize,
        kind=state.quant_type,
        nested=nested,
    )


@pytest.mark.parametrize("block_size", [1, 16, 48, 100, 8192])
def test_its_4_bit_functions_take_powers_of_two_only(block_size):
    # Why ours do: if this fails, bitsandbytes has widened them.
    with pytest.raises(ValueError, match="invalid blocksize"):
        bitsandbytes.functional.quantize_4bit(torch.ones(64), blocksize=block_size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 48, 100, *BLOCK_SIZES, 8192])
def test_quantise_blockwise_equals_the_cpp_library_away_from_midpoints(block_size, dtype):
    # The library rounds values to 65,536 even steps: within a step of a midpoint the code may be
    # the neighbour's, and several entries near zero share a step.
    x = torch.randn(200_003, generator=torch.Generator().manual_seed(1)).to(dtype)
    code = dynamic_map()
    q = quantise_blockwise(x, block_size=block_size)
    packed, absmax = cpu_library("quantize_blockwise", x, code, block_size)
    assert_same_bytes(q.absmax, absmax)
    scaled = x.float() / absmax.repeat_interleave(block_size)[: len(x)]
    midpoints = (code[:-1] + code[1:]) / 2
    nearest = torch.bucketize(scaled, midpoints).clamp(1, 254)
    gap = torch.minimum(
        (scaled - midpoints[nearest]).abs(), (scaled - midpoints[nearest - 1]).abs()
    )
    clear = gap > 2 / 65535
    assert torch.equal(q.packed[clear], packed[clear])
    assert clear.float().mean() > 0.98
    ours, theirs = (code[codes.long()].sub(scaled).double().norm() for codes in (q.packed, packed))
    assert ours < theirs


def test_the_cpp_library_does_not_keep_zero():
    # The reason that we do not store its 8-bit codes. If this fails, bitsandbytes has fixed it.
    packed, _ = cpu_library("quantize_blockwise", torch.tensor([0.0, 1.0]), dynamic_map(), 64)
    assert dynamic_map()[packed[0].long()] != 0
    assert dequantise_blockwise(quantise_blockwise(torch.tensor([0.0, 1.0])))[0] == 0


@pytest.fixture
def cuda_bytes():
    with np.load(CUDA_BYTES) as stored:
        return {name: torch.from_numpy(stored[name]) for name in stored.files}


def nonzero_blocks(values):
    return values.view(-1, 64).any(dim=1)


def test_nf4_equals_the_cuda_kernel(cuda_bytes):
    values = cuda_bytes["values"]
    q = quantise_4bit(values)
    keep = nonzero_blocks(values)
    assert_same_bytes(q.absmax, cuda_bytes["absmax_nf4"])
    stored = cuda_bytes["packed_nf4"].view(-1, 32)
    assert torch.equal(q.packed.view(-1, 32)[keep], stored[keep])
    # CUDA stores code 0 for a block of zeros, which is -1 times an absmax of 0.
    assert not keep.all()
    assert set(stored[~keep].flatten().tolist()) == {0x00}
    assert set(q.packed.view(-1, 32)[~keep].flatten().tolist()) == {0x77}


def test_fp4_equals_the_cuda_kernel_except_for_the_sign_of_zero(cuda_bytes):
    values = cuda_bytes["values"]
    q = quantise_4bit(values, kind="fp4")
    assert_same_bytes(q.absmax, cuda_bytes["absmax_fp4"])

    def codes(packed):
        both = torch.stack((packed >> 4, packed & 15), dim=1).view(-1)
        return torch.where(both == 8, 0, both)

    assert torch.equal(codes(q.packed.view(-1)), codes(cuda_bytes["packed_fp4"]))
    assert not torch.equal(q.packed.view(-1), cuda_bytes["packed_fp4"])


@pytest.mark.parametrize(("table", "zero"), [("s8", 127), ("u8", 0)])
def test_8_bit_equals_the_cuda_kernel(cuda_bytes, table, zero):
    signed = table == "s8"
    values = cuda_bytes["values"] if signed else cuda_bytes["values"].abs()
    q = quantise_blockwise(values, dynamic_map(signed), 64)
    keep = nonzero_blocks(values)
    assert_same_bytes(q.absmax, cuda_bytes[f"absmax_{table}"])
    stored = cuda_bytes[f"packed_{table}"].view(-1, 64)
    assert torch.equal(q.packed.view(-1, 64)[keep], stored[keep])
    assert set(stored[~keep].flatten().tolist()) == {0}
    assert set(q.packed.view(-1, 64)[~keep].flatten().tolist()) == {zero}
