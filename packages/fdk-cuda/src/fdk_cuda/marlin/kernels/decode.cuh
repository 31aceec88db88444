// From codes to the registers of operand A: pairs of codebook values, exact.
//
// Most codes go through a table in shared memory. It has an entry for every byte of a word, 256
// bytes apart, and a copy of the entry for each lane that may read at once, so that
//   - the address is one byte permutation: byte << 8 | lane's part;
//   - a lane owns its banks, and no two lanes of a warp collide.
// An entry holds the values of the codes in a byte: a pair (4 bytes) at 3 and 4 bits, four (8) at 2
// bits, eight (16) at 1 bit. At 8 bits it is one value, and two entries make a pair. Half of the
// codes of 1 and 2 bits are decoded by arithmetic instead, for a table alone would keep the
// shared-memory pipe busier than the memory (H200, m = 1, 8192 x 8192, 1 bit: 9.4 us with the table
// alone, 8.9 with arithmetic alone, 8.3 with both).
#pragma once
#include "common.cuh"

constexpr int TABLE_BYTES = 256 * 256;
constexpr int ENTRY_BYTES = BITS == 1 ? 16 : BITS == 2 ? 8 : 4;
constexpr int CODEBOOK_SIZE = 1 << BITS;
// 1 bit: odd fragments are computed. Their A operand is BASE[s] or BASE[s] + 1, not the codebook's
// values: the bit goes where it adds exactly 1.0 to a power of two. 2 bits: steps 2 and 3.
constexpr bool COMPUTES_FRAGMENT = BITS == 1;

// Constants that the compiler must keep in registers (kernel parameters it cannot see through: an
// immediate in LOP3 costs a move each time; H200, 1 bit: 12.3 us -> 9.75 us).
struct DecodeConstants {
  uint32 lane_part;    // of a table address
  uint32 base[STEPS];  // 1 bit: 16, 8, 4, 2 as pairs
  uint32 values[2];    // 2 bits: the codebook
  uint32 nibbles;      // 2 bits: 0x10101010
};

// The codebook as a warp holds it: up to 2 bits in two words, above a value in each lane (at 8 bits
// eight values).
struct Codebook {
  uint32 words[BITS == 8 ? 8 : 2];

  __device__ __forceinline__ Codebook(const uint16* codebook, int lane) {
    if (BITS <= 2) {
      words[0] = reinterpret_cast<const uint32*>(codebook)[0];
      words[1] = BITS == 2 ? reinterpret_cast<const uint32*>(codebook)[1] : 0;
    } else {
#pragma unroll
      for (int i = 0; i < (BITS == 8 ? 8 : 1); i++)
        words[i] = codebook[(32 * i + lane) % CODEBOOK_SIZE];
    }
  }
};

// A pair of codebook values, for BITS <= 4; the lower code in the lower bits. The whole warp calls.
__device__ __forceinline__ uint32 codebook_pair(const Codebook& codebook, uint32 codes) {
  const uint32 low = codes % CODEBOOK_SIZE, high = codes >> BITS;
  if (BITS <= 2) {
    const uint32 twice = 2 * low | low << 5 | high << 9 | high << 13;
    return byte_permute(codebook.words[0], codebook.words[1], twice + 0x1010);
  }
  return __shfl_sync(~0u, codebook.words[0], low) |
         __shfl_sync(~0u, codebook.words[0], high % CODEBOOK_SIZE) << 16;
}

// 1 and 2 bits: ENTRY_THREADS fill an entry, then three more with the same lower nibble, so that
// most of an entry is known from the one before (1 bit: a prologue of 161 instructions, not 416).
// With TURNED, half of the copies of an entry of 1 bit are for bytes that hold their second and
// third pair the other way round. With eight ENTRY_THREADS an entry of 2 bits has 16 copies.
template <int THREADS, int ENTRY_THREADS, bool TURNED>
__device__ __forceinline__ void build_byte_table(uint8* table, const Codebook& codebook,
                                                 int thread) {
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
        if (TURNED && thread % ENTRY_THREADS >= ENTRY_THREADS / 2)
          entry = make_uint4(entry.x, entry.z, entry.y, entry.w);
      } else {
        entry.x = entry.z = codebook_pair(codebook, low);
        entry.y = entry.w = codebook_pair(codebook, HIGH_PARTS * part + i);
      }
      *reinterpret_cast<uint4*>(entries + i * 16 * 256) = entry;
    }
  }
}

