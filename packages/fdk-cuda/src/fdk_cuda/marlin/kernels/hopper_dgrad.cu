// dx = dy @ W_hat for many rows of dy, by Hopper's wgmma, from the same packed bytes as the
// forward.
//
// dy       :: [m, n, dtype]                     by tensor copies: any m, any n
// packed   :: [padded_n / 32, padded_k / 64, BLOCK_BYTES, uint8]
// codebook :: [2^BITS, dtype]
// dx       :: [m, k, dtype]
// sums     :: [tiles, splits, TILE_M, TILE_N, float32]   for split_k_reduce.cu
//
// hopper_gemm.cu with the weight transposed: TILE_N counts columns of the weight, the outputs of
// this product, 64 for each consumer; a step sums over 64 of its rows. Both share
// hopper_mainloop.cuh, tile_scheduler.cuh and cluster_reduce.cuh; hopper_dgrad_decode.cuh decodes.
//
// Macros, in addition to those of fragments.cuh and hopper_scales.cuh:
//   TILE_M   rows of dy in a tile, a multiple of 16 up to 256
//   STAGES   of the pipeline
//   CLUSTER  thread blocks of a cluster: 1 or 2

// The only tile it is compiled for: hopper_dgrad_program asserts it.
constexpr int CONSUMERS = 2, K_GROUPS = 1, K_BLOCKS = 1;

#include "common/hopper.cuh"
#include "common/hopper_dgrad_decode.cuh"
#include "common/wgmma.cuh"

struct Params {
  TensorMap dy;
  const uint8* packed;
  const uint16* codebook;
  uint16* dx;
  float* sums;
  int k, m;
  int steps;     // steps of STEP_ROWS rows of the weight
  int k_blocks;  // blocks of 64 columns
  int n_tiles, m_tiles;
  int group_m_tiles;  // see tile_scheduler.cuh
  int splits;         // splits of the steps, in all tiles but the first whole_tiles
  int whole_tiles;
  int box_rows;  // rows of dy in a tile, up to TILE_M
};
__forceinline__ uint16* out_of(const Params& p) { return p.dx; }
__forceinline__ int width_of(const Params& p) { return p.k; }
__forceinline__ int row_of(const Params&, int row, int) { return row; }

#include "common/hopper_mainloop.cuh"

constexpr int STEP_ROWS = 64;  // rows of the weight per step
constexpr int STEP_BLOCKS = STEP_ROWS / BLOCK_N;
constexpr int W_PART_BYTES = CONSUMERS * BLOCK_BYTES;  // neighbours along k
constexpr int W_BYTES = STEP_BLOCKS * W_PART_BYTES;
static_assert(STEP_ROWS == BLOCK_K && GROUP_N == BLOCK_K);
static_assert(STEP_BLOCKS * FRAGMENTS == STEPS);
// Largest TILE_M at which codes of the next step are loaded, and looked up or selected, before this
// one goes to the tensor cores (H200, 8192 x 8192, 384 rows: 1 bit 78.4 us -> 72.4, 4 bits 83.5 ->
// 76.9, 8 bits 98.7 -> 90.3). 3 bits gain with narrow tiles only, and computed codes do not gain.
// With 256, 8 bits by table would spill 12 bytes.
constexpr int MOST_AHEAD = HAS_ZERO_POINT                                ? 0
                           : BITS == 3                                   ? 128
                           : BITS % 2 == 0 && BITS < 5 && SCALE_TYPE < 2 ? 256
                                                                         : 192;
constexpr bool AHEAD = STAGES > 3 && TILE_M <= MOST_AHEAD;

// Runs in one thread: copies are issued one after another anyway.
__forceinline__ void produce(const Params& p, uint32 dy_stages, uint32 w_stages, uint32 barriers) {
  const uint64 policy = weights_policy(p);
  const uint64 row_bytes = static_cast<uint64>(p.k_blocks) * BLOCK_BYTES;
  auto copy_weights = [&](const WorkCursor& at, int stage) {
    const uint32 full = barriers + 16 * stage, target = w_stages + stage * W_BYTES;
    expect_bytes(full, p.box_rows * ROW_BYTES + W_BYTES);
    const uint8* source =
        p.packed + at.step * STEP_BLOCKS * row_bytes + at.unit.tile.n * W_PART_BYTES;
#pragma unroll
    for (int block = 0; block < STEP_BLOCKS; block++)
      copy_bulk(target + block * W_PART_BYTES, source + block * row_bytes, W_PART_BYTES, full,
                policy);
  };
  auto copy_dy = [&](const WorkCursor& at, int stage) {
    copy_box(dy_stages + stage * B_BYTES, p.dy, at.step * STEP_ROWS, at.unit.rows.first(p),
             barriers + 16 * stage);
  };
  fill_pipeline(p, barriers, copy_weights, copy_dy);
}

// Stores a consumer's sums of a split. Value e of block b belongs to column 16 * warp + 2 * g + (e
// >> 1) of its 64 columns of the weight, and to row 8 * b + 2 * t + (e & 1) of dx.
__forceinline__ void store_partial(float* sums, const float (&d)[ACCUMULATORS], int group, int warp,
                                   int lane) {
  sums += 2 * (lane % 4) * TILE_N + GROUP_N * group + 16 * warp + 2 * (lane / 4);
#pragma unroll
  for (int i = 0; i < ACCUMULATORS; i += 4)
#pragma unroll
    for (int e = 0; e < 2; e++)
      *reinterpret_cast<float2*>(sums + (2 * i + e) * TILE_N) = make_float2(d[i + e], d[i + 2 + e]);
}

