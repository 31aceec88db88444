// What the kernels of both directions share on Hopper: the cut of a block's registers, the units of
// work, the ring, the exchange of sums in a cluster.
//
// Included after the kernel's Params, of which it reads steps, n_tiles, m_tiles,
// group_m_tiles, splits, whole_tiles and box_rows; TILE_M, CONSUMERS, K_GROUPS, K_BLOCKS,
// STAGES and CLUSTER are the kernel's. A step fills a stage of the ring: K_BLOCKS times 64 of what
// is summed over. Operand B is x or dy; a tile's rows are 64 rows or columns of the weight to a
// group, its columns are rows of B: box_rows of them, as even as the tiles can share them, for a
// copy would fill the others with zeros. Sums of the others are of whatever lay there.
#pragma once
#include "common/hopper.cuh"
#include "common/tile_scheduler.cuh"

constexpr int GROUP_THREADS = 128;
constexpr int THREADS = (CONSUMERS + 1) * GROUP_THREADS;
constexpr int CONSUMER_THREADS = CONSUMERS * GROUP_THREADS;
constexpr int GROUP_N = 64;
constexpr int N_GROUPS = CONSUMERS / K_GROUPS;
constexpr int TILE_N = N_GROUPS * GROUP_N;
constexpr int B_BLOCK_BYTES = TILE_M * BLOCK_K * 2;
constexpr int B_BYTES = K_BLOCKS * B_BLOCK_BYTES;  // of operand B in a stage
constexpr int OWN_M = TILE_M / CLUSTER;            // of a tile: those that a block finishes
// Columns of a tile that a group writes at a time.
constexpr int PIECE_M = OWN_M % 32 == 0 ? 32 : 16;
// From one of them to the next: entries of 3 bits and more, but 5, fill half of the table's bytes,
// and the other halves have room for a column each.
constexpr bool HAS_ROOM_IN_TABLE = HAS_TABLE && BITS > 2 && BITS != 5 && K_GROUPS == 1;
constexpr int PIECE_STRIDE = HAS_ROOM_IN_TABLE ? 256 : GROUP_N * 2;
constexpr int PIECE_BYTES = PIECE_M * PIECE_STRIDE;
constexpr int ACCUMULATORS = TILE_M / 2;  // of a thread
constexpr int OWN_ACCUMULATORS = ACCUMULATORS / CLUSTER;
// Registers of a thread, after producers have handed theirs over: 64 K to a processor.
constexpr int CONSUMER_REGISTERS = CONSUMERS == 4 ? 112 : CONSUMERS == 3 ? 160 : 232;
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;
// A block has the registers that it starts with and no others: consumers that ask for more than
// producers give back wait for ever (seen with 120 where there are four groups).
static_assert(CONSUMERS * CONSUMER_REGISTERS + PRODUCER_REGISTERS <=
              (CONSUMERS + 1) * (65536 / THREADS / 8 * 8));
constexpr int TABLE_BARRIER = 1, GROUP_BARRIER = 2, PAIR_BARRIER = 6;
// Threads that finish a tile's sums.
constexpr int FINISHING_THREADS = N_GROUPS * GROUP_THREADS;
static_assert(CONSUMERS >= 2 && CONSUMERS <= 4);
static_assert(K_GROUPS == 1 || (K_GROUPS == 2 && CONSUMERS == 4 && K_BLOCKS == 2));
static_assert(TILE_M % 16 == 0 && TILE_M <= 256);
static_assert(B_BLOCK_BYTES % 1024 == 0, "operand B is swizzled in groups of 1024 bytes");
static_assert(K_BLOCKS == 1 || K_BLOCKS == 2);
static_assert(CLUSTER == 1 || CLUSTER == 2);
static_assert(OWN_M % 16 == 0);
static_assert((CLUSTER - 1) * OWN_ACCUMULATORS * 4 * FINISHING_THREADS <= STAGES * B_BYTES,
              "other blocks' sums lie over the stages of operand B");

// A tile and a part of its steps.
struct WorkUnit {
  Tile tile;
  int part;         // among those that split_k_reduce.cu adds; negative for a whole tile
  int first, last;  // steps

  __device__ __forceinline__ WorkUnit(const Params& p, int index)
      : tile(tile_index(p, index), p.n_tiles, p.m_tiles, p.group_m_tiles) {
    part = index - p.whole_tiles;
    const int rank = CLUSTER > 1 ? blockIdx.x % CLUSTER : part < 0 ? 0 : part % p.splits;
    const int parts = CLUSTER > 1 ? CLUSTER : part < 0 ? 1 : p.splits;
    first = p.steps * rank / parts;
    last = p.steps * (rank + 1) / parts;
  }

  __device__ __forceinline__ static int tile_index(const Params& p, int index) {
    const int part = index - p.whole_tiles;
    return part < 0 ? index : p.whole_tiles + part / p.splits;
  }
};

__device__ __forceinline__ int first_work_unit() { return blockIdx.x / CLUSTER; }

__device__ __forceinline__ int work_unit_count(const Params& p) {
  return p.whole_tiles + (p.n_tiles * p.m_tiles - p.whole_tiles) * p.splits;
}

