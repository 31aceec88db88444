// Decodes blocks in shared memory to operand A of wgmma for dy @ W_hat: columns of the weight are
// rows of A, and rows of the weight are summed over. W_hat is rounded as in dequantise.cu.
//
// A fragment of 16 rows of the weight is one step of wgmma. Register 2 * i + c of lane 4 * g + t
// holds row g + 8 * c of A, columns 2 * t and 2 * t + 1, plus 8 * i. Rows of A may be any columns
// of the weight, because sums can be stored anywhere: rows g and g + 8 of warp w are columns 16 * w
// + 2 * g and the next one. These are neighbours in a unit of the layout (layout.py), which also
// holds the row 8 further. So a lane needs two units, of rows 2 * t and 2 * t + 1, and no other
// lane's data; two byte permutations turn two pairs along a row into two pairs along a column.
//
// Four lanes t read rows of one parity, and lanes g and g + 4 units of two neighbours j, all in the
// same sixteen banks of shared memory. So lanes from g = 4 on (`swapped`) load the odd row first.
//
//   bits          method
//   1 to 3        byte permutations select values from the codebook in registers, at 3 bits their
//                 lower and upper bytes separately
//   4 to 8        table of decode.cuh
//   affine, grid  4 and 6 to 8 bits: codes are put into the mantissa of a power of two
#pragma once
#include "common/hopper_decode.cuh"

constexpr int ROW_PAIR = 2;
constexpr bool COMPUTES_DGRAD_CODES = HAS_ZERO_POINT && BITS > 3 && BITS != 5;
static_assert(HAS_TABLE == (BITS > 3 && !COMPUTES_DGRAD_CODES));

// Scales and zero points of two rows of the weight, as a pair.
struct PairScale {
  uint32 scale_pair, zero_point_pair;  // where SCALES_IN_DTYPE
  float scales[ROW_PAIR], zero_points[ROW_PAIR];

  __forceinline__ uint32 apply(uint32 values) const {
    if (SCALES_IN_DTYPE) {
      if (HAS_ZERO_POINT) values = subtract_pair(values, zero_point_pair);
      return multiply_pair(values, scale_pair);
    }
    float low = to_float(values & 0xFFFFu), high = to_float(values >> 16);
    if (HAS_ZERO_POINT) {
      low -= zero_points[0];
      high -= zero_points[1];
    }
    return from_floats(low * scales[0], high * scales[1]);
  }
};

// Words and scales of a lane in a block.
struct DgradCodes {
  uint32 words[FRAGMENTS][ROW_PAIR];
  uint2 of_two[ROW_PAIR], of_four[ROW_PAIR];  // 5 to 7 bits: shared words of both fragments
  uint4 firsts[ROW_PAIR];  // 3 bits: three words of fragment 0, one of fragment 1
  uint2 seconds[ROW_PAIR];
  PairScale scales[FRAGMENTS][2];  // rows 2 * t and 2 * t + 1; eight further
};

// Values by fragment, for rows r or r + 8.
struct DgradValues {
  uint32 pairs[FRAGMENTS][2][2];    // 4 and 5 bits by table: rows of the pair; else columns
  uint32 seconds[FRAGMENTS][2][2];  // 6 or more bits by table: the second row's
};

struct DgradDecoder {
  const uint8* table;
  uint32 lane_part;
  // 1 bit: the first value as a pair, and the bits in which the second differs; 2 bits: pairs;
  // 3 bits: two words of lower bytes, two of upper bytes.
  uint32 codebook[4];
  uint32 offsets[ROW_PAIR];  // byte offsets of units in a block
  uint32 rests[ROW_PAIR];    // 3 bits: of fragment 1's last words; 6, 7 bits: of words of two units
  uint32 fours[ROW_PAIR];    // 5 and 7 bits: of the words of four units
  uint32 places[2];          // 2, 4 and 5 bits: selectors of bytes, for rows r and r + 8
  // Rotations: of a word of each fragment (1, 2 bits); of a unit's word, that of two units and that
  // of four (5 to 7 bits).
  uint32 turns[3];
  uint32 masks[2];      // 6 and 7 bits: bits from a unit's own word; all in the first half
  uint32 fields[4];     // 2 bits: rotations to the codes of a row and column
  uint32 lower, upper;  // selectors of pairs along the first column, and the second
  uint32 merging;       // selector of both rows' codes, a byte or a half each
  uint32 ones;          // for computed codes, see ones_place
  uint32 scale_offset;
  bool is_second_half;  // whether the lane has the second half of the block's columns

