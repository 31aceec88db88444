// The GEMV and the dequantisation of NEON, over the values V of codes.
//
// V has: X, the type of x and of dequantised values; Value, 8 of these in registers; Table<bits>
// and values<h>(table, first, second, out); add(sum, x, value), which accumulates products;
// store(to, value, zero, scale), which writes W_hat. With kPairSums, zero points are subtracted
// from sums, by GemvTask::x_sums; without, from values, by subtract(value, zero).
#pragma once

#include "common/kernels.h"
#include "arm/codes_neon-inl.h"
#include "arm/codebook_neon-inl.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

constexpr int kSteps = 4;   // steps of 32 positions per tile
constexpr int kBlocks = 4;  // blocks of 8 positions per step
constexpr std::size_t kStep = kTileK / kSteps, kBlock = kStep / kBlocks;

// With 8 groups, blocks 0 and 1 of a step are one group and 2 and 3 the next; otherwise a run of
// steps is one group.
template <int kGroups>
constexpr int group_of(int s, int h) {
  return kGroups == 8 ? 2 * s + h / 2 : s * kGroups / kSteps;
}

// GemvTask::x_sums of blocks [begin, end) of a step, lane by lane as pairs are summed.
template <int kBegin, int kEnd>
FDK_INLINE float32x4_t pair_sums(const float* x_sums) {
  float32x4_t sum = vld1q_f32(x_sums + kBegin * 4);
  unroll<kEnd - kBegin - 1>([&](auto i) FDK_LAMBDA {
    sum = vaddq_f32(sum, vld1q_f32(x_sums + (kBegin + 1 + i.value) * 4));
  });
  return sum;
}

// The rows of x and their sums; the last row is repeated, and its results dropped.
template <class V, int kM>
struct Rows {
  const typename V::X* x[kM];
  const float* x_sums[kM];

  FDK_INLINE Rows(const GemvTask& task, bool affine) {
    const std::size_t positions = task.weight->tiles * kTileK;
    FDK_UNROLL
    for (int m = 0; m < kM; m++) {
      const std::size_t row = std::size_t(m) < task.m ? std::size_t(m) : task.m - 1;
      x[m] = static_cast<const typename V::X*>(task.x) + row * positions;
      x_sums[m] = affine && V::kPairSums ? task.x_sums + row * positions / 2 : nullptr;
    }
  }
};

// Adds a row of a tile to sums[m]. Scales and zero points are kTileRows apart; x starts at `at`.
template <class V, int kBits, int kGroups, bool kAffine, int kM>
FDK_INLINE void add_row(const Row<kBits>& row, const typename V::template Table<kBits>& table,
                        const float* scales, const float* zeros, const Rows<V, kM>& rows,
                        std::size_t at, float32x4_t* sums) {
  // Keeps the compiler from loading x once for all rows of W: its 16 vectors would be spilled.
  asm volatile("" : "+r"(at));
  // With 8 groups one half of the blocks is finished before the other.
  constexpr int kHalves = kGroups == 8 ? 2 : 1, kPart = kGroups == 8 ? 4 : kGroups;
  unroll<kHalves>([&](auto half) FDK_LAMBDA {
    constexpr int kFirst = half.value * kBlocks / 2, kCount = kBlocks / kHalves;
    float32x4_t part[kPart][kM];
    FDK_UNROLL
    for (int g = 0; g < kPart; g++) {
      FDK_UNROLL
      for (int m = 0; m < kM; m++) part[g][m] = zeros4();
    }
    unroll<kCount>([&](auto i) FDK_LAMBDA {
      constexpr int h = kFirst + i.value;
      uint8x16_t first, second;
      row.template indices<h>(first, second);
      typename V::Value values[kSteps];
      V::template values<h>(table, first, second, values);
      FDK_UNROLL
      for (int s = 0; s < kSteps; s++) {
        if constexpr (kAffine && !V::kPairSums) {
          const float* zero = zeros + std::size_t(group_of<kGroups>(s, h)) * kTileRows;
          values[s] = V::subtract(values[s], vld1q_dup_f32(zero));
        }
        FDK_UNROLL
        for (int m = 0; m < kM; m++) {
          const typename V::X* x = rows.x[m] + at + std::size_t(s) * kStep + h * kBlock;
          float32x4_t& sum = part[s * kPart / kSteps][m];
          sum = V::add(sum, x, values[s]);
        }
      }
    });
    unroll<kPart>([&](auto g) FDK_LAMBDA {
      constexpr int s = g.value * kSteps / kPart;
      constexpr std::size_t slot = std::size_t(group_of<kGroups>(s, kFirst)) * kTileRows;
      const float32x4_t scale = vld1q_dup_f32(scales + slot);
      FDK_UNROLL
      for (int m = 0; m < kM; m++) {
        if constexpr (kAffine && V::kPairSums) {
          // For one row of x the sums are at the first step of a run, for several at every step.
          const float* x_sums = rows.x_sums[m] + at / 2 + s * (kStep / 2);
          part[g.value][m] = vfmsq_f32(part[g.value][m], pair_sums<kFirst, kFirst + kCount>(x_sums),
                                       vld1q_dup_f32(zeros + slot));
        }
        sums[m] = vfmaq_f32(sums[m], part[g.value][m], scale);
      }
    });
  });
}

