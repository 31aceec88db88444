// Finds the largest value and the outliers of a tile of x: AVX2.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstdint>

#include "common/layout.h"

namespace fdk {
namespace {

constexpr std::size_t kFloats = 8;  // per register

// The largest magnitude of a tile; NaN counts as larger than infinity.
[[maybe_unused]] float largest_of(const float* tile) {
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
  __m256i largest = _mm256_setzero_si256();
  for (std::size_t i = 0; i < kTileK; i += kFloats) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + i));
    // Compared as integers, magnitudes keep their order.
    largest = _mm256_max_epi32(largest, _mm256_and_si256(x, magnitude));
  }
  alignas(32) int lanes[kFloats];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), largest);
  return std::bit_cast<float>(*std::max_element(lanes, lanes + kFloats));
}

// True if at least half of the nonzero values of a tile are below `limit`. Zeros are exact in any
// unit: one-hot x has no outlier.
[[maybe_unused]] bool mostly_below(const float* tile, float limit) {
  const __m256 top = _mm256_set1_ps(limit), zero = _mm256_setzero_ps();
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
  int small = 0, others = 0;
  for (std::size_t i = 0; i < kTileK; i += kFloats) {
    const __m256 x = _mm256_and_ps(_mm256_loadu_ps(tile + i), magnitude);
    const int below = _mm256_movemask_ps(_mm256_cmp_ps(x, top, _CMP_LT_OQ));
    const int there = _mm256_movemask_ps(_mm256_cmp_ps(x, zero, _CMP_NEQ_OQ));
    small += std::popcount(unsigned(below & there));
    others += std::popcount(unsigned(~below & there));
  }
  return small != 0 && small >= others;
}

}  // namespace
}  // namespace fdk
