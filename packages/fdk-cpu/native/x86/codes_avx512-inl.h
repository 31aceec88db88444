// Unpacks the codes of a row of a tile to AVX-512 registers of 32 16-bit lanes.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "common/layout.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

// `mask ? a : b` for each bit.
FDK_INLINE __m512i select_bits(std::uint16_t mask, __m512i a, __m512i b) {
  return _mm512_ternarylogic_epi32(_mm512_set1_epi16(short(mask)), a, b, 0xCA);
}

// The lanes of a plane with fields 4 bits apart: field s of lane j, shifted right by 4 s, is the
// code of position 32 s + j. Narrow planes are repeated, each copy shifted to its own fields.
template <int kWidth>
FDK_INLINE __m512i load_plane(const std::uint8_t* p) {
  if constexpr (kWidth == 4) {
    return _mm512_loadu_si512(p);
  } else if constexpr (kWidth == 2) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(2), 1);
    return _mm512_srlv_epi16(_mm512_broadcast_i64x4(half), shifts);
  } else {
    static_assert(kWidth == 1);
    const __m128i quarter = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    constexpr long long kOne = 0x0001000100010001;
    const __m512i shifts =
        _mm512_set_epi64(3 * kOne, 3 * kOne, 2 * kOne, 2 * kOne, kOne, kOne, 0, 0);
    return _mm512_srlv_epi16(_mm512_broadcast_i32x4(quarter), shifts);
  }
}

// The lanes of a plane of 1 bit above one of 2 bits: its bits are at place 2 of fields 4 bits
// apart. Rotating 32-bit lanes moves only bits of the same 16 into these places.
FDK_INLINE __m512i load_top_plane(const std::uint8_t* p) {
  const __m128i quarter = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m512i left = _mm512_set_epi32(31, 31, 31, 31, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2);
  return _mm512_rolv_epi32(_mm512_broadcast_i32x4(quarter), left);
}

// The codes of row r of a tile. Up to 4 bits they are the fields of `low`; beyond, `high` has the
// upper bits, also 4 bits apart. The unused bits of a field are undefined.
template <int kBits>
struct Avx512Codes {
  __m512i low, high;

  FDK_INLINE Avx512Codes(const std::uint8_t* tile, std::size_t r) {
    constexpr Planes planes = planes_of(kBits);
    const auto plane = [&](auto i) FDK_LAMBDA {
      constexpr Plane p = planes.plane[i.value];
      return load_plane<p.width>(tile + p.offset + r * (kTileK / 8 * std::size_t(p.width)));
    };
    if constexpr (kBits == 8) {
      low = _mm512_loadu_si512(tile + r * 128);
      high = _mm512_loadu_si512(tile + r * 128 + 64);
    } else {
      low = plane(Int<0>{});
      if constexpr (kBits == 3) {
        constexpr Plane p = planes.plane[1];
        low = select_bits(0x3333, low, load_top_plane(tile + p.offset + r * p.row_bytes()));
      }
      if constexpr (kBits > 4) high = plane(Int<1>{});
      if constexpr (kBits == 7) {
        constexpr Plane p = planes.plane[2];
        high = select_bits(0x3333, high, load_top_plane(tile + p.offset + r * p.row_bytes()));
      }
    }
  }

  // The register of step s, and the shift that brings its low bits (8 bits: its code) to bit 0.
  template <int s>
  FDK_INLINE __m512i lanes() const {
    if constexpr (kBits == 8) return s % 2 == 0 ? low : high;
    return low;
  }
  template <int s>
  static constexpr int kShift = kBits == 8 ? 8 * (s / 2) : 4 * s;
};

}  // namespace
}  // namespace fdk
