// Hopper's own: barriers, bulk and tensor copies, the order around wgmma.
#pragma once
#include "common/fragments.cuh"

// What cuTensorMapEncodeTiled writes; the kernel only takes its address.
struct alignas(64) TensorMap {
  uint8 opaque[128];
};

__device__ __forceinline__ void open_barrier(uint32 barrier, uint32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void expect_bytes(uint32 barrier, uint32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void arrive(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait_barrier(uint32 barrier, uint32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT_%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra WAIT_%=;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void copy_bulk(uint32 target, const uint8* source, uint32 bytes,
                                          uint32 barrier, uint64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// A box of the map's own size; what lies outside the tensor arrives as zeros.
__device__ __forceinline__ void copy_box(uint32 target, const TensorMap& map, int column, int row,
                                         uint32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(target),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// One thread of the warp, which the compiler then knows to be one.
__device__ __forceinline__ bool elect_one() {
  uint32 chosen;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(chosen));
  return chosen != 0;
}

// Every thread of a cluster's blocks that has not ended. What they wrote need not be seen after it:
// `arrive.release` waits for the whole GPU, which took 1700 cycles of a kernel with two of them.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}

// The address of this block's `address` in another block of the cluster.
__device__ __forceinline__ uint32 in_block(uint32 address, int rank) {
  uint32 remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

// Into another block, whose barrier counts the bytes when they have come.
__device__ __forceinline__ void store_remote(uint32 address, const float* v, uint32 barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
      "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
      "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier)
      : "memory");
}

// Until the bytes of a barrier's first phase have come from another block.
__device__ __forceinline__ void wait_dsmem(uint32 barrier) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT_%=:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0;\n"
      "@!p bra WAIT_%=;\n}" ::"r"(barrier)
      : "memory");
}

__device__ __forceinline__ void store_shared(uint32 address, const float* v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v[0]), "f"(v[1]),
               "f"(v[2]), "f"(v[3])
               : "memory");
}

__device__ __forceinline__ float4 load_shared(uint32 address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Of `threads` threads; barrier 0 is __syncthreads' own.
__device__ __forceinline__ void sync_named(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Between the writing of operand registers and the wgmmas that read them.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until at most PENDING groups of wgmmas are unfinished.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// The accumulators may have changed, and are used: the compiler keeps nothing of them across.
template <int COUNT>
__device__ __forceinline__ void touch(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

constexpr int ROW_BYTES = 128;    // of a box of x or dy: 64 columns
constexpr int OPERAND_SHIFT = 4;  // a descriptor counts 16 bytes
// Operand B: rows of 128 bytes, swizzled over 128 bytes as tensor copies write them; 8 rows, 1024
// bytes, to the next group.
__device__ __forceinline__ uint64 operand_b(uint32 address) {
  return (address & 0x3FFFFull) >> OPERAND_SHIFT | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
// Sixteen columns further along k, in the units of a descriptor.
constexpr int OPERAND_B_STEP = 2;
