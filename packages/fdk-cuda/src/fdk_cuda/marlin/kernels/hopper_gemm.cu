// y = x @ W_hat.T + bias for many rows of x, by Hopper's wgmma.
//
// x        :: [m, k, dtype]                     by tensor copies: any m, any k
// packed   :: [padded_n / 32, padded_k / 64, BLOCK_BYTES, uint8]
// codebook :: [2^BITS, dtype]
// bias     :: [n, dtype] or null
// y        :: [m, n, dtype]
// sums     :: [tiles, splits, TILE_M, TILE_N, float32]   for split_k_reduce.cu
//
// Decoded weights are operand A, in registers; x is operand B, in shared memory. A producer thread
// keeps the pipeline full. Each consumer, a warpgroup, owns 64 outputs of the tile, and decodes the
// next 64 inputs while the tensor cores multiply the previous ones. A thread block takes whole
// tiles first, then, where those left are too few for all thread blocks, splits of tiles.
// Alternatively the thread blocks of a cluster share the inputs of a tile and add their sums
// through DSMEM; a cluster takes one tile.
//
// Macros, in addition to those of fragments.cuh and hopper_scales.cuh:
//   TILE_M     rows of x in a tile, a multiple of 16 up to 256
//   CONSUMERS  2 to 4
//   K_GROUPS   consumers that share 64 outputs, each with its own blocks of a stage: 1 or 2
//   K_BLOCKS   blocks of 64 inputs in a stage: with 2, copies are twice as long
//   STAGES     of the pipeline
//   CLUSTER    thread blocks of a cluster: 1 or 2
//   EXPERTS    1 for a stack of weights, with rows of x in the order of their experts; see below
//   INTERLEAVED  1 where rows g of a fragment are of the first half of the outputs, and rows
//                g + 8 of the second; for stacks
//   SWIGLU     1 where also the first half are gates of the second: y is silu(gate) * up
//
// With EXPERTS, packed, codebook and bias have a first dimension for the experts, which may share
// the codebook. A tile has rows of one expert; its box may go on into those of the next one, whose
// sums are not stored. The table is filled again where the codebook changes.
#include "common/hopper.cuh"
#include "common/hopper_decode.cuh"
#include "common/swiglu.cuh"
#include "common/wgmma.cuh"

struct Params {
  TensorMap x;
  const uint8* packed;
  const uint16* codebook;
  const uint16* bias;
  uint16* y;
  float* sums;
  int n, m;
  int steps;     // steps of K_BLOCKS * 64 inputs
  int n_blocks;  // blocks of 32 outputs
  int n_tiles, m_tiles;
  int group_m_tiles;  // see tile_scheduler.cuh
  int splits;         // splits of k, in all tiles but the first whole_tiles
  int whole_tiles;
  int box_rows;  // rows of x in a tile, up to TILE_M
#if EXPERTS
  const int* tiles;  // see tile_scheduler.cuh
  const int* order;  // rows of y for rows of x, or null where they are the same
  int max_tiles;
  int codebook_step;  // values to the codebook of the next expert, or 0 where they share one
#endif
};
__forceinline__ uint16* out_of(const Params& p) { return p.y; }
__forceinline__ int width_of(const Params& p) { return SWIGLU ? p.n / 2 : p.n; }
__forceinline__ int row_of(const Params& p, int row, int end) {
#if EXPERTS
  if (p.order != nullptr) return row < end ? p.order[row] : 0;
#endif
  return row;
}

#include "common/hopper_mainloop.cuh"

static_assert(HAS_TABLE || BITS <= 2 || COMPUTES_CODES);
static_assert(!EXPERTS || (CLUSTER == 1 && K_GROUPS == 1 && !SIGNS));
static_assert((!SWIGLU && !INTERLEAVED) || EXPERTS);
static_assert(!SWIGLU || !INTERLEAVED, "y of SWIGLU is in order");

