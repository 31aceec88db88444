// What the kernels of both directions do alike on Hopper: a block of threads that produces and
// consumes, the filling of the ring, the end of a tile.
//
// Included after the kernel's Params, as cluster_reduce.cuh is, and after out_of and width_of: y or
// dx of a launch, and how long its rows are.
#pragma once
#include "common/cluster_reduce.cuh"

// Writes columns `first` and on of a tile, which are rows of the output: the group has put them in
// a piece, in chunks of eight rows of the tile, swizzled. `whole` is whether eight divide the
// width, asked once for a tile: asked here, the forward of clusters has other machine code (4 bits,
// tiles of 192 x 32: 1712 instructions for 1704).
//
// piece     :: [PIECE_M, PIECE_STRIDE bytes]
// out_of(p) :: [m, width_of(p), dtype]
__device__ __forceinline__ void store_tile_piece(const Params& p, const uint8* piece,
                                                 const OutputPlace& at, int first, int barrier,
                                                 bool whole) {
  sync_named(barrier, GROUP_THREADS);
#pragma unroll
  for (int c = 0; c < PIECE_M; c += GROUP_THREADS / 8) {
    const int column = c + at.thread / 8, chunk = at.thread % 8;
    const uint4 v = *reinterpret_cast<const uint4*>(piece + column * PIECE_STRIDE +
                                                    ((chunk ^ column % 8) << 4));
    const int out_row = at.first_column + first + column, out_column = at.first_row + 8 * chunk;
    uint16* target = out_of(p) + static_cast<uint64>(out_row) * width_of(p) + out_column;
    if (out_row < at.end_column && whole && out_column < width_of(p)) {
      *reinterpret_cast<uint4*>(target) = v;
    } else if (out_row < at.end_column) {
      const uint32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (out_column + i < width_of(p)) target[i] = words[i / 2] >> (16 * (i % 2));
    }
  }
  sync_named(barrier, GROUP_THREADS);
}

// Fills the ring with weights before the previous kernel has ended, with operand B after it, and
// then stage by stage as they are released.
template <typename CopyWeights, typename CopyB>
__device__ __forceinline__ void fill_pipeline(const Params& p, uint32 barriers,
                                              const CopyWeights& copy_weights,
                                              const CopyB& copy_b) {
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

// The kernel's, for a producing thread and for consumers.
__device__ __forceinline__ void produce(const Params& p, uint32 b_stages, uint32 w_stages,
                                        uint32 barriers);
__device__ __forceinline__ void consume(const Params& p, uint8* table, uint32 b_stages,
                                        const uint8* w_stages, uint8* pieces, uint32 barriers);

// A block of threads; W_BYTES is what a stage has of weights.
template <int W_BYTES>
__device__ __forceinline__ void run_mainloop(const Params& p) {
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
