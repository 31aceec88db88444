// y = x @ W_hat.T + bias for a few rows of x, at the rate at which the weights can be read.
//
// x        :: [m, columns, dtype]                 m <= 8 * COLUMN_TILES
// packed   :: [rows / 32, columns / 64, BLOCK_BYTES, uint8]
// codebook :: [2^BITS, dtype]
// bias     :: [n, dtype] or null
// y        :: [m, n, dtype]
//
// W is operand A of the tensor cores, x (transposed) operand B. A block of threads takes tiles of
// TILE_ROWS rows; its warps share the columns, each with a ring of stages of its own, and their
// partial sums meet in shared memory at the end of a tile. Blocks of a cluster share the columns of
// a tile too; their sums meet in distributed shared memory. Every sum has one order: results do not
// depend on timing. A group's scale multiplies its float32 sum once.
//
// Beside common.cuh's, an instantiation has
//   TILE_FRAGMENTS  2 or 4: fragments of 16 rows that a warp takes
//   K_BLOCKS        1 or 2: blocks of 64 columns in a stage; 2 halves what a stage costs by itself
//   ROW_GROUPS      groups of warps, one below the other: with 2, two warps that run side by side
//                   load the same x, and the second finds it in the L1
//   COLUMN_TILES    1 or 2: tiles of 8 rows of x
//   WARPS           of a block
#include "decode.cuh"
#include "ring.cuh"

constexpr int STAGES = 2;  // 3 is slower: 8192 x 8192, m = 1: 11.3 us -> 10.5 us with 2
constexpr int GROUP_ROWS = 16 * TILE_FRAGMENTS;  // of a warp
constexpr int TILE_ROWS = GROUP_ROWS * ROW_GROUPS;
constexpr int GROUP_WARPS = WARPS / ROW_GROUPS;  // share the columns of the same rows
constexpr int TILE_BLOCKS = TILE_FRAGMENTS / FRAGMENTS;
constexpr int STAGE_BLOCKS = TILE_BLOCKS * K_BLOCKS;
constexpr int STAGE_COLUMNS = K_BLOCKS * BLOCK_COLUMNS;
constexpr int STAGE_BYTES = STAGE_BLOCKS * BLOCK_BYTES;
constexpr int THREADS = WARPS * LANES;
constexpr int MAIL_BARRIER_BYTES = 16;
constexpr int SUM_STRIDE = GROUP_ROWS + 4;  // floats between columns of partial sums: spreads banks
static_assert(TILE_FRAGMENTS == 2 || TILE_FRAGMENTS == 4);
static_assert(WARPS % ROW_GROUPS == 0);
static_assert(COLUMN_TILES == 1 || COLUMN_TILES == 2);

// x of the next stage is loaded while this one's is in use, where that gains more than the
// registers are worth (H200, 8192 x 8192, m = 16: 8 bits 21.7 us -> 20.9, 4 bits 14.4 -> 14.2, but
// 1 bit 12.3 -> 14.0, and 2 and 3 bits could not have 16 warps).
constexpr bool X_AHEAD = COLUMN_TILES == 2 && BITS >= 4;
static_assert(!X_AHEAD || K_BLOCKS == 1);

// 1 bit codebook: the sum of bits and the sum of x are kept apart, and c0 and c1 meet them at the
// end; so a lone 1 in x gives c0 or c1 exactly.
constexpr bool KEEPS_SUM = COMPUTES_FRAGMENT && !AFFINE;
constexpr bool NEEDS_SUM = COMPUTES_FRAGMENT || AFFINE;

struct Params {
  const uint8* packed;
  const uint16* codebook;
  const uint16* x;
  const uint16* bias;
  uint16* y;
  int n, columns, m;
  int stored_columns;  // of partial sums: m, rounded up to what the threads divide evenly
  int tiles;
  int passes;       // tiles that the busiest block takes
  int rounds;       // stages of a tile that the busiest warp takes
  int log_share;    // of the values of a tile that a block of a cluster finishes
  int sum_buffers;  // 0: partial sums lie over the ring, for blocks that take a single tile
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

// Lets the next kernel of the stream start its prologue; waits for the one before to have ended.
__device__ __forceinline__ void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wait_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// A lane's x for a stage: rows g and g + 8, eight neighbouring columns for each half of a block.
struct Activations {
  uint4 v[K_BLOCKS][2][COLUMN_TILES];

