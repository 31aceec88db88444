// The order of tiles: which rows and columns of y the tile of an index is.
#pragma once
#include "common.cuh"

// `group` tiles of columns are taken together, row tile by row tile, so that a tile of weights is
// read again while it is in the L2.
struct Tile {
  int row, column;

  __device__ __forceinline__ Tile(int index, int row_tiles, int column_tiles, int group) {
    const int which = index / (group * row_tiles), in_group = index - which * group * row_tiles;
    const int width = min(group, column_tiles - which * group);
    column = which * group + in_group % width;
    row = in_group / width;
  }
};
