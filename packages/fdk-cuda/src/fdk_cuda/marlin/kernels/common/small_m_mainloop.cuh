// Tiles, pipelines and reduction of the kernels for few rows of x.
//
// A thread block computes tiles of TILE_N outputs. Its warps share k, each with its own
// pipeline, and partial sums are added in shared memory at the end of a tile. Thread blocks of a
// cluster share k too and add their sums through distributed shared memory (DSMEM). The order of
// every sum is fixed, so results do not depend on timing. Tiles of the last pass may be shorter, so
// that every SM has work.
//
// Macros, in addition to those of small_m_tile.cuh:
//   SHORT_BLOCKS  blocks of 32 outputs per warp in a short tile; all of them: no tile is short
//   N_GROUPS      groups of warps along n: with 2, neighbouring warps load the same x, the second
//                 from the L1
#pragma once
#include "common/small_m_tile.cuh"

constexpr int TILE_N = GROUP_N * N_GROUPS;
constexpr int GROUP_WARPS = WARPS / N_GROUPS;  // share k of the same outputs
constexpr bool HAS_SHORT = SHORT_BLOCKS < TILE_BLOCKS;
static_assert(0 < SHORT_BLOCKS && SHORT_BLOCKS <= TILE_BLOCKS);
constexpr int DSMEM_BARRIER_BYTES = 16;
static_assert(WARPS % N_GROUPS == 0);

struct Params {
  const uint8* packed;
  const uint16* codebook;
  const uint16* x;
  const uint16* bias;
  uint16* y;
  int n, padded_k, m;
  int stored_m;      // rows of x in partial sums: m, rounded up to what the threads divide evenly
  int n_blocks;      // blocks of 32 outputs
  int passes;        // tiles of the busiest thread block
  int whole_passes;  // passes before those with short tiles
  int rounds;        // stages per tile of the busiest warp
  int log_share;     // logarithm of the values of a tile that a thread block of a cluster finishes
  int sum_buffers;   // 0: partial sums overwrite the pipeline, for thread blocks with a single tile
  uint32 base[STEPS];
  uint32 nibbles;
};

__forceinline__ uint32 cluster_size() {
  uint32 size = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
#endif
  return size;
}