template <class V, int kBits, int kGroups, bool kAffine, int kM>
void gemv_stripes(const GemvTask& task, std::size_t begin, std::size_t end) {
  static_assert(kM == 1 || kGroups >= kSteps);  // sums of x are per step
  constexpr std::size_t kBytes = tile_bytes(kBits);
  const Weight& w = *task.weight;
  const typename V::template Table<kBits> table(w.table);
  const Rows<V, kM> rows(task, kAffine);
  for (std::size_t stripe = begin; stripe < end; stripe++) {
    float32x4_t sums[kTileRows][kM];
    for (std::size_t r = 0; r < kTileRows; r++) {
      FDK_UNROLL
      for (int m = 0; m < kM; m++) sums[r][m] = vdupq_n_f32(0);
    }
    for_tiles(w, stripe, 0, w.tiles, kBytes,
              [&](std::size_t tile, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
                float scales[kGroups * kTileRows], zeros[kGroups * kTileRows] = {};
                load_groups<kGroups, true, false>(w, slot, scales);
                if (kAffine && (V::kPairSums || w.zeros != nullptr)) {
                  load_groups<kGroups, true, true>(w, slot, zeros);
                }
                for (std::size_t i = 0; i < kBytes; i += 64)
                  __builtin_prefetch(codes + kPrefetchBytes + i);
                const auto row = [&](std::size_t r) FDK_LAMBDA {
                  add_row<V, kBits, kGroups, kAffine, kM>(Row<kBits>(codes, r), table, scales + r,
                                                          zeros + r, rows, tile * kTileK, sums[r]);
                };
                if constexpr (kM == 1) {  // keeps the sums in registers
                  unroll<int(kTileRows)>([&](auto r) FDK_LAMBDA { row(std::size_t(r.value)); });
                } else {
                  for (std::size_t r = 0; r < kTileRows; r++) row(r);
                }
              });
    for (std::size_t m = 0; m < task.m; m++) {
      for (std::size_t r = 0; r < kTileRows; r++) {
        task.y[m * task.y_stride + stripe * kTileRows + r] = vaddvq_f32(sums[r][m]);
      }
    }
  }
}

// Dequantises tiles with V::store.
template <class V, int kBits, int kGroups>
void dequantise_tiles(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end,
                      typename V::X* out, std::size_t stride) {
  const typename V::template Table<kBits> table(w.table);
  for_tiles(w, stripe, begin, end, tile_bytes(kBits),
            [&](std::size_t tile, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
              float scales[kGroups * kTileRows], zeros[kGroups * kTileRows] = {};
              load_groups<kGroups, true, false>(w, slot, scales);
              if (w.zeros != nullptr) load_groups<kGroups, true, true>(w, slot, zeros);
              for (std::size_t r = 0; r < kTileRows; r++) {
                typename V::X* to = out + r * stride + (tile - begin) * kTileK;
                const Row<kBits> row(codes, r);
                unroll<kBlocks>([&](auto h) FDK_LAMBDA {
                  uint8x16_t first, second;
                  row.template indices<h.value>(first, second);
                  typename V::Value values[kSteps];
                  V::template values<h.value>(table, first, second, values);
                  unroll<kSteps>([&](auto s) FDK_LAMBDA {
                    const std::size_t at =
                        std::size_t(group_of<kGroups>(s.value, h.value)) * kTileRows + r;
                    V::store(to + s.value * kStep + h.value * kBlock, values[s.value],
                             vld1q_dup_f32(zeros + at), vld1q_dup_f32(scales + at));
                  });
                });
              }
            });
}

template <class V>
void dequantise_rows(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end,
                     void* out, std::size_t stride) {
  typename V::X* to = static_cast<typename V::X*>(out);
  with_bits(w.bits, [&](auto bits) FDK_LAMBDA {
    constexpr int b = bits.value;
    if (w.groups_per_tile == 8) {
      return dequantise_tiles<V, b, 8>(w, stripe, begin, end, to, stride);
    }
    return dequantise_tiles<V, b, 4>(w, stripe, begin, end, to, stride);
  });
}

}  // namespace
}  // namespace fdk