  // Four warps share the 64 columns of a block.
  __forceinline__ DgradDecoder(const uint8* table_, const Codebook& book, int warp, int lane)
      : table(table_), lane_part(table_lane_part(lane)) {
    const int g = lane / 4, t = lane % 4;
    const int half = warp >> 1, j = 2 * (warp & 1) + (g >> 2), unit = g & 3;
    const bool swapped = g >= 4;
    if (BITS == 3) {
      const uint32 pairs[4] = {codebook_pair(book, 0 | 1 << 3), codebook_pair(book, 2 | 3 << 3),
                               codebook_pair(book, 4 | 5 << 3), codebook_pair(book, 6 | 7 << 3)};
#pragma unroll
      for (int i = 0; i < 2; i++) {
        codebook[i] = keep_same(byte_permute(pairs[2 * i], pairs[2 * i + 1], 0x6420), lane);
        codebook[2 + i] = keep_same(byte_permute(pairs[2 * i], pairs[2 * i + 1], 0x7531), lane);
      }
    } else if (BITS == 1) {
      const uint32 first = byte_permute(book.words[0], 0u, 0x1010);
      codebook[0] = keep_same(first, lane);
      codebook[1] = keep_same(first ^ byte_permute(book.words[0], 0u, 0x3232), lane);
    } else {
      codebook[0] = keep_same(book.words[0], lane);
      codebook[1] = keep_same(book.words[1], lane);
    }
    is_second_half = half != 0;
    ones = ones_place(lane);
#pragma unroll
    for (int r = 0; r < ROW_PAIR; r++) {
      const int slot = lane_slot(2 * t + (swapped ? 1 - r : r), j);
      if (BITS == 8) offsets[r] = half * 512 + slot * 16 + unit * 4;
      if (BITS == 4 || IS_SPLIT) offsets[r] = slot * 16 + unit * 4;
      if (BITS == 3) offsets[r] = slot * 16;
      if (BITS == 2) offsets[r] = slot * 16 + half * 4;
      if (BITS == 1) offsets[r] = slot * 8;
      rests[r] = 512 + slot * 8;
      if (IS_SPLIT) rests[r] = 1024 + slot * 16 + (unit >> 1) * 8;
      fours[r] = (BITS == 5 ? 1024 : 1536) + slot * 8;
      places[r] = COMPUTES_DGRAD_CODES ? (swapped ? 0x0004 : 0x0400) + (2 * half + r) * 0x0101
                                       : 0x5504 | (2 * half + r) << 4;
      if (BITS == 5) places[r] = pair_selector(half, r);
    }
    if (BITS == 1) {
      turns[0] = 16 * half + 8 * (unit >> 1) + 4 * (unit & 1);
      turns[1] = 3 + 2 * half + (unit >> 1) + 8 * (unit & 1);
    }
    if (BITS == 2) {
      const uint32 bytes = swapped ? unit + 4 | unit << 4 : unit | (unit + 4) << 4;
      turns[0] = keep(half ? 2 * unit : 0, lane);
#pragma unroll
      for (int i = 0; i < 2; i++)
        places[i] = keep(half ? (swapped ? 0x1504 : 0x5140) + 0x2222 * i : bytes * 0x101, lane);
#pragma unroll
      for (int p = 0; p < 4; p++) fields[p] = keep(half ? 0 : 2 * p - 1, lane);
    }
    if (IS_SPLIT) {
      turns[0] = BITS * half;
      turns[1] = turn_of_two(unit);
      turns[2] = BITS == 5 ? turn_of_pairs(unit, half) : turn_of_four(unit);
      masks[0] = half ? LEFT_MASK : ~0u;
      masks[1] = half ? LOWER_MASK : ~0u;
    }
    lower = swapped ? 0x1054 : 0x5410;
    upper = swapped ? 0x3276 : 0x7632;
    merging = swapped ? 0x2604 : 0x6240;
    if (COMPUTES_DGRAD_CODES) merging = swapped ? 0x0004 : 0x0400;
    if (BITS == 3) merging = swapped ? unit + 4 | unit << 4 : unit | (unit + 4) << 4;
    scale_offset = CODE_BYTES + 2 * t * LANE_SCALE_BYTES +
                   (PER_ROW == 2 ? half * FRAGMENTS * 2 * SCALE_BYTES : 0);
  }

