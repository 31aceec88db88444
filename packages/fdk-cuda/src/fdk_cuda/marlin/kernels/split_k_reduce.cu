// Adds the splits of tiles that hopper_gemm.cu or hopper_dgrad.cu split along k, in order, and the
// bias. For dgrad, n is the layer's k and there is no bias.
//
// sums :: [tiles, splits, TILE_M, TILE_N, float32]   of tiles from `first_tile` on
// bias :: [n, dtype] or null
// y    :: [m, n, dtype]
//
// A thread computes four neighbours along n. TILE_M and TILE_N are those of the product.
#include "common/tile_scheduler.cuh"

constexpr int THREADS = 256;
constexpr int VALUES = 4;
constexpr int TILE_VALUES = TILE_M * TILE_N;
constexpr int TILE_BLOCKS = TILE_VALUES / (THREADS * VALUES);
static_assert(TILE_BLOCKS * THREADS * VALUES == TILE_VALUES);

struct Params {
  const float* sums;
  const uint16* bias;
  uint16* y;
  int n, m;
  int n_tiles, m_tiles, group_m_tiles;
  int splits, first_tile;
  int box_rows;  // rows of y in a tile, up to TILE_M
};

extern "C" __global__ void __launch_bounds__(THREADS)
    split_k_reduce(const __grid_constant__ Params p) {
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int index = blockIdx.x / TILE_BLOCKS;
  const int in_tile = (blockIdx.x % TILE_BLOCKS * THREADS + threadIdx.x) * VALUES;
  const Tile tile(p.first_tile + index, p.n_tiles, p.m_tiles, p.group_m_tiles);
  const int n_index = tile.n * TILE_N + in_tile % TILE_N;
  const int in_box = in_tile / TILE_N, m_index = tile.m * p.box_rows + in_box;
  if (n_index >= p.n || in_box >= p.box_rows || m_index >= p.m) return;
  const float* source = p.sums + static_cast<uint64>(index) * p.splits * TILE_VALUES + in_tile;
  float value[VALUES] = {};
#pragma unroll 4
  for (int split = 0; split < p.splits; split++) {
    const float4 v = *reinterpret_cast<const float4*>(source + split * TILE_VALUES);
    value[0] += v.x;
    value[1] += v.y;
    value[2] += v.z;
    value[3] += v.w;
  }
  if (p.bias != nullptr)
#pragma unroll
    for (int i = 0; i < VALUES; i++)
      if (n_index + i < p.n) value[i] += to_float(p.bias[n_index + i]);
  uint16* const out = p.y + static_cast<uint64>(m_index) * p.n + n_index;
  if (p.n % VALUES == 0) {
    *reinterpret_cast<uint2*>(out) =
        make_uint2(from_floats(value[0], value[1]), from_floats(value[2], value[3]));
    return;
  }
#pragma unroll
  for (int i = 0; i < VALUES; i++)
    if (n_index + i < p.n) out[i] = from_floats(value[i], 0.f) & 0xFFFFu;
}
