// y = x @ W_hat.T + bias for 1 to 4 rows of x and 1 bit, or one row and affine 2 bits, by int8
// tensor cores.
//
// x        :: [m, padded_k, dtype]                 m <= TILE_M
// packed   :: [padded_n / 32, padded_k / 64, BLOCK_BYTES, uint8]
// codebook :: [2, dtype]                           1 bit only
// bias     :: [n, dtype] or null
// y        :: [m, n, dtype]
//
// Every group of 64 values of a row of x is rounded to integers relative to its largest, and these
// are cut into signed limbs of 8 bits: v = d0 + 2^8 d1 + 2^16 d2, 21 bits in three limbs for one
// row, 14 bits in two for four rows. Each limb takes a column of operand B. Operand A holds the
// bits of W at their places in the packed words, four to a register by one AND. small_m.cu needs
// 2.5 times the instructions for its operand A, whose values have 16 bits.
//
// The bits of a row are at two places of a byte, one twice the other: operand B has 2 v where the
// bit counts once. Bits of the lower half of a fragment are higher by a power of two, which is
// divided out at the end of a tile.
//
// Codes of 2 bits are at four places of a byte. Operand A holds them as unsigned bytes at two
// places for each half of a fragment's rows; operand B has v and 4 v, shared by both fragments, and
// x one bit less.
//
// With a one-hot power of two in x the sum of bits, and so y, is exact (small_m.cu: KEEPS_X_SUM).
// Affine weights sum bits and x times zero point separately: scale times zero point is exact if
// both have at most 11 bits. An infinity in x gives NaN.
//
// Macros, in addition to those of small_m_mainloop.cuh:
//   TILE_M      1, or 4 for 2 to 4 rows
//   LIMB_BYTES  bytes of a group of x in shared memory: limbs, and the factors of their sums
#include "common/small_m_mainloop.cuh"
#include "common/activations.cuh"

static_assert(PER_ROW == 1 && N_GROUPS == 1);
static_assert(BITS == 1 || (BITS == 2 && AFFINE && TILE_M == 1));
static_assert(!AFFINE || SCALE_TYPE != 2, "the product of a scale and a zero point is exact");
static_assert(TILE_M == 1 || TILE_M == 4);

constexpr int LIMBS = TILE_M == 1 ? 3 : 2;
constexpr int B_COLUMNS = TILE_M * LIMBS;
constexpr int FACTORS = TILE_M == 1 ? QUAD : 2 * TILE_M;
constexpr int B_SETS = BITS == 1 ? FRAGMENTS : 1;  // copies of the limbs, one per order of columns
constexpr int FACTORS_AT = B_SETS * B_COLUMNS * QUAD * 16;  // bytes from a group's first
constexpr int GROUP_BYTES = FACTORS_AT + FACTORS * 4;
static_assert(GROUP_BYTES == LIMB_BYTES);
constexpr int HALVES = 2;  // halves of 8 rows in a fragment
// |v| < 2^VALUE_BITS, so that 2 v, or 4 v at 2 bits, has LIMBS limbs.
constexpr int VALUE_BITS = (LIMBS == 3 ? 21 : 14) - BITS;
// Added to x times a power of two, this makes the lower bytes of the sum its limbs, each shifted to
// the middle of a byte's range: 2^23 + 0x408080, or 2^23 + 0x8080.
constexpr float TO_LIMBS = LIMBS == 3 ? 12615808.f : 8421504.f;
constexpr uint32 LIMB_MIDDLE = 0x80808080u, TOP_MIDDLE = 0x40404040u;

