// GradPanels on AVX-512 BF16.
#include <immintrin.h>

#include "avx512bf16.h"
#include "kernels.h"
#include "simd_float.h"

namespace fdk {
namespace {

constexpr std::size_t kLanes = 32;

void pair_rows(const std::uint16_t* w, std::size_t stride, std::size_t rows, std::size_t positions,
               std::uint16_t* panels, std::size_t step) {
  // 16-bit lanes of two rows in turns: of positions 0 to 15, and 16 more for the other half.
  alignas(64) std::uint16_t lanes[kLanes];
  for (unsigned i = 0; i < kLanes; i++) lanes[i] = std::uint16_t(i / 2 + kLanes * (i % 2));
  const __m512i low = _mm512_load_si512(lanes);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(kLanes / 2));
  for (std::size_t r = 0; r < rows; r += 2) {
    const std::uint16_t* from = w + r * stride;
    std::uint16_t* to = panels + r * kLanes;
    for (std::size_t p = 0; p < positions; p += kLanes, to += step) {
      const __m512i first = _mm512_loadu_si512(from + p);
      const __m512i second = _mm512_loadu_si512(from + stride + p);
      _mm512_storeu_si512(to, _mm512_permutex2var_epi16(first, low, second));
      _mm512_storeu_si512(to + kLanes, _mm512_permutex2var_epi16(first, high, second));
    }
  }
}

// To nearest, ties to even, and NaN as NaN: `vcvtneps2bf16` would flush subnormals.
FDK_INLINE __m256i rounded(__m512 sums) {
  const __m512i bits = _mm512_castps_si512(sums);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(sums, sums, _CMP_UNORD_Q);
  const __m512i all = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(all, 16));
}

void round_panel(const float* products, std::uint16_t* out) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), rounded(_mm512_loadu_ps(products)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16),
                      rounded(_mm512_loadu_ps(products + 16)));
}

}  // namespace

extern const GradPanels kAvx512Bf16Grad = {kLanes, pair_rows, round_panel};

}  // namespace fdk
