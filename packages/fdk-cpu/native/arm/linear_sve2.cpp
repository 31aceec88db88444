// The linear kernels of SVE2 with BF16: any vector length, a table of 16 entries in two vectors.
#include "arm/gemv_sve-inl.h"

namespace fdk {
namespace {

struct TwoVectors {
  static FDK_INLINE svuint16_t look_up(svuint16x2_t table, svuint16_t index) {
    return svtbl2_u16(table, index);
  }
};

}  // namespace

extern const LinearKernels kLinearSve2 = kLinearSveWith<TwoVectors>;

}  // namespace fdk
