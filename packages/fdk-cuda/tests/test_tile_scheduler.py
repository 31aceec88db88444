"""tile_scheduler.cuh on the host: the work of each thread block for a list of tiles of experts."""

import random
from itertools import accumulate, pairwise

import pytest
import torch
from host_cuda import build, needs_gxx, run

from fdk_cuda.marlin.heuristics_hopper import GROUP_M_TILES
from fdk_cuda.marlin.instantiations import Variant

STEPS = 3
MAIN = """
struct Params {
  const int* tiles;
  int max_tiles, n_tiles, group_m_tiles, splits, whole_tiles, steps;
};
#include "common/tile_scheduler.cuh"
static void put(const Params& p, int who, const WorkUnit& unit, int step) {
  const int row[] = {who, (int)blockIdx.x, unit.tile.n, unit.rows.expert, unit.rows.first(p),
                     unit.rows.end(p), step};
  if (unit.split_index >= 0) throw "split";
  fwrite(row, 4, 7, stdout);
}
int main(int, char** text) {
  int sizes[5];
  for (int i = 0; i < 5; i++) sizes[i] = atoi(text[1 + i]);
  std::vector<int> tiles(3 * sizes[0] + 1);
  if (fread(tiles.data(), 4, tiles.size(), stdin) != tiles.size()) throw "short input";
  // Splits of all tiles there may be, as grouped_product.py launches it.
  const Params p{tiles.data(), sizes[0], sizes[1], sizes[2], 1, sizes[0] * sizes[1], sizes[3]};
  gridDim.x = sizes[4];
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
    // fill_pipeline, then the loop of the consumers.
    if (first_work_unit() < work_unit_count(p))
      for (WorkCursor at(p); at.any(); at.advance()) put(p, 0, at.unit, at.step);
    for (int index = first_work_unit(); index < work_unit_count(p); index += gridDim.x) {
      const WorkUnit unit(p, index);
      for (int step = unit.first; step < unit.last; step++) put(p, 1, unit, step);
    }
  }
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    options = Variant(4, torch.bfloat16, torch.bfloat16, 1, False).options(CLUSTER=1, EXPERTS=1)
    return build(tmp_path_factory.mktemp("host"), MAIN, options)


def tiles_of(counts, rows):
    """Returns expert, first row and end of each tile."""
    starts = [0, *accumulate(counts)]
    return [
        (expert, first, min(first + rows, end))
        for expert, (start, end) in enumerate(pairwise(starts))
        for first in range(start, end, rows)
    ]


@needs_gxx
@pytest.mark.parametrize("grid", [1, 3, 16])
@pytest.mark.parametrize("n_tiles", [1, 5])
@pytest.mark.parametrize(
    "counts",
    [
        [0, 0, 0],
        [300, 0, 0, 0, 0],
        [0, 0, 0, 777],
        [1] * 9,
        [64, 64, 64, 64],
        [129, 0, 1, 63, 64, 65, 0, 200],
        random.Random(0).choices(range(400), k=11),
    ],
    ids=str,
)
def test_every_tile_once(program, counts, n_tiles, grid):
    """Empty experts, one with all rows, fewer tiles than thread blocks, and more places than tiles.

    Producer and consumers of a thread block agree on its steps.
    """
    rows = 64
    tiles = tiles_of(counts, rows)
    max_tiles = len(tiles) + 2
    # Places past the last tile are never used.
    spare = [(-1, -7, -9)] * (max_tiles - len(tiles))
    listed = torch.tensor([*tiles, *spare], dtype=torch.int32).T.flatten()
    listed = torch.cat([listed, torch.tensor([len(tiles)], dtype=torch.int32)])
    data = listed.numpy().tobytes()
    out = run(program, data, max_tiles, n_tiles, GROUP_M_TILES, STEPS, grid)
    work = torch.frombuffer(bytearray(out), dtype=torch.int32).view(-1, 7) if out else None
    work = [] if work is None else work.tolist()
    produced, consumed = ([row[1:] for row in work if row[0] == who] for who in (0, 1))
    assert produced == consumed
    units = [tuple(row[1:5]) for row in produced]
    wanted = [(n, *tile) for tile in tiles for n in range(n_tiles)]
    assert sorted(units) == sorted(unit for unit in wanted for _ in range(STEPS))
    for start in range(0, len(produced), STEPS):
        assert [row[5] for row in produced[start : start + STEPS]] == list(range(STEPS))
    # Neighbouring thread blocks take tiles along m with the same outputs: weights come from the L2.
    firsts = {row[0]: row for row in reversed(produced)}
    if grid >= GROUP_M_TILES and len(tiles) >= GROUP_M_TILES:
        first = [firsts[block] for block in range(GROUP_M_TILES)]
        assert {row[1] for row in first} == {0}
        assert [tuple(row[2:5]) for row in first] == tiles[:GROUP_M_TILES]
