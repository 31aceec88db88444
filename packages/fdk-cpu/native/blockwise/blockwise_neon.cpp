// Blockwise quantisation: NEON, 16 lanes in four vectors, so that codes fill a vector of bytes.
#include <arm_neon.h>

#include "blockwise/blockwise-inl.h"

namespace fdk {
namespace {

struct Neon {
  static constexpr std::size_t kLanes = 16;
  static constexpr int kVectors = 4;
  struct Float {
    float32x4_t v[kVectors];
  };
  struct Codes {
    uint32x4_t v[kVectors];
  };
  // Eight floats, the most that a level of the search has, looked up by bytes.
  using Table = uint8x16x2_t;
  using Codes16 = uint8x16_t;
  // The values of 16 codes, and their bytes separately.
  struct Table16 {
    Float values;
    uint8x16x4_t bytes;
  };

  // Calls f(Int<i>{}) to make vector i.
  template <class T = Float, class F>
  static FDK_INLINE T each(F f) {
    T out;
    unroll<kVectors>([&](auto i) FDK_LAMBDA { out.v[i.value] = f(i); });
    return out;
  }

  template <int kType>
  static FDK_INLINE Float load(const std::uint8_t* p) {
    return each([&](auto i) FDK_LAMBDA {
      if constexpr (Activation(kType) == Activation::fp32) {
        return vreinterpretq_f32_u8(vld1q_u8(p + 16 * i.value));
      } else {
        const uint8x8_t halves = vld1_u8(p + 8 * i.value);
        if constexpr (Activation(kType) == Activation::fp16) {
          return vcvt_f32_f16(vreinterpret_f16_u8(halves));
        } else {
          return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(halves), 16));
        }
      }
    });
  }

  template <int kType>
  static FDK_INLINE void store(std::uint8_t* p, Float x) {
    unroll<kVectors>([&](auto i) FDK_LAMBDA {
      if constexpr (Activation(kType) == Activation::fp32) {
        vst1q_u8(p + 16 * i.value, vreinterpretq_u8_f32(x.v[i.value]));
      } else if constexpr (Activation(kType) == Activation::fp16) {
        vst1_u8(p + 8 * i.value, vreinterpret_u8_f16(vcvt_f16_f32(x.v[i.value])));
      } else {
        vst1_u8(p + 8 * i.value, vreinterpret_u8_u16(to_bf16(x.v[i.value])));
      }
    });
  }

