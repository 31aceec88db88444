// NEON with BF16: bf16 activations, products of pairs summed in float32 (`bfdot`).
//
// Up to 6 bits the two bytes of a value are looked up apart, 16 codes at a time (`tbl`), and
// interleaved (`trn1`, `trn2`): the codes of a 16-bit lane's even and odd byte come apart by
// themselves, each in the order of x. Wider codes are looked up in memory, one by one. Scales and
// zero points are applied to the sums, as in kernels_avx512bf16.cpp.
#include <arm_neon.h>

#include <type_traits>

#include "kernels.h"
#include "neon_bf16.h"
#include "neon_codes.h"
#include "simd_float.h"

namespace fdk {
namespace {

constexpr int kSteps = 4;   // of 32 positions, a tile
constexpr int kBlocks = 4;  // of 8 positions, a step
constexpr std::size_t kStep = kTileK / kSteps, kBlock = kStep / kBlocks;

// Low and high bytes of bf16 values. Up to 4 bits, a table has 16 entries: at 2 bits they stand for
// two codes and at 1 bit for four, and there is a table for each of these.
template <int kBits>
struct ByteTable {
  static constexpr int kCodes = kBits == 1 ? 4 : kBits == 2 ? 2 : 1;
  static constexpr int kRegisters = kBits <= 4 ? kCodes : 1 << (kBits - 4);
  uint8x16_t low[kRegisters], high[kRegisters];

  FDK_INLINE explicit ByteTable(const float* table) {
    FDK_UNROLL
    for (int i = 0; i < kRegisters; i++) {
      std::uint16_t entries[16];
      for (int e = 0; e < 16; e++) {
        const int code = kBits <= 4 ? e >> (i * kBits) : 16 * i + e;
        std::uint32_t bits;
        std::memcpy(&bits, table + (code & ((1 << kBits) - 1)), sizeof bits);
        entries[e] = std::uint16_t(bits >> 16);
      }
      const uint16x8_t first = vld1q_u16(entries), second = vld1q_u16(entries + 8);
      low[i] = vmovn_high_u16(vmovn_u16(first), second);
      high[i] = vshrn_high_n_u16(vshrn_n_u16(first, 8), second, 8);
    }
  }

  // For block h of a step.
  template <int h>
  static FDK_INLINE uint8x16_t look_up(const uint8x16_t* t, uint8x16_t index) {
    if constexpr (kBits <= 4) {
      return vqtbl1q_u8(t[kBits == 1 ? h : kBits == 2 ? h / 2 : 0], index);
    } else if constexpr (kBits == 5) {
      return vqtbl2q_u8({{t[0], t[1]}}, index);
    } else {
      return vqtbl4q_u8({{t[0], t[1], t[2], t[3]}}, index);
    }
  }

  template <int h>
  FDK_INLINE void values(uint8x16_t first, uint8x16_t second, bfloat16x8_t* out) const {
    const uint8x16_t low0 = look_up<h>(low, first), high0 = look_up<h>(high, first);
    const uint8x16_t low1 = look_up<h>(low, second), high1 = look_up<h>(high, second);
    out[0] = vreinterpretq_bf16_u8(vtrn1q_u8(low0, high0));
    out[1] = vreinterpretq_bf16_u8(vtrn1q_u8(low1, high1));
    out[2] = vreinterpretq_bf16_u8(vtrn2q_u8(low0, high0));
    out[3] = vreinterpretq_bf16_u8(vtrn2q_u8(low1, high1));
  }
};

// The values themselves, in memory. 128 or 256 entries fill 16 or 32 registers, and a lookup in
// four of them is three operations: 8 bits took 5.1 instructions a code that way, 3.9 this way.
template <int kBits>
struct MemoryTable {
  std::uint16_t entries[1 << kBits];

  explicit MemoryTable(const float* table) {
    for (int i = 0; i < 1 << kBits; i++) {
      std::uint32_t bits;
      std::memcpy(&bits, table + i, sizeof bits);
      entries[i] = std::uint16_t(bits >> 16);
    }
  }

  // Of bytes kFirst, kFirst + 2, kFirst + 4 and kFirst + 6.
  template <int kFirst>
  FDK_INLINE uint16x4_t every_other(std::uint64_t codes) const {
    std::uint64_t out = 0;
    FDK_UNROLL
    for (int i = 0; i < 4; i++) {
      const std::uint64_t code = codes >> (16 * i + 8 * kFirst) & 0xFF;
      out |= std::uint64_t(entries[code]) << (16 * i);
    }
    return vcreate_u16(out);
  }

  template <int kFirst>
  FDK_INLINE bfloat16x8_t half(uint8x16_t codes) const {
    const uint64x2_t words = vreinterpretq_u64_u8(codes);
    return vreinterpretq_bf16_u16(vcombine_u16(every_other<kFirst>(vgetq_lane_u64(words, 0)),
                                               every_other<kFirst>(vgetq_lane_u64(words, 1))));
  }

