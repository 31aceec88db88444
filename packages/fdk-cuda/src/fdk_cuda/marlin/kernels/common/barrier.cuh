// Barriers in shared memory (mbarrier), and the thread of a warp that starts copies.
#pragma once
#include "common/fragments.cuh"

#if __CUDA_ARCH__ >= 900 && !defined(FORCE_CP_ASYNC)
#define FDK_BULK_COPY 1
#else
#define FDK_BULK_COPY 0
#endif

__forceinline__ bool elect_one() {
#if FDK_BULK_COPY
  uint32 chosen;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(chosen));
  return chosen != 0;
#else
  return threadIdx.x % LANES == 0;
#endif
}

__forceinline__ void wait_barrier(uint32 barrier, uint32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT_%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra WAIT_%=;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Synchronises `threads` threads; barrier 0 is that of __syncthreads.
__forceinline__ void sync_named(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
