// W_hat :: [n, k, dtype] of a weight in the Marlin layout, equal to QuantisedTensor.dequantise.
//
// packed   :: [padded_n / 32, padded_k / 64, BLOCK_BYTES, uint8]
// codebook :: [2^BITS, dtype]
//
// A warp decodes a block at a time. A lane stores eight neighbouring values of a row as 16 bytes,
// and four lanes a run of 64 bytes. There is no table at 1 bit.
//
//   WARPS  in a thread block
#include "common/decode.cuh"

constexpr int THREADS = WARPS * LANES;

struct Params {
  const uint8* packed;
  const uint16* codebook;
  uint16* out;
  int n, k, padded_k;
  int blocks;  // blocks of 32 x 64 weights
  uint32 base[STEPS];
  uint32 nibbles;
};

// 1 bit: expands the bits of a pair to masks. They are moved to the top of two bytes (layout.py:
// _bit_positions), whose signs a permutation replicates.
__forceinline__ uint32 spread_bits(uint32 word, int fragment, int s, int i) {
  if (fragment % 2 == 0)
    return byte_permute(word << (7 - 2 * i), word << (6 - 2 * i), 0xCC88 + 0x1111 * s);
  const int first = 3 + s + 4 * i, turn = (first + 1) % 8, byte = (first - turn + 32) / 8 % 4;
  const uint32 turned = rotate_right(word, turn);
  return byte_permute(turned, turned, 0x8888 + 0x1111 * byte + (byte < 2 ? 0x2200 : -0x2200));
}

__forceinline__ uint32 scaled_pair(uint32 pair, float scale, float zero_point) {
  float low = to_float(pair & 0xFFFFu), high = to_float(pair >> 16);
  if (AFFINE) {
    low -= zero_point;
    high -= zero_point;
  }
  return from_floats(low * scale, high * scale);
}

// A lane's words and scales of a block.
struct Stored {
  uint32 words[LANE_WORDS];
  Scales scales;

  __forceinline__ void load(const uint8* packed, int index, int g, int t) {
    const uint8* const block = packed + static_cast<uint64>(index) * BLOCK_BYTES;
    load_words(words, block, lane_slot(g, t));
    scales.load(block, g);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, IS_SPLIT ? 1 : 0)
    dequantise(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8 table[];
  start_next_kernel();
  const int lane = threadIdx.x % LANES, g = lane / 4, t = lane % 4;
  const int n_blocks = p.padded_k / BLOCK_K;
  const int step = gridDim.x * WARPS;
  int index = blockIdx.x * WARPS + threadIdx.x / LANES;
  // A block is loaded while the previous one is decoded, the first while the table is built.
  Stored next;
  if (index < p.blocks) next.load(p.packed, index, g, t);
  const Codebook codebook(p.codebook, lane);
  DecodeConstants constants;
  if constexpr (BITS > 1) {
    build_table<THREADS>(table, codebook, threadIdx.x);
    constants.lane_part = table_lane_part(lane);
    constants.nibbles = p.nibbles;
    constants.values[0] = codebook.words[0];
    constants.values[1] = codebook.words[1];
    __syncthreads();
  }
  wait_previous_kernel();  // weights and codebook are constant, the output is not

  const bool whole_pieces = p.k % 8 == 0;
  for (; index < p.blocks; index += step) {
    const Stored now = next;
    if (index + step < p.blocks) next.load(p.packed, index + step, g, t);
    const int first_row = index / n_blocks * BLOCK_N + g;
    const int first_column = index % n_blocks * BLOCK_K + 8 * t;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
      for (int pair = 0; pair < 2; pair++) {  // of steps: eight columns
        uint32 a[2][REGISTERS];
        if constexpr (BITS > 1) {
#pragma unroll
          for (int s = 0; s < 2; s++) decode(a[s], now.words, f, 2 * pair + s, table, constants);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {  // rows g and g + 8
          const int group = PER_ROW == 2 ? pair : 0;
          const float scale = now.scales.get(0, group, f, half);
          const float zero_point = now.scales.get(KINDS - 1, group, f, half);
          uint32 out[4];
          if constexpr (BITS == 1) {
            const uint32 values = scaled_pair(codebook.words[0], scale, zero_point);
            const uint32 low = byte_permute(values, values, 0x1010);
            const uint32 differs = low ^ byte_permute(values, values, 0x3232);
#pragma unroll
            for (int i = 0; i < 4; i++) {
              const int s = 2 * pair + i / 2, reg = 2 * (i % 2) + half;
              out[i] = low ^ (spread_bits(now.words[f], f, s, reg) & differs);
            }
          } else {
#pragma unroll
            for (int i = 0; i < 4; i++)
              out[i] = scaled_pair(a[i / 2][2 * (i % 2) + half], scale, zero_point);
          }
          const int row = first_row + 16 * f + 8 * half, column = first_column + 32 * pair;
          uint16* target = p.out + static_cast<uint64>(row) * p.k + column;
          if (row < p.n && whole_pieces && column < p.k) {
            *reinterpret_cast<uint4*>(target) = make_uint4(out[0], out[1], out[2], out[3]);
          } else if (row < p.n) {
#pragma unroll
            for (int i = 0; i < 8; i++)
              if (column + i < p.k) target[i] = out[i / 2] >> (16 * (i % 2));
          }
        }
      }
  }
}
