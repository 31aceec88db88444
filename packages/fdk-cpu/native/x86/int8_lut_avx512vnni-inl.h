// The levels of a row of a tile, for products with 8-bit x: AVX-512 with VBMI.
//
// A code's level is one byte, level + 128, looked up 64 codes at a time (`vpermb`). The bytes of
// the layout's 16-bit lanes belong to positions 64 apart, so the codes are split first: the lower
// half of a register holds the low bytes, the upper half the high ones, and no 32-bit lane mixes
// two groups:
//
//   register 0: positions 0 to 31, 64 to 95      register 1: positions 32 to 63, 96 to 127
//
// which is the order of x.
#pragma once

#include <immintrin.h>

#include <array>

#include "x86/codes_avx512-inl.h"
#include "common/layout.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

using Index = std::array<std::uint8_t, 64>;

// Where byte p of a split register comes from, in the 16 kWidth bytes of a plane's row.
template <int kWidth>
constexpr Index split_index() {
  Index index{};
  for (unsigned p = 0; p < 64; p++) {
    index[p] = std::uint8_t(2 * (p % 32 % (8 * unsigned(kWidth))) + p / 32);
  }
  return index;
}
template <int kWidth>
alignas(64) inline constexpr Index kSplit = split_index<kWidth>();

// One 16-bit shift for each run of 8 bytes: 0, 1, 2, 3 or their doubles, a half of a register.
FDK_INLINE __m512i shifts_of(long long a, long long b, long long c, long long d) {
  constexpr long long kOne = 0x0001000100010001;
  return _mm512_set_epi64(d * kOne, c * kOne, b * kOne, a * kOne, d * kOne, c * kOne, b * kOne,
                          a * kOne);
}

// A plane, split; the fields of a byte 4 bits apart, as load_plane of avx512_codes.h has them.
template <int kWidth>
FDK_INLINE __m512i load_split(const std::uint8_t* p) {
  const __m512i index = _mm512_load_si512(kSplit<kWidth>.data());
  if constexpr (kWidth == 4) {
    return _mm512_permutexvar_epi8(index, _mm512_loadu_si512(p));
  } else if constexpr (kWidth == 2) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m512i both = _mm512_permutexvar_epi8(index, _mm512_castsi256_si512(half));
    return _mm512_srlv_epi16(both, shifts_of(0, 0, 2, 2));
  } else {
    static_assert(kWidth == 1);
    const __m128i quarter = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m512i both = _mm512_permutexvar_epi8(index, _mm512_castsi128_si512(quarter));
    return _mm512_srlv_epi16(both, shifts_of(0, 1, 2, 3));
  }
}

// A plane of 1 bit above one of 2: in place 2 of the fields.
FDK_INLINE __m512i load_split_top(const std::uint8_t* p) {
  const __m512i index = _mm512_load_si512(kSplit<1>.data());
  const __m128i quarter = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m512i both = _mm512_permutexvar_epi8(index, _mm512_castsi128_si512(quarter));
  // Rotations by 2, 1, 0 and -1 of 32 bits carry nothing into the places that are used.
  const __m512i left = _mm512_set_epi32(31, 31, 0, 0, 1, 1, 2, 2, 31, 31, 0, 0, 1, 1, 2, 2);
  return _mm512_rolv_epi32(both, left);
}

// The codes of row r of a tile in the bytes of two registers; bits above a code mean nothing.
template <int kBits>
FDK_INLINE void load_codes(const std::uint8_t* tile, std::size_t r, __m512i (&out)[2]) {
  constexpr Planes planes = planes_of(kBits);
  const auto row_of = [&](const Plane& p)
                          FDK_LAMBDA { return tile + p.offset + r * p.row_bytes(); };
  if constexpr (kBits == 8) {
    const __m512i index = _mm512_load_si512(kSplit<4>.data());
    out[0] = _mm512_permutexvar_epi8(index, _mm512_loadu_si512(tile + r * 128));
    out[1] = _mm512_permutexvar_epi8(index, _mm512_loadu_si512(tile + r * 128 + 64));
    return;
  } else {
    __m512i low = load_split<planes.plane[0].width>(row_of(planes.plane[0]));
    if constexpr (kBits == 3)
      low = select_bits(0x3333, low, load_split_top(row_of(planes.plane[1])));
    out[0] = low;
    out[1] = _mm512_srli_epi16(low, 4);
    if constexpr (kBits > 4) {
      __m512i high = load_split<planes.plane[1].width>(row_of(planes.plane[1]));
      if constexpr (kBits == 7) {
        high = select_bits(0x3333, high, load_split_top(row_of(planes.plane[2])));
      }
      out[0] = select_bits(0x0F0F, out[0], _mm512_slli_epi16(high, 4));
      out[1] = select_bits(0x0F0F, out[1], high);
    }
  }
}

// Levels of 64 codes; the table repeats, so that bits above a code mean nothing.
template <int kBits>
struct ByteTable {
  static constexpr int kRegisters = kBits <= 6 ? 1 : kBits == 7 ? 2 : 4;
  __m512i t[kRegisters];

  FDK_INLINE explicit ByteTable(const std::uint8_t* levels) {
    for (int i = 0; i < kRegisters; i++) t[i] = _mm512_loadu_si512(levels + 64 * i);
  }
  FDK_INLINE __m512i at(__m512i codes) const {
    if constexpr (kBits <= 6) {
      return _mm512_permutexvar_epi8(codes, t[0]);
    } else if constexpr (kBits == 7) {
      return _mm512_permutex2var_epi8(t[0], codes, t[1]);
    } else {
      return _mm512_mask_blend_epi8(_mm512_movepi8_mask(codes),
                                    _mm512_permutex2var_epi8(t[0], codes, t[1]),
                                    _mm512_permutex2var_epi8(t[2], codes, t[3]));
    }
  }
};

}  // namespace
}  // namespace fdk
