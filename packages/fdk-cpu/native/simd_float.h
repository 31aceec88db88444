// The float32 kernels of an instruction set, over its vector operations V. Included by one file an
// instruction set; all in an unnamed namespace, for each file is compiled for another machine.
//
// V has: Float, kLanes, load, store, set1, zero, fma, sub, mul, sum; load4 of scales; Codes<bits>,
// the codes of a row of a tile, and Table<bits>; value<v>(codes, table), the v-th vector of the
// row's values in the kernel's order; two_groups(a, b), where half a vector pair is a group.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace fdk {
namespace {

#define FDK_INLINE inline __attribute__((always_inline))
#define FDK_LAMBDA __attribute__((always_inline))
// Loops over registers: left rolled, they index an array in memory (m = 2, 4 bits: 4.5 ms against
// 0.6).
#define FDK_UNROLL _Pragma("GCC unroll 16")

template <int N>
struct Int {
  static constexpr int value = N;
};

// f(Int<0>{}), ..., f(Int<N - 1>{}), unrolled.
template <int N, int I = 0, class F>
FDK_INLINE void unroll(F&& f) {
  if constexpr (I < N) {
    f(Int<I>{});
    unroll<N, I + 1>(f);
  }
}

// How far ahead of its use a tile is fetched (4096 x 4096, 4 bits, one thread, cold: 0.87 ms
// without, 0.37 ms with, in the prototype).
inline constexpr std::size_t kPrefetch = 4096;

// A tile is worked through in runs of 32 positions that share a scale; of 16 where G is 16. Larger
// groups repeat theirs: a product more per run, and a quarter of the instances to compile.
template <bool kG16>
inline constexpr std::size_t kRuns = kG16 ? 8 : 4;

// Scales (or zero points) of a tile as float32 [runs][kTileRows], from `groups` stored groups.
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

// Zero points of the four rows of a group, of a weight that has them.
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

// Calls f(tile, its codes, slot of its first scale) for tiles of a stripe.
template <class F>
FDK_INLINE void for_tiles(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end,
                          std::size_t bytes, F f) {
  const std::uint8_t* codes = w.codes + (stripe * w.tiles + begin) * bytes;
  const std::size_t first = stripe * w.stored_groups;
  for (std::size_t tile = begin; tile < end; tile++, codes += bytes) {
    const std::size_t group =
        w.tiles_per_group == 1 ? tile * w.groups_per_tile : tile / w.tiles_per_group;
    f(tile, codes, (first + group) * kTileRows);
  }
}

// The scale (or zero point) of a run's vectors, for row r. With 16 positions a run, a vector pair
// of 16 lanes holds two runs, each in half of both vectors.
template <class V, bool kG16>
struct Runs {
  static constexpr bool kSplit = kG16 && V::kLanes == 16;
  static constexpr int kCount = kSplit ? 4 : int(kRuns<kG16>);
  static constexpr int kVectors = int(kTileK) / V::kLanes / kCount;  // of a run

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

// kAffine: whether to subtract zero points (0 where the format has none).
template <class V, int kBits, bool kG16, bool kAffine, int kM>
void gemv_stripes(const GemvTask& task, std::size_t begin, std::size_t end) {
  using Float = typename V::Float;
  using R = Runs<V, kG16>;
  constexpr std::size_t kBytes = tile_bytes(kBits);
  const Weight& w = *task.weight;
  const typename V::template Table<kBits> table(w.table);
  const float* rows[kM];  // of x; past the last it is repeated, and the result dropped
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
                for (std::size_t i = 0; i < kBytes; i += 64) V::prefetch(codes + kPrefetch + i);
                for (std::size_t r = 0; r < kTileRows; r++) {
                  const typename V::template Codes<kBits> q(codes, r);
                  // With an index that is no constant, `sums` lies in memory: once a tile, not once
                  // a run.
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
void decode_tiles(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end,
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

// Blocks are summed by themselves and then added: the error grows with the blocks of a row and the
// length of one, not with their product.
// y[row][panel] += w[row][depth] * x[depth][panel] for kRows rows of w and kVectors vectors of x.
template <class V, int kRows, int kVectors>
void panel_rows(const PanelTask& task, std::size_t row) {
  using Float = typename V::Float;
  const float* w = static_cast<const float*>(task.w) + row * task.stride;
  const float* x = static_cast<const float*>(task.x);
  float* y = task.y + row * task.panel;
  Float sums[kRows][kVectors];
  FDK_UNROLL
  for (int r = 0; r < kRows; r++) {
    FDK_UNROLL
    for (int v = 0; v < kVectors; v++) sums[r][v] = V::zero();
  }
  for (std::size_t i = 0; i < task.depth; i++, x += task.panel) {
    Float lane[kVectors];
    FDK_UNROLL
    for (int v = 0; v < kVectors; v++) lane[v] = V::load(x + v * V::kLanes);
    FDK_UNROLL
    for (int r = 0; r < kRows; r++) {
      const Float value = V::set1(w[r * task.stride + i]);
      FDK_UNROLL
      for (int v = 0; v < kVectors; v++) sums[r][v] = V::fma(value, lane[v], sums[r][v]);
    }
  }
  FDK_UNROLL
  for (int r = 0; r < kRows; r++) {
    FDK_UNROLL
    for (int v = 0; v < kVectors; v++) {
      float* to = y + r * task.panel + v * V::kLanes;
      V::store(to, V::add(V::load(to), sums[r][v]));
    }
  }
}

template <class V, int kRows, int kVectors>
void panel_all(const PanelTask& task) {
  std::size_t row = 0;
  for (; row + kRows <= task.rows; row += kRows) panel_rows<V, kRows, kVectors>(task, row);
  for (; row < task.rows; row += kTileRows) panel_rows<V, int(kTileRows), kVectors>(task, row);
}

template <class V, int kRows>
void panel_product(const PanelTask& task) {
  if (task.panel == V::kLanes) {
    panel_all<V, kRows, 1>(task);
  } else {
    panel_all<V, kRows, 2>(task);
  }
}

// out[m][..] += grad[m][row] * w[row][..] for kM rows of out and kVectors vectors at `column`.
template <class V, int kM, int kVectors>
void grad_block(const GradTask& task, std::size_t m, std::size_t column) {
  using Float = typename V::Float;
  float* out = task.out + m * task.out_stride + column;
  Float sums[kM][kVectors];
  FDK_UNROLL
  for (int i = 0; i < kM; i++) {
    FDK_UNROLL
    for (int v = 0; v < kVectors; v++) sums[i][v] = V::zero();
  }
  const float* w = task.w + column;
  const float* grad = task.grad + m * task.grad_stride;
  for (std::size_t row = 0; row < task.rows; row++, w += kTileK) {
    Float lane[kVectors];
    FDK_UNROLL
    for (int v = 0; v < kVectors; v++) lane[v] = V::load(w + v * V::kLanes);
    FDK_UNROLL
    for (int i = 0; i < kM; i++) {
      const Float value = V::set1(grad[std::size_t(i) * task.grad_stride + row]);
      FDK_UNROLL
      for (int v = 0; v < kVectors; v++) sums[i][v] = V::fma(value, lane[v], sums[i][v]);
    }
  }
  FDK_UNROLL
  for (int i = 0; i < kM; i++) {
    FDK_UNROLL
    for (int v = 0; v < kVectors; v++) {
      float* to = out + std::size_t(i) * task.out_stride + v * V::kLanes;
      V::store(to, V::add(V::load(to), sums[i][v]));
    }
  }
}

template <class V, int kVectors>
void grad_product(const GradTask& task) {
  static_assert(int(kTileK) % (kVectors * V::kLanes) == 0);
  for (std::size_t column = 0; column < kTileK; column += std::size_t(kVectors * V::kLanes)) {
    std::size_t m = 0;
    for (; m + 3 <= task.m; m += 3) grad_block<V, 3, kVectors>(task, m, column);
    for (; m < task.m; m++) grad_block<V, 1, kVectors>(task, m, column);
  }
}

// Calls f with the weight's bits as a constant.
template <class F>
FDK_INLINE void with_bits(int bits, F f) {
  switch (bits) {
    case 1:
      return f(Int<1>{});
    case 2:
      return f(Int<2>{});
    case 3:
      return f(Int<3>{});
    case 4:
      return f(Int<4>{});
    case 5:
      return f(Int<5>{});
    case 6:
      return f(Int<6>{});
    case 7:
      return f(Int<7>{});
    default:
      return f(Int<8>{});
  }
}

// Calls f with the groups of a tile as a constant.
template <class F>
FDK_INLINE void with_groups(std::size_t groups_per_tile, F f) {
  switch (groups_per_tile) {
    case 1:
      return f(Int<1>{});
    case 2:
      return f(Int<2>{});
    case 4:
      return f(Int<4>{});
    default:
      return f(Int<8>{});
  }
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
void decode(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end, void* out,
            std::size_t stride) {
  float* to = static_cast<float*>(out);
  with_bits(w.bits, [&](auto bits) FDK_LAMBDA {
    constexpr int b = bits.value;
    if (w.groups_per_tile == 8) return decode_tiles<V, b, true>(w, stripe, begin, end, to, stride);
    return decode_tiles<V, b, false>(w, stripe, begin, end, to, stride);
  });
}

}  // namespace
}  // namespace fdk