// Looks codes up while the tensor cores multiply the previous block. That needs one more stage, and
// registers that four consumers do not have (H200, 8192 x 8192, 64 rows, 1 bit: 20.1 us -> 18.9).
// Signs need no lookup: their codes are loaded two blocks ahead too, and become weights after the
// wgmmas are issued.
constexpr bool AHEAD = K_BLOCKS == 2 && CONSUMERS < 4 && STAGES > 3 && (SCALES_LAST || BY_SIGNS);
// The same with stages of one block, one block ahead; without a table, codes are only loaded (H200,
// 8192 x 8192, 256 rows, 4 bits: 53.4 us -> 51.7).
constexpr bool SHORT_AHEAD = K_BLOCKS == 1 && CONSUMERS == 2 && STAGES > 3;
constexpr int OWN_BLOCKS = K_BLOCKS / K_GROUPS;  // blocks of a stage for one consumer
constexpr int TILE_N_BLOCKS = TILE_N / BLOCK_N;
constexpr int W_PART_BYTES = K_BLOCKS * BLOCK_BYTES;  // 32 outputs
constexpr int W_BYTES = TILE_N_BLOCKS * W_PART_BYTES;

// Runs in one thread: copies are issued one after another anyway.
__forceinline__ void produce(const Params& p, uint32 x_stages, uint32 w_stages, uint32 barriers) {
  const uint64 policy = weights_policy(p);
  const uint64 row_bytes = static_cast<uint64>(p.steps) * W_PART_BYTES;
  auto copy_weights = [&](const WorkCursor& at, int stage) {
    const uint32 full = barriers + 16 * stage, target = w_stages + stage * W_BYTES;
    expect_bytes(full, K_BLOCKS * p.box_rows * ROW_BYTES + W_BYTES);
    const uint8* source = p.packed + static_cast<uint64>(at.step) * W_PART_BYTES;
#pragma unroll
    for (int block = 0; block < TILE_N_BLOCKS; block++) {
      // Past the last row a tile repeats the last block: those sums are not stored.
      int n_block = min(at.unit.tile.n * TILE_N_BLOCKS + block, p.n_blocks - 1);
      if (EXPERTS) n_block += at.unit.rows.expert * p.n_blocks;
      copy_bulk(target + block * W_PART_BYTES, source + n_block * row_bytes, W_PART_BYTES, full,
                policy);
    }
  };
  auto copy_x = [&](const WorkCursor& at, int stage) {
#pragma unroll
    for (int block = 0; block < K_BLOCKS; block++)
      copy_box(x_stages + stage * B_BYTES + block * B_BLOCK_BYTES, p.x,
               (at.step * K_BLOCKS + block) * BLOCK_K, at.unit.rows.first(p),
               barriers + 16 * stage);
  };
  fill_pipeline(p, barriers, copy_weights, copy_x);
}

// Stores a consumer's sums of a split. Value e of block b belongs to output 8 * (warp_octet +
// NEXT_OCTET * (e >> 1)) + g of the consumer and to row 8 * b + 2 * t + (e & 1) of x.
__forceinline__ void store_partial(float* sums, const float (&d)[ACCUMULATORS], int group, int warp,
                                   int lane) {
  sums += 2 * (lane % 4) * TILE_N + GROUP_N * group + 8 * warp_octet(warp) + lane / 4;
#pragma unroll
  for (int i = 0; i < ACCUMULATORS; i++)
    sums[(8 * (i / 4) + (i & 1)) * TILE_N + (i & 2 ? 8 * NEXT_OCTET : 0)] = d[i];
}

// Stores y through shared memory, so that rows are written in runs of 128 bytes, with SWIGLU 64.
__forceinline__ void store(const Params& p, int first_bias, const float (&d)[ACCUMULATORS],
                           const OutputPlace& at, uint8* piece, int barrier) {
  // The outputs of rows g and g + 8.
  const int row = INTERLEAVED
                      ? at.first_n / 2 + 8 * at.warp + at.lane / 4
                      : at.first_n + 8 * (SWIGLU ? at.warp : warp_octet(at.warp)) + at.lane / 4;
  const int to_other = SWIGLU || INTERLEAVED ? p.n / 2 : 8 * NEXT_OCTET;
  float bias[2] = {0.f, 0.f};
  if (p.bias != nullptr) {
    if (row < (INTERLEAVED ? p.n / 2 : width_of(p))) bias[0] = to_float(p.bias[first_bias + row]);
    if (row + to_other < p.n) bias[1] = to_float(p.bias[first_bias + row + to_other]);
  }
  const uint32 target = shared_address(piece);
  const bool whole = width_of(p) % 8 == 0;
#pragma unroll
  for (int first = 0; first < OWN_M; first += PIECE_M) {
#pragma unroll
    for (int c = 0; c < PIECE_M; c += 16) {
#if SWIGLU
      uint32 v[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int sum = (first + c) / 2 + 4 * i;
        v[i] = from_floats(swiglu(d[sum] + bias[0], d[sum + 2] + bias[1]),
                           swiglu(d[sum + 1] + bias[0], d[sum + 3] + bias[1]));
      }
      // Matrix `lane / 8 % 2` of two: the first or second eight rows of x.
      const int r = at.lane % 8, column = c + 8 * (at.lane / 8 % 2) + r;
      asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(
                       target + column * PIECE_STRIDE + ((at.warp ^ r) << 4)),
                   "r"(v[0]), "r"(v[1])
                   : "memory");
#else
      uint32 v[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int sum = (first + c) / 2 + 2 * i;
        v[i] = from_floats(d[sum] + bias[i & 1], d[sum + 1] + bias[i & 1]);
      }
      // Matrix `lane / 8` of four: a warp's first or second rows g, the first or second eight rows
      // of x.
      const int matrix = at.lane / 8, r = at.lane % 8;
      const int column = c + 8 * (matrix / 2) + r;
      const int chunk = warp_octet(at.warp) + NEXT_OCTET * (matrix % 2);
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       target + column * PIECE_STRIDE + ((chunk ^ r) << 4)),
                   "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                   : "memory");
#endif
    }
    store_tile_piece(p, piece, at, first, barrier, whole);
  }
}

