// Hopper's PTX: barriers, bulk and tensor copies, clusters, and ordering around wgmma.
#pragma once
#include "common/barrier.cuh"

// The 128 bytes that cuTensorMapEncodeTiled writes; only their address is used.
struct alignas(64) TensorMap {
  uint8 opaque[128];
};

__forceinline__ void open_barrier(uint32 barrier, uint32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__forceinline__ void expect_bytes(uint32 barrier, uint32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__forceinline__ void arrive(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__forceinline__ void copy_bulk(uint32 target, const uint8* source, uint32 bytes, uint32 barrier,
                               uint64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Copies a box of the map. Elements outside the tensor arrive as zeros.
__forceinline__ void copy_box(uint32 target, const TensorMap& map, int column, int row,
                              uint32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(target),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

__forceinline__ void prefetch_l1(const void* address) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
}

// Waits for all running threads of the cluster, without ordering their writes: `arrive.release`
// waits for the whole GPU (1700 cycles).
__forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}

// Returns the address of `address` in another thread block of the cluster.
__forceinline__ uint32 in_block(uint32 address, int rank) {
  uint32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

// Stores to another thread block, whose barrier counts the bytes on arrival.
__forceinline__ void store_remote(uint32 address, const float* v, uint32 barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
      "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier)
      : "memory");
}

// Waits for the first phase of a barrier that counts bytes from another thread block.
__forceinline__ void wait_dsmem(uint32 barrier) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT_%=:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0;\n"
      "@!p bra WAIT_%=;\n}" ::"r"(barrier)
      : "memory");
}

__forceinline__ void store_shared(uint32 address, const float* v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v[0]), "f"(v[1]),
               "f"(v[2]), "f"(v[3])
               : "memory");
}

__forceinline__ float4 load_shared(uint32 address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Orders writes of operand registers before the wgmmas that read them.
__forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most PENDING groups of wgmmas are unfinished.
template <int PENDING>
__forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Tells the compiler that accumulators may have changed and are used.
template <int COUNT>
__forceinline__ void touch(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

constexpr int ROW_BYTES = 128;    // bytes of a row of a box of x or dy: 64 columns
constexpr int OPERAND_SHIFT = 4;  // a descriptor counts 16 bytes
// Descriptor of operand B: rows of 128 bytes, swizzled over 128 bytes as tensor copies write them;
// 1024 bytes to the next eight rows.
__forceinline__ uint64 operand_b(uint32 address) {
  return (address & 0x3FFFFull) >> OPERAND_SHIFT | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
// Sixteen columns along k, in descriptor units.
constexpr int OPERAND_B_STEP = 2;
