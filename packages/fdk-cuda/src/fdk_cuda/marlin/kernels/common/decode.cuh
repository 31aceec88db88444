// Decodes a lane's words to registers of operand A: pairs of codebook values, exact.
//
// Most codes go through a table in shared memory. It has an entry for every value of a byte, 256
// bytes apart, with a copy for each lane that may read at once. So an address is one byte
// permutation (byte << 8 | lane part), and lanes have no bank conflicts.
//
//   bits    entry
//   1       8 values, 16 bytes
//   2       4 values, 8 bytes
//   3, 4    a pair, 4 bytes
//   5       a pair; it has two bits outside the byte, so four entries per byte, 16 copies each
//   6 to 8  one value; two lookups make a pair. Other bits of the byte are ignored
//
// Half of the codes of 1 and 2 bits are decoded by arithmetic instead, because a table alone keeps
// shared memory busier than global memory (H200, m = 1, 8192 x 8192, 1 bit: table 9.4 us,
// arithmetic 8.9, both 8.3).
#pragma once
#include "common/fragments.cuh"

constexpr int TABLE_BYTES = 256 * 256;
// Entries per byte.
constexpr int BYTE_ENTRIES = BITS == 5 ? 4 : 1;
constexpr int ENTRY_BYTES = BITS == 1 ? 16 : BITS == 2 ? 8 : 4;
constexpr int CODEBOOK_SIZE = 1 << BITS;
// 1 bit: odd fragments are computed. Operand A then holds BASE[s] or BASE[s] + 1 instead of
// codebook values: the bit is placed where it adds exactly 1.0 to a power of two. 2 bits: steps 2
// and 3 are computed.
constexpr bool COMPUTES_FRAGMENT = BITS == 1;

// Constants that must stay in registers. As kernel parameters they are opaque to the compiler; an
// immediate in LOP3 would cost a move each time (H200, 1 bit: 12.3 us -> 9.75).
struct DecodeConstants {
  uint32 lane_part;    // the lane's part of a table address
  uint32 base[STEPS];  // 1 bit: 16, 8, 4, 2 as pairs
  uint32 values[2];    // 2 bits: the codebook
  uint32 nibbles;      // 2 bits: 0x10101010
};

// The codebook in a warp: up to 2 bits in two words of every lane, above that a value per lane,
// with 6 or more bits several.
constexpr int LANE_VALUES = CODEBOOK_SIZE > LANES ? CODEBOOK_SIZE / LANES : 1;
struct Codebook {
  uint32 words[LANE_VALUES > 2 ? LANE_VALUES : 2];

  __forceinline__ Codebook(const uint16* codebook, int lane) {
    if (BITS <= 2) {
      words[0] = reinterpret_cast<const uint32*>(codebook)[0];
      words[1] = BITS == 2 ? reinterpret_cast<const uint32*>(codebook)[1] : 0;
    } else {
#pragma unroll
      for (int i = 0; i < LANE_VALUES; i++) words[i] = codebook[(32 * i + lane) % CODEBOOK_SIZE];
    }
  }
};

// Returns a pair of codebook values for BITS <= 5, the lower code in the lower half. Called by the
// whole warp.
__forceinline__ uint32 codebook_pair(const Codebook& codebook, uint32 codes) {
  const uint32 low = codes % CODEBOOK_SIZE, high = codes >> BITS;
  if (BITS <= 2) {
    const uint32 twice = 2 * low | low << 5 | high << 9 | high << 13;
    return byte_permute(codebook.words[0], codebook.words[1], twice + 0x1010);
  }
  return __shfl_sync(~0u, codebook.words[0], low) |
         __shfl_sync(~0u, codebook.words[0], high % CODEBOOK_SIZE) << 16;
}

// Builds the table for 1 and 2 bits. ENTRY_THREADS fill an entry, then three more with the same
// lower nibble, which shares most of the work (1 bit: 161 instructions, not 416). With SWAPPED,
// half of the copies of a 1-bit entry are for bytes whose second and third pair are exchanged. With
// eight ENTRY_THREADS a 2-bit entry has 16 copies.
template <int THREADS, int ENTRY_THREADS, bool SWAPPED>
__forceinline__ void build_byte_table(uint8* table, const Codebook& codebook, int thread) {
  constexpr int HIGH_PARTS = 4;
  constexpr int UNITS = 16 * HIGH_PARTS, STEP = THREADS / ENTRY_THREADS;
#pragma unroll
  for (int first = 0; first < UNITS; first += STEP) {
    const int unit = first + thread / ENTRY_THREADS;
    if (first + STEP > UNITS && unit >= UNITS) break;
    const int low = unit % 16, part = unit / 16;
    uint8* const entries = table + (part * 64 + low) * 256 + thread % ENTRY_THREADS * 16;
#pragma unroll
    for (int i = 0; i < HIGH_PARTS; i++) {
      uint4 entry;
      if (BITS == 1) {
        entry = make_uint4(codebook_pair(codebook, low & 3), codebook_pair(codebook, low >> 2),
                           codebook_pair(codebook, i), codebook_pair(codebook, part));
        if (SWAPPED && thread % ENTRY_THREADS >= ENTRY_THREADS / 2)
          entry = make_uint4(entry.x, entry.z, entry.y, entry.w);
      } else {
        entry.x = entry.z = codebook_pair(codebook, low);
        entry.y = entry.w = codebook_pair(codebook, HIGH_PARTS * part + i);
      }
      *reinterpret_cast<uint4*>(entries + i * 16 * 256) = entry;
    }
  }
}

