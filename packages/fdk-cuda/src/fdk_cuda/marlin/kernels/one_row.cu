// y = x @ W_hat.T + bias for one row of x and codebooks of two values, by integer tensor cores.
//
// x        :: [1, columns, dtype]
// packed   :: [rows / 32, columns / 64, BLOCK_BYTES, uint8]
// codebook :: [2, dtype]
// bias     :: [n, dtype] or null
// y        :: [1, n, dtype]
//
// Of the eight columns of operand B one row of x takes one; here it takes three. Every group of 64
// values of x is rounded to integers of 21 bits, by the group's largest, and these are cut into
// three signed digits of 8 bits: v = d0 + 2^8 d1 + 2^16 d2. Operand A holds the bits of W as they
// lie in its words, four to a register by one AND, so a product is exact; small_m.cu spends 2.5
// times the instructions on its operand, in which every value takes 16 bits.
//
// The bits of a row lie at two places of a byte, one twice the other, and those in the lower half
// of a fragment higher by a power of two. B makes up for the first: it has 2 v where the bit counts
// once. The end of a tile makes up for the second.
//
// With a lone power of two in x the sum of bits is exact, and so is y (see small_m.cu: KEEPS_SUM).
// An infinity in x gives NaN.
#include "tiles.cuh"

static_assert(BITS == 1 && !AFFINE && PER_ROW == 1 && ROW_GROUPS == 1);

constexpr int DIGITS = 3, QUAD = 4;
constexpr int FACTORS_BYTES = QUAD * 4;
constexpr int GROUP_BYTES = FRAGMENTS * DIGITS * QUAD * 16 + FACTORS_BYTES;
// What Python decides, which counts the shared memory:
//   DIGITS_BYTES  of the digits of a group and what their sums are scaled with
static_assert(GROUP_BYTES == DIGITS_BYTES);
constexpr int HALVES = 2;  // of 8 rows, in a fragment
// To x times a power of two this adds so much that the sum's lower bytes are its digits, each moved
// to the middle of a byte's range: 2^23 + 0x408080.
constexpr float TO_DIGITS = 12615808.f;
constexpr uint32 DIGIT_MIDDLE = 0x80808080u, TOP_MIDDLE = 0x40404040u;

// d += a b for a :: [16, 32] and b :: [32, 8] of signed bytes in fragments.
__device__ __forceinline__ void multiply_bytes(int (&d)[4], const uint32 (&a)[4], uint32 b0,
                                               uint32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The digits of four integers, as four bytes to a word.
__device__ __forceinline__ void split_digits(uint32 (&digits)[DIGITS], uint32 v0, uint32 v1,
                                             uint32 v2, uint32 v3) {
  const uint32 low = byte_permute(v0, v1, 0x5140), high = byte_permute(v2, v3, 0x5140);
  const uint32 top = byte_permute(byte_permute(v0, v1, 0x62), byte_permute(v2, v3, 0x62), 0x5410);
  digits[0] = byte_permute(low, high, 0x5410) ^ DIGIT_MIDDLE;
  digits[1] = byte_permute(low, high, 0x7632) ^ DIGIT_MIDDLE;
  digits[2] = (top + TOP_MIDDLE) ^ DIGIT_MIDDLE;
}

// A lane's sixteen values of a group, as they lie in x.
struct Packed {
  uint4 halves[2];

  __device__ __forceinline__ void load(const uint16* group, int t) {
#pragma unroll
    for (int half = 0; half < 2; half++)
      halves[half] = *reinterpret_cast<const uint4*>(group + 32 * half + 8 * t);
  }
};

// The same: x[s][i][e] is column 32 (s >> 1) + 8 t + 4 (s & 1) + 2 i + e.
struct Values {
  float x[STEPS][2][2];

  __device__ __forceinline__ explicit Values(const Packed& packed) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint4& v = packed.halves[half];
      const uint32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int word = 0; word < 4; word++) {
        float (&pair)[2] = x[2 * half + word / 2][word % 2];
        pair[0] = FP16 ? fp16_to_float(words[word]) : __uint_as_float(words[word] << 16);
        pair[1] =
            FP16 ? fp16_to_float(words[word] >> 16) : __uint_as_float(words[word] & 0xFFFF0000u);
      }
    }
  }
};

