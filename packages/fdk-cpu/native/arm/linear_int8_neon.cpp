// 8-bit x by NEON, as every 64-bit ARM has it: products in 16 bits, sums of pairs in 32.
#include "arm/linear_int8_neon-inl.h"

namespace fdk {
namespace {

struct Widened {
  // Two products of levels and codes of at most 128 x 127 fit 16 bits.
  static FDK_INLINE int32x4_t add(int32x4_t sum, int8x16_t levels, int8x16_t x) {
    const int16x8_t low = vmull_s8(vget_low_s8(levels), vget_low_s8(x));
    return vpadalq_s16(sum, vmlal_high_s8(low, levels, x));
  }
};

}  // namespace

extern const Int8Kernels kNeonInt8 = int8_kernels_of<Widened>();

}  // namespace fdk
