"""The backend ``cpu``: selection, layout, op, threads, memory and settings."""

import copy
import mmap
import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fdk_cpu
from fdk_cpu import _native
from fdk_cpu.linear import lut_linear_op
from fdk_cpu.memory import weight_memory
from fdk_formats import Format, QuantisedLinear, QuantisedTensor, quantise
from fdk_formats.backends import Problem, select
from fdk_formats.format import BITS
from fdk_formats.packing import pack, unpack
from fdk_formats.testing import layout_digest, nrmse, random_quantised

CPU = torch.device("cpu")
BACKEND = fdk_cpu.CpuBackend()


def problem(**changes: object) -> Problem:
    return replace(Problem(Format("nf", 4), 64, 128, torch.bfloat16, CPU), **changes)


def test_auto_selects_cpu() -> None:
    assert select(problem()).name == "cpu"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float64}, "needs activations of .*got torch.float64"),
        ({"device": torch.device("cuda")}, "needs tensors on the CPU, got cuda"),
        (
            {"dtype": torch.float64, "device": torch.device("cuda")},
            "needs tensors on the CPU, got cuda; needs activations of .*got torch.float64",
        ),
    ],
)
def test_unsupported(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        select(problem(**changes), "cpu")


def one_row(bits: int, codes: list[int]) -> QuantisedTensor:
    k = len(codes)
    return QuantisedTensor(
        format=Format("custom", bits, None),
        shape=(1, k),
        packed=pack(torch.tensor([codes], dtype=torch.uint8), bits),
        scale=torch.ones(1, 1, dtype=torch.bfloat16),
        codebook=torch.arange(1 << bits, dtype=torch.float32),
    )


def test_layout_at_4_bits_by_hand() -> None:
    # Position 32 s + j is nibble s of 16-bit lane j: 1 and 2 are nibble 0 of lanes 0 and 1, 3 (at
    # 32) is nibble 1 of lane 0, 4 (at 64) nibble 2, and 5 (at 96) nibble 3.
    codes = [0] * 128
    codes[0], codes[1], codes[32], codes[64], codes[96] = 1, 2, 3, 4, 5
    layout = fdk_cpu.CpuBackend().pack(one_row(4, codes), dtype=torch.bfloat16)
    assert layout.codes.shape == (256,)
    assert layout.codes[:4].tolist() == [0x31, 0x54, 0x02, 0x00]
    assert layout.codes[4:].sum() == 0
    assert layout.scale.tolist() == [1, 0, 0, 0]


def test_layout_at_3_bits_by_hand() -> None:
    # A plane of two bits (lane j, field s: position 16 s + j), 32 bytes for each of four rows, then
    # a plane of one (position 8 s + j), 16 bytes a row: code 7 at 17 sets all three.
    codes = [0] * 128
    codes[17] = 7
    layout = fdk_cpu.CpuBackend().pack(one_row(3, codes), dtype=torch.bfloat16)
    nonzero = layout.codes.nonzero().flatten().tolist()
    assert nonzero == [2, 128 + 2]
    assert layout.codes[nonzero].tolist() == [0b1100, 0b100]


def test_layout_bytes_do_not_depend_on_the_instruction_set() -> None:
    q = random_quantised(Format("custom", 5, 48), 13, 240)
    digests = set()
    for name in fdk_cpu.instruction_sets():
        fdk_cpu.set_instruction_set(name)
        layout = fdk_cpu.CpuBackend().pack(q, dtype=torch.bfloat16)
        digests.add(tuple(layout_digest(layout).items()))
    fdk_cpu.set_instruction_set("auto")
    assert len(digests) == 1


def test_opcheck() -> None:
    layout = fdk_cpu.CpuBackend().pack(
        random_quantised(Format("nf", 4), 24, 128), dtype=torch.float32
    )
    x = torch.randn(3, 128, requires_grad=True)
    args = (x, layout.codes, layout.scale, layout.codebook, None, 64, 4, False, None, 24, 128)
    torch.library.opcheck(lut_linear_op.op, args)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (1, lambda codes: codes[:-1], "codes must be 1536 bytes, got 1535"),
        (2, lambda scale: scale[:-4], "scales must be 96 bytes, got 88"),
        (2, lambda scale: scale[::2], r"scale must be contiguous .*, got strides \[2\] on cpu"),
        (1, lambda codes: codes.int(), r"codes must be torch\.uint8, got torch\.int32"),
        (2, lambda scale: scale.double(), r"scale must be .* or torch\.uint8, got torch\.float64"),
        (3, lambda codebook: codebook.double(), r"must be torch\.float32, got torch\.float64"),
        (3, lambda codebook: None, "needs a codebook or zero points, got neither"),
        (3, lambda codebook: codebook[:8], "codebook must be 64 bytes, got 32"),
        (6, lambda bits: 9, "bits must be 1 to 8, got 9"),
        (5, lambda group_size: 0, "group size"),
    ],
)
def test_op_rejects(index: int, change: object, message: str) -> None:
    layout = fdk_cpu.CpuBackend().pack(
        random_quantised(Format("nf", 4), 24, 128), dtype=torch.float32
    )
    tensors = layout.codes, layout.scale, layout.codebook, None
    args = [torch.randn(3, 128), *tensors, 64, 4, False, None]
    args[index] = change(args[index])  # type: ignore[operator]
    with pytest.raises((TypeError, ValueError), match=message):
        lut_linear_op(*args, 24, 128)


