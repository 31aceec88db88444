// Products of two and more rows of 8-bit x: NEON with I8MM (ARMv8.6; Neoverse V1, Apple M2).
//
// `smmla` multiplies 8 positions of two rows with 8 of two others: four sums of 8 products. Pairing
// rows of W is free: the `uzp` that separates the even or odd bytes of two vectors of one row does
// so for vectors of two rows. Rows of x are packed in pairs. For one row of x `sdot` is faster.
#include <algorithm>

#include "common/linear_int8.h"
#include "arm/int8_lut_neon-inl.h"
#include "arm/quantise_activations_neon-inl.h"
#include "arm/codes_neon-inl.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

constexpr int kRuns8 = int(kTileK / kPairRun);  // per tile
constexpr int kHalves = int(kTileRows) / 2;     // pairs of rows per tile

void quantise_x_in_pairs(const float* x, std::size_t groups, const Int8Tile& out) {
  quantise_x_tile(x, groups, out, [&](std::size_t i, int8x16_t codes) FDK_LAMBDA {
    vst1_s8(out.codes + 2 * i, vget_low_s8(codes));
    vst1_s8(out.codes + 2 * i + 2 * kPairRun, vget_high_s8(codes));
  });
}

template <int kBits, bool kLinear>
using PairTable = LevelTable<kBits, kLinear, kBits <= 2 ? kBits : 2>;

// out[i]: levels of positions 8 i to 8 i + 7 of row r of a tile, then of row r + 1.
template <int kBits, bool kLinear>
FDK_INLINE void pair_levels(const PairTable<kBits, kLinear>& table, const std::uint8_t* tile,
                            std::size_t r, int8x16_t* out) {
  const uint8x16_t low = vdupq_n_u8(15);
  if constexpr (kBits == 8) {
    unroll<kRuns8 / 2>([&](auto h) FDK_LAMBDA {
      const std::uint8_t* codes = tile + r * kTileK + h.value * 16;
      const uint8x16_t a = vld1q_u8(codes), b = vld1q_u8(codes + kTileK);
      out[h.value] = table.at(vuzp1q_u8(a, b)), out[8 + h.value] = table.at(vuzp2q_u8(a, b));
    });
  } else if constexpr (kBits > 4) {
    const Row<kBits> row(tile, r), next(tile, r + 1);
    unroll<4>([&](auto h) FDK_LAMBDA {
      uint8x16_t first[2], second[2];
      row.template indices<h.value>(first[0], second[0]);
      next.template indices<h.value>(first[1], second[1]);
      out[h.value] = table.at(vuzp1q_u8(first[0], first[1]));
      out[4 + h.value] = table.at(vuzp1q_u8(second[0], second[1]));
      out[8 + h.value] = table.at(vuzp2q_u8(first[0], first[1]));
      out[12 + h.value] = table.at(vuzp2q_u8(second[0], second[1]));
    });
  } else if constexpr (kBits > 2) {
    uint16x8_t q[4], next[4], none[4];
    load_fields<kBits>(tile, r, q, none);
    load_fields<kBits>(tile, r + 1, next, none);
    unroll<4>([&](auto h) FDK_LAMBDA {
      const uint8x16_t a = vreinterpretq_u8_u16(q[h.value]);
      const uint8x16_t b = vreinterpretq_u8_u16(next[h.value]);
      const uint8x16_t even = vuzp1q_u8(a, b), odd = vuzp2q_u8(a, b);
      out[h.value] = table.at(vandq_u8(even, low));
      out[4 + h.value] = table.at(vshrq_n_u8(even, 4));
      out[8 + h.value] = table.at(vandq_u8(odd, low));
      out[12 + h.value] = table.at(vshrq_n_u8(odd, 4));
    });
  } else {
    // A byte has one code of each of 8 / kBits runs that are 8 kBits positions apart.
    constexpr int kCodes = 4 / kBits;
    unroll<kBits>([&](auto part) FDK_LAMBDA {
      const std::uint8_t* codes = tile + r * 16 * std::size_t(kBits) + part.value * 16;
      const uint8x16_t a = vld1q_u8(codes), b = vld1q_u8(codes + 16 * std::size_t(kBits));
      const uint8x16_t halves[2] = {vuzp1q_u8(a, b), vuzp2q_u8(a, b)};
      unroll<2>([&](auto half) FDK_LAMBDA {
        const uint8x16_t first = vandq_u8(halves[half.value], low);
        const uint8x16_t second = vshrq_n_u8(halves[half.value], 4);
        int8x16_t* to = out + 8 * half.value + part.value;
        unroll<kCodes>([&](auto i) FDK_LAMBDA {
          to[i.value * kBits] = table.template at<i.value>(first);
          to[(kCodes + i.value) * kBits] = table.template at<i.value>(second);
        });
      });
    });
  }
}

