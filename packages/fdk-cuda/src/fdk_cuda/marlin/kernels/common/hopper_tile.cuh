// Shape of a tile on Hopper, its shared memory and registers.
//
// TILE_M, CONSUMERS, K_GROUPS, K_BLOCKS, STAGES and CLUSTER are set by the kernel. A tile is TILE_M
// rows of operand B (x or dy), of which box_rows are used, by TILE_N outputs, 64 for each consumer.
#pragma once
#include "common/decode.cuh"

constexpr int GROUP_THREADS = 128;
constexpr int THREADS = (CONSUMERS + 1) * GROUP_THREADS;
constexpr int CONSUMER_THREADS = CONSUMERS * GROUP_THREADS;
constexpr int GROUP_N = 64;
constexpr int N_GROUPS = CONSUMERS / K_GROUPS;
constexpr int TILE_N = N_GROUPS * GROUP_N;
constexpr int B_BLOCK_BYTES = TILE_M * BLOCK_K * 2;
constexpr int B_BYTES = K_BLOCKS * B_BLOCK_BYTES;  // bytes of operand B in a stage
constexpr int OWN_M = TILE_M / CLUSTER;  // rows of x of a tile that a thread block finishes
// Rows of y that a consumer writes at a time.
constexpr int PIECE_M = OWN_M % 32 == 0 ? 32 : 16;
// Bytes between these rows. Table entries of 3 or more bits, except 5, fill half of their 256
// bytes; the other halves hold a row of y each.
constexpr bool HAS_ROOM_IN_TABLE = HAS_TABLE && BITS > 2 && BITS != 5 && K_GROUPS == 1;
constexpr int PIECE_STRIDE = HAS_ROOM_IN_TABLE ? 256 : GROUP_N * 2;
constexpr int PIECE_BYTES = PIECE_M * PIECE_STRIDE;
constexpr int ACCUMULATORS = TILE_M / 2;  // float32 sums of a thread
constexpr int OWN_ACCUMULATORS = ACCUMULATORS / CLUSTER;
// Registers of a thread, after the producers have handed theirs over.
constexpr int CONSUMER_REGISTERS = CONSUMERS == 4 ? 112 : CONSUMERS == 3 ? 160 : 232;
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 40 : 32;
// Registers are only exchanged within a thread block: consumers that ask for more than producers
// release wait forever.
static_assert(CONSUMERS * CONSUMER_REGISTERS + PRODUCER_REGISTERS <=
              (CONSUMERS + 1) * (65536 / THREADS / 8 * 8));
constexpr int TABLE_BARRIER = 1, GROUP_BARRIER = 2, PAIR_BARRIER = 6;
// Threads that finish the sums of a tile.
constexpr int FINISHING_THREADS = N_GROUPS * GROUP_THREADS;
static_assert(CONSUMERS >= 2 && CONSUMERS <= 4);
static_assert(K_GROUPS == 1 || (K_GROUPS == 2 && CONSUMERS == 4 && K_BLOCKS == 2));
static_assert(TILE_M % 16 == 0 && TILE_M <= 256);
static_assert(B_BLOCK_BYTES % 1024 == 0, "operand B is swizzled in groups of 1024 bytes");
static_assert(K_BLOCKS == 1 || K_BLOCKS == 2);
static_assert(CLUSTER == 1 || CLUSTER == 2);
static_assert(OWN_M % 16 == 0);
static_assert((CLUSTER - 1) * OWN_ACCUMULATORS * 4 * FINISHING_THREADS <= STAGES * B_BYTES,
              "sums of the other thread blocks overwrite the stages of operand B");

// Two barriers per stage, then one for bytes from the other thread block of a cluster.
constexpr uint32 DSMEM_BARRIER = 16 * STAGES;