def test_layer() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 40).to(torch.bfloat16)
    layer = QuantisedLinear.from_linear(linear, "affine4-g32")
    assert layer.backend_name == "cpu"
    W_hat = quantise(linear.weight.detach(), "affine4-g32").dequantise(torch.bfloat16)
    x = torch.randn(5, 96, dtype=torch.bfloat16)
    expected = torch.nn.functional.linear(x.double(), W_hat.double(), linear.bias.double())
    torch.testing.assert_close(layer(x).double(), expected, atol=1e-2, rtol=1e-2)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(x), layer(x))


# The bf16 instructions treat subnormal inputs as zero.
FLUSHES_SUBNORMALS = {"avx512bf16", "amx"}


@pytest.mark.parametrize("isa", sorted(set(fdk_cpu.instruction_sets()) - FLUSHES_SUBNORMALS))
@pytest.mark.parametrize(("of_x", "of_scales"), [(1.0, 2.0**-129), (2.0**-30, 2.0**120)])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("codebook", ["custom", "int", "affine"])
def test_extreme_scales(isa: str, codebook: str, bits: int, of_x: float, of_scales: float) -> None:
    """Subnormal results are not flushed; a large scale alone gives no infinity."""
    q = random_quantised(Format(codebook, bits, 64, scale_dtype="fp32"), 24, 256)
    q = replace(q, scale=q.scale * of_scales)
    x = (torch.randn(1, 256) * of_x).to(torch.bfloat16)
    fdk_cpu.set_instruction_set(isa)
    try:
        y = fdk_cpu.CpuBackend().pack(q, dtype=x.dtype)(x)
    finally:
        fdk_cpu.set_instruction_set("auto")
    wanted = x.double() @ q.dequantise(torch.float32).double().T
    unit = 2.0**-133  # the smallest bf16
    assert (y - wanted).abs().max() <= max(unit, 2.0**-8 * wanted.abs().max().item())


def test_threads() -> None:
    assert fdk_cpu.num_threads() == torch.get_num_threads()
    fdk_cpu.set_num_threads(3)
    assert fdk_cpu.num_threads() == 3
    fdk_cpu.set_num_threads(None)
    assert fdk_cpu.num_threads() == torch.get_num_threads()
    with pytest.raises(ValueError, match="wanted 1 or more, or None, got 0"):
        fdk_cpu.set_num_threads(0)
    try:
        fdk_cpu.set_num_threads(300)
        assert fdk_cpu.num_threads() == 256
    finally:
        fdk_cpu.set_num_threads(None)


# The pool supports fork; from Python 3.12 os.fork warns if the process has any thread.
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_fork() -> None:
    layout = fdk_cpu.CpuBackend().pack(
        random_quantised(Format("nf", 4), 512, 256), dtype=torch.float32
    )
    x = torch.randn(1, 256)
    fdk_cpu.set_num_threads(2)
    try:
        expected = layout(x)  # start the pool's threads
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(layout(x), expected) else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    finally:
        fdk_cpu.set_num_threads(None)


def run_pinned(isa: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process with ``FDK_CPU_ISA`` set."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "FDK_CPU_ISA": isa},
        capture_output=True,
        text=True,
    )


