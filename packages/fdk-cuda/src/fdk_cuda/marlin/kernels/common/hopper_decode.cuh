// Decodes a block in shared memory to operand A of wgmma: W_hat, rounded as in dequantise.cu.
//
// A warp decodes a fragment of 16 rows. wgmma needs in lane 4 * g + t, for half h, columns 8 * j +
// 2 * t + e: register 2 * (j & 1) + i of step 2 * h + (j >> 1), where j is a chunk of eight columns
// and i selects row g or g + 8. In the layout that is unit t of neighbour j among four lanes, so a
// lane reads its unit of each neighbour (layout.py).
//
//   bits     method
//   3 to 5   table of decode.cuh, then scaled
//   6 to 8   the same; affine codes and integer grids are put into the mantissa of a power of two
//   1, 2     a row has two or four values: they are scaled first and selected by arithmetic. Where
//            tiles are narrow, 1 bit and half of 2 bits (the first 32 columns) use the table
//   signs    1 bit, -c and c: a code is the sign of a row's scaled value. The second fragment takes
//            less work than the first, so a warp takes rows g, or rows g + 8, of both
//
// The kernel sets TILE_M and CONSUMERS.
#pragma once
#include "common/hopper_scales.cuh"

constexpr int NEIGHBOURS = 4;
// Scales are applied after the lookup, except at 1 and 2 bits without a table.
constexpr bool SCALES_LAST = BITS > 2 || (HAS_TABLE && SCALES_IN_DTYPE && !AFFINE);

// Words of a lane, for its fragment: from each neighbour its unit's word or words, then at 5 to 7
// bits the shared ones.
constexpr int UNIT_WORDS = IS_SPLIT                             ? (BITS == 7 ? 3 : 2)
                           : BITS == 3                          ? 3
                           : BITS == 2 || BITS == 8 || BY_SIGNS ? 2
                                                                : 1;
struct HopperCodes {
  uint32 words[UNIT_WORDS][NEIGHBOURS];
  RowScale rows[2][2];  // half, row
};

// Values by half h, neighbour j, row i.
struct HopperValues {
  uint32 pairs[2][NEIGHBOURS][2];
  uint32 seconds[2][NEIGHBOURS][2];  // 6 or more bits: the upper half of a pair
};

// 1 bit: looks up half a unit, 8 bytes, instead of 16. That is two more lookups per step, which
// three warps per scheduler hide (H200, 64 rows: 28672 x 8192 64.9 us -> 62.0; with two consumers,
// 8192 x 8192: 19.1 -> 19.7).
constexpr bool LOOKS_UP_HALVES = BITS == 1 && CONSUMERS == 3 && TILE_M == 64;
// Copies of a table entry: 16 lanes read 8 bytes at a time.
constexpr int COPIES = BITS == 2 ? 16 : 32;

// Builds the table for LOOKS_UP_HALVES: an entry for each half of a unit's byte, 16 copies for each
// fragment, whose bytes have the second and third pair exchanged.
template <int THREADS>
__forceinline__ void build_half_table(uint8* table, const Codebook& codebook, int thread) {
  constexpr int ENTRY_THREADS = 8, ENTRIES = FRAGMENTS * 2 * 16;
#pragma unroll
  for (int first = 0; first < ENTRIES * ENTRY_THREADS; first += THREADS) {
    const int entry = (first + thread) / ENTRY_THREADS;
    if (first + THREADS > ENTRIES * ENTRY_THREADS && entry >= ENTRIES) break;
    const int codes = entry % 16, h = entry / 16 % 2, f = entry / 32;
    const int byte = f ? (codes % 4 | codes / 4 * 16) << 2 * h : codes << 4 * h;
    const uint2 pairs =
        make_uint2(codebook_pair(codebook, codes % 4), codebook_pair(codebook, codes / 4));
    // Both halves share the entry with no bits set.
    if (h == 0 || codes > 0)
      *reinterpret_cast<uint4*>(table + byte * 256 + f * 128 + thread % ENTRY_THREADS * 16) =
          make_uint4(pairs.x, pairs.y, pairs.x, pairs.y);
  }
}

