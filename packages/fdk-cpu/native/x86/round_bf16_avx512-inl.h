// Rounds float32 to bf16 as the reference does: AVX-512.
#pragma once

#include <immintrin.h>

#include "common/simd-inl.h"

namespace fdk {
namespace {

// The result is in the upper halves of 32-bit lanes; the lower halves are undefined. Ties go to
// even and NaN stays NaN. `vcvtneps2bf16` would flush subnormals.
FDK_INLINE __m512i rounded_to_bf16(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
}

}  // namespace
}  // namespace fdk
