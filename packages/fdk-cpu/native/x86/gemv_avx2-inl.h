// The GEMV for one row of x and codes of 4 to 8 bits: AVX2.
//
// Up to 7 bits, values that fit bf16, as for any codebook with bf16 activations, are looked up as
// bytes, 32 at once, and widened to float32 by a shift or a mask: the even and the odd positions of
// each 16, which is the order of x. 8 bits of a uniform grid are converted; other codebooks of 8
// bits are loaded value by value, because a gather of 8 takes longer than 8 loads. Products are
// with float32 x.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cstring>
#include <optional>

#include "common/gemv-inl.h"
#include "common/kernels.h"
#include "x86/codes_avx2-inl.h"

namespace fdk {
namespace {

// The tables of an 8-bit codebook. Loaded values are joined to pairs, the second from a table with
// the values in the upper half of 64 bits. Pairs are stored, and multiplied with x one row later: a
// wide load right after narrow stores would stall.

class PairTables {
 public:
  explicit PairTables(const float* table) {
    for (std::size_t c = 0; c < kMaxLevels; c++) {
      lower_[c] = std::bit_cast<std::uint32_t>(table[c]);
      upper_[c] = lower_[c] << 32;
    }
  }

  // Looks up the values of a row of a tile, the even ones of each 16 positions first, as x is
  // packed.
  FDK_INLINE void look_up(const std::uint8_t* codes, float* out) const {
    constexpr std::size_t kBlock = 16, kLanes = 4;  // lane j has positions j and 64 + j
    for (std::size_t block = 0; block < kTileK / 2; block += kBlock, out += kBlock) {
      FDK_UNROLL
      for (std::size_t j = 0; j < kBlock; j += kLanes, codes += 2 * kLanes) {
        std::uint32_t first, second;  // lanes j and j + 1, j + 2 and j + 3
        std::memcpy(&first, codes, sizeof first);
        std::memcpy(&second, codes + sizeof first, sizeof second);
        float* to = out + j / 2;
        store(to, lower_[first & 255] | upper_[second & 255]);
        store(to + kTileK / 2, lower_[first >> 8 & 255] | upper_[second >> 8 & 255]);
        store(to + kBlock / 2, lower_[first >> 16 & 255] | upper_[second >> 16 & 255]);
        store(to + kBlock / 2 + kTileK / 2, lower_[first >> 24] | upper_[second >> 24]);
      }
    }
  }

 private:
  static FDK_INLINE void store(float* to, std::uint64_t pair) {
    std::memcpy(to, &pair, sizeof pair);
  }

  std::uint64_t lower_[kMaxLevels], upper_[kMaxLevels];
};

// y = W_hat x for stripes [begin, end). A tile has kGroups runs, 2 or 8, that share a scale; a
// larger group repeats its own.
template <class V, int kGroups>
void gemv_8bit_stripes(const GemvTask& task, const PairTables& tables, std::size_t begin,
                       std::size_t end) {
  constexpr std::size_t kBytes = tile_bytes(8), kRow = kTileK;
  constexpr int kVectors = int(kTileK) / V::kLanes / kGroups;  // per run
  const Weight& w = *task.weight;
  const std::size_t shared = w.groups_per_tile < kGroups ? kGroups / w.groups_per_tile / 2 : 0;
  alignas(64) float values[2][kTileK];
  for (std::size_t stripe = begin; stripe < end; stripe++) {
    __m256 y_sums[kTileRows];
    FDK_UNROLL
    for (std::size_t r = 0; r < kTileRows; r++) y_sums[r] = _mm256_setzero_ps();
    tables.look_up(w.codes + stripe * w.tiles * kBytes, values[0]);
    for_tiles(w, stripe, 0, w.tiles, kBytes,
              [&](std::size_t tile, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
                const float* x = static_cast<const float*>(task.x) + tile * kTileK;
                alignas(32) float scales[kGroups][kTileRows];
                for (std::size_t g = 0; g < kGroups; g++) {
                  V::load4(w.scales, slot + (g >> shared) * kTileRows, w.scale_type, scales[g]);
                }
                for (std::size_t i = 0; i < kBytes; i += 64)
                  V::prefetch(codes + kPrefetchBytes + i);
                unroll<int(kTileRows)>([&](auto row) FDK_LAMBDA {
                  constexpr std::size_t r = row.value;
                  // The first row of the next tile follows in memory.
                  const bool last = r + 1 == kTileRows && tile + 1 == w.tiles;
                  if (!last) tables.look_up(codes + (r + 1) * kRow, values[(r + 1) % 2]);
                  const float* of_row = values[r % 2];
                  unroll<kGroups>([&](auto group) FDK_LAMBDA {
                    constexpr int g = group.value;
                    __m256 sums[2];
                    unroll<kVectors>([&](auto i) FDK_LAMBDA {
                      constexpr int at = (g * kVectors + i.value) * V::kLanes;
                      const __m256 value = _mm256_load_ps(of_row + at), of_x = V::load(x + at);
                      __m256& sum = sums[i.value % 2];
                      sum = i.value < 2 ? _mm256_mul_ps(value, of_x)
                                        : _mm256_fmadd_ps(value, of_x, sum);
                    });
                    const __m256 sum = _mm256_add_ps(sums[0], sums[1]);
                    y_sums[r] = _mm256_fmadd_ps(sum, _mm256_broadcast_ss(&scales[g][r]), y_sums[r]);
                  });
                });
              });
    for (std::size_t r = 0; r < kTileRows; r++) {
      task.y[stripe * kTileRows + r] = V::sum(y_sums[r]);
    }
  }
}

template <class V>
void gemv_8bit(const GemvTask& task, std::size_t begin, std::size_t end) {
  const PairTables tables(task.weight->table);
  if (task.weight->groups_per_tile > 2) return gemv_8bit_stripes<V, 8>(task, tables, begin, end);
  gemv_8bit_stripes<V, 2>(task, tables, begin, end);
}

// True if all values fit bf16, as they do if the activations are bf16.
bool fits_bf16(const Weight& w) {
  std::uint32_t low = 0;
  for (int c = 0; c < 1 << w.bits; c++) low |= std::bit_cast<std::uint32_t>(w.table[c]);
  return (low & 0xFFFF) == 0;
}

// The values of a block: its even and its odd positions.
using Block = __m256[2];

template <int kBits>
class Lookup {
 public:
  using Row = RowIndices<kBits>;
  explicit Lookup(const Weight& w)
      : tables_([&](unsigned code) {
          return std::uint16_t(std::bit_cast<std::uint32_t>(w.table[code]) >> 16);
        }) {}

