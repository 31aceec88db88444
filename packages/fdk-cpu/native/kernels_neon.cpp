// NEON as every 64-bit ARM has it: 4 float32 lanes, table lookups on the bytes of floats.
#include <arm_neon.h>

#include <cstring>

#include "kernels.h"
#include "simd_float.h"

namespace fdk {
namespace {

template <int kShift>
FDK_INLINE uint16x8_t shift16(uint16x8_t v) {
  if constexpr (kShift == 0) return v;
  else return vshrq_n_u16(v, kShift);
}

FDK_INLINE uint16x8_t load_lanes(const std::uint8_t* p) {
  return vreinterpretq_u16_u8(vld1q_u8(p));
}

FDK_INLINE uint16x8_t select16(std::uint16_t mask, uint16x8_t a, uint16x8_t b) {
  return vbslq_u16(vdupq_n_u16(mask), a, b);
}

// Plane lanes of positions 8 h to 8 h + 7 of each 32, fields 4 bits apart.
template <int kWidth>
FDK_INLINE void load_plane(const std::uint8_t* p, uint16x8_t* q) {
  if constexpr (kWidth == 4) {
    for (int h = 0; h < 4; h++) q[h] = load_lanes(p + 16 * h);
  } else if constexpr (kWidth == 2) {
    q[0] = load_lanes(p), q[1] = load_lanes(p + 16);
    q[2] = shift16<2>(q[0]), q[3] = shift16<2>(q[1]);
  } else {
    static_assert(kWidth == 1);
    q[0] = load_lanes(p);
    q[1] = shift16<1>(q[0]), q[2] = shift16<2>(q[0]), q[3] = shift16<3>(q[0]);
  }
}

template <int kBits>
struct NeonCodes {
  uint16x8_t q[4], high[4];
  const std::uint8_t* bytes;  // of 8 bits, read as they are needed

  FDK_INLINE NeonCodes(const std::uint8_t* tile, std::size_t r) {
    if constexpr (kBits == 8) {
      bytes = tile + r * 128;
    } else {
      load_planes(tile, r);
    }
  }

  FDK_INLINE void load_planes(const std::uint8_t* tile, std::size_t r) {
    constexpr Planes planes = planes_of(kBits);
    const auto at = [&](int i) FDK_LAMBDA {
      return tile + planes.plane[i].offset + r * (kTileK / 8 * std::size_t(planes.plane[i].width));
    };
    uint16x8_t top[4];
    load_plane<planes.plane[0].width>(at(0), q);
    if constexpr (kBits == 3) {
      load_plane<1>(at(1), top);
      for (int h = 0; h < 4; h++) q[h] = select16(0x3333, q[h], vshlq_n_u16(top[h], 2));
    }
    if constexpr (kBits > 4) load_plane<planes.plane[1].width>(at(1), high);
    if constexpr (kBits == 7) {
      load_plane<1>(at(2), top);
      for (int h = 0; h < 4; h++) high[h] = select16(0x3333, high[h], vshlq_n_u16(top[h], 2));
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

  static FDK_INLINE uint32x4_t widen_bytes(const std::uint8_t* p) {
    std::uint32_t four;
    std::memcpy(&four, p, sizeof four);
    return vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)))));
  }
  static FDK_INLINE void load4(const void* p, std::size_t slot, ScaleType type, float* out) {
    const std::uint8_t* bytes = static_cast<const std::uint8_t*>(p) + slot * bytes_of(type);
    switch (type) {
      case ScaleType::bf16:
        return vst1q_f32(out, vreinterpretq_f32_u32(
                                  vshll_n_u16(vreinterpret_u16_u8(vld1_u8(bytes)), 16)));
      case ScaleType::fp16:
        return vst1q_f32(out, vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(bytes))));
      case ScaleType::fp32: return vst1q_f32(out, vreinterpretq_f32_u8(vld1q_u8(bytes)));
      default:
        return vst1q_f32(out, vreinterpretq_f32_u32(vshlq_n_u32(widen_bytes(bytes), 23)));
    }
  }
  static FDK_INLINE void load4_u8(const void* p, std::size_t slot, float* out) {
    vst1q_f32(out, vcvtq_f32_u32(widen_bytes(static_cast<const std::uint8_t*>(p) + slot)));
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
