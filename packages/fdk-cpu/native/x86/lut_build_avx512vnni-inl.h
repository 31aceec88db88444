// Tables over the activations, for 1 and 2 bits: AVX-512 with VBMI and VNNI.
//
// The integers are those of table_values.h. They are looked up in two bytes, 255 high + low
// (`vpermb`, 4 tables a register, 16 rows at a time), and `vpdpbusd` multiplies the bytes by 1 and
// 255 and adds them up.
//
// Table j of a step of 32 positions is over positions j, j + 8, j + 16 and j + 24 at 1 bit, and j
// and j + 16 at 2.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cstddef>
#include <cstdint>

#include "common/kernels.h"
#include "common/simd-inl.h"
#include "x86/lut_gemv_x86-inl.h"

namespace fdk {
namespace {

constexpr int kSteps = 4;  // of 32 positions, a tile
constexpr std::size_t kStep = kTileK / kSteps;
// Registers of tables of a step.
template <int kBits>
inline constexpr int kRegisters = 2 * kBits;

// Where table j of a step lies: table i of register t. At 2 bits it is where a transposition of
// dwords leaves the codes of positions j.
struct Place {
  std::size_t t, i;
};
template <int kBits>
constexpr Place place_of(std::size_t j) {
  return kBits == 1 ? Place{j / 4, j % 4} : Place{j % 8 / 2, j / 8 * 2 + j % 2};
}

// What is kept of a tile of x.
template <int kBits>
struct alignas(64) TileTables {
  std::uint8_t sums[kSteps][kRegisters<kBits>][2][64];  // low bytes, then high ones
  float x_sums[kSteps];                                 // of x, by group: for zero points
  float unit;                                           // of the sums
};

// The tables of a step over x[0] to x[31].
template <int kBits>
FDK_INLINE void build_step(const float* x, const __m512* values, std::uint8_t (*out)[2][64]) {
  constexpr std::size_t kTables = 8 * std::size_t(kBits);
  constexpr int kCodes = 4 / kBits;  // of a table
  FDK_UNROLL
  for (std::size_t j = 0; j < kTables; j++) {
    __m512 sum = _mm512_mul_ps(_mm512_set1_ps(x[j]), values[0]);
    FDK_UNROLL
    for (int i = 1; i < kCodes; i++) {
      sum = _mm512_fmadd_ps(_mm512_set1_ps(x[j + std::size_t(i) * kTables]), values[i], sum);
    }
    // v is 255 high + low, low a byte without sign: 256 a + b is 255 a + (a + b), and where a + b
    // is no such byte, one more or less of 255.
    const __m512i v = _mm512_cvtps_epi32(sum);
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(v, _mm512_srai_epi32(v, 8)), 8);
    const __m512i low = _mm512_add_epi32(v, high);  // but for 256 high
    constexpr auto place = place_of<kBits>;
    __m128i* to = reinterpret_cast<__m128i*>(out[place(j).t][0]) + place(j).i;
    _mm_store_si128(to, _mm512_cvtepi32_epi8(low));
    _mm_store_si128(to + 4, _mm512_cvtepi32_epi8(high));
  }
}

// Whether half or more of the values of a tile that are not zero are small beside its largest.
// Zeros are exact in any unit: one-hot x has no outlier.
bool has_outlier(const float* tile, float largest) {
  const __m512 limit = _mm512_set1_ps(largest * kOutlier), zero = _mm512_setzero_ps();
  int small = 0, others = 0;
  for (std::size_t i = 0; i < kTileK; i += 16) {
    const __m512 magnitudes = _mm512_abs_ps(_mm512_load_ps(tile + i));
    const __mmask16 below = _mm512_cmp_ps_mask(magnitudes, limit, _CMP_LT_OQ);
    small += std::popcount(_mm512_mask_cmp_ps_mask(below, magnitudes, zero, _CMP_NEQ_OQ));
    others += std::popcount(std::uint16_t(~below));
  }
  return small != 0 && small >= others;
}

// Stripes [first, stop), of so many bytes each, fetched in that many shares.
class Shares {
 public:
  Shares(const void* stripes, std::size_t bytes, std::size_t first, std::size_t stop,
         std::size_t shares)
      : from_(static_cast<const std::uint8_t*>(stripes) + first * bytes),
        left_((stop - first) * bytes),
        share_(ceil_div(left_, shares * kLine) * kLine) {}
  void fetch_one() {
    const std::size_t now = left_ < share_ ? left_ : share_;
    fetch(from_, now);
    from_ += now;
    left_ -= now;
  }

