// The packed layout, the same for every instruction set.
//
// A weight [n, k] is cut into stripes of kTileRows rows, and a stripe into tiles of kTileK
// positions along k. The codes of a tile are contiguous, and so are the tiles of a stripe, so that
// a kernel reads one stream:
//
//   codes  :: [stripes][tiles][64 * bits bytes]
//   scales :: [stripes][stored groups][kTileRows]     and zero points likewise
//
// Within a tile, codes are split into planes of 8, 4, 2 and 1 bits (7 bits: 4 + 2 + 1; the first
// plane has the low bits). A plane of w bits gives each row 8 w little-endian 16-bit lanes of 16 /
// w fields:
//
//   field s of lane j, from the least significant bit, is position 8 w s + j of the tile
//
// At 4 bits that is one 64-byte register a row: shifting it right by 4 s leaves the codes of
// positions 32 s to 32 s + 31, in order, in the low bits of its lanes, ready for a 16-bit table
// lookup.
//
// Groups are padded to 16, 32, 64 or a multiple of 128 positions, so that none straddles a tile or
// half a vector. For G of these sizes only the end of a row is padded. Padding has code 0 and is
// multiplied with zeros of x; padded groups and rows have scale 0.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fdk {

inline constexpr std::size_t kTileRows = 4;
inline constexpr std::size_t kTileK = 128;
inline constexpr int kMaxBits = 8;
inline constexpr std::size_t kMaxLevels = 256;

enum class ScaleType : int { bf16, fp16, fp32, e8m0 };
enum class ZeroType : int { none, bf16, fp16, fp32, u8 };
enum class Activation : int { bf16, fp16, fp32 };

// Functions in headers are static: the linker must not use a copy that was compiled for AVX-512 in
// code that runs on any machine.
static constexpr std::size_t ceil_div(std::size_t a, std::size_t b) { return a / b + (a % b != 0); }

static constexpr std::size_t bytes_of(ScaleType type) {
  return type == ScaleType::fp32 ? 4 : type == ScaleType::e8m0 ? 1 : 2;
}
static constexpr std::size_t bytes_of(ZeroType type) {
  return type == ZeroType::none ? 0 : type == ZeroType::fp32 ? 4 : type == ZeroType::u8 ? 1 : 2;
}
static constexpr std::size_t bytes_of(Activation type) { return type == Activation::fp32 ? 4 : 2; }

// Bytes of the codes of one tile.
static constexpr std::size_t tile_bytes(int bits) {
  return kTileRows * kTileK / 8 * std::size_t(bits);
}

// One plane of a tile: `width` bits of each code, starting at bit `low`, at byte `offset`.
struct Plane {
  int width, low;
  std::size_t offset;
  constexpr std::size_t row_bytes() const { return kTileK / 8 * std::size_t(width); }
  constexpr std::size_t lanes() const { return 8 * std::size_t(width); }
};

struct Planes {
  Plane plane[3];
  int count;
};

static constexpr Planes planes_of(int bits) {
  Planes planes{{}, 0};
  int low = 0;
  for (int width = kMaxBits; width > 0; width /= 2) {
    if ((bits & width) == 0) continue;
    const std::size_t offset = kTileRows * kTileK / 8 * std::size_t(low);
    planes.plane[planes.count++] = Plane{width, low, offset};
    low += width;
  }
  return planes;
}
static_assert(planes_of(7).count == 3 && planes_of(7).plane[2].offset == 384);

// The sizes derived from those of the weight.
struct Layout {
  std::size_t n, k, group;
  int bits;
  std::size_t groups;           // per row of the weight: k / G
  std::size_t padded_group;     // positions of a group with its padding
  std::size_t tiles;            // per row
  std::size_t stripes;          // stripes of kTileRows rows
  std::size_t groups_per_tile;  // 8, 4, 2 or 1
  std::size_t tiles_per_group;  // 1, or more if a group spans tiles
  std::size_t stored_groups;    // groups of a stripe, padding included

  std::size_t code_bytes() const { return stripes * tiles * tile_bytes(bits); }
  std::size_t scales() const { return stripes * stored_groups * kTileRows; }
  std::size_t positions() const { return tiles * kTileK; }
  // True if no group or row is padded, so that x needs no gaps.
  bool dense() const { return positions() == k; }
  // The position, padding included, of column `index` of the weight.
  std::size_t position(std::size_t index) const {
    return index / group * padded_group + index % group;
  }
};

// Throws std::invalid_argument for sizes that are invalid or overflow.
Layout layout_of(std::size_t n, std::size_t k, std::size_t group, int bits);

// Pack the canonical codes into the layout, and unpack them. `packed` is [n, ceil(k * bits / 8)],
// each row a bit stream with the first code in the most significant bits.
void pack_codes(const Layout& layout, const std::uint8_t* packed, std::uint8_t* codes,
                std::size_t threads);
void unpack_codes(const Layout& layout, const std::uint8_t* codes, std::uint8_t* packed,
                  std::size_t threads);
// The same for scales or zero points of `item` bytes: [n, groups] and [stripes][stored
// groups][kTileRows].
void pack_groups(const Layout& layout, const std::uint8_t* in, std::uint8_t* out, std::size_t item);
void unpack_groups(const Layout& layout, const std::uint8_t* in, std::uint8_t* out,
                   std::size_t item);

}  // namespace fdk
