// The steps of a tile, for the bf16 gemv of SVE and SVE2 at any vector length: 1, 2 and 4 bits.
//
// A table lookup on 16-bit elements gives bf16 values at once. Its index, the 4 bits of step t of
// each lane, costs one instruction, for the loads do the rest:
//
//   t = 0: lane & 15             t = 3: lane >> 12
//   t = 1: (lane a byte before) >> 12   t = 2: (lane a byte after) & 15
//
// At 2 and 1 bits an index stands for two and four codes, and there is a table for each of them.
// Vectors cover lanes of one plane of one row; what is beyond is inactive, so that no vector holds
// two scales whatever its length.
//
// SVE's types have no size: they cannot be members, captured by value or put in arrays, hence sums
// 0 to 3.
#pragma once

#include <arm_sve.h>

#include <algorithm>
#include <cstring>

#include "common/kernels.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

constexpr std::size_t kSteps = 4, kStep = kTileK / kSteps;  // of 32 positions, a tile
constexpr std::size_t kEntries = 16;

// A zero that the renaming of registers makes, where a copy of one takes a vector pipe.
FDK_INLINE svfloat32_t zeros() {
  svfloat32_t zero;
  asm volatile("movi %d0, #0" : "=w"(zero));
  return zero;
}

// Table i: the value of the i-th code of a 4-bit index, in one vector or, if it is short, two.
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

// `low` is 15 in every lane: `and` with a register keeps its operand, with a constant it does not.
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

// Part of a step that a run covers: all of it, or where G is 16 a half.
template <int kBits, int kHalf>
struct Part {
  static constexpr int kCodes = 4 / kBits;                       // of an index
  static constexpr std::size_t kLanes = 8 * std::size_t(kBits);  // of a row's plane
  static constexpr bool kHalved = kHalf >= 0, kByLanes = kHalved && kBits == 4;
  static constexpr std::size_t kFirstLane = kByLanes && kHalf == 1 ? kLanes / 2 : 0;
  static constexpr std::size_t kLastLane = kByLanes && kHalf == 0 ? kLanes / 2 : kLanes;
  static constexpr bool has(int i) { return !kHalved || kByLanes || i * 2 / kCodes == kHalf; }
};

// What the four sums of a kernel differ in: the row of W (kM = 1), or that of x.
template <int kM>
struct Operands {
  const std::uint8_t* codes[4];  // of W's rows; one if kM > 1
  const bfloat16_t* x[4];        // one if kM = 1
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

// sum + part * scale and part - x_sum * zero, of row i of W: of four scales in a vector, or one.
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

// The four rows' values in every 128 bits, or the one row's everywhere.
template <int kM>
FDK_INLINE svfloat32_t load_rows(const float* values) {
  if constexpr (kM == 1)
    return svld1rq_f32(svptrue_b32(), values);
  else
    return svdup_n_f32(*values);
}

// A tile whose neighbours may be read: the byte before the weight and the one behind are not ours.
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

// Sums without their zero points, times their scales: of one run of steps, added to the result.
//   scales, zeros: of W's rows (kM = 1) or of the one row
//   x_sums: of the run's first step and each row of x; null without zero points
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

}  // namespace
}  // namespace fdk
