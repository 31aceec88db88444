// Dot products: AVX2 and FMA.
#include <immintrin.h>

#include "common/dot-inl.h"

namespace fdk {
namespace {

struct Avx2 {
  using Sum = __m256;
  template <int kType>
  static constexpr std::size_t kLanes = 8;

  static FDK_INLINE Sum zero() { return _mm256_setzero_ps(); }
  static FDK_INLINE Sum add(Sum a, Sum b) { return _mm256_add_ps(a, b); }
  static FDK_INLINE float sum(Sum v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }
  template <int kType>
  static FDK_INLINE __m256 load(const std::uint8_t* p) {
    if constexpr (Activation(kType) == Activation::fp32) {
      return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
    }
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }
  template <int kType>
  static FDK_INLINE Sum add_products(Sum sum, const std::uint8_t* x, const std::uint8_t* w) {
    return _mm256_fmadd_ps(load<kType>(x), load<kType>(w), sum);
  }
};

}  // namespace

extern const Dots kDotsAvx2 = dots_of<Avx2>();

}  // namespace fdk
