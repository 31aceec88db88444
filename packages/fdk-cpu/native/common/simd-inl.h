// Unrolled loops over registers, loops over the tiles of a stripe, and sizes as constants.
//
// Headers named -inl.h are compiled once per instruction set, with its flags. Everything in them is
// in an unnamed namespace, so that the linker never shares a copy between instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/kernels.h"

namespace fdk {
namespace {

#define FDK_INLINE inline __attribute__((always_inline))
#define FDK_LAMBDA __attribute__((always_inline))
// Loops over registers must be unrolled: a variable index puts the array in memory (7 times
// slower).
#define FDK_UNROLL _Pragma("GCC unroll 16")

template <int N>
struct Int {
  static constexpr int value = N;
};

// Calls f(Int<0>{}), ..., f(Int<N - 1>{}).
template <int N, int I = 0, class F>
FDK_INLINE void unroll(F&& f) {
  if constexpr (I < N) {
    f(Int<I>{});
    unroll<N, I + 1>(f);
  }
}

// Prefetch distance of the codes (4096 x 4096, 4 bits, cold, one thread of Zen 4: 0.87 -> 0.37 ms).
inline constexpr std::size_t kPrefetchBytes = 4096;

// Calls f(tile, its codes, slot of its first scale) for tiles [begin, end) of a stripe.
template <class F>
FDK_INLINE void for_tiles(const Weight& w, std::size_t stripe, std::size_t begin, std::size_t end,
                          std::size_t bytes, F f) {
  const std::uint8_t* codes = w.codes + (stripe * w.tiles + begin) * bytes;
  const std::size_t first = stripe * w.stored_groups;
  for (std::size_t tile = begin; tile < end; tile++, codes += bytes) {
    const std::size_t group =
        w.tiles_per_group == 1 ? tile * w.groups_per_tile : tile / w.tiles_per_group;
    f(tile, codes, (first + group) * kTileRows);
  }
}

// Calls f with the bits of the weight as a constant.
template <class F>
FDK_INLINE void with_bits(int bits, F f) {
  switch (bits) {
    case 1:
      return f(Int<1>{});
    case 2:
      return f(Int<2>{});
    case 3:
      return f(Int<3>{});
    case 4:
      return f(Int<4>{});
    case 5:
      return f(Int<5>{});
    case 6:
      return f(Int<6>{});
    case 7:
      return f(Int<7>{});
    default:
      return f(Int<8>{});
  }
}

// Calls f with the groups per tile as a constant.
template <class F>
FDK_INLINE void with_groups(std::size_t groups_per_tile, F f) {
  switch (groups_per_tile) {
    case 1:
      return f(Int<1>{});
    case 2:
      return f(Int<2>{});
    case 4:
      return f(Int<4>{});
    default:
      return f(Int<8>{});
  }
}

}  // namespace
}  // namespace fdk
