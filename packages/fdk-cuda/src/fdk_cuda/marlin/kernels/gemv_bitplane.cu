// y = x @ W_hat.T + bias for one row of x and 1 bit, by binary tensor cores (AND and popcount).
//
// x        :: [1, padded_k, dtype]
// packed   :: [padded_n / 32, padded_k / 64, BLOCK_BYTES, uint8]
// codebook :: [2, dtype]
// bias     :: [n, dtype] or null
// y        :: [1, n, dtype]
//
// Every group of 64 values of x is rounded to 16-bit integers relative to its largest. Bit plane j
// holds bit j of all 64. A binary product counts, for 16 words of W at once, the ones that a plane
// and W share, so operand A is the packed words themselves and nothing is decoded. Half of a word's
// bits belong to row g of a fragment, half to row g + 8: four columns of operand B hold planes at
// the bits of row g, four at those of row g + 8, with zeros elsewhere.
//
// Counts are summed as floats without conversion: the bits of an integer, read as a float, are that
// many times 2^-149, and multiplying by powers of two gives exact sums.
//
// With a one-hot power of two in x the sum of bits, and so y, is exact (small_m.cu: KEEPS_X_SUM).
// Affine weights sum bits and x times zero point separately: scale times zero point is exact if
// both have at most 11 bits. An infinity in x gives NaN.
//
// Macros, in addition to those of small_m_mainloop.cuh:
//   BITPLANE_BYTES  bytes of a group of x in shared memory: planes, and the factors of their counts
#include "common/small_m_mainloop.cuh"
#include "common/activations.cuh"

static_assert(BITS == 1 && PER_ROW == 1 && N_GROUPS == 1);
static_assert(!AFFINE || SCALE_TYPE != 2, "the product of a scale and a zero point is exact");

constexpr int BITPLANES = 16, PRODUCTS = 4, COUNTS = 8;
constexpr int ORDERS = FRAGMENTS;    // orders of columns in a word: one per fragment
constexpr int COLUMN_BITPLANES = 4;  // columns of operand B for a row of a fragment
constexpr int FACTORS_AT = ORDERS * COLUMN_BITPLANES * QUAD * 16;  // bytes from a group's first
constexpr int GROUP_BYTES = FACTORS_AT + 16;
static_assert(GROUP_BYTES == BITPLANE_BYTES);
constexpr int VALUE_BITS = BITPLANES - 1;
// Added to x times a power of two, this makes the lower bits of the sum the integer.
constexpr float TO_INTEGER = 12582912.f;
// Counts are multiplied by 2^(120 + j) for plane j of eight, so they are 2^-29 of the integers. A
// group's factor restores 2^14 of that, because sums of small x would be subnormal otherwise, and
// the end of a tile the rest.
constexpr int COUNT_EXPONENT = 120, MADE_UP = 14;
constexpr float SUM_FACTOR = 32768.f;

// Counts the bits that are one in both of a :: [16, 128] and b :: [128, 8], in fragments.
__forceinline__ void count_both(uint32 (&d)[4], uint32 a0, uint32 a1, uint32 b) {
  asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%7,%7,%7,%7};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a0), "r"(a1), "r"(b), "r"(0));
}

__forceinline__ uint32 rotate_left(uint32 word, int places) {
  return __funnelshift_l(word, word, places);
}

// The lower bytes of four integers, and the bytes above.
struct Bytes {
  uint32 of[2];

  __forceinline__ Bytes(uint32 v0, uint32 v1, uint32 v2, uint32 v3) {
    const uint32 low = byte_permute(v0, v1, 0x5140), high = byte_permute(v2, v3, 0x5140);
    of[0] = byte_permute(low, high, 0x5410);
    of[1] = byte_permute(low, high, 0x7632);
  }
};

// Returns bits of a where the mask is one, of b elsewhere.
__forceinline__ uint32 choose(uint32 mask, uint32 a, uint32 b) { return (a & mask) | (b & ~mask); }

// Bit planes of a group of x, and the factors that turn counts into sums of x.
//
// bitplanes :: [ORDERS, COLUMN_BITPLANES, QUAD, PRODUCTS, uint32]   at the bits of row g; in the
//              second order three places lower
// factors   :: [2, float]                                           of counts, and the sum of x
//
// Column c has planes 8 (c / 2) + c % 2 + 2 i for products i.
struct GroupBitplanes {
  uint4 words[ORDERS][COLUMN_BITPLANES];
  float factor, sum;

  // Called by the whole warp, four lanes to a group.
  __forceinline__ explicit GroupBitplanes(const Values& values) {
    const GroupRange range(values);
    sum = range.sum;
    const float once = range.to_integers(VALUE_BITS);
    factor = range.power_or_nan(range.exponent + 1 - VALUE_BITS + MADE_UP);
    uint32 v[STEPS][2][2];
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        v[s][i >> 1][i & 1] = __float_as_uint(fmaf(values.x[s][i >> 1][i & 1], once, TO_INTEGER));
    transpose(v);
  }