  __device__ __forceinline__ uint32 word(int block, int s, int tile, int which) const {
    const uint4& u = v[block][s >> 1][tile];
    return s & 1 ? (which ? u.w : u.z) : (which ? u.y : u.x);
  }
};

// Sums of x over the columns of a group, per row of x: what zero points and 1-bit bases multiply.
struct RowSums {
  float x[K_BLOCKS][PER_ROW][COLUMN_TILES][2];      // of rows 2 t and 2 t + 1
  float based[K_BLOCKS][PER_ROW][COLUMN_TILES][2];  // 1 bit: of x times its step's base, negated

  // By the tensor cores, as the products of a weight whose upper rows are negated bases and whose
  // lower ones are ones: so a lane's sums come to where it needs them.
  __device__ __forceinline__ void compute(const Activations& a, const uint32 (&base)[STEPS]) {
    const uint32 ones = FP16 ? 0x3C003C00u : 0x3F803F80u;
#pragma unroll
    for (int half = 0; half < PER_ROW; half++) {
      float d[K_BLOCKS][COLUMN_TILES][4] = {};
#pragma unroll
      for (int s = half * STEPS / PER_ROW; s < (half + 1) * STEPS / PER_ROW; s++) {
        const uint32 upper = COMPUTES_FRAGMENT ? base[s] ^ 0x80008000u : ones;
        const uint32 weight[REGISTERS] = {upper, ones, upper, ones};
#pragma unroll
        for (int block = 0; block < K_BLOCKS; block++)
#pragma unroll
          for (int tile = 0; tile < COLUMN_TILES; tile++)
            multiply(d[block][tile], weight, a.word(block, s, tile, 0), a.word(block, s, tile, 1));
      }
#pragma unroll
      for (int block = 0; block < K_BLOCKS; block++)
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; tile++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            based[block][half][tile][e] = d[block][tile][e];
            x[block][half][tile][e] = d[block][tile][2 + e];
          }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) small_m(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8 shared[];
  uint8* const table = shared;
  uint8* const rings = table + TABLE_BYTES;
  uint8* const barriers = rings + WARPS * Ring_::BYTES;
  const uint32 mail_barriers = shared_address(barriers + WARPS * Ring_::BARRIER_BYTES);
  float* const mailboxes =
      reinterpret_cast<float*>(barriers + WARPS * Ring_::BARRIER_BYTES + MAIL_BARRIER_BYTES);
  const int split = cluster_size(), rank = cluster_rank();
  const int tile_values = TILE_ROWS * p.stored_columns;
  const int own_sums = WARPS * SUM_STRIDE * p.stored_columns;
  float* const sums = p.sum_buffers == 0 ? reinterpret_cast<float*>(rings)
                                         : mailboxes + (split > 1 ? 2 * tile_values : 0);

  start_next_kernel();
  const int thread = threadIdx.x, lane = thread % LANES;
  const int warp = __shfl_sync(~0u, thread / LANES, 0);  // known to be the same for the whole warp
  const int g = lane / 4, t = lane % 4, slot = lane_slot(g, t);
  const int first_tile = cluster_index(), tile_step = cluster_count();
  const int my_tiles = p.passes - (first_tile + (p.passes - 1) * tile_step >= p.tiles);
  const int k_stages = p.columns / STAGE_COLUMNS;
  const int group = warp % ROW_GROUPS;
  const int first_stage = rank * GROUP_WARPS + warp / ROW_GROUPS, stage_step = GROUP_WARPS * split;
  const int my_stages = p.rounds - (first_stage + (p.rounds - 1) * stage_step >= k_stages);
  const int total = my_tiles * my_stages;

  Ring_ ring(rings + warp * Ring_::BYTES, barriers + warp * Ring_::BARRIER_BYTES);
  const uint32 row_bytes = p.columns / BLOCK_COLUMNS * BLOCK_BYTES;
  const uint64 first_blocks = static_cast<uint64>(first_tile * ROW_GROUPS + group) * TILE_BLOCKS;
  const uint8* source = p.packed + first_blocks * row_bytes +
                        static_cast<uint32>(first_stage) * K_BLOCKS * BLOCK_BYTES;
  int left = total, left_of_tile = my_stages;  // to copy
  auto refill = [&](int stage) {
    ring.fill<K_BLOCKS * BLOCK_BYTES>(stage, source, row_bytes, left > 0);
    left--;
    source += stage_step * K_BLOCKS * BLOCK_BYTES;
    if (--left_of_tile == 0) {
      left_of_tile = my_stages;
      source += static_cast<uint64>(tile_step) * ROW_GROUPS * TILE_BLOCKS * row_bytes -
                static_cast<uint64>(my_stages) * stage_step * K_BLOCKS * BLOCK_BYTES;
    }
  };
#pragma unroll
  for (int stage = 0; stage < STAGES; stage++) refill(stage);
  const Codebook codebook(p.codebook, lane);
  build_table<THREADS>(table, codebook, thread);
  if (split > 1) open_mailboxes(mail_barriers, thread);

  DecodeConstants constants;
  constants.lane_part = table_lane_part(lane);
  constants.nibbles = p.nibbles;
#pragma unroll
  for (int s = 0; s < STEPS; s++) constants.base[s] = p.base[s];
  constants.values[0] = codebook.words[0];
  constants.values[1] = codebook.words[1];

  // Weights and codebook are constants. x and y are not: from here on they may be touched. Plain
  // loads of x, never the read-only path: the kernel before may have just written it.
  wait_previous_kernel();
  Activations x;
  const uint16* x_rows[COLUMN_TILES];
  bool live[COLUMN_TILES];
#pragma unroll
  for (int tile = 0; tile < COLUMN_TILES; tile++) {
    const int row = g + 8 * tile;
    // Ahead, x goes to registers that are not cleared: rows past m read row 0.
    live[tile] = (X_AHEAD || row < p.m) && my_stages > 0;
    x_rows[tile] = p.x + static_cast<uint64>(row < p.m ? row : 0) * p.columns + 8 * t +
                   static_cast<uint64>(first_stage) * STAGE_COLUMNS;
#pragma unroll
    for (int block = 0; block < K_BLOCKS; block++)
      x.v[block][0][tile] = x.v[block][1][tile] = make_uint4(0, 0, 0, 0);
  }
  auto load_x = [&](Activations& x, int block, uint32 offset) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int tile = 0; tile < COLUMN_TILES; tile++)
        if (live[tile])
          x.v[block][half][tile] = *reinterpret_cast<const uint4*>(
              x_rows[tile] + offset + BLOCK_COLUMNS * block + 32 * half);
  };
#pragma unroll
  for (int block = 0; block < K_BLOCKS; block++) load_x(x, block, 0);
  if (split > 1) wait_mailboxes();
  __syncthreads();  // the table is whole

