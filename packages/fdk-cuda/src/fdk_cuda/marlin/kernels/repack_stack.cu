// Repacks a stack of experts from the Triton layout (triton/layout.py) to the Marlin layout.
//
// words  :: [experts, n_tiles, k_tiles, WORDS, half 2, g 8, t 4, (upper, pair) 4, uint32]
// scale  :: [experts, n_tiles, groups, g 8, half 2]     zero_point likewise, if there is one
// packed :: [experts, padded_n / 32, padded_k / 64, BLOCK_BYTES, uint8]
//
// In both layouts lane 4 * g + t holds the runs of eight codes at columns 32 * h + 8 * t of rows g
// and g + 8 of a fragment, so no code moves between lanes. A warp takes the blocks of 32 x 64 that
// share tiles of the Triton layout.
#include "common/pack_words.cuh"

constexpr int WARPS = 4, THREADS = WARPS * LANES;
// Codes of a unit, one in each tensor-core step of a tile, and the unit's words.
constexpr int POSITIONS = BITS == 8 ? 4 : BITS == 4 ? 8 : BITS == 2 || BITS == 6 ? 16 : 32;
constexpr int WORDS = BITS * POSITIONS / 32;
constexpr int TILE_BLOCKS = POSITIONS * 16 / BLOCK_K;
constexpr int TILE_WORDS = WORDS * 256;
constexpr int UNITS = 4;  // of a lane's row in a tile: (upper, pair)

struct Params {
  const uint32* words;
  const Scale* scale;
  const Scale* zero_point;
  uint8* packed;
  int warps;  // that have work: parts of k, n_blocks, experts
  int n_tiles, k_tiles;
  int groups;   // scales of a row
  int repeats;  // times that a scale is stored along a row of the Marlin layout
  int n_blocks, k_blocks;
  // Where the first half of the outputs are gates of the second: octets of rows in a half, which
  // come in turns. So rows g of a fragment are gates of its rows g + 8. Else 0.
  int gate_octets;
};

// Returns the eight rows of the Triton layout that are rows g (r = 0) or g + 8 (r = 1) of a
// fragment, counted in octets; -1 for padding.
__forceinline__ int octet_of(const Params& p, int fragment, int r) {
  if (p.gate_octets > 0) return fragment < p.gate_octets ? r * p.gate_octets + fragment : -1;
  return fragment < p.n_tiles ? 2 * fragment + r : -1;
}

// Returns the code at a position of a unit.
__forceinline__ uint32 code_at(const uint32 (&words)[WORDS][UNITS], int unit, int position) {
  auto word = [&](int i) { return words[i][unit]; };
  if constexpr (WORDS == 1) return word(0) >> BITS * position & MASK;
  const int nibble = position / 8, in_nibble = 4 * (position % 8);
  if constexpr (BITS == 3) {
    if (nibble < WORDS) return word(nibble) >> in_nibble & 7;
    uint32 code = 0;
    for (int i = 0; i < WORDS; i++) code |= (word(i) >> (in_nibble + 3) & 1) << i;
    return code;
  }
  constexpr int NIBBLE_WORDS = POSITIONS / 8;
  const int byte = position % 8 / 2 * 8, odd = position % 2;
  uint32 code = word(nibble) >> in_nibble & 15;
  if constexpr (BITS >= 6)
    code |= (word(NIBBLE_WORDS + position / 16) >> (byte + 2 * (2 * (nibble % 2) + odd)) & 3) << 4;
  if constexpr (BITS != 6) code |= (word(WORDS - 1) >> (byte + 2 * nibble + odd) & 1) << (BITS - 1);
  return code;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    repack_stack(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % LANES, index = blockIdx.x * WARPS + threadIdx.x / LANES;
  if (index >= p.warps) return;
  const int parts = (p.k_blocks + TILE_BLOCKS - 1) / TILE_BLOCKS;
  const int k_tile = index % parts, n_block = index / parts % p.n_blocks;
  const int expert = index / parts / p.n_blocks;
  uint32 words[FRAGMENTS][2][WORDS][UNITS];
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int octet = octet_of(p, FRAGMENTS * n_block + f, r);
      const uint64 tile = static_cast<uint64>(expert * p.n_tiles + octet / 2) * p.k_tiles + k_tile;
      const uint32* const from = p.words + tile * TILE_WORDS + octet % 2 * 128 + lane * UNITS;
#pragma unroll
      for (int i = 0; i < WORDS; i++) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (octet >= 0 && k_tile < p.k_tiles) v = *reinterpret_cast<const uint4*>(from + i * 256);
        words[f][r][i][0] = v.x;
        words[f][r][i][1] = v.y;
        words[f][r][i][2] = v.z;
        words[f][r][i][3] = v.w;
      }
    }
  Scale scales[TILE_BLOCKS][LANE_SCALES];
#pragma unroll
  for (int b = 0; b < TILE_BLOCKS; b++)
#pragma unroll
    for (int i = 0; i < LANE_SCALES; i++) {
      // A block's order: [g, kind, half of the columns, fragment, r].
      const int place = i * LANES + lane, column = place / 4 % PER_ROW;
      const int kind = place / (4 * PER_ROW) % KINDS, g = place / (4 * PER_ROW * KINDS);
      const int octet = octet_of(p, FRAGMENTS * n_block + (place >> 1 & 1), place & 1);
      const int group = ((k_tile * TILE_BLOCKS + b) * PER_ROW + column) / p.repeats;
      const uint64 tile = static_cast<uint64>(expert * p.n_tiles + octet / 2) * p.groups + group;
      scales[b][i] = 0;
      if (octet >= 0 && group < p.groups)
        scales[b][i] = (kind ? p.zero_point : p.scale)[tile * 16 + 2 * g + octet % 2];
    }
#pragma unroll
  for (int b = 0; b < TILE_BLOCKS; b++) {
    const int k_block = k_tile * TILE_BLOCKS + b;
    if (k_block >= p.k_blocks) return;
    uint32 lane_words[LANE_WORDS] = {};
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int q = 0; q < PAIRS; q++) {
            // Code c of a run is of unit c % 4, four codes to a position.
            const int position = 2 * (2 * b + h) + q / 2, unit = 2 * (q % 2);
            put_pair(lane_words, f, h, r, q, code_at(words[f][r], unit, position),
                     code_at(words[f][r], unit + 1, position));
          }
    const uint64 row = static_cast<uint64>(expert) * p.n_blocks + n_block;
    uint8* const block = p.packed + (row * p.k_blocks + k_block) * BLOCK_BYTES;
    store_words(lane_words, block, lane_slot(lane / 4, lane % 4));
#pragma unroll
    for (int i = 0; i < LANE_SCALES; i++)
      reinterpret_cast<Scale*>(block + CODE_BYTES)[i * LANES + lane] = scales[b][i];
  }
}
