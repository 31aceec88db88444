"""libfdk_cpu from C: the example, golden bytes on every instruction set, and what is refused."""

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

import fdk_cpu

SOURCE = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "native" / "golden.txt"
BF16, FP32, U8 = 1, 3, 5  # of fdk_dtype


def compile_c(source: Path, build: Path) -> Path:
    """The executable of a C file, compiled as its users would, with warnings as errors."""
    executable = build / f"{source.stem}_c"
    command = ["cc", "-std=c11", "-Wall", "-Wextra", "-Wconversion", "-Werror", source]
    command += ["-I", SOURCE / "native", "-L", build, "-lfdk_cpu", "-o", executable]
    subprocess.run([*command, f"-Wl,-rpath,{build}"], check=True)
    return executable


def output_of(executable: Path, isa: str) -> str:
    env = os.environ | {"FDK_CPU_ISA": isa}
    return subprocess.run([executable], env=env, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("isa", fdk_cpu.instruction_sets())
def test_example(native_build: Path, isa: str) -> None:
    example = compile_c(SOURCE / "examples" / "linear.c", native_build)
    assert output_of(example, isa) == f"{isa}: 4 160\n"


@pytest.mark.parametrize("isa", fdk_cpu.instruction_sets())
def test_golden_bytes(native_build: Path, isa: str) -> None:
    golden = compile_c(SOURCE / "tests" / "native" / "golden.c", native_build)
    assert output_of(golden, isa) == GOLDEN.read_text()


class Format(ctypes.Structure):
    """fdk_format."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("n", "k", "group_size")),
        *((name, ctypes.c_int) for name in ("bits", "scale_dtype", "zero_dtype")),
    )


@pytest.fixture
def library(native_build: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(native_build / "libfdk_cpu.so"))
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
def test_formats_are_refused(library: ctypes.CDLL, format: Format, message: str) -> None:
    size = ctypes.c_size_t()
    assert library.fdk_packed_size(ctypes.byref(format), ctypes.byref(size)) != 0
    assert message in library.fdk_error().decode()


def test_pointers_and_sizes_are_refused(library: ctypes.CDLL) -> None:
    format = ctypes.byref(Format(4, 128, 64, 4, FP32, 0))
    size = ctypes.c_size_t()
    assert library.fdk_packed_size(format, ctypes.byref(size)) == 0
    # 256 bytes of codes; 8 scales of 4 bytes, filled up to a cache line.
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
    assert library.fdk_linear(format, block, None, BF16, b"", 1, None, b"", 1) != 0
    assert library.fdk_error().decode() == "codebook: wanted a pointer, got NULL"
    assert library.fdk_set_isa(b"mmx") != 0
    assert "got mmx" in library.fdk_error().decode()