 private:
  const std::uint8_t* from_;
  std::size_t left_, share_;
};

// x :: [tiles * kTileK] bf16. False where x has what these integers cannot hold: NaN and infinity,
// a tile of nothing but very small numbers, or outliers. Stripes [first, stop) are fetched
// meanwhile (4096 x 4096, 1 bit, cold, one thread: 93 -> 90 us, 2 bits 175 -> 169).
template <int kBits>
bool build_tiles(const Weight& w, const std::uint16_t* x, TileTables<kBits>* out, std::size_t first,
                 std::size_t stop) {
  constexpr int kCodes = 4 / kBits;
  const float largest_of_table = largest_value(w);
  __m512 values[kCodes];  // at index e, of the i-th code in e
  for (int i = 0; i < kCodes; i++) {
    alignas(64) float entries[16];
    for (int e = 0; e < 16; e++) {
      entries[e] = w.table[e >> (kBits * i) & ((1 << kBits) - 1)];
    }
    values[i] = _mm512_load_ps(entries);
  }
  const std::size_t scale_bytes = w.stored_groups * kTileRows * bytes_of(w.scale_type);
  Shares codes(w.codes, w.tiles * tile_bytes(kBits), first, stop, w.tiles * kSteps);
  Shares scales(w.scales, scale_bytes, first, stop, w.tiles * kSteps);
  for (std::size_t tile = 0; tile < w.tiles; tile++, x += kTileK, out++) {
    alignas(64) float wide[kTileK];
    __m512 largest = _mm512_setzero_ps();
    float sums[kSteps];
    for (std::size_t s = 0; s < std::size_t(kSteps); s++) {
      __m512 sum = _mm512_setzero_ps();
      for (std::size_t i = s * kStep; i < (s + 1) * kStep; i += 16) {
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
        const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
        const __m512 floats = _mm512_castsi512_ps(bits);
        _mm512_store_ps(wide + i, floats);
        // As integers, magnitudes order as they should, and NaN is the largest.
        largest = _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(largest),
                                                       _mm512_castps_si512(_mm512_abs_ps(floats))));
        sum = _mm512_add_ps(sum, floats);
      }
      sums[s] = w.zeros == nullptr ? 0.0f : _mm512_reduce_add_ps(sum);
    }
    const float largest_x =
        std::bit_cast<float>(_mm512_reduce_max_epu32(_mm512_castps_si512(largest)));
    if (!(largest_x < 0x1p90f) || (largest_x < 0x1p-80f && largest_x != 0)) return false;
    if (has_outlier(wide, largest_x)) return false;
    const float largest_product = largest_x * largest_of_table;
    const int exponent = largest_x == 0 ? 0 : exponent_of_product(largest_product);
    const __m512 factor = _mm512_set1_ps(power_of_two(largest_exponent(kBits) - exponent));
    for (std::size_t i = 0; i < kTileK; i += 16) {
      _mm512_store_ps(wide + i, _mm512_mul_ps(_mm512_load_ps(wide + i), factor));
    }
    for (std::size_t s = 0; s < std::size_t(kSteps); s++) {
      codes.fetch_one();
      scales.fetch_one();
      build_step<kBits>(wide + s * kStep, values, out->sums[s]);
    }
    out->unit = power_of_two(exponent - largest_exponent(kBits));
    const std::size_t run = std::size_t(kSteps) / w.groups_per_tile;
    for (std::size_t g = 0; g < w.groups_per_tile; g++) {
      out->x_sums[g] = 0;
      for (std::size_t s = 0; s < run; s++) out->x_sums[g] += sums[g * run + s];
    }
  }
  return true;
}

}  // namespace
}  // namespace fdk
