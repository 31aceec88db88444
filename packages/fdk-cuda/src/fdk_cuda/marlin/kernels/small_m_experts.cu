// y[pair] = x[row of pair] @ W_hat[expert].T + bias[expert] for a stack of experts, of which each
// has few rows of x; bound by the time to read the weights.
//
// A pair is one expert of one token. x has a row for `sharing` neighbouring pairs.
//
// x        :: [pairs / sharing, padded_k, dtype]
// packed   :: [experts, padded_n / 32, padded_k / 64, BLOCK_BYTES, uint8]
// codebook :: [experts or 1, 2^BITS, dtype]
// bias     :: [experts, n, dtype] or null
// y        :: [pairs, n, dtype | float32]; with is_swiglu [pairs, n / 2]
//
// The products are those of small_m.cu. `split` neighbouring warps share the inputs of a unit
// (expert_units.cuh) and add their sums in shared memory, in a fixed order; with many units each
// warp takes all inputs of its own. Tables of two codebooks are in shared memory at once, so a
// thread block waits for all its warps only where a third one begins.
//
// Macros: those of small_m_products.cuh; M_TILES is 1 and SCALES_WEIGHTS 0.
#define ABSOLUTE_TABLE (BITS > 2 && BITS != 5)
#include "common/small_m_products.cuh"
#include "common/swiglu.cuh"

struct Params {
  const uint8* packed;
  const uint16* codebook;
  const uint16* x;
  const uint16* bias;
  void* y;
  const void* ids;
  int n, padded_k, experts;
  int pairs;
  int n_units;         // units of a tile
  int rows;            // of a tile, up to ROW_SLOTS; pairs are sorted if there are more than 1
  int sharing;         // pairs that share a row of x
  int split;           // warps that share a unit
  int buffers;         // of partial sums, 1 or 2
  int codebook_step;   // values to the codebook of the next expert, or 0 where they share one
  int has_long_ids;    // ids are int64
  int has_zeros;       // sorted pairs of no expert have tiles
  int is_interleaved;  // rows g of a fragment are of the first half of the outputs, rows g + 8 of
                       // the second
  int is_swiglu;       // y is silu(first half) * second half
  int is_wide;         // y is float32
  int is_early;        // a kernel before the previous one wrote ids
  uint32 base[STEPS];
  uint32 nibbles;
};

#include "common/expert_units.cuh"

static_assert(M_TILES == 1 && !SCALES_WEIGHTS);

// Bytes between the two tables. Entries of 3 or more bits, except 5, fill half of their 256 bytes;
// the other halves are the second table. These tables begin at TABLE_ADDRESS in shared memory, so
// that a byte permutation gives the whole address (decode.cuh). With the address of a table in a
// register, which the branches here need, a lookup would take one instruction more.
constexpr bool TABLES_INTERLEAVE = ABSOLUTE_TABLE;
constexpr int TABLE_STEP = TABLES_INTERLEAVE ? 128 : TABLE_BYTES;
constexpr int ALL_TABLE_BYTES = TABLES_INTERLEAVE ? TABLE_BYTES : 2 * TABLE_BYTES;
constexpr uint32 TABLE_ADDRESS = 0x10000;
// Shared memory that the driver keeps for itself, before a thread block's own.
constexpr uint32 RESERVED_BYTES = 1024;

// Shared memory of a thread block: barriers, tiles and some pipelines, tables, other pipelines, and
// partial sums. Pairs are sorted where tables will be.
struct SharedMemory {
  uint8* const barriers;
  TileList& list;
  uint8* const tables;
  float* const sums;  // [buffers, WARPS, rows, SUM_STRIDE]

  static constexpr int LIST_BYTES =
      (WARPS * WarpPipeline::BARRIER_BYTES + sizeof(TileList) + 127) / 128 * 128;
  // Warps whose pipelines fit before the tables.
  static constexpr int ROOM =
      (static_cast<int>(TABLE_ADDRESS - RESERVED_BYTES) - LIST_BYTES) / WarpPipeline::BYTES;
  static constexpr int FRONT_WARPS = !TABLES_INTERLEAVE ? 0 : ROOM < WARPS ? ROOM : WARPS;

  __forceinline__ explicit SharedMemory(uint8* start)
      : barriers(start),
        list(*reinterpret_cast<TileList*>(barriers + WARPS * WarpPipeline::BARRIER_BYTES)),
        tables(start + (TABLES_INTERLEAVE ? TABLE_ADDRESS - shared_address(start) : LIST_BYTES)),
        sums(reinterpret_cast<float*>(pipeline(WARPS))) {
    if (shared_address(start) > RESERVED_BYTES) __trap();
  }

