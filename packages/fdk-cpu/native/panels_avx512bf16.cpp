// Large m on AVX-512 BF16: products of a block of W_hat with panels of x.
#include <immintrin.h>

#include "avx512bf16.h"
#include "avx512bf16_values.h"
#include "kernels.h"
#include "simd.h"

namespace fdk {
namespace {

// Lines that a row step of a panel fetches into L2, one of x and one of codes a turn: bursts of
// them between the products cost as much as the time they take to arrive (m = 64, 8 bits: 3.4 ms of
// decoding where warm codes take 1.8).
template <int kRows>
struct Fetch {
  static constexpr std::ptrdiff_t kLine = 64;
  const char *x, *codes, *last;
  std::size_t stride, x_step;

  FDK_INLINE Fetch(const PanelTask& task, std::size_t row, std::size_t turns)
      : x(static_cast<const char*>(task.x)), codes(x), last(x), stride(0), x_step(0) {
    const std::size_t x_bytes = turns * kLine, x_from = row / kRows * x_bytes;
    if (x_from + x_bytes <= task.next_x_bytes) {
      x_step = kLine;
      x = static_cast<const char*>(task.next_x) + x_from;
    }
    const std::size_t stripe = row / kTileRows;
    if (stripe < task.next_stripes) {
      if (stripe + 1 < task.next_stripes) stride = task.codes_stride;
      codes = reinterpret_cast<const char*>(task.next_codes) + stripe * task.codes_stride;
      last = codes + task.codes_bytes - 1;
    }
  }
  FDK_INLINE void line() {
    _mm_prefetch(x, _MM_HINT_T1);
    _mm_prefetch(codes, _MM_HINT_T1);
    x += x_step;
    codes = last - codes > kLine ? codes + kLine : last;
  }
  // From the codes of the first four rows to the others', where there are any.
  FDK_INLINE void next_stripe(const PanelTask& task) {
    if (stride == 0) return;
    codes = last + stride - task.codes_bytes + 1;
    last += stride;
  }
};

// y[row][panel] += w[row][depth] * x[depth / 2][panel][2], for kVectors registers of 16 lanes of
// the panel and, if kHalf, 8 lanes more.
//
// Eight rows and four pairs a turn reach 235.7 GFLOP/s of the 236 that vdpbf16ps alone does (one
// thread, Zen 4); twelve rows 223 to 225, and so do eight with two pairs a turn or a prefetch for
// each line of x.
template <int kRows, int kVectors, bool kHalf, bool kFetch>
void panel_rows(const PanelTask& task, std::size_t row) {
  constexpr std::size_t kTurn = 8;  // positions
  static_assert(kPanelDepth % kTurn == 0);
  constexpr std::size_t kLast = 16 * std::size_t(kVectors);  // lane of the half
  const std::uint16_t* w = static_cast<const std::uint16_t*>(task.w) + row * task.stride;
  const std::uint16_t* x = static_cast<const std::uint16_t*>(task.x);
  Fetch<kRows> fetch(task, row, task.depth / kTurn);
  float* y = task.y + row * task.panel;
  __m512 sums[kRows][kVectors];
  __m256 half_sums[kRows];
  FDK_UNROLL
  for (int r = 0; r < kRows; r++) {
    FDK_UNROLL
    for (int v = 0; v < kVectors; v++) sums[r][v] = _mm512_setzero_ps();
    half_sums[r] = _mm256_setzero_ps();
  }
  for (std::size_t turn = 0; turn < task.depth; turn += kTurn) {
    if constexpr (kFetch) {
      if (turn == task.depth / (2 * kTurn) * kTurn) fetch.next_stripe(task);
      fetch.line();
    }
    FDK_UNROLL
    for (std::size_t i = turn; i < turn + kTurn; i += 2, x += 2 * task.panel) {
      __m512bh lane[kVectors];
      FDK_UNROLL
      for (int v = 0; v < kVectors; v++) lane[v] = as_bf16(_mm512_loadu_si512(x + v * 32));
      __m256bh half_lane{};
      if constexpr (kHalf) {
        half_lane = (__m256bh)_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 2 * kLast));
      }
      FDK_UNROLL
      for (int r = 0; r < kRows; r++) {
        const __m512i pair = _mm512_broadcastd_epi32(_mm_loadu_si32(w + r * task.stride + i));
        FDK_UNROLL
        for (int v = 0; v < kVectors; v++) {
          sums[r][v] = _mm512_dpbf16_ps(sums[r][v], lane[v], as_bf16(pair));
        }
        if constexpr (kHalf) {
          half_sums[r] =
              _mm256_dpbf16_ps(half_sums[r], half_lane, (__m256bh)_mm512_castsi512_si256(pair));
        }
      }
    }
  }
  FDK_UNROLL
  for (int r = 0; r < kRows; r++) {
    float* to = y + r * task.panel;
    FDK_UNROLL
    for (int v = 0; v < kVectors; v++) {
      _mm512_storeu_ps(to + v * 16, _mm512_add_ps(_mm512_loadu_ps(to + v * 16), sums[r][v]));
    }
    if constexpr (kHalf) {
      _mm256_storeu_ps(to + kLast, _mm256_add_ps(_mm256_loadu_ps(to + kLast), half_sums[r]));
    }
  }
}

template <int kVectors, bool kHalf>
FDK_INLINE void panel_all(const PanelTask& task) {
  constexpr int kRows = int(kAvx512Bf16PanelRows), kFew = int(kTileRows);
  static_assert(kRows == 2 * kFew);  // as Fetch has it
  const bool fetch = task.next_x != nullptr || task.next_codes != nullptr;
  std::size_t row = 0;
  for (; row + kRows <= task.rows; row += kRows) {
    if (fetch) {
      panel_rows<kRows, kVectors, kHalf, true>(task, row);
    } else {
      panel_rows<kRows, kVectors, kHalf, false>(task, row);
    }
  }
  if (row < task.rows) panel_rows<kFew, kVectors, kHalf, false>(task, row);
}

}  // namespace

void panel_avx512bf16(const PanelTask& task) {
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
