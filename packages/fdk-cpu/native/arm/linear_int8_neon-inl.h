// Products with 8-bit x: NEON, over Dot, which sums products of bytes.
//
// Levels are looked up 16 codes at a time. Sums of 4 lanes are added across 4 rows of W, or of x,
// before they are converted to float32.
#pragma once

#include <arm_neon.h>

#include <algorithm>

#include "common/linear_int8.h"
#include "arm/int8_lut_neon-inl.h"
#include "arm/quantise_activations_neon-inl.h"
#include "arm/codes_neon-inl.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

// The sums of four vectors, as lanes.
FDK_INLINE float32x4_t sums_of(const int32x4_t* v) {
  return vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(v[0], v[1]), vpaddq_s32(v[2], v[3])));
}

// The kernel assumes kGroups groups per tile. If the weight has half as many, each scale is used
// twice, each time with half of the group's sum of x (`share`). kM = 1: the lanes of
// sums are rows of W. kM = 4: the lanes are rows of x; the last row is repeated, and its results
// dropped.
template <class Dot, int kBits, bool kLinear, int kGroups, int kM>
void int8_gemv_stripes(const Int8Task& task, std::size_t begin, std::size_t end) {
  constexpr std::size_t kBytes = tile_bytes(kBits), kOfGroup = kVectors / kGroups;
  constexpr int kSums = kM == 1 ? 1 : int(kTileRows);
  static_assert(kM == 1 || kM == 4);
  const Weight& w = *task.weight;
  const LevelTable<kBits, kLinear> table(task.levels);
  const float32x4_t centre = vdupq_n_f32(task.centre);
  const std::size_t repeats = kGroups / w.groups_per_tile;
  const float share = share_of(task) / float(repeats);
  std::size_t rows[kM];
  for (std::size_t m = 0; m < kM; m++) rows[m] = std::min(m, task.m - 1) * w.tiles;
  for (std::size_t stripe = begin; stripe < end; stripe++) {
    float32x4_t sums[kSums], constants[kSums];
    FDK_UNROLL
    for (int i = 0; i < kSums; i++) sums[i] = constants[i] = vdupq_n_f32(0);
    for_tiles(
        w, stripe, 0, w.tiles, kBytes,
        [&](std::size_t tile, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
          for (std::size_t i = 0; i < kBytes; i += 64)
            __builtin_prefetch(codes + kPrefetchBytes + i);
          int32x4_t dots[kGroups][4];  // products with 4 rows of W, or of x
          const auto multiply = [&](std::size_t r, auto first_dot) FDK_LAMBDA {
            int8x16_t levels[kVectors];
            levels_of(table, codes, r, levels);
            FDK_UNROLL
            for (int i = 0; i < kVectors; i++) {
              FDK_UNROLL
              for (int m = 0; m < kM; m++) {
                const int8x16_t x = vld1q_s8(task.x + (rows[m] + tile) * kTileK + i * kVector);
                int32x4_t& sum = dots[std::size_t(i) / kOfGroup][first_dot.value + m];
                const bool first = std::size_t(i) % kOfGroup == 0;
                sum = Dot::add(first ? vreinterpretq_s32_f32(zeros4()) : sum, levels[i], x);
              }
            }
          };
          if constexpr (kM == 1) {
            unroll<int(kTileRows)>([&](auto r) FDK_LAMBDA { multiply(std::size_t(r.value), r); });
            const float* x_sums = task.x_sums + tile * w.groups_per_tile;
            float32x4_t of_tile;
            FDK_UNROLL
            for (std::size_t g = 0; g < std::size_t(kGroups); g++) {
              const std::size_t at = slot + g / repeats * kTileRows;
              const float32x4_t scale = load4_scales(w.scales, at, w.scale_type);
              const float32x4_t dot = sums_of(dots[g]);
              of_tile = g == 0 ? vmulq_f32(dot, scale) : vfmaq_f32(of_tile, dot, scale);
              constants[0] = vfmaq_n_f32(constants[0], constants_of(w, at, scale, centre),
                                         x_sums[g / repeats]);
            }
            sums[0] = vfmaq_n_f32(sums[0], of_tile, task.x_scales[tile]);
          } else {
            float scale[kGroups][kTileRows], constant[kGroups][kTileRows];
            float32x4_t x_scales, x_sums[kGroups];
            for (std::size_t g = 0; g < std::size_t(kGroups); g++) {
              const std::size_t at = slot + g / repeats * kTileRows;
              const float32x4_t four = load4_scales(w.scales, at, w.scale_type);
              vst1q_f32(scale[g], four);
              vst1q_f32(constant[g], constants_of(w, at, four, centre));
              float lanes[kM];
              for (std::size_t m = 0; m < kM; m++) {
                lanes[m] = task.x_sums[(rows[m] + tile) * w.groups_per_tile + g / repeats];
              }
              x_sums[g] = vld1q_f32(lanes);
            }
            float lanes[kM];
            for (std::size_t m = 0; m < kM; m++) lanes[m] = task.x_scales[rows[m] + tile];
            x_scales = vld1q_f32(lanes);
            FDK_UNROLL
            for (std::size_t r = 0; r < kTileRows; r++) {
              multiply(r, Int<0>{});
              float32x4_t of_tile = vdupq_n_f32(0);
              FDK_UNROLL
              for (int g = 0; g < kGroups; g++) {
                of_tile = vfmaq_n_f32(of_tile, sums_of(dots[g]), scale[g][r]);
                constants[r] = vfmaq_n_f32(constants[r], x_sums[g], constant[g][r]);
              }
              sums[r] = vfmaq_f32(sums[r], of_tile, x_scales);
            }
          }
        });
    float y[4];
    for (std::size_t i = 0; i < std::size_t(kSums); i++) {
      vst1q_f32(y, vfmsq_n_f32(sums[i], constants[i], share));
      const std::size_t row = (stripe - begin) * kTileRows;
      if constexpr (kM == 1) {
        std::copy_n(y, kTileRows, task.y + row);
      } else {
        for (std::size_t m = 0; m < task.m; m++) task.y[m * task.y_stride + row + i] = y[m];
      }
    }
  }
}

template <class Dot, int kBits, bool kLinear>
FDK_INLINE void int8_gemv_groups(const Int8Task& task, std::size_t begin, std::size_t end) {
  const bool few = task.weight->groups_per_tile <= 2;
  if (task.m == 1 && few) return int8_gemv_stripes<Dot, kBits, kLinear, 2, 1>(task, begin, end);
  if (task.m == 1) return int8_gemv_stripes<Dot, kBits, kLinear, 8, 1>(task, begin, end);
  if (few) return int8_gemv_stripes<Dot, kBits, kLinear, 2, 4>(task, begin, end);
  return int8_gemv_stripes<Dot, kBits, kLinear, 8, 4>(task, begin, end);
}

template <class Dot>
void int8_gemv(const Int8Task& task, std::size_t begin, std::size_t end) {
  with_bits(task.weight->bits, [&](auto bits) FDK_LAMBDA {
    constexpr int b = bits.value;
    if constexpr (worth_linear(b)) {
      if (is_linear(task.levels, b)) return int8_gemv_groups<Dot, b, true>(task, begin, end);
    }
    return int8_gemv_groups<Dot, b, false>(task, begin, end);
  });
}

template <class Dot>
constexpr Int8Kernels int8_kernels_of() {
  return {false, 4, quantise_x_in_order, int8_gemv<Dot>};
}

}  // namespace
}  // namespace fdk
