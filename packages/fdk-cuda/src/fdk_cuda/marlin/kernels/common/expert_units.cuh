// Work of small_m_experts.cu. A tile is a few rows of x that go to one expert; a unit is a tile and
// GROUP_N outputs. A thread block takes neighbouring units, so that it meets few experts, and its
// groups of warps take them in turns.
//
// Reads of Params:
//   ids :: [pairs, int32 | int64]  experts of the pairs, written by the router
//
// With one row each pair is a tile. With more, every thread block sorts all pairs by expert for
// itself: that takes less time than a kernel before this one, whose end it would wait for.
//
// The expert `experts` means none: rows of y are zeros if it has tiles, else unwritten.
#pragma once
#include "common/small_m_products.cuh"

constexpr int ROW_SLOTS = SPREAD ? 4 : 8;  // rows of a tile at most
constexpr int MAX_TILES = 64;              // of a thread block

// Reads what another kernel may just have written, not from the L1.
template <class T>
__forceinline__ T read(const T* from) {
  return *static_cast<const volatile T*>(from);
}

__forceinline__ int expert_of(const Params& p, int pair) {
  const long long id = p.has_long_ids ? read(static_cast<const long long*>(p.ids) + pair)
                                      : read(static_cast<const int*>(p.ids) + pair);
  return 0 <= id && id < p.experts ? static_cast<int>(id) : p.experts;
}

// Number of sums before a bin: of pairs in the lower half of a word, of tiles in the upper half.
__forceinline__ int pairs_of(uint32 sums) { return sums & 0xFFFFu; }
__forceinline__ int tiles_of(uint32 sums) { return sums >> 16; }

// The pairs in the order of their experts, by a counting sort in shared memory; the same order
// every time. Each warp counts neighbouring pairs.
//
// counts :: [WARPS, bins]     pairs of the warp; then of the warps before it
// before :: [bins + 1]        pairs and tiles of the bins before
// sums   :: [bins / 32 + 1]   pairs and tiles of 32 bins
// ranks  :: [pairs]           bin of a pair, and its rank in its warp
// order  :: [pairs]
struct PairSort {
  const Params& p;
  const int bins;  // the experts, and none
  uint32 *const counts, *const before, *const sums, *const ranks, *const order;

  __forceinline__ PairSort(const Params& params, uint8* memory)
      : p(params),
        bins(p.experts + 1),
        counts(reinterpret_cast<uint32*>(memory)),
        before(counts + WARPS * bins),
        sums(before + bins + 1),
        ranks(sums + bins / LANES + 1),
        order(ranks + p.pairs) {}

  __forceinline__ int tiles() const { return tiles_of(before[bins]); }

  // Called by all threads.
  __forceinline__ void sort(int thread) const {
    const int lane = thread % LANES, warp = thread / LANES;
    const int share = (p.pairs + THREADS - 1) / THREADS * LANES;  // of a warp
    const int first = warp * share, last = min(first + share, p.pairs);
    uint32* const own = counts + warp * bins;
    for (int bin = lane; bin < bins; bin += LANES) own[bin] = 0;
    __syncwarp();
    for (int start = first; start < last; start += LANES) {
      const int pair = start + lane;
      const int bin = pair < last ? expert_of(p, pair) : bins;
      const uint32 same = __match_any_sync(~0u, bin);
      const int rank = __popc(same & ((1u << lane) - 1));
      const uint32 earlier = pair < last ? own[bin] : 0;
      if (pair < last) ranks[pair] = static_cast<uint32>(bin) << 16 | (earlier + rank);
      __syncwarp();
      if (pair < last && rank == 0) own[bin] = earlier + __popc(same);
      __syncwarp();
    }
    __syncthreads();
    add_bins(thread, lane);
    for (int pair = first + lane; pair < last; pair += LANES) {
      const uint32 bin = ranks[pair] >> 16, rank = ranks[pair] & 0xFFFFu;
      order[pairs_of(before[bin]) + own[bin] + rank] = pair;
    }
  }

