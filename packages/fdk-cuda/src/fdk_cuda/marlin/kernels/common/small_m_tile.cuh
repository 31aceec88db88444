// The share of a warp in the kernels for few rows of x: its tile, stages and partial sums.
//
// Macros, in addition to those of fragments.cuh:
//   TILE_FRAGMENTS  2, 4 or 8: fragments of 16 outputs per warp
//   K_BLOCKS        blocks of 64 inputs in a stage
//   WARPS           in a thread block
#pragma once
#include "common/fragments.cuh"
#include "common/pipeline.cuh"

constexpr int STAGES = 2;  // 3 are slower: 8192 x 8192, m = 1: 11.3 us, 10.5 with 2
constexpr int GROUP_N = 16 * TILE_FRAGMENTS;  // outputs of a warp
constexpr int TILE_BLOCKS = TILE_FRAGMENTS / FRAGMENTS;
constexpr int STAGE_BLOCKS = TILE_BLOCKS * K_BLOCKS;
constexpr int STAGE_K = K_BLOCKS * BLOCK_K;
constexpr int STAGE_BYTES = STAGE_BLOCKS * BLOCK_BYTES;
constexpr int THREADS = WARPS * LANES;
// Floats between rows of x in partial sums: avoids bank conflicts.
constexpr int SUM_STRIDE = GROUP_N + 4;
static_assert(TILE_FRAGMENTS == 2 || TILE_FRAGMENTS == 4 || TILE_FRAGMENTS == 8);

using WarpPipeline = Pipeline<STAGES, STAGE_BYTES>;

template <int VALUE>
struct Constant {
  static constexpr int value = VALUE;
};
