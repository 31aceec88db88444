// The codes of a row of a tile, as NEON looks them up.
#pragma once

#include <arm_neon.h>

#include "arm/codes_neon-inl.h"
#include "common/gemv-inl.h"

namespace fdk {
namespace {

// The codes of a row of a tile, block by block.
template <int kBits>
class Row {
 public:
  FDK_INLINE Row(const std::uint8_t* tile, std::size_t r) {
    if constexpr (kBits == 8) {
      bytes_ = tile + r * kTileK;
    } else if constexpr (kBits <= 2) {
      FDK_UNROLL
      for (int i = 0; i < kBits; i++) q_[i] = load_lanes(tile + (r * kBits + std::size_t(i)) * 16);
    } else {
      load_fields<kBits>(tile, r, q_, high_);
    }
  }

  // Block h of steps 0 (even bytes) and 2 (odd), and of 1 and 3: an index each. One of 1 or 2 bits
  // is that of several blocks, with the code of each at a place of its own.
  template <int h>
  FDK_INLINE void indices(uint8x16_t& first, uint8x16_t& second) const {
    if constexpr (kBits == 8) {
      first = vld1q_u8(bytes_ + 16 * h), second = vld1q_u8(bytes_ + 64 + 16 * h);
    } else {
      constexpr int i = kBits == 1 ? 0 : kBits == 2 ? h % 2 : h;
      const uint8x16_t q = vreinterpretq_u8_u16(q_[i]);
      if constexpr (kBits <= 4) {
        first = vandq_u8(q, vdupq_n_u8(15)), second = vshrq_n_u8(q, 4);
      } else {
        const uint8x16_t high = vreinterpretq_u8_u16(high_[i]);
        first = vsliq_n_u8(q, high, 4), second = vsriq_n_u8(high, q, 4);
      }
    }
  }

 private:
  uint16x8_t q_[4], high_[4];
  const std::uint8_t* bytes_;
};

}  // namespace
}  // namespace fdk
