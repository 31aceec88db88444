// Packs rows of x to panels and writes panels of products to rows of y, by transposing: AVX-512
// BF16.
#include <immintrin.h>

#include "x86/round_bf16_avx512-inl.h"
#include "x86/linear_avx512bf16.h"
#include "common/kernels.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

// Transposes in place: lane j of v[i] becomes lane i of v[j].
FDK_INLINE void transpose(__m512i (&v)[16]) {
  __m512i t[16];
  FDK_UNROLL
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
  // v[4 i + j]: lanes j, 4 + j, 8 + j and 12 + j of rows 4 i to 4 i + 3.
  FDK_UNROLL
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  FDK_UNROLL
  for (int j = 0; j < 4; j++) {
    t[j] = _mm512_shuffle_i32x4(v[j], v[4 + j], 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(v[j], v[4 + j], 0xDD);
    t[8 + j] = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0x88);
    t[12 + j] = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0xDD);
  }
  FDK_UNROLL
  for (int j = 0; j < 4; j++) {
    v[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    v[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xDD);
    v[4 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88);
    v[12 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xDD);
  }
}

// Row r of a panel of products plus its bias, as bf16 in the upper halves.
FDK_INLINE __m512i rounded_row(const PanelOut& out, std::size_t r, std::size_t lane,
                               __mmask16 lanes) {
  __m512 sums = _mm512_maskz_loadu_ps(lanes, out.products + r * out.panel + lane);
  if (out.bias != nullptr && r < out.outputs) {
    const std::uint16_t bias = static_cast<const std::uint16_t*>(out.bias)[r];
    sums = _mm512_add_ps(sums, _mm512_castsi512_ps(_mm512_set1_epi32(int(bias) << 16)));
  }
  return rounded_to_bf16(sums);
}

// 32 outputs of 16 rows of x: pairs of outputs, transposed.
FDK_INLINE void write_block(const PanelOut& out, std::size_t lane, std::size_t lanes,
                            std::size_t row) {
  const __mmask16 loaded = out.panel - lane < 16 ? 0x00FF : 0xFFFF;
  const std::size_t outputs = out.outputs - row;
  __m512i pair[16];
  FDK_UNROLL
  for (int i = 0; i < 16; i++) {
    const std::size_t r = std::size_t(2 * i);
    pair[i] = _mm512_setzero_si512();
    if (r >= outputs) continue;
    const __m512i first = rounded_row(out, row + r, lane, loaded);
    const __m512i second = rounded_row(out, row + r + 1, lane, loaded);
    pair[i] = _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(first, 16), second);
  }
  transpose(pair);
  const __mmask32 stored = outputs < 32 ? (__mmask32(1) << outputs) - 1 : ~__mmask32(0);
  std::uint16_t* y = static_cast<std::uint16_t*>(out.y) + lane * out.stride + row;
  FDK_UNROLL
  for (std::size_t i = 0; i < 16; i++) {
    if (i < lanes) _mm512_mask_storeu_epi16(y + i * out.stride, stored, pair[i]);
  }
}

// Prefetch distance of x into L2, in positions: sixteen rows are more streams than the hardware
// follows (512 x 4096, cold: 0.67 -> 0.57 ms).
constexpr std::size_t kPackAhead = 256;

}  // namespace

void write_panel_avx512bf16(const PanelOut& out) {
  for (std::size_t lane = 0; lane < out.lanes; lane += 16) {
    const std::size_t lanes = out.lanes - lane < 16 ? out.lanes - lane : 16;
    for (std::size_t row = 0; row < out.outputs; row += 32) write_block(out, lane, lanes, row);
  }
}

void pack_panel_avx512bf16(const void* x, std::size_t x_stride, std::size_t rows,
                           std::size_t positions, std::size_t width, void* out) {
  constexpr std::size_t kUnits = 16;  // pairs per register
  const std::uint16_t* from = static_cast<const std::uint16_t*>(x);
  for (std::size_t p = 0; p < positions; p += 2 * kUnits) {
    for (std::size_t lane = 0; lane < width; lane += kUnits) {
      __m512i v[kUnits];
      FDK_UNROLL
      for (std::size_t i = 0; i < kUnits; i++) {
        v[i] = _mm512_setzero_si512();
        if (lane + i >= rows) continue;
        const std::uint16_t* row = from + (lane + i) * x_stride + p;
        _mm_prefetch(reinterpret_cast<const char*>(row + kPackAhead), _MM_HINT_T1);
        v[i] = _mm512_loadu_si512(row);
      }
      transpose(v);
      std::uint32_t* to = static_cast<std::uint32_t*>(out) + p / 2 * width + lane;
      const __mmask16 stored = width - lane < kUnits ? 0x00FF : 0xFFFF;
      FDK_UNROLL
      for (std::size_t i = 0; i < kUnits; i++) {
        _mm512_mask_storeu_epi32(to + i * width, stored, v[i]);
      }
    }
  }
}

}  // namespace fdk
