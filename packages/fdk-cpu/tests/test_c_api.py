"""The C library: installation, golden bytes on every instruction set, int8 and errors."""

import ctypes
import math
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fdk_cpu
from fdk_formats.int8 import int8_table

SOURCE = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "native" / "golden.txt"
BF16, FP32, U8 = 1, 3, 5  # of fdk_dtype
STRICT = ["-std=c11", "-Wall", "-Wextra", "-Wconversion", "-Werror"]
CONSUMER = """
cmake_minimum_required(VERSION 3.20)
project(consumer LANGUAGES C)
find_package(fdk-cpu 0.1 REQUIRED)
add_executable(linear {source})
target_link_libraries(linear PRIVATE fdk-cpu::fdk-cpu)
"""


def compile_c(source: Path, build: Path, folder: Path) -> Path:
    """Compile a C file against the library in a build folder and return the executable."""
    executable = folder / f"{source.stem}_c"
    command = ["cc", *STRICT, source, "-I", SOURCE / "native" / "api"]
    command += ["-L", build, "-lfdk_cpu", f"-Wl,-rpath,{build}", "-o", executable]
    subprocess.run(command, check=True)
    return executable


def run_pinned(executable: Path, isa: str) -> str:
    env = os.environ | {"FDK_CPU_ISA": isa}
    return subprocess.run([executable], env=env, check=True, capture_output=True, text=True).stdout


def test_cmake_package(prefix: Path, tmp_path: Path) -> None:
    text = CONSUMER.format(source=SOURCE / "examples" / "linear.c")
    (tmp_path / "CMakeLists.txt").write_text(text)
    configure = ["cmake", "-S", tmp_path, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}"]
    for command in (configure, ["cmake", "--build", tmp_path]):
        subprocess.run(command, check=True, capture_output=True)
    assert run_pinned(tmp_path / "linear", "scalar") == "scalar: 4 160\n"


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="needs pkg-config on PATH")
def test_pkg_config(prefix: Path, tmp_path: Path) -> None:
    (package,) = prefix.rglob("fdk-cpu.pc")
    env = os.environ | {"PKG_CONFIG_PATH": str(package.parent)}
    command = ["pkg-config", "--cflags", "--libs", "fdk-cpu"]
    flags = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    executable = tmp_path / "linear"
    rpath = f"-Wl,-rpath,{package.parents[1]}"
    source = SOURCE / "examples" / "linear.c"
    subprocess.run(["cc", *STRICT, source, *flags.split(), rpath, "-o", executable], check=True)
    assert run_pinned(executable, "scalar") == "scalar: 4 160\n"


@pytest.mark.parametrize("isa", fdk_cpu.instruction_sets())
def test_golden_bytes(native_build: Path, tmp_path: Path, isa: str) -> None:
    golden = compile_c(SOURCE / "tests" / "native" / "golden.c", native_build, tmp_path)
    assert run_pinned(golden, isa) == GOLDEN.read_text()


