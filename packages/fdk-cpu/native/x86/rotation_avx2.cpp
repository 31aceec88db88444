// Rotation of activations: AVX2.
#include <cstddef>

namespace fdk {
namespace {
constexpr std::size_t kVectorBytes = 32;
}
}  // namespace fdk

#include "common/rotation-inl.h"

namespace fdk {

void rotate_blocks_avx2(Activation type, const void* x, std::size_t count, std::size_t block,
                        bool inverse, void* y) {
  rotate_kernel(type, x, count, block, inverse, y);
}

}  // namespace fdk