  // The values of blocks t and t + 4.
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

// 8 bits of a uniform grid: first + code * step, up to the code `top`.
class Grid {
 public:
  struct Row {
    const __m256i* codes;
    FDK_INLINE Row(const std::uint8_t* tile, std::size_t r)
        : codes(reinterpret_cast<const __m256i*>(tile + r * kTileK)) {}
  };
  // Returns nothing if the values are not such a grid.
  static std::optional<Grid> of(const Weight& w) {
    const float first = w.table[0], step = w.table[1] - first;
    const unsigned top = top_of(w);
    for (unsigned c = 0; c <= top; c++) {
      if (__builtin_fmaf(float(c), step, first) != w.table[c]) return std::nullopt;
    }
    return Grid(first, step, top);
  }

  // A 32-bit lane has an even position of block t and one of t + 4, then their odd neighbours.
  template <int t>
  FDK_INLINE void at(const Row& row, Block& first, Block& second) const {
    const __m256i codes = _mm256_min_epu8(_mm256_loadu_si256(row.codes + t), top_);
    const __m256i byte = _mm256_set1_epi32(255);
    first[0] = value(_mm256_and_si256(codes, byte));
    second[0] = value(_mm256_and_si256(_mm256_srli_epi32(codes, 8), byte));
    first[1] = value(_mm256_and_si256(_mm256_srli_epi32(codes, 16), byte));
    second[1] = value(_mm256_srli_epi32(codes, 24));
  }

 private:
  Grid(float first, float step, unsigned top)
      : first_(_mm256_set1_ps(first)),
        step_(_mm256_set1_ps(step)),
        top_(_mm256_set1_epi8(char(top))) {}
  FDK_INLINE __m256 value(__m256i codes) const {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(codes), step_, first_);
  }

  __m256 first_, step_;
  __m256i top_;
};

// Sums of x over the blocks of each group, lane by lane: [groups][8].
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

// y = W_hat x for stripes [begin, end). A tile has kGroups runs, 2 or 8, that share a scale; a
// larger group repeats its own.
template <class V, class Values, int kBits, int kGroups, bool kAffine>
void gemv_stripes(const GemvTask& task, const Values values, std::size_t begin, std::size_t end) {
  constexpr std::size_t kBytes = tile_bytes(kBits);
  constexpr bool kEach = kGroups == 8;  // each block is a group
  const Weight& w = *task.weight;
  // Each stored group has 2^shared of the kGroups runs.
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
                for (std::size_t i = 0; i < kBytes; i += 64)
                  V::prefetch(codes + kPrefetchBytes + i);
                const auto add = [&](std::size_t r, int g, __m256 sum) FDK_LAMBDA {
                  if constexpr (kAffine) {
                    sum = _mm256_fnmadd_ps(_mm256_broadcast_ss(&zeros[g][r]), x_sums[g], sum);
                  }
                  y_sums[r] = _mm256_fmadd_ps(sum, _mm256_broadcast_ss(&scales[g][r]), y_sums[r]);
                };
                unroll<int(kTileRows)>([&](auto row) FDK_LAMBDA {
                  constexpr std::size_t r = row.value;
                  const typename Values::Row codes_of_row(codes, r);
                  // For each half of a tile, even and odd positions.
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
void gemv_groups(const GemvTask& task, const Values& values, std::size_t begin, std::size_t end) {
  const Weight& w = *task.weight;
  if (w.groups_per_tile > 2) {
    if (w.zeros != nullptr)
      return gemv_stripes<V, Values, kBits, 8, true>(task, values, begin, end);
    return gemv_stripes<V, Values, kBits, 8, false>(task, values, begin, end);
  }
  if (w.zeros != nullptr) return gemv_stripes<V, Values, kBits, 2, true>(task, values, begin, end);
  return gemv_stripes<V, Values, kBits, 2, false>(task, values, begin, end);
}

// Returns false if the weight has fewer bits or does not fit bf16.
template <class V>
bool gemv_one_row(const GemvTask& task, std::size_t begin, std::size_t end) {
  const Weight& w = *task.weight;
  if (w.bits == 8) {
    const std::optional<Grid> grid = Grid::of(w);
    if (!grid) {
      gemv_8bit<V>(task, begin, end);
    } else {
      gemv_groups<V, Grid, 8>(task, *grid, begin, end);
    }
    return true;
  }
  if (w.bits < 4 || !fits_bf16(w)) return false;
  with_bits(w.bits, [&](auto bits) FDK_LAMBDA {
    constexpr int b = bits.value;
    if constexpr (b >= 4 && b < 8) gemv_groups<V, Lookup<b>, b>(task, Lookup<b>(w), begin, end);
  });
  return true;
}

}  // namespace
}  // namespace fdk