// The kernel assumes kGroups groups per tile. If the weight has half as many, each scale is used
// twice, each time with half of the group's sum of x (`share`). Up to kPairs pairs of rows
// of x; the last row is repeated, and its results dropped.
template <int kBits, bool kLinear, int kGroups, int kPairs>
void int8_gemv_pair_stripes(const Int8Task& task, std::size_t begin, std::size_t end) {
  constexpr std::size_t kBytes = tile_bytes(kBits);
  constexpr int kOfGroup = kRuns8 / kGroups, kRows = 2 * kPairs;
  const Weight& w = *task.weight;
  const PairTable<kBits, kLinear> table(task.levels);
  const float32x4_t centre = vdupq_n_f32(task.centre);
  const std::size_t repeats = kGroups / w.groups_per_tile;
  const float share = share_of(task) / float(repeats);
  const std::int8_t* x[kPairs];
  std::size_t rows[kRows];  // the first tile of each
  for (std::size_t m = 0; m < kRows; m++) {
    const std::size_t row = std::min(m, task.m - 1);
    rows[m] = row * w.tiles;
    x[m / 2] = task.x + row / 2 * 2 * w.tiles * kTileK;
  }
  for (std::size_t stripe = begin; stripe < end; stripe++) {
    // Lanes of sums: two rows of W by two of x. Lanes of constants: rows of W.
    float32x4_t sums[kHalves][kPairs], constants[kRows];
    FDK_UNROLL
    for (int i = 0; i < kRows; i++) sums[i % 2][i / 2] = constants[i] = vdupq_n_f32(0);
    for_tiles(w, stripe, 0, w.tiles, kBytes,
              [&](std::size_t tile, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
                for (std::size_t i = 0; i < kBytes; i += 64)
                  __builtin_prefetch(codes + kPrefetchBytes + i);
                float32x4_t scales[kGroups], x_scales[kPairs];
                FDK_UNROLL
                for (std::size_t g = 0; g < std::size_t(kGroups); g++) {
                  const std::size_t at = slot + g / repeats * kTileRows;
                  scales[g] = load4_scales(w.scales, at, w.scale_type);
                  const float32x4_t constant = constants_of(w, at, scales[g], centre);
                  FDK_UNROLL
                  for (int m = 0; m < kRows; m++) {
                    const std::size_t from = (rows[m] + tile) * w.groups_per_tile + g / repeats;
                    constants[m] = vfmaq_n_f32(constants[m], constant, task.x_sums[from]);
                  }
                }
                FDK_UNROLL
                for (int p = 0; p < kPairs; p++) {
                  const float32x2_t first = vld1_dup_f32(task.x_scales + rows[2 * p] + tile);
                  const float32x2_t both =
                      vld1_lane_f32(task.x_scales + rows[2 * p + 1] + tile, first, 1);
                  x_scales[p] = vcombine_f32(both, both);
                }
                unroll<kHalves>([&](auto half) FDK_LAMBDA {
                  int8x16_t levels[kRuns8];
                  pair_levels<kBits, kLinear>(table, codes, 2 * half.value, levels);
                  float32x4_t of_tile[kPairs];
                  FDK_UNROLL
                  for (int g = 0; g < kGroups; g++) {
                    int32x4_t dots[kPairs];
                    FDK_UNROLL
                    for (int i = 0; i < kOfGroup; i++) {
                      const int run = g * kOfGroup + i;
                      FDK_UNROLL
                      for (int p = 0; p < kPairs; p++) {
                        const int8x16_t two = vld1q_s8(x[p] + tile * 2 * kTileK + run * 16);
                        dots[p] = vmmlaq_s32(i == 0 ? vreinterpretq_s32_f32(zeros4()) : dots[p],
                                             levels[run], two);
                      }
                    }
                    const float32x4_t scale = half.value == 0 ? vzip1q_f32(scales[g], scales[g])
                                                              : vzip2q_f32(scales[g], scales[g]);
                    FDK_UNROLL
                    for (int p = 0; p < kPairs; p++) {
                      const float32x4_t dot = vcvtq_f32_s32(dots[p]);
                      of_tile[p] =
                          g == 0 ? vmulq_f32(dot, scale) : vfmaq_f32(of_tile[p], dot, scale);
                    }
                  }
                  FDK_UNROLL
                  for (int p = 0; p < kPairs; p++) {
                    sums[half.value][p] = vfmaq_f32(sums[half.value][p], of_tile[p], x_scales[p]);
                  }
                });
              });
    for (std::size_t m = 0; m < task.m; m++) {
      float* y = task.y + m * task.y_stride + (stripe - begin) * kTileRows;
      // The lanes of this row of x from two vectors of two rows of W.
      const float32x4_t top = sums[0][m / 2], bottom = sums[1][m / 2];
      const float32x4_t of_row = m % 2 == 0 ? vuzp1q_f32(top, bottom) : vuzp2q_f32(top, bottom);
      vst1q_f32(y, vfmsq_n_f32(of_row, constants[m], share));
    }
  }
}

template <int kBits, bool kLinear, int kGroups>
FDK_INLINE void gemv_rows(const Int8Task& task, std::size_t begin, std::size_t end) {
  if (task.m <= 2) return int8_gemv_pair_stripes<kBits, kLinear, kGroups, 1>(task, begin, end);
  if (task.m <= 4) return int8_gemv_pair_stripes<kBits, kLinear, kGroups, 2>(task, begin, end);
  return int8_gemv_pair_stripes<kBits, kLinear, kGroups, 4>(task, begin, end);
}

template <int kBits, bool kLinear>
FDK_INLINE void gemv_groups(const Int8Task& task, std::size_t begin, std::size_t end) {
  if (task.weight->groups_per_tile <= 2) return gemv_rows<kBits, kLinear, 2>(task, begin, end);
  return gemv_rows<kBits, kLinear, 8>(task, begin, end);
}

void gemv_in_pairs(const Int8Task& task, std::size_t begin, std::size_t end) {
  with_bits(task.weight->bits, [&](auto bits) FDK_LAMBDA {
    constexpr int b = bits.value;
    if constexpr (worth_linear(b)) {
      if (is_linear(task.levels, b)) return gemv_groups<b, true>(task, begin, end);
    }
    return gemv_groups<b, false>(task, begin, end);
  });
}

}  // namespace

extern const Int8Kernels kInt8NeonI8mm = {false, 8, quantise_x_in_pairs, gemv_in_pairs, true};

}  // namespace fdk