  __forceinline__ uint8* pipeline(int warp) const {
    return warp < FRONT_WARPS
               ? barriers + LIST_BYTES + warp * WarpPipeline::BYTES
               : tables + ALL_TABLE_BYTES + (warp - FRONT_WARPS) * WarpPipeline::BYTES;
  }
};

// How warps share the units of a thread block.
struct WarpShare {
  int group, groups;  // this group of warps, and their number
  int part;           // of the warp, in its group
  int stages;         // of a unit, for this warp

  __forceinline__ WarpShare(const Params& p, int warp)
      : group(warp / p.split), groups(WARPS / p.split), part(warp % p.split) {
    stages = (p.padded_k / STAGE_K - part + p.split - 1) / p.split;
  }

  // Stages of a unit of an expert.
  __forceinline__ int stages_of(const Params& p, int expert) const {
    return expert < p.experts ? stages : 0;
  }
};

// The stages of a warp, copied in the order of use.
struct WeightPipeline {
  const Params& p;
  const WarpShare& share;
  const TileList& list;
  int unit, left = 0;  // stages of the unit to copy
  WarpPipeline pipeline;
  const uint8* source = nullptr;

  __forceinline__ WeightPipeline(const Params& params, const WarpShare& share_,
                                 const SharedMemory& memory, int warp, int first_unit)
      : p(params),
        share(share_),
        list(memory.list),
        unit(first_unit),
        pipeline(memory.pipeline(warp), memory.barriers + warp * WarpPipeline::BARRIER_BYTES) {}

  __forceinline__ uint32 row_bytes() const { return p.padded_k / BLOCK_K * BLOCK_BYTES; }

  __forceinline__ void go_to(int expert) {
    const uint64 row = (static_cast<uint64>(expert) * p.n_units + unit % p.n_units) * TILE_BLOCKS;
    source =
        p.packed + row * row_bytes() + static_cast<uint32>(share.part) * K_BLOCKS * BLOCK_BYTES;
    left = share.stages_of(p, expert);
  }

  // Starts the first copy, of a unit of an expert. The list of tiles need not be there yet.
  __forceinline__ bool start(int expert) {
    go_to(expert);
    if (left == 0) return false;
    copy(0);
    return true;
  }

  // Starts the copies of the other stages.
  __forceinline__ void start_others(bool has_started) {
    if (!has_started) fill(0);
#pragma unroll
    for (int stage = 1; stage < STAGES; stage++) fill(stage);
  }

  __forceinline__ void fill(int stage) {
    while (left == 0 && unit < list.range.last) {
      unit += share.groups;
      if (unit < list.range.last) go_to(list.expert[list.tile_of(p, unit)]);
    }
    copy(stage);
  }

  __forceinline__ void copy(int stage) {
    pipeline.fill<K_BLOCKS * BLOCK_BYTES>(stage, source, row_bytes(), TILE_BLOCKS, left > 0);
    if (left > 0) left--;
    source += static_cast<uint32>(p.split) * K_BLOCKS * BLOCK_BYTES;
  }

  // Releases the current stage, refills it, and moves on.
  __forceinline__ void next() {
    pipeline.release();
    fill(pipeline.stage);
    pipeline.advance();
  }
};

__forceinline__ void put(const Params& p, uint64 at, float value) {
  if (p.is_wide)
    static_cast<float*>(p.y)[at] = value;
  else
    static_cast<uint16*>(p.y)[at] = from_floats(value, 0.f) & 0xFFFFu;
}

// Finishes and stores the outputs of a pair in rows `row` and `row + 8` of an expert's weight, rows
// g and g + 8 of a fragment.
__forceinline__ void finish(const Params& p, int expert, int pair, int row, float lower,
                            float upper) {
  const int half = p.n / 2;
  int first = row, second = row + 8;
  if (p.is_interleaved) {
    first = row / 16 * 8 + row % 8;
    second = first < half ? half + first : p.n;
    if (first >= half) first = p.n;  // padding
  }
  if (p.bias != nullptr && expert < p.experts) {
    const uint16* const bias = p.bias + static_cast<uint64>(expert) * p.n;
    if (first < p.n) lower += to_float(bias[first]);
    if (second < p.n) upper += to_float(bias[second]);
  }
  if (p.is_swiglu) {
    if (first < half) put(p, static_cast<uint64>(pair) * half + first, swiglu(lower, upper));
    return;
  }
  if (first < p.n) put(p, static_cast<uint64>(pair) * p.n + first, lower);
  if (second < p.n) put(p, static_cast<uint64>(pair) * p.n + second, upper);
}

