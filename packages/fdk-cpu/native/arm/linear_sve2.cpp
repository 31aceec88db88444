// SVE2 with BF16, at any vector length: 16 entries of a table lie in two of the shortest vectors.
#include "arm/gemv_sve-inl.h"

namespace fdk {
namespace {

struct TwoVectors {
  static FDK_INLINE svuint16_t look_up(svuint16x2_t table, svuint16_t index) {
    return svtbl2_u16(table, index);
  }
};

}  // namespace

extern const Kernels kSve2 = kSveKernels<TwoVectors>;

}  // namespace fdk
