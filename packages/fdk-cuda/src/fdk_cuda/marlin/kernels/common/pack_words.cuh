// Packs codes into a lane's words of a block, for repack.cu and repack_stack.cu. A lane takes eight
// runs of a block, eight neighbouring codes of a row each.
#pragma once
#include "common/fragments.cuh"

constexpr int PAIRS = 4;                      // pairs of codes in a run
constexpr int LANE_SCALES = KINDS * PER_ROW;  // scales of a block that a lane moves
constexpr uint32 MASK = (1 << BITS) - 1;

template <int BYTES>
struct Unsigned {
  using type = uint16;
};
template <>
struct Unsigned<4> {
  using type = uint32;
};
using Scale = Unsigned<SCALE_BYTES>::type;

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