  static FDK_INLINE uint16x4_t to_bf16(float32x4_t v) {
    const uint32x4_t bits = vreinterpretq_u32_f32(v);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet), 16);
  }

  static FDK_INLINE Float set1(float v) {
    return each([&](auto) FDK_LAMBDA { return vdupq_n_f32(v); });
  }
  static FDK_INLINE Float mul(Float a, Float b) {
    return each([&](auto i) FDK_LAMBDA { return vmulq_f32(a.v[i.value], b.v[i.value]); });
  }
  static FDK_INLINE Float div(Float a, Float b) {
    return each([&](auto i) FDK_LAMBDA { return vdivq_f32(a.v[i.value], b.v[i.value]); });
  }

  // Compared as bits, magnitudes keep their order and NaN is above infinity.
  static FDK_INLINE Codes no_magnitude() { return no_codes(); }
  static FDK_INLINE Codes larger_magnitude(Codes largest, Float x) {
    return each<Codes>([&](auto i) FDK_LAMBDA {
      const uint32x4_t magnitude = vreinterpretq_u32_f32(vabsq_f32(x.v[i.value]));
      return vmaxq_u32(largest.v[i.value], magnitude);
    });
  }
  static FDK_INLINE float largest(Codes v) {
    const uint32x4_t best = vmaxq_u32(vmaxq_u32(v.v[0], v.v[1]), vmaxq_u32(v.v[2], v.v[3]));
    return float_of_bits(vmaxvq_u32(best));
  }

  // The codes of 8 values in the low bytes. `uzp` separates the halves of the entries, and of the
  // values.
  static FDK_INLINE uint8x16_t eight_by_key(const std::uint32_t* keys, float32x4_t a,
                                            float32x4_t b) {
    const uint16x8_t bits_a = vreinterpretq_u16_f32(a), bits_b = vreinterpretq_u16_f32(b);
    const uint64x2_t at = vreinterpretq_u64_u16(vuzp2q_u16(bits_a, bits_b));
    uint16x8_t found[2];
    unroll<2>([&](auto half) FDK_LAMBDA {
      const std::uint64_t four = vgetq_lane_u64(at, half.value);
      uint32x4_t entries = vld1q_dup_u32(keys + (four & 0xFFFF));
      entries = vld1q_lane_u32(keys + (four >> 16 & 0xFFFF), entries, 1);
      entries = vld1q_lane_u32(keys + (four >> 32 & 0xFFFF), entries, 2);
      entries = vld1q_lane_u32(keys + (four >> 48), entries, 3);
      found[half.value] = vreinterpretq_u16_u32(entries);
    });
    const uint16x8_t bound = vuzp1q_u16(found[0], found[1]);
    const uint16x8_t codes = vuzp2q_u16(found[0], found[1]);
    const uint16x8_t above = vcgtq_u16(vuzp1q_u16(bits_a, bits_b), bound);
    return vreinterpretq_u8_u16(vbslq_u16(above, vshrq_n_u16(codes, 8), codes));
  }
  static FDK_INLINE uint8x16_t codes_by_key(const std::uint32_t* keys, Float x) {
    return vuzp1q_u8(eight_by_key(keys, x.v[0], x.v[1]), eight_by_key(keys, x.v[2], x.v[3]));
  }
  static FDK_INLINE void store_bytes(std::uint8_t* to, uint8x16_t codes) { vst1q_u8(to, codes); }

  static FDK_INLINE Table table(const float* entries) {
    return vld1q_u8_x2(reinterpret_cast<const std::uint8_t*>(entries));
  }
  static FDK_INLINE Float look_up(Table table, Codes at) {
    return each([&](auto i) FDK_LAMBDA {
      // The bytes of entry r are 4 r to 4 r + 3.
      const uint32x4_t bytes =
          vmlaq_u32(vdupq_n_u32(0x03020100), at.v[i.value], vdupq_n_u32(0x04040404));
      return vreinterpretq_f32_u8(vqtbl2q_u8(table, vreinterpretq_u8_u32(bytes)));
    });
  }
  static FDK_INLINE Codes no_codes() {
    return each<Codes>([&](auto) FDK_LAMBDA { return vdupq_n_u32(0); });
  }
  // 2 codes + (x > bound)
  static FDK_INLINE Codes twice_and_above(Codes codes, Float x, Float bound) {
    return each<Codes>([&](auto i) FDK_LAMBDA {
      const uint32x4_t above = vcgtq_f32(x.v[i.value], bound.v[i.value]);
      return vsubq_u32(vaddq_u32(codes.v[i.value], codes.v[i.value]), above);
    });
  }
  static FDK_INLINE Codes16 codes16(const std::uint8_t* codes) { return vld1q_u8(codes); }
  static FDK_INLINE uint8x16_t look_up_codes(Codes16 codes, Codes at) {
    const auto narrow = [](uint32x4_t a, uint32x4_t b) FDK_LAMBDA {
      return vreinterpretq_u8_u16(vuzp1q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
    };
    return vqtbl1q_u8(codes, vuzp1q_u8(narrow(at.v[0], at.v[1]), narrow(at.v[2], at.v[3])));
  }
  static FDK_INLINE void store_pairs(std::uint8_t* to, uint8x16_t codes) {
    const uint8x16_t first = vuzp1q_u8(codes, codes), second = vuzp2q_u8(codes, codes);
    vst1_u8(to, vsli_n_u8(vget_low_u8(second), vget_low_u8(first), 4));
  }

  static FDK_INLINE const std::uint8_t* load_bytes(const std::uint8_t* p) { return p; }
  static FDK_INLINE Float gather(const float* code, const std::uint8_t* at) {
    return each([&](auto i) FDK_LAMBDA {
      const std::uint8_t* four = at + 4 * i.value;
      float32x4_t v = vld1q_dup_f32(code + four[0]);
      v = vld1q_lane_f32(code + four[1], v, 1);
      v = vld1q_lane_f32(code + four[2], v, 2);
      return vld1q_lane_f32(code + four[3], v, 3);
    });
  }
  // The first of two codes is in the high bits of a byte.
  static FDK_INLINE uint8x16_t load_nibbles(const std::uint8_t* p) {
    const uint8x8_t bytes = vld1_u8(p);
    const uint8x8_t first = vshr_n_u8(bytes, 4), second = vand_u8(bytes, vdup_n_u8(15));
    return vcombine_u8(vzip1_u8(first, second), vzip2_u8(first, second));
  }
  static FDK_INLINE Table16 table16(const float* code, float scale) {
    const Float values =
        each([&](auto i) FDK_LAMBDA { return vmulq_n_f32(vld1q_f32(code + 4 * i.value), scale); });
    float stored[16];
    unroll<kVectors>([&](auto i)
                         FDK_LAMBDA { vst1q_f32(stored + 4 * i.value, values.v[i.value]); });
    return {values, vld4q_u8(reinterpret_cast<const std::uint8_t*>(stored))};
  }
  static FDK_INLINE Float look_up16(const Table16& table, uint8x16_t at) {
    uint8x16_t bytes[4];
    unroll<4>([&](auto b)
                  FDK_LAMBDA { bytes[b.value] = vqtbl1q_u8(table.bytes.val[b.value], at); });
    const uint8x16_t low[2] = {vzip1q_u8(bytes[0], bytes[1]), vzip2q_u8(bytes[0], bytes[1])};
    const uint8x16_t high[2] = {vzip1q_u8(bytes[2], bytes[3]), vzip2q_u8(bytes[2], bytes[3])};
    return each([&](auto i) FDK_LAMBDA {
      const uint16x8_t a = vreinterpretq_u16_u8(low[i.value / 2]);
      const uint16x8_t b = vreinterpretq_u16_u8(high[i.value / 2]);
      return vreinterpretq_f32_u16(i.value % 2 == 0 ? vzip1q_u16(a, b) : vzip2q_u16(a, b));
    });
  }
  static FDK_INLINE Float part_of(const Table16& table, std::size_t) { return table.values; }
  // The low bytes of 16 entries, and the high bytes.
  static FDK_INLINE uint8x16x2_t half_table(const std::uint16_t* products) {
    return vld2q_u8(reinterpret_cast<const std::uint8_t*>(products));
  }
  static FDK_INLINE void store_halves(std::uint8_t* to, uint8x16x2_t table,
                                      const std::uint8_t* codes) {
    unroll<2>([&](auto half) FDK_LAMBDA {
      const uint8x16_t index = load_nibbles(codes + 8 * half.value);
      const uint8x16_t low = vqtbl1q_u8(table.val[0], index);
      const uint8x16_t high = vqtbl1q_u8(table.val[1], index);
      vst1q_u8(to + 32 * half.value, vzip1q_u8(low, high));
      vst1q_u8(to + 32 * half.value + 16, vzip2q_u8(low, high));
    });
  }
};

}  // namespace

extern const BlockKernels kBlocksNeon = block_kernels_of<Neon>();

}  // namespace fdk
