// Products with 8-bit x: NEON of any 64-bit ARM, products in 16 bits, sums of pairs in 32 bits.
#include "arm/linear_int8_neon-inl.h"

namespace fdk {
namespace {

struct Widened {
  // Two products of at most 128 * 127 fit 16 bits.
  static FDK_INLINE int32x4_t add(int32x4_t sum, int8x16_t levels, int8x16_t x) {
    const int16x8_t low = vmull_s8(vget_low_s8(levels), vget_low_s8(x));
    return vpadalq_s16(sum, vmlal_high_s8(low, levels, x));
  }
};

}  // namespace

extern const Int8Kernels kInt8Neon = int8_kernels_of<Widened>();

}  // namespace fdk
