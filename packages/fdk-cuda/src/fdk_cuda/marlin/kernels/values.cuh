// A lane's values of x, where four lanes share a group of 64: for digits.cu and planes.cu.
#pragma once
#include "common.cuh"

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

// Of a group's values, the largest magnitude and the sum. The whole warp makes it, four lanes to a
// group.
struct GroupRange {
  float largest, sum;

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
    largest = fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
    sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
      sum += __shfl_xor_sync(~0u, sum, lanes);
    }
  }
};
