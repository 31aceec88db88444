// The linear kernels of AVX2 with FMA and F16C: 8 float32 lanes, lookups of float values.
#include <immintrin.h>

#include "x86/gemv_avx2-inl.h"
#include "common/kernels.h"
#include "common/gemv-inl.h"
#include "common/gemm-inl.h"
#include "x86/scales_x86-inl.h"

namespace fdk {
namespace {

struct Avx2 {
  using Float = __m256;
  static constexpr int kLanes = 8;

  static FDK_INLINE Float zero() { return _mm256_setzero_ps(); }
  static FDK_INLINE Float load(const float* p) { return _mm256_loadu_ps(p); }
  static FDK_INLINE void store(float* p, Float v) { _mm256_storeu_ps(p, v); }
  static FDK_INLINE Float set1(float v) { return _mm256_set1_ps(v); }
  static FDK_INLINE Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static FDK_INLINE Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
  static FDK_INLINE Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static FDK_INLINE Float sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
  static FDK_INLINE Float two_groups(float a, float) { return _mm256_set1_ps(a); }
  static FDK_INLINE void prefetch(const void* p) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
  }
  static FDK_INLINE float sum(Float v) { return sum_of(v); }

  static FDK_INLINE void load4(const void* p, std::size_t slot, ScaleType type, float* out) {
    _mm_storeu_ps(out, load4_scales(p, slot, type));
  }
  static FDK_INLINE void load4_u8(const void* p, std::size_t slot, float* out) {
    _mm_storeu_ps(out, load4_bytes(p, slot));
  }

  // The lanes of a plane for positions 0 to 15 and 16 to 31 of each 32, with fields 4 bits apart:
  // field s, shifted right by 4 s, has the 16 codes of step s.
  template <int kWidth>
  static FDK_INLINE void load_plane(const std::uint8_t* p, __m256i& lo, __m256i& hi) {
    if constexpr (kWidth == 4) {
      lo = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
      hi = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
    } else if constexpr (kWidth == 2) {
      lo = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
      hi = _mm256_srli_epi16(lo, 2);
    } else {
      static_assert(kWidth == 1);
      const __m256i q =
          _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
      lo = _mm256_blend_epi32(q, _mm256_srli_epi16(q, 1), 0xF0);
      hi = _mm256_srli_epi16(lo, 2);
    }
  }
  static FDK_INLINE __m256i select(std::uint16_t mask, __m256i a, __m256i b) {
    const __m256i m = _mm256_set1_epi16(short(mask));
    return _mm256_or_si256(_mm256_and_si256(m, a), _mm256_andnot_si256(m, b));
  }

