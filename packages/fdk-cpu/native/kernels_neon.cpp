// NEON as every 64-bit ARM has it: 4 float32 lanes, table lookups on the bytes of floats.
#include <arm_neon.h>

#include "kernels.h"
#include "neon_codes.h"
#include "simd_float.h"

namespace fdk {
namespace {

template <int kBits>
struct NeonCodes {
  uint16x8_t q[4], high[4];
  const std::uint8_t* bytes;  // of 8 bits, read as they are needed

  FDK_INLINE NeonCodes(const std::uint8_t* tile, std::size_t r) {
    if constexpr (kBits == 8) {
      bytes = tile + r * 128;
    } else {
      load_fields<kBits>(tile, r, q, high);
    }
  }

  template <int kShift>
  static FDK_INLINE uint32x4_t shift(uint16x8_t lanes) {
    const uint32x4_t v = vreinterpretq_u32_u16(lanes);
    if constexpr (kShift == 0) return v;
    else if constexpr (kShift < 0) return vshlq_n_u32(v, -kShift);
    else return vshrq_n_u32(v, kShift);
  }

  // Codes of vector v, the even or the odd ones of 8 positions; upper bits junk.
  template <int v>
  FDK_INLINE uint32x4_t at() const {
    constexpr int block = v / 2, odd = 16 * (v % 2);  // of 8 positions
    if constexpr (kBits == 8) {
      return shift<8 * (block / 8) + odd>(load_lanes(bytes + block % 8 * 16));
    } else if constexpr (kBits <= 4) {
      return shift<4 * (block / 4) + odd>(q[block % 4]);
    } else {
      const uint32x4_t low = shift<4 * (block / 4) + odd>(q[block % 4]);
      const uint32x4_t up = shift<4 * (block / 4) + odd - 4>(high[block % 4]);
      return vbslq_u32(vdupq_n_u32(0x0F), low, up);
    }
  }
};

template <int kBits>
struct NeonTable {
  const float* values;
  uint8x16x4_t bytes;  // of 16 floats

  FDK_INLINE explicit NeonTable(const float* table) : values(table) {
    float entries[16];
    for (unsigned i = 0; i < 16; i++) entries[i] = table[i & ((1u << kBits) - 1)];
    for (int i = 0; i < 4; i++) bytes.val[i] = vreinterpretq_u8_f32(vld1q_f32(entries + 4 * i));
  }

  FDK_INLINE float32x4_t at(uint32x4_t index) const {
    index = vandq_u32(index, vdupq_n_u32((1u << kBits) - 1));
    if constexpr (kBits <= 4) {
      // The four bytes of entry i are bytes 4 i to 4 i + 3 of the table.
      const uint32x4_t at = vmlaq_n_u32(vdupq_n_u32(0x03020100), index, 0x04040404);
      return vreinterpretq_f32_u8(vqtbl4q_u8(bytes, vreinterpretq_u8_u32(at)));
    } else {
      std::uint32_t lanes[4];
      vst1q_u32(lanes, index);
      const float out[4] = {values[lanes[0]], values[lanes[1]], values[lanes[2]],
                            values[lanes[3]]};
      return vld1q_f32(out);
    }
  }
};

struct Neon {
  using Float = float32x4_t;
  static constexpr int kLanes = 4;
  template <int kBits>
  using Codes = NeonCodes<kBits>;
  template <int kBits>
  using Table = NeonTable<kBits>;

  static FDK_INLINE Float zero() { return vdupq_n_f32(0); }
  static FDK_INLINE Float load(const float* p) { return vld1q_f32(p); }
  static FDK_INLINE void store(float* p, Float v) { vst1q_f32(p, v); }
  static FDK_INLINE Float set1(float v) { return vdupq_n_f32(v); }
  static FDK_INLINE Float fma(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }
  static FDK_INLINE Float add(Float a, Float b) { return vaddq_f32(a, b); }
  static FDK_INLINE Float mul(Float a, Float b) { return vmulq_f32(a, b); }
  static FDK_INLINE Float sub(Float a, Float b) { return vsubq_f32(a, b); }
  static FDK_INLINE float sum(Float v) { return vaddvq_f32(v); }
  static FDK_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

  static FDK_INLINE void load4(const void* p, std::size_t slot, ScaleType type, float* out) {
    vst1q_f32(out, load4_scales(p, slot, type));
  }
  static FDK_INLINE void load4_u8(const void* p, std::size_t slot, float* out) {
    vst1q_f32(out, load4_bytes(p, slot));
  }

  // The even (v even) or odd of 8 positions.
  template <int v, int kBits>
  static FDK_INLINE Float value(const NeonCodes<kBits>& codes, const NeonTable<kBits>& table) {
    return table.at(codes.template at<v>());
  }
};

struct Orders {
  Order pairs;  // of each 8 positions, the 4 even ones, then the 4 odd ones
};

constexpr Orders make_orders() {
  Orders orders{};
  for (std::size_t i = 0; i < kTileK; i++) {
    orders.pairs[i] = std::uint8_t(i / 8 * 8 + 2 * (i % 4) + i / 4 % 2);
  }
  return orders;
}

constexpr Orders kOrders = make_orders();
constexpr int kPanelRows = 8;

}  // namespace

extern const Kernels kNeon = {false,
                              &kOrders.pairs,
                              &kOrders.pairs,
                              kPanelRows,
                              2 * Neon::kLanes,
                              Neon::kLanes,
                              gemv<Neon>,
                              decode<Neon>,
                              panel_product<Neon, kPanelRows>,
                              grad_product<Neon, 4>};

}  // namespace fdk