template <int THREADS, int ENTRY_THREADS = 16, bool TURNED = false>
__device__ __forceinline__ void build_table(uint8* table, const Codebook& codebook, int thread) {
  if constexpr (BITS <= 2) {
    build_byte_table<THREADS, ENTRY_THREADS, TURNED>(table, codebook, thread);
    return;
  }
  constexpr int PIECES = 128 / 16;  // of an entry
  static_assert(THREADS % LANES == 0 && 256 * PIECES % LANES == 0, "warps stay whole");
#pragma unroll
  for (int first = 0; first < 256 * PIECES; first += THREADS) {
    const int i = first + thread;
    if (first + THREADS > 256 * PIECES && i >= 256 * PIECES) break;
    const int byte = i / PIECES;
    uint32 pair = 0;
    if (BITS == 8) {
      // A warp's four entries lie in one of the eight words.
#pragma unroll
      for (int word = 0; word < (BITS == 8 ? 8 : 0); word++) {
        const uint32 value = __shfl_sync(~0u, codebook.words[word], byte % 32);
        if (byte / 32 == word) pair = value * 0x10001u;
      }
    } else {
      pair = codebook_pair(codebook, byte & (CODEBOOK_SIZE * CODEBOOK_SIZE - 1));
    }
    *reinterpret_cast<uint4*>(table + byte * 256 + i % PIECES * 16) =
        make_uint4(pair, pair, pair, pair);
  }
}

__device__ __forceinline__ uint32 table_lane_part(int lane) {
  return ENTRY_BYTES * (lane % (BITS == 1 ? 16 : 32));
}

__device__ __forceinline__ const uint8* table_entry(const uint8* table, uint32 word, int byte,
                                                    uint32 lane_part) {
  // Bytes of the result, lowest first: the lane's part, the byte of the word, two of zeros.
  return table + byte_permute(word, lane_part, 0x5504 | byte << 4);
}

// 3 bits: the two spare bits of each byte of three words, as a word of pairs.
__device__ __forceinline__ uint32 left_over(uint32 first, uint32 second, uint32 third) {
  return (first >> 6 & 0x03030303u) | (second >> 4 & 0x0C0C0C0Cu) | (third >> 2 & 0x30303030u);
}

// The four registers of step s of a fragment, from its words (layout.py: _bit_positions).
__device__ __forceinline__ void decode(uint32 (&a)[REGISTERS], const uint32* words, int fragment,
                                       int s, const uint8* table, const DecodeConstants& c) {
  if constexpr (BITS == 8) {
#pragma unroll
    for (int i = 0; i < REGISTERS; i++) {
      const uint32 word = words[2 * s + (i >> 1)];
      const int byte = 2 * (i & 1);
      const uint32 low =
          *reinterpret_cast<const uint32*>(table_entry(table, word, byte, c.lane_part));
      const uint32 high =
          *reinterpret_cast<const uint32*>(table_entry(table, word, byte + 1, c.lane_part));
      a[i] = byte_permute(low, high, 0x5410);
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
        // Twice a code in each byte; 17 times it plus 0x10 selects bytes 2 c and 2 c + 1.
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
    // fp16 has three more bits of mantissa, so its bit lies three places higher.
    constexpr int PLACES = FP16 ? 3 : 0;
#pragma unroll
    for (int i = 0; i < REGISTERS; i++)
      a[i] = rotate_right(words[0], 4 * i - PLACES) & 0x00080008u << (s + PLACES) | c.base[s];
  }
}