struct HopperDecoder {
  const uint8* table;
  uint32 lane_part;
  uint32 codebook[2];          // 1 and 2 bits; BY_SIGNS: its first value as a pair
  uint32 offsets[NEIGHBOURS];  // byte offsets of units in a block
  uint32 rests[NEIGHBOURS];    // 3 bits: offsets of the unit's second and third words
  // Bytes from offsets[j] to the word of two units (6 and 7 bits), and from offsets[j] / 2 to the
  // word of four units (5 and 7 bits).
  uint32 to_two;
  uint32 to_four;
  uint32 scale_offset;
  uint32 turn;          // rotation of a unit (1, 2 bits) or of the word of two units (6, 7 bits)
  uint32 four_turn;     // 5 and 7 bits: rotation of the word of four units
  uint32 selector;      // 2 and 3 bits: a unit's byte of two words; BY_SIGNS: a scale of two
  uint32 entry;         // 2 bits: byte permutation that gives a unit's table entry
  uint32 turns[4];      // 1 bit: rotations that turn a unit's bits into sign bits
  uint32 selectors[2];  // 1 bit: permutation that replicates those signs, by half h
  uint32 ones;          // for computed codes, see ones_place
  // 1 bit: mask of the bits of a unit's second byte that come from the word rotated by `turn`; the
  // others come from the word rotated by `upper_turn`.
  uint32 lower;
  uint32 upper_turn;
  uint32 halves[2];  // 1 bit: mask of the bits of that byte that half h uses

  __forceinline__ HopperDecoder(const uint8* table_, const Codebook& book, int warp, int lane)
      : table(table_) {
    const int g = lane / 4, t = lane % 4, f = warp % FRAGMENTS;
    set_codebook(book);
    // 1 bit: each fragment has half of the copies of an entry.
    const int one_bit_part = (LOOKS_UP_HALVES ? 8 * (lane % 16) : 16 * (lane % 8)) + 128 * f;
    lane_part = keep(BITS == 1 ? one_bit_part : table_lane_part(lane % COPIES), lane);
#pragma unroll
    for (int j = 0; j < NEIGHBOURS; j++) {
      const int slot = lane_slot(g, j);
      uint32 offset = f * 512 + slot * 16 + t * 4;
      if (BITS == 8) offset += f * 512;
      if (BITS == 3) offset = slot * 16 + f * 12;
      if (BITS == 2) offset = slot * 16 + f * 8;
      if (BITS == 1) offset = slot * 8 + f * 4;
      offsets[j] = keep(offset, lane);
      rests[j] = keep(f ? 512 + slot * 8 : slot * 16 + 4, lane);
    }
    if (IS_SPLIT) {
      to_two = keep(1024 + f * 4 - f * 512 + t / 2 * 8 - t * 4, lane);
      to_four = keep((BITS == 5 ? 1024 : 1536) + f * 4 - f * 256 - t * 2, lane);
      four_turn = keep(BITS == 5 ? turn_of_pairs(t, 0) : turn_of_four(t), lane);
    }
    const int one_bit = f ? 3 + (t >> 1) + 8 * (t & 1) : 8 * (t >> 1) + 4 * (t & 1);
    turn = keep(IS_SPLIT ? turn_of_two(t) : BITS == 2 ? 2 * t : one_bit - 8, lane);
    selector = keep(t | (t + 4) << 4, lane);
    entry = keep(0x5504 | t << 4, lane);
#pragma unroll
    for (int i = 0; i < 4; i++) turns[i] = keep(one_bit + (f ? 2 * i : i) - 15, lane);
    selectors[0] = keep(f ? 0xBB99 : 0xDD99, lane);
    selectors[1] = keep(f ? 0xFFDD : 0xFFBB, lane);
    ones = ones_place(lane);
    lower = keep(f ? 0x5500 : 0x0F00, lane);
    upper_turn = keep(one_bit + (f ? 15 : 12) - 8, lane);
    halves[0] = keep(f ? 0x3300 : 0x0F00, lane);
    halves[1] = keep(f ? 0xCC00 : 0xF000, lane);
    scale_offset = keep(CODE_BYTES + g * LANE_SCALE_BYTES + f * 2 * SCALE_BYTES, lane);
    // Overwrites the above: branching there changes the machine code of 5 of 7 programs by signs.
    if (BY_SIGNS) {
      codebook[0] = keep(byte_permute(book.words[0], book.words[0], 0x1010), lane);
      selector = keep(f ? 0x3232 : 0x1010, lane);
      scale_offset = keep(CODE_BYTES + g * LANE_SCALE_BYTES, lane);
#pragma unroll
      for (int j = 0; j < NEIGHBOURS; j++) offsets[j] = keep(lane_slot(g, j) * 8, lane);
      // Bits 15 and 31 then belong to the two halves, for element e of the first fragment; for the
      // second to the two elements of half h.
#pragma unroll
      for (int i = 0; i < 2; i++) {
        turns[i] = keep(8 * (t >> 1) + 4 * (t & 1) + 2 * f + i - 15, lane);
        turns[2 + i] = keep(3 + (t >> 1) + 8 * (t & 1) + 4 * f + 2 * i - 15, lane);
      }
    }
  }