__forceinline__ void consume(const Params& p, uint8* table, uint32 x_stages, const uint8* w_stages,
                             uint8* pieces, uint32 barriers) {
  const int thread = threadIdx.x, lane = thread % LANES;
  const int group = __shfl_sync(~0u, thread / GROUP_THREADS, 0);
  const int warp = __shfl_sync(~0u, thread / LANES % 4, 0);
  Codebook codebook(p.codebook, lane);
  auto fill_table = [&] {
    if (HAS_TABLE && SCALES_LAST) {
      if constexpr (LOOKS_UP_HALVES)
        build_half_table<CONSUMER_THREADS>(table, codebook, thread);
      else
        build_table<CONSUMER_THREADS, COPIES / 2, BITS == 1>(table, codebook, thread);
      sync_named(TABLE_BARRIER, CONSUMER_THREADS);
    }
  };
  fill_table();
  HopperDecoder decoder(table, codebook, warp, lane);
  const int n_group = group % N_GROUPS, k_group = group / N_GROUPS;
  w_stages += (2 * n_group + warp / FRAGMENTS) * W_PART_BYTES + k_group * BLOCK_BYTES;
  const uint64 x_operand = operand_b(x_stages + k_group * B_BLOCK_BYTES);
  wait_previous_kernel();

  PipelineState state;
  int held = -1;  // the stage that unfinished wgmmas read last
  float d[ACCUMULATORS];
  auto release = [&] {
    if (held >= 0) arrive(barriers + 16 * held + 8);
  };
  auto load = [&](const PipelineState& at, int block) {
    if (block == 0) wait_barrier(barriers + 16 * at.stage, at.phase);
    return decoder.load_codes(w_stages + at.stage * W_BYTES + block * BLOCK_BYTES);
  };
  auto multiply = [&](const uint32(&a)[STEPS][REGISTERS], int block) {
    const uint64 b = x_operand + ((state.stage * B_BYTES + block * B_BLOCK_BYTES) >> OPERAND_SHIFT);
    touch(d);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < STEPS; s++) wgmma(d, a[s], b + s * OPERAND_B_STEP);
    wgmma_commit();
  };
  // The products of the previous block are done and have read their operands.
  auto finish_last = [&](int block) {
    wgmma_wait<1>();
    if (block == 0) release();
    if (block == OWN_BLOCKS - 1) {
      held = state.stage;
      state.advance();
    }
  };
  auto step = [&](uint32(&a)[STEPS][REGISTERS], int block) {
    decoder.decode(a, load(state, block));
    multiply(a, block);
    finish_last(block);
  };
  // Looks up the next block while the tensor cores multiply this one, and loads codes of the one
  // after that.
  HopperCodes codes;
  auto step_ahead = [&](uint32(&a)[STEPS][REGISTERS], uint32(&next)[STEPS][REGISTERS], int block,
                        const PipelineState& later, bool has_next, bool has_later) {
    HopperValues values;
    if (has_next && !BY_SIGNS) decoder.look_up(values, codes);
    multiply(a, block);
    HopperCodes later_codes;
    if (has_later) later_codes = load(later, block);
    finish_last(block);
    if (has_next && BY_SIGNS) decoder.look_up(values, codes);
    if (has_next) decoder.finish(next, values, codes);
    if (has_later) codes = later_codes;
  };
