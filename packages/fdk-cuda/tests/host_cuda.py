"""CUDA sources compiled by g++ and run on the host, one thread after another.

For code without barriers, shuffles and inline assembly. Index arithmetic is then tested as the
kernel has it, without a GPU.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from fdk_cuda.marlin.instantiations import KERNEL_DIRECTORY

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
HOST = """
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
using std::max;
using std::min;
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define asm(...)
#define __cvta_generic_to_shared(pointer) ((uint64_t)(pointer))
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct { unsigned x; } threadIdx, blockIdx, gridDim;
inline uint2 make_uint2(unsigned a, unsigned b) { return {a, b}; }
inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
#define __expf std::exp  // glibc has another function of this name
inline float __fdividef(float a, float b) { return a / b; }
inline float half_to_float(unsigned bits) {
  _Float16 half;
  memcpy(&half, &bits, 2);
  return half;
}
inline float __uint_as_float(unsigned x) { float v; memcpy(&v, &x, 4); return v; }
inline unsigned __funnelshift_l(unsigned a, unsigned b, int n) {
  return (((uint64_t)b << 32 | a) << n % 32) >> 32;
}
inline unsigned __funnelshift_r(unsigned a, unsigned b, int n) {
  return ((uint64_t)b << 32 | a) >> n % 32;
}
"""
# Inline assembly of functions that headers use themselves, and its meaning.
ASSEMBLY = {
    'asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(static_cast<uint16>(bits)))': (
        "out = half_to_float(bits)"
    ),
    'asm("mad.lo.u32 %0, %1, 65536, %2;" : "=r"(out) : "r"(high), "r"(low))': (
        "out = high * 65536 + low"
    ),
}


def build(folder: Path, main: str, options: tuple[str, ...]) -> Path:
    """Compiles a program that includes kernels and their headers.

    Args:
        folder: where to put it.
        main: source of the program.
        options: macros of the kernel.

    Returns:
        The executable.
    """
    for path in [*KERNEL_DIRECTORY.glob("*.cu"), *KERNEL_DIRECTORY.glob("common/*.cuh")]:
        copy = folder / path.relative_to(KERNEL_DIRECTORY)
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text("utf-8").replace("asm volatile(", "asm(")
        for assembly, meaning in ASSEMBLY.items():
            text = text.replace(assembly, meaning)
        copy.write_text(text, "utf-8")
    (folder / "host.h").write_text(HOST)
    (folder / "main.cpp").write_text(main)
    command = ["g++", "-std=c++17", "-O1", "-w", "-fsanitize=undefined", "-I.", "-include"]
    command += ["host.h", *options, "main.cpp", "-o", "main"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "main"


def run(program: Path, data: bytes, *arguments: int) -> bytes:
    """Runs a program with integers as arguments, and bytes as its input; returns its output."""
    done = subprocess.run([program, *map(str, arguments)], input=data, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert not done.stderr, done.stderr.decode()
    return done.stdout
