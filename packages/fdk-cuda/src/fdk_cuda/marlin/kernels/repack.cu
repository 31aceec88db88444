// Packs a canonical weight into the Marlin layout, and unpacks it. layout.py explains the order,
// and its torch functions define the bytes.
//
// canonical  :: [n, row_bytes, uint8]       a row is a bit stream, first code in the highest bits
// scale      :: [n, groups, SCALE_BYTES]    zero_point likewise, if there is one
// packed     :: [padded_n / 32, padded_k / 64, BLOCK_BYTES, uint8]
//
// A thread block takes 32 rows x 512 columns, through shared memory so that both sides are accessed
// contiguously. A warp takes one block of 32 x 64, and a lane eight runs of eight neighbouring
// codes of a row, BITS bytes each.
#include "common/fragments.cuh"

using int64 = long long;
constexpr int WARPS = 8, THREADS = WARPS * LANES;
constexpr int UNIT_BYTES = 8;                        // canonical bytes moved at a time
constexpr int BLOCK_ROW_BYTES = BLOCK_K * BITS / 8;  // bytes of a row of a block
constexpr int TILE_ROW_BYTES = WARPS * BLOCK_ROW_BYTES;
constexpr int ROW_UNITS = TILE_ROW_BYTES / UNIT_BYTES;
constexpr int UNITS = BLOCK_N * ROW_UNITS / THREADS;  // units per thread
// Runs of eight rows are in different banks of shared memory, except for a few at 3 bits.
constexpr int STRIDE = TILE_ROW_BYTES + (BITS % 2 ? 8 : 4) * BITS;
static_assert(STRIDE % UNIT_BYTES == 0 && BLOCK_N * ROW_UNITS % THREADS == 0);
constexpr int PAIRS = 4;                      // pairs of codes in a run
constexpr int LANE_SCALES = KINDS * PER_ROW;  // scales of a block that a lane moves
constexpr uint32 MASK = (1 << BITS) - 1;

struct Params {
  uint8* canonical;
  uint8* scale;
  uint8* zero_point;
  uint8* packed;
  int n, k, padded_k;
  int row_bytes;  // bytes of a canonical row
  int groups;     // scales of a row
  int repeats;    // times that a scale is stored along a row of the layout
  int is_whole;   // 1 where rows consist of whole, aligned units
};

template <int BYTES>
struct Unsigned {
  using type = uint16;
};
template <>
struct Unsigned<4> {
  using type = uint32;
};
using Scale = Unsigned<SCALE_BYTES>::type;

// Position of a thread block, and of a warp in it.
struct Place {
  int first_row, first_byte, k_block, blocks;
  uint64 block;  // index of the warp's block in the layout

  __forceinline__ Place(const Params& p) {
    blocks = p.padded_k / BLOCK_K;
    const int tiles = (blocks + WARPS - 1) / WARPS;
    const int n_block = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    first_row = n_block * BLOCK_N;
    first_byte = tile * TILE_ROW_BYTES;
    k_block = tile * WARPS + threadIdx.x / LANES;
    block = static_cast<uint64>(n_block) * blocks + k_block;
  }

  __forceinline__ bool has_block() const { return k_block < blocks; }
};

// A unit of canonical bytes: offset in shared memory, row and byte.
struct Unit {
  int shared, row, byte;

  __forceinline__ Unit(const Place& place, int i) {
    const int index = i * THREADS + threadIdx.x;
    const int row_ = index / ROW_UNITS, byte_ = index % ROW_UNITS * UNIT_BYTES;
    shared = row_ * STRIDE + byte_;
    row = place.first_row + row_;
    byte = place.first_byte + byte_;
  }

  __forceinline__ bool exists(const Params& p) const { return row < p.n && byte < p.row_bytes; }

  __forceinline__ uint8* address(const Params& p) const {
    return p.canonical + static_cast<uint64>(row) * p.row_bytes + byte;
  }

  // Returns the bits of its byte i that belong to codes: all, except in a row's last byte.
  __forceinline__ uint32 code_bits(const Params& p, int i) const {
    const int64 left = static_cast<int64>(p.k) * BITS - 8 * static_cast<int64>(byte + i);
    return left >= 8 ? 0xFFu : left <= 0 ? 0u : 0xFF00u >> left & 0xFFu;
  }
};

