// The bf16 GEMV of SVE and SVE2 for 1, 2 and 4 bits, at any vector length. Other widths,
// dequantisation and GEMM are those of NEON.
//
// A table lookup on 16-bit elements gives bf16 values directly. Its index, the 4 bits of step t of
// each lane, takes one instruction because the loads shift by bytes:
//
//   t = 0: lane & 15                    t = 3: lane >> 12
//   t = 1: (lane a byte before) >> 12   t = 2: (lane a byte after) & 15
//
// At 2 and 1 bits an index stands for two and four codes, with a table for each of them. Vectors
// cover lanes of one plane of one row and are inactive beyond it, so that a vector never spans two
// scales.
//
// SVE types have no size: they cannot be members, captured by value or put in arrays, hence sums 0
// to 3.
#pragma once

#include <arm_sve.h>

#include <algorithm>
#include <cstring>

#include "arm/codes_neon-inl.h"
#include "arm/linear_neonbf16.h"
#include "common/kernels.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

constexpr std::size_t kSteps = 4, kStep = kTileK / kSteps;  // steps of 32 positions per tile
constexpr std::size_t kEntries = 16;

// A zero by register renaming: copying another one would take a vector pipe.
FDK_INLINE svfloat32_t zeros() {
  svfloat32_t zero;
  asm volatile("movi %d0, #0" : "=w"(zero));
  return zero;
}

// Table i: the value of the i-th code of a 4-bit index, in one vector, or in two short ones.
template <int kBits>
FDK_INLINE svuint16x2_t load_table(const float* table, int i) {
  std::uint16_t entries[kEntries];
  for (unsigned e = 0; e < kEntries; e++) {
    std::uint32_t bits;
    std::memcpy(&bits, table + (e >> (i * kBits) & ((1u << kBits) - 1)), sizeof bits);
    entries[e] = std::uint16_t(bits >> 16);
  }
  const std::size_t lanes = std::min<std::size_t>(svcnth(), kEntries);
  return svcreate2_u16(svld1_u16(svwhilelt_b16(std::size_t(0), kEntries), entries),
                       svld1_u16(svwhilelt_b16(lanes, kEntries), entries + lanes));
}

// `low` is 15 in every lane: `and` with a register does not overwrite its operand, with a constant
// it does.
template <int t>
FDK_INLINE svuint16_t indices(svbool_t active, svuint16_t low, const std::uint8_t* lanes) {
  constexpr int kBefore = t == 1 ? 1 : 0, kAfter = t == 2 ? 1 : 0;
  const svuint16_t v =
      svld1_u16(active, reinterpret_cast<const std::uint16_t*>(lanes - kBefore + kAfter));
  if constexpr (t == 0 || t == 2)
    return svand_u16_x(svptrue_b16(), v, low);
  else
    return svlsr_n_u16_x(svptrue_b16(), v, 12);
}

// The part of a step that a run covers: all of it, or half if G is 16.
template <int kBits, int kHalf>
struct Part {
  static constexpr int kCodes = 4 / kBits;                       // per index
  static constexpr std::size_t kLanes = 8 * std::size_t(kBits);  // lanes of the plane of a row
  static constexpr bool kHalved = kHalf >= 0, kByLanes = kHalved && kBits == 4;
  static constexpr std::size_t kFirstLane = kByLanes && kHalf == 1 ? kLanes / 2 : 0;
  static constexpr std::size_t kLastLane = kByLanes && kHalf == 0 ? kLanes / 2 : kLanes;
  static constexpr bool has(int i) { return !kHalved || kByLanes || i * 2 / kCodes == kHalf; }
};

// Operands of the four sums of a kernel, which differ in the row of W (kM = 1) or of x.
template <int kM>
struct Operands {
  const std::uint8_t* codes[4];  // codes of the rows of W; one row if kM > 1
  const bfloat16_t* x[4];        // rows of x; one row if kM = 1
};

