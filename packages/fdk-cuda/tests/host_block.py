"""Thread blocks of the few-row kernels, run on the host: every thread is a fiber.

Barriers, shuffles and tensor-core products are computed as a GPU defines them; copies arrive when
they are waited for, into stages full of other bytes until then. So indices, decoding, sums and the
order of barriers are those of the kernel's own source.
"""

# Before the kernel. Functions with inline assembly are renamed where they are defined, then
# replaced.
BLOCK = r"""
#include <ucontext.h>
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 17);
  const int* generation = nullptr;  // of the barrier at which it waits
  int seen;
  bool done;
};
static ucontext_t scheduler;
static std::vector<Fiber> fibers;
struct Barrier {
  int arrived = 0, generation = 0;
  void wait(int threads) {
    Fiber& self = fibers[threadIdx.x];
    if (++arrived == threads) {
      arrived = 0;
      generation++;
      return;
    }
    self.generation = &generation;
    self.seen = generation;
    swapcontext(&self.context, &scheduler);
  }
};
static Barrier named_barriers[16], warp_barriers[32];
struct WarpMemory { unsigned values[32], a[32][4], b[32][2]; };
static WarpMemory warps[32];
static void __syncthreads() { named_barriers[0].wait(fibers.size()); }
static void __syncwarp() { warp_barriers[threadIdx.x / 32].wait(32); }
template <class T>
static T __shfl_sync(unsigned, T value, int lane) {
  WarpMemory& warp = warps[threadIdx.x / 32];
  warp.values[threadIdx.x % 32] = value;
  __syncwarp();
  const T out = warp.values[lane % 32];
  __syncwarp();
  return out;
}

static unsigned __match_any_sync(unsigned, int value) {
  unsigned same = 0;
  for (int lane = 0; lane < 32; lane++) same |= (__shfl_sync(~0u, value, lane) == value) << lane;
  return same;
}
#define __popc __builtin_popcount

extern unsigned char shared[];
#undef __cvta_generic_to_shared
#define __cvta_generic_to_shared(p) ((uint64_t)((const unsigned char*)(p) - shared) + 1024)
#define __cvta_shared_to_generic(address) ((void*)(shared + (address) - 1024))
#define __trap abort

#define byte_permute device_byte_permute
#define from_floats device_from_floats
#define multiply device_multiply
#define sync_named device_sync_named
#define Pipeline DevicePipeline
#include "common/fragments.cuh"
#include "common/barrier.cuh"
#include "common/pipeline.cuh"
#undef byte_permute
#undef from_floats
#undef multiply
#undef sync_named
#undef Pipeline

static void sync_named(int barrier, int threads) { named_barriers[barrier].wait(threads); }
static uint32 byte_permute(uint32 a, uint32 b, uint32 selector) {
  const uint64 bytes = (uint64)b << 32 | a;
  uint32 out = 0;
  for (int i = 0; i < 4; i++) {
    const int at = selector >> 4 * i & 15, byte = bytes >> 8 * (at & 7) & 255;
    out |= (at & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return out;
}
static uint32 bits_of(float value) {
  uint32 bits;
  if (FP16) {
    const _Float16 rounded = value;
    uint16 low;
    memcpy(&low, &rounded, 2);
    return low;
  }
  memcpy(&bits, &value, 4);
  return (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
}
static uint32 from_floats(float low, float high) { return bits_of(low) | bits_of(high) << 16; }

// mma.m16n8k16: value i % 2 of register i / 2 of a is at row g + 8 * (r % 2), column
// 2 * t + 8 * (r / 2) + e; of b at row 2 * t + 8 * r + e, column g.
static void multiply(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  WarpMemory& warp = warps[threadIdx.x / 32];
  memcpy(warp.a[lane], a, 16);
  warp.b[lane][0] = b0;
  warp.b[lane][1] = b1;
  __syncwarp();
  for (int i = 0; i < 4; i++) {
    const int column = 2 * t + i % 2;
    double sum = d[i];
    for (int k = 0; k < 16; k++) {
      const int quarter = k % 8 / 2, upper = k / 8, shift = 16 * (k % 2);
      const uint32 left = warp.a[4 * g + quarter][2 * upper + i / 2] >> shift & 0xFFFFu;
      const uint32 right = warp.b[4 * column + quarter][upper] >> shift & 0xFFFFu;
      // Columns without a row of x may hold anything.
      sum += (double)to_float(left) * to_float(right);
    }
    d[i] = sum;
  }
  __syncwarp();
}

template <int STAGES, int STAGE_BYTES>
struct Pipeline {
  static constexpr int BYTES = STAGES * STAGE_BYTES, BARRIER_BYTES = STAGES * 2 * 8;
  struct Copy { const uint8* source = nullptr; uint64 stride; int parts, bytes; };
  uint8* stages;
  int stage = 0;
  Copy copies[STAGES];

  Pipeline(const uint8* stages_, const uint8*) : stages(const_cast<uint8*>(stages_)) {}
  const uint8* current() const { return stages + stage * STAGE_BYTES; }
  template <int PART_BYTES>
  void fill(int to, const uint8* source, uint64 stride, int parts, bool any) {
    if (threadIdx.x % 32) return;
    if (copies[to].source) throw "a stage is filled twice";
    memset(stages + to * STAGE_BYTES, 0xA5, STAGE_BYTES);
    if (any) copies[to] = {source, stride, parts, PART_BYTES};
  }
  void wait() {
    if (threadIdx.x % 32 == 0) {
      Copy& copy = copies[stage];
      if (!copy.source) throw "waits for a stage that nobody fills";
      for (int part = 0; part < copy.parts; part++)
        memcpy(stages + stage * STAGE_BYTES + part * copy.bytes,
               copy.source + part * copy.stride, copy.bytes);
      copy.source = nullptr;
    }
    __syncwarp();
  }
  void release() const { __syncwarp(); }
  void advance() { stage = (stage + 1) % STAGES; }
};

// Runs `kernel` for all threads of all thread blocks.
static void (*run_thread)();
static void enter() {
  run_thread();
  fibers[threadIdx.x].done = true;
  swapcontext(&fibers[threadIdx.x].context, &scheduler);
}
static void run_blocks(int blocks, int threads, void (*kernel)(), uint8* memory, size_t bytes) {
  run_thread = kernel;
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
    memset(memory, 0xFF, bytes);
    fibers = std::vector<Fiber>(threads);
    for (Fiber& fiber : fibers) {
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      makecontext(&fiber.context, enter, 0);
      fiber.done = false;
    }
    for (bool any = true; any;) {
      any = false;
      bool moved = false;
      for (int i = 0; i < threads; i++) {
        Fiber& fiber = fibers[i];
        any |= !fiber.done;
        if (fiber.done || (fiber.generation && *fiber.generation == fiber.seen)) continue;
        moved = true;
        fiber.generation = nullptr;
        threadIdx.x = i;
        swapcontext(&scheduler, &fiber.context);
      }
      if (any && !moved) throw "threads wait for each other";
    }
  }
}
"""
