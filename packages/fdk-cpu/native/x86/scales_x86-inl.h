// Loads four scales or zero points as float32, on AVX2 and AVX-512.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "common/kernels.h"
#include "common/layout.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

FDK_INLINE __m128 load4_scales(const void* p, std::size_t slot, ScaleType type) {
  const std::uint8_t* bytes = static_cast<const std::uint8_t*>(p) + slot * bytes_of(type);
  const __m128i* half = reinterpret_cast<const __m128i*>(bytes);
  switch (type) {
    case ScaleType::bf16:
      return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64(half)), 16));
    case ScaleType::fp16:
      return _mm_cvtph_ps(_mm_loadl_epi64(half));
    case ScaleType::fp32:
      return _mm_loadu_ps(reinterpret_cast<const float*>(bytes));
    default:
      return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu8_epi32(_mm_loadu_si32(bytes)), 23));
  }
}

FDK_INLINE __m128 load4_bytes(const void* p, std::size_t slot) {
  const __m128i bytes = _mm_loadu_si32(static_cast<const std::uint8_t*>(p) + slot);
  return _mm_cvtepi32_ps(_mm_cvtepu8_epi32(bytes));
}

// The weight must have zero points.
FDK_INLINE __m128 load4_zeros(const Weight& w, std::size_t slot) {
  static_assert(int(ZeroType::bf16) == int(ScaleType::bf16) + 1);
  if (w.zero_type == ZeroType::u8) return load4_bytes(w.zeros, slot);
  return load4_scales(w.zeros, slot, ScaleType(int(w.zero_type) - 1));
}

}  // namespace
}  // namespace fdk