// Adds the products of step t of a tile, for the lanes from `lane` on.
template <class Lookup, int kBits, int kM, int kHalf, int t>
FDK_INLINE void add_step(const Operands<kM>& o, std::size_t lane, svbool_t active, svuint16_t low,
                         svuint16x2_t table0, svuint16x2_t table1, svuint16x2_t table2,
                         svuint16x2_t table3, svfloat32_t& sum0, svfloat32_t& sum1,
                         svfloat32_t& sum2, svfloat32_t& sum3) {
  using P = Part<kBits, kHalf>;
  const svuint16_t index0 = indices<t>(active, low, o.codes[0] + 2 * lane);
  svuint16_t index1, index2, index3;
  if constexpr (kM == 1) {
    index1 = indices<t>(active, low, o.codes[1] + 2 * lane);
    index2 = indices<t>(active, low, o.codes[2] + 2 * lane);
    index3 = indices<t>(active, low, o.codes[3] + 2 * lane);
  }
  unroll<P::kCodes>([&](auto code) FDK_LAMBDA {
    constexpr int i = code.value;
    if constexpr (P::has(i)) {
      const svuint16x2_t table = i == 0 ? table0 : i == 1 ? table1 : i == 2 ? table2 : table3;
      const std::size_t at = std::size_t(t) * kStep + std::size_t(i) * P::kLanes + lane;
      const auto value = [&](svuint16_t index) FDK_LAMBDA {
        return svreinterpret_bf16_u16(Lookup::look_up(table, index));
      };
      const svbfloat16_t x0 = svld1_bf16(active, o.x[0] + at), w0 = value(index0);
      sum0 = svbfdot_f32(sum0, x0, w0);
      if constexpr (kM == 1) {
        sum1 = svbfdot_f32(sum1, x0, value(index1));
        sum2 = svbfdot_f32(sum2, x0, value(index2));
        sum3 = svbfdot_f32(sum3, x0, value(index3));
      } else {
        sum1 = svbfdot_f32(sum1, svld1_bf16(active, o.x[1] + at), w0);
        sum2 = svbfdot_f32(sum2, svld1_bf16(active, o.x[2] + at), w0);
        sum3 = svbfdot_f32(sum3, svld1_bf16(active, o.x[3] + at), w0);
      }
    }
  });
}

// GemvTask::x_sums of a step, lane by lane as `bfdot` sums pairs.
template <int kBits, int kHalf>
FDK_INLINE svfloat32_t pair_sums(const float* x_sums) {
  using P = Part<kBits, kHalf>;
  svfloat32_t sum = zeros();
  for (std::size_t lane = P::kFirstLane; lane < P::kLastLane; lane += svcnth()) {
    const svbool_t active = svwhilelt_b32(lane / 2, P::kLastLane / 2);
    unroll<P::kCodes>([&](auto i) FDK_LAMBDA {
      if constexpr (P::has(i.value)) {
        const float* from = x_sums + (std::size_t(i.value) * P::kLanes + lane) / 2;
        sum = svadd_f32_x(svptrue_b32(), sum, svld1_f32(active, from));
      }
    });
  }
  return sum;
}

// sum + part * scale and part - x_sum * zero for row i of W: i selects one of four scales in a
// vector; negative for a vector of one scale.
template <int i>
FDK_INLINE svfloat32_t scaled(svfloat32_t sum, svfloat32_t part, svfloat32_t scales) {
  if constexpr (i >= 0)
    return svmla_lane_f32(sum, part, scales, std::uint64_t(i));
  else
    return svmla_f32_x(svptrue_b32(), sum, part, scales);
}

template <int i>
FDK_INLINE svfloat32_t without(svfloat32_t part, svfloat32_t x_sum, svfloat32_t zeros) {
  if constexpr (i >= 0)
    return svmls_lane_f32(part, x_sum, zeros, std::uint64_t(i));
  else
    return svmls_f32_x(svptrue_b32(), part, x_sum, zeros);
}

// The values of four rows in every 128 bits, or that of one row everywhere.
template <int kM>
FDK_INLINE svfloat32_t load_rows(const float* values) {
  if constexpr (kM == 1)
    return svld1rq_f32(svptrue_b32(), values);
  else
    return svdup_n_f32(*values);
}

// A copy of the first or last tile with a byte before and after it, which the loads above read.
template <int kBits>
struct SafeTile {
  std::uint8_t bytes[tile_bytes(kBits) + 2];

  FDK_INLINE const std::uint8_t* at(const Weight& w, std::size_t stripe, std::size_t tile,
                                    const std::uint8_t* codes) {
    const bool first = stripe == 0 && tile == 0;
    const bool last = stripe + 1 == w.stripes && tile + 1 == w.tiles;
    if (!first && !last) return codes;
    std::memcpy(bytes + 1, codes, tile_bytes(kBits));
    return bytes + 1;
  }
};

