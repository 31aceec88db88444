// The order of tiles: which rows and columns of y the tile of an index is.
#pragma once
#include "common/fragments.cuh"

// `group` tiles of columns are taken together, row tile by row tile, so that a tile of weights is
// read again while it is in the L2.
struct Tile {
  int row, column;

  __device__ __forceinline__ Tile(int index, int n_tiles, int m_tiles, int group) {
    const int which = index / (group * n_tiles), in_group = index - which * group * n_tiles;
    const int width = min(group, m_tiles - which * group);
    column = which * group + in_group % width;
    row = in_group / width;
  }
};
