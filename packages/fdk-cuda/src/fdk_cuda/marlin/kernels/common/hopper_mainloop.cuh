// Main loop on Hopper, shared by hopper_gemm.cu and hopper_dgrad.cu: a producer fills a pipeline,
// the consumers decode and multiply, and write their rows of y.
//
// Included after the kernel's Params, and after out_of, width_of and row_of: the output (y or dx)
// of a launch, the length of its rows, and the row of it that has the results of a row of x.
#pragma once
#include "common/cluster_reduce.cuh"
#include "common/tile_scheduler.cuh"

// Macros: EXPERTS, see tile_scheduler.cuh; SWIGLU, 1 where two outputs of the weight become one;
// INTERLEAVED, 1 where octets of rows of the weight are outputs of the first and of the second half
// in turns, each half of whole octets.

// The current stage and the parity of its barriers.
struct PipelineState {
  int stage = 0;
  uint32 phase = 0;

  __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Initialises the barriers. Per stage, `full` counts the bytes that have arrived and `empty` the
// threads that are done. (One lane per warp for `empty` is no faster, and racecheck then reports
// hazards.)
__forceinline__ void open_pipeline(uint32 barriers) {
  if (threadIdx.x != 0) return;
  for (int stage = 0; stage < STAGES; stage++) {
    open_barrier(barriers + 16 * stage, 1);
    open_barrier(barriers + 16 * stage + 8, CONSUMER_THREADS);
  }
  if (CLUSTER > 1) open_barrier(barriers + DSMEM_BARRIER, 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  if (CLUSTER > 1)
    expect_bytes(barriers + DSMEM_BARRIER,
                 (CLUSTER - 1) * OWN_ACCUMULATORS * 4 * FINISHING_THREADS);
}

// Weights that only one tile along m reads are read once.
__forceinline__ uint64 weights_policy(const Params& p) {
  uint64 policy;
  if (p.m_tiles == 1)
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  else
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Position of a thread's accumulators in y.
struct OutputPlace {
  int warp, lane, thread;  // of the consumer
  int first_n, first_m;
  int end_m;  // past the last row of the tile that is used

  __forceinline__ OutputPlace(const Params& p, const WorkUnit& unit, int n_group, int warp_,
                              int lane_, int thread_)
      : warp(warp_),
        lane(lane_),
        thread(thread_),
        first_n((unit.tile.n * TILE_N + n_group * GROUP_N) / (SWIGLU ? 2 : 1)),
        first_m(unit.rows.first(p) + static_cast<int>(blockIdx.x) % CLUSTER * OWN_M),
        end_m(unit.rows.end(p)) {}
};
// Returns the output that begins an octet of rows of the weight.
__forceinline__ int output_of(const Params& p, int row) {
  return INTERLEAVED ? row / 16 * 8 + row / 8 % 2 * (width_of(p) / 2) : row;
}
// Chunks of eight outputs of y that a consumer has.
constexpr int CHUNKS = GROUP_N / 8 / (SWIGLU ? 2 : 1);

// Writes rows `first` and on of a tile, which the consumer has put into a piece, in swizzled chunks
// of eight outputs. `whole` says that 8 divides the width; computed here instead of once per tile,
// it changes the machine code for clusters.
//
// piece     :: [PIECE_M, PIECE_STRIDE bytes]
// out_of(p) :: [m, width_of(p), dtype]
__forceinline__ void store_tile_piece(const Params& p, const uint8* piece, const OutputPlace& at,
                                      int first, int barrier, bool whole) {
  sync_named(barrier, GROUP_THREADS);
#pragma unroll
  for (int c = 0; c < PIECE_M; c += GROUP_THREADS / 8) {
    const int column = c + at.thread / 8, chunk = at.thread % 8;
    const uint4 v = *reinterpret_cast<const uint4*>(piece + column * PIECE_STRIDE +
                                                    ((chunk ^ column % 8) << 4));
    const int out_row = at.first_m + first + column, out_column = at.first_n + 8 * chunk;
    if (CHUNKS < 8 && chunk >= CHUNKS) continue;
    uint16* target = out_of(p) + static_cast<uint64>(row_of(p, out_row, at.end_m)) * width_of(p) +
                     output_of(p, out_column);
    if (out_row < at.end_m && whole && out_column < width_of(p)) {
      *reinterpret_cast<uint4*>(target) = v;
    } else if (out_row < at.end_m) {
      const uint32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (out_column + i < width_of(p)) target[i] = words[i / 2] >> (16 * (i % 2));
    }
  }
  sync_named(barrier, GROUP_THREADS);
}

// Fills the pipeline: weights before the previous kernel has ended, operand B after it, then stage
// by stage as they are released.
template <typename CopyWeights, typename CopyB>
__forceinline__ void fill_pipeline(const Params& p, uint32 barriers,
                                   const CopyWeights& copy_weights, const CopyB& copy_b) {
  // A list of tiles may be shorter than the grid.
  if (EXPERTS && first_work_unit() >= work_unit_count(p)) return;
  WorkCursor ahead(p), cursor(p);
  int filled = 0;
  for (; filled < STAGES && ahead.any(); filled++, ahead.advance()) copy_weights(ahead, filled);
  wait_previous_kernel();
  for (int stage = 0; stage < filled; stage++, cursor.advance()) copy_b(cursor, stage);
  PipelineState state;
  for (; ahead.any(); ahead.advance(), state.advance()) {
    wait_barrier(barriers + 16 * state.stage + 8, state.phase);
    copy_weights(ahead, state.stage);
    copy_b(ahead, state.stage);
  }
}

// Defined by the kernel: the producer thread, and the consumers.
__forceinline__ void produce(const Params& p, uint32 b_stages, uint32 w_stages, uint32 barriers);
__forceinline__ void consume(const Params& p, uint8* table, uint32 b_stages, const uint8* w_stages,
                             uint8* pieces, uint32 barriers);

// Body of a thread block. W_BYTES are the bytes of weights in a stage.
template <int W_BYTES>
__forceinline__ void run_mainloop(const Params& p) {
  extern __shared__ __align__(1024) uint8 shared[];
  uint8* const table = shared;
  uint8* const b_stages = table + (HAS_TABLE ? TABLE_BYTES : 0);
  uint8* const w_stages = b_stages + STAGES * B_BYTES;
  uint8* const end = w_stages + STAGES * W_BYTES;
  uint8* const pieces = HAS_ROOM_IN_TABLE ? table + PIECE_STRIDE / 2 : end;
  const uint32 barriers = shared_address(HAS_ROOM_IN_TABLE ? end : end + CONSUMERS * PIECE_BYTES);

  start_next_kernel();
  open_pipeline(barriers);
  __syncthreads();
  if (threadIdx.x >= CONSUMER_THREADS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (threadIdx.x < CONSUMER_THREADS + LANES && elect_one())
      produce(p, shared_address(b_stages), shared_address(w_stages), barriers);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    consume(p, table, shared_address(b_stages), w_stages, pieces, barriers);
  }
}
