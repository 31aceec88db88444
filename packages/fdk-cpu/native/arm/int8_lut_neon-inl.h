// Looks up the int8 levels of the codes of a tile: NEON.
//
// 16 codes are looked up at a time (`tbl`). The even and the odd bytes of the layout's lanes belong
// to different groups: they are separated (`uzp1`, `uzp2`) while a byte still has two or more
// codes, which leaves them in memory order.
#pragma once

#include <arm_neon.h>

#include "common/linear_int8.h"
#include "arm/codes_neon-inl.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

constexpr int kVectors = 8;  // vectors of 16 positions per tile

// True if the levels are the codes plus a constant, modulo 256: affine formats and `int`.
bool is_linear(const std::uint8_t* levels, int bits) {
  for (unsigned i = 0; i < 1u << bits; i++) {
    if (levels[i] != std::uint8_t(levels[0] + i)) return false;
  }
  return true;
}

// Up to 5 bits a lookup is one instruction, as is the addition for linear levels.
constexpr bool worth_linear(int bits) { return bits > 5; }

// At 1 and 2 bits an index of 4 bits has several codes, kApart bits apart, with a table for each.
template <int kBits, bool kLinear, int kApart = 2>
class LevelTable {
 public:
  FDK_INLINE explicit LevelTable(const std::uint8_t* levels) {
    if constexpr (kLinear) {
      first_ = vdupq_n_u8(levels[0]);
    } else if constexpr (kBits <= 2) {
      for (int i = 0; i < kCodes; i++) {
        std::uint8_t entries[16];
        for (int e = 0; e < 16; e++) entries[e] = levels[e >> (kApart * i) & ((1 << kBits) - 1)];
        one_[i] = vld1q_u8(entries);
      }
    } else if constexpr (kBits <= 4) {
      one_[0] = vld1q_u8(levels);
    } else if constexpr (kBits == 5) {
      two_ = vld1q_u8_x2(levels);
    } else {
      FDK_UNROLL
      for (int i = 0; i < kQuads; i++) four_[i] = vld1q_u8_x4(levels + 64 * i);
    }
  }

  template <int i = 0>
  FDK_INLINE int8x16_t at(uint8x16_t index) const {
    return vreinterpretq_s8_u8(look_up<i>(index));
  }

 private:
  static constexpr int kCodes = 4 / kApart;
  static constexpr int kQuads = kBits <= 6 ? 1 : 1 << (kBits - 6);

  template <int i>
  FDK_INLINE uint8x16_t look_up(uint8x16_t index) const {
    if constexpr (kLinear) {
      return vaddq_u8(index, first_);
    } else if constexpr (kBits <= 4) {
      return vqtbl1q_u8(one_[i], index);
    } else if constexpr (kBits == 5) {
      return vqtbl2q_u8(two_, index);
    } else {
      uint8x16_t found = vqtbl4q_u8(four_[0], index);
      FDK_UNROLL
      for (int q = 1; q < kQuads; q++) {
        index = vsubq_u8(index, vdupq_n_u8(64));
        found = vqtbx4q_u8(found, four_[q], index);
      }
      return found;
    }
  }

  uint8x16_t first_, one_[kCodes];
  uint8x16x2_t two_;
  uint8x16x4_t four_[kQuads];
};

// out[i]: levels of positions 16 i to 16 i + 15 of a row of a tile.
template <int kBits, bool kLinear>
FDK_INLINE void levels_of(const LevelTable<kBits, kLinear>& table, const std::uint8_t* tile,
                          std::size_t r, int8x16_t* out) {
  const uint8x16_t low = vdupq_n_u8(15);
  if constexpr (kBits == 8) {
    unroll<kVectors / 2>([&](auto i) FDK_LAMBDA {
      const std::uint8_t* codes = tile + r * kTileK + i.value * 32;
      const uint8x16_t a = vld1q_u8(codes), b = vld1q_u8(codes + 16);
      out[i.value] = table.at(vuzp1q_u8(a, b)), out[4 + i.value] = table.at(vuzp2q_u8(a, b));
    });
  } else if constexpr (kBits > 4) {
    const Row<kBits> row(tile, r);
    unroll<2>([&](auto p) FDK_LAMBDA {
      uint8x16_t first[2], second[2];
      row.template indices<2 * p.value>(first[0], second[0]);
      row.template indices<2 * p.value + 1>(first[1], second[1]);
      out[p.value] = table.at(vuzp1q_u8(first[0], first[1]));
      out[2 + p.value] = table.at(vuzp1q_u8(second[0], second[1]));
      out[4 + p.value] = table.at(vuzp2q_u8(first[0], first[1]));
      out[6 + p.value] = table.at(vuzp2q_u8(second[0], second[1]));
    });
  } else if constexpr (kBits > 2) {
    uint16x8_t q[4], none[4];
    load_fields<kBits>(tile, r, q, none);
    unroll<2>([&](auto p) FDK_LAMBDA {
      const uint8x16_t a = vreinterpretq_u8_u16(q[2 * p.value]);
      const uint8x16_t b = vreinterpretq_u8_u16(q[2 * p.value + 1]);
      const uint8x16_t even = vuzp1q_u8(a, b), odd = vuzp2q_u8(a, b);
      out[p.value] = table.at(vandq_u8(even, low));
      out[2 + p.value] = table.at(vshrq_n_u8(even, 4));
      out[4 + p.value] = table.at(vandq_u8(odd, low));
      out[6 + p.value] = table.at(vshrq_n_u8(odd, 4));
    });
  } else {
    const std::uint8_t* codes = tile + r * 16 * std::size_t(kBits);
    const uint8x16_t a = vld1q_u8(codes), b = kBits == 2 ? vld1q_u8(codes + 16) : a;
    uint8x16_t halves[2] = {vuzp1q_u8(a, b), vuzp2q_u8(a, b)};
    unroll<2>([&](auto half) FDK_LAMBDA {
      uint8x16_t fields = halves[half.value];
      if constexpr (kBits == 1) {
        // Positions 8 to 15 of each 16 are one bit above those of 0 to 7, in the same bytes.
        fields = vshlq_u8(fields, vcombine_s8(vdup_n_s8(0), vdup_n_s8(-1)));
      }
      const uint8x16_t first = vandq_u8(fields, low), second = vshrq_n_u8(fields, 4);
      int8x16_t* to = out + 4 * half.value;
      to[0] = table.template at<0>(first), to[1] = table.template at<1>(first);
      to[2] = table.template at<0>(second), to[3] = table.template at<1>(second);
    });
  }
}

}  // namespace
}  // namespace fdk
