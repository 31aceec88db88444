// Order of work on Hopper: which tile of y an index is, and which tiles a thread block takes.
//
// split_k_reduce.cu needs the order of tiles only; it has no CLUSTER.
#pragma once
#include "common/fragments.cuh"

// A tile of y, in units of tiles. Groups of `group` tiles along m are computed together, one tile
// of n after another, so that a tile of weights is read again while it is in the L2.
struct Tile {
  int n, m;

  __forceinline__ Tile(int index, int n_tiles, int m_tiles, int group) {
    const int which = index / (group * n_tiles), in_group = index - which * group * n_tiles;
    const int width = min(group, m_tiles - which * group);
    m = which * group + in_group % width;
    n = in_group / width;
  }
};

#ifdef CLUSTER
// Reads of Params: m, box_rows, steps, n_tiles, m_tiles, group_m_tiles, splits, whole_tiles. A step
// is what a stage of the pipeline holds: K_BLOCKS * 64 of the summed dimension.
//
// Macro: EXPERTS, 1 where rows of x are in the order of their experts and the tiles along m are a
// list on the device (expert_sort.py), which has max_tiles places:
//
// tiles :: [3 * max_tiles + 1, int32]   expert, first row and end of each, then their number
#if EXPERTS
__forceinline__ int m_tiles_of(const Params& p) { return p.tiles[3 * p.max_tiles]; }

// The rows of x in a tile.
struct TileRows {
  int expert, first_row, end_row;

  __forceinline__ TileRows(const Params& p, int m_tile) {
    expert = p.tiles[m_tile];
    first_row = p.tiles[p.max_tiles + m_tile];
    end_row = p.tiles[2 * p.max_tiles + m_tile];
  }

  __forceinline__ int first(const Params&) const { return first_row; }
  __forceinline__ int end(const Params&) const { return end_row; }
};
#else
__forceinline__ int m_tiles_of(const Params& p) { return p.m_tiles; }

// Computed where they are used: in variables they change the machine code.
struct TileRows {
  static constexpr int expert = 0;
  int m_tile;

  __forceinline__ TileRows(const Params&, int m_tile_) : m_tile(m_tile_) {}

  __forceinline__ int first(const Params& p) const { return m_tile * p.box_rows; }
  __forceinline__ int end(const Params& p) const { return min(p.m, (m_tile + 1) * p.box_rows); }
};
#endif

// A unit of work: a tile, or one split of its steps.
struct WorkUnit {
  Tile tile;
  TileRows rows;
  int split_index;  // index among the partial tiles that split_k_reduce.cu adds; negative for a
                    // whole tile
  int first, last;  // steps

  __forceinline__ WorkUnit(const Params& p, int index)
      : tile(tile_index(p, index), p.n_tiles, m_tiles_of(p), p.group_m_tiles), rows(p, tile.m) {
    split_index = index - p.whole_tiles;
    const int rank = CLUSTER > 1       ? blockIdx.x % CLUSTER
                     : split_index < 0 ? 0
                                       : split_index % p.splits;
    const int parts = CLUSTER > 1 ? CLUSTER : split_index < 0 ? 1 : p.splits;
    first = p.steps * rank / parts;
    last = p.steps * (rank + 1) / parts;
  }

  __forceinline__ static int tile_index(const Params& p, int index) {
    const int split_index = index - p.whole_tiles;
    return split_index < 0 ? index : p.whole_tiles + split_index / p.splits;
  }
};

__forceinline__ int first_work_unit() { return blockIdx.x / CLUSTER; }

__forceinline__ int work_unit_count(const Params& p) {
  return p.whole_tiles + (p.n_tiles * m_tiles_of(p) - p.whole_tiles) * p.splits;
}

// The steps of all units of a thread block, in order.
struct WorkCursor {
  const Params& p;
  int index;
  WorkUnit unit;
  int step;

  // There must be a unit.
  __forceinline__ WorkCursor(const Params& p_)
      : p(p_), index(first_work_unit()), unit(p_, first_work_unit()), step(unit.first) {}

  __forceinline__ bool any() const { return index < work_unit_count(p); }

  __forceinline__ void advance() {
    if (++step < unit.last) return;
    index += gridDim.x / CLUSTER;
    if (!any()) return;
    unit = WorkUnit(p, index);
    step = unit.first;
  }
};
#endif
