// Products of one row of 8-bit x: SVE with vectors of 256 bits or a multiple, codes of 1, 2 and 4
// bits and groups of 64 or more positions. NEON does the rest: shorter groups would be scaled
// vector by vector (G = 32, 4 bits, llvm-mca for neoverse-v1: 6.63 codes per cycle, NEON 8.02).
//
// The even bytes of the layout's lanes are positions of the first half of a tile, the odd bytes of
// the second. One `tbl` separates those of each 32 bytes: 16 positions of one half, then 16 of the
// other, in 128 bits each. x is packed in the same way, so that 128 bits have one scale. The scales
// of four rows are the four lanes that `fmla` by lane selects, and sums are added across the vector
// once, at the end.
//
// A vector longer than the plane of a row is inactive beyond it. SVE types have no size: they
// cannot be members, captured by value or put in arrays, hence sums 0 to 3.
#include <arm_sve.h>

#include "common/linear_int8.h"
#include "arm/quantise_activations_neon-inl.h"
#include "arm/codes_neon-inl.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

constexpr std::size_t kBlock = 32;         // bytes that are separated together
constexpr std::size_t kHalf = kTileK / 2;  // positions
constexpr std::size_t kLongest = 256;      // bytes of the longest vector

// Positions i to i + 15 of the first half, then those of the second.
void quantise_x_by_halves(const float* x, std::size_t groups, const Int8Tile& out) {
  quantise_x_tile(x, groups, out, [&](std::size_t i, int8x16_t codes) FDK_LAMBDA {
    vst1q_s8(out.codes + i % kHalf * 2 + i / kHalf * kVector, codes);
  });
}

// The levels of an index of 4 bits, for its code i.
template <int kBits>
FDK_INLINE svint8_t load_table(const std::uint8_t* levels, int i) {
  std::int8_t entries[16];
  for (int e = 0; e < 16; e++) {
    entries[e] = std::int8_t(levels[e >> (2 * i) & ((1 << kBits) - 1)]);
  }
  return svld1_s8(svwhilelt_b8(std::size_t(0), std::size_t(16)), entries);
}

// The source of each byte of a vector. At 1 bit, 16 bytes of codes fill 32: twice, because
// positions 8 to 15 of each 16 are one bit above those of 0 to 7, in the same bytes.
template <int kBits>
FDK_INLINE svuint8_t load_apart() {
  std::uint8_t from[kLongest];
  for (std::size_t i = 0; i < kLongest; i++) {
    const std::size_t within = i % kVector, odd = i / kVector % 2;
    from[i] =
        std::uint8_t(kBits == 1 ? within % 8 * 2 + odd : i / kBlock * kBlock + 2 * within + odd);
  }
  return svld1_u8(svptrue_b8(), from);
}

// The codes of a row from byte `from` on, separated.
template <int kBits>
FDK_INLINE svuint8_t load_codes(const std::uint8_t* tile, std::size_t row, std::size_t from,
                                svuint8_t apart) {
  constexpr std::size_t kRowBytes = tile_bytes(kBits) / kTileRows;
  const svbool_t active = svwhilelt_b8(from, kRowBytes);
  const svuint8_t codes = svtbl_u8(svld1_u8(active, tile + row * kRowBytes + from), apart);
  if constexpr (kBits != 1) return codes;
  const svuint8_t shift =
      svand_n_u8_x(svptrue_b8(), svlsr_n_u8_x(svptrue_b8(), svindex_u8(0, 1), 3), 1);
  return svlsr_u8_x(svptrue_b8(), codes, shift);
}

// The levels of the codes at place `part` of each byte, 2 * kVector * part positions on.
template <int kBits, int part>
FDK_INLINE svint8_t levels_at(svuint8_t codes, svint8_t table0, svint8_t table1) {
  const svbool_t all = svptrue_b8();
  constexpr int kOfNibble = kBits == 4 ? 1 : 2;
  const svuint8_t index =
      part < kOfNibble ? svand_n_u8_x(all, codes, 15) : svlsr_n_u8_x(all, codes, 4);
  return svtbl_s8(part % kOfNibble == 0 ? table0 : table1, index);
}

