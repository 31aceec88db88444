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
// Reads of Params: steps, n_tiles, m_tiles, group_m_tiles, splits, whole_tiles. A step is what a
// stage of the pipeline holds: K_BLOCKS * 64 of the summed dimension.

// A unit of work: a tile, or one split of its steps.
struct WorkUnit {
  Tile tile;
  int split_index;  // index among the partial tiles that split_k_reduce.cu adds; negative for a
                    // whole tile
  int first, last;  // steps

  __forceinline__ WorkUnit(const Params& p, int index)
      : tile(tile_index(p, index), p.n_tiles, p.m_tiles, p.group_m_tiles) {
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
  return p.whole_tiles + (p.n_tiles * p.m_tiles - p.whole_tiles) * p.splits;
}

// The steps of all units of a thread block, in order.
struct WorkCursor {
  const Params& p;
  int index;
  WorkUnit unit;
  int step;

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
