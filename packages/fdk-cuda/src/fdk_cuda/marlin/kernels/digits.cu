// y = x @ W_hat.T + bias for few rows of x and weights of 1 bit, or for one row and zero points of
// 2, by integer tensor cores.
//
// x        :: [m, columns, dtype]                 m <= X_ROWS
// packed   :: [rows / 32, columns / 64, BLOCK_BYTES, uint8]
// codebook :: [2, dtype]                          1 bit
// bias     :: [n, dtype] or null
// y        :: [m, n, dtype]
//
// Of the eight columns of operand B one row of x takes one in small_m.cu; here it takes three, or
// two where there are four rows. Every group of 64 values of a row is rounded to integers of 21
// bits, or 14, by the group's largest, and these are cut into signed digits of 8 bits:
// v = d0 + 2^8 d1 + 2^16 d2. Operand A holds the bits of W as they lie in its words, four to a
// register by one AND, so a product is exact; small_m.cu spends 2.5 times the instructions on its
// operand, in which every value takes 16 bits.
//
// The bits of a row lie at two places of a byte, one twice the other, and those in the lower half
// of a fragment higher by a power of two. B makes up for the first: it has 2 v where the bit counts
// once. The end of a tile makes up for the second.
//
// Codes of 2 bits lie at four places of a byte. Operand A holds them as unsigned bytes at two
// places each for the first and the second half of a fragment's rows, so that B has v and 4 v, and
// both fragments share it. Their values of x have a bit less.
//
// With a lone power of two in x the sum of bits is exact, and so is y (see small_m.cu: KEEPS_SUM).
// Affine weights keep apart the sums of bits, and of x times zero points: scale times zero point is
// exact where both have 11 bits at most. An infinity in x gives NaN.
//
// Beside tiles.cuh's, an instantiation has
//   X_ROWS        1, or 4 for up to four rows
//   DIGITS_BYTES  what Python counts for a group: its digits, and what their sums are scaled with
#include "tiles.cuh"
#include "values.cuh"

static_assert(PER_ROW == 1 && ROW_GROUPS == 1);
static_assert(BITS == 1 || (BITS == 2 && AFFINE && X_ROWS == 1));
static_assert(!AFFINE || SCALE_TYPE != 2, "the product of a scale and a zero point is exact");
static_assert(X_ROWS == 1 || X_ROWS == 4);

constexpr int DIGITS = X_ROWS == 1 ? 3 : 2;
constexpr int B_COLUMNS = X_ROWS * DIGITS;
constexpr int FACTORS = X_ROWS == 1 ? QUAD : 2 * X_ROWS;
constexpr int B_SETS = BITS == 1 ? FRAGMENTS : 1;  // of digits: as many as orders of columns
constexpr int FACTORS_AT = B_SETS * B_COLUMNS * QUAD * 16;  // bytes, from a group's first
constexpr int GROUP_BYTES = FACTORS_AT + FACTORS * 4;
static_assert(GROUP_BYTES == DIGITS_BYTES);
constexpr int HALVES = 2;  // of 8 rows, in a fragment
// |v| is less than 2 to this, and 2 v, or 4 v at 2 bits, has DIGITS digits.
constexpr int VALUE_BITS = (DIGITS == 3 ? 21 : 14) - BITS;
// To x times a power of two this adds so much that the sum's lower bytes are its digits, each moved
// to the middle of a byte's range: 2^23 + 0x408080, and 2^23 + 0x8080.
constexpr float TO_DIGITS = DIGITS == 3 ? 12615808.f : 8421504.f;
constexpr uint32 DIGIT_MIDDLE = 0x80808080u, TOP_MIDDLE = 0x40404040u;

