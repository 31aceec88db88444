// Blockwise quantisation: AVX-512 (F, BW, VL, DQ), 16 lanes.
#include <immintrin.h>

#include "blockwise/blockwise-inl.h"

namespace fdk {
namespace {

struct Avx512 {
  using Float = __m512;
  using Codes = __m512i;
  using Table = __m512;
  using Codes16 = __m512i;
  static constexpr std::size_t kLanes = 16;

  template <int kType>
  static FDK_INLINE Float load(const std::uint8_t* p) {
    if constexpr (Activation(kType) == Activation::fp32) return _mm512_loadu_ps(p);
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    if constexpr (Activation(kType) == Activation::fp16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }

  template <int kType>
  static FDK_INLINE void store(std::uint8_t* p, Float v) {
    if constexpr (Activation(kType) == Activation::fp32) {
      _mm512_storeu_ps(p, v);
    } else {
      __m256i* to = reinterpret_cast<__m256i*>(p);
      if constexpr (Activation(kType) == Activation::fp16) {
        _mm256_storeu_si256(to, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
      } else {
        _mm256_storeu_si256(to, to_bf16(v));
      }
    }
  }

  // vcvtneps2bf16 would flush subnormal values to zero.
  static FDK_INLINE __m256i to_bf16(Float v) {
    const __m512i bits = _mm512_castps_si512(v), one = _mm512_set1_epi32(1);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  }

  static FDK_INLINE Float set1(float v) { return _mm512_set1_ps(v); }
  static FDK_INLINE Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static FDK_INLINE Float div(Float a, Float b) { return _mm512_div_ps(a, b); }

  // Compared as bits, magnitudes keep their order and NaN is above infinity.
  static FDK_INLINE __m512i no_magnitude() { return _mm512_setzero_si512(); }
  static FDK_INLINE __m512i larger_magnitude(__m512i largest, Float x) {
    const __m512i magnitude =
        _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFFFFFF));
    return _mm512_max_epi32(largest, magnitude);
  }
  static FDK_INLINE float largest(__m512i v) {
    return float_of_bits(std::uint32_t(_mm512_reduce_max_epi32(v)));
  }

  static FDK_INLINE Codes codes_by_key(const std::uint32_t* keys, Float x) {
    const __m512i bits = _mm512_castps_si512(x), half = _mm512_set1_epi32(0xFFFF);
    const __m512i entry = _mm512_i32gather_epi32(_mm512_srli_epi32(bits, 16), keys, 4);
    const __mmask16 above =
        _mm512_cmpgt_epi32_mask(_mm512_and_si512(bits, half), _mm512_and_si512(entry, half));
    return _mm512_mask_srli_epi32(_mm512_srli_epi32(entry, 16), above, entry, 24);
  }
  static FDK_INLINE void store_bytes(std::uint8_t* to, Codes codes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(codes));
  }

  static FDK_INLINE Table table(const float* entries) { return _mm512_loadu_ps(entries); }
  static FDK_INLINE Float look_up(Table table, Codes at) {
    return _mm512_permutexvar_ps(at, table);
  }
  static FDK_INLINE Codes no_codes() { return _mm512_setzero_si512(); }
  // 2 codes + (x > bound)
  static FDK_INLINE Codes twice_and_above(Codes codes, Float x, Float bound) {
    const __m512i twice = _mm512_add_epi32(codes, codes);
    const __mmask16 above = _mm512_cmp_ps_mask(x, bound, _CMP_GT_OQ);
    return _mm512_mask_or_epi32(twice, above, twice, _mm512_set1_epi32(1));
  }
  static FDK_INLINE Codes16 codes16(const std::uint8_t* codes) { return load_bytes(codes); }
  static FDK_INLINE Codes look_up_codes(Codes16 codes, Codes at) {
    return _mm512_permutexvar_epi32(at, codes);
  }
  static FDK_INLINE void store_pairs(std::uint8_t* to, Codes codes) {
    const __m512i pairs =
        _mm512_or_si512(_mm512_slli_epi64(codes, 4), _mm512_srli_epi64(codes, 32));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm512_cvtepi64_epi8(pairs));
  }

  static FDK_INLINE Codes load_bytes(const std::uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static FDK_INLINE Float gather(const float* code, Codes at) {
    return _mm512_i32gather_ps(at, code, 4);
  }
  // The high bits of a byte, then the low ones with any bits above.
  static FDK_INLINE Codes load_nibbles(const std::uint8_t* p) {
    const __m512i bytes =
        _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm512_or_si512(_mm512_srli_epi64(bytes, 4), _mm512_slli_epi64(bytes, 32));
  }
  static FDK_INLINE Float table16(const float* code, float scale) {
    return _mm512_mul_ps(_mm512_loadu_ps(code), _mm512_set1_ps(scale));
  }
  static FDK_INLINE Float look_up16(Float table, Codes at) {
    return _mm512_permutexvar_ps(at, table);
  }
  static FDK_INLINE Float part_of(Float table, std::size_t) { return table; }
  // Twice, so that bit 4 of an index does not matter.
  static FDK_INLINE __m512i half_table(const std::uint16_t* products) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(products)));
  }
  static FDK_INLINE void store_halves(std::uint8_t* to, __m512i table, const std::uint8_t* codes) {
    const __m512i bytes = load_bytes(codes);
    const __m512i high = _mm512_srli_epi32(bytes, 4), low = _mm512_slli_epi32(bytes, 16);
    const __m512i index = _mm512_or_si512(high, low);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(index, table));
  }
};

}  // namespace

extern const BlockKernels kBlocksAvx512 = block_kernels_of<Avx512>();

}  // namespace fdk
