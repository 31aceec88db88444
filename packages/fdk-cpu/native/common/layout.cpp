#include "common/layout.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/thread_pool.h"

namespace fdk {
namespace {

// Larger sizes could overflow the products below; no machine has memory for such a weight.
constexpr std::size_t kMaxSide = std::size_t(1) << 28;

std::size_t padded(std::size_t group) {
  for (std::size_t size : {16, 32, 64}) {
    if (group <= size) return size;
  }
  return ceil_div(group, kTileK) * kTileK;
}

// Reads a canonical row, whose codes of `bits` bits lie most significant bit first. Writes whole
// blocks of 8 codes, which take `bits` bytes.
void read_codes(const std::uint8_t* row, std::size_t k, int bits, std::uint8_t* codes) {
  const unsigned mask = (1u << bits) - 1;
  const std::size_t row_bytes = ceil_div(k * std::size_t(bits), 8);
  for (std::size_t at = 0; at < row_bytes; at += std::size_t(bits), codes += 8) {
    const std::size_t count = std::min(std::size_t(bits), row_bytes - at);
    std::uint64_t word = 0;
    for (std::size_t b = 0; b < count; b++) word |= std::uint64_t(row[at + b]) << (56 - 8 * b);
    for (int c = 0; c < 8; c++) codes[c] = std::uint8_t(word >> (64 - bits * (c + 1)) & mask);
  }
}

// The inverse of read_codes.
void write_codes(const std::uint8_t* codes, std::size_t k, int bits, std::uint8_t* row) {
  const std::size_t row_bytes = ceil_div(k * std::size_t(bits), 8);
  for (std::size_t at = 0; at < row_bytes; at += std::size_t(bits), codes += 8) {
    const std::size_t count = std::min(std::size_t(bits), row_bytes - at);
    std::uint64_t word = 0;
    for (int c = 0; c < 8; c++) word |= std::uint64_t(codes[c]) << (64 - bits * (c + 1));
    for (std::size_t b = 0; b < count; b++) row[at + b] = std::uint8_t(word >> (56 - 8 * b));
  }
}

static_assert(std::endian::native == std::endian::little, "the lanes of a plane are copied");

// Writes one plane of a row of a tile.
void write_plane(const Plane& plane, const std::uint8_t* codes, std::uint8_t* out) {
  const unsigned mask = (1u << plane.width) - 1;
  std::uint16_t lanes[kTileK / 2] = {};
  for (int shift = 0; shift < 16; shift += plane.width, codes += plane.lanes()) {
    for (std::size_t j = 0; j < plane.lanes(); j++) {
      lanes[j] |= std::uint16_t((unsigned(codes[j]) >> plane.low & mask) << shift);
    }
  }
  std::memcpy(out, lanes, plane.row_bytes());
}

// Adds one plane of a row of a tile to its codes.
void read_plane(const Plane& plane, const std::uint8_t* in, std::uint8_t* codes) {
  const unsigned mask = (1u << plane.width) - 1;
  std::uint16_t lanes[kTileK / 2];
  std::memcpy(lanes, in, plane.row_bytes());
  for (int shift = 0; shift < 16; shift += plane.width, codes += plane.lanes()) {
    for (std::size_t j = 0; j < plane.lanes(); j++) {
      codes[j] |= std::uint8_t((unsigned(lanes[j]) >> shift & mask) << plane.low);
    }
  }
}

// Rows of a stripe that the weight has.
std::size_t rows_of(const Layout& layout, std::size_t stripe) {
  return std::min(kTileRows, layout.n - stripe * kTileRows);
}

// The codes of a row, padded to whole blocks of 8, and the same at their positions in the tiles.
struct RowBuffers {
  std::vector<std::uint8_t> codes, positions;

