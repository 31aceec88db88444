// What the kernels for few rows of x share: tiles and how blocks, warps and clusters take them, the
// copies of a warp's stages, and partial sums.
//
// A block of threads takes tiles of TILE_N rows; its warps share the columns, each with a ring
// of stages of its own, and their partial sums meet in shared memory at the end of a tile. Blocks
// of a cluster share the columns of a tile too; their sums meet in distributed shared memory. Every
// sum has one order: results do not depend on timing. What is left for the last pass may be cut
// into shorter tiles, so that every processor has some of it.
//
// Beside fragments.cuh's, an instantiation has
//   TILE_FRAGMENTS  2, 4 or 8: fragments of 16 rows that a warp takes
//   SHORT_BLOCKS    blocks of 32 rows that it takes of a short tile; all of them: there are none
//   K_BLOCKS        blocks of 64 columns in a stage; 2 halve what one costs by itself
//   N_GROUPS      groups of warps, one below the other: with 2, two warps that run side by side
//                   load the same x, and the second finds it in the L1
//   WARPS           of a block
#pragma once
#include "common/fragments.cuh"
#include "common/pipeline.cuh"

constexpr int STAGES = 2;  // 3 is slower: 8192 x 8192, m = 1: 11.3 us -> 10.5 us with 2
constexpr int GROUP_N = 16 * TILE_FRAGMENTS;  // of a warp
constexpr int TILE_N = GROUP_N * N_GROUPS;
constexpr int GROUP_WARPS = WARPS / N_GROUPS;  // share the columns of the same rows
constexpr int TILE_BLOCKS = TILE_FRAGMENTS / FRAGMENTS;
constexpr bool HAS_SHORT = SHORT_BLOCKS < TILE_BLOCKS;
static_assert(0 < SHORT_BLOCKS && SHORT_BLOCKS <= TILE_BLOCKS);
constexpr int STAGE_BLOCKS = TILE_BLOCKS * K_BLOCKS;
constexpr int STAGE_K = K_BLOCKS * BLOCK_K;
constexpr int STAGE_BYTES = STAGE_BLOCKS * BLOCK_BYTES;
constexpr int THREADS = WARPS * LANES;
constexpr int DSMEM_BARRIER_BYTES = 16;
constexpr int SUM_STRIDE = GROUP_N + 4;  // floats between columns of partial sums: spreads banks
static_assert(TILE_FRAGMENTS == 2 || TILE_FRAGMENTS == 4 || TILE_FRAGMENTS == 8);
static_assert(WARPS % N_GROUPS == 0);

struct Params {
  const uint8* packed;
  const uint16* codebook;
  const uint16* x;
  const uint16* bias;
  uint16* y;
  int n, padded_k, m;
  int stored_m;      // of partial sums: m, rounded up to what the threads divide evenly
  int n_blocks;      // blocks of 32 rows of the weight
  int passes;        // tiles that the busiest block takes
  int whole_passes;  // of them, the first ones, whose tiles are not short
  int rounds;        // stages of a tile that the busiest warp takes
  int log_share;     // of the values of a tile that a block of a cluster finishes
  int sum_buffers;   // 0: partial sums lie over the ring, for blocks that take a single tile
  uint32 base[STEPS];
  uint32 nibbles;
};

using WarpPipeline = Pipeline<STAGES, STAGE_BYTES>;

__device__ __forceinline__ uint32 cluster_size() {
  uint32 size = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
#endif
  return size;
}

__device__ __forceinline__ uint32 cluster_rank() {
  uint32 rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

__device__ __forceinline__ uint32 cluster_index() {
  uint32 index = blockIdx.x;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
#endif
  return index;
}

__device__ __forceinline__ uint32 cluster_count() {
  uint32 count = gridDim.x;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%nclusterid.x;" : "=r"(count));
#endif
  return count;
}

// Blocks of a cluster exchange partial sums through dsmem_buffers in shared memory: a value is
// stored in another block's dsmem_buffer and counted by its barrier in one go, so neither side
// needs a fence or a barrier over the cluster for it. Two dsmem_buffers take turns, a tile each;
// one is written again only after its block has sent its own sums of the tile between, and so has
// read it.
__device__ __forceinline__ void dsmem_send(const float* dsmem_buffer, uint32 barrier, uint32 rank,
                                           float value) {
#if __CUDA_ARCH__ >= 900
  uint32 remote, remote_barrier;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(remote)
      : "r"(shared_address(dsmem_buffer)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_barrier) : "r"(barrier), "r"(rank));
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(remote),
      "f"(value), "r"(remote_barrier)
      : "memory");
#endif
}