def test_environment_variable_sets_the_instruction_set() -> None:
    code = "import fdk_cpu; print(fdk_cpu.instruction_set())"
    with pytest.raises(TypeError, match="wanted a name or 'auto', got None"):
        fdk_cpu.set_instruction_set(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"set_instruction_set: this machine runs .*, got sse9"):
        fdk_cpu.set_instruction_set("sse9")
    run = run_pinned("auto", code)
    assert run.returncode == 0
    assert run.stdout.strip() in fdk_cpu.instruction_sets()
    run = run_pinned("scalar", code)
    assert run.returncode == 0
    assert run.stdout.strip() == "scalar"
    run = run_pinned("sse9", code)
    assert "FDK_CPU_ISA: this machine runs scalar" in run.stderr
    assert "; wanted one of them or auto, got sse9" in run.stderr


@pytest.mark.skipif("amx" not in fdk_cpu.instruction_sets(), reason="needs AMX")
@pytest.mark.parametrize(("pinned", "used"), [("", "avx512bf16"), ("amx", None)])
def test_amx_without_permission(pinned: str, used: str | None) -> None:
    """Linux refuses AMX to a process with a small alternate signal stack."""
    code = """
import ctypes

class Stack(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(8192)
stack = Stack(ctypes.addressof(memory), 0, len(memory))
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
import fdk_cpu
print(fdk_cpu.instruction_set())
"""
    run = run_pinned(pinned, code)
    if used is None:
        why = "a thread has an alternate signal stack below AT_MINSIGSTKSZ"
        assert f"FDK_CPU_ISA: amx: Linux lets this process have no tiles: {why}" in run.stderr
    else:
        assert run.stdout.strip() == used, run.stderr


