// The operations of a decode step between its products: AVX2, FMA and F16C.
#include <immintrin.h>

#include "common/decode_ops-inl.h"
#include "x86/codes_avx2-inl.h"

namespace fdk {
namespace {

struct Avx2 {
  using Float = __m256;
  static constexpr std::size_t kLanes = 8;

  template <Activation kType>
  static FDK_INLINE Float load(const void* p, std::size_t i) {
    if constexpr (kType == Activation::fp32) {
      return _mm256_loadu_ps(static_cast<const float*>(p) + i);
    } else {
      const auto* halves = static_cast<const std::uint16_t*>(p) + i;
      return widen<kType>(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
    }
  }
  template <Activation kType>
  static FDK_INLINE void store(void* p, std::size_t i, Float v) {
    if constexpr (kType == Activation::fp32) {
      _mm256_storeu_ps(static_cast<float*>(p) + i, v);
    } else {
      auto* halves = static_cast<std::uint16_t*>(p) + i;
      _mm_storeu_si128(reinterpret_cast<__m128i*>(halves), narrow<kType>(v));
    }
  }
  template <Activation kType>
  static FDK_INLINE Float round_to(Float v) {
    if constexpr (kType == Activation::fp32) return v;
    if constexpr (kType == Activation::bf16) {
      return _mm256_castsi256_ps(
          _mm256_and_si256(upper_half(v), _mm256_set1_epi32(int(0xFFFF0000))));
    }
    return widen<Activation::fp16>(narrow<Activation::fp16>(v));
  }
  static FDK_INLINE Float set1(float v) { return _mm256_set1_ps(v); }
  static FDK_INLINE Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
  static FDK_INLINE Float sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
  static FDK_INLINE Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static FDK_INLINE Float div(Float a, Float b) { return _mm256_div_ps(a, b); }
  static FDK_INLINE Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static FDK_INLINE Float max(Float a, Float b) { return _mm256_max_ps(a, b); }
  static FDK_INLINE Float round(Float v) {
    return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static FDK_INLINE Float power_of_two(Float v) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(v), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  }
  static FDK_INLINE float sum(Float v) { return sum_of(v); }

 private:
  template <Activation kType>
  static FDK_INLINE Float widen(__m128i halves) {
    if constexpr (kType == Activation::fp16) return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
  // bf16 in the upper halves of 32-bit lanes, rounded as by to_bf16; the lower halves are
  // undefined.
  static FDK_INLINE __m256i upper_half(Float v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(_mm256_set1_epi32(0x7FFF), odd);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    return _mm256_blendv_epi8(_mm256_add_epi32(bits, up), quiet, nan);
  }
  template <Activation kType>
  static FDK_INLINE __m128i narrow(Float v) {
    if constexpr (kType == Activation::fp16) {
      return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    const __m256i halves = _mm256_srli_epi32(upper_half(v), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  }
};

}  // namespace

extern const DecodeOps kDecodeOpsAvx2 = decode_ops_of<Avx2>();

}  // namespace fdk