// d += a b for a :: [16, 32] of bytes, signed but at 2 bits, and b :: [32, 8] of signed ones, in
// fragments.
__device__ __forceinline__ void multiply_bytes(int (&d)[4], const uint32 (&a)[4], uint32 b0,
                                               uint32 b1) {
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

// Sums of digits are at most 2^18, at 2 bits 2^21: added to these bits, 1.5 * 2^23 as a float, they
// are the bits of the float that is as much greater. An I2F would keep a pipe busy for 8 cycles.
constexpr int SUM_BITS = 0x4B400000;
constexpr float SUM_FLOAT = 12582912.f;

// d0 + 256 d1, rounded once.
__device__ __forceinline__ float join(int d0, int d1) {
  return __int_as_float(d0) + fmaf(__int_as_float(d1), 256.f, -257.f * SUM_FLOAT);
}

// The digits of four integers, as four bytes to a word.
__device__ __forceinline__ void split_digits(uint32 (&digits)[DIGITS], uint32 v0, uint32 v1,
                                             uint32 v2, uint32 v3) {
  const uint32 low = byte_permute(v0, v1, 0x5140), high = byte_permute(v2, v3, 0x5140);
  digits[0] = byte_permute(low, high, 0x5410) ^ DIGIT_MIDDLE;
  digits[1] = byte_permute(low, high, 0x7632) ^ DIGIT_MIDDLE;
  if constexpr (DIGITS == 3) {
    const uint32 top = byte_permute(byte_permute(v0, v1, 0x62), byte_permute(v2, v3, 0x62), 0x5410);
    digits[2] = (top + TOP_MIDDLE) ^ DIGIT_MIDDLE;
  }
}

// The digits of a row's group, and what sums of digits are scaled with, so that they are sums of x.
//
// digits  :: [B_SETS, X_ROWS, DIGITS, QUAD, 16 bytes]
// factors :: [QUAD, float]       for one row, by lane: of digits 0 and 1, of digit 2, the sum, none
// factors :: [2, X_ROWS, float]  for four: of digits, then the sums of x
//
// The sum of x is negated where zero points multiply it.
struct GroupDigits {
  uint32 words[B_SETS][DIGITS][4];
  float factor, sum;

  // The whole warp calls, four lanes to a group.
  __device__ __forceinline__ GroupDigits(const Values& values, int t) {
    const GroupRange range(values);
    sum = AFFINE ? -range.sum : range.sum;
    const float once = range.to_integers(VALUE_BITS), twice = 2.f * once;
    if constexpr (BITS == 2) {
      const float fourfold = 4.f * once;
      const auto integer = [&](int s, int i, int e, bool first) {
        return __float_as_uint(fmaf(values.x[s][i][e], first ? fourfold : once, TO_DIGITS));
      };
#pragma unroll
      for (int word = 0; word < 4; word++) {
        uint32 digits[DIGITS];
        // The first two: register e, its bytes by unit. The others: units 2 r and 2 r + 1, each e.
        const int e = word, s = word;
        if (word < 2)
          split_digits(digits, integer(0, 0, e, e == 0), integer(0, 1, e, e == 0),
                       integer(1, 0, e, e == 0), integer(1, 1, e, e == 0));
        else
          split_digits(digits, integer(s, 0, 0, true), integer(s, 0, 1, true),
                       integer(s, 1, 0, false), integer(s, 1, 1, false));
#pragma unroll
        for (int digit = 0; digit < DIGITS; digit++) words[0][digit][word] = digits[digit];
      }
    } else {
      const auto integer = [&](int s, int i, int e, bool doubled) {
        return __float_as_uint(fmaf(values.x[s][i][e], doubled ? twice : once, TO_DIGITS));
      };
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
    }
    // Half, for bits count twice, or a fourth.
    const int lane_places = X_ROWS == 1 ? 16 * t : 0;
    factor = range.power_or_nan(range.exponent - VALUE_BITS - (BITS - 1) + lane_places);
  }

  __device__ __forceinline__ void store(uint8* group, int row, int t) const {
#pragma unroll
    for (int f = 0; f < B_SETS; f++)
#pragma unroll
      for (int digit = 0; digit < DIGITS; digit++)
        *reinterpret_cast<uint4*>(group + (((f * X_ROWS + row) * DIGITS + digit) * QUAD + t) * 16) =
            make_uint4(words[f][digit][0], words[f][digit][1], words[f][digit][2],
                       words[f][digit][3]);
    float* const factors = reinterpret_cast<float*>(group + FACTORS_AT);
    if (X_ROWS == 1)
      factors[t] = t < 2 ? factor : t == 2 ? sum : 0.f;
    else if (t < 2)
      factors[t * X_ROWS + row] = t == 0 ? factor : sum;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) digits(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8 shared[];
  start_next_kernel();
  const int thread = threadIdx.x, lane = thread % LANES;
  const int warp = __shfl_sync(~0u, thread / LANES, 0);  // known to be the same for the whole warp
  const int g = lane / 4, t = lane % 4, slot = lane_slot(g, t);
  const Walk walk(p, warp);
  const int warp_groups = K_BLOCKS * p.rounds;
  uint8* const own_groups = shared + warp * warp_groups * GROUP_BYTES;
  const Memory memory(shared + WARPS * warp_groups * GROUP_BYTES, walk);
  Copies copies(walk, memory);
  if (walk.split > 1) open_mailboxes(memory.mail_barriers, thread);
  const uint32 codebook = *reinterpret_cast<const uint32*>(p.codebook);

  // See small_m.cu. A warp converts what it takes of x, the same columns in every pass.
  wait_previous_kernel();
  const int groups = K_BLOCKS * walk.stages;
  const auto group_of = [&](int own) {
    return own < groups ? (walk.first + own / K_BLOCKS * walk.step) * K_BLOCKS + own % K_BLOCKS : 0;
  };
  // Of each row of x, the lanes g take this many groups at a time, and where there are many, twice.
  constexpr int AT_A_TIME = LANES / QUAD / X_ROWS, TIMES = X_ROWS == 1 ? 1 : 2;
  const int x_row = g % X_ROWS;
  const uint16* const x = p.x + static_cast<uint64>(x_row < p.m ? x_row : 0) * p.columns;
  Packed packed[TIMES], next[TIMES];
  const auto load = [&](Packed(&to)[TIMES], int own) {
#pragma unroll
    for (int i = 0; i < TIMES; i++)
      to[i].load(x + group_of(own + i * AT_A_TIME) * BLOCK_COLUMNS, t);
  };
  load(packed, g / X_ROWS);
  for (int first = 0; first < groups; first += TIMES * AT_A_TIME) {
    const int own = first + g / X_ROWS;
    load(next, own + TIMES * AT_A_TIME);
    const GroupDigits low(Values(packed[0]), t), high(Values(packed[TIMES - 1]), t);
    if (own < groups) low.store(own_groups + own * GROUP_BYTES, x_row, t);
    if (TIMES > 1 && own + AT_A_TIME < groups)
      high.store(own_groups + (own + AT_A_TIME) * GROUP_BYTES, x_row, t);
#pragma unroll
    for (int i = 0; i < TIMES; i++) packed[i] = next[i];
  }
  __syncwarp();  // the lanes of a warp may have parted at the stores above
  copies.start_others();
  if (walk.split > 1) wait_mailboxes();

  // Columns past the digits are zeros. A count of one in the third lane meets the sum of x.
  const int first_sum = SUM_BITS + (X_ROWS == 1 && t == 2);
  int start[4] = {first_sum, SUM_BITS, first_sum, SUM_BITS};
  // In registers: the compiler would make them anew for most products.
  asm volatile("" : "+r"(start[0]), "+r"(start[1]), "+r"(start[2]), "+r"(start[3]));
  uint4 b[B_SETS] = {};
  const auto take = [&](auto constant, int pass) {
    constexpr int BLOCKS = decltype(constant)::value;
    float sum[FRAGMENTS * BLOCKS][HALVES] = {};
    float x_sum[FRAGMENTS * BLOCKS][HALVES] = {};  // for four rows
    const uint8* group = own_groups;
    for (int i = 0; i < walk.stages; i++, group += K_BLOCKS * GROUP_BYTES) {
      copies.ring.wait();
#pragma unroll
      for (int k_block = 0; k_block < K_BLOCKS; k_block++) {
        const uint8* const digits = group + k_block * GROUP_BYTES;
        if (g < B_COLUMNS)
#pragma unroll
          for (int f = 0; f < B_SETS; f++)
            b[f] = *reinterpret_cast<const uint4*>(digits + (f * B_COLUMNS * QUAD + lane) * 16);
        const float* const factors = reinterpret_cast<const float*>(digits + FACTORS_AT);
        // Of one row, the zero point comes in in the third lane.
        const float factor = AFFINE && X_ROWS == 1 && t == 2 ? 0.f : factors[t];
        const float x_factor = X_ROWS == 1 ? (t == 2 ? factors[t] : 0.f) : factors[X_ROWS + t];
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
              if constexpr (BITS == 1) {
                const uint32 word =
                    f == 0 ? words[0] >> 4 * half : rotate_right(words[1], 3 + 2 * half);
                const uint32 lower = f == 0 ? 4 : 16;
                const uint32 a[4] = {word & 0x01010101u, word & 0x01010101u * lower,
                                     word & 0x02020202u, word & 0x02020202u * lower};
                multiply_bytes(d, a, half ? b[f].z : b[f].x, half ? b[f].w : b[f].y);
              } else if (half == 0) {
                // Looked up elsewhere: a byte for a unit.
                const uint32 word = words[2 * f];
                const uint32 a[4] = {word & 0x03030303u, word & 0x30303030u, word & 0x0C0C0C0Cu,
                                     word & 0xC0C0C0C0u};
                multiply_bytes(d, a, b[0].x, b[0].y);
              } else {
                // Computed elsewhere: two bytes for a row, two units of both to a register.
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
              const int at = row_block * FRAGMENTS + f;
              const float scale = scales.get(0, 0, f, half);
              const float zero = scales.get(KINDS - 1, 0, f, half);
              const bool is_apart = AFFINE && X_ROWS == 1;
              const float weight = scale * (is_apart ? fmaf(zero, x_factor, factor) : factor);
              const float value = join(d[2 * half], d[2 * half + 1]);
              sum[at][half] = fmaf(weight, value, sum[at][half]);
              if (X_ROWS > 1)
                x_sum[at][half] = fmaf(AFFINE ? scale * zero : scale, x_factor, x_sum[at][half]);
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
    float* const buffer = memory.buffer(p, pass) + warp * p.stored_columns * SUM_STRIDE;
    const float c0 = to_float(codebook & 0xFFFFu), c1 = to_float(codebook >> 16);
#pragma unroll
    for (int f = 0; f < FRAGMENTS * BLOCKS; f++)
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        const float place = half == 0 ? 1.f : BITS == 2 || f % 2 ? 0.0625f : 0.25f;
        float digits_sum = sum[f][half], of_x = x_sum[f][half];
        if (X_ROWS == 1) {
          digits_sum += __shfl_xor_sync(~0u, digits_sum, 1);
          of_x = __shfl_xor_sync(~0u, digits_sum, 2);
        }
        const float ones = place * digits_sum;
        const float value = AFFINE ? ones + of_x : fmaf(c1, ones, c0 * (of_x - ones));
        if (t < (X_ROWS == 1 ? 1 : p.stored_columns))
          buffer[t * SUM_STRIDE + f * 16 + 8 * half + g] = value;
      }
  };
  take_passes(walk, memory, thread, take);
}