  // Loads scales of both fragments: rows 2 * t and 2 * t + 1 (0), and eight further (1).
  __forceinline__ void load_scales(PairScale (&scales)[FRAGMENTS][2], const uint8* block) const {
    constexpr int ZERO_POINTS = (KINDS - 1) * PER_ROW * FRAGMENTS * 2 * SCALE_BYTES;
    const uint8* own = block + scale_offset;
    if constexpr (SCALE_TYPE == 2) {
#pragma unroll
      for (int r = 0; r < ROW_PAIR; r++, own += LANE_SCALE_BYTES) {
        const float4 s = *reinterpret_cast<const float4*>(own);
        const float4 z = *reinterpret_cast<const float4*>(own + ZERO_POINTS);
        const float values[2][4] = {{s.x, s.y, s.z, s.w}, {z.x, z.y, z.z, z.w}};
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            scales[f][i].scales[r] = values[0][2 * f + i];
            scales[f][i].zero_points[r] = values[1][2 * f + i];
          }
      }
    } else {
      const uint2 s[ROW_PAIR] = {load_two(own), load_two(own + LANE_SCALE_BYTES)};
      const uint2 z[ROW_PAIR] = {load_two(own + ZERO_POINTS),
                                 load_two(own + ZERO_POINTS + LANE_SCALE_BYTES)};
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const uint32 rows = i ? 0x7632 : 0x5410;
          const uint32 scale = byte_permute(f ? s[0].y : s[0].x, f ? s[1].y : s[1].x, rows);
          const uint32 zero = byte_permute(f ? z[0].y : z[0].x, f ? z[1].y : z[1].x, rows);
          scales[f][i] = {
              scale,
              zero,
              {HopperDecoder::stored_to_float(scale), HopperDecoder::stored_to_float(scale >> 16)},
              {HopperDecoder::stored_to_float(zero), HopperDecoder::stored_to_float(zero >> 16)}};
        }
    }
    if (IS_GRID)
