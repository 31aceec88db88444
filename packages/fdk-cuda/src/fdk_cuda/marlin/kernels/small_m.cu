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
// Macros, in addition to those of small_m_mainloop.cuh:
//   M_TILES  1 or 2: tiles of 8 rows of x
//   SPREAD   1: up to 4 rows of x are in the even columns of operand B. A lane's sums of odd
//            columns are then unused, which halves the work on sums
//   SCALES_WEIGHTS, SIGNS  see decode_1bit_scaled.cuh
#include "common/decode_1bit_scaled.cuh"
#include "common/small_m_mainloop.cuh"

static_assert(M_TILES == 1 || M_TILES == 2);
static_assert(!SPREAD || M_TILES == 1);
static_assert(!SCALES_WEIGHTS || M_TILES == 2);
// The used ones of a lane's four sums (rows g, then g + 8).
constexpr int COLUMNS = SPREAD ? 1 : 2, VALUES = 2 * COLUMNS;

// Index of a used sum among the four.
constexpr int value_index(int value) { return SPREAD ? 2 * value : value; }

// Loads x of the next stage during this one, where that gains more than the registers cost (H200,
// 8192 x 8192, m = 16: 8 bits 21.7 us -> 20.9, 4 bits 14.4 -> 14.2, but 1 bit 12.3 -> 14.0).
constexpr bool X_AHEAD = M_TILES == 2 && BITS >= 4 && K_BLOCKS == 1;

// 1 bit codebook: the sum of bits and the sum of x are kept separately until the end, where c0 and
// c1 multiply them. So a one-hot x gives exactly c0 or c1.
constexpr bool KEEPS_X_SUM = COMPUTES_FRAGMENT && !AFFINE && !SCALES_WEIGHTS;
constexpr bool NEEDS_SUM = KEEPS_X_SUM || AFFINE;

// A lane's x for a stage: rows g and g + 8, eight neighbouring columns in each half of a block.
struct Activations {
  uint4 v[K_BLOCKS][2][M_TILES];

  __forceinline__ uint32 word(int block, int s, int tile, int which) const {
    const uint4& u = v[block][s >> 1][tile];
    return s & 1 ? (which ? u.w : u.z) : (which ? u.y : u.x);
  }
};

// Sums of x over a group, which zero points and 1-bit bases multiply.
struct RowSums {
  float x[K_BLOCKS][PER_ROW][M_TILES][COLUMNS];  // sums for rows 2 t and 2 t + 1; SPREAD: row t
  // 1 bit: sums of x times its step's base, negated.
  float based[K_BLOCKS][PER_ROW][M_TILES][COLUMNS];

  // Computed by the tensor cores, as products with a weight whose upper rows are negated bases and
  // lower rows are ones, which puts the sums into the lanes that need them.
  __forceinline__ void compute(const Activations& a, const uint32 (&base)[STEPS]) {
    const uint32 ones = FP16 ? 0x3C003C00u : 0x3F803F80u;
#pragma unroll
    for (int half = 0; half < PER_ROW; half++) {
      float d[K_BLOCKS][M_TILES][4] = {};
#pragma unroll
      for (int s = half * STEPS / PER_ROW; s < (half + 1) * STEPS / PER_ROW; s++) {
        const uint32 upper = COMPUTES_FRAGMENT ? base[s] ^ 0x80008000u : ones;
        const uint32 weight[REGISTERS] = {upper, ones, upper, ones};
#pragma unroll
        for (int block = 0; block < K_BLOCKS; block++)
#pragma unroll
          for (int tile = 0; tile < M_TILES; tile++)
            multiply(d[block][tile], weight, a.word(block, s, tile, 0), a.word(block, s, tile, 1));
      }
#pragma unroll
      for (int block = 0; block < K_BLOCKS; block++)
#pragma unroll
        for (int tile = 0; tile < M_TILES; tile++)
#pragma unroll
          for (int e = 0; e < COLUMNS; e++) {
            based[block][half][tile][e] = d[block][tile][e];
            x[block][half][tile][e] = d[block][tile][2 + e];
          }
    }
  }
};

