// The GEMM for small m: each code is decoded once for up to six rows of x: AVX-512 BF16.
//
// Zen 4 starts one 512-bit vdpbf16ps per cycle on its two multiplying pipes, and a vpermw or shift
// on a third: m rows of x take m cycles for 32 codes, and other multiplications add to that. With
// three or more rows the codebook of a group is scaled and rounded once for its 32, 64 or 128
// codes. For two rows the sums are scaled, one multiplication per row of x and group, as they are
// for codes of 6 or more bits and groups of 16, whose scaled codebooks are too large.
#include <immintrin.h>

#include "x86/linear_avx512bf16.h"
#include "x86/codebook_avx512bf16-inl.h"
#include "common/kernels.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

template <int kM>
struct Rows {
  const std::uint16_t* x[kM];  // the last row is repeated, and its results dropped

  FDK_INLINE explicit Rows(const GemvTask& task) {
    FDK_UNROLL
    for (int m = 0; m < kM; m++) {
      const std::size_t row = std::size_t(m) < task.m ? std::size_t(m) : task.m - 1;
      x[m] = static_cast<const std::uint16_t*>(task.x) + row * task.weight->tiles * kTileK;
    }
  }
  FDK_INLINE __m512bh at(int m, std::size_t position) const {
    return as_bf16(_mm512_loadu_si512(x[m] + position));
  }
};

// Fully unrolled: one variable index would keep all sums in memory.
template <int kM>
FDK_INLINE void write_sums(const GemvTask& task, std::size_t stripe,
                           const __m512 (&sums)[kTileRows][kM]) {
  unroll<kM>([&](auto m) FDK_LAMBDA {
    unroll<int(kTileRows)>([&](auto r) FDK_LAMBDA {
      const float sum = _mm512_reduce_add_ps(sums[r.value][m.value]);
      if (std::size_t(m.value) < task.m) {
        task.y[m.value * task.y_stride + stripe * kTileRows + r.value] = sum;
      }
    });
  });
}

template <int kBits, int kGroups, int kM>
void scaled_rows(const GemvTask& task, std::size_t begin, std::size_t end) {
  constexpr std::size_t kBytes = tile_bytes(kBits), kEntries = ScaledTable<kBits>::kEntries;
  constexpr int kRun = kSteps / kGroups;  // steps that share a scale
  const Weight& w = *task.weight;
  const Rows<kM> x(task);
  const ScaledTable<kBits> table(w.table);
  alignas(64) std::uint16_t tables[kAhead * kTileRows * kGroups * kEntries];
  for (std::size_t stripe = begin; stripe < end; stripe++) {
    __m512 sums[kTileRows][kM];
    unroll<int(kTileRows)>([&](auto r) FDK_LAMBDA {
      FDK_UNROLL
      for (int m = 0; m < kM; m++) sums[r.value][m] = _mm512_setzero_ps();
    });
    for_tiles(
        w, stripe, 0, w.tiles, kBytes,
        [&](std::size_t tile, const std::uint8_t* codes, std::size_t) FDK_LAMBDA {
          if (tile % kAhead == 0) {
            const std::size_t last = tile + kAhead < w.tiles ? tile + kAhead : w.tiles;
            scale_tables<kBits, kGroups>(w, table, stripe, tile, last, tables);
          }
          const std::uint16_t* of_tile = tables + tile % kAhead * kTileRows * kGroups * kEntries;
          for (std::size_t i = 0; i < kBytes; i += 64) {
            _mm_prefetch(reinterpret_cast<const char*>(codes + kPrefetchBytes + i), _MM_HINT_T0);
          }
          // Two rows of w at a time, so that one load of x serves both.
          unroll<int(kTileRows) / 2>([&](auto pair) FDK_LAMBDA {
            constexpr int r = 2 * pair.value;
            const Avx512Codes<kBits> first(codes, r), second(codes, r + 1);
            // Keeps GCC 12 from holding the x of one pair for the next, and spilling the sums.
            asm volatile("" : : : "memory");
            unroll<kSteps>([&](auto step) FDK_LAMBDA {
              constexpr int s = step.value;
              const std::uint16_t* of_rows = of_tile + (r * kGroups + s / kRun) * kEntries;
              const __m512i a = _mm512_permutexvar_epi16(index_of<kBits, s>(first),
                                                         ScaledTable<kBits>::load(of_rows));
              const __m512i b =
                  _mm512_permutexvar_epi16(index_of<kBits, s>(second),
                                           ScaledTable<kBits>::load(of_rows + kGroups * kEntries));
              FDK_UNROLL
              for (int m = 0; m < kM; m++) {
                const __m512bh activations = x.at(m, tile * kTileK + s * kStep);
                sums[r][m] = _mm512_dpbf16_ps(sums[r][m], activations, as_bf16(a));
                sums[r + 1][m] = _mm512_dpbf16_ps(sums[r + 1][m], activations, as_bf16(b));
              }
            });
          });
        });
    write_sums<kM>(task, stripe, sums);
  }
}

