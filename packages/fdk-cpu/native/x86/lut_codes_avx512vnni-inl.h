// Codes of 1 and 2 bits as the sums of kernels_avx512tables.cpp meet them: 16 rows at a time.
//
// Registers of the codes of 16 rows, [h][t]: byte 4 row + i of register t belongs to table i of
// register t of step 2 h of 32 positions (its low four bits) and of step 2 h + 1 (its high ones).
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "x86/lut_build_avx512vnni-inl.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

constexpr std::size_t kStripesAtOnce = 4;  // of 4 rows: the 16 dwords of a register

// Where the codes of four stripes begin, that lie `apart`, and the slots of their scales. Where
// fewer are left, of one stripe four times.
struct Stripes {
  const std::uint8_t* codes;
  std::size_t apart, slot, slots_apart;

  FDK_INLINE std::size_t slot_of(int stripe) const {
    return slot + std::size_t(stripe) * slots_apart;
  }
};

// The registers of codes described above.
template <int kBits>
struct RowCodes {
  __m512i at[2][kRegisters<kBits>];
};

// Indices that the transposition below ends with (2 bits) or begins with (1 bit), of h.
template <int kBits>
struct Indices {
  __m512i of[2];

  FDK_INLINE Indices() {
    alignas(64) std::uint8_t bytes[2][64];
    for (unsigned h = 0; h < 2; h++) {
      for (unsigned b = 0; b < 64; b++) {
        const unsigned i = b % 4;
        if constexpr (kBits == 1) {  // [stripe][row][i], of qwords of two stripes, [row][stripe]
          const unsigned stripe = b / 16, row = b / 4 % 4;
          bytes[h][b] = std::uint8_t(64 * (stripe / 2) + 16 * row + 8 * (stripe % 2) + 2 * i + h);
        } else {  // [stripe][row][i], of rows 0 and 1 and of rows 2 and 3, [row][i / 2][stripe]
          const unsigned stripe = b / 16, row = b / 4 % 4, lane = 2 * row + i / 2;
          bytes[h][b] = std::uint8_t(16 * lane + 4 * stripe + 2 * (i % 2) + h);
        }
      }
      of[h] = _mm512_load_si512(bytes[h]);
    }
  }
};

// Codes of the next 16 rows to their registers, in parts that come between the products of these (2
// bits, 128 to 512 rows, warm, cycles of 16 rows of a tile: 93 before, 90 in one block by these
// instructions, 88 in parts). `vpunpck` takes 0.67 cycles where other permutations take one (Zen
// 4), 0.25 where they take half of one and share a pipe with `vpdpbusd` (Zen 5).
template <int kBits>
class NextCodes {
 public:
  static constexpr int kParts = kSteps * kRegisters<kBits>;

  // Of the tile that lies `offset` after the first of each stripe; of the codes that come later,
  // kParts / 2 lines from `later` on are fetched meanwhile.
  FDK_INLINE NextCodes(const Indices<kBits>& indices, const Stripes& stripes, std::size_t offset,
                       const std::uint8_t* later)
      : indices_(indices), from_(stripes.codes + offset), apart_(stripes.apart), later_(later) {}

  template <int k>
  FDK_INLINE void part() {
    // One by one: all at once take longer (4096 x 4096, 2 bits, cold: 263 -> 257 us, two threads
    // 244 -> 237).
    if constexpr (k % 2 == 1) fetch(later_ + k / 2 * kLine, kLine);
    if constexpr (kBits == 2) part_of_two_bits<k>();
    if constexpr (kBits == 1) part_of_one_bit<k>();
  }
  const RowCodes<kBits>& codes() const { return codes_; }

 private:
  FDK_INLINE __m512i load(int stripe, int rows) const {
    return _mm512_loadu_si512(from_ + std::size_t(stripe) * apart_ + kLine * std::size_t(rows));
  }
  template <int k>
  FDK_INLINE void part_of_one_bit() {
    if constexpr (k < 4) {  // qwords of two stripes
      constexpr int i = k / 2;
      const __m512i first = load(2 * i, 0), second = load(2 * i + 1, 0);
      qwords_[i][k % 2] =
          k % 2 == 0 ? _mm512_unpacklo_epi64(first, second) : _mm512_unpackhi_epi64(first, second);
    } else if constexpr (k < 6) {
      unroll<2>([&](auto h) FDK_LAMBDA {
        codes_.at[h.value][k - 4] =
            _mm512_permutex2var_epi8(qwords_[0][k - 4], indices_.of[h.value], qwords_[1][k - 4]);
      });
    }
  }
  template <int k>
  FDK_INLINE void part_of_two_bits() {
    constexpr int rows = k / 4, i = k % 4;
    if constexpr (k < 8 && i < 2) {  // dwords of two stripes
      const __m512i first = load(2 * i, rows), second = load(2 * i + 1, rows);
      halves_[rows][2 * i] = _mm512_unpacklo_epi32(first, second);
      halves_[rows][2 * i + 1] = _mm512_unpackhi_epi32(first, second);
    } else if constexpr (k < 8) {  // of four
      const __m512i first = halves_[rows][i - 2], second = halves_[rows][i];
      dwords_[rows][2 * i - 4] = _mm512_unpacklo_epi64(first, second);
      dwords_[rows][2 * i - 3] = _mm512_unpackhi_epi64(first, second);
    } else if constexpr (k < 12) {
      unroll<2>([&](auto h) FDK_LAMBDA {  // a loop would leave codes_ in memory
        codes_.at[h.value][i] =
            _mm512_permutex2var_epi8(dwords_[0][i], indices_.of[h.value], dwords_[1][i]);
      });
    }
  }

  const Indices<kBits>& indices_;
  const std::uint8_t* from_;
  std::size_t apart_;
  const std::uint8_t* later_;
  __m512i halves_[2][4], dwords_[2][4];  // 2 bits
  __m512i qwords_[2][2];                 // 1 bit
  RowCodes<kBits> codes_;
};

}  // namespace
}  // namespace fdk
