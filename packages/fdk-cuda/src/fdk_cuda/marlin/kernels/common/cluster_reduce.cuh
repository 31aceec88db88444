// Reduction of accumulators on Hopper: over the thread blocks of a cluster, through distributed
// shared memory (DSMEM), and over the two consumers that share a tile's outputs (K_GROUPS).
#pragma once
#include "common/hopper.cuh"
#include "common/hopper_tile.cuh"

// Each thread block of a cluster receives the others' sums of its own rows and adds them to its
// own, which then are the first OWN_ACCUMULATORS of d.
__forceinline__ void cluster_reduce(float (&d)[ACCUMULATORS], uint32 buffers, uint32 barriers,
                                    int thread) {
  constexpr int PIECES = OWN_ACCUMULATORS / 4;
  const int rank = blockIdx.x % CLUSTER;
  // Every thread block has read its last stage and initialised its barriers.
  sync_cluster();
  uint32 targets[CLUSTER], remote_barriers[CLUSTER];
#pragma unroll
  for (int to = 0; to < CLUSTER; to++) {
    const int sender = rank < to ? rank : rank - 1;
    targets[to] = in_block(buffers + (sender * PIECES * FINISHING_THREADS + thread) * 16, to);
    remote_barriers[to] = in_block(barriers + DSMEM_BARRIER, to);
  }
  // In place, four at a time: a second array of sums would not fit in the registers.
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    float v[CLUSTER][4];
#pragma unroll
    for (int to = 0; to < CLUSTER; to++) {
#pragma unroll
      for (int e = 0; e < 4; e++) v[to][e] = d[to * OWN_ACCUMULATORS + 4 * i + e];
      if (to != rank)
        store_remote(targets[to] + i * FINISHING_THREADS * 16, v[to], remote_barriers[to]);
    }
#pragma unroll
    for (int to = 0; to < CLUSTER; to++)
#pragma unroll
      for (int e = 0; e < 4; e++) d[4 * i + e] = to == 0 || to == rank ? v[to][e] : d[4 * i + e];
  }
  wait_dsmem(barriers + DSMEM_BARRIER);
#pragma unroll
  for (int sender = 0; sender < CLUSTER - 1; sender++)
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      const float4 v =
          load_shared(buffers + ((sender * PIECES + i) * FINISHING_THREADS + thread) * 16);
      d[4 * i] += v.x;
      d[4 * i + 1] += v.y;
      d[4 * i + 2] += v.z;
      d[4 * i + 3] += v.w;
    }
}

// Two consumers computed halves of each stage: the first gets the sums of both, PIECE_M rows of x
// at a time, through the memory in which both stage rows of y.
__forceinline__ void reduce_k_groups(float (&d)[ACCUMULATORS], uint32 buffer, int thread,
                                     int barrier, bool gets) {
  constexpr int SUMS_AT_ONCE = PIECE_M / 2;
#pragma unroll
  for (int first = 0; first < ACCUMULATORS; first += SUMS_AT_ONCE) {
    sync_named(barrier, 2 * GROUP_THREADS);  // the last piece, or row of y, has been read
    if (!gets)
#pragma unroll
      for (int i = 0; i < SUMS_AT_ONCE; i += 4)
        store_shared(buffer + (i / 4 * GROUP_THREADS + thread) * 16, &d[first + i]);
    sync_named(barrier, 2 * GROUP_THREADS);
    if (gets)
#pragma unroll
      for (int i = 0; i < SUMS_AT_ONCE; i += 4) {
        const float4 v = load_shared(buffer + (i / 4 * GROUP_THREADS + thread) * 16);
        d[first + i] += v.x;
        d[first + i + 1] += v.y;
        d[first + i + 2] += v.z;
        d[first + i + 3] += v.w;
      }
  }
}