  // v[s][i][e] goes to bit 8 s + 4 i + e of the first order, and 16 e + 8 i + s of the second.
  __forceinline__ void transpose(const uint32 (&v)[STEPS][2][2]) {
    const Bytes first[4] = {{v[0][0][0], v[1][0][0], v[2][0][0], v[3][0][0]},
                            {v[0][0][1], v[1][0][1], v[2][0][1], v[3][0][1]},
                            {v[0][1][0], v[1][1][0], v[2][1][0], v[3][1][0]},
                            {v[0][1][1], v[1][1][1], v[2][1][1], v[3][1][1]}};
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
      uint32 pairs[2][2];  // [i][odd plane]: a plane of both e, interleaved
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint32 a = first[2 * i].of[upper], b = first[2 * i + 1].of[upper];
        pairs[i][0] = choose(0x55555555u, a, b << 1);
        pairs[i][1] = choose(0x55555555u, a >> 1, b);
      }
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        const uint32 low = choose(0x0F0F0F0Fu, pairs[0][odd], pairs[1][odd] << 4);
        const uint32 high = choose(0x0F0F0F0Fu, pairs[0][odd] >> 4, pairs[1][odd]);
        words[0][2 * upper + odd] = make_uint4(low & 0x33333333u, low >> 2 & 0x33333333u,
                                               high & 0x33333333u, high >> 2 & 0x33333333u);
      }
    }
    const Bytes second[4] = {{v[0][0][0], v[0][1][0], v[0][0][1], v[0][1][1]},
                             {v[1][0][0], v[1][1][0], v[1][0][1], v[1][1][1]},
                             {v[2][0][0], v[2][1][0], v[2][0][1], v[2][1][1]},
                             {v[3][0][0], v[3][1][0], v[3][0][1], v[3][1][1]}};
#pragma unroll
    for (int upper = 0; upper < 2; upper++) {
      uint32 pairs[2][2];  // [s][odd plane]: a plane of two s, interleaved
#pragma unroll
      for (int s = 0; s < 2; s++) {
        const uint32 a = second[2 * s].of[upper], b = second[2 * s + 1].of[upper];
        pairs[s][0] = choose(0x55555555u, a, b << 1);
        pairs[s][1] = choose(0x55555555u, a >> 1, b);
      }
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        const uint32 outer = choose(0x33333333u, pairs[0][odd], pairs[1][odd] << 2);
        const uint32 inner = choose(0x33333333u, pairs[0][odd] >> 2, pairs[1][odd]);
        words[1][2 * upper + odd] = make_uint4(outer & 0x0F0F0F0Fu, inner & 0x0F0F0F0Fu,
                                               outer >> 4 & 0x0F0F0F0Fu, inner >> 4 & 0x0F0F0F0Fu);
      }
    }
  }

  __forceinline__ void store(uint8* group, int t) const {
#pragma unroll
    for (int order = 0; order < ORDERS; order++)
#pragma unroll
      for (int column = 0; column < COLUMN_BITPLANES; column++)
        *reinterpret_cast<uint4*>(group + ((order * COLUMN_BITPLANES + column) * QUAD + t) * 16) =
            words[order][column];
    if (t == 0) *reinterpret_cast<float2*>(group + FACTORS_AT) = make_float2(factor, sum);
  }
};

// Scale and zero point of one of rows g and g + 8.
struct RowScales {
  Scales both;
  int row;
  uint32 selector;

  __forceinline__ explicit RowScales(int row_) : row(row_), selector(row_ ? 0x3244u : 0x1044u) {}

