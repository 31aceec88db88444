"""hopper_decode.cuh on the host: every register of operand A, bit for bit."""

import re
import shutil
import subprocess

import pytest
import torch
from marlin_compile import HOPPER

from fdk_cuda.marlin import MARLIN, MARLIN_LUT
from fdk_cuda.marlin.heuristics_hopper import hopper_shapes
from fdk_cuda.marlin.instantiations import KERNEL_DIRECTORY, Variant, hopper_program
from fdk_formats.format import Format
from fdk_formats.testing import random_quantised

N, K = 128, 256
BF16, FP16 = torch.bfloat16, torch.float16
# CUDA's built-ins and PTX instructions on the host: prmt with sign replication, conversions of bf16
# and fp16, products of pairs rounded to even. A shuffle returns the lane's own value.
HOST = """
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
using std::min;
#define __device__
#define __forceinline__ inline
#define asm(...)
#define __shfl_sync(mask, value, lane) (value)
#define __cvta_generic_to_shared(pointer) ((uint64_t)(pointer))
#define __cvta_shared_to_generic(address) nullptr
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
inline uint2 make_uint2(unsigned a, unsigned b) { return {a, b}; }
inline uint4 make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {a, b, c, d}; }
inline float __uint_as_float(unsigned x) { float v; memcpy(&v, &x, 4); return v; }
inline float __fmaf_rn(float a, float b, float c) { return a * b + c; }
inline unsigned __funnelshift_r(unsigned a, unsigned b, int n) {
  return n % 32 ? a >> n % 32 | b << (32 - n % 32) : a;
}
inline unsigned byte_permute(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = (uint64_t)b << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned nibble = selector >> 4 * i, byte = bytes >> 8 * (nibble & 7) & 0xFF;
    out |= (nibble & 8 ? byte >> 7 ? 0xFF : 0 : byte) << 8 * i;
  }
  return out;
}
inline float fp16_to_float(unsigned bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const float v = exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24);
  return bits & 0x8000 ? -v : v;
}
inline unsigned from_float(float v) {
  unsigned x;
  memcpy(&x, &v, 4);
  if (!FP16) return x + 0x7FFF + (x >> 16 & 1) >> 16;
  const int exponent = v == 0 ? -14 : std::max(ilogbf(v), -14);
  const unsigned ones = nearbyintf(ldexpf(fabsf(v), 10 - exponent));
  return (x >> 31 << 15) + (exponent + 14 << 10) + ones;
}
inline unsigned from_floats(float low, float high) {
  return from_float(low) | from_float(high) << 16;
}
inline unsigned join_values(unsigned low, unsigned high) { return low | high << 16; }
inline unsigned multiply_pair(unsigned a, unsigned b) {
  float values[2];
  for (int i = 0; i < 2; i++, a >>= 16, b >>= 16)
    values[i] = FP16 ? fp16_to_float(a & 0xFFFF) * fp16_to_float(b & 0xFFFF)
                     : __uint_as_float(a << 16) * __uint_as_float(b << 16);
  return from_floats(values[0], values[1]);
}
"""
# Prints, for each block, warp and lane, the rows of the registers and the registers. From 3 bits on
# the table has an entry per lane, with 5 bits four entries in 16 copies.
MAIN = """
#include "common/hopper_decode.cuh"
int main() {
  uint16 values[CODEBOOK_SIZE];
  fread(values, 2, CODEBOOK_SIZE, stdin);
  static unsigned table[256][64];
  for (int byte = 0; byte < 256; byte++)
    for (int copy = 0; copy < 64; copy++) {
      int low = byte % CODEBOOK_SIZE, high = byte / CODEBOOK_SIZE % CODEBOOK_SIZE;
      if (BITS == 5) {
        low = byte % 16 + copy / 16 % 2 * 16;
        high = byte / 16 + copy / 32 * 16;
      }
      table[byte][copy] = BITS > 5 ? values[low] : values[low] | values[high] << 16;
    }
  alignas(16) static uint8 block[BLOCK_BYTES];
  while (fread(block, 1, BLOCK_BYTES, stdin) == BLOCK_BYTES)
    for (int warp = 0; warp < 2; warp++)
      for (int lane = 0; lane < LANES; lane++) {
        const uint8* const entries = reinterpret_cast<const uint8*>(table);
        const HopperDecoder decoder(entries, Codebook(values, lane), warp, lane);
        uint32 a[STEPS][REGISTERS];
        decoder.decode(a, block);
        for (int i = 0; i < 2; i++) {
          const int row = 8 * (warp_octet(warp) + NEXT_OCTET * i) + lane / 4;
          fwrite(&row, 4, 1, stdout);
        }
        fwrite(a, 4, STEPS * REGISTERS, stdout);
      }
}
"""
# Definitions in the headers that HOST replaces.
DEFINED = (
    r"(__forceinline__ (?:uint32|float) |FDK_PAIR\()"
    r"(byte_permute|multiply_pair|fp16_to_float|from_floats|join_values)(?=[(,])"
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Copies the kernel's headers, with HOST's functions in place of inline assembly."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "common").mkdir()
    for path in KERNEL_DIRECTORY.glob("common/*.cuh"):
        text = path.read_text("utf-8").replace("asm volatile(", "asm(")
        text = re.sub(DEFINED, r"\1ptx_\2", text)
        half = "return static_cast<const uint8*>(__cvta_shared_to_generic(address));"
        text = text.replace(half, "return place + offset / 2;")
        (folder / "common" / path.name).write_text(text)
    (folder / "host.h").write_text(HOST)
    (folder / "main.cpp").write_text(MAIN)
    return folder


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("group_size", [64, 32])
@pytest.mark.parametrize(
    "codebook", [(0.7109375, -0.7109375), (-0.3125, 1.28125), (-2.0, -0.375, 0.5, 1.0)], ids=str
)
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(BF16, "bf16"), (BF16, "fp16"), (FP16, "fp16"), (FP16, "bf16"), (FP16, "fp32")],
    ids=str,
)
def test_every_register(sources, dtype, scale, codebook, group_size):
    torch.manual_seed(7)
    format = Format("custom", len(codebook) // 2, group_size, scale_dtype=scale)
    q = random_quantised(format, N, K)
    q.scale.copy_(0.5 + torch.rand(q.scale.shape))
    q.codebook.copy_(torch.tensor(codebook))
    layout = MARLIN_LUT.pack(q, dtype=dtype)
    assert layout.geometry.has_signs == (sum(codebook) == 0)
    check_registers(sources, q, layout, dtype, has_table=False)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("group_size", [64, 32])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("bits", range(3, 9))
def test_every_register_by_the_table(sources, bits, dtype, group_size):
    scale = "bf16" if dtype == BF16 else "fp16"
    q = random_quantised(Format("custom", bits, group_size, scale_dtype=scale), N, K, seed=bits)
    check_registers(sources, q, MARLIN_LUT.pack(q, dtype=dtype), dtype, has_table=True)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("group_size", [64, 32])
@pytest.mark.parametrize("bits", [6, 7, 8])
def test_every_register_of_affine_codes(sources, bits, group_size):
    """Codes are computed in the mantissa of a float."""
    q = random_quantised(Format("affine", bits, group_size, zero_point="int"), N, K, seed=bits)
    check_registers(sources, q, MARLIN.pack(q, dtype=BF16), BF16, has_table=False)


def check_registers(sources, q, layout, dtype, *, has_table):
    shape = hopper_shapes(layout.geometry, HOPPER)[-1]
    assert shape.has_table == has_table
    options = hopper_program(Variant.of(layout.geometry, dtype), shape).options
    command = ["g++", "-std=c++17", "-O1", "-w", "-I.", "-include", "host.h", *options, "main.cpp"]
    subprocess.run([*command, "-o", "main"], cwd=sources, check=True)
    given = [layout.codebook.view(torch.uint8), layout.packed.flatten()]
    data = torch.cat([part.contiguous() for part in given]).numpy().tobytes()
    out = subprocess.run([sources / "main"], input=data, capture_output=True, check=True).stdout
    decoded = torch.frombuffer(bytearray(out), dtype=torch.int32).view(N // 32, K // 64, 2, 32, 18)
    rows = decoded[..., :2]
    # Step 2 h + j // 2, register 2 (j % 2) + i, element e.
    a = decoded[..., 2:].contiguous().view(dtype).view(*decoded.shape[:4], 2, 2, 2, 2, 2)
    tile, block, t = (
        torch.arange(size).view(view)
        for size, view in ((N // 32, (-1, 1, 1, 1)), (K // 64, (-1, 1, 1)), (4, (1, 1, 1, -1)))
    )
    lanes = t.expand(1, 1, 8, 4).reshape(1, 1, 1, 32)
    weight = q.dequantise(dtype)
    for h, j, i, e in torch.cartesian_prod(*map(torch.arange, (2, 4, 2, 2))).tolist():
        row = 32 * tile + rows[..., i]
        column = 64 * block + 32 * h + 8 * j + 2 * lanes + e
        assert torch.equal(a[..., h, j // 2, j % 2, i, e], weight[row, column]), (h, j, i, e)
    # Four lanes hold each row of a block.
    assert rows[0, 0].flatten().bincount().tolist() == [4] * 32
