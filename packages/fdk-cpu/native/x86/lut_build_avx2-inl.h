// Tables over the activations, for 1 and 2 bits: AVX2.
//
// The integers are those of table_values.h, and looked up as unsigned bytes, low and high ones
// apart.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "x86/activations_avx2-inl.h"
#include "common/kernels.h"
#include "common/simd-inl.h"
#include "x86/lut_gemv_x86-inl.h"

namespace fdk {
namespace {

constexpr int kBytesOfHalf = 16;  // of a row, that one register of 16 rows has in each half
constexpr int kNibbles = 2;
constexpr int kRunCount = 4;    // of 32 positions, a tile: byte b and nibble q are of 2 (b % 2) + q
constexpr int kBias = 1 << 15;  // of the sums, which are looked up as unsigned bytes
// What is kept of a tile of x.
template <int kBits>
struct alignas(64) TileTables {
  // At byte b and nibble q, low bytes and then high ones.
  std::uint8_t sums[kBytesOfHalf][kNibbles][2][16 * kBits];
  float x_sums[kRunCount][kFloats];  // of x, by group: for zero points
  float unit;                        // of the sums
};

// Where position p of a tile lies in x, of each 16 positions the even ones first.
constexpr std::size_t place_of(std::size_t p) { return p / 16 * 16 + p % 2 * 8 + p % 16 / 2; }

// The sums of one table, as bytes of 16 entries: `low`, and the high ones.
template <int kBits>
FDK_INLINE void build_table(const float* x, std::size_t first, const __m256 (*values)[2],
                            std::uint8_t* low, std::uint8_t* high) {
  constexpr int kCodes = 4 / kBits;                      // of a table
  constexpr std::size_t kStep = 8 * std::size_t(kBits);  // from one's position to the next
  __m256 sums[2] = {_mm256_set1_ps(kBias), _mm256_set1_ps(kBias)};
  FDK_UNROLL
  for (int i = 0; i < kCodes; i++) {
    const __m256 of_x = _mm256_broadcast_ss(x + place_of(first + std::size_t(i) * kStep));
    sums[0] = _mm256_fmadd_ps(of_x, values[i][0], sums[0]);
    sums[1] = _mm256_fmadd_ps(of_x, values[i][1], sums[1]);
  }
  // Entries 0 to 3, 8 to 11, 4 to 7 and 12 to 15.
  const __m256i words =
      _mm256_packus_epi32(_mm256_cvtps_epi32(sums[0]), _mm256_cvtps_epi32(sums[1]));
  const __m256i bytes = _mm256_packus_epi16(_mm256_and_si256(words, _mm256_set1_epi16(255)),
                                            _mm256_srli_epi16(words, 8));
  const __m256i in_order =
      _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm_store_si128(reinterpret_cast<__m128i*>(low), _mm256_castsi256_si128(in_order));
  _mm_store_si128(reinterpret_cast<__m128i*>(high), _mm256_extracti128_si256(in_order, 1));
}

template <int kBits>
void build_tables(const float* x, const __m256 (*values)[2], TileTables<kBits>& out) {
  for (std::size_t b = 0; b < std::size_t(kBytesOfHalf); b++) {
    for (std::size_t q = 0; q < std::size_t(kNibbles); q++) {
      for (std::size_t half = 0; half < std::size_t(kBits); half++) {
        const std::size_t first = 64 * (b % 2) + 32 * q + b / 2 + 8 * half;
        std::uint8_t (*to)[16 * kBits] = out.sums[b][q];
        build_table<kBits>(x, first, values, to[0] + 16 * half, to[1] + 16 * half);
      }
    }
  }
}

// Sums of x by group, for each half of a register.
template <int kBits>
void sum_groups(const float* x, std::size_t groups, TileTables<kBits>& out) {
  const std::size_t width = kTileK / groups, step = 8 * std::size_t(kBits);
  for (std::size_t g = 0; g < groups; g++) {
    float sums[2] = {0, 0};
    for (std::size_t p = g * width; p < (g + 1) * width; p++) {
      sums[p % step / 8] += x[place_of(p)];
    }
    for (std::size_t i = 0; i < kFloats; i++) out.x_sums[g][i] = sums[kBits == 1 ? 0 : i / 4];
  }
}

// x :: [tiles * kTileK] float32. False where x has what these integers cannot hold: NaN and
// infinity, a tile of nothing but very small numbers, or outliers.
template <int kBits>
bool build_tiles(const Weight& w, const float* x, TileTables<kBits>* out) {
  constexpr int kCodes = 4 / kBits;
  const float largest_of_table = largest_value(w);
  __m256 values[kCodes][2];  // at index e, of the i-th code in e
  for (int i = 0; i < kCodes; i++) {
    alignas(32) float entries[16];
    for (int e = 0; e < 16; e++) {
      entries[e] = w.table[e >> (kBits * i) & ((1 << kBits) - 1)];
    }
    values[i][0] = _mm256_load_ps(entries);
    values[i][1] = _mm256_load_ps(entries + 8);
  }
  for (std::size_t tile = 0; tile < w.tiles; tile++, x += kTileK, out++) {
    const float largest = largest_of(x);
    if (!(largest < 0x1p90f) || (largest < 0x1p-80f && largest != 0)) return false;
    if (mostly_below(x, largest * kOutlier)) return false;
    const int exponent = largest == 0 ? 0 : exponent_of_product(largest * largest_of_table);
    const __m256 factor = _mm256_set1_ps(power_of_two(largest_exponent(kBits) - exponent));
    alignas(32) float scaled[kTileK];
    for (std::size_t i = 0; i < kTileK; i += kFloats) {
      _mm256_store_ps(scaled + i, _mm256_mul_ps(_mm256_loadu_ps(x + i), factor));
    }
    build_tables<kBits>(scaled, values, *out);
    out->unit = power_of_two(exponent - largest_exponent(kBits));
    if (w.zeros != nullptr) sum_groups(x, w.groups_per_tile, *out);
  }
  return true;
}

}  // namespace
}  // namespace fdk