  __forceinline__ void set_codebook(const Codebook& book) {
    codebook[0] = book.words[0];
    codebook[1] = book.words[1];
  }

  // Loads scales of rows g (0) and g + 8 (1) in half h; BY_SIGNS: of both fragments.
  __forceinline__ void load_scales(RowScale (&rows)[2], const uint8* block, int h) const {
    constexpr int KIND_BYTES = PER_ROW * FRAGMENTS * 2 * SCALE_BYTES;
    const uint8* own = block + scale_offset + (PER_ROW == 2 ? h * FRAGMENTS * 2 * SCALE_BYTES : 0);
    if constexpr (BY_SIGNS) {
      const uint2 scales = *reinterpret_cast<const uint2*>(own);
      rows[0].scale_pair = byte_permute(scales.x, scales.x, selector);
      rows[1].scale_pair = byte_permute(scales.y, scales.y, selector);
    } else if constexpr (SCALE_TYPE == 2) {
      const float2 scales = *reinterpret_cast<const float2*>(own);
      const float2 zeros = *reinterpret_cast<const float2*>(own + (KINDS - 1) * KIND_BYTES);
      rows[0] = {0u, 0u, scales.x, zeros.x};
      rows[1] = {0u, 0u, scales.y, zeros.y};
    } else {
      const uint32 scales = *reinterpret_cast<const uint32*>(own);
      const uint32 zeros = *reinterpret_cast<const uint32*>(own + (KINDS - 1) * KIND_BYTES);
#pragma unroll
      for (int i = 0; i < 2; i++)
        rows[i] = {byte_permute(scales, scales, i ? 0x3232 : 0x1010),
                   byte_permute(zeros, zeros, i ? 0x3232 : 0x1010),
                   stored_to_float(scales >> (16 * i)), stored_to_float(zeros >> (16 * i))};
    }
    if (IS_GRID)
      for (RowScale& row : rows) row.zero_point_pair = GRID_PAIR, row.zero_point = GRID_ZERO_POINT;
  }

  __forceinline__ static float stored_to_float(uint32 bits) {
    return SCALE_TYPE == 1 ? fp16_to_float(bits & 0xFFFFu) : bf16_to_float(bits & 0xFFFFu);
  }

  __forceinline__ uint32 look_up(uint32 word, int byte) const {
    return *reinterpret_cast<const uint32*>(table_entry(table, word, byte, lane_part));
  }

  // Collects byte t of each neighbour's word, in order.
  __forceinline__ uint32 gather(const uint32 (&words)[NEIGHBOURS]) const {
    return byte_permute(byte_permute(words[0], words[1], selector),
                        byte_permute(words[2], words[3], selector), 0x5410);
  }

  // Decodes the fragment's four steps of a block.
  __forceinline__ void decode(uint32 (&a)[STEPS][REGISTERS], const uint8* block) const {
    decode(a, load_codes(block));
  }

  __forceinline__ void decode(uint32 (&a)[STEPS][REGISTERS], const HopperCodes& codes) const {
    HopperValues values;
    look_up(values, codes);
    finish(a, values, codes);
  }

