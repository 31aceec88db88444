// The linear kernels of NEON with BF16: products of pairs of bf16 summed in float32 (`bfdot`).
//
// Up to 6 bits the two bytes of a value are looked up separately, 16 codes at a time (`tbl`), and
// interleaved (`trn1`, `trn2`), which also separates the codes of the even and odd bytes of 16-bit
// lanes, each in the order of x. Wider codes are looked up in memory one by one. Scales and zero
// points are applied to the sums, as in gemv_avx512bf16.cpp.
#include <arm_neon.h>

#include <type_traits>

#include "common/kernels.h"
#include "arm/linear_neonbf16.h"
#include "arm/gemv_neon-inl.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

// `bfdot` uses values as they are looked up, with x in memory order.
struct Products {
  using X = bfloat16_t;
  using Value = bfloat16x8_t;
  static constexpr bool kPairSums = true;
  template <int kBits>
  using Table = std::conditional_t<in_registers(kBits), ByteTable<kBits, 2>,
                                   MemoryTable<kBits, std::uint16_t>>;

  // out[s]: positions 32 s + 8 h to 32 s + 8 h + 7.
  template <int h, int kBits>
  static FDK_INLINE void values(const ByteTable<kBits, 2>& table, uint8x16_t first,
                                uint8x16_t second, Value* out) {
    uint16x8_t bits[kSteps];
    table.template pairs<h, 0>(first, bits[0], bits[2]);
    table.template pairs<h, 0>(second, bits[1], bits[3]);
    FDK_UNROLL
    for (int s = 0; s < kSteps; s++) out[s] = vreinterpretq_bf16_u16(bits[s]);
  }

  // The values of bytes kFirst, kFirst + 2, kFirst + 4 and kFirst + 6.
  template <int kFirst, int kBits>
  static FDK_INLINE uint16x4_t every_other(const MemoryTable<kBits, std::uint16_t>& table,
                                           std::uint64_t codes) {
    uint16x4_t lanes[4];
    unroll<4>([&](auto i) FDK_LAMBDA {
      lanes[i.value] = vreinterpret_u16_u32(table.template value<kFirst + 2 * i.value>(codes));
    });
    return vreinterpret_u16_u32(vzip1_u32(vreinterpret_u32_u16(vzip1_u16(lanes[0], lanes[1])),
                                          vreinterpret_u32_u16(vzip1_u16(lanes[2], lanes[3]))));
  }

  template <int h, int kBits>
  static FDK_INLINE void values(const MemoryTable<kBits, std::uint16_t>& table, uint8x16_t first,
                                uint8x16_t second, Value* out) {
    const auto of = [&](auto odd, uint8x16_t codes) FDK_LAMBDA {
      const uint64x2_t words = vreinterpretq_u64_u8(codes);
      return vreinterpretq_bf16_u16(
          vcombine_u16(every_other<odd.value>(table, vgetq_lane_u64(words, 0)),
                       every_other<odd.value>(table, vgetq_lane_u64(words, 1))));
    };
    out[0] = of(Int<0>{}, first), out[1] = of(Int<0>{}, second);
    out[2] = of(Int<1>{}, first), out[3] = of(Int<1>{}, second);
  }

  static FDK_INLINE float32x4_t add(float32x4_t sum, const X* x, Value value) {
    return vbfdotq_f32(sum, vld1q_bf16(x), value);
  }

  static FDK_INLINE void store(X* to, Value value, float32x4_t zero, float32x4_t scale) {
    const uint16x8_t bits = vreinterpretq_u16_bf16(value);
    const float32x4_t low = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16));
    const float32x4_t high = vreinterpretq_f32_u32(vshll_high_n_u16(bits, 16));
    const bfloat16x8_t rounded = vcvtq_low_bf16_f32(vmulq_f32(vsubq_f32(low, zero), scale));
    vst1q_bf16(to, vcvtq_high_bf16_f32(rounded, vmulq_f32(vsubq_f32(high, zero), scale)));
  }
};