  // The codes of a row. Up to 4 bits the upper bits of the fields, 4 bits apart, are undefined.
  template <int kBits>
  struct Codes {
    __m256i q[2], high[2];
    const __m256i* bytes;  // 8 bits: the codes, loaded when needed
    FDK_INLINE Codes(const std::uint8_t* tile, std::size_t r) {
      if constexpr (kBits == 8) {
        bytes = reinterpret_cast<const __m256i*>(tile + r * 128);
        return;
      } else {
        load_planes(tile, r);
      }
    }
    FDK_INLINE void load_planes(const std::uint8_t* tile, std::size_t r) {
      constexpr Planes planes = planes_of(kBits);
      const std::uint8_t* p[3];
      for (int i = 0; i < planes.count; i++) {
        p[i] = tile + planes.plane[i].offset + r * planes.plane[i].row_bytes();
      }
      load_plane<planes.plane[0].width>(p[0], q[0], q[1]);
      if constexpr (kBits == 3) {
        load_plane<1>(p[1], high[0], high[1]);
        for (int h = 0; h < 2; h++) q[h] = select(0x3333, q[h], _mm256_slli_epi16(high[h], 2));
      }
      if constexpr (kBits > 4) load_plane<planes.plane[1].width>(p[1], high[0], high[1]);
      if constexpr (kBits == 7) {
        __m256i top[2];
        load_plane<1>(p[2], top[0], top[1]);
        for (int h = 0; h < 2; h++) high[h] = select(0x3333, high[h], _mm256_slli_epi16(top[h], 2));
      }
    }
    // The codes of vector v in 32-bit lanes: the even or the odd ones of 16 positions; upper bits
    // undefined.
    template <int v>
    FDK_INLINE __m256i at() const {
      if constexpr (kBits == 8) {
        constexpr int block = v / 2;  // block of 16 positions: lanes 16 (block % 4), byte block / 4
        constexpr int shift = 8 * (block / 4) + 16 * (v % 2);
        return _mm256_srli_epi32(_mm256_loadu_si256(bytes + block % 4), shift);
      }
      constexpr int s = v / 4, h = v / 2 % 2, odd = 16 * (v % 2), shift = 4 * s + odd;
      const __m256i low = _mm256_srli_epi32(q[h], shift);
      if constexpr (kBits <= 4) return low;
      const __m256i up = shift >= 4 ? _mm256_srli_epi32(high[h], shift >= 4 ? shift - 4 : 0)
                                    : _mm256_slli_epi32(high[h], 4);
      return select(0x000F, low, up);
    }
  };
  template <int kBits>
  struct Table {
    const float* values;
    __m256 low, high;
    FDK_INLINE explicit Table(const float* table) : values(table) {
      constexpr unsigned kMask = (1u << kBits) - 1;
      alignas(32) float entries[16];
      for (unsigned i = 0; i < 16; i++) entries[i] = table[i & kMask];
      low = _mm256_load_ps(entries);
      high = _mm256_load_ps(entries + 8);
    }
    FDK_INLINE Float at(__m256i index) const {
      if constexpr (kBits <= 3) return _mm256_permutevar8x32_ps(low, index);
      if constexpr (kBits == 4) {
        const __m256 bit3 = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index),
                                _mm256_permutevar8x32_ps(high, index), bit3);
      }
      const __m256i mask = _mm256_set1_epi32((1 << kBits) - 1);
      return _mm256_i32gather_ps(values, _mm256_and_si256(index, mask), 4);
    }
  };

  template <int v, int kBits>
  static FDK_INLINE Float value(const Codes<kBits>& codes, const Table<kBits>& table) {
    return table.at(codes.template at<v>());
  }
};

struct Orders {
  Order pairs;  // the 8 even ones of each 16 positions, then the 8 odd ones
};

constexpr Orders make_orders() {
  Orders orders{};
  for (std::size_t i = 0; i < kTileK; i++) {
    const std::size_t in_vector = i % 8, odd = i / 8 % 2;
    orders.pairs[i] = std::uint8_t(i / 16 * 16 + 2 * in_vector + odd);
  }
  return orders;
}

constexpr Orders kOrders = make_orders();
constexpr int kPanelRows = 4;

void gemv_rows(const GemvTask& task, std::size_t begin, std::size_t end) {
  if (task.m == 1 && gemv_one_row<Avx2>(task, begin, end)) return;
  gemv<Avx2>(task, begin, end);
}

constexpr LinearKernels kernels_with(const TwoPassGemv* two_pass) {
  return {
      .x_is_bf16 = false,
      .gemv_order = &kOrders.pairs,
      .panel_order = &kOrders.pairs,
      .panel = 2 * Avx2::kLanes,
      .panel_step = Avx2::kLanes,
      .gemv = gemv_rows,
      .dequantise = dequantise<Avx2>,
      .gemm_panel = gemm_panel<Avx2, kPanelRows>,
      .dgrad = dgrad<Avx2, 4>,
      .two_pass = two_pass,
  };
}

}  // namespace

extern const LinearKernels kLinearAvx2 = kernels_with(nullptr);
extern const LinearKernels kLinearAvx2Bf16 = kernels_with(&kLutGemvAvx2);

}  // namespace fdk
