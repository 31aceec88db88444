// Rounding to a codebook: SSE2, or NEON.
#include <cstddef>

namespace fdk {
namespace {
constexpr std::size_t kVectorBytes = 16;
}
}  // namespace fdk

#include "rounding/rounding-inl.h"

namespace fdk {

const RoundingKernels kRoundingBaseline = kKernels;

}  // namespace fdk
