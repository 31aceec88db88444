// The linear kernels of NEON for any 64-bit ARM: 4 float32 lanes.
//
// Up to 6 bits the bytes of a value are looked up separately, 16 codes at a time (`tbl`), and
// interleaved (`trn1`, `trn2`). Values that fit 16 bits, as for bf16 activations and zero points,
// take two lookups, others four.
#include <arm_neon.h>

#include <cstring>
#include <type_traits>

#include "common/kernels.h"
#include "arm/gemv_neon-inl.h"
#include "common/simd-inl.h"
#include "common/gemm-inl.h"

namespace fdk {
namespace {

struct Neon {
  using Float = float32x4_t;
  static constexpr int kLanes = 4;

  static FDK_INLINE Float zero() { return vdupq_n_f32(0); }
  static FDK_INLINE Float load(const float* p) { return vld1q_f32(p); }
  static FDK_INLINE void store(float* p, Float v) { vst1q_f32(p, v); }
  static FDK_INLINE Float set1(float v) { return vdupq_n_f32(v); }
  static FDK_INLINE Float fma(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }
  static FDK_INLINE Float add(Float a, Float b) { return vaddq_f32(a, b); }
};

// Values as float32: 8 positions are 4 even and 4 odd ones, the two halves of 32 bits. With kShort,
// the lower 16 bits of every value are zero, as for bf16 and integers.
template <bool kShort>
struct Products {
  using X = float;
  struct Value {
    float32x4_t even, odd;
  };
  static constexpr bool kPairSums = false;
  template <int kBits>
  using Table = std::conditional_t<in_registers(kBits), ByteTable<kBits, kShort ? 2 : 4>,
                                   MemoryTable<kBits, std::uint32_t>>;

  template <int h, int kBits>
  static FDK_INLINE void values(const ByteTable<kBits, 2>& table, uint8x16_t first,
                                uint8x16_t second, Value* out) {
    uint16x8_t bits[kSteps];
    table.template pairs<h, 0>(first, bits[0], bits[2]);
    table.template pairs<h, 0>(second, bits[1], bits[3]);
    FDK_UNROLL
    for (int s = 0; s < kSteps; s++) {
      const uint32x4_t both = vreinterpretq_u32_u16(bits[s]);
      out[s].even = vreinterpretq_f32_u32(vshlq_n_u32(both, 16));
      out[s].odd = vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xFFFF0000)));
    }
  }

  template <int h, int kBits>
  static FDK_INLINE void values(const ByteTable<kBits, 4>& table, uint8x16_t first,
                                uint8x16_t second, Value* out) {
    uint16x8_t low[kSteps], high[kSteps];
    table.template pairs<h, 0>(first, low[0], low[2]);
    table.template pairs<h, 0>(second, low[1], low[3]);
    table.template pairs<h, 2>(first, high[0], high[2]);
    table.template pairs<h, 2>(second, high[1], high[3]);
    FDK_UNROLL
    for (int s = 0; s < kSteps; s++) {
      out[s].even = vreinterpretq_f32_u16(vtrn1q_u16(low[s], high[s]));
      out[s].odd = vreinterpretq_f32_u16(vtrn2q_u16(low[s], high[s]));
    }
  }

  // Every other one of the even or the odd bytes of 16.
  template <int kFirst, int kBits>
  static FDK_INLINE float32x4_t every_fourth(const MemoryTable<kBits, std::uint32_t>& table,
                                             uint64x2_t codes) {
    const std::uint64_t low = vgetq_lane_u64(codes, 0), high = vgetq_lane_u64(codes, 1);
    return vreinterpretq_f32_u32(vcombine_u32(
        vzip1_u32(table.template value<kFirst>(low), table.template value<kFirst + 4>(low)),
        vzip1_u32(table.template value<kFirst>(high), table.template value<kFirst + 4>(high))));
  }

  template <int h, int kBits>
  static FDK_INLINE void values(const MemoryTable<kBits, std::uint32_t>& table, uint8x16_t first,
                                uint8x16_t second, Value* out) {
    const auto of = [&](auto odd, uint8x16_t codes) FDK_LAMBDA -> Value {
      const uint64x2_t words = vreinterpretq_u64_u8(codes);
      return {every_fourth<odd.value>(table, words), every_fourth<odd.value + 2>(table, words)};
    };
    out[0] = of(Int<0>{}, first), out[1] = of(Int<0>{}, second);
    out[2] = of(Int<1>{}, first), out[3] = of(Int<1>{}, second);
  }

  static FDK_INLINE Value subtract(Value value, float32x4_t zero) {
    return {vsubq_f32(value.even, zero), vsubq_f32(value.odd, zero)};
  }

  static FDK_INLINE float32x4_t add(float32x4_t sum, const X* x, Value value) {
    sum = vfmaq_f32(sum, vld1q_f32(x), value.even);
    return vfmaq_f32(sum, vld1q_f32(x + 4), value.odd);
  }

  static FDK_INLINE void store(X* to, Value value, float32x4_t zero, float32x4_t scale) {
    vst1q_f32(to, vmulq_f32(vsubq_f32(value.even, zero), scale));
    vst1q_f32(to + 4, vmulq_f32(vsubq_f32(value.odd, zero), scale));
  }
};

template <int kBits, bool kShort>
FDK_INLINE void gemv_bits(const GemvTask& task, std::size_t begin, std::size_t end) {
  using P = Products<kShort>;
  const bool g16 = task.weight->groups_per_tile == 8, affine = task.weight->zeros != nullptr;
  constexpr int kMany = int(kMaxGemvRows);
  if (task.m > 1) {
    if (g16) return gemv_stripes<P, kBits, 8, true, kMany>(task, begin, end);
    return gemv_stripes<P, kBits, 4, true, kMany>(task, begin, end);
  }
  if (g16) return gemv_stripes<P, kBits, 8, true, 1>(task, begin, end);
  if (affine) return gemv_stripes<P, kBits, 4, true, 1>(task, begin, end);
  return gemv_stripes<P, kBits, 4, false, 1>(task, begin, end);
}

bool is_short(const Weight& w) {
  for (std::size_t i = 0; i < std::size_t(1) << w.bits; i++) {
    std::uint32_t bits;
    std::memcpy(&bits, w.table + i, sizeof bits);
    if ((bits & 0xFFFF) != 0) return false;
  }
  return true;
}

void gemv_neon(const GemvTask& task, std::size_t begin, std::size_t end) {
  const bool short_values = is_short(*task.weight);
  with_bits(task.weight->bits, [&](auto bits) FDK_LAMBDA {
    constexpr int b = bits.value;
    if constexpr (in_registers(b)) {
      if (short_values) return gemv_bits<b, true>(task, begin, end);
    }
    return gemv_bits<b, false>(task, begin, end);
  });
}

struct Orders {
  Order pairs;  // the 4 even ones of each 8 positions, then the 4 odd ones
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

extern const LinearKernels kLinearNeon = {
    .x_is_bf16 = false,
    .gemv_order = &kOrders.pairs,
    .panel_order = &kOrders.pairs,
    .panel = 2 * Neon::kLanes,
    .panel_step = Neon::kLanes,
    .gemv = gemv_neon,
    .dequantise = dequantise_rows<Products<false>>,
    .gemm_panel = gemm_panel<Neon, kPanelRows>,
    .dgrad = dgrad<Neon, 4>,
};

}  // namespace fdk
