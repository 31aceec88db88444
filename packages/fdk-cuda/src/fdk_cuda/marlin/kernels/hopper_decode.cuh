// From a block in shared memory to operand A of wgmma: W_hat itself, rounded as dequantise.cu
// rounds it, for the products of a group are not summed apart here.
//
// A warp takes a fragment of 16 rows. wgmma wants of lane 4 * g + t columns 8 * j + 2 * t + e of
// half h: register 2 * (j & 1) + i of step 2 * h + (j >> 1), where j is a chunk of eight columns
// and i a row of g, g + 8. In the layout that is unit t of the neighbour j among four lanes, so a
// lane reads its unit of each neighbour (layout.py).
//
// 3, 4 and 8 bits go through the table of decode.cuh, and are scaled then. 1 and 2 bits need none:
// a row has two or four values, which are scaled first, and picked by arithmetic.
#pragma once
#include "decode.cuh"

constexpr int NEIGHBOURS = 4;
constexpr bool HAS_TABLE = BITS > 2;
// A product of two values of the dtype, rounded once, is what float32 gives. The difference of a
// code and an integer zero point is exact in either dtype.
//   WHOLE_ZERO_POINT  1 where zero points are integers from 0 to 255
constexpr bool SCALES_IN_DTYPE = (!AFFINE || WHOLE_ZERO_POINT) && SCALE_TYPE == FP16;

__device__ __forceinline__ uint32 multiply_pair(uint32 a, uint32 b) {
  uint32 out;
  if (FP16)
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  else
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

__device__ __forceinline__ uint32 subtract_pair(uint32 a, uint32 b) {
  uint32 out;
  if (FP16)
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  else
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// What turns codes' values into weights, for one row of half a block.
struct RowScale {
  uint32 scale_pair, zero_point_pair;  // where SCALES_IN_DTYPE
  float scale, zero_point;

  __device__ __forceinline__ uint32 apply(uint32 values) const {
    if (SCALES_IN_DTYPE) {
      if (AFFINE) values = subtract_pair(values, zero_point_pair);
      return multiply_pair(values, scale_pair);
    }
    float low = to_float(values & 0xFFFFu), high = to_float(values >> 16);
    if (AFFINE) {
      low -= zero_point;
      high -= zero_point;
    }
    return from_floats(low * scale, high * scale);
  }
};

struct HopperDecoder {
  const uint8* table;
  uint32 lane_part;
  uint32 codebook[2];          // 1 and 2 bits
  uint32 offsets[NEIGHBOURS];  // of a unit in a block
  uint32 rests[NEIGHBOURS];    // 3 bits: of its second and third word
  uint32 turn;                 // 1 and 2 bits: how far a unit is rotated
  uint32 selector;             // 2 and 3 bits: a unit's byte of two words
  uint32 places[2][2];         // 1 bit: of half h and row i in a rotated word
  uint32 swapped;              // 1 bit: bits to exchange with those 15 places higher
  uint32 scale_offset;

  __device__ __forceinline__ HopperDecoder(const uint8* table_, const Codebook& book, int warp,
                                           int lane)
      : table(table_), lane_part(table_lane_part(lane)) {
    const int g = lane / 4, t = lane % 4, f = warp % FRAGMENTS;
    codebook[0] = book.words[0];
    codebook[1] = book.words[1];
#pragma unroll
    for (int j = 0; j < NEIGHBOURS; j++) {
      const int slot = lane_slot(g, j);
      if (BITS == 8) offsets[j] = f * 1024 + slot * 16 + t * 4;
      if (BITS == 4) offsets[j] = f * 512 + slot * 16 + t * 4;
      if (BITS == 3) offsets[j] = slot * 16 + f * 12;
      if (BITS == 2) offsets[j] = slot * 16 + f * 8;
      if (BITS == 1) offsets[j] = slot * 8 + f * 4;
      rests[j] = f ? 512 + slot * 8 : slot * 16 + 4;
    }
    turn = BITS == 2 ? 2 * t : f ? (t >> 1) + 8 * (t & 1) : 8 * (t >> 1) + 4 * (t & 1);
    selector = t | (t + 4) << 4;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int i = 0; i < 2; i++) places[h][i] = f ? 3 + 2 * h + 4 * i : h + 2 * i;
    swapped = f ? 0 : 0xA;
    scale_offset = CODE_BYTES + g * LANE_SCALE_BYTES + f * 2 * SCALE_BYTES;
  }

  // Of row g (0) or g + 8 (1), in half h of the block.
  __device__ __forceinline__ void load_scales(RowScale (&rows)[2], const uint8* block,
                                              int h) const {
    constexpr int KIND_BYTES = PER_ROW * FRAGMENTS * 2 * SCALE_BYTES;
    const uint8* own = block + scale_offset + (PER_ROW == 2 ? h * FRAGMENTS * 2 * SCALE_BYTES : 0);
    if constexpr (SCALE_TYPE == 2) {
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
  }

  __device__ __forceinline__ static float stored_to_float(uint32 bits) {
    return SCALE_TYPE == 1 ? fp16_to_float(bits & 0xFFFFu) : bf16_to_float(bits & 0xFFFFu);
  }

  __device__ __forceinline__ uint32 look_up(uint32 word, int byte) const {
    return *reinterpret_cast<const uint32*>(table_entry(table, word, byte, lane_part));
  }

  // Byte t of each neighbour's word, in the order of the neighbours.
  __device__ __forceinline__ uint32 gather(const uint32 (&words)[NEIGHBOURS]) const {
    return byte_permute(byte_permute(words[0], words[1], selector),
                        byte_permute(words[2], words[3], selector), 0x5410);
  }

  // The fragment's four steps of a block.
  __device__ __forceinline__ void decode(uint32 (&a)[STEPS][REGISTERS], const uint8* block) const {
    RowScale rows[2][2];  // half, row
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (h < PER_ROW) load_scales(rows[h], block, h);
      if (h >= PER_ROW) rows[h][0] = rows[0][0], rows[h][1] = rows[0][1];
    }
    if constexpr (BITS == 8) {
#pragma unroll
      for (int j = 0; j < NEIGHBOURS; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const uint32 word = load(block + offsets[j] + 512 * h);
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const uint32 low = look_up(word, 2 * i), high = look_up(word, 2 * i + 1);
            at(a, h, j, i) = rows[h][i].apply(byte_permute(low, high, 0x5410));
          }
        }
    } else if constexpr (BITS == 4) {
#pragma unroll
      for (int j = 0; j < NEIGHBOURS; j++) {
        const uint32 word = load(block + offsets[j]);
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int i = 0; i < 2; i++) at(a, h, j, i) = rows[h][i].apply(look_up(word, 2 * h + i));
      }
    } else if constexpr (BITS == 3) {
      uint32 words[3][NEIGHBOURS], pairs[4];
#pragma unroll
      for (int j = 0; j < NEIGHBOURS; j++) {
        words[0][j] = load(block + offsets[j]);
        words[1][j] = load(block + rests[j]);
        words[2][j] = load(block + rests[j] + 4);
      }
#pragma unroll
      for (int word = 0; word < 3; word++) pairs[word] = gather(words[word]);
      pairs[3] = left_over(pairs[0], pairs[1], pairs[2]);
#pragma unroll
      for (int j = 0; j < NEIGHBOURS; j++)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int i = 0; i < 2; i++)
            at(a, h, j, i) = rows[h][i].apply(look_up(pairs[2 * h + i], j));
    } else if constexpr (BITS == 2) {
      uint32 values[2][2][2];  // half, row: the codebook, scaled
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          values[h][i][0] = rows[h][i].apply(codebook[0]);
          values[h][i][1] = rows[h][i].apply(codebook[1]);
        }
      uint32 firsts[NEIGHBOURS];