// d += a b for fragments of bytes: a :: [16, 32], signed (unsigned at 2 bits), and b :: [32, 8],
// signed.
__forceinline__ void multiply_bytes(int (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
#define FDK_MMA_BYTES(type)                                           \
  asm("mma.sync.aligned.m16n8k32.row.col.s32." type                   \
      ".s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if (BITS == 1)
    FDK_MMA_BYTES("s8");
  else
    FDK_MMA_BYTES("u8");
#undef FDK_MMA_BYTES
}

// Sums of limbs are at most 2^18, at 2 bits 2^21. Starting from these bits, which are 1.5 * 2^23 as
// a float, an integer sum is the bits of that float plus the sum. A conversion (I2F) would keep its
// pipe busy for 8 cycles.
constexpr int SUM_BITS = 0x4B400000;
constexpr float SUM_FLOAT = 12582912.f;

// Returns d0 + 256 d1, rounded once.
__forceinline__ float join(int d0, int d1) {
  return __int_as_float(d0) + fmaf(__int_as_float(d1), 256.f, -257.f * SUM_FLOAT);
}

// Splits four integers into limbs, four bytes to a word.
__forceinline__ void split_limbs(uint32 (&limbs)[LIMBS], uint32 v0, uint32 v1, uint32 v2,
                                 uint32 v3) {
  const uint32 low = byte_permute(v0, v1, 0x5140), high = byte_permute(v2, v3, 0x5140);
  limbs[0] = byte_permute(low, high, 0x5410) ^ LIMB_MIDDLE;
  limbs[1] = byte_permute(low, high, 0x7632) ^ LIMB_MIDDLE;
  if constexpr (LIMBS == 3) {
    const uint32 top = byte_permute(byte_permute(v0, v1, 0x62), byte_permute(v2, v3, 0x62), 0x5410);
    limbs[2] = (top + TOP_MIDDLE) ^ LIMB_MIDDLE;
  }
}

// Limbs of a group of a row of x, and the factors that turn sums of limbs into sums of x.
//
// limbs   :: [B_SETS, TILE_M, LIMBS, QUAD, 16 bytes]
// factors :: [QUAD, float]       one row, by lane: limbs 0 and 1, limb 2, the sum of x, unused
// factors :: [2, TILE_M, float]  four rows: limbs, then sums of x
//
// The sum of x is negated if zero points multiply it.
struct GroupLimbs {
  uint32 words[B_SETS][LIMBS][4];
  float factor, sum;

  // Called by the whole warp, four lanes to a group.
  __forceinline__ GroupLimbs(const Values& values, int t) {
    const GroupRange range(values);
    sum = AFFINE ? -range.sum : range.sum;
    const float once = range.to_integers(VALUE_BITS), twice = 2.f * once;
    if constexpr (BITS == 2) {
      const float fourfold = 4.f * once;
      const auto integer = [&](int s, int i, int e, bool first) {
        return __float_as_uint(fmaf(values.x[s][i][e], first ? fourfold : once, TO_LIMBS));
      };
#pragma unroll
      for (int word = 0; word < 4; word++) {
        uint32 limbs[LIMBS];
        // Words 0, 1: register e, bytes by unit. Words 2, 3: units 2 r and 2 r + 1, each e.
        const int e = word, s = word;
        if (word < 2)
          split_limbs(limbs, integer(0, 0, e, e == 0), integer(0, 1, e, e == 0),
                      integer(1, 0, e, e == 0), integer(1, 1, e, e == 0));
        else
          split_limbs(limbs, integer(s, 0, 0, true), integer(s, 0, 1, true),
                      integer(s, 1, 0, false), integer(s, 1, 1, false));
#pragma unroll
        for (int limb = 0; limb < LIMBS; limb++) words[0][limb][word] = limbs[limb];
      }
    } else {
      const auto integer = [&](int s, int i, int e, bool doubled) {
        return __float_as_uint(fmaf(values.x[s][i][e], doubled ? twice : once, TO_LIMBS));
      };
#pragma unroll
      for (int word = 0; word < 4; word++) {
        uint32 limbs[FRAGMENTS][LIMBS];
        // Even fragments: register 2 i + e, bytes by s. Odd ones: register s, bytes i + 2 e.
        const int i = word >> 1, e = word & 1, s = word;
        split_limbs(limbs[0], integer(0, i, e, e == 0), integer(1, i, e, e == 0),
                    integer(2, i, e, e == 0), integer(3, i, e, e == 0));
        split_limbs(limbs[1], integer(s, 0, 0, s % 2 == 0), integer(s, 1, 0, s % 2 == 0),
                    integer(s, 0, 1, s % 2 == 0), integer(s, 1, 1, s % 2 == 0));
#pragma unroll
        for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
          for (int limb = 0; limb < LIMBS; limb++) words[f][limb][word] = limbs[f][limb];
      }
    }
    // Halved, because bits count twice; a fourth at 2 bits.
    const int lane_places = TILE_M == 1 ? 16 * t : 0;
    factor = range.power_or_nan(range.exponent - VALUE_BITS - (BITS - 1) + lane_places);
  }

  __forceinline__ void store(uint8* group, int row, int t) const {
#pragma unroll
    for (int f = 0; f < B_SETS; f++)
#pragma unroll
      for (int limb = 0; limb < LIMBS; limb++)
        *reinterpret_cast<uint4*>(group + (((f * TILE_M + row) * LIMBS + limb) * QUAD + t) * 16) =
            make_uint4(words[f][limb][0], words[f][limb][1], words[f][limb][2], words[f][limb][3]);
    float* const factors = reinterpret_cast<float*>(group + FACTORS_AT);
    if (TILE_M == 1)
      factors[t] = t < 2 ? factor : t == 2 ? sum : 0.f;
    else if (t < 2)
      factors[t * TILE_M + row] = t == 0 ? factor : sum;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemv_int8_limbs(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8 shared[];
  start_next_kernel();
  const int thread = threadIdx.x, lane = thread % LANES;
  const int warp = __shfl_sync(~0u, thread / LANES, 0);  // uniform in the warp
  const int g = lane / 4, t = lane % 4, slot = lane_slot(g, t);
  const TileScheduler scheduler(p, warp);
  const int warp_groups = K_BLOCKS * p.rounds;
  uint8* const own_groups = shared + warp * warp_groups * GROUP_BYTES;
  const SharedMemory memory(shared + WARPS * warp_groups * GROUP_BYTES, scheduler);
  WeightPipeline weights(scheduler, memory);
  if (scheduler.cluster > 1) open_dsmem_buffers(memory.dsmem_barriers, thread);
  const uint32 codebook = *reinterpret_cast<const uint32*>(p.codebook);

  // As in small_m.cu. A warp converts its own columns of x, the same in every pass.
  wait_previous_kernel();
  const int groups = K_BLOCKS * scheduler.stages;
  const auto group_of = [&](int own) {
    return own < groups
               ? (scheduler.first + own / K_BLOCKS * scheduler.step) * K_BLOCKS + own % K_BLOCKS
               : 0;
  };
  // The lanes g convert this many groups of each row at a time; with four rows, twice.
  constexpr int AT_A_TIME = LANES / QUAD / TILE_M, TIMES = TILE_M == 1 ? 1 : 2;
  const int m_index = g % TILE_M;
  const uint16* const x = p.x + static_cast<uint64>(m_index < p.m ? m_index : 0) * p.padded_k;
  Packed packed[TIMES], next[TIMES];
  const auto load = [&](Packed(&to)[TIMES], int own) {
#pragma unroll
    for (int i = 0; i < TIMES; i++) to[i].load(x + group_of(own + i * AT_A_TIME) * BLOCK_K, t);
  };
  load(packed, g / TILE_M);
  for (int first = 0; first < groups; first += TIMES * AT_A_TIME) {
    const int own = first + g / TILE_M;
    load(next, own + TIMES * AT_A_TIME);
    const GroupLimbs low(Values(packed[0]), t), high(Values(packed[TIMES - 1]), t);
    if (own < groups) low.store(own_groups + own * GROUP_BYTES, m_index, t);
    if (TIMES > 1 && own + AT_A_TIME < groups)
      high.store(own_groups + (own + AT_A_TIME) * GROUP_BYTES, m_index, t);
#pragma unroll
    for (int i = 0; i < TIMES; i++) packed[i] = next[i];
  }
  __syncwarp();  // the stores above may have diverged
  weights.start_others();
  if (scheduler.cluster > 1) wait_dsmem_buffers();

  // Columns past the limbs are zero. A count of one in the third lane multiplies the sum of x.
  const int first_sum = SUM_BITS + (TILE_M == 1 && t == 2);
  int start[4] = {first_sum, SUM_BITS, first_sum, SUM_BITS};
  // Kept in registers: the compiler would recompute them for most products.
  asm volatile("" : "+r"(start[0]), "+r"(start[1]), "+r"(start[2]), "+r"(start[3]));
  uint4 b[B_SETS] = {};
  const auto compute = [&](auto constant, int pass) {
    constexpr int BLOCKS = decltype(constant)::value;
    float sum[FRAGMENTS * BLOCKS][HALVES] = {};
    float x_sum[FRAGMENTS * BLOCKS][HALVES] = {};  // for four rows
    const uint8* group = own_groups;
    for (int i = 0; i < scheduler.stages; i++, group += K_BLOCKS * GROUP_BYTES) {
      weights.pipeline.wait();
#pragma unroll
      for (int k_block = 0; k_block < K_BLOCKS; k_block++) {
        const uint8* const limbs = group + k_block * GROUP_BYTES;
        if (g < B_COLUMNS)
#pragma unroll
          for (int f = 0; f < B_SETS; f++)
            b[f] = *reinterpret_cast<const uint4*>(limbs + (f * B_COLUMNS * QUAD + lane) * 16);
        const float* const factors = reinterpret_cast<const float*>(limbs + FACTORS_AT);
        // With one row, the zero point is applied in the third lane.
        const float factor = AFFINE && TILE_M == 1 && t == 2 ? 0.f : factors[t];
        const float x_factor = TILE_M == 1 ? (t == 2 ? factors[t] : 0.f) : factors[TILE_M + t];
#pragma unroll
        for (int n_block = 0; n_block < BLOCKS; n_block++) {
          const uint8* block =
              weights.pipeline.current() + (n_block * K_BLOCKS + k_block) * BLOCK_BYTES;
          uint32 words[LANE_WORDS];
          load_words(words, block, slot);
          Scales scales;
          scales.load(block, g);
#pragma unroll
          for (int f = 0; f < FRAGMENTS; f++) {
            int d[4] = {start[0], start[1], start[2], start[3]};
#pragma unroll
            for (int half = 0; half < 2; half++) {
              // See layout.py: _bit_positions.
              if constexpr (BITS == 1) {
                const uint32 word =
                    f == 0 ? words[0] >> 4 * half : rotate_right(words[1], 3 + 2 * half);
                const uint32 lower = f == 0 ? 4 : 16;
                const uint32 a[4] = {word & 0x01010101u, word & 0x01010101u * lower,
                                     word & 0x02020202u, word & 0x02020202u * lower};
                multiply_bytes(d, a, half ? b[f].z : b[f].x, half ? b[f].w : b[f].y);
              } else if (half == 0) {
                // The half that decode.cuh looks up: a byte per unit.
                const uint32 word = words[2 * f];
                const uint32 a[4] = {word & 0x03030303u, word & 0x30303030u, word & 0x0C0C0C0Cu,
                                     word & 0xC0C0C0C0u};
                multiply_bytes(d, a, b[0].x, b[0].y);
              } else {
                // The half that it computes: two bytes per row, two units of both to a register.
                constexpr uint32 PLACES = 0x0C0C0303u;
                const uint32 word = rotate_right(words[2 * f + 1], 1);
                const uint32 upper = byte_permute(word, word, 0x1010);
                const uint32 lower = byte_permute(word, word, 0x3232);
                const uint32 a[4] = {upper & PLACES, lower << 4 & PLACES << 4, upper >> 4 & PLACES,
                                     lower & PLACES << 4};
                multiply_bytes(d, a, b[0].z, b[0].w);
              }
            }
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
              const int at = n_block * FRAGMENTS + f;
              const float scale = scales.get(0, 0, f, half);
              const float zero = scales.get(KINDS - 1, 0, f, half);
              const bool is_apart = AFFINE && TILE_M == 1;
              const float weight = scale * (is_apart ? fmaf(zero, x_factor, factor) : factor);
              const float value = join(d[2 * half], d[2 * half + 1]);
              sum[at][half] = fmaf(weight, value, sum[at][half]);
              if (TILE_M > 1)
                x_sum[at][half] = fmaf(AFFINE ? scale * zero : scale, x_factor, x_sum[at][half]);
            }
          }
        }
      }
      // The products above have consumed all loads of this stage: the compiler must not move its
      // release before them.
#pragma unroll
      for (int f = 0; f < FRAGMENTS * BLOCKS; f++) asm volatile("" : "+f"(sum[f][0])::"memory");
      weights.next();
    }

    if (p.sum_buffers == 0) __syncthreads();  // every warp has read its last stage
    float* const buffer = memory.buffer(p, pass) + warp * p.stored_m * SUM_STRIDE;
    const float c0 = to_float(codebook & 0xFFFFu), c1 = to_float(codebook >> 16);
#pragma unroll
    for (int f = 0; f < FRAGMENTS * BLOCKS; f++)
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        const float place = half == 0 ? 1.f : BITS == 2 || f % 2 ? 0.0625f : 0.25f;
        float limbs_sum = sum[f][half], of_x = x_sum[f][half];
        if (TILE_M == 1) {
          limbs_sum += __shfl_xor_sync(~0u, limbs_sum, 1);
          of_x = __shfl_xor_sync(~0u, limbs_sum, 2);
        }
        const float ones = place * limbs_sum;
        const float value = AFFINE ? ones + of_x : fmaf(c1, ones, c0 * (of_x - ones));
        if (t < (TILE_M == 1 ? 1 : p.stored_m))
          buffer[t * SUM_STRIDE + f * 16 + 8 * half + g] = value;
      }
  };
  run_passes(scheduler, memory, thread, compute);
}
