// The bf16 gemv of SVE and SVE2 at any vector length, for 1, 2 and 4 bits; included by one file
// each. Other widths, dequantising and panels are those of NEON.
#pragma once

#include <arm_sve.h>

#include <algorithm>

#include "common/kernels.h"
#include "arm/linear_neonbf16.h"
#include "arm/codes_neon-inl.h"
#include "common/simd-inl.h"
#include "arm/steps_sve-inl.h"

namespace fdk {
namespace {

// kM = 1: the four rows of a stripe. kM = 4: row `r` of it and up to 4 rows of x.
template <class Lookup, int kBits, int kGroups, bool kAffine, int kM>
FDK_INLINE void sve_rows(const GemvTask& task, std::size_t stripe, std::size_t r) {
  constexpr std::size_t kBytes = tile_bytes(kBits), kRowBytes = kBytes / kTileRows;
  // Two spans of steps at once: one chain of sums would wait for itself.
  constexpr int kSpan = kGroups <= 2 ? 2 : 1, kPairs = int(kSteps) / kSpan / 2;
  constexpr int kHalves = kGroups == 8 ? 2 : 1;
  const Weight& w = *task.weight;
  const svuint16x2_t table0 = load_table<kBits>(w.table, 0);
  const svuint16x2_t table1 = load_table<kBits>(w.table, kBits < 4 ? 1 : 0);
  const svuint16x2_t table2 = load_table<kBits>(w.table, kBits < 2 ? 2 : 0);
  const svuint16x2_t table3 = load_table<kBits>(w.table, kBits < 2 ? 3 : 0);
  svuint16_t low = svdup_n_u16(kEntries - 1);
  asm volatile("" : "+w"(low));  // or it becomes a constant of every `and`
  const bfloat16_t* x = static_cast<const bfloat16_t*>(task.x);
  std::size_t x_rows[kM];  // past the last row of x it is repeated, and the result dropped
  for (std::size_t m = 0; m < kM; m++) x_rows[m] = std::min(m, task.m - 1) * w.tiles * kTileK;
  svfloat32_t sum0 = zeros(), sum1 = zeros(), sum2 = zeros(), sum3 = zeros();
  SafeTile<kBits> safe = {};
  for_tiles(
      w, stripe, 0, w.tiles, kBytes,
      [&](std::size_t tile, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
        float scales[kGroups * kTileRows], zero_points[kGroups * kTileRows];
        load_groups<kGroups, kM != 1, false>(w, slot, scales);
        if constexpr (kAffine) load_groups<kGroups, kM != 1, true>(w, slot, zero_points);
        for (std::size_t i = 0; i < kBytes; i += 64) __builtin_prefetch(codes + kPrefetch + i);
        const std::uint8_t* lanes = safe.at(w, stripe, tile, codes) + r * kRowBytes;
        Operands<kM> o{};
        for (std::size_t i = 0; i < (kM == 1 ? 4 : 1); i++) o.codes[i] = lanes + i * kRowBytes;
        for (std::size_t m = 0; m < kM; m++) o.x[m] = x + x_rows[m] + tile * kTileK;
        unroll<kPairs * kHalves>([&](auto part) FDK_LAMBDA {
          constexpr int kHalf = kHalves == 2 ? part.value % 2 : -1;
          constexpr int kA = part.value / kHalves * 2 * kSpan, kB = kA + kSpan;  // first steps
          using P = Part<kBits, kHalf>;
          svfloat32_t a0 = zeros(), a1 = zeros(), a2 = zeros(), a3 = zeros();
          svfloat32_t b0 = zeros(), b1 = zeros(), b2 = zeros(), b3 = zeros();
          for (std::size_t lane = P::kFirstLane; lane < P::kLastLane; lane += svcnth()) {
            const svbool_t active = svwhilelt_b16(lane, P::kLastLane);
            unroll<kSpan>([&](auto i) FDK_LAMBDA {
              add_step<Lookup, kBits, kM, kHalf, kA + i.value>(o, lane, active, low, table0, table1,
                                                               table2, table3, a0, a1, a2, a3);
              add_step<Lookup, kBits, kM, kHalf, kB + i.value>(o, lane, active, low, table0, table1,
                                                               table2, table3, b0, b1, b2, b3);
            });
          }
          const auto add = [&](auto first, bool summed, svfloat32_t p0, svfloat32_t p1,
                               svfloat32_t p2, svfloat32_t p3) FDK_LAMBDA {
            constexpr int kStepGroup = first.value * kGroups / int(kSteps);
            const std::size_t at = std::size_t(kStepGroup + (kHalf > 0 ? 1 : 0)) * kTileRows + r;
            const float* x_sums[kM];
            for (std::size_t m = 0; m < kM && kAffine; m++) {
              x_sums[m] = task.x_sums + (x_rows[m] + tile * kTileK + first.value * kStep) / 2;
            }
            add_scaled<kBits, kM, kHalf>(scales + at, zero_points + at,
                                         kAffine && summed ? x_sums : nullptr, p0, p1, p2, p3, sum0,
                                         sum1, sum2, sum3);
          };
          add(Int<kA>{}, true, a0, a1, a2, a3);
          add(Int<kB>{}, kGroups > 1, b0, b1, b2, b3);  // of one group, the first step has all sums
        });
      });
  const svbool_t all = svptrue_b32();
  const float out[4] = {svaddv_f32(all, sum0), svaddv_f32(all, sum1), svaddv_f32(all, sum2),
                        svaddv_f32(all, sum3)};
  for (std::size_t i = 0; i < (kM == 1 ? kTileRows : task.m); i++) {
    const std::size_t at = kM == 1 ? i : i * task.y_stride + r;
    task.y[stripe * kTileRows + at] = out[i];
  }
}

template <class Lookup, int kBits, int kGroups, bool kAffine, int kM>
void sve_stripes(const GemvTask& task, std::size_t begin, std::size_t end) {
  for (std::size_t stripe = begin; stripe < end; stripe++) {
    for (std::size_t r = 0; r < (kM == 1 ? 1 : kTileRows); r++) {
      sve_rows<Lookup, kBits, kGroups, kAffine, kM>(task, stripe, r);
    }
  }
}

template <class Lookup, int kBits, int kGroups, int kM>
FDK_INLINE void sve_groups(const GemvTask& task, std::size_t begin, std::size_t end) {
  if (task.weight->zeros != nullptr) {
    sve_stripes<Lookup, kBits, kGroups, true, kM>(task, begin, end);
  } else {
    sve_stripes<Lookup, kBits, kGroups, false, kM>(task, begin, end);
  }
}

template <class Lookup, int kBits>
FDK_INLINE void sve_bits(const GemvTask& task, std::size_t begin, std::size_t end) {
  const std::size_t groups = task.weight->groups_per_tile;
  if (task.m > 1 && groups == 8) return sve_groups<Lookup, kBits, 8, 4>(task, begin, end);
  if (task.m > 1) return sve_groups<Lookup, kBits, 4, 4>(task, begin, end);
  switch (groups) {  // runs of steps, as GemvTask::x_sums has them
    case 1:
      return sve_groups<Lookup, kBits, 1, 1>(task, begin, end);
    case 2:
      return sve_groups<Lookup, kBits, 2, 1>(task, begin, end);
    case 4:
      return sve_groups<Lookup, kBits, 4, 1>(task, begin, end);
    default:
      return sve_groups<Lookup, kBits, 8, 1>(task, begin, end);
  }
}

template <class Lookup>
void gemv_sve(const GemvTask& task, std::size_t begin, std::size_t end) {
  switch (task.weight->bits) {
    case 1:
      return sve_bits<Lookup, 1>(task, begin, end);
    case 2:
      return sve_bits<Lookup, 2>(task, begin, end);
    case 4:
      return sve_bits<Lookup, 4>(task, begin, end);
    default:
      gemv_neonbf16(task, begin, end);
  }
}

// The kernels of a set whose lookups are those of Lookup.
template <class Lookup>
inline constexpr Kernels kSveKernels = {true,
                                        &kNatural.order,
                                        &kNatural.order,
                                        kTileRows,
                                        kNeonPanel,
                                        kNeonPanelStep,
                                        gemv_sve<Lookup>,
                                        decode_neonbf16,
                                        panel_product_neonbf16,
                                        nullptr};

}  // namespace
}  // namespace fdk
