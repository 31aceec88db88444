// Dot products: AVX-512.
#include <immintrin.h>

#include "common/dot-inl.h"

namespace fdk {
namespace {

struct Avx512 {
  using Sum = __m512;
  template <int kType>
  static constexpr std::size_t kLanes = 16;

  static FDK_INLINE Sum zero() { return _mm512_setzero_ps(); }
  static FDK_INLINE Sum add(Sum a, Sum b) { return _mm512_add_ps(a, b); }
  static FDK_INLINE float sum(Sum v) { return _mm512_reduce_add_ps(v); }
  template <int kType>
  static FDK_INLINE __m512 load(const std::uint8_t* p) {
    if constexpr (Activation(kType) == Activation::fp32) return _mm512_loadu_ps(p);
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }
  template <int kType>
  static FDK_INLINE Sum add_products(Sum sum, const std::uint8_t* x, const std::uint8_t* w) {
    return _mm512_fmadd_ps(load<kType>(x), load<kType>(w), sum);
  }
};

}  // namespace

extern const Dots kDotsAvx512 = dots_of<Avx512>();

}  // namespace fdk