#pragma unroll
      for (int i = 0; i < 2 * FRAGMENTS; i++) {
        PairScale& pair = scales[i / 2][i % 2];
        pair.zero_point_pair = GRID_PAIR;
        pair.zero_points[0] = pair.zero_points[1] = GRID_ZERO_POINT;
      }
  }

  __forceinline__ static uint2 load_two(const uint8* address) {
    return *reinterpret_cast<const uint2*>(address);
  }

  __forceinline__ uint32 look_up(uint32 word, uint32 selector) const {
    return *reinterpret_cast<const uint32*>(table + byte_permute(word, lane_part, selector));
  }

  // Loads a block's words and scales.
  __forceinline__ void load(DgradCodes& codes, const uint8* block) const {
    load_scales(codes.scales, block);
    if constexpr (BITS == 3) {
#pragma unroll
      for (int r = 0; r < ROW_PAIR; r++) {
        codes.firsts[r] = *reinterpret_cast<const uint4*>(block + offsets[r]);
        codes.seconds[r] = load_two(block + rests[r]);
      }
    } else {
      constexpr int FRAGMENT_BYTES = BITS == 8 ? 1024 : BITS >= 4 ? 512 : 4 * BITS;
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
        for (int r = 0; r < ROW_PAIR; r++) {
          codes.words[f][r] = HopperDecoder::load(block + offsets[r] + FRAGMENT_BYTES * f);
          if (f > 0) continue;
          if (BITS == 6 || BITS == 7) codes.of_two[r] = load_two(block + rests[r]);
          if (BITS == 5 || BITS == 7) codes.of_four[r] = load_two(block + fours[r]);
        }
    }
  }

  // 6 or more bits: returns a unit's codes of its half, a byte each, for row r of the pair.
  __forceinline__ uint32 code_bytes(const DgradCodes& codes, int f, int r) const {
    if (BITS == 8) return codes.words[f][r];
    return join(rotate_right(codes.words[f][r], turns[0]),
                rotate_right(f ? codes.of_two[r].y : codes.of_two[r].x, turns[1]),
                rotate_right(f ? codes.of_four[r].y : codes.of_four[r].x, turns[2]), masks[0],
                masks[1]);
  }

  // Looks up or selects the values of a block's codes.
  __forceinline__ void look_up(DgradValues& values, const DgradCodes& codes) const {
    if constexpr (BITS == 2) return pick_2_bits(values, codes);
    uint32 selectors[2];
    if constexpr (BITS == 3) make_selectors(selectors, codes);
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
      auto& pairs = values.pairs[f];
      const uint32(&words)[ROW_PAIR] = codes.words[f];
      if constexpr (BITS > 5) {
        const uint32 bytes[ROW_PAIR] = {code_bytes(codes, f, 0), code_bytes(codes, f, 1)};
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
          for (int c = 0; c < 2; c++) {
            if (COMPUTES_DGRAD_CODES) {
              pairs[i][c] = codes_to_values(
                  byte_permute(bytes[0], bytes[1], merging + (2 * i + c) * 0x0101), ones);
            } else {
              const uint32 byte = 0x5504 | (2 * i + c) << 4;
              pairs[i][c] = look_up(bytes[0], byte);
              values.seconds[f][i][c] = look_up(bytes[1], byte);
            }
          }
      } else if constexpr (COMPUTES_DGRAD_CODES) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const uint32 both = byte_permute(words[0], words[1], places[i]);
          pairs[i][0] = codes_to_values(both, ones);
          pairs[i][1] = codes_to_values(both >> 4, ones);
        }
      } else if constexpr (BITS == 1) {
        // Byte 0 has bits of the first row, byte 1 those of the second at the same places.
        const uint32 bits = byte_permute(rotate_right(words[0], turns[f]),
                                         rotate_right(words[1], turns[f]), merging);
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
          for (int c = 0; c < 2; c++) {
            // Sign bits of two bytes, which a permutation replicates over halves.
            const uint32 signs = bits << (7 - (f ? 4 * i : 2 * i + c));
            const uint32 mask = byte_permute(signs, signs, f && c ? 0xBBAA : 0x9988);
            pairs[i][c] = codebook[0] ^ (mask & codebook[1]);
          }
      } else if constexpr (BITS == 3) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const uint32 low = byte_permute(codebook[0], codebook[1], selectors[i] >> (16 * f));
          const uint32 high = byte_permute(codebook[2], codebook[3], selectors[i] >> (16 * f));
          pairs[i][0] = byte_permute(low, high, 0x6240);
          pairs[i][1] = byte_permute(low, high, 0x7351);
        }
      } else if constexpr (BITS == 4 || BITS == 5) {
#pragma unroll
        for (int r = 0; r < ROW_PAIR; r++) {
          const uint32 of_four = f ? codes.of_four[r].y : codes.of_four[r].x;
          const uint32 part = BITS == 5 ? pair_part(of_four, turns[2], lane_part) : lane_part;
#pragma unroll
          for (int i = 0; i < 2; i++)
            pairs[i][r] =
                *reinterpret_cast<const uint32*>(table + byte_permute(words[r], part, places[i]));
        }
      }
    }
  }

  // Scales the values: two steps, one per fragment.
  __forceinline__ void finish(uint32 (&a)[STEPS][REGISTERS], int first_step,
                              const DgradValues& values, const DgradCodes& codes) const {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
          const auto& pairs = values.pairs[f][i];
          uint32 pair = pairs[c];
          if constexpr (BITS > 5 && !COMPUTES_DGRAD_CODES)
            pair = byte_permute(pair, values.seconds[f][i][c], lower);
          if constexpr ((BITS == 4 || BITS == 5) && !COMPUTES_DGRAD_CODES)
            pair = byte_permute(pairs[0], pairs[1], c ? upper : lower);
          a[first_step + f][2 * i + c] = codes.scales[f][i].apply(pair);
        }
  }

  // 3 bits: for rows r and r + 8 of each fragment two bytes, one per row of the pair, each with the
  // codes of both columns.
  __forceinline__ void make_selectors(uint32 (&selectors)[2], const DgradCodes& codes) const {
    const uint4(&firsts)[ROW_PAIR] = codes.firsts;
    const uint2(&seconds)[ROW_PAIR] = codes.seconds;
    const uint32 both[3] = {
        byte_permute(merge(firsts[0].x, firsts[1].x), merge(firsts[0].w, firsts[1].w), 0x5410),
        byte_permute(merge(firsts[0].y, firsts[1].y), merge(seconds[0].x, seconds[1].x), 0x5410),
        byte_permute(merge(firsts[0].z, firsts[1].z), merge(seconds[0].y, seconds[1].y), 0x5410)};
    const uint32 fourth = left_over(both[0], both[1], both[2]);
    const uint32 pairs[2] = {is_second_half ? both[2] : both[0], is_second_half ? fourth : both[1]};
#pragma unroll
    for (int i = 0; i < 2; i++)
      selectors[i] = (pairs[i] & 0x07070707u) | (pairs[i] << 1 & 0x70707070u);
  }

  // Joins a byte, or a half, of both rows.
  __forceinline__ uint32 merge(uint32 first, uint32 second) const {
    return byte_permute(first, second, merging);
  }

  // 2 bits: in the first half of the columns a unit is a byte with a field per row and column; in
  // the second half it is a field of four bytes. Either way a register gets, for a column and rows
  // r or r + 8, the byte of both rows of the pair and both fragments.
  __forceinline__ void pick_2_bits(DgradValues& values, const DgradCodes& codes) const {
    uint32 rows[FRAGMENTS][2];
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        rows[f][i] = byte_permute(rotate_right(codes.words[f][0], turns[0]),
                                  rotate_right(codes.words[f][1], turns[0]), places[i]);
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const uint32 both = byte_permute(rows[0][i], rows[1][i], c ? 0x7632 : 0x5410);
        const uint32 twice = rotate_right(both, fields[2 * i + c]) & 0x06060606u;
        // 17 times that plus 0x10 selects bytes 2 c and 2 c + 1.
        const uint32 selectors = twice * 0x11u + 0x10101010u;
        values.pairs[0][i][c] = byte_permute(codebook[0], codebook[1], selectors);
        values.pairs[1][i][c] = byte_permute(codebook[0], codebook[1], selectors >> 16);
      }
  }
};
