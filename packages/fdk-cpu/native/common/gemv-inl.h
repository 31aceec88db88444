// The float32 GEMV of an instruction set and its dequantisation, over its vector operations V.
//
// V has: Float, kLanes, load, store, set1, zero, fma, sub, mul, sum, prefetch; load4 and load4_u8
// of scales; Codes<bits>, the codes of a row of a tile; Table<bits>; value<v>(codes, table), the
// v-th vector of the row's values in the kernel's order; two_groups(a, b), a vector of a group each
// half.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/kernels.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

// A tile is processed in runs of 32 positions that share a scale, or of 16 if G is 16. Larger
// groups repeat their scale: one more product per run, and a quarter of the instances to compile.
template <bool kG16>
inline constexpr std::size_t kRuns = kG16 ? 8 : 4;

// Loads the scales (or zero points) of a tile as float32 [runs][kTileRows] from `groups` stored
// groups.
template <bool kG16, class Load>
FDK_INLINE void repeat_groups(std::size_t slot, std::size_t groups, float* out, Load load) {
  const std::size_t repeats = kRuns<kG16> / groups;
  for (std::size_t run = 0; run < kRuns<kG16>; run++) {
    load(slot + run / repeats * kTileRows, out + run * kTileRows);
  }
}

template <class V, bool kG16>
FDK_INLINE void load_scales(const Weight& w, std::size_t slot, float* out) {
  repeat_groups<kG16>(slot, w.groups_per_tile, out, [&](std::size_t from, float* to) FDK_LAMBDA {
    V::load4(w.scales, from, w.scale_type, to);
  });
}

// Loads the zero points of the four rows of a group; the weight must have zero points.
template <class V>
FDK_INLINE void load_zero4(const Weight& w, std::size_t slot, float* out) {
  static_assert(int(ZeroType::bf16) == int(ScaleType::bf16) + 1);
  if (w.zero_type == ZeroType::u8) return V::load4_u8(w.zeros, slot, out);
  V::load4(w.zeros, slot, ScaleType(int(w.zero_type) - 1), out);
}

template <class V, bool kG16>
FDK_INLINE void load_zeros(const Weight& w, std::size_t slot, float* out) {
  repeat_groups<kG16>(slot, w.groups_per_tile, out, [&](std::size_t from, float* to) FDK_LAMBDA {
    if (w.zero_type == ZeroType::none) {
      for (std::size_t r = 0; r < kTileRows; r++) to[r] = 0;
    } else {
      load_zero4<V>(w, from, to);
    }
  });
}

// The scale (or zero point) of the vectors of a run, for row r. With runs of 16 positions and
// vectors of 16 lanes, a pair of vectors has two runs, each in one half of both.
template <class V, bool kG16>
struct Runs {
  static constexpr bool kSplit = kG16 && V::kLanes == 16;
  static constexpr int kCount = kSplit ? 4 : int(kRuns<kG16>);
  static constexpr int kVectors = int(kTileK) / V::kLanes / kCount;  // per run

  template <int kRun>
  static FDK_INLINE typename V::Float at(const float* scales, std::size_t r) {
    if constexpr (kSplit) {
      return V::two_groups(scales[2 * kRun * kTileRows + r],
                           scales[(2 * kRun + 1) * kTileRows + r]);
    } else {
      return V::set1(scales[kRun * kTileRows + r]);
    }
  }
};

