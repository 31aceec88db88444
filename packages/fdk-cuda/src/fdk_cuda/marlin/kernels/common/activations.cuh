// x for gemv_int8_limbs.cu and gemv_bitplane.cu: four lanes share a group of 64 values.
#pragma once
#include "common/fragments.cuh"

constexpr int QUAD = 4;  // lanes that share a group

// Sixteen values of a lane, as stored in x.
struct Packed {
  uint4 halves[2];

  __forceinline__ void load(const uint16* group, int t) {
#pragma unroll
    for (int half = 0; half < 2; half++)
      halves[half] = *reinterpret_cast<const uint4*>(group + 32 * half + 8 * t);
  }
};

// The same as floats: x[s][i][e] is column 32 (s >> 1) + 8 t + 4 (s & 1) + 2 i + e.
struct Values {
  float x[STEPS][2][2];

  __forceinline__ explicit Values(const Packed& packed) {
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

// Exponent of the largest magnitude of a group, and the sum of its values. Constructed by the whole
// warp, four lanes to a group.
struct GroupRange {
  int found;     // biased exponent: 255 where a value is infinite
  int exponent;  // clamped: values below 2^-106 lose their last bits
  float sum;

  __forceinline__ explicit GroupRange(const Values& values) {
    // Four independent chains: two warps per scheduler hide little latency.
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

  // Returns the power of two that scales all values to below 2 to the power of `bits`.
  __forceinline__ float to_integers(int bits) const {
    return __int_as_float((253 + bits - exponent) << 23);
  }

  // Returns the power of two with a biased exponent, or NaN where a value is infinite.
  __forceinline__ float power_or_nan(int biased) const {
    return found == 255 ? __int_as_float(0x7FC00000) : __int_as_float(biased << 23);
  }
};
