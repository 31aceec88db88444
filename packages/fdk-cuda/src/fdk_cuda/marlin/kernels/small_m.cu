// y = x @ W_hat.T + bias for 1 to 16 rows of x, bound by the time to read the weights.
//
// x        :: [m, padded_k, dtype]                 m <= 8 * M_TILES
// packed   :: [padded_n / 32, padded_k / 64, BLOCK_BYTES, uint8]
// codebook :: [2^BITS, dtype]
// bias     :: [n, dtype] or null
// y        :: [m, n, dtype]
//
// The weight is operand A of mma.m16n8k16, x transposed operand B. A group's scale multiplies its
// float32 sum once, or (SCALES_WEIGHTS) the weights. Method: Marlin (Frantar et al., 2024, arXiv
// 2408.11743), with codebooks, all widths, and thread-block clusters.
//
// Macros: those of small_m_mainloop.cuh and small_m_products.cuh.
#include "common/small_m_mainloop.cuh"
#include "common/small_m_products.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) small_m(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8 shared[];
  uint8* const table = shared;

  start_next_kernel();
  const int thread = threadIdx.x, lane = thread % LANES;
  const int warp = __shfl_sync(~0u, thread / LANES, 0);  // uniform in the warp
  const int g = lane / 4, t = lane % 4, slot = lane_slot(g, t);
  const TileScheduler scheduler(p, warp);
  const SharedMemory memory(table + TABLE_BYTES, scheduler);
  WeightPipeline weights(scheduler, memory);
  const Codebook codebook(p.codebook, lane);
  build_table<THREADS>(table, codebook, thread);
  if (scheduler.cluster > 1) open_dsmem_buffers(memory.dsmem_barriers, thread);

  DecodeConstants constants;
  constants.lane_part = table_lane_part(lane);
  constants.nibbles = p.nibbles;
#pragma unroll
  for (int s = 0; s < STEPS; s++) constants.base[s] = p.base[s];
  constants.values[0] = codebook.words[0];
  constants.values[1] = codebook.words[1];

  // Weights and codebook are constant. x and y are not, and may be used from here on. x is read by
  // plain loads, never the read-only path: the previous kernel may just have written it.
  wait_previous_kernel();
  Activations x;
  const uint16* x_rows[M_TILES];
  bool live[M_TILES];
#pragma unroll
  for (int tile = 0; tile < M_TILES; tile++) {
    const int row = SPREAD ? g / 2 : g + 8 * tile;
    const bool is_mine = row < p.m && !(SPREAD && g % 2);
    // With X_AHEAD registers are not cleared: rows past m read row 0.
    live[tile] = (X_AHEAD || is_mine) && scheduler.stages > 0;
    x_rows[tile] = p.x + static_cast<uint64>(row < p.m ? row : 0) * p.padded_k + 8 * t +
                   static_cast<uint64>(scheduler.first) * STAGE_K;
#pragma unroll
    for (int block = 0; block < K_BLOCKS; block++)
      x.v[block][0][tile] = x.v[block][1][tile] = make_uint4(0, 0, 0, 0);
  }
  auto load_x = [&](Activations& x, int block, uint32 column) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int tile = 0; tile < M_TILES; tile++)
        if (live[tile])
          x.v[block][half][tile] =
              *reinterpret_cast<const uint4*>(x_rows[tile] + column + BLOCK_K * block + 32 * half);
  };
#pragma unroll
  for (int block = 0; block < K_BLOCKS; block++) load_x(x, block, 0);
  if (scheduler.cluster > 1) wait_dsmem_buffers();
  __syncthreads();  // the table is complete
  weights.start_others();

  const auto compute = [&](auto constant, int pass) {
    constexpr int BLOCKS = decltype(constant)::value;
    float sum[FRAGMENTS * BLOCKS][M_TILES][VALUES] = {};
    float x_sum[BLOCKS][M_TILES][VALUES] = {};  // of odd fragments, if KEEPS_X_SUM
    uint32 column = 0;                          // relative to the warp's first
    for (int i = 0; i < scheduler.stages; i++) {
      column = i + 1 < scheduler.stages ? column + scheduler.step * STAGE_K : 0;
      Activations next;
      if (X_AHEAD) load_x(next, 0, column);
      RowSums rows;
      if (NEEDS_SUM) rows.compute(x, constants.base);
      weights.pipeline.wait();
#pragma unroll
      for (int k_block = 0; k_block < K_BLOCKS; k_block++) {
#pragma unroll
        for (int n_block = 0; n_block < BLOCKS; n_block++) {
          const uint8* block =
              weights.pipeline.current() + (n_block * K_BLOCKS + k_block) * BLOCK_BYTES;
#include "common/small_m_block.cuh"
        }
        if (!X_AHEAD) load_x(x, k_block, column);  // x of the next stage
      }
      // The products above have consumed all loads of this stage: the compiler must not move its
      // release before them.
#pragma unroll
      for (int f = 0; f < FRAGMENTS * BLOCKS; f++)
        asm volatile("" : "+f"(sum[f][0][0]), "+f"(sum[f][0][COLUMNS])::"memory");
      if (X_AHEAD) x = next;
      weights.next();
    }

    join_x_sums(sum, x_sum, constants);
    if (p.sum_buffers == 0) __syncthreads();  // every warp has read its last stage
    float* const buffer = memory.buffer(p, pass);
#pragma unroll
    for (int c = 0; c < M_TILES; c++)
#pragma unroll
      for (int e = 0; e < COLUMNS; e++) {
        const int column = c * 8 + COLUMNS * t + e;
        if (column < p.stored_m)
#pragma unroll
          for (int f = 0; f < FRAGMENTS * BLOCKS; f++) {
            float* own = buffer + (warp * p.stored_m + column) * SUM_STRIDE + f * 16 + g;
            own[0] = sum[f][c][e];
            own[8] = sum[f][c][COLUMNS + e];
          }
      }
  };
  run_passes(scheduler, memory, thread, compute);
}
