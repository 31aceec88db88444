// Blockwise quantisation: AVX2, FMA and F16C, 8 lanes.
#include <immintrin.h>

#include "blockwise/blockwise-inl.h"

namespace fdk {
namespace {

struct Avx2 {
  using Float = __m256;
  using Codes = __m256i;
  using Table = __m256;
  // Each code in a byte of both halves: shuffles of bytes stay within 128 bits.
  using Codes16 = __m256i;
  struct Table16 {
    __m256 low, high;
  };
  static constexpr std::size_t kLanes = 8;

  template <int kType>
  static FDK_INLINE Float load(const std::uint8_t* p) {
    if constexpr (Activation(kType) == Activation::fp32) {
      return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
    }
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    if constexpr (Activation(kType) == Activation::fp16) return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }

  template <int kType>
  static FDK_INLINE void store(std::uint8_t* p, Float v) {
    if constexpr (Activation(kType) == Activation::fp32) {
      _mm256_storeu_ps(reinterpret_cast<float*>(p), v);
    } else {
      __m128i* to = reinterpret_cast<__m128i*>(p);
      if constexpr (Activation(kType) == Activation::fp16) {
        _mm_storeu_si128(to, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
      } else {
        _mm_storeu_si128(to, to_bf16(v));
      }
    }
  }

  static FDK_INLINE __m128i to_bf16(Float v) {
    const __m256i bits = _mm256_castps_si256(v), one = _mm256_set1_epi32(1);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    const __m256i rounded =
        _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i chosen = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    return narrow(_mm256_packus_epi32(chosen, chosen));
  }

  // The low 64 bits of both halves.
  static FDK_INLINE __m128i narrow(__m256i v) {
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(v, 0x08));
  }

  static FDK_INLINE Float set1(float v) { return _mm256_set1_ps(v); }
  static FDK_INLINE Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static FDK_INLINE Float div(Float a, Float b) { return _mm256_div_ps(a, b); }

  // Compared as bits, magnitudes keep their order and NaN is above infinity.
  static FDK_INLINE __m256i no_magnitude() { return _mm256_setzero_si256(); }
  static FDK_INLINE __m256i larger_magnitude(__m256i largest, Float x) {
    const __m256i magnitude =
        _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7FFFFFFF));
    return _mm256_max_epi32(largest, magnitude);
  }
  static FDK_INLINE float largest(__m256i v) {
    __m128i best = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    best = _mm_max_epi32(best, _mm_shuffle_epi32(best, 0x4E));
    best = _mm_max_epi32(best, _mm_shuffle_epi32(best, 0xB1));
    return float_of_bits(std::uint32_t(_mm_cvtsi128_si32(best)));
  }