// Writes a group's digits, and what a lane t multiplies a scale with: at 0 and 1 powers of two that
// make sums of digits sums of x, at 2 the sum of x. The whole warp calls, four lanes to a group.
//
// digits :: [FRAGMENTS, DIGITS, QUAD, 16 bytes]
__device__ __forceinline__ void convert(uint8* group, const Values& values, int t, bool any) {
  float largest = 0.f, sum = 0.f;
#pragma unroll
  for (int s = 0; s < STEPS; s++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      largest = fmaxf(largest, fabsf(values.x[s][i >> 1][i & 1]));
      sum += values.x[s][i >> 1][i & 1];
    }
#pragma unroll
  for (int lanes = 1; lanes < QUAD; lanes *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, lanes));
    sum += __shfl_xor_sync(~0u, sum, lanes);
  }
  const int exponent = __float_as_int(largest) >> 23;
  // |v| < 2^20. Below 2^-106 values lose digits.
  const int used = max(exponent, 21);
  const float once = __int_as_float((273 - used) << 23), twice = __int_as_float((274 - used) << 23);
  const auto integer = [&](int s, int i, int e, bool doubled) {
    return __float_as_uint(fmaf(values.x[s][i][e], doubled ? twice : once, TO_DIGITS));
  };
  uint32 words[FRAGMENTS][DIGITS][4];