  // Prefix sums over warps, then over bins, 32 of them at once.
  __forceinline__ void add_bins(int thread, int lane) const {
    for (int start = thread - lane; start < bins; start += THREADS) {
      const int bin = start + lane;
      uint32 count = 0;
      if (bin < bins)
        for (int warp = 0; warp < WARPS; warp++) {
          const uint32 more = counts[warp * bins + bin];
          counts[warp * bins + bin] = count;
          count += more;
        }
      const uint32 tiles = bin < p.experts || p.has_zeros ? (count + p.rows - 1) / p.rows : 0;
      const uint32 both = tiles << 16 | count;
      uint32 sum = both;
#pragma unroll
      for (int step = 1; step < LANES; step *= 2) {
        const uint32 other = __shfl_sync(~0u, sum, (lane - step) & (LANES - 1));
        if (lane >= step) sum += other;
      }
      if (bin < bins) before[bin] = sum - both;
      if (lane == LANES - 1) sums[start / LANES] = sum;
    }
    __syncthreads();
    for (int bin = thread; bin <= bins; bin += THREADS) {
      uint32 sum = bin < bins ? before[bin] : 0;
      const int whole = bin < bins ? bin / LANES : (bins - 1) / LANES + 1;
      for (int i = 0; i < whole; i++) sum += sums[i];
      before[bin] = sum;
    }
    __syncthreads();
  }

  // Returns the bin that a tile belongs to: the last one with no more tiles before it.
  __forceinline__ int bin_of(int tile) const {
    int low = 0, high = bins;  // the tiles of `high` begin after it
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (tiles_of(before[middle]) <= tile)
        low = middle;
      else
        high = middle;
    }
    return low;
  }
};

// The units of a thread block.
struct UnitRange {
  int first, last;        // past the last one
  int first_tile, tiles;  // that they belong to

  __forceinline__ UnitRange(const Params& p, int count) {
    const int units = count * p.n_units, blocks = gridDim.x, block = blockIdx.x;
    const int each = units / blocks, more = units % blocks;
    first = block * each + min(block, more);
    last = first + each + (block < more);
    first_tile = first / p.n_units;
    tiles = first < last ? (last - 1) / p.n_units - first_tile + 1 : 0;
  }
};

// The tiles of a thread block, in shared memory, which spares registers.
struct TileList {
  UnitRange range;
  int expert[MAX_TILES];
  int pair[MAX_TILES * ROW_SLOTS];  // -1 where a tile has fewer rows

  // Called by all threads. The list is there after a barrier.
  __forceinline__ void fill(const Params& p, const UnitRange& range_, int thread) {
    if (thread == 0) range = range_;
    for (int i = thread; i < range_.tiles * ROW_SLOTS; i += THREADS) {
      const int tile = range_.first_tile + i / ROW_SLOTS, row = i % ROW_SLOTS;
      if (row == 0) expert[i / ROW_SLOTS] = expert_of(p, tile);
      pair[i] = row == 0 ? tile : -1;
    }
  }

  __forceinline__ void fill(const Params& p, const UnitRange& range_, int thread,
                            const PairSort& sorted) {
    if (thread == 0) range = range_;
    for (int i = thread; i < range_.tiles * ROW_SLOTS; i += THREADS) {
      const int tile = range_.first_tile + i / ROW_SLOTS, row = i % ROW_SLOTS;
      const int bin = sorted.bin_of(tile);
      const uint32 before = sorted.before[bin];
      const int index = pairs_of(before) + (tile - tiles_of(before)) * p.rows + row;
      if (row == 0) expert[i / ROW_SLOTS] = bin;
      const bool is_there = row < p.rows && index < pairs_of(sorted.before[bin + 1]);
      pair[i] = is_there ? static_cast<int>(sorted.order[index]) : -1;
    }
  }

  // Returns the tile of a unit.
  __forceinline__ int tile_of(const Params& p, int unit) const {
    return unit / p.n_units - range.first_tile;
  }

  // Returns the first unit of a tile, were it all of this thread block.
  __forceinline__ int first_unit_of(const Params& p, int tile) const {
    return (range.first_tile + tile) * p.n_units;
  }

  // Returns the tile after `begin` with which another expert begins, or their number.
  __forceinline__ int run_end(int begin) const {
    int end = begin;
    while (end < range.tiles && expert[end] == expert[begin]) end++;
    return end;
  }
};

// Tiles whose codebooks are in the two tables: the first from `begin`, the second from `second` on.
struct TableRange {
  int second, end;

  __forceinline__ TableRange(const Params& p, const TileList& list, int begin)
      : second(list.range.tiles), end(list.range.tiles) {
    if (p.codebook_step == 0) return;  // one for all
    second = list.run_end(begin);
    end = list.run_end(second);
  }
};