// As for m = 1: the scale is applied to the sums of a group.
template <int kBits, int kGroups, int kM>
void summed_rows(const GemvTask& task, std::size_t begin, std::size_t end) {
  constexpr std::size_t kBytes = tile_bytes(kBits);
  constexpr int kRun = kGroups >= kSteps ? 1 : kSteps / kGroups;  // steps that share a scale
  const Weight& w = *task.weight;
  const bool affine = w.zeros != nullptr;
  const Rows<kM> x(task);
  const Table16<kBits> table(w.table);
  const auto sum_of = [&](int m, std::size_t position) FDK_LAMBDA {
    const std::size_t row = std::size_t(m) < task.m ? std::size_t(m) : task.m - 1;
    return _mm512_loadu_ps(task.x_sums + (row * w.tiles * kTileK + position) / 2);
  };
  for (std::size_t stripe = begin; stripe < end; stripe++) {
    __m512 sums[kTileRows][kM];
    unroll<int(kTileRows)>([&](auto r) FDK_LAMBDA {
      FDK_UNROLL
      for (int m = 0; m < kM; m++) sums[r.value][m] = _mm512_setzero_ps();
    });
    for_tiles(w, stripe, 0, w.tiles, kBytes,
              [&](std::size_t tile, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
                alignas(64) float scales[kGroups * kTileRows], zeros[kGroups * kTileRows];
                load_groups<kGroups, false>(w, slot, scales);
                if (affine) load_groups<kGroups, true>(w, slot, zeros);
                asm volatile("" : : "r"(scales), "r"(zeros) : "memory");  // as in scale_tables
                for (std::size_t i = 0; i < kBytes; i += 64) {
                  _mm_prefetch(reinterpret_cast<const char*>(codes + kPrefetchBytes + i),
                               _MM_HINT_T0);
                }
                unroll<int(kTileRows)>([&](auto row) FDK_LAMBDA {
                  constexpr std::size_t r = row.value;
                  const Values<kBits> values(codes, r, table);
                  unroll<kSteps / kRun>([&](auto run) FDK_LAMBDA {
                    constexpr int first = run.value * kRun;
                    __m512 part[kM];
                    FDK_UNROLL
                    for (int m = 0; m < kM; m++) part[m] = _mm512_setzero_ps();
                    unroll<kRun>([&](auto i) FDK_LAMBDA {
                      constexpr int s = first + i.value;
                      FDK_UNROLL
                      for (int m = 0; m < kM; m++) {
                        part[m] = _mm512_dpbf16_ps(part[m], x.at(m, tile * kTileK + s * kStep),
                                                   as_bf16(values.v[s]));
                      }
                      if (affine) {
                        FDK_UNROLL
                        for (int m = 0; m < kM; m++) {
                          part[m] = _mm512_fnmadd_ps(group_at<kGroups, s>(zeros, r),
                                                     sum_of(m, tile * kTileK + s * kStep), part[m]);
                        }
                      }
                    });
                    const __m512 scale = group_at<kGroups, first>(scales, r);
                    FDK_UNROLL
                    for (int m = 0; m < kM; m++)
                      sums[r][m] = _mm512_fmadd_ps(part[m], scale, sums[r][m]);
                  });
                });
              });
    write_sums<kM>(task, stripe, sums);
  }
}

// Not every combination of groups and m has an instance: 96 of them took two minutes to compile.
template <int kBits>
FDK_INLINE void rows_of(const GemvTask& task, std::size_t begin, std::size_t end) {
  const std::size_t groups = task.weight->groups_per_tile;
  if constexpr (kScaledTable<kBits>) {
    if (groups == 4) {
      if (task.m <= 2) return scaled_rows<kBits, 4, 2>(task, begin, end);
      if (task.m <= 4) return scaled_rows<kBits, 4, 4>(task, begin, end);
      return scaled_rows<kBits, 4, 6>(task, begin, end);
    }
    if (groups < 4) {
      // Building the scaled codebooks of a group costs as much as two more products per row of x.
      if (task.m <= 2) return summed_rows<kBits, 2, 2>(task, begin, end);
      if (task.m <= 4) return scaled_rows<kBits, 2, 4>(task, begin, end);
      return scaled_rows<kBits, 2, 6>(task, begin, end);
    }
    return summed_rows<kBits, 8, 4>(task, begin, end);
  } else {
    if (groups > 2) return summed_rows<kBits, 8, 4>(task, begin, end);
    if (task.m <= 2) return summed_rows<kBits, 2, 2>(task, begin, end);
    if (task.m <= 4) return summed_rows<kBits, 2, 4>(task, begin, end);
    if (task.m == 5) return summed_rows<kBits, 2, 5>(task, begin, end);
    return summed_rows<kBits, 2, 6>(task, begin, end);
  }
}

// The part of the task for `rows` rows of x from `row` on.
GemvTask part_of(const GemvTask& task, std::size_t row, std::size_t rows) {
  const std::size_t positions = task.weight->tiles * kTileK;
  GemvTask part = task;
  part.x = static_cast<const std::uint16_t*>(task.x) + row * positions;
  if (task.x_sums != nullptr) part.x_sums = task.x_sums + row * positions / 2;
  part.m = rows;
  part.y = task.y + row * task.y_stride;
  return part;
}

}  // namespace

void gemm_small_m_avx512bf16(const GemvTask& task, std::size_t begin, std::size_t end) {
  const Weight& w = *task.weight;
  const std::size_t passes = ceil_div(task.m, rows_per_pass_avx512bf16(w));
  for (std::size_t pass = 0; pass < passes; pass++) {
    const std::size_t row = pass * task.m / passes, rows = (pass + 1) * task.m / passes - row;
    const GemvTask part = part_of(task, row, rows);
    with_bits(w.bits, [&](auto bits) FDK_LAMBDA { rows_of<bits.value>(part, begin, end); });
  }
}

}  // namespace fdk