// The stage in use, and the parity of its barriers.
struct PipelineState {
  int stage = 0;
  uint32 phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// A step after another of a block's units.
struct WorkCursor {
  const Params& p;
  int index;
  WorkUnit unit;
  int step;

  __device__ __forceinline__ WorkCursor(const Params& p_)
      : p(p_), index(first_work_unit()), unit(p_, first_work_unit()), step(unit.first) {}

  __device__ __forceinline__ bool any() const { return index < work_unit_count(p); }

  __device__ __forceinline__ void advance() {
    if (++step < unit.last) return;
    index += gridDim.x / CLUSTER;
    if (!any()) return;
    unit = WorkUnit(p, index);
    step = unit.first;
  }
};

// Two barriers a stage: `full` counts the bytes that have landed, `empty` the threads that are done
// (one lane for its warp is no faster, and racecheck then sees hazards in what the others read);
// behind them `mail`, which counts the bytes of the other block's sums.
constexpr uint32 DSMEM_BARRIER = 16 * STAGES;
__device__ __forceinline__ void open_pipeline(uint32 barriers) {
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

// Weights that one tile of columns reads are read once.
__device__ __forceinline__ uint64 weights_policy(const Params& p) {
  uint64 policy;
  if (p.m_tiles == 1)
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  else
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Each block of a cluster gets the others' sums of its own columns, and adds them to its own: those
// are the first OWN_ACCUMULATORS of d then.
__device__ __forceinline__ void cluster_reduce(float (&d)[ACCUMULATORS], uint32 dsmem_buffers,
                                               uint32 barriers, int thread) {
  constexpr int PIECES = OWN_ACCUMULATORS / 4;
  const int rank = blockIdx.x % CLUSTER;
  // Every block has read its last stage, and has opened its barriers.
  sync_cluster();
  uint32 targets[CLUSTER], mail[CLUSTER];
#pragma unroll
  for (int to = 0; to < CLUSTER; to++) {
    const int sender = rank < to ? rank : rank - 1;
    targets[to] = in_block(dsmem_buffers + (sender * PIECES * FINISHING_THREADS + thread) * 16, to);
    mail[to] = in_block(barriers + DSMEM_BARRIER, to);
  }
  // Piece by piece and in place: a second array of sums would not fit in the registers.
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    float v[CLUSTER][4];
#pragma unroll
    for (int to = 0; to < CLUSTER; to++) {
#pragma unroll
      for (int e = 0; e < 4; e++) v[to][e] = d[to * OWN_ACCUMULATORS + 4 * i + e];
      if (to != rank) store_remote(targets[to] + i * FINISHING_THREADS * 16, v[to], mail[to]);
    }
#pragma unroll
    for (int to = 0; to < CLUSTER; to++)
#pragma unroll
      for (int e = 0; e < 4; e++) d[4 * i + e] = to == 0 || to == rank ? v[to][e] : d[4 * i + e];
  }
  wait_dsmem(barriers + DSMEM_BARRIER);
#pragma unroll
  for (int sender = 0; sender < CLUSTER - 1; sender++)
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      const float4 v =
          load_shared(dsmem_buffers + ((sender * PIECES + i) * FINISHING_THREADS + thread) * 16);
      d[4 * i] += v.x;
      d[4 * i + 1] += v.y;
      d[4 * i + 2] += v.z;
      d[4 * i + 3] += v.w;
    }
}

// Two groups that took halves of a stage's columns: the first gets the sums of both, a piece of
// columns at a time, through the memory of both groups' pieces.
__device__ __forceinline__ void reduce_k_groups(float (&d)[ACCUMULATORS], uint32 dsmem_buffer,
                                                int thread, int barrier, bool gets) {
  constexpr int SUMS_AT_ONCE = PIECE_M / 2;
#pragma unroll
  for (int first = 0; first < ACCUMULATORS; first += SUMS_AT_ONCE) {
    sync_named(barrier, 2 * GROUP_THREADS);  // the last piece, or row of y, has been read
    if (!gets)
#pragma unroll
      for (int i = 0; i < SUMS_AT_ONCE; i += 4)
        store_shared(dsmem_buffer + (i / 4 * GROUP_THREADS + thread) * 16, &d[first + i]);
    sync_named(barrier, 2 * GROUP_THREADS);
    if (gets)
#pragma unroll
      for (int i = 0; i < SUMS_AT_ONCE; i += 4) {
        const float4 v = load_shared(dsmem_buffer + (i / 4 * GROUP_THREADS + thread) * 16);
        d[first + i] += v.x;
        d[first + i + 1] += v.y;
        d[first + i + 2] += v.z;
        d[first + i + 3] += v.w;
      }
  }
}

// Where a thread's sums belong.
struct OutputPlace {
  int warp, lane, thread;  // of the group
  int first_row, first_column;
  int end_column;  // behind the last that the tile has: its columns are not all used

  __device__ __forceinline__ OutputPlace(const Params& p, const Tile& tile, int n_group, int warp_,
                                         int lane_, int thread_)
      : warp(warp_),
        lane(lane_),
        thread(thread_),
        first_row(tile.row * TILE_N + n_group * GROUP_N),
        first_column(tile.column * p.box_rows + static_cast<int>(blockIdx.x) % CLUSTER * OWN_M),
        end_column(min(p.m, (tile.column + 1) * p.box_rows)) {}
};
