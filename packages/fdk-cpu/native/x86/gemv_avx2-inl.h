// One row of x and 4 to 7 bits, 8 of an even grid or of a codebook: AVX2.
//
// Values that bf16 holds, as those of any codebook that meets bf16 activations, are looked up as
// bytes (avx2_codes.h), 32 at once, and shifted or masked to float32: the even and the odd
// positions of 16, as x lies. A grid is converted. Products are with float32 x.
#pragma once

#include <bit>
#include <optional>

#include "x86/gemv_8bit_avx2-inl.h"
#include "x86/codes_avx2-inl.h"
#include "common/kernels.h"
#include "common/gemv-inl.h"

namespace fdk {
namespace {

// Whether the values of the codebook are bf16: always, where activations are.
bool fits_bf16(const Weight& w) {
  std::uint32_t low = 0;
  for (int c = 0; c < 1 << w.bits; c++) low |= std::bit_cast<std::uint32_t>(w.table[c]);
  return (low & 0xFFFF) == 0;
}

// The values of a block: its even positions, and its odd ones.
using Block = __m256[2];

template <int kBits>
class Lookup {
 public:
  using Row = RowIndices<kBits>;
  explicit Lookup(const Weight& w)
      : tables_([&](unsigned code) {
          return std::uint16_t(std::bit_cast<std::uint32_t>(w.table[code]) >> 16);
        }) {}

  // Of blocks t and t + 4.
  template <int t>
  FDK_INLINE void at(const Row& row, Block& first, Block& second) const {
    __m256i values[2];
    tables_.at(row.template at<t>(), values[0], values[1]);
    widen(values[0], first);
    widen(values[1], second);
  }

 private:
  static FDK_INLINE void widen(__m256i values, Block& out) {
    const __m256i odd = _mm256_set1_epi32(int(0xFFFF0000));
    out[0] = _mm256_castsi256_ps(_mm256_slli_epi32(values, 16));
    out[1] = _mm256_castsi256_ps(_mm256_and_si256(values, odd));
  }

  ByteTables<kBits> tables_;
};

// 8 bits, without tables: first + code * step.
class Grid {
 public:
  struct Row {
    const __m256i* codes;
    FDK_INLINE Row(const std::uint8_t* tile, std::size_t r)
        : codes(reinterpret_cast<const __m256i*>(tile + r * kTileK)) {}
  };
  // None where the values are no such grid.
  static std::optional<Grid> of(const Weight& w) {
    const float first = w.table[0], step = w.table[1] - first;
    for (int c = 0; c < 1 << w.bits; c++) {
      if (__builtin_fmaf(float(c), step, first) != w.table[c]) return std::nullopt;
    }
    return Grid(first, step);
  }

  // A 32-bit lane has an even position of block t, one of t + 4, and the odd ones after them.
  template <int t>
  FDK_INLINE void at(const Row& row, Block& first, Block& second) const {
    const __m256i codes = _mm256_loadu_si256(row.codes + t), byte = _mm256_set1_epi32(255);
    first[0] = value(_mm256_and_si256(codes, byte));
    second[0] = value(_mm256_and_si256(_mm256_srli_epi32(codes, 8), byte));
    first[1] = value(_mm256_and_si256(_mm256_srli_epi32(codes, 16), byte));
    second[1] = value(_mm256_srli_epi32(codes, 24));
  }

 private:
  Grid(float first, float step) : first_(_mm256_set1_ps(first)), step_(_mm256_set1_ps(step)) {}
  FDK_INLINE __m256 value(__m256i codes) const {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(codes), step_, first_);
  }