// Eight neighbouring codes: BITS bytes as stored, or, where codes cross bytes, the number that the
// bytes form.
struct Run {
  uint32 words[2] = {0, 0};
  uint64 number = 0;
  static constexpr bool IS_NUMBER = BITS == 3 || IS_SPLIT;

  __forceinline__ void load(const uint8* from) {
    if constexpr (BITS == 8) {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      words[0] = v.x;
      words[1] = v.y;
    } else if constexpr (BITS == 4) {
      words[0] = *reinterpret_cast<const uint32*>(from);
    } else if constexpr (IS_NUMBER) {
#pragma unroll
      for (int i = 0; i < BITS; i++) number = number << 8 | from[i];
    } else if constexpr (BITS == 2) {
      words[0] = *reinterpret_cast<const uint16*>(from);
    } else {
      words[0] = *from;
    }
  }

  __forceinline__ void store(uint8* to) const {
    if constexpr (BITS == 8) {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    } else if constexpr (BITS == 4) {
      *reinterpret_cast<uint32*>(to) = words[0];
    } else if constexpr (IS_NUMBER) {
#pragma unroll
      for (int i = 0; i < BITS; i++) to[i] = number >> (8 * (BITS - 1 - i));
    } else if constexpr (BITS == 2) {
      *reinterpret_cast<uint16*>(to) = words[0];
    } else {
      *to = words[0];
    }
  }

  static constexpr int shift(int code) {
    if (IS_NUMBER) return BITS * (7 - code);
    return code * BITS / 8 % 4 * 8 + 8 - BITS - code * BITS % 8;
  }
  static constexpr int word(int code) { return BITS == 8 ? code / 4 : 0; }

  __forceinline__ uint32 get(int code) const {
    if constexpr (IS_NUMBER) return number >> shift(code) & MASK;
    return words[word(code)] >> shift(code) & MASK;
  }
  __forceinline__ void put(int code, uint32 value) {
    if constexpr (IS_NUMBER)
      number |= static_cast<uint64>(value) << shift(code);
    else
      words[word(code)] |= value << shift(code);
  }
};

// Place of pair q of a run among a lane's words of a fragment (layout.py: _bit_positions), for
// columns 32 * h + 8 * t + 2 * q + e of row 8 * r + g. The first code of a pair is `between` places
// below the second, both rotated left by `shift`. At 3 bits the fourth pair of a unit is spread
// over three words. For 5 to 7 bits see SplitPart.
struct PairPlace {
  int word, shift, between;

  constexpr PairPlace(int f, int h, int r, int q) : word(0), shift(0), between(BITS) {
    if (BITS == 8) {
      word = 4 * h + q;
      shift = 16 * r;
    } else if (BITS == 4) {
      word = q;
      shift = 16 * h + 8 * r;
    } else if (BITS == 3) {
      word = 2 * h + r;
      shift = 8 * q;
    } else if (BITS == 2) {
      word = h;
      shift = h == 0 ? 8 * q + 4 * r : 16 * r + 1 + 2 * q;
      between = h == 0 ? 2 : 8;
    } else {
      shift = f == 0 ? 16 * h + 4 * q + 2 * r : 3 + 2 * h + (q >> 1) + 8 * (q & 1) + 4 * r;
      between = f == 0 ? 1 : 16;
    }
  }
};
constexpr int LEFT_OVER = 3;  // 3 bits: marks the pair without its own word

__forceinline__ uint32 rotate_left(uint32 word, int places) {
  return __funnelshift_l(word, word, places);
}

// 5 to 7 bits: place of some bits of both codes of a pair (layout.py: _split_positions). Bits of
// `mask`, from bit `from` on, are shifted left by `shift`, the second code's by `between` more.
struct SplitPart {
  int from, word, shift, between;
  uint32 mask;

  constexpr SplitPart(int part, int f, int h, int r, int q)
      : from(0), word(4 * f + q), shift(16 * r), between(8), mask(MASK) {
    if (BITS == 5) {
      from = part == 0 ? 0 : 4;
      word = part == 0 ? word : word_of_four(f);
      shift = 8 * (2 * h + r) + (part == 0 ? 0 : 2 * q);
      between = part == 0 ? 4 : 1;
      mask = part == 0 ? 15 : part == 1 ? 1 : 0;
    } else if (h == 0) {
      mask = part == 0 ? MASK : 0;
    } else if (part == 0) {
      shift += BITS;
      mask = MASK >> (2 * BITS - 8);
    } else {
      from = part == 1 ? 8 - BITS : 5;
      word = part == 1 ? word_of_two(f, q) : word_of_four(f);
      shift += part == 1 ? 4 * (q & 1) : 2 * q;
      mask = part == 1 ? 15 : BITS == 7 ? 3 : 0;
    }
  }
};
constexpr int SPLIT_PARTS = 3;