#if EXPERTS
  int first_value = 0;  // of the codebook that the table is filled from
#endif
  // The same with stages of one block: loads codes of the next before this one is finished.
  HopperValues values;
  auto step_short = [&](uint32(&a)[STEPS][REGISTERS], bool has_next) {
    HopperCodes next;
    PipelineState later = state;
    later.advance();
    if (has_next) next = load(later, 0);
    if (!HAS_TABLE) decoder.look_up(values, codes);
    decoder.finish(a, values, codes);
    if (has_next) {
      if (HAS_TABLE) decoder.look_up(values, next);
      codes = next;
    }
    multiply(a, 0);
    finish_last(0);
  };
  for (int index = first_work_unit(); index < work_unit_count(p); index += gridDim.x / CLUSTER) {
    const WorkUnit unit(p, index);
#if EXPERTS
    if (p.order != nullptr && unit.rows.first_row + thread < unit.rows.end_row)
      prefetch_l1(p.order + unit.rows.first_row + thread);
    if (const int first = unit.rows.expert * p.codebook_step; first != first_value) {
      first_value = first;
      codebook = Codebook(p.codebook + first, lane);
      // All consumers have looked up the last codes of the previous tile.
      if (HAS_TABLE && SCALES_LAST) sync_named(TABLE_BARRIER, CONSUMER_THREADS);
      fill_table();
      decoder.set_codebook(codebook);
    }
#endif
#pragma unroll
    for (int i = 0; i < ACCUMULATORS; i++) d[i] = 0.f;
    // wgmmas in flight read one set of registers while the other is decoded to.
    uint32 a[2][STEPS][REGISTERS];
    int i = unit.first;
    if (AHEAD) {
      PipelineState later = state;
      decoder.decode(a[0], load(later, 0));
      codes = load(later, 1);
      for (; i + 1 < unit.last; i++) {
        later.advance();
        step_ahead(a[0], a[1], 0, later, true, true);
        step_ahead(a[1], a[0], 1, later, true, true);
      }
      step_ahead(a[0], a[1], 0, later, true, false);
      step_ahead(a[1], a[0], 1, later, false, false);
    } else if (SHORT_AHEAD) {
      codes = load(state, 0);
      if (HAS_TABLE) decoder.look_up(values, codes);
      for (; i + 2 < unit.last; i += 2) {
        step_short(a[0], true);
        step_short(a[1], true);
      }
      if (i + 1 < unit.last) {
        step_short(a[0], true);
        step_short(a[1], false);
      } else {
        step_short(a[0], false);
      }
    } else if (OWN_BLOCKS == 2) {
      for (; i < unit.last; i++) {
        step(a[0], 0);
        step(a[1], 1);
      }
    } else {
      for (; i + 1 < unit.last; i += 2) {
        step(a[0], 0);
        step(a[1], 0);
      }
      if (i < unit.last) step(a[0], 0);
    }
    wgmma_wait<0>();
    touch(d);
    release();
    held = -1;
    const OutputPlace at(p, unit, n_group, warp, lane, thread % GROUP_THREADS);
    if (K_GROUPS == 2) {
      const uint32 dsmem_buffer = shared_address(pieces + 2 * n_group * PIECE_BYTES);
      reduce_k_groups(d, dsmem_buffer, at.thread, PAIR_BARRIER + n_group, k_group == 0);
      if (k_group > 0 && CLUSTER == 1) continue;
      if (k_group > 0) return;
      // y goes through the memory from which all warps of the group have read the other's sums: a
      // barrier is needed, which a cluster has anyway.
      if (CLUSTER == 1) sync_named(GROUP_BARRIER + group, GROUP_THREADS);
    }
    if (CLUSTER > 1) cluster_reduce(d, x_stages, barriers, thread);
    if (CLUSTER == 1 && unit.split_index >= 0)
      store_partial(p.sums + static_cast<uint64>(unit.split_index) * TILE_M * TILE_N, d, n_group,
                    warp, lane);
    else
      store(p, unit.rows.expert * p.n, d, at, pieces + n_group * K_GROUPS * PIECE_BYTES,
            GROUP_BARRIER + group);
    if (CLUSTER > 1) return;  // a cluster takes one tile
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_gemm(const __grid_constant__ Params p) {
  run_mainloop<W_BYTES>(p);
}