  template <int h>
  FDK_INLINE void values(uint8x16_t first, uint8x16_t second, bfloat16x8_t* out) const {
    out[0] = half<0>(first), out[1] = half<0>(second);
    out[2] = half<1>(first), out[3] = half<1>(second);
  }
};

template <int kBits>
using Table = std::conditional_t<(kBits > 6), MemoryTable<kBits>, ByteTable<kBits>>;

// The values of a row of a tile, block by block.
template <int kBits>
class Row {
 public:
  FDK_INLINE Row(const std::uint8_t* tile, std::size_t r) {
    if constexpr (kBits == 8) {
      bytes_ = tile + r * kTileK;
    } else if constexpr (kBits <= 2) {
      FDK_UNROLL
      for (int i = 0; i < kBits; i++) q_[i] = load_lanes(tile + (r * kBits + std::size_t(i)) * 16);
    } else {
      load_fields<kBits>(tile, r, q_, high_);
    }
  }

  // out[s]: positions 32 s + 8 h to 32 s + 8 h + 7.
  template <int h>
  FDK_INLINE void values(const Table<kBits>& table, bfloat16x8_t* out) const {
    uint8x16_t first, second;  // codes of steps 0 (even bytes) and 2 (odd), and of 1 and 3
    if constexpr (kBits == 8) {
      first = vld1q_u8(bytes_ + 16 * h), second = vld1q_u8(bytes_ + 64 + 16 * h);
    } else {
      constexpr int i = kBits == 1 ? 0 : kBits == 2 ? h % 2 : h;
      const uint8x16_t q = vreinterpretq_u8_u16(q_[i]);
      if constexpr (kBits <= 4) {
        first = vandq_u8(q, vdupq_n_u8(15)), second = vshrq_n_u8(q, 4);
      } else {
        const uint8x16_t high = vreinterpretq_u8_u16(high_[i]);
        const uint8x16_t mask = vdupq_n_u8((1 << kBits) - 1);
        first = vandq_u8(vsliq_n_u8(q, high, 4), mask);
        second = vandq_u8(vsriq_n_u8(high, q, 4), mask);
      }
    }
    table.template values<h>(first, second, out);
  }

 private:
  uint16x8_t q_[4], high_[4];
  const std::uint8_t* bytes_;
};

// Scales or zero points of a tile, [kGroups][kTileRows]; fewer stored groups are repeated.
template <int kGroups, bool kZeros>
FDK_INLINE void load_groups(const Weight& w, std::size_t slot, float* out) {
  const std::size_t repeats = kGroups / w.groups_per_tile;
  FDK_UNROLL
  for (std::size_t g = 0; g < std::size_t(kGroups); g++) {
    const std::size_t from = slot + (repeats == 1 ? g : g / repeats) * kTileRows;
    float32x4_t four;
    if constexpr (!kZeros) {
      four = load4_scales(w.scales, from, w.scale_type);
    } else if (w.zero_type == ZeroType::u8) {
      four = load4_bytes(w.zeros, from);
    } else {
      four = load4_scales(w.zeros, from, ScaleType(int(w.zero_type) - 1));
    }
    vst1q_f32(out + g * kTileRows, four);
  }
}

// With 8 groups, blocks 0 and 1 of a step are one group and 2 and 3 the next; else a run of steps
// is one.
template <int kGroups>
constexpr int group_of(int s, int h) {
  return kGroups == 8 ? 2 * s + h / 2 : s * kGroups / kSteps;
}

// GemvTask::x_sums of the blocks [begin, end) of a step, lane by lane as `bfdot` sums pairs.
template <int kBegin, int kEnd>
FDK_INLINE float32x4_t pair_sums(const float* x_sums) {
  float32x4_t sum = vld1q_f32(x_sums + kBegin * 4);
  unroll<kEnd - kBegin - 1>([&](auto i) FDK_LAMBDA {
    sum = vaddq_f32(sum, vld1q_f32(x_sums + (kBegin + 1 + i.value) * 4));
  });
  return sum;
}

// Where the tasks' x and sums lie; past the last row of x it is repeated, and the result dropped.
template <int kM>
struct Rows {
  const bfloat16_t* x[kM];
  const float* x_sums[kM];