  __forceinline__ HopperCodes load_codes(const uint8* block) const {
    HopperCodes codes;
    auto& words = codes.words;
#pragma unroll
    for (int j = 0; j < NEIGHBOURS; j++) {
      if constexpr (BITS == 2 || BY_SIGNS) {
        const uint2 unit = *reinterpret_cast<const uint2*>(block + offsets[j]);
        words[0][j] = unit.x;
        words[1][j] = unit.y;
      } else {
        words[0][j] = load(block + offsets[j]);
      }
      if constexpr (BITS == 8) words[1][j] = load(block + offsets[j] + 512);
      if constexpr (BITS == 6 || BITS == 7) words[1][j] = load(block + (offsets[j] + to_two));
      if constexpr (BITS == 5 || BITS == 7)
        words[UNIT_WORDS - 1][j] = load(at_half(block + to_four, offsets[j]));
      if constexpr (BITS == 3) {
        words[1][j] = load(block + rests[j]);
        words[2][j] = load(block + rests[j] + 4);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (h < PER_ROW) load_scales(codes.rows[h], block, h);
      if (h >= PER_ROW) codes.rows[h][0] = codes.rows[0][0], codes.rows[h][1] = codes.rows[0][1];
    }
    return codes;
  }

  // Looks up codebook values; where values are scaled first, the result is weights.
  __forceinline__ void look_up(HopperValues& values, const HopperCodes& codes) const {
    if constexpr (BITS >= 4) {
#pragma unroll
      for (int j = 0; j < NEIGHBOURS; j++)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            if constexpr (BITS == 4) values.pairs[h][j][i] = look_up(codes.words[0][j], 2 * h + i);
            if constexpr (BITS == 5) {
              const uint32 part = pair_part(codes.words[1][j], four_turn + 16 * h, lane_part);
              values.pairs[h][j][i] = *reinterpret_cast<const uint32*>(
                  table + byte_permute(codes.words[0][j], part, pair_selector(h, i)));
            }
            if constexpr (BITS > 5 && !COMPUTES_CODES) {
              const uint32 word = code_bytes(codes, h, j);
              values.pairs[h][j][i] = look_up(word, 2 * i);
              values.seconds[h][j][i] = look_up(word, 2 * i + 1);
            }
          }
    } else if constexpr (BITS == 3) {
      uint32 pairs[4];
#pragma unroll
      for (int word = 0; word < 3; word++) pairs[word] = gather(codes.words[word]);
      pairs[3] = left_over(pairs[0], pairs[1], pairs[2]);
#pragma unroll
      for (int j = 0; j < NEIGHBOURS; j++)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int i = 0; i < 2; i++) values.pairs[h][j][i] = look_up(pairs[2 * h + i], j);
    } else if constexpr (BITS == 2) {
      look_up_2_bits(values, codes);
    } else if constexpr (BY_SIGNS) {
      sign(values, codes);
    } else {
      look_up_1_bit(values, codes);
    }
  }

  // 6 or more bits: returns a unit's codes of half h, a byte each.
  __forceinline__ uint32 code_bytes(const HopperCodes& codes, int h, int j) const {
    const auto& words = codes.words;
    if (BITS == 8 || h == 0) return words[h][j];
    return join(words[0][j] >> BITS, rotate_right(words[1][j], turn),
                rotate_right(words[UNIT_WORDS - 1][j], four_turn));
  }

  __forceinline__ void look_up_2_bits(HopperValues& values, const HopperCodes& codes) const {
    uint32 book[2][2][2];  // half, row
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int word = 0; word < 2; word++)
          book[h][i][word] = SCALES_LAST ? codebook[word] : codes.rows[h][i].apply(codebook[word]);
#pragma unroll
    for (int j = 0; j < NEIGHBOURS; j++) {
      // Twice a code in each byte; 17 times that plus 0x10 selects bytes 2 c and 2 c + 1.
      const uint32 twice = rotate_right(codes.words[1][j], turn) & 0x06060606u;
      const uint32 selectors = twice * 0x11u + 0x10101010u;
#pragma unroll
      for (int i = 0; i < 2; i++)
        values.pairs[1][j][i] = byte_permute(book[1][i][0], book[1][i][1], selectors >> (16 * i));
    }
    if (SCALES_LAST) {
#pragma unroll
      for (int j = 0; j < NEIGHBOURS; j++) {
        const uint2 pairs = *reinterpret_cast<const uint2*>(
            table + byte_permute(codes.words[0][j], lane_part, entry));
        values.pairs[0][j][0] = pairs.x;
        values.pairs[0][j][1] = pairs.y;
      }
      return;
    }
    // A byte per neighbour: two codes of row g, two of row g + 8.
    const uint32 bytes = gather(codes.words[0]);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32 even = (i ? bytes >> 3 : bytes << 1) & 0x06060606u;
      const uint32 odd = bytes >> (4 * i + 1) & 0x06060606u;