// Stores dx through shared memory, so that rows are written in runs of 128 bytes.
__forceinline__ void store(const Params& p, const float (&d)[ACCUMULATORS], const OutputPlace& at,
                           uint8* piece, int barrier) {
  const int g = at.lane / 4, t = at.lane % 4;
  const bool whole = width_of(p) % 8 == 0;
#pragma unroll
  for (int first = 0; first < OWN_M; first += PIECE_M) {
#pragma unroll
    for (int c = 0; c < PIECE_M; c += 8)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int sum = (first + c) / 2 + e;
        const int column = c + 2 * t + e, chunk = 2 * at.warp + g / 4;
        *reinterpret_cast<uint32*>(piece + column * PIECE_STRIDE + ((chunk ^ (2 * t + e)) << 4) +
                                   4 * (g % 4)) = from_floats(d[sum], d[sum + 2]);
      }
    store_tile_piece(p, piece, at, first, barrier, whole);
  }
}

__forceinline__ void consume(const Params& p, uint8* table, uint32 dy_stages, const uint8* w_stages,
                             uint8* pieces, uint32 barriers) {
  const int thread = threadIdx.x, lane = thread % LANES;
  const int group = __shfl_sync(~0u, thread / GROUP_THREADS, 0);
  const int warp = __shfl_sync(~0u, thread / LANES % 4, 0);
  const Codebook codebook(p.codebook, lane);
  if (HAS_TABLE) {
    build_table<CONSUMER_THREADS>(table, codebook, thread);
    sync_named(TABLE_BARRIER, CONSUMER_THREADS);
  }
  const DgradDecoder decoder(table, codebook, warp, lane);
  w_stages += group * BLOCK_BYTES;
  wait_previous_kernel();

  PipelineState state;
  int held = -1;  // the stage that unfinished wgmmas read last
  float d[ACCUMULATORS];
  auto release = [&] {
    if (held >= 0) arrive(barriers + 16 * held + 8);
  };
  struct Block {
    DgradCodes codes[STEP_BLOCKS];
    DgradValues values[STEP_BLOCKS];
  };
  auto load = [&](Block& blocks, const PipelineState& at) {
    wait_barrier(barriers + 16 * at.stage, at.phase);
#pragma unroll
    for (int block = 0; block < STEP_BLOCKS; block++)
      decoder.load(blocks.codes[block], w_stages + at.stage * W_BYTES + block * W_PART_BYTES);
  };
  auto look_up = [&](Block& blocks) {
#pragma unroll
    for (int block = 0; block < STEP_BLOCKS; block++)
      decoder.look_up(blocks.values[block], blocks.codes[block]);
  };
  auto finish = [&](uint32(&a)[STEPS][REGISTERS], const Block& blocks) {
#pragma unroll
    for (int block = 0; block < STEP_BLOCKS; block++)
      decoder.finish(a, block * FRAGMENTS, blocks.values[block], blocks.codes[block]);
  };
  auto multiply = [&](const uint32(&a)[STEPS][REGISTERS]) {
    const uint64 b = operand_b(dy_stages + state.stage * B_BYTES);
    touch(d);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < STEPS; s++) wgmma(d, a[s], b + s * OPERAND_B_STEP);
    wgmma_commit();
    wgmma_wait<1>();  // those of the previous step are done
    release();
    held = state.stage;
    state.advance();
  };
  auto step = [&](uint32(&a)[STEPS][REGISTERS]) {
    Block blocks;
    load(blocks, state);
    look_up(blocks);
    finish(a, blocks);
    multiply(a);
  };
  // Looks up the next step while the tensor cores multiply this one, and loads its codes while this
  // one is scaled.
  Block blocks;
  auto step_ahead = [&](uint32(&a)[STEPS][REGISTERS], bool has_next) {
    Block next;
    PipelineState later = state;
    later.advance();
    if (has_next) load(next, later);
    finish(a, blocks);
    if (has_next) {
      look_up(next);
      blocks = next;
    }
    multiply(a);
  };
  for (int index = first_work_unit(); index < work_unit_count(p); index += gridDim.x / CLUSTER) {
    const WorkUnit unit(p, index);
#pragma unroll
    for (int i = 0; i < ACCUMULATORS; i++) d[i] = 0.f;
    // wgmmas in flight read one set of registers while the other is decoded to.
    uint32 a[2][STEPS][REGISTERS];
    int i = unit.first;
    if (AHEAD) {
      load(blocks, state);
      look_up(blocks);
      for (; i + 2 < unit.last; i += 2) {
        step_ahead(a[0], true);
        step_ahead(a[1], true);
      }
      if (i + 1 < unit.last) {
        step_ahead(a[0], true);
        step_ahead(a[1], false);
      } else {
        step_ahead(a[0], false);
      }
    } else {
      for (; i + 1 < unit.last; i += 2) {
        step(a[0]);
        step(a[1]);
      }
      if (i < unit.last) step(a[0]);
    }
    wgmma_wait<0>();
    touch(d);
    release();
    held = -1;
    const OutputPlace at(p, unit, group, warp, lane, thread % GROUP_THREADS);
    if (CLUSTER > 1) cluster_reduce(d, dy_stages, barriers, thread);
    if (CLUSTER == 1 && unit.split_index >= 0)
      store_partial(p.sums + static_cast<uint64>(unit.split_index) * TILE_M * TILE_N, d, group,
                    warp, lane);
    else
      store(p, d, at, pieces + group * PIECE_BYTES, GROUP_BARRIER + group);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_dgrad(const __grid_constant__ Params p) {
  run_mainloop<W_BYTES>(p);
}
