// Rounding to a codebook: AVX-512.
#include <cstddef>

namespace fdk {
namespace {
constexpr std::size_t kVectorBytes = 64;
}
}  // namespace fdk

#include "rounding/rounding-inl.h"

namespace fdk {

const RoundingKernels kRoundingAvx512 = kKernels;

}  // namespace fdk