  FDK_INLINE Rows(const GemvTask& task, bool affine) {
    const std::size_t positions = task.weight->tiles * kTileK;
    FDK_UNROLL
    for (int m = 0; m < kM; m++) {
      const std::size_t row = std::size_t(m) < task.m ? std::size_t(m) : task.m - 1;
      x[m] = static_cast<const bfloat16_t*>(task.x) + row * positions;
      x_sums[m] = affine ? task.x_sums + row * positions / 2 : nullptr;
    }
  }
};

// A zero that the renaming of registers makes, where a copy of one takes a vector pipe.
FDK_INLINE float32x4_t zeros4() {
  float32x4_t zero;
  asm volatile("movi %0.2d, #0" : "=w"(zero));
  return zero;
}

// Adds a row of a tile to sums[m]: its scales and zero points are kTileRows apart, x from `at` on.
template <int kBits, int kGroups, bool kAffine, int kM>
FDK_INLINE void add_row(const Row<kBits>& row, const Table<kBits>& table, const float* scales,
                        const float* zeros, const Rows<kM>& rows, std::size_t at,
                        float32x4_t* sums) {
  // Kept from loading x once for all rows: its 16 vectors would not stay in registers.
  asm volatile("" : "+r"(at));
  // With 8 groups a half of the blocks is finished before the other.
  constexpr int kHalves = kGroups == 8 ? 2 : 1, kPart = kGroups == 8 ? 4 : kGroups;
  unroll<kHalves>([&](auto half) FDK_LAMBDA {
    constexpr int kFirst = half.value * kBlocks / 2, kCount = kBlocks / kHalves;
    float32x4_t part[kPart][kM];
    FDK_UNROLL
    for (int g = 0; g < kPart; g++) {
      FDK_UNROLL
      for (int m = 0; m < kM; m++) part[g][m] = zeros4();
    }
    unroll<kCount>([&](auto i) FDK_LAMBDA {
      constexpr int h = kFirst + i.value;
      bfloat16x8_t values[kSteps];
      row.template values<h>(table, values);
      FDK_UNROLL
      for (int s = 0; s < kSteps; s++) {
        FDK_UNROLL
        for (int m = 0; m < kM; m++) {
          const bfloat16x8_t x = vld1q_bf16(rows.x[m] + at + std::size_t(s) * kStep + h * kBlock);
          float32x4_t& sum = part[s * kPart / kSteps][m];
          sum = vbfdotq_f32(sum, x, values[s]);
        }
      }
    });
    unroll<kPart>([&](auto g) FDK_LAMBDA {
      constexpr int s = g.value * kSteps / kPart;
      constexpr std::size_t slot = std::size_t(group_of<kGroups>(s, kFirst)) * kTileRows;
      const float32x4_t scale = vld1q_dup_f32(scales + slot);
      FDK_UNROLL
      for (int m = 0; m < kM; m++) {
        if constexpr (kAffine) {
          // One row of x has its sums at the first step of a run, several at every step.
          const float* x_sums = rows.x_sums[m] + at / 2 + s * (kStep / 2);
          part[g.value][m] =
              vfmsq_f32(part[g.value][m], pair_sums<kFirst, kFirst + kCount>(x_sums),
                        vld1q_dup_f32(zeros + slot));
        }
        sums[m] = vfmaq_f32(sums[m], part[g.value][m], scale);
      }
    });
  });
}

template <int kBits, int kGroups, bool kAffine, int kM>
void gemv_stripes(const GemvTask& task, std::size_t begin, std::size_t end) {
  static_assert(kM == 1 || kGroups >= kSteps);  // sums of x are those of single steps
  constexpr std::size_t kBytes = tile_bytes(kBits);
  const Weight& w = *task.weight;
  const Table<kBits> table(w.table);
  const Rows<kM> rows(task, kAffine);
  for (std::size_t stripe = begin; stripe < end; stripe++) {
    float32x4_t sums[kTileRows][kM];
    for (std::size_t r = 0; r < kTileRows; r++) {
      FDK_UNROLL
      for (int m = 0; m < kM; m++) sums[r][m] = vdupq_n_f32(0);
    }
    for_tiles(w, stripe, 0, w.tiles, kBytes, [&](std::size_t tile, const std::uint8_t* codes,
                                                 std::size_t slot) FDK_LAMBDA {
      float scales[kGroups * kTileRows], zeros[kGroups * kTileRows];
      load_groups<kGroups, false>(w, slot, scales);
      if constexpr (kAffine) load_groups<kGroups, true>(w, slot, zeros);
      for (std::size_t i = 0; i < kBytes; i += 64) __builtin_prefetch(codes + kPrefetch + i);
      const auto row = [&](std::size_t r) FDK_LAMBDA {
        add_row<kBits, kGroups, kAffine, kM>(Row<kBits>(codes, r), table, scales + r, zeros + r,
                                             rows, tile * kTileK, sums[r]);
      };
      if constexpr (kM == 1 && kBits <= 4) {  // keeps the sums in registers
        unroll<int(kTileRows)>([&](auto r) FDK_LAMBDA { row(std::size_t(r.value)); });
      } else {
        for (std::size_t r = 0; r < kTileRows; r++) row(r);
      }
    });
    for (std::size_t m = 0; m < task.m; m++) {
      for (std::size_t r = 0; r < kTileRows; r++) {
        task.y[m * task.y_stride + stripe * kTileRows + r] = vaddvq_f32(sums[r][m]);
      }
    }
  }
}

template <int kBits, int kGroups, int kM>
FDK_INLINE void gemv_groups(const GemvTask& task, std::size_t begin, std::size_t end) {
  if (task.weight->zeros != nullptr) {
    gemv_stripes<kBits, kGroups, true, kM>(task, begin, end);
  } else {
    gemv_stripes<kBits, kGroups, false, kM>(task, begin, end);
  }
}

// W_hat rounded to bf16, in natural order.
template <int kBits, int kGroups>
void decode_tiles(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end,
                  bfloat16_t* out, std::size_t stride) {
  const Table<kBits> table(w.table);
  for_tiles(w, stripe, begin, end, tile_bytes(kBits), [&](std::size_t tile,
                                                          const std::uint8_t* codes,
                                                          std::size_t slot) FDK_LAMBDA {
    float scales[kGroups * kTileRows], zeros[kGroups * kTileRows] = {};
    load_groups<kGroups, false>(w, slot, scales);
    if (w.zeros != nullptr) load_groups<kGroups, true>(w, slot, zeros);
    // The block after this one, which other stripes' blocks come before.
    for (std::size_t i = 0; i < tile_bytes(kBits); i += 64) {
      __builtin_prefetch(codes + (end - begin) * tile_bytes(kBits) + i);
    }
    for (std::size_t r = 0; r < kTileRows; r++) {
      bfloat16_t* to = out + r * stride + (tile - begin) * kTileK;
      const Row<kBits> row(codes, r);
      unroll<kBlocks>([&](auto h) FDK_LAMBDA {
        bfloat16x8_t values[kSteps];
        row.template values<h.value>(table, values);
        unroll<kSteps>([&](auto s) FDK_LAMBDA {
          const std::size_t at = std::size_t(group_of<kGroups>(s.value, h.value)) * kTileRows + r;
          const float32x4_t scale = vld1q_dup_f32(scales + at), zero = vld1q_dup_f32(zeros + at);
          const uint16x8_t bits = vreinterpretq_u16_bf16(values[s.value]);
          const float32x4_t low = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16));
          const float32x4_t high = vreinterpretq_f32_u32(vshll_high_n_u16(bits, 16));
          const bfloat16x8_t rounded = vcvtq_low_bf16_f32(vmulq_f32(vsubq_f32(low, zero), scale));
          vst1q_bf16(to + s.value * kStep + h.value * kBlock,
                     vcvtq_high_bf16_f32(rounded, vmulq_f32(vsubq_f32(high, zero), scale)));
        });
      });
    }
  });
}

