// Products with 8-bit x: NEON with dot products (ARMv8.2; Cortex-A76, Apple A13).
#include "arm/linear_int8_neon-inl.h"

namespace fdk {
namespace {

struct Fours {
  static FDK_INLINE int32x4_t add(int32x4_t sum, int8x16_t levels, int8x16_t x) {
    return vdotq_s32(sum, levels, x);
  }
};

}  // namespace

extern const Int8Kernels kInt8NeonDot = int8_kernels_of<Fours>();

}  // namespace fdk
