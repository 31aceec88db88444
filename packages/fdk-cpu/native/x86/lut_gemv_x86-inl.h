// The lookup-table GEMV for codes of 1 and 2 bits: common to AVX2 and AVX-512.
//
// After T-MAC (Wei et al., 2024): four bits of a row are the codes of 4 or 2 positions. The 16 sums
// of x times value that they can stand for are computed once for all rows, so that one lookup
// replaces 4 or 2 products. The sums are 16-bit integers, scaled by a power of two per tile of x:
// the error of a sum is at most 2^-13 of the largest product.
//
// The largest x of a tile sets the rounding error, which is then large for a row of the weight that
// is zero there and sums only the rest of x. So a tile with such an outlier (kOutlier) is refused,
// and the plain GEMV is used.
//
// For x with a single nonzero, the sum is value times x, rounded. With x = 1 nothing is lost if the
// values of the codebook are within 2^5 (1 bit: 2^4) of each other; other codebooks are not
// supported.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/float_convert.h"
#include "common/kernels.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

// A tile is refused if half of its values are smaller than this times its largest. The sums of a
// tile have an error of 4e-4 of its largest product (RMS), 0.2 % of the sum of 128 values at this
// limit, about one bf16 rounding. In tests no row of normal or Laplace values was refused, but 4 %
// of the rows silu(a) * b with normal a and b were.
constexpr float kOutlier = 0x1p-6f;

// The exponent of the largest product as an integer, so that a sum of 4 or 2 fits 16 bits.
constexpr int largest_exponent(int bits) { return 11 + bits; }

// Four products of just 2^12 could reach 2^15, beyond the two bytes 255 * 127 + 255 of AVX-512; the
// factor prevents it.
int exponent_of_product(float largest) { return exponent_of(largest * 1.004f); }

float largest_value(const Weight& w) {
  float largest = 0;
  for (int c = 0; c < 1 << w.bits; c++) {
    const float magnitude = std::fabs(w.table[c]);
    if (!(magnitude < 0x1p30f)) return magnitude;  // NaN too, which std::max would drop
    largest = std::max(largest, magnitude);
  }
  return largest;
}

bool supports(const Weight& w) {
  if (w.bits > 2 || w.groups_per_tile > 4) return false;  // groups of 16 would share a table
  const float largest = largest_value(w);
  if (!(largest > 0x1p-30f && largest < 0x1p30f)) return false;
  const float to_integer = power_of_two(largest_exponent(w.bits) - exponent_of_product(largest));
  for (int c = 0; c < 1 << w.bits; c++) {
    const float scaled = w.table[c] * to_integer;
    if (scaled != float(int(scaled))) return false;
  }
  return true;
}

constexpr std::size_t kLine = 64;

// Prefetches go into L2, because the tables need the L1, unless L1 is named.
enum class Cache { l1, l2 };
template <Cache kCache = Cache::l2>
FDK_INLINE void prefetch(const void* from, std::size_t bytes) {
  constexpr auto kHint = kCache == Cache::l1 ? _MM_HINT_T0 : _MM_HINT_T1;
  for (std::size_t i = 0; i < bytes; i += kLine) {
    _mm_prefetch(static_cast<const char*>(from) + i, kHint);
  }
}

// Calls f with bits, groups per tile and whether there are zero points, as constants.
template <class F>
FDK_INLINE void with_kind(const Weight& w, F f) {
  const auto with_groups_of = [&](auto bits, auto affine) FDK_LAMBDA {
    switch (w.groups_per_tile) {
      case 1:
        return f(bits, Int<1>{}, affine);
      case 2:
        return f(bits, Int<2>{}, affine);
      default:
        return f(bits, Int<4>{}, affine);
    }
  };
  const auto with_zeros = [&](auto bits) FDK_LAMBDA {
    if (w.zeros != nullptr) return with_groups_of(bits, std::true_type{});
    return with_groups_of(bits, std::false_type{});
  };
  if (w.bits == 1) return with_zeros(Int<1>{});
  return with_zeros(Int<2>{});
}

}  // namespace
}  // namespace fdk
