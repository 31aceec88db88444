// The linear kernels of SVE with BF16: vectors of 256 bits or more, which hold a table of 16
// entries.
#include "arm/gemv_sve-inl.h"

namespace fdk {
namespace {

struct OneVector {
  static FDK_INLINE svuint16_t look_up(svuint16x2_t table, svuint16_t index) {
    return svtbl_u16(svget2_u16(table, 0), index);
  }
};

}  // namespace

extern const LinearKernels kLinearSve = kLinearSveWith<OneVector>;

}  // namespace fdk