// Waits for the warps that share a unit.
__forceinline__ void sync_group(const Params& p, const WarpShare& share) {
  if (p.split == 1)
    __syncwarp();
  else
    sync_named(1 + share.group, p.split * LANES);
}

// Adds the sums that the warps of a group have stored for a unit, and stores its rows of y.
//
// parts :: [split, rows, SUM_STRIDE]
__forceinline__ void store_unit(const Params& p, const WarpShare& share, const TileList& list,
                                int unit, int tile, const float* parts, int lane) {
  const int first_row = unit % p.n_units * GROUP_N, expert = list.expert[tile];
  for (int i = share.part * LANES + lane; i < GROUP_N / 2 * p.rows; i += p.split * LANES) {
    const int row = i / (GROUP_N / 2), output = i / 8 % (GROUP_N / 16) * 16 + i % 8;
    const int pair = list.pair[tile * ROW_SLOTS + row];
    if (pair < 0) continue;
    const float* from = parts + row * SUM_STRIDE + output;
    float lower = from[0], upper = from[8];
    for (int other = 1; other < p.split; other++) {
      from += p.rows * SUM_STRIDE;
      lower += from[0];
      upper += from[8];
    }
    finish(p, expert, pair, first_row + output, lower, upper);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    small_m_experts(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8 shared[];
  const SharedMemory memory(shared);
  TileList& list = memory.list;
  const int thread = threadIdx.x, lane = thread % LANES;
  const int warp = __shfl_sync(~0u, thread / LANES, 0);  // uniform in the warp
  const int g = lane / 4, t = lane % 4, slot = lane_slot(g, t);
  const WarpShare share(p, warp);

  // Codebooks of 1 and 2 bits, by table. Finite where there is no expert: the products of one value
  // with sums of zero are part of the outputs.
  uint32 values[2][2] = {};
  auto fill_table = [&](int which, int expert) {
    if (expert >= p.experts) return;
    const Codebook codebook(p.codebook + static_cast<uint64>(expert) * p.codebook_step, lane);
    build_table<THREADS>(memory.tables + which * TABLE_STEP, codebook, thread);
    if (BITS <= 2) {
      values[which][0] = codebook.words[0];
      values[which][1] = codebook.words[1];
    }
  };
  if (!p.is_early) wait_previous_kernel();
  // After this wait: the next kernel may then read ids at once.
  start_next_kernel();
  const bool is_sorted = p.rows > 1;
  const PairSort sorted(p, memory.tables);  // tables come later
  if (is_sorted) sorted.sort(thread);
  const UnitRange own(p, is_sorted ? sorted.tiles() : p.pairs);
  int unit = own.first + share.group;
  WeightPipeline weights(p, share, memory, warp, unit);
  bool has_started = false;
  if (unit < own.last) {
    const int tile = unit / p.n_units;
    has_started = weights.start(is_sorted ? sorted.bin_of(tile) : expert_of(p, tile));
  }
  if (is_sorted) {
    __syncthreads();
    list.fill(p, own, thread, sorted);
  } else {
    list.fill(p, own, thread);
  }
  __syncthreads();

  Activations x;
  uint32 x_row;  // index into x; calls with many pairs run in parts
  bool is_live;
  auto choose_row = [&](int unit) {
    const int* const pairs = list.pair + list.tile_of(p, unit) * ROW_SLOTS;
    const int pair = pairs[SPREAD ? g / 2 : g];
    is_live = pair >= 0 && !(SPREAD && g % 2);
    const int row = (pair < 0 ? pairs[0] : pair) / p.sharing;
    x_row = static_cast<uint32>(row) * p.padded_k + 8 * t + share.part * STAGE_K;
  };
  auto load_x = [&](int block, uint32 column) {
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (is_live)
        x.v[block][half][0] =
            *reinterpret_cast<const uint4*>(p.x + (x_row + column + BLOCK_K * block + 32 * half));
  };
  auto load_first_x = [&] {
#pragma unroll
    for (int block = 0; block < K_BLOCKS; block++) load_x(block, 0);
  };
#pragma unroll
  for (int block = 0; block < K_BLOCKS; block++)
    x.v[block][0][0] = x.v[block][1][0] = make_uint4(0, 0, 0, 0);
  if (unit < own.last) {
    choose_row(unit);
    if (!p.is_early) load_first_x();
  }
  weights.start_others(has_started);

  DecodeConstants constants;
  constants.nibbles = p.nibbles;
#pragma unroll
  for (int s = 0; s < STEPS; s++) constants.base[s] = p.base[s];
  int turn = 0;   // of the buffers of partial sums
  int begin = 0;  // the first tile of the tables
  do {
    const TableRange tables(p, list, begin);
    if (list.range.tiles > 0) {
      if (begin > 0) __syncthreads();  // all warps have used the tables before
      fill_table(0, p.codebook_step == 0 ? 0 : list.expert[begin]);
      if (tables.second < list.range.tiles) fill_table(1, list.expert[tables.second]);
    }
    if (p.is_early && begin == 0) {
      wait_previous_kernel();  // it wrote x
      if (unit < list.range.last) load_first_x();
    }
    __syncthreads();
    const int end_unit = min(list.range.last, list.first_unit_of(p, tables.end));
    for (; unit < end_unit; unit += share.groups) {
      const int tile = list.tile_of(p, unit), expert = list.expert[tile];
      const bool is_second = tile >= tables.second;
      const uint8* const table = memory.tables + (is_second ? TABLE_STEP : 0);
      constants.lane_part = table_lane_part(lane);
      if (TABLES_INTERLEAVE)
        constants.lane_part += (TABLE_ADDRESS >> 8) + (is_second ? TABLE_STEP : 0);
      if (BITS <= 2) {
        constants.values[0] = is_second ? values[1][0] : values[0][0];
        constants.values[1] = is_second ? values[1][1] : values[0][1];
      }
      float sum[FRAGMENTS * TILE_BLOCKS][1][VALUES] = {};
      float x_sum[TILE_BLOCKS][1][VALUES] = {};  // of odd fragments, if KEEPS_X_SUM
      const int stages = share.stages_of(p, expert);
      const bool has_next = unit + share.groups < list.range.last;
      uint32 column = 0;  // relative to the warp's first
      if (stages == 0 && has_next) {
        choose_row(unit + share.groups);
        load_first_x();
      }
      for (int i = 0; i < stages; i++) {
        const bool is_last = i + 1 == stages;
        column = is_last ? 0 : column + p.split * STAGE_K;
        if (is_last && has_next) choose_row(unit + share.groups);
        RowSums rows;
        if (NEEDS_SUM) rows.compute(x, constants.base);
        weights.pipeline.wait();
#pragma unroll
        for (int k_block = 0; k_block < K_BLOCKS; k_block++) {
#pragma unroll
          for (int n_block = 0; n_block < TILE_BLOCKS; n_block++) {
            const uint8* block =
                weights.pipeline.current() + (n_block * K_BLOCKS + k_block) * BLOCK_BYTES;
#include "common/small_m_block.cuh"
          }
          load_x(k_block, column);  // x of the next stage
        }
        // The products above have consumed all loads of this stage: the compiler must not move its
        // release before them.
#pragma unroll
        for (int f = 0; f < FRAGMENTS * TILE_BLOCKS; f++)
          asm volatile("" : "+f"(sum[f][0][0]), "+f"(sum[f][0][COLUMNS])::"memory");
        weights.next();
      }
      join_x_sums(sum, x_sum, constants);

      float* const buffer = memory.sums + turn * (WARPS * SUM_STRIDE) * p.rows;
#pragma unroll
      for (int e = 0; e < COLUMNS; e++) {
        const int row = COLUMNS * t + e;  // of the tile
        if (row < p.rows)
#pragma unroll
          for (int f = 0; f < FRAGMENTS * TILE_BLOCKS; f++) {
            float* const own = buffer + (warp * p.rows + row) * SUM_STRIDE + f * 16 + g;
            own[0] = sum[f][0][e];
            own[8] = sum[f][0][COLUMNS + e];
          }
      }
      sync_group(p, share);
      store_unit(p, share, list, unit, tile, buffer + (warp - share.part) * p.rows * SUM_STRIDE,
                 lane);
      if (p.buffers == 1)
        sync_group(p, share);  // the buffer is free for the next unit
      else
        turn ^= 1;
    }
    begin = tables.end;
  } while (begin < list.range.tiles);
}
