// Dot products: AVX-512 BF16, which multiplies pairs of bf16.
#include <immintrin.h>

#include "common/dot-inl.h"

namespace fdk {
namespace {

struct Avx512Bf16 {
  using Sum = __m512;
  template <int kType>
  static constexpr std::size_t kLanes = Activation(kType) == Activation::bf16 ? 32 : 16;

  static FDK_INLINE Sum zero() { return _mm512_setzero_ps(); }
  static FDK_INLINE Sum add(Sum a, Sum b) { return _mm512_add_ps(a, b); }
  static FDK_INLINE float sum(Sum v) { return _mm512_reduce_add_ps(v); }
  template <int kType>
  static FDK_INLINE Sum add_products(Sum sum, const std::uint8_t* x, const std::uint8_t* w) {
    if constexpr (Activation(kType) == Activation::fp32) {
      return _mm512_fmadd_ps(_mm512_loadu_ps(x), _mm512_loadu_ps(w), sum);
    } else {
      return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(x),
                              (__m512bh)_mm512_loadu_si512(w));
    }
  }
};

}  // namespace

extern const Dots kDotsAvx512Bf16 = dots_of<Avx512Bf16>();

}  // namespace fdk
