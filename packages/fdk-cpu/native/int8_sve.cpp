// 8-bit x by SVE at vectors of 256 bits and their multiples, for one row of x and codes of 1, 2 and
// 4 bits. What is left, and vectors of 128 bits, is NEON's.
//
// The even bytes of the layout's lanes are positions of a tile's first half, the odd ones of its
// second. One `tbl` brings those of each 32 bytes apart: 16 positions of one half, then 16 of the
// other, in 128 bits each. x is staged so. No group is longer than a half or it is all of the tile,
// so that 128 bits meet one scale: those of four rows lie in the four lanes, as `fmla` by lane
// takes them, and sums of rows are added across the vector once, at the end.
//
// A vector longer than a row's plane is left inactive beyond it. SVE's types have no size: they
// cannot be members, captured or put in arrays, hence sums 0 to 3.
#include <arm_sve.h>

#include "int8.h"
#include "int8_neon_stage.h"
#include "neon_codes.h"
#include "simd_float.h"

namespace fdk {
namespace {

constexpr std::size_t kBlock = 32;          // bytes that are taken apart together
constexpr std::size_t kHalf = kTileK / 2;   // positions
constexpr std::size_t kLanes = kTileK / 4;  // sums of 4 positions, of a tile
constexpr std::size_t kLongest = 256;       // bytes of a vector, at most

// Positions i to i + 15 of the first half, then those of the second.
void stage_by_halves(const float* x, std::size_t groups, const Int8Tile& out) {
  stage_tile(x, groups, out, [&](std::size_t i, int8x16_t codes) FDK_LAMBDA {
    vst1q_s8(out.codes + i % kHalf * 2 + i / kHalf * kVector, codes);
  });
}

// Levels of an index of 4 bits, for its code i.
template <int kBits>
FDK_INLINE svint8_t load_table(const std::uint8_t* levels, int i) {
  std::int8_t entries[16];
  for (int e = 0; e < 16; e++) {
    entries[e] = std::int8_t(levels[e >> (2 * i) & ((1 << kBits) - 1)]);
  }
  return svld1_s8(svwhilelt_b8(std::size_t(0), std::size_t(16)), entries);
}

// Where each byte of a vector comes from. At 1 bit 16 bytes of codes fill 32: twice, for positions
// 8 to 15 of each 16 are a bit above those of 0 to 7, in the same bytes.
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

// What a tile's vectors share.
struct Operands {
  const std::uint8_t* codes;  // of the tile's first row
  const std::int8_t* x;
  const float* scales;  // [kLanes], of every 128 bits the four rows', where groups are short
};

// The codes of a row from byte `from` on, taken apart.
template <int kBits>
FDK_INLINE svuint8_t load_codes(const Operands& o, std::size_t row, std::size_t from,
                                svuint8_t apart) {
  constexpr std::size_t kRowBytes = tile_bytes(kBits) / kTileRows;
  const svbool_t active = svwhilelt_b8(from, kRowBytes);
  const svuint8_t codes = svtbl_u8(svld1_u8(active, o.codes + row * kRowBytes + from), apart);
  if constexpr (kBits != 1) return codes;
  const svuint8_t shift =
      svand_n_u8_x(svptrue_b8(), svlsr_n_u8_x(svptrue_b8(), svindex_u8(0, 1), 3), 1);
  return svlsr_u8_x(svptrue_b8(), codes, shift);
}

// The levels of the codes at place `part` of each byte, which are 2 * kVector * part positions on.
template <int kBits, int part>
FDK_INLINE svint8_t levels_at(svuint8_t codes, svint8_t table0, svint8_t table1) {
  const svbool_t all = svptrue_b8();
  constexpr int kOfNibble = kBits == 4 ? 1 : 2;
  const svuint8_t index =
      part < kOfNibble ? svand_n_u8_x(all, codes, 15) : svlsr_n_u8_x(all, codes, 4);
  return svtbl_s8(part % kOfNibble == 0 ? table0 : table1, index);
}

// kShort: groups shorter than half a tile, whose sums are scaled vector by vector.
template <int kBits, bool kShort>
void sve_stripes(const Int8Task& task, std::size_t begin, std::size_t end) {
  constexpr std::size_t kBytes = tile_bytes(kBits), kRowBytes = kBytes / kTileRows;
  // Bytes of a row once it is taken apart, and codes of each.
  constexpr std::size_t kApart = kBits == 1 ? kBlock : kRowBytes;
  constexpr int kParts = int(kTileK / kApart);
  const Weight& w = *task.weight;
  const svuint8_t apart = load_apart<kBits>();
  const svint8_t table0 = load_table<kBits>(task.levels, 0);
  const svint8_t table1 = load_table<kBits>(task.levels, kBits < 4 ? 1 : 0);
  const float32x4_t centre = vdupq_n_f32(task.centre);
  const std::size_t groups = w.groups_per_tile;
  const svbool_t all = svptrue_b32();
  for (std::size_t stripe = begin; stripe < end; stripe++) {
    svfloat32_t sum0 = svdup_n_f32(0), sum1 = sum0, sum2 = sum0, sum3 = sum0;
    float32x4_t constants = vdupq_n_f32(0);
    for_tiles(w, stripe, 0, w.tiles, kBytes,
              [&](std::size_t tile, const std::uint8_t* codes, std::size_t slot) FDK_LAMBDA {
                for (std::size_t i = 0; i < kBytes; i += 64)
                  __builtin_prefetch(codes + kPrefetch + i);
                // Of each 16 positions of x, as they are staged; of long groups, as often as a
                // vector has room.
                float scales[kLongest / sizeof(float)];
                const float x_scale = task.x_scales[tile];
                float32x4_t of_group[8];
                for (std::size_t g = 0; g < groups; g++) {
                  const std::size_t at = slot + g * kTileRows;
                  of_group[g] = load4_scales(w.scales, at, w.scale_type);
                  constants = vfmaq_n_f32(constants, constants_of(w, at, of_group[g], centre),
                                          task.x_sums[tile * groups + g]);
                  of_group[g] = vmulq_n_f32(of_group[g], x_scale);
                }
                const std::size_t lanes = kShort ? kLanes : svcntw();
                for (std::size_t i = 0; i < lanes; i += 8) {
                  const std::size_t position = kShort ? i * 2 : 0;
                  vst1q_f32(scales + i, of_group[position * groups / kTileK]);
                  vst1q_f32(scales + i + 4, of_group[(position + kHalf) * groups / kTileK]);
                }
                svint32_t dot0 = svdup_n_s32(0), dot1 = dot0, dot2 = dot0, dot3 = dot0;
                const auto scale_dots = [&](svfloat32_t scale) FDK_LAMBDA {
                  sum0 = svmla_lane_f32(sum0, svcvt_f32_s32_x(all, dot0), scale, 0);
                  sum1 = svmla_lane_f32(sum1, svcvt_f32_s32_x(all, dot1), scale, 1);
                  sum2 = svmla_lane_f32(sum2, svcvt_f32_s32_x(all, dot2), scale, 2);
                  sum3 = svmla_lane_f32(sum3, svcvt_f32_s32_x(all, dot3), scale, 3);
                };
                const Operands o{codes, task.x + tile * kTileK, scales};
                for (std::size_t from = 0; from < kApart; from += svcntb()) {
                  const svuint8_t codes0 = load_codes<kBits>(o, 0, from, apart);
                  const svuint8_t codes1 = load_codes<kBits>(o, 1, from, apart);
                  const svuint8_t codes2 = load_codes<kBits>(o, 2, from, apart);
                  const svuint8_t codes3 = load_codes<kBits>(o, 3, from, apart);
                  unroll<kParts>([&](auto part) FDK_LAMBDA {
                    const std::size_t at = from + std::size_t(part.value) * kApart;
                    const svint8_t x = svld1_s8(svwhilelt_b8(from, kApart), o.x + at);
                    if constexpr (kShort) dot0 = dot1 = dot2 = dot3 = svdup_n_s32(0);
                    dot0 = svdot_s32(dot0, levels_at<kBits, part.value>(codes0, table0, table1), x);
                    dot1 = svdot_s32(dot1, levels_at<kBits, part.value>(codes1, table0, table1), x);
                    dot2 = svdot_s32(dot2, levels_at<kBits, part.value>(codes2, table0, table1), x);
                    dot3 = svdot_s32(dot3, levels_at<kBits, part.value>(codes3, table0, table1), x);
                    if constexpr (kShort) {
                      scale_dots(svld1_f32(svwhilelt_b32(from / 4, kApart / 4), o.scales + at / 4));
                    }
                  });
                }
                if constexpr (!kShort) scale_dots(svld1_f32(all, scales));
              });
    const float y[kTileRows] = {svaddv_f32(all, sum0), svaddv_f32(all, sum1), svaddv_f32(all, sum2),
                                svaddv_f32(all, sum3)};
    vst1q_f32(task.y + (stripe - begin) * kTileRows,
              vfmsq_n_f32(vld1q_f32(y), constants, share_of(task)));
  }
}

template <int kBits>
FDK_INLINE void gemv_groups(const Int8Task& task, std::size_t begin, std::size_t end) {
  if (task.weight->groups_per_tile <= 2) return sve_stripes<kBits, false>(task, begin, end);
  return sve_stripes<kBits, true>(task, begin, end);
}

void gemv_sve(const Int8Task& task, std::size_t begin, std::size_t end) {
  switch (task.weight->bits) {
    case 1:
      return gemv_groups<1>(task, begin, end);
    case 2:
      return gemv_groups<2>(task, begin, end);
    default:
      return gemv_groups<4>(task, begin, end);
  }
}

}  // namespace

bool sve_takes_int8(int bits) {
  return (bits == 1 || bits == 2 || bits == 4) && svcntb() % kBlock == 0;
}

extern const Int8Kernels kSveInt8 = {false, 1, stage_by_halves, gemv_sve};

}  // namespace fdk