template <int kBits, int kGroups, int kM>
FDK_INLINE void gemv_groups(const GemvTask& task, std::size_t begin, std::size_t end) {
  if (task.weight->zeros != nullptr) {
    gemv_stripes<Products, kBits, kGroups, true, kM>(task, begin, end);
  } else {
    gemv_stripes<Products, kBits, kGroups, false, kM>(task, begin, end);
  }
}

// y[kTileRows][panel] += w[kTileRows][depth] * x[depth / 2][panel][2], 4 lanes of x per vector.
template <int kVectors>
void panel_rows(const GemmPanelTask& task, std::size_t row) {
  constexpr int kRows = int(kTileRows), kPairs = 4;  // per vector of w
  const bfloat16_t* w = static_cast<const bfloat16_t*>(task.w) + row * task.stride;
  const bfloat16_t* x = static_cast<const bfloat16_t*>(task.x);
  float32x4_t sums[kRows][kVectors];
  FDK_UNROLL
  for (int r = 0; r < kRows; r++) {
    FDK_UNROLL
    for (int v = 0; v < kVectors; v++) sums[r][v] = vdupq_n_f32(0);
  }
  for (std::size_t i = 0; i < task.depth; i += 2 * kPairs) {
    bfloat16x8_t weights[kRows];
    FDK_UNROLL
    for (int r = 0; r < kRows; r++) weights[r] = vld1q_bf16(w + std::size_t(r) * task.stride + i);
    unroll<kPairs>([&](auto pair) FDK_LAMBDA {
      FDK_UNROLL
      for (int v = 0; v < kVectors; v++) {
        const bfloat16x8_t lanes = vld1q_bf16(x + v * 8);
        FDK_UNROLL
        for (int r = 0; r < kRows; r++) {
          sums[r][v] = vbfdotq_laneq_f32(sums[r][v], lanes, weights[r], pair.value);
        }
      }
      x += 2 * task.panel;
    });
  }
  FDK_UNROLL
  for (int r = 0; r < kRows; r++) {
    FDK_UNROLL
    for (int v = 0; v < kVectors; v++) {
      float* to = task.y + (row + std::size_t(r)) * task.panel + v * 4;
      vst1q_f32(to, vaddq_f32(vld1q_f32(to), sums[r][v]));
    }
  }
}

}  // namespace

void gemv_neonbf16(const GemvTask& task, std::size_t begin, std::size_t end) {
  const std::size_t groups = task.weight->groups_per_tile;
  with_bits(task.weight->bits, [&](auto bits) FDK_LAMBDA {
    constexpr int b = bits.value;
    if (task.m > 1 && groups == 8) return gemv_groups<b, 8, 4>(task, begin, end);
    if (task.m > 1) return gemv_groups<b, 4, 4>(task, begin, end);
    // Runs of steps, as in GemvTask::x_sums.
    with_groups(groups,
                [&](auto count) FDK_LAMBDA { gemv_groups<b, count.value, 1>(task, begin, end); });
  });
}

void dequantise_neonbf16(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end,
                         void* out, std::size_t stride) {
  dequantise_rows<Products>(w, stripe, begin, end, out, stride);
}

void gemm_panel_neonbf16(const GemmPanelTask& task) {
  for (std::size_t row = 0; row < task.rows; row += kTileRows) {
    switch (task.panel / kNeonPanelStep) {
      case 1:
        panel_rows<1>(task, row);
        break;
      case 2:
        panel_rows<2>(task, row);
        break;
      case 3:
        panel_rows<3>(task, row);
        break;
      default:
        panel_rows<4>(task, row);
    }
  }
}

extern const LinearKernels kLinearNeonBf16 = {
    .x_is_bf16 = true,
    .gemv_order = &kNatural.order,
    .panel_order = &kNatural.order,
    .panel = kNeonPanel,
    .panel_step = kNeonPanelStep,
    .gemv = gemv_neonbf16,
    .dequantise = dequantise_neonbf16,
    .gemm_panel = gemm_panel_neonbf16,
    .dgrad = nullptr,
};

}  // namespace fdk