class Format(ctypes.Structure):
    """fdk_format."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("n", "k", "group_size")),
        *((name, ctypes.c_int) for name in ("bits", "scale_dtype", "zero_dtype")),
    )


class Int8Table(ctypes.Structure):
    """fdk_int8_table."""

    _fields_ = (
        ("levels", ctypes.c_int8 * 256),
        ("step", ctypes.c_float),
        ("offset", ctypes.c_float),
    )


AT, SIZE, INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
LINEAR = (AT, AT, SIZE, AT, INT, AT, SIZE, AT, AT, SIZE)
# Without types ctypes passes an int of Python as 32 bits, and a size_t on the stack has garbage
# above them.
ARGUMENTS = {
    "fdk_packed_size": (AT, AT),
    "fdk_pack": (AT, AT, AT, AT, AT, SIZE, SIZE),
    "fdk_linear": LINEAR,
    "fdk_linear_int8": LINEAR,
    "fdk_linear_grad_x": (AT, AT, SIZE, AT, INT, AT, SIZE, AT, SIZE),
    "fdk_make_int8_table": (AT, INT, AT),
    "fdk_set_isa": (ctypes.c_char_p,),
    "fdk_error": (),
}


@pytest.fixture
def library(native_build: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(native_build / "libfdk_cpu.so"))
    for name, types in ARGUMENTS.items():
        getattr(loaded, name).argtypes = types
    loaded.fdk_error.restype = ctypes.c_char_p
    return loaded


@pytest.mark.parametrize(
    ("format", "message"),
    [
        (Format(4, 64, 24, 4, FP32, 0), "k must be a multiple of the group size 24, got 64"),
        (Format(0, 64, 64, 4, FP32, 0), "n must be 1 to 2^28, got 0"),
        (Format(4, 64, 64, 9, FP32, 0), "bits must be 1 to 8, got 9"),
        (Format(4, 64, 64, 4, U8, 0), "scale_dtype: wanted bf16, fp16, fp32 or e8m0, got 5"),
        (Format(4, 64, 64, 4, FP32, 4), "zero_dtype: wanted none, bf16, fp16, fp32 or u8, got 4"),
    ],
)
def test_invalid_formats(library: ctypes.CDLL, format: Format, message: str) -> None:
    size = ctypes.c_size_t()
    assert library.fdk_packed_size(ctypes.byref(format), ctypes.byref(size)) != 0
    assert message in library.fdk_error().decode()


def test_invalid_pointers_and_sizes(library: ctypes.CDLL) -> None:
    format = ctypes.byref(Format(4, 128, 64, 4, FP32, 0))
    size = ctypes.c_size_t()
    assert library.fdk_packed_size(format, ctypes.byref(size)) == 0
    # 256 bytes of codes; 8 scales of 4 bytes, padded to a cache line.
    assert size.value == 256 + 64
    tensors = (bytes(256), bytes(32))
    block = ctypes.create_string_buffer(size.value)
    for arguments, message in (
        ((None, tensors[1], None, block, size, 1), "codes: wanted a pointer, got NULL"),
        ((*tensors, b"zeros", block, size, 1), "zeros: wanted NULL"),
        ((*tensors, None, block, ctypes.c_size_t(100), 1), "bytes: wanted 320, got 100"),
    ):
        assert library.fdk_pack(format, *arguments) != 0
        assert message in library.fdk_error().decode()
    assert library.fdk_linear(format, block, size, None, BF16, b"", 1, None, b"", 1) != 0
    assert library.fdk_error().decode() == "codebook: wanted a pointer, got NULL"
    memory = torch.zeros(64)
    at = memory.data_ptr()
    for function in (library.fdk_linear, library.fdk_linear_grad_x):
        bias = (None,) if function is library.fdk_linear else ()
        x, y = ("x", "y") if function is library.fdk_linear else ("grad_y", "grad_x")
        for offsets, short, message in (
            ((0, 0, 0), 64, "bytes: wanted 320, got 256"),
            ((2, 0, 0), 0, "codebook: wanted a multiple of 4 as its address, got one that is 2"),
            ((0, 1, 0), 0, f"{x}: wanted a multiple of 2 as its address, got one that is 1 more"),
            ((0, 0, 1), 0, f"{y}: wanted a multiple of 2 as its address, got one that is 1 more"),
        ):
            codebook, row, out = (ctypes.c_void_p(at + offset) for offset in offsets)
            bytes_ = ctypes.c_size_t(size.value - short)
            arguments = (codebook, BF16, row, 1, *bias, out, 1)
            assert function(format, block, bytes_, *arguments) != 0
            assert message in library.fdk_error().decode()
    shifted = ctypes.c_void_p(ctypes.addressof(block) + 1)
    assert library.fdk_pack(format, *tensors, None, shifted, size, 1) != 0
    assert "out: wanted a multiple of 4 as its address" in library.fdk_error().decode()
    assert library.fdk_set_isa(b"mmx") != 0
    assert "got mmx" in library.fdk_error().decode()


def c_int8_table(library: ctypes.CDLL, codebook: Tensor) -> tuple[Tensor, float, float]:
    """Return the levels, step and offset that the C API computes."""
    values = (ctypes.c_float * len(codebook))(*codebook.tolist())
    table = Int8Table()
    bits = len(codebook).bit_length() - 1
    assert library.fdk_make_int8_table(values, bits, ctypes.byref(table)) == 0
    assert not any(table.levels[len(codebook) :])
    return torch.tensor(table.levels[: len(codebook)]), table.step, table.offset


@pytest.mark.parametrize("bits", range(1, 9))
def test_int8_table(library: ctypes.CDLL, bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    for turn in range(40):
        codebook = torch.randn(1 << bits, generator=generator).sort().values
        codebook = (codebook + turn % 3) * 10.0 ** (turn % 7 - 3)
        levels, step, offset = c_int8_table(library, codebook)
        expected = int8_table(codebook)
        # Two values are exact in many tables, so at 1 bit only the values are compared.
        if bits > 1:
            assert torch.equal(levels, expected.levels.long())
            assert step == pytest.approx(expected.step, rel=1e-6)
            assert offset == pytest.approx(expected.offset, rel=1e-6, abs=1e-5)
        values = ((levels.double() - offset) * step).float()
        torch.testing.assert_close(
            values, expected.values, rtol=1e-6, atol=1e-6 * float(codebook.abs().max())
        )


@pytest.mark.parametrize(
    "values",
    [
        [0.0] * 4,
        [2.5] * 256,
        [-1e-30] * 2,
        [0.0, 0.0, 0.0, 1.0],
        [-3.0, -3.0, 5.0, 5.0],
        [-1.0, -0.5, 0.0, 0.5],
        [*range(256)],
        [-3e38, 0.0, 1.0, 3e38],
        [0.0, 1e-34, 2e-34, 3e-34],
    ],
    ids=lambda values: f"{len(values)}-{values[0]}-{values[-1]}",
)
def test_int8_table_degenerate(library: ctypes.CDLL, values: list[float]) -> None:
    codebook = torch.tensor(values, dtype=torch.float32)
    levels, step, offset = c_int8_table(library, codebook)
    got = ((levels.double() - offset) * step).float()
    expected = int8_table(codebook).values
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6 * float(codebook.abs().max()))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 9, 15])
def test_int8_table_not_finite(library: ctypes.CDLL, bad: float, at: int) -> None:
    codebook = torch.linspace(-1, 1, 16)
    codebook[at] = bad
    values = (ctypes.c_float * 16)(*codebook.tolist())
    table = Int8Table(step=3)
    assert library.fdk_make_int8_table(values, 4, ctypes.byref(table)) != 0
    said = f"codebook: wanted finite values, got {bad} at {at}"
    assert library.fdk_error().decode() == said
    assert table.step == 3
    assert math.isnan(int8_table(codebook).step)


def test_each_thread_has_its_own_error(library: ctypes.CDLL) -> None:
    def fail(name: bytes) -> tuple[str, str]:
        before = library.fdk_error().decode()
        assert library.fdk_set_isa(name) != 0
        return before, library.fdk_error().decode()

    ours = fail(b"ours")[1]
    with ThreadPoolExecutor(1) as pool:
        before, theirs = pool.submit(fail, b"theirs").result()
    assert before == ""
    assert "got theirs" in theirs
    assert library.fdk_error().decode() == ours
    assert library.fdk_set_isa(b"auto") == 0
    assert library.fdk_error().decode() == ours  # calls that succeed leave it
    assert len(fail(b"x" * 1000)[1]) == 511


@pytest.mark.parametrize("isa", fdk_cpu.instruction_sets())
def test_int8(library: ctypes.CDLL, isa: str) -> None:
    codes = bytes([0x1B] * 4 + [0xFF] * 4)  # 0 1 2 3 0 1 2 3 ... in row 0, 3 3 3 3 ... in row 1
    scales, bias = (ctypes.c_float * 2)(2, 10), (ctypes.c_float * 2)(0.5, 0)
    x = torch.stack((torch.ones(16), torch.ones(16), torch.zeros(16)))
    x[1, 7] = torch.nan
    table = Int8Table()
    assert (
        library.fdk_make_int8_table((ctypes.c_float * 4)(-1, 0, 0.5, 1), 2, ctypes.byref(table))
        == 0
    )
    assert library.fdk_set_isa(isa.encode()) == 0
    for zero_dtype, zeros, levels, first in (
        (0, None, ctypes.byref(table), [4.5, 160]),  # 4 (-1 + 0 + 0.5 + 1) 2 + 0.5 and 16 1 10
        (U8, bytes([1, 0]), None, [16.5, 480]),  # 4 (-1 + 0 + 1 + 2) 2 + 0.5 and 16 3 10
    ):
        format, size = ctypes.byref(Format(2, 16, 16, 2, FP32, zero_dtype)), ctypes.c_size_t()
        assert library.fdk_packed_size(format, ctypes.byref(size)) == 0
        block, y = torch.zeros(size.value, dtype=torch.uint8), torch.empty(3, 2)
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (block, x, y)]
        assert library.fdk_pack(format, codes, scales, zeros, pointers[0], size, 1) == 0
        arguments = (format, pointers[0], size, levels, FP32, pointers[1], 3, bias, pointers[2], 1)
        assert library.fdk_linear_int8(*arguments) == 0
        expected = torch.tensor([first, [torch.nan] * 2, [0.5, 0]])
        torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


def test_int8_invalid_arguments(library: ctypes.CDLL) -> None:
    codebook, table = (ctypes.c_float * 16)(), ctypes.byref(Int8Table())
    spoilt = (ctypes.c_float * 16)(0, 1, 2, math.nan)
    for arguments, message in (
        ((None, 4, table), "codebook: wanted a pointer, got NULL"),
        ((spoilt, 4, table), "codebook: wanted finite values, got nan at 3"),
        ((codebook, 4, None), "table: wanted a pointer, got NULL"),
        ((codebook, 9, table), "bits: wanted 1 to 8, got 9"),
        ((codebook, 0, table), "bits: wanted 1 to 8, got 0"),
    ):
        assert library.fdk_make_int8_table(*arguments) != 0
        assert library.fdk_error().decode() == message
    format, affine = (ctypes.byref(Format(4, 128, 64, 4, FP32, zero)) for zero in (0, U8))
    block, x, y = bytes(512), bytes(128 * 2), ctypes.create_string_buffer(8)
    for (form, at, *others), message in (
        ((format, block, None, BF16, x, 1, None, y, 1), "table: wanted a pointer, got NULL"),
        ((affine, block, table, BF16, x, 1, None, y, 1), "table: wanted NULL, for the format"),
        ((format, None, table, BF16, x, 1, None, y, 1), "block: wanted a pointer, got NULL"),
        ((format, block, table, U8, x, 1, None, y, 1), "dtype: wanted bf16, fp16 or fp32, got 5"),
        ((format, block, table, BF16, None, 1, None, y, 1), "x: wanted a pointer, got NULL"),
        ((format, block, table, BF16, x, 1, None, None, 1), "y: wanted a pointer, got NULL"),
    ):
        size = ctypes.c_size_t()
        assert library.fdk_packed_size(form, ctypes.byref(size)) == 0
        assert library.fdk_linear_int8(form, at, size, *others) != 0
        assert message in library.fdk_error().decode()
