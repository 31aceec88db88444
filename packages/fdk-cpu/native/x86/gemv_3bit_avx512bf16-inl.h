// The values of a tile in bf16, row by row, for one row of x: AVX-512 BF16.
//
// Each row is decoded by itself, but for 3 bits. There each plane would be broadcast and shifted to
// where its bits are wanted: two broadcasts, two shifts and a selection a row. Instead the tile is
// transposed by whole registers: two of the plane of 2 bits, and one of the plane of 1 bit, which
// has all four rows. A field of 4 bits then holds 2 bits of two rows, or 1 bit of each of four, and
// what is of other rows is junk to a row's own table: `vpermw` takes 5 bits.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "x86/codebook_avx512bf16-inl.h"

namespace fdk {
namespace {

// The codes of a tile, read some time before the values of its rows.
template <int kBits>
struct TileCodes {
  using Table = Table16<kBits>;
  const std::uint8_t* tile;

  FDK_INLINE explicit TileCodes(const std::uint8_t* p) : tile(p) {}
  template <int r>
  FDK_INLINE Values<kBits> row(const Table& table) const {
    return Values<kBits>(tile, r, table);
  }
};

// Of each row, where its index has the code: low bits in places 2 and 3 and the high one in place 0
// or 1 (rows 0 and 1), low bits in places 0 and 1 and the high one in place 2 or 3 (rows 2 and 3).
struct RowTables {
  __m512i t[kTileRows];

  FDK_INLINE explicit RowTables(const float* table) {
    alignas(64) std::uint16_t entries[32];
    for (unsigned r = 0; r < kTileRows; r++) {
      for (unsigned i = 0; i < 32; i++) {
        const unsigned low = r < 2 ? i >> 2 & 3 : i & 3, high = i >> r & 1;
        entries[i] = bf16_bits(table[4 * high + low]);
      }
      t[r] = _mm512_load_si512(entries);
    }
  }
};

// Step s is in the fields of 4 bits at 4 s of 16-bit lanes. Selections are written so that a
// register which is not wanted any more takes the result: GCC 12 copies the mask otherwise (256
// rows, warm: 24.4 -> 23.5 us).
template <>
struct TileCodes<3> {
  using Table = RowTables;
  __m512i low02, low13;  // bits 0 and 1 of the code of row 2 (3), and above them of row 0 (1)
  __m512i high;          // bit 2 of rows 0 to 3

  FDK_INLINE explicit TileCodes(const std::uint8_t* tile) {
    const __m512i rows01 = _mm512_loadu_si512(tile), rows23 = _mm512_loadu_si512(tile + 64);
    // Of a row's fields of 2 bits, even ones are of the first 16 positions of a step.
    const __m512i first = replace(_mm512_slli_epi16(rows01, 2), fields(0x3333), rows23);
    const __m512i last = replace(_mm512_srli_epi16(rows23, 2), fields(0xCCCC), rows01);
    low02 = _mm512_shuffle_i64x2(first, last, 0x44);
    low13 = _mm512_shuffle_i64x2(first, last, 0xEE);
    // Quarter r and bit q of a field, of row r and the q-th 8 positions of a step, change places:
    // in steps of halves and pairs of bits, then quarters and bits. Rotating 32-bit lanes carries
    // into the places that are kept only bits of the same field.
    const __m512i rows = _mm512_loadu_si512(tile + 128);
    const __m512i left2 = halves(2, 30), left1 = quarters(1, 31);
    const __m512i kept2 = halves(0x33333333, int(0xCCCCCCCC));
    const __m512i kept1 = quarters(0x55555555, int(0xAAAAAAAA));
    const __m512i other2 = _mm512_rolv_epi32(_mm512_shuffle_i64x2(rows, rows, 0x4E), left2);
    const __m512i half = replace(other2, kept2, rows);
    const __m512i other1 = _mm512_rolv_epi32(_mm512_permutex_epi64(half, 0x4E), left1);
    high = replace(other1, kept1, half);
  }

  template <int r>
  FDK_INLINE Values<3> row(const Table& table) const {
    const __m512i low = r % 2 == 0 ? low02 : low13;
    const __m512i codes = replace(low, fields(r < 2 ? 0x3333 : 0xCCCC), high);
    Values<3> values;
    unroll<kSteps>([&](auto step) FDK_LAMBDA {
      constexpr int s = step.value;
      values.v[s] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4 * s), table.t[r]);
    });
    return values;
  }

 private:
  // `mask ? with : from`, bit by bit.
  static FDK_INLINE __m512i replace(__m512i from, __m512i mask, __m512i with) {
    return _mm512_ternarylogic_epi32(from, mask, with, 0xB8);
  }
  static FDK_INLINE __m512i fields(std::uint16_t mask) { return _mm512_set1_epi16(short(mask)); }
  // 32-bit lanes of the even and the odd halves, or quarters, of a register.
  static FDK_INLINE __m512i halves(int even, int odd) {
    return _mm512_inserti64x4(_mm512_set1_epi32(even), _mm256_set1_epi32(odd), 1);
  }
  static FDK_INLINE __m512i quarters(int even, int odd) {
    const __m256i two = _mm256_inserti128_si256(_mm256_set1_epi32(even), _mm_set1_epi32(odd), 1);
    return _mm512_broadcast_i64x4(two);
  }
};

}  // namespace
}  // namespace fdk