#pragma unroll
      for (int j = 0; j < NEIGHBOURS; j += 2) {
        const uint32 twice = byte_permute(even, odd, j ? 0x7362 : 0x5140);
        const uint32 selectors = twice * 0x11u + 0x10101010u;
        values.pairs[0][j][i] = byte_permute(book[0][i][0], book[0][i][1], selectors);
        values.pairs[0][j + 1][i] = byte_permute(book[0][i][0], book[0][i][1], selectors >> 16);
      }
    }
  }

  __forceinline__ void sign(HopperValues& values, const HopperCodes& codes) const {
#pragma unroll
    for (int j = 0; j < NEIGHBOURS; j++) {
      const uint32 e0 = rotate_right(codes.words[0][j], turns[0]);
      const uint32 e1 = rotate_right(codes.words[0][j], turns[1]);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const uint32 first = byte_permute(e0, e1, h ? 0x7733 : 0x5511);
        const uint32 second = rotate_right(codes.words[1][j], turns[2 + h]);
        values.pairs[h][j][0] = codes.rows[h][0].apply(codebook[0]) ^ (first & 0x80008000u);
        values.pairs[h][j][1] = codes.rows[h][1].apply(codebook[0]) ^ (second & 0x80008000u);
      }
    }
  }

  __forceinline__ void look_up_1_bit(HopperValues& values, const HopperCodes& codes) const {
#pragma unroll
    for (int j = 0; j < NEIGHBOURS; j++) {
      if (SCALES_LAST) {
        const uint32 word = rotate_right(codes.words[0][j], turn);
        // The second byte is the index of a table entry.
        const uint32 byte = (word & lower) | (rotate_right(codes.words[0][j], upper_turn) & ~lower);
        if constexpr (LOOKS_UP_HALVES) {
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const uint2 pairs =
                *reinterpret_cast<const uint2*>(table + ((byte & halves[h]) | lane_part));
            values.pairs[h][j][0] = pairs.x;
            values.pairs[h][j][1] = pairs.y;
          }
        } else {
          const uint4 v = *reinterpret_cast<const uint4*>(table_entry(table, byte, 1, lane_part));
          const uint32 pairs[2][2] = {{v.x, v.y}, {v.z, v.w}};
#pragma unroll
          for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < 2; i++) values.pairs[h][j][i] = pairs[h][i];
        }
        continue;
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        // Each has a bit of half 0 as the sign of byte 1 (the first of the pair), and another in
        // byte 3.
        const uint32 signs[2] = {rotate_right(codes.words[0][j], turns[2 * i]),
                                 rotate_right(codes.words[0][j], turns[2 * i + 1])};
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const uint32 both = codes.rows[h][i].apply(codebook[0]);
          const uint32 first = byte_permute(both, both, 0x1010);
          const uint32 other = byte_permute(both, both, 0x3232);
          const uint32 mask = byte_permute(signs[0], signs[1], selectors[h]);
          values.pairs[h][j][i] = first ^ (mask & (first ^ other));
        }
      }
    }
  }

  __forceinline__ void finish(uint32 (&a)[STEPS][REGISTERS], const HopperValues& values,
                              const HopperCodes& codes) const {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int j = 0; j < NEIGHBOURS; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const RowScale& row = codes.rows[h][i];
          uint32 pair = values.pairs[h][j][i];
          if constexpr (BITS > 5 && !COMPUTES_CODES)
            pair = join_values(pair, values.seconds[h][j][i]);
          if constexpr (COMPUTES_CODES)
            pair = computed(row, code_bytes(codes, h, j), i);
          else if constexpr (SCALES_LAST)
            pair = row.apply(pair);
          a[2 * h + (j >> 1)][2 * (j & 1) + i] = pair;
        }
  }

  // Returns the weights of computed codes in bytes 2 i and 2 i + 1 of a word.
  __forceinline__ uint32 computed(const RowScale& row, uint32 word, int i) const {
    if (IS_SPLIT) word &= (CODEBOOK_SIZE - 1) * 0x01010101u;
    if (FP16) return row.apply(codes_to_values(byte_permute(word, 0u, 0x4140 + 0x0202 * i), ones));
    // 32768, whose mantissa has its lowest byte there: two instructions fewer than codes_to_values.
    float values[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const uint32 place = 0x7404 | (2 * i + e) << 4;
      values[e] = __uint_as_float(byte_permute(word, 0x47000000u, place));
      // Exact for bf16 scales up to 2^112: (32768 + zero point) * scale has 24 bits. Above 1.98 *
      // 2^112 it may overflow.
      if (SCALES_IN_DTYPE)
        values[e] = __fmaf_rn(values[e], row.scale, -((32768.f + row.zero_point) * row.scale));
      else
        values[e] = (values[e] - 32768.f - row.zero_point) * row.scale;
    }
    return from_floats(values[0], values[1]);
  }

  // Adds half of an offset to an address, in assembly so that the compiler does not keep the half
  // in a register (7 bits, tile_m 256: 8 bytes of spills).
  __forceinline__ static const uint8* at_half(const uint8* place, uint32 offset) {
    uint32 address;
    asm("{\n.reg .b32 half;\nshr.b32 half, %1, 1;\nadd.u32 %0, half, %2;\n}"
        : "=r"(address)
        : "r"(offset), "r"(shared_address(place)));
    return static_cast<const uint8*>(__cvta_shared_to_generic(address));
  }

  __forceinline__ static uint32 load(const uint8* address) {
    return *reinterpret_cast<const uint32*>(address);
  }
};
