// The operations of a decode step between its products: NEON.
#include <arm_neon.h>

#include "common/decode_ops-inl.h"

namespace fdk {
namespace {

struct Neon {
  using Float = float32x4_t;
  static constexpr std::size_t kLanes = 4;

  template <Activation kType>
  static FDK_INLINE Float load(const void* p, std::size_t i) {
    if constexpr (kType == Activation::fp32) {
      return vld1q_f32(static_cast<const float*>(p) + i);
    } else {
      return widen<kType>(vld1_u16(static_cast<const std::uint16_t*>(p) + i));
    }
  }
  template <Activation kType>
  static FDK_INLINE void store(void* p, std::size_t i, Float v) {
    if constexpr (kType == Activation::fp32) {
      vst1q_f32(static_cast<float*>(p) + i, v);
    } else {
      vst1_u16(static_cast<std::uint16_t*>(p) + i, narrow<kType>(v));
    }
  }
  template <Activation kType>
  static FDK_INLINE Float round_to(Float v) {
    if constexpr (kType == Activation::fp32) {
      return v;
    } else {
      return widen<kType>(narrow<kType>(v));
    }
  }
  static FDK_INLINE Float set1(float v) { return vdupq_n_f32(v); }
  static FDK_INLINE Float add(Float a, Float b) { return vaddq_f32(a, b); }
  static FDK_INLINE Float sub(Float a, Float b) { return vsubq_f32(a, b); }
  static FDK_INLINE Float mul(Float a, Float b) { return vmulq_f32(a, b); }
  static FDK_INLINE Float div(Float a, Float b) { return vdivq_f32(a, b); }
  static FDK_INLINE Float fma(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }
  static FDK_INLINE Float max(Float a, Float b) { return vmaxq_f32(a, b); }
  static FDK_INLINE Float round(Float v) { return vrndnq_f32(v); }
  static FDK_INLINE Float power_of_two(Float v) {
    const int32x4_t exponent = vaddq_s32(vcvtq_s32_f32(v), vdupq_n_s32(127));
    return vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23));
  }
  static FDK_INLINE float sum(Float v) { return vaddvq_f32(v); }

 private:
  template <Activation kType>
  static FDK_INLINE Float widen(uint16x4_t halves) {
    if constexpr (kType == Activation::fp16) return vcvt_f32_f16(vreinterpret_f16_u16(halves));
    return vreinterpretq_f32_u32(vshll_n_u16(halves, 16));
  }
  template <Activation kType>
  static FDK_INLINE uint16x4_t narrow(Float v) {
    if constexpr (kType == Activation::fp16) return vreinterpret_u16_f16(vcvt_f16_f32(v));
    const uint32x4_t bits = vreinterpretq_u32_f32(v);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t up = vaddq_u32(vdupq_n_u32(0x7FFF), odd);
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    const uint32x4_t is_number = vceqq_f32(v, v);
    return vshrn_n_u32(vbslq_u32(is_number, vaddq_u32(bits, up), quiet), 16);
  }
};

}  // namespace

extern const DecodeOps kDecodeOpsNeon = decode_ops_of<Neon>();

}  // namespace fdk
