// The linear kernels of AVX-512 (F, BW, VL, DQ): 16 float32 lanes, lookups of float values.
#include <immintrin.h>

#include "x86/codes_avx512-inl.h"
#include "common/kernels.h"
#include "common/gemv-inl.h"
#include "common/gemm-inl.h"
#include "x86/scales_x86-inl.h"

namespace fdk {
namespace {

template <int kBits>
struct Avx512Table {
  const float* values;
  __m512 entries[4];  // the first 64 values

  FDK_INLINE explicit Avx512Table(const float* table) : values(table) {
    constexpr unsigned kMask = (1u << kBits) - 1;
    alignas(64) float repeated[64];
    for (unsigned i = 0; i < 64; i++) repeated[i] = table[i & kMask];
    for (int i = 0; i < 4; i++) entries[i] = _mm512_load_ps(repeated + 16 * i);
  }

  // index: 32-bit lanes with the code in the low bits and any bits above.
  FDK_INLINE __m512 at(__m512i index) const {
    if constexpr (kBits <= 4) {
      return _mm512_permutexvar_ps(index, entries[0]);
    } else if constexpr (kBits == 5) {
      return _mm512_permutex2var_ps(entries[0], index, entries[1]);
    } else if constexpr (kBits == 6) {
      const __mmask16 bit5 = _mm512_test_epi32_mask(index, _mm512_set1_epi32(32));
      return _mm512_mask_blend_ps(bit5, _mm512_permutex2var_ps(entries[0], index, entries[1]),
                                  _mm512_permutex2var_ps(entries[2], index, entries[3]));
    } else {
      const __m512i mask = _mm512_set1_epi32((1 << kBits) - 1);
      return _mm512_i32gather_ps(_mm512_and_si512(index, mask), values, 4);
    }
  }
};

struct Avx512 {
  using Float = __m512;
  static constexpr int kLanes = 16;
  template <int kBits>
  using Codes = Avx512Codes<kBits>;
  template <int kBits>
  using Table = Avx512Table<kBits>;

  static FDK_INLINE Float zero() { return _mm512_setzero_ps(); }
  static FDK_INLINE Float load(const float* p) { return _mm512_loadu_ps(p); }
  static FDK_INLINE void store(float* p, Float v) { _mm512_storeu_ps(p, v); }
  static FDK_INLINE Float set1(float v) { return _mm512_set1_ps(v); }
  static FDK_INLINE Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static FDK_INLINE Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static FDK_INLINE Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static FDK_INLINE Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
  static FDK_INLINE float sum(Float v) { return _mm512_reduce_add_ps(v); }
  static FDK_INLINE Float two_groups(float a, float b) {
    return _mm512_mask_blend_ps(0xFF00, _mm512_set1_ps(a), _mm512_set1_ps(b));
  }
  static FDK_INLINE void prefetch(const void* p) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
  }

  static FDK_INLINE void load4(const void* p, std::size_t slot, ScaleType type, float* out) {
    _mm_storeu_ps(out, load4_scales(p, slot, type));
  }
  static FDK_INLINE void load4_u8(const void* p, std::size_t slot, float* out) {
    _mm_storeu_ps(out, load4_bytes(p, slot));
  }

  // The even (v even) or odd ones of 32 positions.
  template <int v, int kBits>
  static FDK_INLINE Float value(const Avx512Codes<kBits>& codes, const Avx512Table<kBits>& table) {
    constexpr int s = v / 2, odd = 16 * (v % 2);
    constexpr int shift = Avx512Codes<kBits>::template kShift<s> + odd;
    const __m512i low = _mm512_srli_epi32(codes.template lanes<s>(), shift);
    if constexpr (kBits <= 4 || kBits == 8) return table.at(low);
    constexpr int up = shift - 4;  // bit 0 of a field of `high` becomes bit 4 of the code
    const __m512i high = up >= 0 ? _mm512_srli_epi32(codes.high, up >= 0 ? unsigned(up) : 0)
                                 : _mm512_slli_epi32(codes.high, 4);
    return table.at(select_bits(0x000F, low, high));
  }
};

struct Orders {
  Order pairs;  // the 16 even ones of each 32 positions, then the 16 odd ones
};

constexpr Orders make_orders() {
  Orders orders{};
  for (std::size_t i = 0; i < kTileK; i++) {
    const std::size_t in_vector = i % 16, odd = i / 16 % 2;
    orders.pairs[i] = std::uint8_t(i / 32 * 32 + 2 * in_vector + odd);
  }
  return orders;
}

constexpr Orders kOrders = make_orders();
constexpr int kPanelRows = 12;

}  // namespace

extern const LinearKernels kLinearAvx512 = {
    .x_is_bf16 = false,
    .gemv_order = &kOrders.pairs,
    .panel_order = &kOrders.pairs,
    .panel = 2 * Avx512::kLanes,
    .panel_step = Avx512::kLanes,
    .gemv = gemv<Avx512>,
    .dequantise = dequantise<Avx512>,
    .gemm_panel = gemm_panel<Avx512, kPanelRows>,
    .dgrad = dgrad<Avx512, 8>,
};

}  // namespace fdk
