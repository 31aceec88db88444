// Unpacks the codes of a row of a tile to NEON registers, and loads scales.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/simd-inl.h"
#include "common/kernels.h"

namespace fdk {
namespace {

// A zero by register renaming: copying another one would take a vector pipe.
FDK_INLINE float32x4_t zeros4() {
  float32x4_t zero;
  asm volatile("movi %0.2d, #0" : "=w"(zero));
  return zero;
}

template <int kShift>
FDK_INLINE uint16x8_t shift16(uint16x8_t v) {
  if constexpr (kShift == 0)
    return v;
  else
    return vshrq_n_u16(v, kShift);
}

FDK_INLINE uint16x8_t load_lanes(const std::uint8_t* p) {
  return vreinterpretq_u16_u8(vld1q_u8(p));
}

// `mask ? a : b` for each bit.
FDK_INLINE uint16x8_t select16(std::uint16_t mask, uint16x8_t a, uint16x8_t b) {
  return vbslq_u16(vdupq_n_u16(mask), a, b);
}

// The lanes of a plane for positions 8 h to 8 h + 7 of each 32, with fields 4 bits apart.
template <int kWidth>
FDK_INLINE void load_plane(const std::uint8_t* p, uint16x8_t* q) {
  if constexpr (kWidth == 4) {
    FDK_UNROLL
    for (int h = 0; h < 4; h++) q[h] = load_lanes(p + 16 * h);
  } else if constexpr (kWidth == 2) {
    q[0] = load_lanes(p), q[1] = load_lanes(p + 16);
    q[2] = shift16<2>(q[0]), q[3] = shift16<2>(q[1]);
  } else {
    static_assert(kWidth == 1);
    q[0] = load_lanes(p);
    q[1] = shift16<1>(q[0]), q[2] = shift16<2>(q[0]), q[3] = shift16<3>(q[0]);
  }
}

// Adds bit 2 of fields 4 bits apart, from a plane of 1 bit.
FDK_INLINE void add_third_bits(const std::uint8_t* plane, uint16x8_t* q) {
  const uint16x8_t top = load_lanes(plane);
  q[0] = select16(0x3333, q[0], vshlq_n_u16(top, 2));
  q[1] = select16(0x3333, q[1], vshlq_n_u16(top, 1));
  q[2] = select16(0x3333, q[2], top);
  q[3] = select16(0x3333, q[3], vshrq_n_u16(top, 1));
}

// Fields 4 bits apart, up to 7 bits: q has the low 4 bits of a code, `high` the others and nothing
// else. Up to 3 bits the highest bit of a field is undefined.
template <int kBits>
FDK_INLINE void load_fields(const std::uint8_t* tile, std::size_t r, uint16x8_t* q,
                            uint16x8_t* high) {
  constexpr Planes planes = planes_of(kBits);
  const auto at = [&](int i) FDK_LAMBDA {
    return tile + planes.plane[i].offset + r * (kTileK / 8 * std::size_t(planes.plane[i].width));
  };
  load_plane<planes.plane[0].width>(at(0), q);
  if constexpr (kBits == 3) add_third_bits(at(1), q);
  if constexpr (kBits > 4) {
    constexpr std::uint16_t kFields = 0x1111 * ((1 << (kBits - 4)) - 1);
    load_plane<planes.plane[1].width>(at(1), high);
    if constexpr (kBits == 7) add_third_bits(at(2), high);
    FDK_UNROLL
    for (int h = 0; h < 4; h++) high[h] = vandq_u16(high[h], vdupq_n_u16(kFields));
  }
}

FDK_INLINE uint32x4_t widen_bytes(const std::uint8_t* p) {
  std::uint32_t four;
  std::memcpy(&four, p, sizeof four);
  return vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)))));
}

FDK_INLINE float32x4_t load4_scales(const void* p, std::size_t slot, ScaleType type) {
  const std::uint8_t* bytes = static_cast<const std::uint8_t*>(p) + slot * bytes_of(type);
  switch (type) {
    case ScaleType::bf16:
      return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(bytes)), 16));
    case ScaleType::fp16:
      return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(bytes)));
    case ScaleType::fp32:
      return vreinterpretq_f32_u8(vld1q_u8(bytes));
    default:
      return vreinterpretq_f32_u32(vshlq_n_u32(widen_bytes(bytes), 23));
  }
}

FDK_INLINE float32x4_t load4_bytes(const void* p, std::size_t slot) {
  return vcvtq_f32_u32(widen_bytes(static_cast<const std::uint8_t*>(p) + slot));
}

// Loads the scales or zero points of a tile, [kGroups][kTileRows]; fewer stored groups are
// repeated.
template <int kGroups, bool kRepeat, bool kZeros>
FDK_INLINE void load_groups(const Weight& w, std::size_t slot, float* out) {
  const std::size_t repeats = kRepeat ? kGroups / w.groups_per_tile : 1;
  FDK_UNROLL
  for (std::size_t g = 0; g < std::size_t(kGroups); g++) {
    const std::size_t from = slot + g / repeats * kTileRows;
    float32x4_t four;
    if constexpr (!kZeros) {
      four = load4_scales(w.scales, from, w.scale_type);
    } else if (w.zero_type == ZeroType::u8) {
      four = load4_bytes(w.zeros, from);
    } else {
      four = load4_scales(w.zeros, from, ScaleType(int(w.zero_type) - 1));
    }
    vst1q_f32(out + g * kTileRows, four);
  }
}

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

  // The indices of block h for steps 0 (even bytes) and 2 (odd bytes), and for 1 and 3. At 1 and 2
  // bits several blocks share an index, each with its code at another place.
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
