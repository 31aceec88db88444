// Rounding to a codebook: AVX2.
#include <cstddef>

namespace fdk {
namespace {
constexpr std::size_t kVectorBytes = 32;
}
}  // namespace fdk

#include "rounding/rounding-inl.h"

namespace fdk {

const RoundingKernels kRoundingAvx2 = kKernels;

}  // namespace fdk
