// What the kernels for few rows of x share: tiles and how blocks, warps and clusters take them, the
// copies of a warp's stages, and partial sums.
//
// A block of threads takes tiles of TILE_ROWS rows; its warps share the columns, each with a ring
// of stages of its own, and their partial sums meet in shared memory at the end of a tile. Blocks
// of a cluster share the columns of a tile too; their sums meet in distributed shared memory. Every
// sum has one order: results do not depend on timing. What is left for the last pass may be cut
// into shorter tiles, so that every processor has some of it.
//
// Beside common.cuh's, an instantiation has
//   TILE_FRAGMENTS  2, 4 or 8: fragments of 16 rows that a warp takes
//   SHORT_BLOCKS    blocks of 32 rows that it takes of a short tile; all of them: there are none
//   K_BLOCKS        blocks of 64 columns in a stage; 2 halve what one costs by itself
//   ROW_GROUPS      groups of warps, one below the other: with 2, two warps that run side by side
//                   load the same x, and the second finds it in the L1
//   WARPS           of a block
#pragma once
#include "common.cuh"
#include "ring.cuh"

constexpr int STAGES = 2;  // 3 is slower: 8192 x 8192, m = 1: 11.3 us -> 10.5 us with 2
constexpr int GROUP_ROWS = 16 * TILE_FRAGMENTS;  // of a warp
constexpr int TILE_ROWS = GROUP_ROWS * ROW_GROUPS;
constexpr int GROUP_WARPS = WARPS / ROW_GROUPS;  // share the columns of the same rows
constexpr int TILE_BLOCKS = TILE_FRAGMENTS / FRAGMENTS;
constexpr bool HAS_SHORT = SHORT_BLOCKS < TILE_BLOCKS;
static_assert(0 < SHORT_BLOCKS && SHORT_BLOCKS <= TILE_BLOCKS);
constexpr int STAGE_BLOCKS = TILE_BLOCKS * K_BLOCKS;
constexpr int STAGE_COLUMNS = K_BLOCKS * BLOCK_COLUMNS;
constexpr int STAGE_BYTES = STAGE_BLOCKS * BLOCK_BYTES;
constexpr int THREADS = WARPS * LANES;
constexpr int MAIL_BARRIER_BYTES = 16;
constexpr int SUM_STRIDE = GROUP_ROWS + 4;  // floats between columns of partial sums: spreads banks
static_assert(TILE_FRAGMENTS == 2 || TILE_FRAGMENTS == 4 || TILE_FRAGMENTS == 8);
static_assert(WARPS % ROW_GROUPS == 0);

struct Params {
  const uint8* packed;
  const uint16* codebook;
  const uint16* x;
  const uint16* bias;
  uint16* y;
  int n, columns, m;
  int stored_columns;  // of partial sums: m, rounded up to what the threads divide evenly
  int row_blocks;      // blocks of 32 rows of the weight
  int passes;          // tiles that the busiest block takes
  int whole_passes;    // of them, the first ones, whose tiles are not short
  int rounds;          // stages of a tile that the busiest warp takes
  int log_share;       // of the values of a tile that a block of a cluster finishes
  int sum_buffers;     // 0: partial sums lie over the ring, for blocks that take a single tile
  uint32 base[STEPS];
  uint32 nibbles;
};

using Ring_ = Ring<STAGES, STAGE_BYTES>;

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

// Blocks of a cluster exchange partial sums through mailboxes in shared memory: a value is stored
// in another block's mailbox and counted by its barrier in one go, so neither side needs a fence or
// a barrier over the cluster for it. Two mailboxes take turns, a tile each; one is written again
// only after its block has sent its own sums of the tile between, and so has read it.
__device__ __forceinline__ void send(const float* mailbox, uint32 barrier, uint32 rank,
                                     float value) {
#if __CUDA_ARCH__ >= 900
  uint32 remote, remote_barrier;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(remote)
      : "r"(shared_address(mailbox)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote_barrier) : "r"(barrier), "r"(rank));
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(remote),
      "f"(value), "r"(remote_barrier)
      : "memory");
#endif
}

