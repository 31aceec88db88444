// Work of small_m_experts.cu. A tile is a few rows of x that go to one expert; a unit is a tile and
// GROUP_N outputs. A thread block takes neighbouring units, so that it meets few experts, and its
// groups of warps take them in turns.
//
// Reads of Params, all written by the kernels before, or by the router:
//   tiles :: [3 * max_tiles + 1, int32]  expert, first index and end of each, then their number, as
//            expert_sort.py writes them; unused where ids are given
//   order :: [pairs, int32]              the pairs in the order of their experts; likewise
//   ids   :: [pairs, int32 | int64]      or null. If given, each pair is a tile
//
// The expert `experts` means none: the rows of y are zeros.
#pragma once
#include "common/small_m_products.cuh"

constexpr int ROW_SLOTS = SPREAD ? 4 : 8 * M_TILES;  // rows of a tile at most
constexpr int MAX_TILES = 64;                        // of a thread block

// Reads what another kernel may just have written, not from the L1.
template <class T>
__forceinline__ T read(const T* from) {
  return *static_cast<const volatile T*>(from);
}

struct ExpertTile {
  int expert, first, end;  // indices into the order

  __forceinline__ ExpertTile(const Params& p, int tile) {
    if (p.ids == nullptr) {
      expert = read(p.tiles + tile);
      first = read(p.tiles + p.max_tiles + tile);
      end = read(p.tiles + 2 * p.max_tiles + tile);
    } else {
      const long long id = p.has_long_ids ? read(static_cast<const long long*>(p.ids) + tile)
                                          : read(static_cast<const int*>(p.ids) + tile);
      expert = 0 <= id && id < p.experts ? static_cast<int>(id) : p.experts;
      first = tile;
      end = tile + 1;
    }
  }
};

// The units of a thread block.
struct UnitRange {
  int first, last;        // past the last one
  int first_tile, tiles;  // that they belong to

  __forceinline__ explicit UnitRange(const Params& p) {
    const int count = p.ids == nullptr ? read(p.tiles + 3 * p.max_tiles) : p.max_tiles;
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

  // Called by all threads.
  __forceinline__ void fill(const Params& p, const UnitRange& range_, int thread) {
    if (thread == 0) range = range_;
    for (int i = thread; i < range_.tiles * ROW_SLOTS; i += THREADS) {
      const ExpertTile tile(p, range_.first_tile + i / ROW_SLOTS);
      const int index = tile.first + i % ROW_SLOTS;
      if (i % ROW_SLOTS == 0) expert[i / ROW_SLOTS] = tile.expert;
      pair[i] = index >= tile.end ? -1 : p.ids == nullptr ? read(p.order + index) : index;
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
