// dx = dy @ W_hat for many rows of dy, on Hopper's wgmma, from the bytes that the forward takes.
//
// dy       :: [m, n, dtype]                     by tensor copies: any m, any n
// packed   :: [rows / 32, columns / 64, BLOCK_BYTES, uint8]
// codebook :: [2^BITS, dtype]
// dx       :: [m, k, dtype]
// sums     :: [tiles, splits, TILE_COLUMNS, TILE_ROWS, float32]   for sum_splits.cu
//
// hopper_gemm.cu turned round: rows of a tile are columns of the weight, 64 to a group of
// consumers, and a step takes 64 rows of the weight, which are what is summed over. The ring, the
// units of work, clusters and parts are as there; decoding is hopper_transposed.cuh's.
//
// Beside common.cuh's, an instantiation has
//   TILE_COLUMNS  rows of dy in a tile, a multiple of 16 up to 256
//   STAGES        of the ring
//   CLUSTER       blocks of a cluster: 1 or 2
#include "hopper.cuh"
#include "hopper_tiles.cuh"
#include "hopper_transposed.cuh"
#include "wgmma.cuh"

constexpr int CONSUMERS = 2;
constexpr int GROUP_THREADS = 128;
constexpr int THREADS = (CONSUMERS + 1) * GROUP_THREADS;
constexpr int CONSUMER_THREADS = CONSUMERS * GROUP_THREADS;
constexpr int GROUP_ROWS = BLOCK_COLUMNS;
constexpr int TILE_ROWS = CONSUMERS * GROUP_ROWS;
constexpr int STEP_ROWS = 64;  // of the weight
constexpr int STEP_BLOCKS = STEP_ROWS / BLOCK_ROWS;
constexpr int DY_BYTES = TILE_COLUMNS * STEP_ROWS * 2;
constexpr int W_PART_BYTES = CONSUMERS * BLOCK_BYTES;  // neighbours along k
constexpr int W_BYTES = STEP_BLOCKS * W_PART_BYTES;
constexpr int OWN_COLUMNS = TILE_COLUMNS / CLUSTER;  // of a tile: those that a block finishes
// Rows of dx that a group writes at a time.
constexpr int PIECE_COLUMNS = OWN_COLUMNS % 32 == 0 ? 32 : 16;
constexpr int PIECE_BYTES = PIECE_COLUMNS * GROUP_ROWS * 2;
constexpr int SUMS = TILE_COLUMNS / 2;  // of a thread
constexpr int OWN_SUMS = SUMS / CLUSTER;
// Registers of a thread, after producers have handed theirs over: 64 K to a processor.
constexpr int CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;
constexpr int TABLE_BARRIER = 1, GROUP_BARRIER = 2;
static_assert(STEP_BLOCKS * FRAGMENTS == STEPS);
static_assert(TILE_COLUMNS % 16 == 0 && TILE_COLUMNS <= 256);
static_assert(CLUSTER == 1 || CLUSTER == 2);
static_assert(OWN_COLUMNS % 16 == 0);
static_assert((CLUSTER - 1) * OWN_SUMS * 4 * CONSUMER_THREADS <= STAGES * DY_BYTES,
              "other blocks' sums lie over the stages of dy");

struct Params {
  TensorMap dy;
  const uint8* packed;
  const uint16* codebook;
  uint16* dx;
  float* sums;
  int k, m;
  int steps;          // of STEP_ROWS rows of the weight
  int column_blocks;  // of 64 columns
  int row_tiles, column_tiles;
  int group_tiles;  // see hopper_tiles.cuh
  int splits;       // of the steps, of all but whole_tiles
  int whole_tiles;
};

// A tile and a part of its steps.
struct Unit {
  Tile tile;
  int part;         // among those that sum_splits.cu adds; negative for a whole tile
  int first, last;  // steps