// SCALES_WEIGHTS: adds the products of a block to the sums from fragment `first` on.
template <int COUNT>
__forceinline__ void add_scaled(float (&sum)[COUNT][M_TILES][VALUES], int first,
                                const uint32 (&words)[LANE_WORDS], const Scales& scales,
                                const Activations& x, int k_block, const uint8* table,
                                const DecodeConstants& constants) {
#pragma unroll
  for (int half = 0; half < PER_ROW; half++)
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
      const ScaledRow rows[2] = {{scales, constants.values[0], half, f, 0},
                                 {scales, constants.values[0], half, f, 1}};
#pragma unroll
      for (int s = half * STEPS / PER_ROW; s < (half + 1) * STEPS / PER_ROW; s++) {
        uint32 a[REGISTERS];
        decode_scaled(a, words, f, s, table, constants, rows);
#pragma unroll
        for (int c = 0; c < M_TILES; c++)
          multiply(sum[first + f][c], a, x.word(k_block, s, c, 0), x.word(k_block, s, c, 1));
      }
    }
}

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
          uint32 words[LANE_WORDS];
          load_words(words, block, slot);
          Scales scales;
          scales.load(block, g);
          if constexpr (SCALES_WEIGHTS) {
            add_scaled(sum, n_block * FRAGMENTS, words, scales, x, k_block, table, constants);
            continue;
          }
#pragma unroll
          for (int half = 0; half < PER_ROW; half++) {
            float d[FRAGMENTS][M_TILES][4];
#pragma unroll
            for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
              for (int c = 0; c < M_TILES; c++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                  d[f][c][e] = COMPUTES_FRAGMENT && f % 2 && !(SPREAD && e % 2)
                                   ? rows.based[k_block][half][c][e % COLUMNS]
                                   : 0.f;
#pragma unroll
            for (int s = half * STEPS / PER_ROW; s < (half + 1) * STEPS / PER_ROW; s++)
#pragma unroll
              for (int f = 0; f < FRAGMENTS; f++) {
                uint32 a[REGISTERS];
                decode(a, words, f, s, table, constants);
#pragma unroll
                for (int c = 0; c < M_TILES; c++)
                  multiply(d[f][c], a, x.word(k_block, s, c, 0), x.word(k_block, s, c, 1));
              }
#pragma unroll
            for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
              for (int e = 0; e < VALUES; e++) {
                const float scale = scales.get(0, half, f, e / COLUMNS);
#pragma unroll
                for (int c = 0; c < M_TILES; c++) {
                  float value = d[f][c][value_index(e)];
                  if (AFFINE)
                    value = fmaf(-scales.get(KINDS - 1, half, f, e / COLUMNS),
                                 rows.x[k_block][half][c][e % COLUMNS], value);
                  float& total_sum = sum[n_block * FRAGMENTS + f][c][e];
                  total_sum = fmaf(scale, value, total_sum);
                  if (KEEPS_X_SUM && f % 2)
                    x_sum[n_block][c][e] =
                        fmaf(scale, rows.x[k_block][half][c][e % COLUMNS], x_sum[n_block][c][e]);
                }
              }
          }
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

    if (KEEPS_X_SUM) {
      const float c0 = to_float(constants.values[0] & 0xFFFFu);
      const float c1 = to_float(constants.values[0] >> 16);
#pragma unroll
      for (int n_block = 0; n_block < BLOCKS; n_block++)
#pragma unroll
        for (int c = 0; c < M_TILES; c++)
#pragma unroll
          for (int e = 0; e < VALUES; e++) {
            float& ones = sum[n_block * FRAGMENTS + 1][c][e];
            ones = fmaf(c1, ones, c0 * (x_sum[n_block][c][e] - ones));
          }
    }
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