__forceinline__ uint32 cluster_rank() {
  uint32 rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

__forceinline__ uint32 cluster_index() {
  uint32 index = blockIdx.x;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
#endif
  return index;
}

__forceinline__ uint32 cluster_count() {
  uint32 count = gridDim.x;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%nclusterid.x;" : "=r"(count));
#endif
  return count;
}

// Reduction in a cluster. A value is stored into the buffer of another thread block and counted by
// its barrier in one instruction, so neither side needs a fence or a cluster barrier. Two buffers
// take turns, a tile each: one is written again only after its owner has sent its sums of the tile
// in between, hence has read it.
__forceinline__ void dsmem_send(const float* dsmem_buffer, uint32 barrier, uint32 rank,
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

__forceinline__ void open_dsmem_buffers(uint32 barriers, int thread) {
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

// Waits until every thread block of the cluster has initialised its barriers.
__forceinline__ void wait_dsmem_buffers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__forceinline__ void expect_dsmem(uint32 barrier, uint32 bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

// A tile: its first block of 32 outputs, and the blocks of a group of warps.
struct Tile {
  int start, blocks;
};

// Order in which a warp takes tiles, and its stages in each: the first, the distance to the next,
// and their number.
struct TileScheduler {
  const Params& p;
  int cluster, rank;    // size of the cluster, and rank in it
  int worker, workers;  // workers that take tiles: clusters, or single thread blocks
  int warp, first, step, stages;

  __forceinline__ TileScheduler(const Params& params, int warp_)
      : p(params),
        cluster(cluster_size()),
        rank(cluster_rank()),
        worker(cluster_index()),
        workers(cluster_count()),
        warp(warp_) {
    first = rank * GROUP_WARPS + warp / N_GROUPS;
    step = GROUP_WARPS * cluster;
    stages = p.rounds - (first + (p.rounds - 1) * step >= p.padded_k / STAGE_K);
  }

  __forceinline__ int group() const { return warp % N_GROUPS; }

  __forceinline__ bool is_whole(int pass) const { return !HAS_SHORT || pass < p.whole_passes; }

  // Returns the first block of outputs of a pass; past the last one there is no tile.
  __forceinline__ int start(int pass) const {
    if (is_whole(pass)) return (pass * workers + worker) * TILE_BLOCKS * N_GROUPS;
    const int short_tile = (pass - p.whole_passes) * workers + worker;
    return (p.whole_passes * workers * TILE_BLOCKS + short_tile * SHORT_BLOCKS) * N_GROUPS;
  }

  // A short tile that would end past the outputs starts earlier: some are computed twice.
  __forceinline__ Tile tile(int pass) const {
    const int blocks = is_whole(pass) ? TILE_BLOCKS : SHORT_BLOCKS;
    if (!HAS_SHORT) return {start(pass), blocks};
    return {min(start(pass), p.n_blocks - blocks * N_GROUPS), blocks};
  }

  // All workers have a tile in every pass but the last.
  __forceinline__ int passes() const { return p.passes - (start(p.passes - 1) >= p.n_blocks); }
};

// Shared memory of a thread block, from `start` on.
struct SharedMemory {
  uint8 *pipelines, *barriers;
  uint32 dsmem_barriers;
  float* dsmem_buffers;
  float* sums;

  __forceinline__ SharedMemory(uint8* start, const TileScheduler& scheduler)
      : pipelines(start), barriers(start + WARPS * WarpPipeline::BYTES) {
    uint8* const mail = barriers + WARPS * WarpPipeline::BARRIER_BYTES;
    dsmem_barriers = shared_address(mail);
    dsmem_buffers = reinterpret_cast<float*>(mail + DSMEM_BARRIER_BYTES);
    const int tile_values = TILE_N * scheduler.p.stored_m;
    sums = scheduler.p.sum_buffers == 0
               ? reinterpret_cast<float*>(pipelines)
               : dsmem_buffers + (scheduler.cluster > 1 ? 2 * tile_values : 0);
  }

  // Partial sums of a pass :: [WARPS, stored_m, SUM_STRIDE].
  __forceinline__ float* buffer(const Params& p, int pass) const {
    return sums + (p.sum_buffers == 2 ? pass % 2 * (WARPS * SUM_STRIDE * p.stored_m) : 0);
  }
};

// The stages of a warp, copied in the order of use.
struct WeightPipeline {
  const TileScheduler& scheduler;
  WarpPipeline pipeline;
  uint32 row_bytes;
  int left, left_of_pass, blocks = TILE_BLOCKS;  // stages to copy; blocks of outputs in each
  int left_at_short;                             // stages left where short tiles begin
  const uint8* source;

  __forceinline__ WeightPipeline(const TileScheduler& walk_, const SharedMemory& memory)
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

  // Starts the copies of the stages after the first. This waits until x is here, so that the first
  // stages of all warps are copied before (H200, 4096 x 4096, m = 1: 4 bits 4.41 us -> 4.14, 8 bits
  // 6.85 -> 6.07).
  __forceinline__ void start_others() {
#pragma unroll
    for (int stage = 1; stage < STAGES; stage++) fill(stage);
  }

  __forceinline__ void go_to(const Tile& tile) {
    if (HAS_SHORT) blocks = tile.blocks;
    source = scheduler.p.packed +
             static_cast<uint64>(tile.start + scheduler.group() * tile.blocks) * row_bytes +
             static_cast<uint32>(scheduler.first) * K_BLOCKS * BLOCK_BYTES;
  }

  __forceinline__ void fill(int stage) {
    pipeline.fill<K_BLOCKS * BLOCK_BYTES>(stage, source, row_bytes,
                                          HAS_SHORT ? blocks : TILE_BLOCKS, left > 0);
    left--;
    source += scheduler.step * K_BLOCKS * BLOCK_BYTES;
    if (--left_of_pass == 0) {
      left_of_pass = scheduler.stages;
      source += static_cast<uint64>(scheduler.workers) * N_GROUPS * TILE_BLOCKS * row_bytes -
                static_cast<uint64>(scheduler.stages) * scheduler.step * K_BLOCKS * BLOCK_BYTES;
      // Only the last pass has short tiles.
      if (HAS_SHORT && left == left_at_short) go_to(scheduler.tile(scheduler.p.passes - 1));
    }
  }

  // Releases the current stage, refills it, and moves on.
  __forceinline__ void next() {
    pipeline.release();
    fill(pipeline.stage);
    pipeline.advance();
  }
};

// Adds the partial sums that the warps have stored for a pass, and writes y.
__forceinline__ void finish_pass(const TileScheduler& scheduler, const SharedMemory& memory,
                                 int pass, int thread) {
  const Params& p = scheduler.p;
  const Tile tile = scheduler.tile(pass);
  const int tile_values = TILE_N * p.stored_m;
  const float* const buffer = memory.buffer(p, pass);
  __syncthreads();
  const auto finish = [&](int index, float value) {
    const int of_group = index % GROUP_N, group = index % TILE_N / GROUP_N;
    const int n_index = (tile.start + group * tile.blocks) * BLOCK_N + of_group;
    const int m_index = index / TILE_N;
    if (of_group < tile.blocks * BLOCK_N && n_index < p.n && m_index < p.m) {
      if (p.bias != nullptr) value += to_float(p.bias[n_index]);
      p.y[static_cast<uint64>(m_index) * p.n + n_index] = from_floats(value, 0.f) & 0xFFFFu;
    }
  };
  float* const dsmem_buffer = memory.dsmem_buffers + pass % 2 * tile_values;  // [cluster, share]
  const uint32 barrier = memory.dsmem_barriers + 8 * (pass % 2);
  const int share = 1 << p.log_share;
  if (scheduler.cluster > 1 && thread == 0) expect_dsmem(barrier, 4 * tile_values);
  for (int i = thread; i < tile_values; i += THREADS) {
    const int n_index = i % TILE_N, m_index = i / TILE_N;
    float value = 0.f;
#pragma unroll
    for (int w = 0; w < GROUP_WARPS; w++)
      value += buffer[((w * N_GROUPS + n_index / GROUP_N) * p.stored_m + m_index) * SUM_STRIDE +
                      n_index % GROUP_N];
    if (scheduler.cluster == 1)
      finish(i, value);
    else
      dsmem_send(dsmem_buffer + scheduler.rank * share + (i & (share - 1)), barrier,
                 i >> p.log_share, value);
  }
  if (scheduler.cluster > 1 && thread < share) {
    wait_barrier(barrier, pass / 2 % 2);
    for (int i = thread; i < share; i += THREADS) {
      float value = 0.f;
      for (int from = 0; from < scheduler.cluster; from++) value += dsmem_buffer[from * share + i];
      finish(scheduler.rank * share + i, value);
    }
  }
  if (p.sum_buffers == 1) __syncthreads();  // the buffer is free for the next tile
}

// Calls `compute(Constant<blocks of 32 outputs of a warp>(), pass)` for each pass, and finishes it.
template <class Compute>
__forceinline__ void run_passes(const TileScheduler& scheduler, const SharedMemory& memory,
                                int thread, const Compute& compute) {
  const int passes = scheduler.passes();
  for (int pass = 0; pass < passes; pass++) {
    if (scheduler.is_whole(pass))
      compute(Constant<TILE_BLOCKS>(), pass);
    else
      compute(Constant<SHORT_BLOCKS>(), pass);
    finish_pass(scheduler, memory, pass, thread);
  }
}