// kAffine: subtract zero points (0 if the format has none).
template <class V, int kBits, bool kG16, bool kAffine, int kM>
void gemv_stripes(const GemvTask& task, std::size_t begin, std::size_t end) {
  using Float = typename V::Float;
  using R = Runs<V, kG16>;
  constexpr std::size_t kBytes = tile_bytes(kBits);
  const Weight& w = *task.weight;
  const typename V::template Table<kBits> table(w.table);
  const float* rows[kM];  // rows of x; the last is repeated, and its results dropped
  FDK_UNROLL
  for (int m = 0; m < kM; m++) {
    const std::size_t row = std::size_t(m) < task.m ? std::size_t(m) : task.m - 1;
    rows[m] = static_cast<const float*>(task.x) + row * w.tiles * kTileK;
  }
  for (std::size_t stripe = begin; stripe < end; stripe++) {
    Float sums[kTileRows][kM];
    for (std::size_t r = 0; r < kTileRows; r++) {
      FDK_UNROLL
      for (int m = 0; m < kM; m++) sums[r][m] = V::zero();
    }
    for_tiles(w, stripe, 0, w.tiles, kBytes,
              [&](std::size_t tile, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
                alignas(64) float scales[kRuns<kG16> * kTileRows], zeros[kRuns<kG16> * kTileRows];
                load_scales<V, kG16>(w, slot, scales);
                if constexpr (kAffine) load_zeros<V, kG16>(w, slot, zeros);
                for (std::size_t i = 0; i < kBytes; i += 64)
                  V::prefetch(codes + kPrefetchBytes + i);
                for (std::size_t r = 0; r < kTileRows; r++) {
                  const typename V::template Codes<kBits> q(codes, r);
                  // Indexed by a variable, `sums` is in memory: copied once per tile instead of
                  // once per run.
                  Float of_row[kM];
                  FDK_UNROLL
                  for (int m = 0; m < kM; m++) of_row[m] = sums[r][m];
                  unroll<R::kCount>([&](auto run) FDK_LAMBDA {
                    Float part[kM];
                    FDK_UNROLL
                    for (int m = 0; m < kM; m++) part[m] = V::zero();
                    unroll<R::kVectors>([&](auto i) FDK_LAMBDA {
                      constexpr int v = run.value * R::kVectors + i.value;
                      Float value = V::template value<v>(q, table);
                      if constexpr (kAffine)
                        value = V::sub(value, R::template at<run.value>(zeros, r));
                      FDK_UNROLL
                      for (int m = 0; m < kM; m++) {
                        part[m] = V::fma(value, V::load(rows[m] + tile * kTileK + v * V::kLanes),
                                         part[m]);
                      }
                    });
                    const Float scale = R::template at<run.value>(scales, r);
                    FDK_UNROLL
                    for (int m = 0; m < kM; m++) of_row[m] = V::fma(part[m], scale, of_row[m]);
                  });
                  FDK_UNROLL
                  for (int m = 0; m < kM; m++) sums[r][m] = of_row[m];
                }
              });
    for (std::size_t m = 0; m < task.m; m++) {
      for (std::size_t r = 0; r < kTileRows; r++) {
        task.y[m * task.y_stride + stripe * kTileRows + r] = V::sum(sums[r][m]);
      }
    }
  }
}

template <class V, int kBits, bool kG16>
void dequantise_tiles(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end,
                      float* out, std::size_t stride) {
  using R = Runs<V, kG16>;
  const typename V::template Table<kBits> table(w.table);
  for_tiles(w, stripe, begin, end, tile_bytes(kBits),
            [&](std::size_t tile, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
              alignas(64) float scales[kRuns<kG16> * kTileRows], zeros[kRuns<kG16> * kTileRows];
              load_scales<V, kG16>(w, slot, scales);
              load_zeros<V, kG16>(w, slot, zeros);
              for (std::size_t r = 0; r < kTileRows; r++) {
                float* to = out + r * stride + (tile - begin) * kTileK;
                const typename V::template Codes<kBits> q(codes, r);
                unroll<R::kCount>([&](auto run) FDK_LAMBDA {
                  const typename V::Float scale = R::template at<run.value>(scales, r);
                  const typename V::Float zero = R::template at<run.value>(zeros, r);
                  unroll<R::kVectors>([&](auto i) FDK_LAMBDA {
                    constexpr int v = run.value * R::kVectors + i.value;
                    const typename V::Float value = V::sub(V::template value<v>(q, table), zero);
                    V::store(to + v * V::kLanes, V::mul(value, scale));
                  });
                });
              }
            });
}

template <class V>
void gemv(const GemvTask& task, std::size_t begin, std::size_t end) {
  const Weight& w = *task.weight;
  with_bits(w.bits, [&](auto bits) FDK_LAMBDA {
    constexpr int b = bits.value;
    const bool g16 = w.groups_per_tile == 8, affine = w.zeros != nullptr;
    if (task.m == 1 && !g16 && !affine) {
      return gemv_stripes<V, b, false, false, 1>(task, begin, end);
    }
    if (task.m == 1 && !g16) return gemv_stripes<V, b, false, true, 1>(task, begin, end);
    if (g16) return gemv_stripes<V, b, true, true, int(kMaxGemvRows)>(task, begin, end);
    return gemv_stripes<V, b, false, true, int(kMaxGemvRows)>(task, begin, end);
  });
}

template <class V>
void dequantise(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end, void* out,
                std::size_t stride) {
  float* to = static_cast<float*>(out);
  with_bits(w.bits, [&](auto bits) FDK_LAMBDA {
    constexpr int b = bits.value;
    if (w.groups_per_tile == 8)
      return dequantise_tiles<V, b, true>(w, stripe, begin, end, to, stride);
    return dequantise_tiles<V, b, false>(w, stripe, begin, end, to, stride);
  });
}

}  // namespace
}  // namespace fdk