def _bytes_in_huge_pages(address: int) -> int:
    """Return how much of the mapping that contains the address is in huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= address < int(match[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no mapping contains the address")


def _has_huge_pages() -> bool:
    """Return whether Linux backs aligned, advised memory with huge pages throughout."""
    if not Path("/proc/self/smaps").is_file() or not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    size = 32 << 20  # more than the test below allocates at once
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[:] = 1
    return _bytes_in_huge_pages(array.ctypes.data + size // 2) >= size - 2 * _native.HUGE_PAGE


@pytest.mark.parametrize("format", ["custom1-g16", "affine8-g16"])  # 2 and 16 MiB of codes
def test_weights_are_in_huge_pages(format: str) -> None:
    if not _has_huge_pages():
        pytest.skip("Linux gives no huge pages")
    q = random_quantised(Format.parse(format), 4096, 4096)
    layout = fdk_cpu.CpuBackend().pack(q, dtype=torch.bfloat16)
    tensors = [layout.codes, layout.scale, layout.zero_point]  # 2 MiB of scales
    for tensor in (tensor for tensor in tensors if tensor is not None):
        assert tensor.data_ptr() % _native.HUGE_PAGE == 0
        assert _bytes_in_huge_pages(tensor.data_ptr()) >= tensor.nbytes
    unpacked = layout.unpack()
    assert torch.equal(unpacked.packed, q.packed)
    assert torch.equal(unpacked.scale, q.scale)
    for copied in (copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert torch.equal(copied.codes, layout.codes)


@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="needs /proc")
def test_mappings_of_weights_merge() -> None:
    """Linux allows 65,530 mappings; a mixture-of-experts model can have more weights."""
    maps = Path("/proc/self/maps")
    before = len(maps.read_text().splitlines())
    kept = [weight_memory(_native.HUGE_PAGE + 1, torch.uint8) for _ in range(200)]
    assert len(maps.read_text().splitlines()) < before + 50
    del kept


def test_allocation_failure() -> None:
    for count in (1 << 50, (1 << 63) - 1):
        with pytest.raises(RuntimeError, match=f"{count} bytes|alloc"):
            weight_memory(count, torch.uint8)
    with pytest.raises(MemoryError):
        _native.WeightMemory((1 << 64) - 5)


def test_read_sum_and_copy_memory() -> None:
    data = torch.arange(1 << 16, dtype=torch.int64)
    assert fdk_cpu.read_sum(data) == (1 << 15) * ((1 << 16) - 1)
    assert fdk_cpu.read_sum(torch.ones(13, dtype=torch.uint8)) == 13
    copy = torch.empty_like(data)
    fdk_cpu.copy_memory(data, copy)
    assert torch.equal(copy, data)
    with pytest.raises(ValueError, match="the copy must be"):
        fdk_cpu.copy_memory(data, copy[:-1])
    leaf = torch.ones(4, requires_grad=True)
    kept = torch.ones(4)
    y = (leaf * kept).sum()
    fdk_cpu.copy_memory(torch.zeros(4), kept)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with torch.inference_mode():
        fdk_cpu.copy_memory(torch.ones(4), found := torch.zeros(4))
    assert torch.equal(found, torch.ones(4))
    with pytest.raises(ValueError, match=r"data must be .*, got strides \[2\] on cpu"):
        fdk_cpu.read_sum(data[::2])


def test_copy_memory_rejects_overlap() -> None:
    data = torch.arange(8)
    for source, to in ((data[1:], data[:-1]), (data[:-1], data[1:]), (data, data)):
        with pytest.raises(ValueError, match="source and to must not overlap"):
            fdk_cpu.copy_memory(source, to)
    assert torch.equal(data, torch.arange(8))
    fdk_cpu.copy_memory(data[:4], data[4:])
    assert data.tolist() == [0, 1, 2, 3] * 2
    fdk_cpu.copy_memory(data[:0], data[:0])


def test_pack_rejects_unsupported_types() -> None:
    q, backend = random_quantised(Format("nf", 4), 24, 128), fdk_cpu.CpuBackend()
    with pytest.raises(TypeError, match=r"fdk_cpu: needs activations of .*, got torch\.float64"):
        backend.pack(q, dtype=torch.float64)
    with pytest.raises(ValueError, match="activations: wanted float or int8, got 'int4'"):
        backend.pack(q, dtype=torch.bfloat16, activations="int4")


def test_layouts_ignore_the_default_device() -> None:
    linear, x = torch.nn.Linear(128, 16), torch.randn(2, 128)
    wanted = QuantisedLinear.from_linear(linear, "affine4-g64", backend="cpu")
    with torch.device("meta"):
        layer = QuantisedLinear.from_linear(linear, "affine4-g64", backend="cpu")
        state = layer.state_dict()
        layer.load_state_dict(state)
    assert {tensor.device for tensor in state.values()} == {CPU}
    assert torch.equal(layer(x), wanted(x))


@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("format", ["int4-g64", "affine3-g32"])
def test_layer_without_outputs(format: str, activations: str) -> None:
    linear = torch.nn.Linear(64, 16)
    linear.weight, linear.bias = (torch.nn.Parameter(t[:0]) for t in (linear.weight, linear.bias))
    layer = QuantisedLinear.from_linear(linear, format, backend="cpu", activations=activations)
    x = torch.randn(3, 64, requires_grad=True)
    y = layer(x)
    assert y.shape == (3, 0)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.abs().max() == 0
    with torch.no_grad():
        assert layer(x[0]).shape == (0,)
    assert layer.quantised.packed.shape == (0, 64 * layer.format.bits // 8)


def test_layer_copies_its_codebook() -> None:
    q, x = quantise(torch.randn(8, 64), "int4-g64"), torch.ones(1, 64)
    layer = QuantisedLinear.from_quantised(q, backend="cpu", dtype=torch.float32)
    y = layer(x)
    q.codebook.zero_()
    layer.state_dict()["weight_codebook"].zero_()
    assert torch.equal(layer(x), y)


def test_padding_is_finite() -> None:
    codebook = torch.tensor([-1e5, -1e3, -1, 0, 0.5, 1, 7e4, 1e5])
    weight = torch.randn(4, 128)
    q = quantise(weight, "custom3-g16", codebook=codebook)
    layout = BACKEND.pack(q, dtype=torch.float16)
    assert layout(torch.ones(1, 128).half()).isfinite().all()
    q = quantise(weight[:, :64], "custom3-g16", codebook=codebook)
    with pytest.raises(
        ValueError, match=r"entry that torch.float16 holds, .*, got -100000 and k=64"
    ):
        BACKEND.pack(q, dtype=torch.float16)


@pytest.mark.parametrize("k", [128, 100])
def test_dtypes_share_the_bytes(isa: str, k: int) -> None:
    """A layout packed for one dtype gives what one packed for the dtype of x gives."""
    q = random_quantised(Format("nf", 4, None), 24, k)
    layout = BACKEND.pack(q, dtype=torch.float32)
    assert layout.dtypes == (torch.bfloat16, torch.float16, torch.float32)
    for dtype in layout.dtypes:
        own, x = BACKEND.pack(q, dtype=dtype), torch.randn(3, k).to(dtype)
        assert layout_digest(own) == layout_digest(layout)
        assert torch.equal(own(x), layout(x))


def test_dtypes_without_one_that_overflows() -> None:
    q = random_quantised(Format("custom", 4, None), 24, 100)
    q.codebook[0] = -1e5  # type: ignore[index]
    layout = BACKEND.pack(q, dtype=torch.bfloat16)
    assert layout.dtypes == (torch.bfloat16, torch.float32)
    with pytest.raises(ValueError, match=r"first codebook entry that torch.float16 holds"):
        BACKEND.pack(q, dtype=torch.float16)
    assert (
        torch.float16
        in BACKEND.pack(
            replace(random_quantised(Format("custom", 4, None), 24, 128), codebook=q.codebook),
            dtype=torch.float16,
        ).dtypes
    )


# (largest magnitude of codebook or zero points, of scales, of x): sums of codebook values times x
# exceed float32, weights and outputs do not.
EXTREMES = [(2.0**110, 2.0**-110, 2.0**17), (2.0**126, 2.0**-100, 1.0), (1.0, 2.0**-20, 2.0**122)]


@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize(("values", "scales", "xs"), EXTREMES)
@pytest.mark.parametrize("codebook", ["custom", "affine"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_that_overflow_before_their_scale(
    isa: str,
    codebook: str,
    values: float,
    scales: float,
    xs: float,
    dtype: torch.dtype,
    activations: str,
) -> None:
    for bits in (1, 2, 4, 8):
        q = random_quantised(Format(codebook, bits, 32, scale_dtype="fp32"), 21, 128)
        changes = {"scale": q.scale * scales}
        for name in ("codebook", "zero_point"):
            tensor = getattr(q, name)
            if tensor is not None:
                changes[name] = (tensor.float() / tensor.float().abs().max() * values).to(
                    torch.float32 if name == "codebook" else tensor.dtype
                )
        if codebook == "affine":
            q = replace(q, format=replace(q.format, zero_point="float"))
        q = replace(q, **changes)
        layout = BACKEND.pack(q, dtype=dtype, activations=activations)
        for m in (1, 3, 40):
            x = (torch.rand(m, 128) * xs).to(dtype)
            exact = x.double() @ q.dequantise(torch.float32).double().T
            y = layout(x)
            assert y.isfinite().all(), (bits, m)
            error = (y.double() - exact).norm() / exact.norm()
            assert error < (0.03 if activations == "int8" else 0.01), (bits, m, error)


def test_repair_keeps_other_outputs() -> None:
    """NaN in one row leaves the bits of the others, and infinity stays infinite."""
    q = random_quantised(Format("custom", 4, 32), 21, 128)
    layout = BACKEND.pack(q, dtype=torch.float32)
    x = torch.randn(3, 128)
    y = layout(x)
    spoilt = x.clone()
    spoilt[1, 5], spoilt[2, 7] = torch.nan, torch.inf
    found = layout(spoilt)
    assert torch.equal(found[0], y[0])
    assert found[1].isnan().all()
    assert not found[2].isfinite().any()


@pytest.mark.parametrize("bits", [5, 6, 7, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grid_that_repeats_its_last_value(isa: str, bits: int, dtype: torch.dtype) -> None:
    """The last two codes of a symmetric grid have one value; files may use either."""
    grid = quantise(torch.ones(1, 64), f"int{bits}-g64").codebook
    assert grid is not None
    assert grid[-1] == grid[-2]
    q = replace(random_quantised(Format.parse(f"int{bits}-g64"), 12, 256), codebook=grid)
    assert (unpack(q.packed, bits, 256) == 2**bits - 1).any()
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = x.double() @ q.dequantise(torch.float32).double().T
    got = BACKEND.pack(q, dtype=dtype)(x)
    assert nrmse(got, wanted) < (5e-3 if dtype == torch.bfloat16 else 1e-5)