// y[kTileRows][panel] += w[kTileRows][depth] * x[depth / 2][panel][2], 4 lanes of x a vector.
template <int kVectors>
void panel_rows(const PanelTask& task, std::size_t row) {
  constexpr int kRows = int(kTileRows), kPairs = 4;  // of a vector of w
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
    switch (groups) {  // runs of steps, as GemvTask::x_sums has them
      case 1: return gemv_groups<b, 1, 1>(task, begin, end);
      case 2: return gemv_groups<b, 2, 1>(task, begin, end);
      case 4: return gemv_groups<b, 4, 1>(task, begin, end);
      default: return gemv_groups<b, 8, 1>(task, begin, end);
    }
  });
}

void decode_neonbf16(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end,
                     void* out, std::size_t stride) {
  bfloat16_t* to = static_cast<bfloat16_t*>(out);
  with_bits(w.bits, [&](auto bits) FDK_LAMBDA {
    constexpr int b = bits.value;
    if (w.groups_per_tile == 8) return decode_tiles<b, 8>(w, stripe, begin, end, to, stride);
    return decode_tiles<b, 4>(w, stripe, begin, end, to, stride);
  });
}

void panel_product_neonbf16(const PanelTask& task) {
  for (std::size_t row = 0; row < task.rows; row += kTileRows) {
    switch (task.panel / kNeonPanelStep) {
      case 1: panel_rows<1>(task, row); break;
      case 2: panel_rows<2>(task, row); break;
      case 3: panel_rows<3>(task, row); break;
      default: panel_rows<4>(task, row);
    }
  }
}

extern const Kernels kNeonBf16 = {true,
                                  &kNatural.order,
                                  &kNatural.order,
                                  kTileRows,
                                  kNeonPanel,
                                  kNeonPanelStep,
                                  gemv_neonbf16,
                                  decode_neonbf16,
                                  panel_product_neonbf16,
                                  nullptr};

}  // namespace fdk
