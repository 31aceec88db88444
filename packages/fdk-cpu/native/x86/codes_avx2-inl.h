// Unpacks codes to indices of 16-entry byte tables, and looks up 16-bit values: AVX2.
//
// `vpshufb` looks up 32 bytes at once in a table of 16. The low and high bytes of 16-bit values are
// looked up separately and interleaved. Codes of more than 4 bits need several tables; their upper
// bits select among the results.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "common/layout.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

// The sum of the lanes of a register.
FDK_INLINE float sum_of(__m256 v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

// The last code of a grid, or the one before if both have one value: int8-g64 has -127 to 127, and
// 127 again.
[[maybe_unused]] unsigned top_of(const Weight& w) {
  const unsigned last = (1u << w.bits) - 1;
  return w.table[last] == w.table[last - 1] ? last - 1 : last;
}

// A block is 16 positions of a tile. Index register t of a row has block t in the low 8 bytes of
// both halves and block t + 4 in the high ones.
constexpr int kIndexRegisters = 4;
constexpr int kBlockPositions = 16;

template <int kBits>
inline constexpr int kTables = kBits > 4 ? 1 << (kBits - 4) : 1;

// The code as a lookup needs it: an index into a table and, in the top bit of the bytes of
// `choice`, each further bit of the code.
template <int kBits>
struct Index {
  __m256i low;
  __m256i choice[kBits > 4 ? kBits - 4 : 1];
};

// The codes of one row of a tile, of 1 to 7 bits.
template <int kBits>
struct RowIndices {
  __m256i low[2];         // the plane of 4 bits; up to 3 bits, indices 4 bits apart
  __m256i pairs, single;  // the planes of 2 bits and of 1 bit

  FDK_INLINE RowIndices(const std::uint8_t* tile, std::size_t r) {
    constexpr Planes planes = planes_of(kBits);
    unroll<planes.count>([&](auto i) FDK_LAMBDA {
      constexpr Plane plane = planes.plane[i.value];
      const std::uint8_t* p = tile + plane.offset + r * plane.row_bytes();
      if constexpr (plane.width == 4) {
        unroll<2>([&](auto h) FDK_LAMBDA { low[h.value] = load_apart(p, h.value); });
      } else if constexpr (plane.width == 2) {
        pairs = load_apart(p, 0);
      } else {
        const __m256i both =
            _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        const __m256i odd_blocks = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
        single = _mm256_srlv_epi32(apart(both), odd_blocks);
      }
    });
    if constexpr (kBits < 4) pack_indices();
  }

  template <int t>
  FDK_INLINE Index<kBits> at() const {
    Index<kBits> index;
    if constexpr (kBits == 1) {
      index.low = shifted<2 * t>(low[0]);
      return index;
    }
    index.low = shifted<t / 2 * 4>(low[t % 2]);
    if constexpr (kBits < 4) return index;
    index.low = _mm256_and_si256(index.low, _mm256_set1_epi8(15));
    if constexpr (kBits == 6 || kBits == 7) {
      index.choice[0] = _mm256_slli_epi16(pairs, 7 - 2 * t);
      index.choice[1] = _mm256_slli_epi16(pairs, 6 - 2 * t);
    }
    if constexpr (kBits == 5 || kBits == 7) {
      index.choice[kBits - 5] = _mm256_slli_epi16(single, 7 - 2 * t);
    }
    return index;
  }

  // The codes themselves of index register t; 4 or more bits.
  template <int t>
  FDK_INLINE __m256i codes() const {
    const __m256i fields = shifted<t / 2 * 4>(low[t % 2]);
    __m256i codes = _mm256_and_si256(fields, _mm256_set1_epi8(15));
    if constexpr (kBits == 6 || kBits == 7) {
      const __m256i middle = shifted<2 * t - 4>(pairs);
      codes = _mm256_or_si256(codes, _mm256_and_si256(middle, _mm256_set1_epi8(0x30)));
    }
    if constexpr (kBits == 5 || kBits == 7) {
      constexpr int kBit = kBits - 1;
      const __m256i top = shifted<2 * t - kBit>(single);
      codes = _mm256_or_si256(codes, _mm256_and_si256(top, _mm256_set1_epi8(1 << kBit)));
    }
    return codes;
  }

 private:
  // `vpshufb` reads the low four bits of an index and the top one, which is zero here after any
  // shift of at(), so that no mask is needed. At 1 bit, bit 2 belongs to another code.
  FDK_INLINE void pack_indices() {
    if constexpr (kBits == 1) {
      low[0] = _mm256_and_si256(single, _mm256_set1_epi8(0x55));
    } else {
      const __m256i in_place = _mm256_set1_epi8(0x33), top = _mm256_set1_epi8(0x44);
      low[0] = _mm256_and_si256(pairs, in_place);
      low[1] = _mm256_and_si256(_mm256_srli_epi16(pairs, 2), in_place);
      if constexpr (kBits == 3) {
        const __m256i even = _mm256_and_si256(_mm256_slli_epi16(single, 2), top);
        low[0] = _mm256_or_si256(low[0], even);
        low[1] = _mm256_or_si256(low[1], _mm256_and_si256(single, top));
      }
    }
  }
  // 16-bit lanes shifted right by kShift bits, or left if it is negative.
  template <int kShift>
  static FDK_INLINE __m256i shifted(__m256i v) {
    if constexpr (kShift == 0) return v;
    if constexpr (kShift < 0) return _mm256_slli_epi16(v, kShift < 0 ? -kShift : 0);
    return _mm256_srli_epi16(v, kShift > 0 ? kShift : 0);
  }
  // The low bytes of the 16-bit lanes of each half, then the high bytes.
  static FDK_INLINE __m256i apart(__m256i lanes) {
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    return _mm256_shuffle_epi8(lanes, order);
  }
  static FDK_INLINE __m256i load_apart(const std::uint8_t* p, int i) {
    return apart(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + i));
  }
};

