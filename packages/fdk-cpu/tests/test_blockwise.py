"""The blockwise kernels on every instruction set give the same bytes as the torch kernels and as
bitsandbytes' torch backend.
"""

import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode

import fdk_cpu
from fdk_cpu import _native
from fdk_cpu.blockwise import KERNELS
from fdk_formats.blockwise import (
    TORCH_KERNELS,
    dequantise_4bit,
    dequantise_blockwise,
    dynamic_map,
    four_bit_code,
    quantise_4bit,
    quantise_blockwise,
)
from fdk_formats.testing.blockwise import beside_midpoints, check_kernels

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TORCH_BACKEND = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)


def normal(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def same(got: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> bool:
    return all(
        one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(got, wanted, strict=True)
    )


def test_by_hand(isa: str) -> None:
    x = torch.tensor([-2.0, 2, 0, 1, 0.66, -1.04])
    packed, absmax = KERNELS.quantise_4bit(x, "nf4", 64)
    assert packed.tolist() == [0x0F, 0x7C, 0xB2]
    assert absmax.tolist() == [2.0]
    # (-0.0026, 0] gets code 0 and (0, 0.0026] code 8: both are zero.
    x = torch.tensor([1.0, -1, 0, -0.002, 0.002, -0.0])
    assert KERNELS.quantise_4bit(x, "fp4", 32)[0].tolist() == [0x3B, 0x00, 0x80]
    packed, absmax = KERNELS.quantise_8bit(torch.tensor([0.0, 4, -4, 0]), dynamic_map(), 4)
    assert packed.tolist() == [127, 255, 0, 127]
    values = KERNELS.dequantise_8bit(packed, absmax, dynamic_map(), 4, torch.float32)
    assert values.tolist() == [0, 4, 4 * dynamic_map()[0].item(), 0]


def test_equals_torch_kernels(isa: str) -> None:
    check_kernels(KERNELS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [64, 4096])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_4bit_equals_bitsandbytes(isa: str, kind: str, block_size: int, dtype: torch.dtype) -> None:
    ops = bitsandbytes_ops()
    for size in (1, 64, 4097, 300_001):
        x = normal(size, seed=size)
        x[64:256] = 0
        x = x.to(dtype)
        packed, absmax = ops.quantize_4bit.default.redispatch(
            TORCH_BACKEND, x, block_size, kind, torch.uint8
        )
        assert same(KERNELS.quantise_4bit(x, kind, block_size), (packed.view(-1), absmax))
    # An odd row length would go through torch.compile in bitsandbytes.
    q = quantise_4bit(normal(5 * 700).view(5, 700), block_size, kind)
    wanted = ops.dequantize_4bit.default(q.packed, q.absmax, block_size, kind, q.shape, dtype)
    assert torch.equal(dequantise_4bit(q, dtype), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 7, 256, 500_000])
@pytest.mark.parametrize("table", ["signed", "unsigned", "linear", "fp8"])
def test_8bit_equals_bitsandbytes(
    isa: str, table: str, block_size: int, dtype: torch.dtype
) -> None:
    ops, tables = bitsandbytes_ops(), pytest.importorskip("bitsandbytes").functional
    code = {
        "signed": tables.create_dynamic_map,
        "unsigned": lambda: tables.create_dynamic_map(signed=False),
        "linear": tables.create_linear_map,
        "fp8": tables.create_fp8_map,
    }[table]()
    for size in (1, 257, 4097, 100_001):
        x = normal(size, seed=size)
        x[64:256] = 0
        x = x.to(dtype)
        op = ops.quantize_blockwise.default
        packed, absmax = op.redispatch(TORCH_BACKEND, x, code, block_size)
        assert same(KERNELS.quantise_8bit(x, code, block_size), (packed, absmax))
        back = KERNELS.dequantise_8bit(packed, absmax, code, block_size, dtype)
        op = ops.dequantize_blockwise.default
        assert torch.equal(back, op(packed, absmax, code, block_size, dtype))


def bitsandbytes_ops():
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    return torch.ops.bitsandbytes


@pytest.mark.parametrize("spread", [1e-3, 0.0])
def test_midpoints_that_share_a_key(isa: str, spread: float) -> None:
    code = (0.7 + spread * torch.linspace(-1, 1, 256)).to(torch.float32)
    code[0], code[255] = -1, 1
    x = torch.cat((beside_midpoints(code), normal(5001)))
    wanted = TORCH_KERNELS.quantise_8bit(x, code, 300)
    assert same(KERNELS.quantise_8bit(x, code, 300), wanted)


def test_code_beyond_one(isa: str) -> None:
    code = torch.linspace(-300, 300, 256)
    code[:3] = torch.tensor([-3.4e38, -3.3e38, -3e38])
    x = normal(4001)
    wanted = TORCH_KERNELS.quantise_8bit(x, code, 64)
    assert same(KERNELS.quantise_8bit(x, code, 64), wanted)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_long_rows_and_blocks(threads: int) -> None:
    x = normal(3_000_001).to(torch.bfloat16)
    fdk_cpu.set_num_threads(threads)
    try:
        for block_size in (48, 64, 1000, 200_000, 3_000_001, 1 << 62):
            wanted = TORCH_KERNELS.quantise_8bit(x, dynamic_map(), block_size)
            assert same(KERNELS.quantise_8bit(x, dynamic_map(), block_size), wanted)
            arguments = *wanted, dynamic_map(), block_size, torch.float16
            back = TORCH_KERNELS.dequantise_8bit(*arguments)
            assert torch.equal(KERNELS.dequantise_8bit(*arguments), back)
        four = TORCH_KERNELS.quantise_4bit(x, "nf4", 4096)
        assert same(KERNELS.quantise_4bit(x, "nf4", 4096), four)
        arguments = *four, four_bit_code("nf4"), 4096, len(x), torch.float32
        back = TORCH_KERNELS.dequantise_4bit(*arguments)
        assert torch.equal(KERNELS.dequantise_4bit(*arguments), back)
    finally:
        fdk_cpu.set_num_threads(None)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_not_finite(isa: str, value: float) -> None:
    for size, block_size in ((1000, 64), (1000, 4096), (400_000, 200_000)):
        x = normal(size)
        x[size - 3] = value
        with pytest.raises(ValueError, match="got a NaN or an infinity"):
            quantise_blockwise(x, block_size=block_size)
    with pytest.raises(ValueError, match="in elements 64 to 127"):
        quantise_4bit(torch.tensor([1.0] * 70 + [value] + [1.0] * 200).to(torch.float16))


def test_ops_use_native_kernels_without_import() -> None:
    code = (
        "import sys, torch, fdk_formats;"
        "assert 'fdk_cpu' not in sys.modules;"
        "fdk_formats.quantise_blockwise(torch.ones(10));"
        "from fdk_formats.blockwise import kernels_for;"
        "from fdk_cpu.blockwise import KERNELS;"
        "assert kernels_for(torch.device('cpu')) is KERNELS"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_keeps_registered_kernels() -> None:
    code = (
        "import torch;"
        "from fdk_formats.blockwise import TORCH_KERNELS, kernels_for, register_kernels;"
        "register_kernels('cpu', TORCH_KERNELS);"
        "import fdk_cpu;"
        "assert kernels_for(torch.device('cpu')) is TORCH_KERNELS"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_sizes_are_checked() -> None:
    x, code = torch.ones(10), dynamic_map()
    nearest = _native.NearestCode((code.data_ptr(), code.nbytes), bytes(range(256)))
    sized = (x.data_ptr(), x.nbytes)
    with pytest.raises(ValueError, match="packed must be 10 bytes, got 40"):
        nearest.quantise("fp32", sized, 64, sized, sized, 1)
    with pytest.raises(ValueError, match="blocks of 0"):
        nearest.quantise("fp32", sized, 0, sized, sized, 1)
    with pytest.raises(ValueError, match="there is no such code"):
        _native.NearestCode((code.data_ptr(), 64), bytes([16] * 16))
    with pytest.raises(ValueError, match="blocks have 4 or 8 bits"):
        _native.dequantise_blocks(3, sized, "fp32", sized, sized, 64, sized, 1)


# The op runs once without a limit, then with 2 MiB more address space than its result needs.
# Resident memory would vary by megabytes from run to run.
LIMITED = """
import resource, sys, torch
from fdk_formats.blockwise import *

def limit(extra):
    with open("/proc/self/statm") as sizes:
        now = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + extra, resource.RLIM_INFINITY))

torch.set_num_threads(2)
x = torch.randn(4096, 4096)
q8, q4 = quantise_blockwise(x), quantise_4bit(x)
run = {
    "quantise_blockwise": lambda: quantise_blockwise(x),
    "quantise_4bit": lambda: quantise_4bit(x),
    "dequantise_blockwise": lambda: dequantise_blockwise(q8),
    "dequantise_4bit": lambda: dequantise_4bit(q4),
}[sys.argv[1]]
nbytes = run().nbytes
limit(nbytes - (2 << 20))
try:
    run()
    print("without a limit")
except RuntimeError:
    limit(nbytes + (2 << 20))
    run()
    print("enough")
"""
# Map each large allocation anew and return it to the system when freed.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_ARENA_MAX": "1"}


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux to limit the address space")
@pytest.mark.parametrize(
    "op", ["quantise_blockwise", "quantise_4bit", "dequantise_blockwise", "dequantise_4bit"]
)
def test_needs_no_extra_memory(op: str) -> None:
    command, environment = [sys.executable, "-c", LIMITED, op], os.environ | MALLOC
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.stdout == "without a limit\n":
        pytest.skip("needs a malloc that respects RLIMIT_AS")
    assert done.stdout == "enough\n", done.stderr


def test_round_trip_of_any_shape() -> None:
    x = normal(1200).view(3, 20, 20).transpose(0, 2)
    for nested in (False, True):
        back = dequantise_blockwise(quantise_blockwise(x, nested=nested))
        assert (back - x).norm() < 0.02 * x.norm()
        back = dequantise_4bit(quantise_4bit(x, nested=nested), torch.bfloat16)
        assert (back - x).norm() < 0.12 * x.norm()


def test_negative_views():
    x = torch.complex(normal(640), normal(640, seed=1)).conj().imag
    assert x.is_neg()
    assert torch.equal(quantise_blockwise(x).packed, quantise_blockwise(x.clone()).packed)
    assert torch.equal(quantise_4bit(x).packed, quantise_4bit(x.clone()).packed)


def test_tracing_uses_torch_kernels():
    q = quantise_4bit(normal(640))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert dequantise_4bit(q).shape == (640,)
    compiled = torch.compile(dequantise_4bit, fullgraph=True, backend="eager")
    assert torch.equal(compiled(q), dequantise_4bit(q))