  __forceinline__ float get(int kind, int fragment) const {
    if (SCALE_TYPE == 0)
      return __uint_as_float(byte_permute(both.words[kind * FRAGMENTS + fragment], 0, selector));
    return row ? both.get(kind, 0, fragment, 1) : both.get(kind, 0, fragment, 0);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    gemv_bitplane(const __grid_constant__ Params p) {
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
  constexpr int AT_A_TIME = LANES / QUAD;  // groups that the lanes g convert
  Packed packed, next;
  packed.load(p.x + group_of(g) * BLOCK_K, t);
  for (int own = g; own - g < groups; own += AT_A_TIME) {
    next.load(p.x + group_of(own + AT_A_TIME) * BLOCK_K, t);
    const GroupBitplanes group{Values(packed)};
    if (own < groups) group.store(own_groups + own * GROUP_BYTES, t);
    packed = next;
  }
  __syncwarp();  // the stores above may have diverged
  weights.start_others();
  if (scheduler.cluster > 1) wait_dsmem_buffers();

  // The last plane of the upper byte is the sign.
  float last = __int_as_float(t % 2 ? 0xFF000000u : 0x7F000000u);
  const int row = t / 2;  // the lane's counts are of row g (0) or g + 8 (1)
  int shift = g < 4 ? 0 : 2, turn = g < 4 ? 3 : 7;
  // Kept in registers: the compiler would recompute them for each stage.
  asm volatile("" : "+f"(last), "+r"(shift), "+r"(turn));
  const int from = (g % COLUMN_BITPLANES * QUAD + t) * 16;
  const auto compute = [&](auto constant, int pass) {
    constexpr int BLOCKS = decltype(constant)::value;
    constexpr int PAIRS = (BLOCKS + 1) / 2;
    float sum[BLOCKS][FRAGMENTS] = {}, x_sum[BLOCKS][FRAGMENTS] = {};
    const uint8* group = own_groups;
    for (int i = 0; i < scheduler.stages; i++, group += K_BLOCKS * GROUP_BYTES) {
      weights.pipeline.wait();
#pragma unroll
      for (int k_block = 0; k_block < K_BLOCKS; k_block++) {
        const uint8* const bitplanes = group + k_block * GROUP_BYTES;
        const uint4 v = *reinterpret_cast<const uint4*>(bitplanes + from);
        const uint4 w = *reinterpret_cast<const uint4*>(bitplanes + FACTORS_AT / ORDERS + from);
        const uint32 b[ORDERS][PRODUCTS] = {
            {v.x << shift, v.y << shift, v.z << shift, v.w << shift},
            {rotate_left(w.x, turn), rotate_left(w.y, turn), rotate_left(w.z, turn),
             rotate_left(w.w, turn)}};
        const float2 factors = *reinterpret_cast<const float2*>(bitplanes + FACTORS_AT);
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
          uint32 words[2][LANE_WORDS] = {};
          RowScales scales[2] = {RowScales(row), RowScales(row)};
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const int n_block = 2 * pair + j;
            if (n_block == BLOCKS) break;
            const uint8* block =
                weights.pipeline.current() + (n_block * K_BLOCKS + k_block) * BLOCK_BYTES;
            // One word at a time: a product reads words of two blocks as a register pair, which the
            // compiler would copy several times.
#pragma unroll
            for (int f = 0; f < FRAGMENTS; f++)
              asm volatile("ld.shared.b32 %0, [%1];"
                           : "=r"(words[j][f])
                           : "r"(shared_address(block + slot * 8 + f * 4)));
            scales[j].both.load(block, g);
          }
#pragma unroll
          for (int f = 0; f < FRAGMENTS; f++) {
            uint32 d[PRODUCTS][4];
#pragma unroll
            for (int product = 0; product < PRODUCTS; product++)
              count_both(d[product], words[0][f], words[1][f], b[f][product]);
#pragma unroll
            for (int j = 0; j < 2; j++) {
              const int n_block = 2 * pair + j;
              if (n_block == BLOCKS) break;
              float value = 0.f;
#pragma unroll
              for (int count = 0; count < COUNTS; count++) {
                const float power = count == COUNTS - 1
                                        ? last
                                        : __int_as_float((127 + COUNT_EXPONENT + count) << 23);
                const float found = __uint_as_float(d[count / 2][2 * j + count % 2]);
                value = count == 0 ? found * power : fmaf(found, power, value);
              }
              const float scale = scales[j].get(0, f);
              const float of_x = AFFINE ? scale * scales[j].get(KINDS - 1, f) : scale;
              sum[n_block][f] = fmaf(scale, value * factors.x, sum[n_block][f]);
              x_sum[n_block][f] = fmaf(of_x, factors.y, x_sum[n_block][f]);
            }
          }
        }
      }
      // The products above have consumed all loads of this stage: the compiler must not move its
      // release before them.
#pragma unroll
      for (int f = 0; f < FRAGMENTS * BLOCKS; f++)
        asm volatile("" : "+f"(sum[f / FRAGMENTS][f % FRAGMENTS])::"memory");
      weights.next();
    }

    if (p.sum_buffers == 0) __syncthreads();  // every warp has read its last stage
    float* const buffer = memory.buffer(p, pass) + warp * p.stored_m * SUM_STRIDE;
    const float c0 = to_float(codebook & 0xFFFFu), c1 = to_float(codebook >> 16);
    const float place = t % 2 ? 256.f * SUM_FACTOR : SUM_FACTOR;
#pragma unroll
    for (int block = 0; block < BLOCKS; block++)
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) {
        float ones = place * sum[block][f];
        const float of_x = x_sum[block][f];
        ones += __shfl_xor_sync(~0u, ones, 1);
        const float value = AFFINE ? ones - of_x : fmaf(c1, ones, c0 * (of_x - ones));
        if (t % 2 == 0) buffer[(block * FRAGMENTS + f) * 16 + 8 * row + g] = value;
      }
  };
  run_passes(scheduler, memory, thread, compute);
}
