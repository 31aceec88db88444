// The GEMM for large m: a block of W_hat times panels of x: AVX-512 BF16.
#include <immintrin.h>

#include "x86/linear_avx512bf16.h"
#include "x86/codebook_avx512bf16-inl.h"
#include "common/kernels.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

// Positions between two prefetches.
constexpr std::size_t kTurn = 8;
static_assert(kPanelDepth % kTurn == 0);

// Prefetches into L2 by the rows of one step, at most one cache line per turn: bursts would stall
// the products (Zen 5, 4096 x 14336, m = 512, one thread: 139 -> 134 ms).
template <int kRows>
struct PanelPrefetch {
  static constexpr std::size_t kStripes = kRows / kTileRows;
  const char* next;
  std::size_t step = 0, part_step = 0;

  FDK_INLINE PanelPrefetch(const GemmPanelTask& task, std::size_t row)
      : next(reinterpret_cast<const char*>(task.next)) {
    const std::size_t turns = task.depth / kTurn, part = row / kTileRows;
    if (part >= task.parts) return;
    next += part * task.part_stride;
    step = task.part_bytes * kStripes / turns;
    if (part + 1 < task.parts) part_step = task.part_stride - turns / kStripes * step;
  }
  FDK_INLINE void line() {
    _mm_prefetch(next, _MM_HINT_T1);
    next += step;
  }
  // From the part of the first four rows to that of the others, if there is one.
  FDK_INLINE void next_part() { next += part_step; }
};

// y[row][panel] += w[row][depth] * x[depth / 2][panel][2], for kVectors registers of 16 lanes of
// the panel and, if kHalf, 8 more lanes.
//
// Eight rows and four pairs per turn reach 235.7 of the 236 GFLOP/s of vdpbf16ps alone (Zen 4, one
// thread); twelve rows, two pairs per turn and a prefetch per line of x all reach 223 to 225.
template <int kRows, int kVectors, bool kHalf, bool kPrefetching>
void panel_rows(const GemmPanelTask& task, std::size_t row) {
  constexpr std::size_t kLast = 16 * std::size_t(kVectors);  // first lane of the half
  constexpr std::size_t kPanel = kLast + (kHalf ? 8 : 0);
  const std::uint16_t* rows[kRows];
  const std::uint16_t* x = static_cast<const std::uint16_t*>(task.x);
  float* y = task.y + row * task.panel;
  // The sums of eight half registers take half the latency of a product, so panels of 8 lanes need
  // two chains per row.
  constexpr int kChains = kVectors == 0 ? 2 : 1;
  __m512 sums[kRows][kVectors];
  __m256 half_sums[kRows][kChains];
  FDK_UNROLL
  for (int r = 0; r < kRows; r++) {
    FDK_UNROLL
    for (int v = 0; v < kVectors; v++) sums[r][v] = _mm512_setzero_ps();
    FDK_UNROLL
    for (int c = 0; c < kChains; c++) half_sums[r][c] = _mm256_setzero_ps();
    rows[r] = static_cast<const std::uint16_t*>(task.w) + (row + std::size_t(r)) * task.stride;
  }
  const auto turn = [&]() FDK_LAMBDA {
    FDK_UNROLL
    for (std::size_t i = 0; i < kTurn; i += 2, x += 2 * kPanel) {
      __m512bh lane[kVectors];
      FDK_UNROLL
      for (int v = 0; v < kVectors; v++) lane[v] = as_bf16(_mm512_loadu_si512(x + v * 32));
      __m256bh half_lane{};
      if constexpr (kHalf) {
        half_lane = (__m256bh)_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 2 * kLast));
      }
      FDK_UNROLL
      for (int r = 0; r < kRows; r++) {
        const __m512i pair = _mm512_broadcastd_epi32(_mm_loadu_si32(rows[r] + i));
        FDK_UNROLL
        for (int v = 0; v < kVectors; v++) {
          sums[r][v] = _mm512_dpbf16_ps(sums[r][v], lane[v], as_bf16(pair));
        }
        if constexpr (kHalf) {
          __m256& sum = half_sums[r][i / 2 % kChains];
          sum = _mm256_dpbf16_ps(sum, half_lane, (__m256bh)_mm512_castsi512_si256(pair));
        }
      }
    }
    FDK_UNROLL
    for (int r = 0; r < kRows; r++) {
      rows[r] += kTurn;
      asm("" : "+r"(rows[r]));  // keeps GCC 12 from a pointer per sum, most of them spilled
    }
  };
  const std::size_t turns = task.depth / kTurn;
  if constexpr (kPrefetching) {
    PanelPrefetch<kRows> prefetch(task, row);
    for (std::size_t i = 0; i < turns; i++) {
      if (i == turns / 2) prefetch.next_part();
      prefetch.line();
      turn();
    }
  } else {
    for (std::size_t i = 0; i < turns; i++) turn();
  }
  FDK_UNROLL
  for (int r = 0; r < kRows; r++) {
    float* to = y + r * task.panel;
    FDK_UNROLL
    for (int v = 0; v < kVectors; v++) {
      _mm512_storeu_ps(to + v * 16, _mm512_add_ps(_mm512_loadu_ps(to + v * 16), sums[r][v]));
    }
    if constexpr (kHalf) {
      __m256 half = half_sums[r][0];
      if constexpr (kChains == 2) half = _mm256_add_ps(half, half_sums[r][1]);
      _mm256_storeu_ps(to + kLast, _mm256_add_ps(_mm256_loadu_ps(to + kLast), half));
    }
  }
}

template <int kVectors, bool kHalf>
FDK_INLINE void panel_all(const GemmPanelTask& task) {
  constexpr int kRows = 8, kFew = int(kTileRows);
  static_assert(kRows == 2 * kFew);  // assumed by PanelPrefetch
  const bool prefetch = task.next != nullptr;
  std::size_t row = 0;
  for (; row + kRows <= task.rows; row += kRows) {
    if (prefetch) {
      panel_rows<kRows, kVectors, kHalf, true>(task, row);
    } else {
      panel_rows<kRows, kVectors, kHalf, false>(task, row);
    }
  }
  if (row < task.rows) panel_rows<kFew, kVectors, kHalf, false>(task, row);
}

}  // namespace

void gemm_panel_avx512bf16(const GemmPanelTask& task) {
  switch (task.panel) {
    case 8:
      return panel_all<0, true>(task);
    case 16:
      return panel_all<1, false>(task);
    case 24:
      return panel_all<1, true>(task);
    default:
      return panel_all<2, false>(task);
  }
}

}  // namespace fdk