// 2^kBits values of 16 bits as tables of their bytes.
template <int kBits>
struct ByteTables {
  alignas(32) std::uint8_t bytes[2][kTables<kBits>][32];  // low bytes, then high bytes

  template <class Value>  // value(c) is that of code c
  FDK_INLINE explicit ByteTables(Value value) {
    constexpr unsigned kMask = (1u << kBits) - 1;
    for (unsigned table = 0; table < unsigned(kTables<kBits>); table++) {
      for (unsigned i = 0; i < 32; i++) {
        const std::uint16_t word = value((16 * table + i % 16) & kMask);
        bytes[0][table][i] = std::uint8_t(word);
        bytes[1][table][i] = std::uint8_t(word >> 8);
      }
    }
  }

  // The values of blocks t and t + 4.
  FDK_INLINE void at(const Index<kBits>& index, __m256i& first, __m256i& second) const {
    const __m256i low = choose<kTables<kBits>>(0, 0, index);
    const __m256i high = choose<kTables<kBits>>(1, 0, index);
    first = _mm256_unpacklo_epi8(low, high);
    second = _mm256_unpackhi_epi8(low, high);
  }

 private:
  FDK_INLINE __m256i table(int half, int i) const {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes[half][i]));
  }

  // The entry of kCount tables from `first` on that the index selects.
  template <int kCount>
  FDK_INLINE __m256i choose(int half, int first, const Index<kBits>& index) const {
    if constexpr (kCount == 1) {
      return _mm256_shuffle_epi8(table(half, first), index.low);
    } else {
      constexpr int kBit = kCount == 2 ? 0 : kCount == 4 ? 1 : 2;
      return _mm256_blendv_epi8(choose<kCount / 2>(half, first, index),
                                choose<kCount / 2>(half, first + kCount / 2, index),
                                index.choice[kBit]);
    }
  }
};

}  // namespace
}  // namespace fdk