  explicit RowBuffers(const Layout& layout)
      : codes(ceil_div(layout.k, 8) * 8), positions(layout.tiles * kTileK) {}
};

}  // namespace

Layout layout_of(std::size_t n, std::size_t k, std::size_t group, int bits) {
  const auto fail = [](const std::string& what) { throw std::invalid_argument("layout: " + what); };
  if (bits < 1 || bits > kMaxBits) fail("bits must be 1 to 8, got " + std::to_string(bits));
  if (n < 1 || n > kMaxSide) fail("n must be 1 to 2^28, got " + std::to_string(n));
  if (k < 1 || k > kMaxSide) fail("k must be 1 to 2^28, got " + std::to_string(k));
  if (group < 1 || k % group != 0) {
    fail("k must be a multiple of the group size " + std::to_string(group) + ", got " +
         std::to_string(k));
  }
  Layout layout{n, k, group, bits, k / group, padded(group), 0, ceil_div(n, kTileRows), 1, 1, 0};
  layout.tiles = ceil_div(layout.groups * layout.padded_group, kTileK);
  if (layout.padded_group < kTileK) {
    layout.groups_per_tile = kTileK / layout.padded_group;
  } else {
    layout.tiles_per_group = layout.padded_group / kTileK;
  }
  layout.stored_groups = layout.tiles / layout.tiles_per_group * layout.groups_per_tile;
  return layout;
}

void pack_codes(const Layout& layout, const std::uint8_t* packed, std::uint8_t* codes,
                std::size_t threads) {
  const std::size_t row_bytes = ceil_div(layout.k * std::size_t(layout.bits), 8);
  const std::size_t tile = tile_bytes(layout.bits), stripe_bytes = layout.tiles * tile;
  const Planes planes = planes_of(layout.bits);
  parallel_for(layout.stripes, 8, threads, [&](std::size_t begin, std::size_t end) {
    RowBuffers row(layout);
    for (std::size_t stripe = begin; stripe < end; stripe++) {
      std::memset(codes + stripe * stripe_bytes, 0, stripe_bytes);
      for (std::size_t r = 0; r < rows_of(layout, stripe); r++) {
        const std::uint8_t* from = packed + (stripe * kTileRows + r) * row_bytes;
        read_codes(from, layout.k, layout.bits, row.codes.data());
        for (std::size_t g = 0; g < layout.groups; g++) {
          std::memcpy(&row.positions[g * layout.padded_group], &row.codes[g * layout.group],
                      layout.group);
        }
        for (std::size_t t = 0; t < layout.tiles; t++) {
          std::uint8_t* to = codes + stripe * stripe_bytes + t * tile;
          for (int p = 0; p < planes.count; p++) {
            const Plane& plane = planes.plane[p];
            write_plane(plane, &row.positions[t * kTileK],
                        to + plane.offset + r * plane.row_bytes());
          }
        }
      }
    }
  });
}

void unpack_codes(const Layout& layout, const std::uint8_t* codes, std::uint8_t* packed,
                  std::size_t threads) {
  const std::size_t row_bytes = ceil_div(layout.k * std::size_t(layout.bits), 8);
  const std::size_t tile = tile_bytes(layout.bits), stripe_bytes = layout.tiles * tile;
  const Planes planes = planes_of(layout.bits);
  parallel_for(layout.stripes, 8, threads, [&](std::size_t begin, std::size_t end) {
    RowBuffers row(layout);
    for (std::size_t stripe = begin; stripe < end; stripe++) {
      for (std::size_t r = 0; r < rows_of(layout, stripe); r++) {
        std::fill(row.positions.begin(), row.positions.end(), std::uint8_t(0));
        for (std::size_t t = 0; t < layout.tiles; t++) {
          const std::uint8_t* from = codes + stripe * stripe_bytes + t * tile;
          for (int p = 0; p < planes.count; p++) {
            const Plane& plane = planes.plane[p];
            read_plane(plane, from + plane.offset + r * plane.row_bytes(),
                       &row.positions[t * kTileK]);
          }
        }
        for (std::size_t g = 0; g < layout.groups; g++) {
          std::memcpy(&row.codes[g * layout.group], &row.positions[g * layout.padded_group],
                      layout.group);
        }
        std::uint8_t* to = packed + (stripe * kTileRows + r) * row_bytes;
        write_codes(row.codes.data(), layout.k, layout.bits, to);
      }
    }
  });
}

void pack_groups(const Layout& layout, const std::uint8_t* in, std::uint8_t* out,
                 std::size_t item) {
  std::memset(out, 0, layout.scales() * item);
  for (std::size_t row = 0; row < layout.n; row++) {
    for (std::size_t g = 0; g < layout.groups; g++) {
      const std::size_t slot =
          (row / kTileRows * layout.stored_groups + g) * kTileRows + row % kTileRows;
      std::memcpy(out + slot * item, in + (row * layout.groups + g) * item, item);
    }
  }
}

void unpack_groups(const Layout& layout, const std::uint8_t* in, std::uint8_t* out,
                   std::size_t item) {
  for (std::size_t row = 0; row < layout.n; row++) {
    for (std::size_t g = 0; g < layout.groups; g++) {
      const std::size_t slot =
          (row / kTileRows * layout.stored_groups + g) * kTileRows + row % kTileRows;
      std::memcpy(out + (row * layout.groups + g) * item, in + slot * item, item);
    }
  }
}

}  // namespace fdk