#pragma unroll
  for (int word = 0; word < 4; word++) {
    uint32 digits[FRAGMENTS][DIGITS];
    // Even fragments: register 2 i + e, its bytes by s. Odd ones: register s, bytes i + 2 e.
    const int i = word >> 1, e = word & 1, s = word;
    split_digits(digits[0], integer(0, i, e, e == 0), integer(1, i, e, e == 0),
                 integer(2, i, e, e == 0), integer(3, i, e, e == 0));
    split_digits(digits[1], integer(s, 0, 0, s % 2 == 0), integer(s, 1, 0, s % 2 == 0),
                 integer(s, 0, 1, s % 2 == 0), integer(s, 1, 1, s % 2 == 0));
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
      for (int digit = 0; digit < DIGITS; digit++) words[f][digit][word] = digits[f][digit];
  }
  if (!any) return;
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
    for (int digit = 0; digit < DIGITS; digit++)
      *reinterpret_cast<uint4*>(group + ((f * DIGITS + digit) * QUAD + t) * 16) = make_uint4(
          words[f][digit][0], words[f][digit][1], words[f][digit][2], words[f][digit][3]);
  // Half, for bits count twice.
  float factor = __int_as_float((used - 20 + 16 * t) << 23);
  if (exponent == 255) factor = __int_as_float(0x7FC00000);
  if (t >= 2) factor = t == 2 ? sum : 0.f;
  reinterpret_cast<float*>(group + GROUP_BYTES - FACTORS_BYTES)[t] = factor;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) one_row(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8 shared[];
  start_next_kernel();
  const int thread = threadIdx.x, lane = thread % LANES;
  const int warp = __shfl_sync(~0u, thread / LANES, 0);  // known to be the same for the whole warp
  const int g = lane / 4, t = lane % 4, slot = lane_slot(g, t);
  const Walk walk(p, warp);
  const Memory memory(shared + p.columns / BLOCK_COLUMNS * GROUP_BYTES, walk);
  Copies copies(walk, memory);
  if (walk.split > 1) open_mailboxes(memory.mail_barriers, thread);
  const uint32 codebook = *reinterpret_cast<const uint32*>(p.codebook);

  // See small_m.cu. A warp converts what it takes of x, the same columns in every pass.
  wait_previous_kernel();
  const int groups = K_BLOCKS * walk.stages;
  const auto group_of = [&](int own) {
    return own < groups ? (walk.first + own / K_BLOCKS * walk.step) * K_BLOCKS + own % K_BLOCKS : 0;
  };
  Packed packed;
  packed.load(p.x + group_of(g) * BLOCK_COLUMNS, t);
  for (int own = g; own - g < groups; own += LANES / QUAD) {
    Packed next;
    next.load(p.x + group_of(own + LANES / QUAD) * BLOCK_COLUMNS, t);
    convert(shared + group_of(own) * GROUP_BYTES, Values(packed), t, own < groups);
    packed = next;
  }
  __syncwarp();  // the lanes of a warp may have left `convert` apart
  copies.start_others();
  if (walk.split > 1) wait_mailboxes();

  // Columns past the digits are zeros. A count of one in the third lane meets the sum of x.
  int start[4] = {t == 2, 0, t == 2, 0};
  // In registers: the compiler would make them anew for most products.
  asm volatile("" : "+r"(start[0]), "+r"(start[1]), "+r"(start[2]), "+r"(start[3]));
  uint4 b[FRAGMENTS] = {};
  const int passes = walk.passes();
  const auto take = [&](auto constant, int pass) {
    constexpr int BLOCKS = decltype(constant)::value;
    float sum[FRAGMENTS * BLOCKS][HALVES] = {};
    const uint8* group = shared + walk.first * K_BLOCKS * GROUP_BYTES;
    for (int i = 0; i < walk.stages; i++, group += walk.step * K_BLOCKS * GROUP_BYTES) {
      copies.ring.wait();
#pragma unroll
      for (int k_block = 0; k_block < K_BLOCKS; k_block++) {
        const uint8* const digits = group + k_block * GROUP_BYTES;
        if (g < DIGITS)
#pragma unroll
          for (int f = 0; f < FRAGMENTS; f++)
            b[f] = *reinterpret_cast<const uint4*>(digits + (f * DIGITS * QUAD + lane) * 16);
        const float factor =
            reinterpret_cast<const float*>(digits + GROUP_BYTES - FACTORS_BYTES)[t];
#pragma unroll
        for (int row_block = 0; row_block < BLOCKS; row_block++) {
          const uint8* block =
              copies.ring.current() + (row_block * K_BLOCKS + k_block) * BLOCK_BYTES;
          uint32 words[LANE_WORDS];
          load_words(words, block, slot);
          Scales scales;
          scales.load(block, g);
#pragma unroll
          for (int f = 0; f < FRAGMENTS; f++) {
            int d[4] = {start[0], start[1], start[2], start[3]};
#pragma unroll
            for (int half = 0; half < 2; half++) {
              // layout.py: _bit_positions
              const uint32 word =
                  f == 0 ? words[0] >> 4 * half : rotate_right(words[1], 3 + 2 * half);
              const uint32 lower = f == 0 ? 4 : 16;
              const uint32 a[4] = {word & 0x01010101u, word & 0x01010101u * lower,
                                   word & 0x02020202u, word & 0x02020202u * lower};
              multiply_bytes(d, a, half ? b[f].z : b[f].x, half ? b[f].w : b[f].y);
            }
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
              float& total = sum[row_block * FRAGMENTS + f][half];
              total = fmaf(scales.get(0, 0, f, half) * factor,
                           static_cast<float>(d[2 * half] + 256 * d[2 * half + 1]), total);
            }
          }
        }
      }
      // The products above have consumed every load of this stage: the compiler may not move its
      // release ahead of them.
#pragma unroll
      for (int f = 0; f < FRAGMENTS * BLOCKS; f++) asm volatile("" : "+f"(sum[f][0])::"memory");
      copies.next();
    }

    if (p.sum_buffers == 0) __syncthreads();  // every warp has read its last stage
    float* const buffer = memory.buffer(p, pass) + warp * SUM_STRIDE;
    const float c0 = to_float(codebook & 0xFFFFu), c1 = to_float(codebook >> 16);
#pragma unroll
    for (int f = 0; f < FRAGMENTS * BLOCKS; f++)
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        const float place = half == 0 ? 1.f : f % 2 ? 0.0625f : 0.25f;
        const float pair = sum[f][half] + __shfl_xor_sync(~0u, sum[f][half], 1);
        const float x_sum = __shfl_xor_sync(~0u, pair, 2), ones = place * pair;
        if (t == 0) buffer[f * 16 + 8 * half + g] = fmaf(c1, ones, c0 * (x_sum - ones));
      }
  };
  for (int pass = 0; pass < passes; pass++) {
    if (walk.is_whole(pass))
      take(Constant<TILE_BLOCKS>(), pass);
    else
      take(Constant<SHORT_BLOCKS>(), pass);
    finish_pass(walk, memory, pass, thread);
  }
}
