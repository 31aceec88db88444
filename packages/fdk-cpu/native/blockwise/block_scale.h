// Splits a row into blocks and scales them.
//
// The arithmetic follows bitsandbytes' torch backend step by step, because every rounding changes
// bytes: a full block is multiplied by the reciprocal of its absmax, a short last block is divided
// by it, and only the absmax of the short one is stored raised to kSmallestAbsmax.
#pragma once

#include <algorithm>
#include <cstddef>

#include "blockwise/blockwise.h"

namespace fdk {
namespace {

constexpr float kSmallestAbsmax = float(1e-38);  // subnormal; its reciprocal is finite

// The values of a block are multiplied with `factor`, or divided by it.
struct BlockScale {
  float factor;
  bool divides;
};

[[maybe_unused]] inline bool short_block(std::size_t n, std::size_t block, std::size_t begin) {
  return n - begin / block * block < block;
}

// NaN stays NaN.
[[maybe_unused]] inline float raised(float absmax) {
  return absmax < kSmallestAbsmax ? kSmallestAbsmax : absmax;
}

[[maybe_unused]] inline float stored_absmax(const QuantiseTask& task, std::size_t begin,
                                            float absmax) {
  return short_block(task.n, task.block, begin) ? raised(absmax) : absmax;
}

[[maybe_unused]] inline BlockScale scale_of(const QuantiseTask& task, std::size_t begin) {
  const float absmax = task.absmax[begin / task.block];
  if (short_block(task.n, task.block, begin)) return {absmax, true};
  return {1.0f / raised(absmax), false};
}

[[maybe_unused]] inline std::size_t rank_of(const NearestCode& nearest, float value) {
  const float* end = nearest.midpoints + nearest.entries - 1;
  return std::size_t(std::lower_bound(nearest.midpoints, end, value) - nearest.midpoints);
}

// Quantises blocks [begin, end) with the two functions of a kernel.
template <class Absmax, class Encode>
inline void quantise_each(const QuantiseTask& task, std::size_t begin, std::size_t end,
                          Absmax absmax, Encode encode) {
  for (std::size_t i = begin; i < end; i++) {
    const std::size_t first = i * task.block, last = std::min(task.n, first + task.block);
    task.absmax[i] = stored_absmax(task, first, absmax(task, first, last));
    encode(task, first, last);
  }
}

// Calls f(block, first, last) for the part of each block within values [begin, end).
template <class F>
inline void each_block(std::size_t block, std::size_t begin, std::size_t end, F f) {
  while (begin < end) {
    const std::size_t i = begin / block, last = std::min(end, (i + 1) * block);
    f(i, begin, last);
    begin = last;
  }
}

}  // namespace
}  // namespace fdk
