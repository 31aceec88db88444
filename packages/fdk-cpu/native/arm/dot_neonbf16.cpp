// Dot products: NEON with BF16, pairs of products (`bfdot`).
#include "arm/dot_neon-inl.h"

namespace fdk {
namespace {

struct NeonBf16Dots : NeonDots {
  template <int kType>
  static FDK_INLINE Sum add_products(Sum sum, const std::uint8_t* x, const std::uint8_t* w) {
    if constexpr (Activation(kType) == Activation::fp32) {
      return NeonDots::add_products<kType>(sum, x, w);
    } else {
      return vbfdotq_f32(sum, vreinterpretq_bf16_u8(vld1q_u8(x)),
                         vreinterpretq_bf16_u8(vld1q_u8(w)));
    }
  }
};

}  // namespace

extern const Dots kDotsNeonBf16 = dots_of<NeonBf16Dots>();

}  // namespace fdk