  __m256 first_, step_;
};

// Sums of x by lane, over the blocks of each group: [groups][8].
template <int kGroups>
FDK_INLINE void lane_sums(const float* x, __m256 (&out)[kGroups]) {
  constexpr int kVectors = int(kTileK) / 8 / kGroups;
  unroll<kGroups>([&](auto g) FDK_LAMBDA {
    __m256 sum = _mm256_loadu_ps(x + g.value * kVectors * 8);
    unroll<kVectors - 1>([&](auto i) FDK_LAMBDA {
      sum = _mm256_add_ps(sum, _mm256_loadu_ps(x + (g.value * kVectors + i.value + 1) * 8));
    });
    out[g.value] = sum;
  });
}

// y = W_hat x for stripes [begin, end). kGroups: 2 or 8 runs of a tile that share a scale; a larger
// group repeats its own.
template <class V, class Values, int kBits, int kGroups, bool kAffine>
void row_stripes(const GemvTask& task, const Values values, std::size_t begin, std::size_t end) {
  constexpr std::size_t kBytes = tile_bytes(kBits);
  constexpr bool kEach = kGroups == 8;  // whether each block is a group
  const Weight& w = *task.weight;
  // Each stored group is 2^shared of kGroups.
  const std::size_t shared = w.groups_per_tile < kGroups ? kGroups / w.groups_per_tile / 2 : 0;
  for (std::size_t stripe = begin; stripe < end; stripe++) {
    __m256 y_sums[kTileRows];
    FDK_UNROLL
    for (std::size_t r = 0; r < kTileRows; r++) y_sums[r] = _mm256_setzero_ps();
    for_tiles(w, stripe, 0, w.tiles, kBytes,
              [&](std::size_t tile, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
                const float* x = static_cast<const float*>(task.x) + tile * kTileK;
                alignas(32) float scales[kGroups][kTileRows], zeros[kGroups][kTileRows];
                for (std::size_t g = 0; g < kGroups; g++) {
                  const std::size_t at = slot + (g >> shared) * kTileRows;
                  V::load4(w.scales, at, w.scale_type, scales[g]);
                  if constexpr (kAffine) load_zero4<V>(w, at, zeros[g]);
                }
                __m256 x_sums[kGroups];
                if constexpr (kAffine) lane_sums<kGroups>(x, x_sums);
                for (std::size_t i = 0; i < kBytes; i += 64) V::prefetch(codes + kPrefetch + i);
                const auto add = [&](std::size_t r, int g, __m256 sum) FDK_LAMBDA {
                  if constexpr (kAffine) {
                    sum = _mm256_fnmadd_ps(_mm256_broadcast_ss(&zeros[g][r]), x_sums[g], sum);
                  }
                  y_sums[r] = _mm256_fmadd_ps(sum, _mm256_broadcast_ss(&scales[g][r]), y_sums[r]);
                };
                unroll<int(kTileRows)>([&](auto row) FDK_LAMBDA {
                  constexpr std::size_t r = row.value;
                  const typename Values::Row codes_of_row(codes, r);
                  // Of the halves of a tile, even and odd positions apart.
                  __m256 sums[2][2];
                  unroll<kIndexRegisters>([&](auto i) FDK_LAMBDA {
                    constexpr int t = i.value;
                    Block blocks[2];
                    values.template at<t>(codes_of_row, blocks[0], blocks[1]);
                    unroll<2>([&](auto half) FDK_LAMBDA {
                      constexpr int h = half.value, block = t + 4 * h;
                      const float* at = x + block * kBlockPositions;
                      unroll<2>([&](auto parity) FDK_LAMBDA {
                        constexpr int p = parity.value;
                        const __m256 of_x = _mm256_loadu_ps(at + 8 * p);
                        if constexpr (t == 0 || kEach) {
                          sums[h][p] = _mm256_mul_ps(blocks[h][p], of_x);
                        } else {
                          sums[h][p] = _mm256_fmadd_ps(blocks[h][p], of_x, sums[h][p]);
                        }
                      });
                      if constexpr (kEach) add(r, block, _mm256_add_ps(sums[h][0], sums[h][1]));
                    });
                  });
                  if constexpr (!kEach) {
                    add(r, 0, _mm256_add_ps(sums[0][0], sums[0][1]));
                    add(r, 1, _mm256_add_ps(sums[1][0], sums[1][1]));
                  }
                });
              });
    for (std::size_t r = 0; r < kTileRows; r++) {
      task.y[stripe * kTileRows + r] = V::sum(y_sums[r]);
    }
  }
}

template <class V, class Values, int kBits>
void row_groups(const GemvTask& task, const Values& values, std::size_t begin, std::size_t end) {
  const Weight& w = *task.weight;
  if (w.groups_per_tile > 2) {
    if (w.zeros != nullptr) return row_stripes<V, Values, kBits, 8, true>(task, values, begin, end);
    return row_stripes<V, Values, kBits, 8, false>(task, values, begin, end);
  }
  if (w.zeros != nullptr) return row_stripes<V, Values, kBits, 2, true>(task, values, begin, end);
  return row_stripes<V, Values, kBits, 2, false>(task, values, begin, end);
}

// False where the weight is not of these.
template <class V>
bool row_gemv(const GemvTask& task, std::size_t begin, std::size_t end) {
  const Weight& w = *task.weight;
  if (w.bits == 8) {
    const std::optional<Grid> grid = Grid::of(w);
    if (!grid) {
      byte_gemv<V>(task, begin, end);
    } else {
      row_groups<V, Grid, 8>(task, *grid, begin, end);
    }
    return true;
  }
  if (w.bits < 4 || !fits_bf16(w)) return false;
  with_bits(w.bits, [&](auto bits) FDK_LAMBDA {
    constexpr int b = bits.value;
    if constexpr (b >= 4 && b < 8) row_groups<V, Lookup<b>, b>(task, Lookup<b>(w), begin, end);
  });
  return true;
}

}  // namespace
}  // namespace fdk