  static FDK_INLINE Codes codes_by_key(const std::uint32_t* keys, Float x) {
    const __m256i bits = _mm256_castps_si256(x), half = _mm256_set1_epi32(0xFFFF);
    const __m256i entry =
        _mm256_i32gather_epi32(reinterpret_cast<const int*>(keys), _mm256_srli_epi32(bits, 16), 4);
    const __m256i above =
        _mm256_cmpgt_epi32(_mm256_and_si256(bits, half), _mm256_and_si256(entry, half));
    const __m256i lower = _mm256_and_si256(_mm256_srli_epi32(entry, 16), _mm256_set1_epi32(0xFF));
    return _mm256_blendv_epi8(lower, _mm256_srli_epi32(entry, 24), above);
  }
  // Codes have at most eight bits.
  static FDK_INLINE void store_bytes(std::uint8_t* to, Codes codes) {
    const __m128i words = narrow(_mm256_packus_epi32(codes, codes));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(words, words));
  }

  static FDK_INLINE Table table(const float* entries) { return _mm256_loadu_ps(entries); }
  static FDK_INLINE Float look_up(Table table, Codes at) {
    return _mm256_permutevar8x32_ps(table, at);
  }
  static FDK_INLINE Codes no_codes() { return _mm256_setzero_si256(); }
  // 2 codes + (x > bound)
  static FDK_INLINE Codes twice_and_above(Codes codes, Float x, Float bound) {
    const __m256i above = _mm256_castps_si256(_mm256_cmp_ps(x, bound, _CMP_GT_OQ));
    return _mm256_sub_epi32(_mm256_add_epi32(codes, codes), above);
  }
  static FDK_INLINE Codes16 codes16(const std::uint8_t* codes) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  }
  static FDK_INLINE Codes look_up_codes(Codes16 codes, Codes at) {
    return _mm256_and_si256(_mm256_shuffle_epi8(codes, at), _mm256_set1_epi32(0xFF));
  }
  static FDK_INLINE void store_pairs(std::uint8_t* to, Codes codes) {
    const __m256i pairs =
        _mm256_or_si256(_mm256_slli_epi64(codes, 4), _mm256_srli_epi64(codes, 32));
    // The low byte of each 64 bits.
    const __m256i bytes = _mm256_shuffle_epi8(pairs, _mm256_set1_epi32(0x00000800));
    const std::uint32_t low = std::uint32_t(_mm256_extract_epi16(bytes, 0));
    const std::uint32_t four = low | std::uint32_t(_mm256_extract_epi16(bytes, 8)) << 16;
    std::memcpy(to, &four, sizeof four);
  }

  static FDK_INLINE Codes load_bytes(const std::uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static FDK_INLINE Float gather(const float* code, Codes at) {
    return _mm256_i32gather_ps(code, at, 4);
  }
  // The high bits of a byte, then the low ones with any bits above.
  static FDK_INLINE Codes load_nibbles(const std::uint8_t* p) {
    std::uint32_t four;
    std::memcpy(&four, p, sizeof four);
    const __m256i bytes = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(int(four)));
    return _mm256_or_si256(_mm256_srli_epi64(bytes, 4), _mm256_slli_epi64(bytes, 32));
  }
  static FDK_INLINE Table16 table16(const float* code, float scale) {
    const __m256 by = _mm256_set1_ps(scale);
    return {_mm256_mul_ps(_mm256_loadu_ps(code), by), _mm256_mul_ps(_mm256_loadu_ps(code + 8), by)};
  }
  static FDK_INLINE Float look_up16(const Table16& table, Codes at) {
    const __m256 bit3 = _mm256_castsi256_ps(_mm256_slli_epi32(at, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, at),
                            _mm256_permutevar8x32_ps(table.high, at), bit3);
  }
  static FDK_INLINE Float part_of(const Table16& table, std::size_t first) {
    return first == 0 ? table.low : table.high;
  }
  // The low bytes of 16 entries, and the high bytes.
  struct HalfTable {
    __m256i low, high;
  };
  static FDK_INLINE HalfTable half_table(const std::uint16_t* products) {
    const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(products));
    const __m256i low = _mm256_and_si256(all, _mm256_set1_epi16(0xFF));
    const __m256i high = _mm256_srli_epi16(all, 8);
    // [low of 0 to 7, high of 0 to 7, low of 8 to 15, high of 8 to 15]
    const __m256i bytes = _mm256_packus_epi16(low, high);
    return {_mm256_permute4x64_epi64(bytes, 0x88), _mm256_permute4x64_epi64(bytes, 0xDD)};
  }
  static FDK_INLINE void store_halves(std::uint8_t* to, const HalfTable& table,
                                      const std::uint8_t* codes) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    const __m128i low_bits = _mm_set1_epi8(15);
    const __m128i first = _mm_and_si128(_mm_srli_epi16(bytes, 4), low_bits);
    const __m128i second = _mm_and_si128(bytes, low_bits);
    const __m256i index =
        _mm256_set_m128i(_mm_unpackhi_epi8(first, second), _mm_unpacklo_epi8(first, second));
    const __m256i low = _mm256_shuffle_epi8(table.low, index);
    const __m256i high = _mm256_shuffle_epi8(table.high, index);
    const __m256i outer = _mm256_unpacklo_epi8(low, high);  // values 0 to 7, 16 to 23
    const __m256i inner = _mm256_unpackhi_epi8(low, high);  // values 8 to 15, 24 to 31
    __m256i* out = reinterpret_cast<__m256i*>(to);
    _mm256_storeu_si256(out, _mm256_permute2x128_si256(outer, inner, 0x20));
    _mm256_storeu_si256(out + 1, _mm256_permute2x128_si256(outer, inner, 0x31));
  }
};

}  // namespace

extern const BlockKernels kBlocksAvx2 = block_kernels_of<Avx2>();

}  // namespace fdk