template <int THREADS, int ENTRY_THREADS = 16, bool SWAPPED = false>
__forceinline__ void build_table(uint8* table, const Codebook& codebook, int thread) {
  if constexpr (BITS <= 2) {
    build_byte_table<THREADS, ENTRY_THREADS, SWAPPED>(table, codebook, thread);
    return;
  }
  constexpr int PIECES = BITS == 5 ? 16 : 8;  // pieces of 16 bytes in a table entry
  static_assert(THREADS % LANES == 0 && 256 * PIECES % LANES == 0, "warps stay whole");
#pragma unroll
  for (int first = 0; first < 256 * PIECES; first += THREADS) {
    const int i = first + thread;
    if (first + THREADS > 256 * PIECES && i >= 256 * PIECES) break;
    const int byte = i / PIECES;
    uint32 pair = 0;
    if (BITS == 5) {
      const int upper = i % PIECES / (PIECES / BYTE_ENTRIES);
      const int low = (byte & 15) | (upper & 1) << 4, high = byte >> 4 | (upper >> 1) << 4;
      pair = codebook_pair(codebook, low | high << BITS);
    } else if (BITS > 5) {
      // A warp's four entries are all in one of the words.
#pragma unroll
      for (int word = 0; word < LANE_VALUES; word++) {
        const uint32 value = __shfl_sync(~0u, codebook.words[word], byte % LANES);
        if (byte / LANES % LANE_VALUES == word) pair = value;
      }
    } else {
      pair = codebook_pair(codebook, byte & (CODEBOOK_SIZE * CODEBOOK_SIZE - 1));
    }
    *reinterpret_cast<uint4*>(table + byte * 256 + i % PIECES * 16) =
        make_uint4(pair, pair, pair, pair);
  }
}

__forceinline__ uint32 table_lane_part(int lane) {
  // 5 bits: in both of the lower two bytes, see pair_part.
  return ENTRY_BYTES * (lane % (BITS == 1 || BITS == 5 ? 16 : 32)) * (BITS == 5 ? 0x101 : 1);
}

__forceinline__ const uint8* table_entry(const uint8* table, uint32 word, int byte,
                                         uint32 lane_part) {
#if ABSOLUTE_TABLE
  // Bytes of the address in shared memory: the lane part, the byte of the word, then the second and
  // third byte of the lane part, which has those of the table's address: its lower two are zero.
  return static_cast<const uint8*>(
      __cvta_shared_to_generic(byte_permute(word, lane_part, 0x6504 | byte << 4)));
#endif
  // Bytes of the offset, lowest first: the lane part, the byte of the word, two zeros.
  return table + byte_permute(word, lane_part, 0x5504 | byte << 4);
}

// 3 bits: collects the two spare bits of each byte of three words into a word of pairs.
__forceinline__ uint32 left_over(uint32 first, uint32 second, uint32 third) {
  return (first >> 6 & 0x03030303u) | (second >> 4 & 0x0C0C0C0Cu) | (third >> 2 & 0x30303030u);
}

// 6 and 7 bits: assembles four codes of a unit in the second half of the columns, a byte each, from
// the spare bits of the unit's word, the word of two units and that of four, each rotated into
// place.
constexpr uint32 LEFT_MASK = ((0x100 >> BITS) - 1) * 0x01010101u, LOWER_MASK = 0x1F1F1F1Fu;
__forceinline__ uint32 join(uint32 left, uint32 of_two, uint32 of_four, uint32 left_mask,
                            uint32 lower_mask) {
  const uint32 codes = (left & left_mask) | (of_two & ~left_mask);
  return BITS == 6 ? codes : (codes & lower_mask) | (of_four & ~lower_mask);
}
__forceinline__ uint32 join(uint32 left, uint32 of_two, uint32 of_four) {
  return join(left, of_two, of_four, LEFT_MASK, LOWER_MASK);
}
// Rotations to the right for that.
__forceinline__ constexpr int turn_of_two(int unit) { return 4 * (unit & 1) + BITS - 8; }
__forceinline__ constexpr int turn_of_four(int unit) { return 2 * unit - 5; }

// 6 or more bits: returns four codes of a unit, those of half h.
__forceinline__ uint32 code_bytes(const uint32 (&words)[LANE_WORDS], int fragment, int unit,
                                  int h) {
  if constexpr (BITS == 8) {
    return words[8 * fragment + 4 * h + unit];
  } else {
    const uint32 own = words[4 * fragment + unit];
    if (h == 0) return own;
    const uint32 of_two = rotate_right(words[word_of_two(fragment, unit)], turn_of_two(unit));
    const uint32 of_four = words[word_of_four(fragment) % LANE_WORDS];  // unused at 6 bits
    return join(own >> BITS, of_two, rotate_right(of_four, turn_of_four(unit)));
  }
}

