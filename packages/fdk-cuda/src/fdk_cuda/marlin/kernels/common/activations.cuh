// A lane's values of x, where four lanes share a group of 64: for gemv_int8_limbs.cu and
// gemv_bitplane.cu.
#pragma once
#include "common/fragments.cuh"

constexpr int QUAD = 4;  // lanes that share a group

// A lane's sixteen values of a group, as they lie in x.
struct Packed {
  uint4 halves[2];

  __device__ __forceinline__ void load(const uint16* group, int t) {
#pragma unroll
    for (int half = 0; half < 2; half++)
      halves[half] = *reinterpret_cast<const uint4*>(group + 32 * half + 8 * t);
  }
};

// The same: x[s][i][e] is column 32 (s >> 1) + 8 t + 4 (s & 1) + 2 i + e.
struct Values {
  float x[STEPS][2][2];

  __device__ __forceinline__ explicit Values(const Packed& packed) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint4& v = packed.halves[half];
      const uint32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int word = 0; word < 4; word++) {
        float (&pair)[2] = x[2 * half + word / 2][word % 2];
        pair[0] = FP16 ? fp16_to_float(words[word]) : __uint_as_float(words[word] << 16);
        pair[1] =
            FP16 ? fp16_to_float(words[word] >> 16) : __uint_as_float(words[word] & 0xFFFF0000u);
      }
    }
  }
};

// Of a group's values, the largest magnitude's exponent and the sum. The whole warp makes it, four
// lanes to a group.
struct GroupRange {
  int found;     // the exponent, as floats hold it: 255 where a value is infinite
  int exponent;  // the one that is taken: below 2^-106 values lose the last of their bits
  float sum;

  __device__ __forceinline__ explicit GroupRange(const Values& values) {
    // By four, not one after another: two warps to a scheduler hide little.
    float most[STEPS] = {}, sums[STEPS] = {};
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
        most[s] = fmaxf(most[s], fabsf(values.x[s][i >> 1][i & 1]));
        sums[s] += values.x[s][i >> 1][i & 1];
      }
    float largest = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
    sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
#pragma unroll
    for (int lanes = 1; lanes < QUAD; lanes *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
      sum += __shfl_xor_sync(~0u, sum, lanes);
    }
    found = __float_as_int(largest) >> 23;
    exponent = max(found, 21);
  }

  // The power of two by which values become less than 2 to `bits`.
  __device__ __forceinline__ float to_integers(int bits) const {
    return __int_as_float((253 + bits - exponent) << 23);
  }

  // The power of two with this exponent, but NaN where a value is infinite.
  __device__ __forceinline__ float power_or_nan(int biased) const {
    return found == 255 ? __int_as_float(0x7FC00000) : __int_as_float(biased << 23);
  }
};
