// Rotation of activations by signs and Hadamard matrices, in blocks; see fdk_formats.rotation.
//
// Sums are float32 butterflies over neighbours 1, 2, 4, ... apart, scaled and rounded once: the
// same bits as those of fdk_formats.
#pragma once

#include <cstddef>

#include "common/layout.h"

namespace fdk {

inline constexpr std::size_t kMaxRotationBlock = 256, kMinRotationBlock = 16;

// The largest power of two that divides k, kMaxRotationBlock at most.
constexpr std::size_t rotation_block(std::size_t k) {
  std::size_t block = 1;
  while (block < kMaxRotationBlock && k % (2 * block) == 0) block *= 2;
  return block;
}

// Rotates `count` values, a multiple of `block`, which is a power of two from kMinRotationBlock to
// kMaxRotationBlock. y may be x. inverse: rotate back.
void rotate_blocks(Activation type, const void* x, std::size_t count, std::size_t block,
                   bool inverse, void* y);

#if defined(__x86_64__)
void rotate_blocks_avx2(Activation type, const void* x, std::size_t count, std::size_t block,
                        bool inverse, void* y);
#endif

// The same on up to `threads` threads.
void rotate(Activation type, const void* x, std::size_t count, std::size_t block, bool inverse,
            void* y, std::size_t threads);

}  // namespace fdk