template <int kBits>
void gemv_stripes(const Int8Task& task, std::size_t begin, std::size_t end) {
  constexpr std::size_t kBytes = tile_bytes(kBits), kRowBytes = kBytes / kTileRows;
  // Bytes of a row after separation, and codes in each.
  constexpr std::size_t kApart = kBits == 1 ? kBlock : kRowBytes;
  constexpr int kParts = int(kTileK / kApart);
  const Weight& w = *task.weight;
  const svuint8_t apart = load_apart<kBits>();
  const svint8_t table0 = load_table<kBits>(task.levels, 0);
  const svint8_t table1 = load_table<kBits>(task.levels, kBits < 4 ? 1 : 0);
  const float32x4_t centre = vdupq_n_f32(task.centre);
  const std::size_t groups = w.groups_per_tile;  // 1 or 2
  // A group of a whole tile is used for both halves: half of its sum of x each.
  const float share = share_of(task) * float(groups) / 2;
  const svbool_t all = svptrue_b32();
  for (std::size_t stripe = begin; stripe < end; stripe++) {
    svfloat32_t sum0 = svdup_n_f32(0), sum1 = sum0, sum2 = sum0, sum3 = sum0;
    float32x4_t constants = vdupq_n_f32(0);
    for_tiles(w, stripe, 0, w.tiles, kBytes,
              [&](std::size_t tile, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
                for (std::size_t i = 0; i < kBytes; i += 64)
                  __builtin_prefetch(codes + kPrefetchBytes + i);
                // The scales of each half, repeated to fill a vector.
                float scales[kLongest / sizeof(float)];
                float32x4_t of_half[2];
                for (std::size_t half = 0; half < 2; half++) {
                  const std::size_t g = half * groups / 2, at = slot + g * kTileRows;
                  const float32x4_t scale = load4_scales(w.scales, at, w.scale_type);
                  constants = vfmaq_n_f32(constants, constants_of(w, at, scale, centre),
                                          task.x_sums[tile * groups + g]);
                  of_half[half] = vmulq_n_f32(scale, task.x_scales[tile]);
                }
                for (std::size_t i = 0; i < svcntw(); i += 8) {
                  vst1q_f32(scales + i, of_half[0]);
                  vst1q_f32(scales + i + 4, of_half[1]);
                }
                svint32_t dot0 = svdup_n_s32(0), dot1 = dot0, dot2 = dot0, dot3 = dot0;
                const std::int8_t* packed_x = task.x + tile * kTileK;
                for (std::size_t from = 0; from < kApart; from += svcntb()) {
                  const svuint8_t codes0 = load_codes<kBits>(codes, 0, from, apart);
                  const svuint8_t codes1 = load_codes<kBits>(codes, 1, from, apart);
                  const svuint8_t codes2 = load_codes<kBits>(codes, 2, from, apart);
                  const svuint8_t codes3 = load_codes<kBits>(codes, 3, from, apart);
                  unroll<kParts>([&](auto part) FDK_LAMBDA {
                    const std::size_t at = from + std::size_t(part.value) * kApart;
                    const svint8_t x = svld1_s8(svwhilelt_b8(from, kApart), packed_x + at);
                    dot0 = svdot_s32(dot0, levels_at<kBits, part.value>(codes0, table0, table1), x);
                    dot1 = svdot_s32(dot1, levels_at<kBits, part.value>(codes1, table0, table1), x);
                    dot2 = svdot_s32(dot2, levels_at<kBits, part.value>(codes2, table0, table1), x);
                    dot3 = svdot_s32(dot3, levels_at<kBits, part.value>(codes3, table0, table1), x);
                  });
                }
                const svfloat32_t scale = svld1_f32(all, scales);
                sum0 = svmla_lane_f32(sum0, svcvt_f32_s32_x(all, dot0), scale, 0);
                sum1 = svmla_lane_f32(sum1, svcvt_f32_s32_x(all, dot1), scale, 1);
                sum2 = svmla_lane_f32(sum2, svcvt_f32_s32_x(all, dot2), scale, 2);
                sum3 = svmla_lane_f32(sum3, svcvt_f32_s32_x(all, dot3), scale, 3);
              });
    const float y[kTileRows] = {svaddv_f32(all, sum0), svaddv_f32(all, sum1), svaddv_f32(all, sum2),
                                svaddv_f32(all, sum3)};
    vst1q_f32(task.y + (stripe - begin) * kTileRows, vfmsq_n_f32(vld1q_f32(y), constants, share));
  }
}

void gemv_sve(const Int8Task& task, std::size_t begin, std::size_t end) {
  switch (task.weight->bits) {
    case 1:
      return gemv_stripes<1>(task, begin, end);
    case 2:
      return gemv_stripes<2>(task, begin, end);
    default:
      return gemv_stripes<4>(task, begin, end);
  }
}

}  // namespace

bool int8_sve_supports(const Layout& layout) {
  const bool bits = layout.bits == 1 || layout.bits == 2 || layout.bits == 4;
  return bits && layout.groups_per_tile <= 2 && svcntb() % kBlock == 0;
}

extern const Int8Kernels kInt8Sve = {false, 1, quantise_x_by_halves, gemv_sve};

}  // namespace fdk