  __device__ __forceinline__ Unit(const Params& p, int index)
      : tile(tile_index(p, index), p.row_tiles, p.column_tiles, p.group_tiles) {
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

__device__ __forceinline__ int first_unit() { return blockIdx.x / CLUSTER; }

__device__ __forceinline__ int unit_count(const Params& p) {
  return p.whole_tiles + (p.row_tiles * p.column_tiles - p.whole_tiles) * p.splits;
}

// The stage in use, and the parity of its barriers.
struct Position {
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
struct Cursor {
  const Params& p;
  int index;
  Unit unit;
  int step;

  __device__ __forceinline__ Cursor(const Params& p_)
      : p(p_), index(first_unit()), unit(p_, first_unit()), step(unit.first) {}

  __device__ __forceinline__ bool any() const { return index < unit_count(p); }

  __device__ __forceinline__ void advance() {
    if (++step < unit.last) return;
    index += gridDim.x / CLUSTER;
    if (!any()) return;
    unit = Unit(p, index);
    step = unit.first;
  }
};

// One thread: copies are issued one after another whoever does it.
__device__ __forceinline__ void produce(const Params& p, uint32 dy_stages, uint32 w_stages,
                                        uint32 barriers) {
  uint64 policy;
  // Weights that one tile of columns reads are read once.
  if (p.column_tiles == 1)
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  else
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  const uint64 row_bytes = static_cast<uint64>(p.column_blocks) * BLOCK_BYTES;
  auto copy_weights = [&](const Cursor& at, int stage) {
    const uint32 full = barriers + 16 * stage, target = w_stages + stage * W_BYTES;
    expect_bytes(full, DY_BYTES + W_BYTES);
    const uint8* source =
        p.packed + at.step * STEP_BLOCKS * row_bytes + at.unit.tile.row * W_PART_BYTES;
#pragma unroll
    for (int block = 0; block < STEP_BLOCKS; block++)
      copy_bulk(target + block * W_PART_BYTES, source + block * row_bytes, W_PART_BYTES, full,
                policy);
  };
  auto copy_dy = [&](const Cursor& at, int stage) {
    copy_box(dy_stages + stage * DY_BYTES, p.dy, at.step * STEP_ROWS,
             at.unit.tile.column * TILE_COLUMNS, barriers + 16 * stage);
  };
  // The ring is filled with weights before the previous kernel has ended, with dy after it.
  Cursor ahead(p), cursor(p);
  int filled = 0;
  for (; filled < STAGES && ahead.any(); filled++, ahead.advance()) copy_weights(ahead, filled);
  wait_previous_kernel();
  for (int stage = 0; stage < filled; stage++, cursor.advance()) copy_dy(cursor, stage);
  Position position;
  for (; ahead.any(); ahead.advance(), position.advance()) {
    wait_barrier(barriers + 16 * position.stage + 8, position.phase);
    copy_weights(ahead, position.stage);
    copy_dy(ahead, position.stage);
  }
}

// Each block of a cluster gets the other's sums of its own columns, and adds them to its own: those
// are the first OWN_SUMS of d then.
__device__ __forceinline__ void exchange(float (&d)[SUMS], uint32 mailboxes, int thread) {
  constexpr int PIECES = OWN_SUMS / 4;
  const int rank = blockIdx.x % CLUSTER;
  sync_cluster();  // every block has read its last stage
  uint32 targets[CLUSTER];
#pragma unroll
  for (int to = 0; to < CLUSTER; to++) {
    const int sender = rank < to ? rank : rank - 1;
    targets[to] = in_block(mailboxes + (sender * PIECES * CONSUMER_THREADS + thread) * 16, to);
  }
  // Piece by piece and in place: a second array of sums would not fit in the registers.
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    float v[CLUSTER][4];
#pragma unroll
    for (int to = 0; to < CLUSTER; to++) {
#pragma unroll
      for (int e = 0; e < 4; e++) v[to][e] = d[to * OWN_SUMS + 4 * i + e];
      if (to != rank) store_remote(targets[to] + i * CONSUMER_THREADS * 16, v[to]);
    }
#pragma unroll
    for (int to = 0; to < CLUSTER; to++)
#pragma unroll
      for (int e = 0; e < 4; e++) d[4 * i + e] = to == 0 || to == rank ? v[to][e] : d[4 * i + e];
  }
  sync_cluster();
#pragma unroll
  for (int sender = 0; sender < CLUSTER - 1; sender++)
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      const float4 v =
          load_shared(mailboxes + ((sender * PIECES + i) * CONSUMER_THREADS + thread) * 16);
      d[4 * i] += v.x;
      d[4 * i + 1] += v.y;
      d[4 * i + 2] += v.z;
      d[4 * i + 3] += v.w;
    }
}

// Sums of a group for one tile: value e of block b belongs to column 16 * warp + 2 * g + (e >> 1)
// of the weight, of the group's 64, and to row 8 * b + 2 * t + (e & 1) of dx.
struct Place {
  int warp, lane, thread;  // of the group
  int first_row, first_column;
};

__device__ __forceinline__ void store_part(float* sums, const float (&d)[SUMS], int group, int warp,
                                           int lane) {
  sums += 2 * (lane % 4) * TILE_ROWS + GROUP_ROWS * group + 16 * warp + 2 * (lane / 4);
#pragma unroll
  for (int i = 0; i < SUMS; i += 4)
#pragma unroll
    for (int e = 0; e < 2; e++)
      *reinterpret_cast<float2*>(sums + (2 * i + e) * TILE_ROWS) =
          make_float2(d[i + e], d[i + 2 + e]);
}

// Through shared memory, so that rows of dx are written in runs of 128 bytes.
__device__ __forceinline__ void store(const Params& p, const float (&d)[SUMS], const Place& at,
                                      uint8* piece, int barrier) {
  const int g = at.lane / 4, t = at.lane % 4;
  const bool whole = p.k % 8 == 0;
#pragma unroll
  for (int first = 0; first < OWN_COLUMNS; first += PIECE_COLUMNS) {
#pragma unroll
    for (int c = 0; c < PIECE_COLUMNS; c += 8)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int sum = (first + c) / 2 + e;
        const int column = c + 2 * t + e, chunk = 2 * at.warp + g / 4;
        *reinterpret_cast<uint32*>(piece + column * 128 + ((chunk ^ (2 * t + e)) << 4) +
                                   4 * (g % 4)) = from_floats(d[sum], d[sum + 2]);
      }
    sync_named(barrier, GROUP_THREADS);
#pragma unroll
    for (int c = 0; c < PIECE_COLUMNS; c += GROUP_THREADS / 8) {
      const int column = c + at.thread / 8, chunk = at.thread % 8;
      const uint4 v =
          *reinterpret_cast<const uint4*>(piece + column * 128 + ((chunk ^ column % 8) << 4));
      const int dx_row = at.first_column + first + column, dx_column = at.first_row + 8 * chunk;
      uint16* out = p.dx + static_cast<uint64>(dx_row) * p.k + dx_column;
      if (dx_row < p.m && whole && dx_column < p.k) {
        *reinterpret_cast<uint4*>(out) = v;
      } else if (dx_row < p.m) {
        const uint32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 8; i++)
          if (dx_column + i < p.k) out[i] = words[i / 2] >> (16 * (i % 2));
      }
    }
    sync_named(barrier, GROUP_THREADS);
  }
}

