// Rounds x to 8 bits, and the factors of its sums, for all int8 kernels of ARM.
#pragma once

#include <arm_neon.h>

#include <algorithm>

#include "common/float_convert.h"
#include "common/linear_int8.h"
#include "arm/codes_neon-inl.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

constexpr std::size_t kVector = 16;  // codes per vector

// Rounds a tile of x and calls put(i, codes) for positions i to i + 15.
template <class Put>
FDK_INLINE void quantise_x_tile(const float* x, std::size_t groups, const Int8Tile& out, Put put) {
  uint32x4_t magnitudes = vdupq_n_u32(0);  // as bits, which order NaN above infinity
  for (std::size_t i = 0; i < kTileK; i += 4) {
    magnitudes = vmaxq_u32(magnitudes, vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(x + i))));
  }
  const float largest = float_of_bits(vmaxvq_u32(magnitudes));
  const TileRounding rounding = rounding_of(largest);
  *out.scale = rounding.scale;
  for (std::size_t g = 0; g < groups; g++) out.sums[g] = 0;
  if (rounding.is_zero) {
    for (std::size_t i = 0; i < kTileK; i += kVector) put(i, vdupq_n_s8(0));
    return;
  }
  for (std::size_t i = 0; i < kTileK; i += kVector) {
    int16x4_t codes[4];
    FDK_UNROLL
    for (std::size_t j = 0; j < 4; j++) {
      codes[j] = vmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i + 4 * j), rounding.inverse)));
    }
    const int8x16_t bytes = vcombine_s8(vmovn_s16(vcombine_s16(codes[0], codes[1])),
                                        vmovn_s16(vcombine_s16(codes[2], codes[3])));
    put(i, bytes);
    out.sums[i * groups / kTileK] += vaddlvq_s8(bytes);
  }
}

[[maybe_unused]] void quantise_x_in_order(const float* x, std::size_t groups, const Int8Tile& out) {
  quantise_x_tile(x, groups, out, [&](std::size_t i, int8x16_t codes) FDK_LAMBDA {
    vst1q_s8(out.codes + i, codes);
  });
}

// The factors of the sums of x for 4 rows of W, to be multiplied with share_of.
FDK_INLINE float32x4_t constants_of(const Weight& w, std::size_t slot, float32x4_t scale,
                                    float32x4_t centre) {
  if (w.zeros == nullptr) return scale;
  const float32x4_t zero = w.zero_type == ZeroType::u8
                               ? load4_bytes(w.zeros, slot)
                               : load4_scales(w.zeros, slot, ScaleType(int(w.zero_type) - 1));
  return vmulq_f32(scale, vaddq_f32(zero, centre));
}

// Without zero points the centre is applied once, to the sums over all tiles.
FDK_INLINE float share_of(const Int8Task& task) {
  return task.weight->zeros == nullptr ? task.centre : 1;
}

}  // namespace
}  // namespace fdk