__device__ __forceinline__ void open_mailboxes(uint32 barriers, int thread) {
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
__device__ __forceinline__ void wait_mailboxes() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void expect_mail(uint32 barrier, uint32 bytes) {
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
struct Walk {
  const Params& p;
  int split, rank;  // of the cluster
  int unit, units;  // that take tiles: clusters, or blocks by themselves
  int warp, first, step, stages;

  __device__ __forceinline__ Walk(const Params& params, int warp_)
      : p(params),
        split(cluster_size()),
        rank(cluster_rank()),
        unit(cluster_index()),
        units(cluster_count()),
        warp(warp_) {
    first = rank * GROUP_WARPS + warp / ROW_GROUPS;
    step = GROUP_WARPS * split;
    stages = p.rounds - (first + (p.rounds - 1) * step >= p.columns / STAGE_COLUMNS);
  }

  __device__ __forceinline__ int group() const { return warp % ROW_GROUPS; }

  __device__ __forceinline__ bool is_whole(int pass) const {
    return !HAS_SHORT || pass < p.whole_passes;
  }

  // Where the tile of a pass starts, in blocks of rows; there is none where that is past the last.
  __device__ __forceinline__ int start(int pass) const {
    if (is_whole(pass)) return (pass * units + unit) * TILE_BLOCKS * ROW_GROUPS;
    const int short_tile = (pass - p.whole_passes) * units + unit;
    return (p.whole_passes * units * TILE_BLOCKS + short_tile * SHORT_BLOCKS) * ROW_GROUPS;
  }

  // A short tile that would end past the rows starts as much earlier: some rows are taken twice.
  __device__ __forceinline__ Tile tile(int pass) const {
    const int blocks = is_whole(pass) ? TILE_BLOCKS : SHORT_BLOCKS;
    if (!HAS_SHORT) return {start(pass), blocks};
    return {min(start(pass), p.row_blocks - blocks * ROW_GROUPS), blocks};
  }

  // All units have a tile in all passes but the last.
  __device__ __forceinline__ int passes() const {
    return p.passes - (start(p.passes - 1) >= p.row_blocks);
  }
};

// A block's shared memory, from `start` on.
struct Memory {
  uint8 *rings, *barriers;
  uint32 mail_barriers;
  float* mailboxes;
  float* sums;

  __device__ __forceinline__ Memory(uint8* start, const Walk& walk)
      : rings(start), barriers(start + WARPS * Ring_::BYTES) {
    uint8* const mail = barriers + WARPS * Ring_::BARRIER_BYTES;
    mail_barriers = shared_address(mail);
    mailboxes = reinterpret_cast<float*>(mail + MAIL_BARRIER_BYTES);
    const int tile_values = TILE_ROWS * walk.p.stored_columns;
    sums = walk.p.sum_buffers == 0 ? reinterpret_cast<float*>(rings)
                                   : mailboxes + (walk.split > 1 ? 2 * tile_values : 0);
  }

  // [WARPS, stored columns, SUM_STRIDE], for a pass.
  __device__ __forceinline__ float* buffer(const Params& p, int pass) const {
    return sums + (p.sum_buffers == 2 ? pass % 2 * (WARPS * SUM_STRIDE * p.stored_columns) : 0);
  }
};

// The stages of a warp, copied in the order in which it takes them.
struct Copies {
  const Walk& walk;
  Ring_ ring;
  uint32 row_bytes;
  int left, left_of_pass, blocks = TILE_BLOCKS;  // stages to copy, and blocks of rows of each
  int left_at_short;                             // stages that are left where short tiles begin
  const uint8* source;

  __device__ __forceinline__ Copies(const Walk& walk_, const Memory& memory)
      : walk(walk_),
        ring(memory.rings + walk_.warp * Ring_::BYTES,
             memory.barriers + walk_.warp * Ring_::BARRIER_BYTES),
        row_bytes(walk_.p.columns / BLOCK_COLUMNS * BLOCK_BYTES),
        left(walk_.passes() * walk_.stages),
        left_of_pass(walk_.stages),
        left_at_short(walk_.passes() == walk_.p.passes ? walk_.stages : -1) {
    go_to(walk.tile(0));
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
    source = walk.p.packed +
             static_cast<uint64>(tile.start + walk.group() * tile.blocks) * row_bytes +
             static_cast<uint32>(walk.first) * K_BLOCKS * BLOCK_BYTES;
  }

  __device__ __forceinline__ void fill(int stage) {
    ring.fill<K_BLOCKS * BLOCK_BYTES>(stage, source, row_bytes, HAS_SHORT ? blocks : TILE_BLOCKS,
                                      left > 0);
    left--;
    source += walk.step * K_BLOCKS * BLOCK_BYTES;
    if (--left_of_pass == 0) {
      left_of_pass = walk.stages;
      source += static_cast<uint64>(walk.units) * ROW_GROUPS * TILE_BLOCKS * row_bytes -
                static_cast<uint64>(walk.stages) * walk.step * K_BLOCKS * BLOCK_BYTES;
      // Only the last pass has short tiles.
      if (HAS_SHORT && left == left_at_short) go_to(walk.tile(walk.p.passes - 1));
    }
  }

  // Ends the reading of the current stage, and goes on to the next.
  __device__ __forceinline__ void next() {
    ring.release();
    fill(ring.stage);
    ring.advance();
  }
};

// Adds up the partial sums of a pass that the warps have stored, and writes y.
__device__ __forceinline__ void finish_pass(const Walk& walk, const Memory& memory, int pass,
                                            int thread) {
  const Params& p = walk.p;
  const Tile tile = walk.tile(pass);
  const int tile_values = TILE_ROWS * p.stored_columns;
  const float* const buffer = memory.buffer(p, pass);
  __syncthreads();
  const auto finish = [&](int index, float value) {
    const int of_group = index % GROUP_ROWS, group = index % TILE_ROWS / GROUP_ROWS;
    const int row = (tile.start + group * tile.blocks) * BLOCK_ROWS + of_group;
    const int column = index / TILE_ROWS;
    if (of_group < tile.blocks * BLOCK_ROWS && row < p.n && column < p.m) {
      if (p.bias != nullptr) value += to_float(p.bias[row]);
      p.y[static_cast<uint64>(column) * p.n + row] = from_floats(value, 0.f) & 0xFFFFu;
    }
  };
  float* const mailbox = memory.mailboxes + pass % 2 * tile_values;  // [split, share]
  const uint32 barrier = memory.mail_barriers + 8 * (pass % 2);
  const int share = 1 << p.log_share;
  if (walk.split > 1 && thread == 0) expect_mail(barrier, 4 * tile_values);
  for (int i = thread; i < tile_values; i += THREADS) {
    const int row = i % TILE_ROWS, column = i / TILE_ROWS;
    float value = 0.f;
#pragma unroll
    for (int w = 0; w < GROUP_WARPS; w++)
      value +=
          buffer[((w * ROW_GROUPS + row / GROUP_ROWS) * p.stored_columns + column) * SUM_STRIDE +
                 row % GROUP_ROWS];
    if (walk.split == 1)
      finish(i, value);
    else
      send(mailbox + walk.rank * share + (i & (share - 1)), barrier, i >> p.log_share, value);
  }
  if (walk.split > 1 && thread < share) {
    wait_barrier(barrier, pass / 2 % 2);
    for (int i = thread; i < share; i += THREADS) {
      float value = 0.f;
      for (int from = 0; from < walk.split; from++) value += mailbox[from * share + i];
      finish(walk.rank * share + i, value);
    }
  }
  if (p.sum_buffers == 1) __syncthreads();  // the buffer is free for the next tile
}

// Calls `take(Constant<blocks of 32 rows that a warp has of the tile>(), pass)` for each pass, and
// finishes it.
template <class Take>
__device__ __forceinline__ void take_passes(const Walk& walk, const Memory& memory, int thread,
                                            const Take& take) {
  const int passes = walk.passes();
  for (int pass = 0; pass < passes; pass++) {
    if (walk.is_whole(pass))
      take(Constant<TILE_BLOCKS>(), pass);
    else
      take(Constant<SHORT_BLOCKS>(), pass);
    finish_pass(walk, memory, pass, thread);
  }
}
