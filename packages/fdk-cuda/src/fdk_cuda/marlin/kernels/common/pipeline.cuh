// A pipeline of stages per warp, filled from global memory by asynchronous copies.
//
// From compute capability 9.0 on, one lane starts bulk copies, and each stage has two barriers:
// `full` counts the bytes that have arrived, `empty` says that the warp has read them. Both are
// needed: the copy engine is not ordered after shared-memory loads in flight. Before 9.0 every lane
// copies 16-byte pieces by cp.async and counts its own groups.
#pragma once
#include "common/barrier.cuh"

template <int STAGES, int STAGE_BYTES>
struct Pipeline {
  // Bytes of a warp's stages, and of their barriers.
  static constexpr int BYTES = STAGES * STAGE_BYTES;
  static constexpr int BARRIER_BYTES = STAGES * 2 * 8;
  static_assert(STAGE_BYTES % 16 == 0);

  const uint8* stages;
  uint32 stages_address;
  uint32 barriers;
  uint64 policy;
  int stage = 0;
  uint32 phase = 0;

  __forceinline__ Pipeline(const uint8* stages_, const uint8* barriers_)
      : stages(stages_),
        stages_address(shared_address(stages_)),
        barriers(shared_address(barriers_)) {
#if FDK_BULK_COPY
    // Each weight is read once: it must not evict x and other data from the L2.
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    if (elect_one()) {
      for (int i = 0; i < 2 * STAGES; i++)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * i) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
#endif
  }

  __forceinline__ const uint8* current() const { return stages + stage * STAGE_BYTES; }

  // Starts the copy of `parts` pieces of PART_BYTES, `stride` bytes apart, to a stage, which has
  // room for PARTS. Called by the whole warp; with `any` false there is nothing to copy.
  template <int PART_BYTES>
  __forceinline__ void fill(int to, const uint8* source, uint64 stride, int parts, bool any) {
    constexpr int PARTS = STAGE_BYTES / PART_BYTES;
    static_assert(PARTS * PART_BYTES == STAGE_BYTES);
    const uint32 target = stages_address + to * STAGE_BYTES;
#if FDK_BULK_COPY
    if (any && elect_one()) {
      const uint32 full = barriers + 16 * to;
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full),
                   "r"(parts * PART_BYTES)
                   : "memory");
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        if (part >= parts) break;
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[%0], [%1], %2, [%3], %4;" ::"r"(target + part * PART_BYTES),
            "l"(source + part * stride), "r"(PART_BYTES), "r"(full), "l"(policy)
            : "memory");
      }
    }
#else
    constexpr int PIECES = PART_BYTES / 16;
    const int lane = threadIdx.x % LANES;
    if (any) {
#pragma unroll
      for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int first = 0; first < PIECES; first += LANES)
          if (part < parts && (first + LANES <= PIECES || first + lane < PIECES))
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                             target + part * PART_BYTES + (first + lane) * 16),
                         "l"(source + part * stride + (first + lane) * 16)
                         : "memory");
    }
    // An empty group too, so that STAGES groups are always in flight.
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
  }

  // Waits until the current stage has arrived.
  __forceinline__ void wait() const {
#if FDK_BULK_COPY
    wait_barrier(barriers + 16 * stage, phase);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
    __syncwarp();
#endif
  }

  // Ends reading of the current stage by all lanes, so that it can be filled again.
  __forceinline__ void release() const {
    __syncwarp();
#if FDK_BULK_COPY
    if (elect_one()) {
      const uint32 empty = barriers + 16 * stage + 8;
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty) : "memory");
      wait_barrier(empty, phase);
    }
#endif
  }

  __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};