__forceinline__ void put_pair(uint32 (&lane_words)[LANE_WORDS], int f, int h, int r, int q,
                              uint32 first, uint32 second) {
  if constexpr (IS_SPLIT) {
#pragma unroll
    for (int i = 0; i < SPLIT_PARTS; i++) {
      const SplitPart part(i, f, h, r, q);
      const uint32 low = first >> part.from & part.mask, high = second >> part.from & part.mask;
      if (part.mask) lane_words[part.word] |= (low | high << part.between) << part.shift;
    }
    return;
  }
  uint32* const words = lane_words + f * BITS;
  const PairPlace place(f, h, r, q);
  const uint32 pair = first | second << place.between;
  if (BITS == 3 && place.word == LEFT_OVER) {
#pragma unroll
    for (int i = 0; i < 3; i++) words[i] |= (pair >> 2 * i & 3) << (8 * q + 6);
  } else {
    words[place.word] |= rotate_left(pair, place.shift);
  }
}

// Reads a pair of codes into `run`.
__forceinline__ void get_pair(Run& run, const uint32 (&lane_words)[LANE_WORDS], int f, int h, int r,
                              int q) {
  uint32 pair = 0;
  const PairPlace place(f, h, r, q);
  const uint32* const words = lane_words + f * BITS;
  if constexpr (IS_SPLIT) {
#pragma unroll
    for (int i = 0; i < SPLIT_PARTS; i++) {
      const SplitPart part(i, f, h, r, q);
      if (part.mask == 0) continue;
      const uint32 bits = lane_words[part.word] >> part.shift;
      pair |= (bits & part.mask) << part.from | (bits >> part.between & part.mask)
                                                    << (8 + part.from);
    }
  } else if (BITS == 3 && place.word == LEFT_OVER) {
#pragma unroll
    for (int i = 0; i < 3; i++) pair |= (words[i] >> (8 * q + 6) & 3) << 2 * i;
  } else {
    pair = rotate_right(words[place.word], place.shift);
  }
  run.put(2 * q, pair & MASK);
  run.put(2 * q + 1, pair >> (IS_SPLIT ? 8 : place.between) & MASK);
}

// Calls `take(run's offset in shared memory, f, h, r)` for each run of a lane.
template <class Take>
__forceinline__ void for_runs(const Take& take) {
  const int lane = threadIdx.x % LANES, g = lane / 4, t = lane % 4;
  const int first = g * STRIDE + threadIdx.x / LANES * BLOCK_ROW_BYTES + t * BITS;
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int h = 0; h < 2; h++) take(first + (16 * f + 8 * r) * STRIDE + 4 * h * BITS, f, h, r);
}

// Calls `take(i, index in the block, is first of a scale's copies, kind, index among that kind or
// -1 for padding)` for each scale and zero point that a lane moves.
template <class Take>
__forceinline__ void for_scales(const Params& p, const Place& place, const Take& take) {
#pragma unroll
  for (int i = 0; i < LANE_SCALES; i++) {
    const int index = i * LANES + threadIdx.x % LANES;
    const int of_lane = index / 4;  // [g, kind, half]
    const int half = of_lane % PER_ROW, kind = of_lane / PER_ROW % KINDS;
    const int g = of_lane / (PER_ROW * KINDS);
    const int row = place.first_row + 16 * (index >> 1 & 1) + 8 * (index & 1) + g;
    const int column = place.k_block * PER_ROW + half, group = column / p.repeats;
    const bool exists = row < p.n && group < p.groups;
    const int64 of_kind = exists ? static_cast<int64>(row) * p.groups + group : -1;
    take(i, index, column == group * p.repeats, kind, of_kind);
  }
}

// Loads the canonical bytes of a thread block into shared memory, with zeros past rows and codes.
__forceinline__ void load_tile(uint8* tile, const Params& p, const Place& place) {
  if (p.is_whole) {
    uint2 bytes[UNITS];  // all in flight at once
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
      const Unit unit(place, i);
      bytes[i] =
          unit.exists(p) ? *reinterpret_cast<const uint2*>(unit.address(p)) : make_uint2(0, 0);
    }
#pragma unroll
    for (int i = 0; i < UNITS; i++)
      *reinterpret_cast<uint2*>(tile + Unit(place, i).shared) = bytes[i];
    return;
  }