#pragma unroll
      for (int j = 0; j < NEIGHBOURS; j++) {
        const uint2 unit = *reinterpret_cast<const uint2*>(block + offsets[j]);
        firsts[j] = unit.x;
        // Twice a code in each byte; 17 times it plus 0x10 selects bytes 2 c and 2 c + 1.
        const uint32 twice = rotate_right(unit.y, turn) & 0x06060606u;
        const uint32 selectors = twice * 0x11u + 0x10101010u;
        at(a, 1, j, 0) = byte_permute(values[1][0][0], values[1][0][1], selectors);
        at(a, 1, j, 1) = byte_permute(values[1][1][0], values[1][1][1], selectors >> 16);
      }
      // A byte for each neighbour: two codes of row g, two of row g + 8.
      const uint32 bytes = gather(firsts);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint32 even = (i ? bytes >> 3 : bytes << 1) & 0x06060606u;
        const uint32 odd = bytes >> (4 * i + 1) & 0x06060606u;
#pragma unroll
        for (int j = 0; j < NEIGHBOURS; j += 2) {
          const uint32 twice = byte_permute(even, odd, j ? 0x7362 : 0x5140);
          const uint32 selectors = twice * 0x11u + 0x10101010u;
          at(a, 0, j, i) = byte_permute(values[0][i][0], values[0][i][1], selectors);
          at(a, 0, j + 1, i) = byte_permute(values[0][i][0], values[0][i][1], selectors >> 16);
        }
      }
    } else {
      // bit * (c1 - c0) + c0 in each half, on the bits of the scaled values as integers.
      uint32 base[2][2], difference[2][2];
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const uint32 values = rows[h][i].apply(codebook[0]);
          base[h][i] = byte_permute(values, values, 0x1010);
          difference[h][i] = (values >> 16) - (values & 0xFFFFu);
        }
#pragma unroll
      for (int j = 0; j < NEIGHBOURS; j++) {
        uint32 word = rotate_right(load(block + offsets[j]), turn);
        const uint32 exchanged = (word >> 15 ^ word) & swapped;
        word ^= exchanged ^ exchanged << 15;
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int i = 0; i < 2; i++)
            at(a, h, j, i) = (word >> places[h][i] & 0x00010001u) * difference[h][i] + base[h][i];
      }
    }
  }

  __device__ __forceinline__ static uint32 load(const uint8* address) {
    return *reinterpret_cast<const uint32*>(address);
  }

  __device__ __forceinline__ static uint32& at(uint32 (&a)[STEPS][REGISTERS], int h, int j, int i) {
    return a[2 * h + (j >> 1)][2 * (j & 1) + i];
  }
};