__device__ __forceinline__ void consume(const Params& p, uint8* table, uint32 dy_stages,
                                        const uint8* w_stages, uint8* pieces, uint32 barriers) {
  const int thread = threadIdx.x, lane = thread % LANES;
  const int group = __shfl_sync(~0u, thread / GROUP_THREADS, 0);
  const int warp = __shfl_sync(~0u, thread / LANES % 4, 0);
  const Codebook codebook(p.codebook, lane);
  if (HAS_TABLE) {
    build_table<CONSUMER_THREADS>(table, codebook, thread);
    sync_named(TABLE_BARRIER, CONSUMER_THREADS);
  }
  const TransposedDecoder decoder(table, codebook, warp, lane);
  w_stages += group * BLOCK_BYTES;
  wait_previous_kernel();

  Position position;
  int held = -1;  // the stage that unfinished wgmmas read last
  float d[SUMS];
  auto release = [&] {
    if (held >= 0 && lane == 0) arrive(barriers + 16 * held + 8);
  };
  auto step = [&](uint32(&a)[STEPS][REGISTERS]) {
    wait_barrier(barriers + 16 * position.stage, position.phase);
#pragma unroll
    for (int block = 0; block < STEP_BLOCKS; block++)
      decoder.decode(a, block * FRAGMENTS,
                     w_stages + position.stage * W_BYTES + block * W_PART_BYTES);
    const uint64 b = operand_b(dy_stages + position.stage * DY_BYTES);
    touch(d);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < STEPS; s++) wgmma(d, a[s], b + s * OPERAND_B_STEP);
    wgmma_commit();
    wgmma_wait<1>();  // those of the step before are done
    release();
    held = position.stage;
    position.advance();
  };
  for (int index = first_unit(); index < unit_count(p); index += gridDim.x / CLUSTER) {
    const Unit unit(p, index);
#pragma unroll
    for (int i = 0; i < SUMS; i++) d[i] = 0.f;
    // wgmmas in flight read one set of registers while the other is decoded to.
    uint32 a[2][STEPS][REGISTERS];
    int i = unit.first;
    for (; i + 1 < unit.last; i += 2) {
      step(a[0]);
      step(a[1]);
    }
    if (i < unit.last) step(a[0]);
    wgmma_wait<0>();
    touch(d);
    release();
    held = -1;
    const Place at{
        warp, lane, thread % GROUP_THREADS, unit.tile.row * TILE_ROWS + group * GROUP_ROWS,
        unit.tile.column * TILE_COLUMNS + static_cast<int>(blockIdx.x) % CLUSTER * OWN_COLUMNS};
    if (CLUSTER > 1) exchange(d, dy_stages, thread);
    if (CLUSTER == 1 && unit.part >= 0)
      store_part(p.sums + static_cast<uint64>(unit.part) * TILE_COLUMNS * TILE_ROWS, d, group, warp,
                 lane);
    else
      store(p, d, at, pieces + group * PIECE_BYTES, GROUP_BARRIER + group);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    hopper_backward(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8 shared[];
  uint8* const table = shared;
  uint8* const dy_stages = table + (HAS_TABLE ? TABLE_BYTES : 0);
  uint8* const w_stages = dy_stages + STAGES * DY_BYTES;
  uint8* const pieces = w_stages + STAGES * W_BYTES;
  const uint32 barriers = shared_address(pieces + CONSUMERS * PIECE_BYTES);

  start_next_kernel();
  // Two barriers a stage: `full` counts the bytes that have landed, `empty` the warps that are
  // done.
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; stage++) {
      open_barrier(barriers + 16 * stage, 1);
      open_barrier(barriers + 16 * stage + 8, 4 * CONSUMERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= CONSUMER_THREADS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (threadIdx.x < CONSUMER_THREADS + LANES && elect_one())
      produce(p, shared_address(dy_stages), shared_address(w_stages), barriers);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    consume(p, table, shared_address(dy_stages), w_stages, pieces, barriers);
  }
}