  for (int tile = first_tile, pass = 0; tile < p.tiles; tile += tile_step, pass++) {
    float sum[TILE_FRAGMENTS][COLUMN_TILES][4] = {};
    float x_sum[TILE_BLOCKS][COLUMN_TILES][4] = {};  // of odd fragments, where KEEPS_SUM
    uint32 offset = 0;
    for (int i = 0; i < my_stages; i++) {
      offset = i + 1 < my_stages ? offset + stage_step * STAGE_COLUMNS : 0;
      Activations next;
      if (X_AHEAD) load_x(next, 0, offset);
      RowSums rows;
      if (NEEDS_SUM) rows.compute(x, constants.base);
      ring.wait();
#pragma unroll
      for (int k_block = 0; k_block < K_BLOCKS; k_block++) {
#pragma unroll
        for (int row_block = 0; row_block < TILE_BLOCKS; row_block++) {
          const uint8* block = ring.current() + (row_block * K_BLOCKS + k_block) * BLOCK_BYTES;
          uint32 words[LANE_WORDS];
          load_words(words, block, slot);
          Scales scales;
          scales.load(block, g);
#pragma unroll
          for (int half = 0; half < PER_ROW; half++) {
            float d[FRAGMENTS][COLUMN_TILES][4];
#pragma unroll
            for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
              for (int c = 0; c < COLUMN_TILES; c++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                  d[f][c][e] =
                      COMPUTES_FRAGMENT && f % 2 ? rows.based[k_block][half][c][e & 1] : 0.f;
#pragma unroll
            for (int s = half * STEPS / PER_ROW; s < (half + 1) * STEPS / PER_ROW; s++)
#pragma unroll
              for (int f = 0; f < FRAGMENTS; f++) {
                uint32 a[REGISTERS];
                decode(a, words + f * BITS, f, s, table, constants);
#pragma unroll
                for (int c = 0; c < COLUMN_TILES; c++)
                  multiply(d[f][c], a, x.word(k_block, s, c, 0), x.word(k_block, s, c, 1));
              }
#pragma unroll
            for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
              for (int e = 0; e < 4; e++) {
                const float scale = scales.get(0, half, f, e >> 1);
#pragma unroll
                for (int c = 0; c < COLUMN_TILES; c++) {
                  float value = d[f][c][e];
                  if (AFFINE)
                    value = fmaf(-scales.get(KINDS - 1, half, f, e >> 1),
                                 rows.x[k_block][half][c][e & 1], value);
                  float& total_sum = sum[row_block * FRAGMENTS + f][c][e];
                  total_sum = fmaf(scale, value, total_sum);
                  if (KEEPS_SUM && f % 2)
                    x_sum[row_block][c][e] =
                        fmaf(scale, rows.x[k_block][half][c][e & 1], x_sum[row_block][c][e]);
                }
              }
          }
        }
        if (!X_AHEAD) load_x(x, k_block, offset);  // of the next stage
      }
      // The products above have consumed every load of this stage: the compiler may not move its
      // release ahead of them.
#pragma unroll
      for (int f = 0; f < TILE_FRAGMENTS; f++)
        asm volatile("" : "+f"(sum[f][0][0]), "+f"(sum[f][0][2])::"memory");
      if (X_AHEAD) x = next;
      ring.release();
      refill(ring.stage);
      ring.advance();
    }

    if (KEEPS_SUM) {
      const float c0 = to_float(constants.values[0] & 0xFFFFu);
      const float c1 = to_float(constants.values[0] >> 16);
#pragma unroll
      for (int row_block = 0; row_block < TILE_BLOCKS; row_block++)
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; c++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            float& ones = sum[row_block * FRAGMENTS + 1][c][e];
            ones = fmaf(c1, ones, c0 * (x_sum[row_block][c][e] - ones));
          }
    }
    if (p.sum_buffers == 0) __syncthreads();  // every warp has read its last stage
    float* const buffer = sums + (p.sum_buffers == 2 ? pass % 2 * own_sums : 0);
#pragma unroll
    for (int c = 0; c < COLUMN_TILES; c++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int column = c * 8 + 2 * t + e;
        if (column < p.stored_columns)
#pragma unroll
          for (int f = 0; f < TILE_FRAGMENTS; f++) {
            float* own = buffer + (warp * p.stored_columns + column) * SUM_STRIDE + f * 16 + g;
            own[0] = sum[f][c][e];
            own[8] = sum[f][c][2 + e];
          }
      }
    __syncthreads();
    auto finish = [&](int value_index, float value) {
      const int row = tile * TILE_ROWS + value_index % TILE_ROWS, column = value_index / TILE_ROWS;
      if (row < p.n && column < p.m) {
        if (p.bias != nullptr) value += to_float(p.bias[row]);
        p.y[static_cast<uint64>(column) * p.n + row] = from_floats(value, 0.f) & 0xFFFFu;
      }
    };
    float* const mailbox = mailboxes + pass % 2 * tile_values;  // [split, share]
    const uint32 mail_barrier = mail_barriers + 8 * (pass % 2);
    const int share = 1 << p.log_share;
    if (split > 1 && thread == 0) expect_mail(mail_barrier, 4 * tile_values);
    for (int i = thread; i < tile_values; i += THREADS) {
      const int row = i % TILE_ROWS, column = i / TILE_ROWS;
      float value = 0.f;
#pragma unroll
      for (int w = 0; w < GROUP_WARPS; w++)
        value +=
            buffer[((w * ROW_GROUPS + row / GROUP_ROWS) * p.stored_columns + column) * SUM_STRIDE +
                   row % GROUP_ROWS];
      if (split == 1)
        finish(i, value);
      else
        send(mailbox + rank * share + (i & (share - 1)), mail_barrier, i >> p.log_share, value);
    }
    if (split > 1 && thread < share) {
      wait_barrier(mail_barrier, pass / 2 % 2);
      for (int i = thread; i < share; i += THREADS) {
        float value = 0.f;
        for (int from = 0; from < split; from++) value += mailbox[from * share + i];
        finish(rank * share + i, value);
      }
    }
    if (p.sum_buffers == 1) __syncthreads();  // the buffer is free for the next tile
  }
}
