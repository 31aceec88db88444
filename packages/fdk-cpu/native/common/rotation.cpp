#include "common/rotation.h"

namespace fdk {
namespace {
constexpr std::size_t kVectorBytes = 16;  // SSE2, or NEON
}
}  // namespace fdk

#include "common/buffers.h"
#include "common/dispatch.h"
#include "common/rotation-inl.h"
#include "common/thread_pool.h"

namespace fdk {
namespace {

// Values in a piece of a thread's work.
constexpr std::size_t kPieceValues = std::size_t(1) << 15;

}  // namespace

void rotate_blocks(Activation type, const void* x, std::size_t count, std::size_t block,
                   bool inverse, void* y) {
#if defined(__x86_64__)
  if (current_isa() >= Isa::avx2) return rotate_blocks_avx2(type, x, count, block, inverse, y);
#endif
  rotate_kernel(type, x, count, block, inverse, y);
}

void rotate(Activation type, const void* x, std::size_t count, std::size_t block, bool inverse,
            void* y, std::size_t threads) {
  const std::size_t item = bytes_of(type);
  parallel_for(
      count / block, kPieceValues / block, threads, [&](std::size_t begin, std::size_t end) {
        const std::size_t at = begin * block * item;
        rotate_blocks(type, static_cast<const std::uint8_t*>(x) + at, (end - begin) * block, block,
                      inverse, static_cast<std::uint8_t*>(y) + at);
      });
}

}  // namespace fdk