__device__ __forceinline__ void open_dsmem_buffers(uint32 barriers, int thread) {
#if __CUDA_ARCH__ >= 900
  if (thread == 0) {
    for (int i = 0; i < 2; i++)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * i) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// Until every block of the cluster has opened its own.
__device__ __forceinline__ void wait_dsmem_buffers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void expect_dsmem(uint32 barrier, uint32 bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

template <int VALUE>
struct Constant {
  static constexpr int value = VALUE;
};

// A tile: its first block of 32 rows, and how many of them a group of warps has.
struct Tile {
  int start, blocks;
};

// How a warp goes through the tiles: the stages that it has of each, which one that is and how far
// the next, and the tile of each pass.
struct TileScheduler {
  const Params& p;
  int split, rank;  // of the cluster
  int unit, units;  // that take tiles: clusters, or blocks by themselves
  int warp, first, step, stages;

  __device__ __forceinline__ TileScheduler(const Params& params, int warp_)
      : p(params),
        split(cluster_size()),
        rank(cluster_rank()),
        unit(cluster_index()),
        units(cluster_count()),
        warp(warp_) {
    first = rank * GROUP_WARPS + warp / N_GROUPS;
    step = GROUP_WARPS * split;
    stages = p.rounds - (first + (p.rounds - 1) * step >= p.padded_k / STAGE_K);
  }

  __device__ __forceinline__ int group() const { return warp % N_GROUPS; }

  __device__ __forceinline__ bool is_whole(int pass) const {
    return !HAS_SHORT || pass < p.whole_passes;
  }

  // Where the tile of a pass starts, in blocks of rows; there is none where that is past the last.
  __device__ __forceinline__ int start(int pass) const {
    if (is_whole(pass)) return (pass * units + unit) * TILE_BLOCKS * N_GROUPS;
    const int short_tile = (pass - p.whole_passes) * units + unit;
    return (p.whole_passes * units * TILE_BLOCKS + short_tile * SHORT_BLOCKS) * N_GROUPS;
  }

  // A short tile that would end past the rows starts as much earlier: some rows are taken twice.
  __device__ __forceinline__ Tile tile(int pass) const {
    const int blocks = is_whole(pass) ? TILE_BLOCKS : SHORT_BLOCKS;
    if (!HAS_SHORT) return {start(pass), blocks};
    return {min(start(pass), p.n_blocks - blocks * N_GROUPS), blocks};
  }

  // All units have a tile in all passes but the last.
  __device__ __forceinline__ int passes() const {
    return p.passes - (start(p.passes - 1) >= p.n_blocks);
  }
};

// A block's shared memory, from `start` on.
struct SharedMemory {
  uint8 *pipelines, *barriers;
  uint32 dsmem_barriers;
  float* dsmem_buffers;
  float* sums;

  __device__ __forceinline__ SharedMemory(uint8* start, const TileScheduler& scheduler)
      : pipelines(start), barriers(start + WARPS * WarpPipeline::BYTES) {
    uint8* const mail = barriers + WARPS * WarpPipeline::BARRIER_BYTES;
    dsmem_barriers = shared_address(mail);
    dsmem_buffers = reinterpret_cast<float*>(mail + DSMEM_BARRIER_BYTES);
    const int tile_values = TILE_N * scheduler.p.stored_m;
    sums = scheduler.p.sum_buffers == 0
               ? reinterpret_cast<float*>(pipelines)
               : dsmem_buffers + (scheduler.split > 1 ? 2 * tile_values : 0);
  }

  // [WARPS, stored columns, SUM_STRIDE], for a pass.
  __device__ __forceinline__ float* buffer(const Params& p, int pass) const {
    return sums + (p.sum_buffers == 2 ? pass % 2 * (WARPS * SUM_STRIDE * p.stored_m) : 0);
  }
};

// The stages of a warp, copied in the order in which it takes them.
struct WeightPipeline {
  const TileScheduler& scheduler;
  WarpPipeline pipeline;
  uint32 row_bytes;
  int left, left_of_pass, blocks = TILE_BLOCKS;  // stages to copy, and blocks of rows of each
  int left_at_short;                             // stages that are left where short tiles begin
  const uint8* source;

  __device__ __forceinline__ WeightPipeline(const TileScheduler& walk_, const SharedMemory& memory)
      : scheduler(walk_),
        pipeline(memory.pipelines + walk_.warp * WarpPipeline::BYTES,
                 memory.barriers + walk_.warp * WarpPipeline::BARRIER_BYTES),
        row_bytes(walk_.p.padded_k / BLOCK_K * BLOCK_BYTES),
        left(walk_.passes() * walk_.stages),
        left_of_pass(walk_.stages),
        left_at_short(walk_.passes() == walk_.p.passes ? walk_.stages : -1) {
    go_to(scheduler.tile(0));
    fill(0);
  }

  // Starts the copies of the stages after the first: once x is here, so that the first ones of all
  // warps go before them, and no warp waits behind what others need later (H200, m = 1, us: 4 bits,
  // 4096 x 4096 4.41 -> 4.14, 4096 x 14336 10.26 -> 9.60, 8 bits 6.85 -> 6.07, 17.67 -> 16.38).
  __device__ __forceinline__ void start_others() {
#pragma unroll
    for (int stage = 1; stage < STAGES; stage++) fill(stage);
  }

  __device__ __forceinline__ void go_to(const Tile& tile) {
    if (HAS_SHORT) blocks = tile.blocks;
    source = scheduler.p.packed +
             static_cast<uint64>(tile.start + scheduler.group() * tile.blocks) * row_bytes +
             static_cast<uint32>(scheduler.first) * K_BLOCKS * BLOCK_BYTES;
  }

  __device__ __forceinline__ void fill(int stage) {
    pipeline.fill<K_BLOCKS * BLOCK_BYTES>(stage, source, row_bytes,
                                          HAS_SHORT ? blocks : TILE_BLOCKS, left > 0);
    left--;
    source += scheduler.step * K_BLOCKS * BLOCK_BYTES;
    if (--left_of_pass == 0) {
      left_of_pass = scheduler.stages;
      source += static_cast<uint64>(scheduler.units) * N_GROUPS * TILE_BLOCKS * row_bytes -
                static_cast<uint64>(scheduler.stages) * scheduler.step * K_BLOCKS * BLOCK_BYTES;
      // Only the last pass has short tiles.
      if (HAS_SHORT && left == left_at_short) go_to(scheduler.tile(scheduler.p.passes - 1));
    }
  }

  // Ends the reading of the current stage, and goes on to the next.
  __device__ __forceinline__ void next() {
    pipeline.release();
    fill(pipeline.stage);
    pipeline.advance();
  }
};

// Adds up the partial sums of a pass that the warps have stored, and writes y.
__device__ __forceinline__ void finish_pass(const TileScheduler& scheduler,
                                            const SharedMemory& memory, int pass, int thread) {
  const Params& p = scheduler.p;
  const Tile tile = scheduler.tile(pass);
  const int tile_values = TILE_N * p.stored_m;
  const float* const buffer = memory.buffer(p, pass);
  __syncthreads();
  const auto finish = [&](int index, float value) {
    const int of_group = index % GROUP_N, group = index % TILE_N / GROUP_N;
    const int row = (tile.start + group * tile.blocks) * BLOCK_N + of_group;
    const int column = index / TILE_N;
    if (of_group < tile.blocks * BLOCK_N && row < p.n && column < p.m) {
      if (p.bias != nullptr) value += to_float(p.bias[row]);
      p.y[static_cast<uint64>(column) * p.n + row] = from_floats(value, 0.f) & 0xFFFFu;
    }
  };
  float* const dsmem_buffer = memory.dsmem_buffers + pass % 2 * tile_values;  // [split, share]
  const uint32 barrier = memory.dsmem_barriers + 8 * (pass % 2);
  const int share = 1 << p.log_share;
  if (scheduler.split > 1 && thread == 0) expect_dsmem(barrier, 4 * tile_values);
  for (int i = thread; i < tile_values; i += THREADS) {
    const int row = i % TILE_N, column = i / TILE_N;
    float value = 0.f;
#pragma unroll
    for (int w = 0; w < GROUP_WARPS; w++)
      value += buffer[((w * N_GROUPS + row / GROUP_N) * p.stored_m + column) * SUM_STRIDE +
                      row % GROUP_N];
    if (scheduler.split == 1)
      finish(i, value);
    else
      dsmem_send(dsmem_buffer + scheduler.rank * share + (i & (share - 1)), barrier,
                 i >> p.log_share, value);
  }
  if (scheduler.split > 1 && thread < share) {
    wait_barrier(barrier, pass / 2 % 2);
    for (int i = thread; i < share; i += THREADS) {
      float value = 0.f;
      for (int from = 0; from < scheduler.split; from++) value += dsmem_buffer[from * share + i];
      finish(scheduler.rank * share + i, value);
    }
  }
  if (p.sum_buffers == 1) __syncthreads();  // the buffer is free for the next tile
}

// Calls `take(Constant<blocks of 32 rows that a warp has of the tile>(), pass)` for each pass, and
// finishes it.
template <class Take>
__device__ __forceinline__ void run_passes(const TileScheduler& scheduler,
                                           const SharedMemory& memory, int thread,
                                           const Take& take) {
  const int passes = scheduler.passes();
  for (int pass = 0; pass < passes; pass++) {
    if (scheduler.is_whole(pass))
      take(Constant<TILE_BLOCKS>(), pass);
    else
      take(Constant<SHORT_BLOCKS>(), pass);
    finish_pass(scheduler, memory, pass, thread);
  }
}
