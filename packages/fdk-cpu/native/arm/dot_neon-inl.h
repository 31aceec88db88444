// Dot products: NEON, float32 sums of 4 lanes.
#pragma once

#include <arm_neon.h>

#include "common/dot-inl.h"

namespace fdk {
namespace {

struct NeonDots {
  using Sum = float32x4_t;
  // bf16 by 8: the odd ones are the upper halves of 32-bit lanes.
  template <int kType>
  static constexpr std::size_t kLanes = Activation(kType) == Activation::bf16 ? 8 : 4;

  static FDK_INLINE Sum zero() { return vdupq_n_f32(0); }
  static FDK_INLINE Sum add(Sum a, Sum b) { return vaddq_f32(a, b); }
  static FDK_INLINE float sum(Sum v) { return vaddvq_f32(v); }

  static FDK_INLINE float32x4_t even(uint8x16_t v) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(v), 16));
  }
  static FDK_INLINE float32x4_t odd(uint8x16_t v) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(v), vdupq_n_u32(0xFFFF0000)));
  }

  template <int kType>
  static FDK_INLINE Sum add_products(Sum sum, const std::uint8_t* x, const std::uint8_t* w) {
    const uint8x16_t a = vld1q_u8(x), b = vld1q_u8(w);
    if constexpr (Activation(kType) == Activation::fp32) {
      return vfmaq_f32(sum, vreinterpretq_f32_u8(a), vreinterpretq_f32_u8(b));
    } else {
      return vfmaq_f32(vfmaq_f32(sum, even(a), even(b)), odd(a), odd(b));
    }
  }
};

}  // namespace
}  // namespace fdk
