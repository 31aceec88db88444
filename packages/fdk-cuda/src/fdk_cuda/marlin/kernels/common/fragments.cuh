// Blocks in fragment order: the macros of an instantiation, constants of the layout (the same as in
// layout.py, which explains the order), loads of a lane's words and scales, conversions and
// tensor-core products.
//
// Macros, set by instantiations.py:
//   BITS        1 to 8
//   FP16        1 where x, codebook and y are fp16, 0 for bf16
//   SCALE_TYPE  of scales and zero points: 0 bf16, 1 fp16, 2 fp32
//   PER_ROW     scales in a row of a block: 1, or 2 where groups end inside 64 columns
//   AFFINE      1: the value of a code is code - zero_point, and the codebook holds 0, 1, 2, ...
//
// Functions are __device__ by default: NVRTC compiles with --device-as-default-execution-space.
#pragma once

using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;

static_assert(BITS >= 1 && BITS <= 8);
static_assert(PER_ROW == 1 || PER_ROW == 2);

constexpr int LANES = 32;
constexpr int STEPS = 4;      // tensor-core products along the 64 columns of a block
constexpr int REGISTERS = 4;  // registers of operand A, two values each
constexpr int FRAGMENTS = 2;  // in a block, 16 rows each
constexpr int BLOCK_N = 32;
constexpr int BLOCK_K = 64;
constexpr int KINDS = AFFINE ? 2 : 1;  // scales, then zero points
constexpr int SCALE_BYTES = SCALE_TYPE == 2 ? 4 : 2;
constexpr int CODE_BYTES = BLOCK_N * BLOCK_K * BITS / 8;
// Scales and zero points that a lane needs: of rows g and g + 8 of both fragments.
constexpr int LANE_SCALE_BYTES = KINDS * PER_ROW * FRAGMENTS * 2 * SCALE_BYTES;
constexpr int BLOCK_BYTES = CODE_BYTES + 8 * LANE_SCALE_BYTES;
constexpr int LANE_WORDS = FRAGMENTS * BITS;
// 5, 6 and 7 bits: some bits of a code are in words that two or four units share, stored after the
// units' own words of both fragments (layout.py: _split_positions).
constexpr bool IS_SPLIT = BITS > 4 && BITS < 8;
// Indices of the shared words of a fragment among a lane's words.
constexpr int word_of_two(int fragment, int unit) { return 8 + 2 * (unit >> 1) + fragment; }
constexpr int word_of_four(int fragment) { return (BITS == 5 ? 8 : 12) + fragment; }
static_assert(BLOCK_BYTES % 16 == 0, "blocks are copied in units of 16 bytes");
static_assert(LANE_SCALE_BYTES % 8 == 0, "a lane's scales are loaded 8 or 16 bytes at a time");

__forceinline__ uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

__forceinline__ uint32 byte_permute(uint32 a, uint32 b, uint32 selector) {
  uint32 out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
  return out;
}

__forceinline__ uint32 rotate_right(uint32 word, int places) {
  return __funnelshift_r(word, word, places & 31);
}

__forceinline__ float bf16_to_float(uint32 bits) { return __uint_as_float(bits << 16); }

__forceinline__ float fp16_to_float(uint32 bits) {
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(static_cast<uint16>(bits)));
  return out;
}

__forceinline__ float to_float(uint32 bits) {
  return FP16 ? fp16_to_float(bits) : bf16_to_float(bits & 0xFFFFu);
}

// Rounds two values to the activations' dtype, the first in the lower half.
__forceinline__ uint32 from_floats(float low, float high) {
  uint32 out;
  if (FP16)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

// Multiplies or subtracts two pairs; each result is rounded once to the activations' dtype.
#define FDK_PAIR(name, op)                                           \
  __forceinline__ uint32 name(uint32 a, uint32 b) {                  \
    uint32 out;                                                      \
    if (FP16)                                                        \
      asm(op ".rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));  \
    else                                                             \
      asm(op ".rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b)); \
    return out;                                                      \
  }
FDK_PAIR(multiply_pair, "mul")
FDK_PAIR(subtract_pair, "sub")
#undef FDK_PAIR

// d += a b for fragments a :: [16, 16] and b :: [16, 8], with float32 sums.
__forceinline__ void multiply(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
#define FDK_MMA(type)                                              \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type       \
      ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])             \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if (FP16)
    FDK_MMA("f16");
  else
    FDK_MMA("bf16");
#undef FDK_MMA
}

// Returns the place of a lane's pieces among 32, see layout.py.
__forceinline__ int lane_slot(int g, int t) { return 8 * t + (g ^ 2 * t); }

// Loads a lane's words of a block: pieces of 16 bytes, 32 lanes to a piece, and a last one of 8.
__forceinline__ void load_words(uint32 (&words)[LANE_WORDS], const uint8* block, int slot) {
  constexpr int WHOLE = LANE_WORDS / 4;
#pragma unroll
  for (int piece = 0; piece < WHOLE; piece++) {
    const uint4 v = *reinterpret_cast<const uint4*>(block + (piece * LANES + slot) * 16);
    words[4 * piece] = v.x;
    words[4 * piece + 1] = v.y;
    words[4 * piece + 2] = v.z;
    words[4 * piece + 3] = v.w;
  }
  if constexpr (LANE_WORDS % 4 != 0) {
    const uint2 v = *reinterpret_cast<const uint2*>(block + WHOLE * LANES * 16 + slot * 8);
    words[4 * WHOLE] = v.x;
    words[4 * WHOLE + 1] = v.y;
  }
}

// Scales and zero points of rows g and g + 8 of a block's fragments.
struct Scales {
  uint32 words[LANE_SCALE_BYTES / 4];

  __forceinline__ void load(const uint8* block, int g) {
    const uint8* own = block + CODE_BYTES + g * LANE_SCALE_BYTES;
    if constexpr (LANE_SCALE_BYTES == 8) {
      const uint2 v = *reinterpret_cast<const uint2*>(own);
      words[0] = v.x;
      words[1] = v.y;
    } else {
#pragma unroll
      for (int i = 0; i < LANE_SCALE_BYTES / 16; i++) {
        const uint4 v = *reinterpret_cast<const uint4*>(own + 16 * i);
        words[4 * i] = v.x;
        words[4 * i + 1] = v.y;
        words[4 * i + 2] = v.z;
        words[4 * i + 3] = v.w;
      }
    }
  }

  // kind: 0 scale, 1 zero point; half of the 64 columns; row: 0 for g, 1 for g + 8.
  __forceinline__ float get(int kind, int half, int fragment, int row) const {
    const int index = ((kind * PER_ROW + half) * FRAGMENTS + fragment) * 2 + row;
    if (SCALE_TYPE == 2) return __uint_as_float(words[index % (LANE_SCALE_BYTES / 4)]);
    const uint32 word = words[index >> 1];
    if (SCALE_TYPE == 1) return fp16_to_float(index & 1 ? word >> 16 : word & 0xFFFFu);
    return __uint_as_float(index & 1 ? word & 0xFFFF0000u : word << 16);
  }

  // Returns a 16-bit scale in both halves.
  __forceinline__ uint32 pair(int half, int fragment, int row) const {
    const uint32 word = words[half * FRAGMENTS + fragment];
    return byte_permute(word, word, row ? 0x3232 : 0x1010);
  }
};

// Programmatic dependent launch: lets the next kernel of the stream start, and waits for the end of
// the previous one.
__forceinline__ void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__forceinline__ void wait_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