#pragma unroll 1
  for (int i = 0; i < UNITS; i++) {
    const Unit unit(place, i);
#pragma unroll 1
    for (int j = 0; j < UNIT_BYTES; j++) {
      const uint32 kept = unit.exists(p) ? unit.code_bits(p, j) : 0;
      tile[unit.shared + j] = kept ? unit.address(p)[j] & kept : 0;
    }
  }
}

__forceinline__ void store_tile(const uint8* tile, const Params& p, const Place& place) {
  if (p.is_whole) {
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
      const Unit unit(place, i);
      if (unit.exists(p))
        *reinterpret_cast<uint2*>(unit.address(p)) =
            *reinterpret_cast<const uint2*>(tile + unit.shared);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < UNITS; i++) {
    const Unit unit(place, i);
    if (unit.row >= p.n) continue;
#pragma unroll 1
    for (int j = 0; j < UNIT_BYTES && unit.byte + j < p.row_bytes; j++)
      unit.address(p)[j] = tile[unit.shared + j] & unit.code_bits(p, j);
  }
}

__forceinline__ void store_words(const uint32 (&words)[LANE_WORDS], uint8* block, int slot) {
  constexpr int WHOLE = LANE_WORDS / 4;
#pragma unroll
  for (int piece = 0; piece < WHOLE; piece++)
    *reinterpret_cast<uint4*>(block + (piece * LANES + slot) * 16) = make_uint4(
        words[4 * piece], words[4 * piece + 1], words[4 * piece + 2], words[4 * piece + 3]);
  if constexpr (LANE_WORDS % 4 != 0)
    *reinterpret_cast<uint2*>(block + WHOLE * LANES * 16 + slot * 8) =
        make_uint2(words[4 * WHOLE], words[4 * WHOLE + 1]);
}

extern "C" __global__ void __launch_bounds__(THREADS, IS_SPLIT ? 1 : 0)
    pack(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) uint8 tile[];  // [BLOCK_N, STRIDE]
  const Place place(p);
  Scale scales[LANE_SCALES];
  for_scales(p, place, [&](int i, int, bool, int kind, int64 of_kind) {
    const Scale* const kinds = reinterpret_cast<const Scale*>(kind ? p.zero_point : p.scale);
    scales[i] = of_kind < 0 ? 0 : kinds[of_kind];
  });
  load_tile(tile, p, place);
  __syncthreads();
  if (!place.has_block()) return;
  uint32 words[LANE_WORDS] = {};
  for_runs([&](int offset, int f, int h, int r) {
    Run run;
    run.load(tile + offset);
#pragma unroll
    for (int q = 0; q < PAIRS; q++) put_pair(words, f, h, r, q, run.get(2 * q), run.get(2 * q + 1));
  });
  uint8* const block = p.packed + place.block * BLOCK_BYTES;
  const int lane = threadIdx.x % LANES;
  store_words(words, block, lane_slot(lane / 4, lane % 4));
  for_scales(p, place, [&](int i, int index, bool, int, int64) {
    reinterpret_cast<Scale*>(block + CODE_BYTES)[index] = scales[i];
  });
}

extern "C" __global__ void __launch_bounds__(THREADS, IS_SPLIT ? 1 : 0)
    unpack(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) uint8 tile[];  // [BLOCK_N, STRIDE]
  const Place place(p);
  if (place.has_block()) {
    const uint8* const block = p.packed + place.block * BLOCK_BYTES;
    const int lane = threadIdx.x % LANES;
    uint32 words[LANE_WORDS];
    load_words(words, block, lane_slot(lane / 4, lane % 4));
    for_scales(p, place, [&](int, int index, bool is_first, int kind, int64 of_kind) {
      Scale* const kinds = reinterpret_cast<Scale*>(kind ? p.zero_point : p.scale);
      if (is_first && of_kind >= 0)
        kinds[of_kind] = reinterpret_cast<const Scale*>(block + CODE_BYTES)[index];
    });
    for_runs([&](int offset, int f, int h, int r) {
      Run run;
#pragma unroll
      for (int q = 0; q < PAIRS; q++) get_pair(run, words, f, h, r, q);
      run.store(tile + offset);
    });
  }
  __syncthreads();
  store_tile(tile, p, place);
}