// 5 bits: the byte of an address that holds the last bits of a pair, for both rows of half h, in
// the lower two bytes; `turn` rotates the word of four units. The upper two bytes are zero.
__forceinline__ uint32 pair_part(uint32 of_four, int turn, uint32 lane_part) {
  return (rotate_right(of_four, turn) & 0xC0C0u) | lane_part;
}
__forceinline__ constexpr int turn_of_pairs(int unit, int h) { return 2 * unit - 6 + 16 * h; }
// Returns the selector that joins it with a word's byte to an address, for half h and row i.
__forceinline__ constexpr uint32 pair_selector(int h, int i) {
  return 0x7604 + i + ((2 * h + i) << 4);
}

// Joins two values that were looked up one by one. Not by a byte permutation, the busiest
// instruction here: multiplication uses another pipe.
__forceinline__ uint32 join_values(uint32 low, uint32 high) {
  uint32 out;
  asm("mad.lo.u32 %0, %1, 65536, %2;" : "=r"(out) : "r"(high), "r"(low));
  return out;
}

// Decodes the four registers of step s of a fragment (layout.py: _bit_positions).
__forceinline__ void decode(uint32 (&a)[REGISTERS], const uint32 (&lane_words)[LANE_WORDS],
                            int fragment, int s, const uint8* table, const DecodeConstants& c) {
  const uint32* const words = lane_words + fragment * BITS;
  if constexpr (BITS == 5) {
#pragma unroll
    for (int i = 0; i < REGISTERS; i++) {
      const int unit = 2 * (s & 1) + (i >> 1), h = s >> 1;
      const uint32 of_four = lane_words[word_of_four(fragment)];
      const uint32 part = pair_part(of_four, turn_of_pairs(unit, h), c.lane_part);
      const uint32 word = lane_words[4 * fragment + unit];
      a[i] = *reinterpret_cast<const uint32*>(table +
                                              byte_permute(word, part, pair_selector(h, i & 1)));
    }
  } else if constexpr (BITS > 5) {
#pragma unroll
    for (int i = 0; i < REGISTERS; i++) {
      const int unit = 2 * (s & 1) + (i >> 1), byte = 2 * (i & 1);
      const uint32 word = code_bytes(lane_words, fragment, unit, s >> 1);
      const uint32 low =
          *reinterpret_cast<const uint32*>(table_entry(table, word, byte, c.lane_part));
      const uint32 high =
          *reinterpret_cast<const uint32*>(table_entry(table, word, byte + 1, c.lane_part));
      a[i] = join_values(low, high);
    }
  } else if constexpr (BITS == 4) {
#pragma unroll
    for (int i = 0; i < REGISTERS; i++) {
      const int unit = 2 * (s & 1) + (i >> 1), byte = 2 * (s >> 1) + (i & 1);
      a[i] = *reinterpret_cast<const uint32*>(table_entry(table, words[unit], byte, c.lane_part));
    }
  } else if constexpr (BITS == 3) {
    const uint32 fourth = left_over(words[0], words[1], words[2]);
#pragma unroll
    for (int i = 0; i < REGISTERS; i++) {
      const int unit = 2 * (s & 1) + (i >> 1), pair = 2 * (s >> 1) + (i & 1);
      const uint32 word = pair < 3 ? words[pair % 3] : fourth;
      a[i] = *reinterpret_cast<const uint32*>(table_entry(table, word, unit, c.lane_part));
    }
  } else if constexpr (BITS == 2) {
    const uint32 word = words[s >> 1];
    if (s < 2) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint2 v =
            *reinterpret_cast<const uint2*>(table_entry(table, word, 2 * s + half, c.lane_part));
        a[2 * half] = v.x;
        a[2 * half + 1] = v.y;
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        // Twice a code in each byte; 17 times that plus 0x10 selects bytes 2 c and 2 c + 1.
        const uint32 twice = rotate_right(word, 2 * (2 * (s & 1) + half)) & 0x06060606u;
        const uint32 selector = twice * 0x11u + c.nibbles;
        a[2 * half] = byte_permute(c.values[0], c.values[1], selector);
        a[2 * half + 1] = byte_permute(c.values[0], c.values[1], selector >> 16);
      }
    }
  } else if (fragment % 2 == 0) {
    const uint4 v = *reinterpret_cast<const uint4*>(table_entry(table, words[0], s, c.lane_part));
    a[0] = v.x;
    a[1] = v.y;
    a[2] = v.z;
    a[3] = v.w;
  } else {
    // fp16 has three more mantissa bits, so its bit is three places higher.
    constexpr int PLACES = FP16 ? 3 : 0;
#pragma unroll
    for (int i = 0; i < REGISTERS; i++)
      a[i] = rotate_right(words[0], 4 * i - PLACES) & 0x00080008u << (s + PLACES) | c.base[s];
  }
}
