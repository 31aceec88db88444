// Scales on Hopper, forward and dgrad: properties of the format, scaling, computed codes, and
// values kept in registers.
#pragma once
#include "common/decode.cuh"

// Macros, set by Python:
//   HAS_TABLE         1 where codes are looked up
//   GRID_ZERO_POINT   8 bits: 127 or 128, to be subtracted from a code of an integer grid; else -1
//   SIGNS             1 where the codebook of 1 bit is -c and c, and HAS_TABLE is 0
//   WHOLE_ZERO_POINT  1 where zero points are integers from 0 to 255
constexpr bool IS_GRID = GRID_ZERO_POINT >= 0;
static_assert(!IS_GRID || (BITS == 8 && !AFFINE));
static_assert(!IS_GRID || GRID_ZERO_POINT == 127 || GRID_ZERO_POINT == 128);
constexpr bool HAS_ZERO_POINT = AFFINE || IS_GRID;
// H200, 8192 x 8192, affine: 8 bits, 1024 rows 213 us -> 180; but 4 bits, 64 rows 21.9 -> 23.0.
constexpr bool COMPUTES_CODES = HAS_ZERO_POINT && BITS > 5;
// The zero point of a grid, in the dtype.
constexpr uint32 GRID_VALUE =
    GRID_ZERO_POINT == 128 ? (FP16 ? 0x5800 : 0x4300) : (FP16 ? 0x57F0 : 0x42FE);
constexpr uint32 GRID_PAIR = GRID_VALUE * 0x10001u;
// The product of two values of the dtype, rounded once, equals that of float32 rounded. The
// difference of a code and an integer zero point is exact in either dtype.
constexpr bool SCALES_IN_DTYPE = (!AFFINE || WHOLE_ZERO_POINT) && SCALE_TYPE == FP16;
static_assert(!SIGNS || (BITS == 1 && !AFFINE && !HAS_TABLE));
constexpr bool BY_SIGNS = SIGNS && SCALES_IN_DTYPE;
// The eight rows, of a consumer's 64, that are a warp's rows g; and the distance to its rows g + 8.
__forceinline__ int warp_octet(int warp) { return BY_SIGNS ? 4 * (warp / 2) + warp % 2 : 2 * warp; }
constexpr int NEXT_OCTET = BY_SIGNS ? 2 : 1;

// Scale and zero point of one row, in half a block.
struct RowScale {
  uint32 scale_pair, zero_point_pair;  // where SCALES_IN_DTYPE
  float scale, zero_point;

  __forceinline__ uint32 apply(uint32 values) const {
    if (SCALES_IN_DTYPE) {
      if (HAS_ZERO_POINT) values = subtract_pair(values, zero_point_pair);
      return multiply_pair(values, scale_pair);
    }
    float low = to_float(values & 0xFFFFu), high = to_float(values >> 16);
    if (HAS_ZERO_POINT) {
      low -= zero_point;
      high -= zero_point;
    }
    return from_floats(low * scale, high * scale);
  }
};

// Keeps a value in a register: the compiler cannot see through a shuffle, and would otherwise
// recompute a lane's offsets in each step.
__forceinline__ uint32 keep(uint32 value, int lane) { return __shfl_sync(~0u, value, lane); }

// The same for a value that is equal in all lanes, which the compiler would keep in a uniform
// register and move before each use.
__forceinline__ uint32 keep_same(uint32 value, int lane) { return keep(value + lane, lane) - lane; }

// A power of two whose last mantissa bit counts 1, as a pair: 1024 or 128. In a register, because a
// second immediate costs LOP3 a second instruction.
__forceinline__ uint32 ones_place(int lane) {
  return keep(lane == 0 ? FP16 ? 0x64006400u : 0x43004300u : 0u, 0);
}

// Converts codes in the lower bits of each half to values; other bits are ignored.
__forceinline__ uint32 codes_to_values(uint32 codes, uint32 ones) {
  constexpr uint32 CODE = (CODEBOOK_SIZE - 1) * 0x10001u;
  if (FP16) return subtract_pair((codes & CODE) | ones, 0x64006400u);
  // 8 bits: seven bits of a code, minus 128 unless the eighth is set.
  const uint32 excess = BITS == 8 ? (~codes & 0x00800080u) * 0x86u : 0x43004300u;
  return subtract_pair((codes & (CODE & 0x007F007Fu)) | ones, excess);
}
