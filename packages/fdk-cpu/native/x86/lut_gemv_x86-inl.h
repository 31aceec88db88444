// Tables over the activations, for 1 and 2 bits: what AVX2 and AVX-512 share.
//
// The idea is T-MAC's: four bits of a row hold the codes of 4 or 2 activations, and the 16 sums of
// activation times value that they may stand for are computed once, for all rows. A lookup then
// does 4 or 2 products. Here the sums are 16-bit integers, by a power of two for each tile of x, so
// that a sum errs by at most 2^-13 of the largest product.
//
// A row whose value is zero where x is largest errs by as much and has only the rest of x. So a
// tile whose values are mostly below its largest by more than kOutlier is refused: gemv takes x.
//
// Where x has one nonzero, the sum is value times x, rounded. With x = 1 nothing is rounded off if
// the values of the codebook lie within 2^5 (1 bit: 2^4) of each other; other codebooks are
// refused.
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

// How far half of the values of a tile may lie below its largest. The sums of a tile (32 of 4
// products) err by 4e-4 of its largest product (root mean square), and 128 values of 2^-6 of that
// make a sum of 0.18: 0.2 %, as one bf16 rounding. In a tile of normal values an outlier of 60
// deviations is always refused, one of 20 never. Of 3000 rows of 4096 normal or Laplace values none
// is refused, of silu(a) b with normal a and b 4 %.
constexpr float kOutlier = 0x1p-6f;

// The exponent of the largest product, as an integer: the sum of 4 or 2 of them fits 16 bits.
constexpr int largest_exponent(int bits) { return 11 + bits; }

// Four products of 2^12 and more reach 2^15, two bytes as AVX-512 has them 255 * 127 + 255: this
// much less.
int exponent_of_product(float largest) { return exponent_of(largest * 1.004f); }

float largest_value(const Weight& w) {
  float largest = 0;
  for (int c = 0; c < 1 << w.bits; c++) {
    const float magnitude = std::fabs(w.table[c]);
    if (!(magnitude < 0x1p30f)) return magnitude;  // NaN too: later values would hide it
    largest = std::max(largest, magnitude);
  }
  return largest;
}

bool takes(const Weight& w) {
  if (w.bits > 2 || w.groups_per_tile > 4) return false;  // groups of 16 share a table
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

// Into L2: the tables need the L1. Or into that.
enum class Cache { l1, l2 };
template <Cache kCache = Cache::l2>
FDK_INLINE void fetch(const void* from, std::size_t bytes) {
  constexpr auto kHint = kCache == Cache::l1 ? _MM_HINT_T0 : _MM_HINT_T1;
  for (std::size_t i = 0; i < bytes; i += kLine) {
    _mm_prefetch(static_cast<const char*>(from) + i, kHint);
  }
}

// Calls f with bits, groups of a tile, and whether there are zero points, as constants: of a weight
// that `takes` takes.
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
