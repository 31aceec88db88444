// The GEMM for medium m: a dequantised stripe of W_hat times all rows of x: AVX-512 BF16.
#include <immintrin.h>

#include "x86/linear_avx512bf16.h"
#include "x86/codebook_avx512bf16-inl.h"
#include "common/kernels.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

// Rows of x that are multiplied with the four rows of a stripe in registers: 24 sums, four
// registers of W_hat and one of x.
constexpr std::size_t kMostRows = 6;

// The sums of the lanes of four registers, in order.
FDK_INLINE __m128 sums_of(const __m512 (&of)[kTileRows]) {
  const __m512 first =
      _mm512_add_ps(_mm512_unpacklo_ps(of[0], of[1]), _mm512_unpackhi_ps(of[0], of[1]));
  const __m512 second =
      _mm512_add_ps(_mm512_unpacklo_ps(of[2], of[3]), _mm512_unpackhi_ps(of[2], of[3]));
  const __m512 all =
      _mm512_add_ps(_mm512_shuffle_ps(first, second, 0x44), _mm512_shuffle_ps(first, second, 0xEE));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

template <std::size_t kM>
void stripe_rows(const GemmStripeTask& task) {
  constexpr std::size_t kVector = 32;
  static_assert(kTileK % kVector == 0);
  const std::uint16_t* w = static_cast<const std::uint16_t*>(task.w);
  const std::uint16_t* x = static_cast<const std::uint16_t*>(task.x);
  __m512 sums[kM][kTileRows];
  FDK_UNROLL
  for (std::size_t i = 0; i < kM; i++) {
    FDK_UNROLL
    for (std::size_t r = 0; r < kTileRows; r++) sums[i][r] = _mm512_setzero_ps();
  }
  for (std::size_t p = 0; p < task.depth; p += kVector) {
    __m512bh rows[kTileRows];
    FDK_UNROLL
    for (std::size_t r = 0; r < kTileRows; r++) {
      rows[r] = as_bf16(_mm512_loadu_si512(w + r * task.stride + p));
    }
    FDK_UNROLL
    for (std::size_t i = 0; i < kM; i++) {
      const __m512bh lanes = as_bf16(_mm512_loadu_si512(x + i * task.x_stride + p));
      FDK_UNROLL
      for (std::size_t r = 0; r < kTileRows; r++) {
        sums[i][r] = _mm512_dpbf16_ps(sums[i][r], lanes, rows[r]);
      }
    }
  }
  FDK_UNROLL
  for (std::size_t i = 0; i < kM; i++) {
    float* const y = task.y + i * task.y_stride;
    _mm_storeu_ps(y, _mm_add_ps(_mm_loadu_ps(y), sums_of(sums[i])));
  }
}

}  // namespace

void gemm_stripe_avx512bf16(const GemmStripeTask& task) {
  const std::size_t passes = ceil_div(task.m, kMostRows);
  GemmStripeTask part = task;
  for (std::size_t pass = 0; pass < passes; pass++) {
    const std::size_t row = pass * task.m / passes;
    part.m = (pass + 1) * task.m / passes - row;
    part.x = static_cast<const std::uint16_t*>(task.x) + row * task.x_stride;
    part.y = task.y + row * task.y_stride;
    switch (part.m) {
      case 1:
        stripe_rows<1>(part);
        break;
      case 2:
        stripe_rows<2>(part);
        break;
      case 3:
        stripe_rows<3>(part);
        break;
      case 4:
        stripe_rows<4>(part);
        break;
      case 5:
        stripe_rows<5>(part);
        break;
      default:
        stripe_rows<kMostRows>(part);
    }
  }
}

void gemm_stripes_avx512bf16(const GemmStripesTask& task, std::size_t begin, std::size_t end) {
  // 16 KiB of W_hat, which fits an L1 of 32 KiB with x. Rows are one cache line longer than a
  // power of two. The codes of the next 16 tiles are prefetched into L2 while these are dequantised
  // (4096 x 4096, m = 9, 8 bits, cold: 1.61 ms; without 2.81, during the products 2.16).
  constexpr std::size_t kTiles = 16, kStride = kTiles * kTileK + 64 / sizeof(std::uint16_t);
  const Weight& w = *task.weight;
  const std::size_t bytes = tile_bytes(w.bits);
  const auto x = static_cast<const std::uint16_t*>(task.x);
  alignas(64) std::uint16_t decoded[kTileRows * kStride];
  for (std::size_t stripe = begin; stripe < end; stripe++) {
    float* const y = task.y + stripe * kTileRows;
    for (std::size_t row = 0; row < task.m; row++) {
      _mm_storeu_ps(y + row * task.y_stride, _mm_setzero_ps());
    }
    for (std::size_t tile = 0; tile < w.tiles; tile += kTiles) {
      const std::size_t stop = tile + kTiles < w.tiles ? tile + kTiles : w.tiles;
      const Prefetcher prefetcher{w.codes + (stripe * w.tiles + tile + kTiles) * bytes, bytes};
      dequantise_prefetching_avx512bf16(w, stripe, tile, stop, decoded, kStride, prefetcher);
      gemm_stripe_avx512bf16({decoded, kStride, (stop - tile) * kTileK, x + tile * kTileK, task.m,
                              task.x_stride, y, task.y_stride});
    }
  }
}

}  // namespace fdk