// Subtracts the zero points from the sums of a run of steps, scales them and adds them to the
// result.
//   scales, zeros: of rows of W (kM = 1), or of one row
//   x_sums: for the first step of the run and each row of x; null without zero points
template <int kBits, int kM, int kHalf>
FDK_INLINE void add_scaled(const float* scales, const float* zeros, const float* const* x_sums,
                           svfloat32_t part0, svfloat32_t part1, svfloat32_t part2,
                           svfloat32_t part3, svfloat32_t& sum0, svfloat32_t& sum1,
                           svfloat32_t& sum2, svfloat32_t& sum3) {
  constexpr int k0 = kM == 1 ? 0 : -1, k1 = kM == 1 ? 1 : -1, k2 = kM == 1 ? 2 : -1,
                k3 = kM == 1 ? 3 : -1;
  if (x_sums != nullptr) {
    const svfloat32_t zero = load_rows<kM>(zeros), x_sum = pair_sums<kBits, kHalf>(x_sums[0]);
    part0 = without<k0>(part0, x_sum, zero);
    if constexpr (kM == 1) {
      part1 = without<k1>(part1, x_sum, zero);
      part2 = without<k2>(part2, x_sum, zero);
      part3 = without<k3>(part3, x_sum, zero);
    } else {
      part1 = without<k1>(part1, pair_sums<kBits, kHalf>(x_sums[1]), zero);
      part2 = without<k2>(part2, pair_sums<kBits, kHalf>(x_sums[2]), zero);
      part3 = without<k3>(part3, pair_sums<kBits, kHalf>(x_sums[3]), zero);
    }
  }
  const svfloat32_t scale = load_rows<kM>(scales);
  sum0 = scaled<k0>(sum0, part0, scale);
  sum1 = scaled<k1>(sum1, part1, scale);
  sum2 = scaled<k2>(sum2, part2, scale);
  sum3 = scaled<k3>(sum3, part3, scale);
}

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
  asm volatile("" : "+w"(low));  // keeps it from becoming a constant of each `and`
  const bfloat16_t* x = static_cast<const bfloat16_t*>(task.x);
  std::size_t x_rows[kM];  // the last row is repeated, and its results dropped
  for (std::size_t m = 0; m < kM; m++) x_rows[m] = std::min(m, task.m - 1) * w.tiles * kTileK;
  svfloat32_t sum0 = zeros(), sum1 = zeros(), sum2 = zeros(), sum3 = zeros();
  SafeTile<kBits> safe = {};
  for_tiles(
      w, stripe, 0, w.tiles, kBytes,
      [&](std::size_t tile, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
        float scales[kGroups * kTileRows], zero_points[kGroups * kTileRows];
        load_groups<kGroups, kM != 1, false>(w, slot, scales);
        if constexpr (kAffine) load_groups<kGroups, kM != 1, true>(w, slot, zero_points);
        for (std::size_t i = 0; i < kBytes; i += 64) __builtin_prefetch(codes + kPrefetchBytes + i);
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
          add(Int<kB>{}, kGroups > 1, b0, b1, b2, b3);  // in one group, the first step has all sums
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
void gemv_stripes(const GemvTask& task, std::size_t begin, std::size_t end) {
  for (std::size_t stripe = begin; stripe < end; stripe++) {
    for (std::size_t r = 0; r < (kM == 1 ? 1 : kTileRows); r++) {
      sve_rows<Lookup, kBits, kGroups, kAffine, kM>(task, stripe, r);
    }
  }
}

template <class Lookup, int kBits, int kGroups, int kM>
FDK_INLINE void sve_groups(const GemvTask& task, std::size_t begin, std::size_t end) {
  if (task.weight->zeros != nullptr) {
    gemv_stripes<Lookup, kBits, kGroups, true, kM>(task, begin, end);
  } else {
    gemv_stripes<Lookup, kBits, kGroups, false, kM>(task, begin, end);
  }
}

template <class Lookup, int kBits>
FDK_INLINE void sve_bits(const GemvTask& task, std::size_t begin, std::size_t end) {
  const std::size_t groups = task.weight->groups_per_tile;
  if (task.m > 1 && groups == 8) return sve_groups<Lookup, kBits, 8, 4>(task, begin, end);
  if (task.m > 1) return sve_groups<Lookup, kBits, 4, 4>(task, begin, end);
  switch (groups) {  // runs of steps, as in GemvTask::x_sums
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

// The kernels of a set with the given lookups.
template <class Lookup>
inline constexpr LinearKernels kLinearSveWith = {
    .x_is_bf16 = true,
    .gemv_order = &kNatural.order,
    .panel_order = &kNatural.order,
    .panel = kNeonPanel,
    .panel_step = kNeonPanelStep,
    .gemv = gemv_sve<Lookup>,
    .dequantise = dequantise_neonbf16,
    .gemm_panel = gemm_panel_neonbf16,
    .dgrad = nullptr,
};

}  // namespace
}  // namespace fdk
