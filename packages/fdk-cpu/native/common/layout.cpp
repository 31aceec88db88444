#include "common/layout.h"

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

// A code of a canonical row: `bits` bits from bit `index * bits` on, most significant first.
unsigned read_code(const std::uint8_t* row, std::size_t row_bytes, std::size_t index, int bits) {
  const std::size_t bit = index * std::size_t(bits), byte = bit / 8;
  const unsigned next = byte + 1 < row_bytes ? row[byte + 1] : 0;
  const unsigned word = unsigned(row[byte]) << 8 | next;
  return word >> (16 - bits - int(bit % 8)) & ((1u << bits) - 1);
}

void write_code(std::uint8_t* row, std::size_t row_bytes, std::size_t index, int bits,
                unsigned code) {
  const std::size_t bit = index * std::size_t(bits), byte = bit / 8;
  const unsigned word = code << (16 - bits - int(bit % 8));
  row[byte] |= std::uint8_t(word >> 8);
  if (byte + 1 < row_bytes) row[byte + 1] |= std::uint8_t(word);
}

// The place of a field of one plane in a tile: its byte in row 0 and the shift within it.
struct Place {
  std::size_t byte;
  int shift;
};

Place place_of(const Plane& plane, std::size_t position) {
  const std::size_t lane = position % plane.lanes();
  const int shift = int(position / plane.lanes()) * plane.width;
  return {plane.offset + 2 * lane + std::size_t(shift / 8), shift % 8};
}

// Calls f(row of the stripe, code index, byte of the tile, position in the tile) for each code.
template <class F>
void for_codes_of_stripe(const Layout& layout, std::size_t stripe, F f) {
  const std::size_t first = stripe * kTileRows;
  const std::size_t rows = layout.n - first < kTileRows ? layout.n - first : kTileRows;
  for (std::size_t r = 0; r < rows; r++) {
    for (std::size_t g = 0, index = 0; g < layout.groups; g++) {
      for (std::size_t i = 0; i < layout.group; i++, index++) {
        const std::size_t position = g * layout.padded_group + i;
        f(r, index, (stripe * layout.tiles + position / kTileK) * tile_bytes(layout.bits),
          position % kTileK);
      }
    }
  }
}

// The places of all positions of a tile, per plane.
std::vector<Place> places_of(const Planes& planes) {
  std::vector<Place> places;
  for (int p = 0; p < planes.count; p++) {
    for (std::size_t i = 0; i < kTileK; i++) places.push_back(place_of(planes.plane[p], i));
  }
  return places;
}

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
  const std::size_t stripe_bytes = layout.tiles * tile_bytes(layout.bits);
  const Planes planes = planes_of(layout.bits);
  const std::vector<Place> places = places_of(planes);
  parallel_for(layout.stripes, 1, threads, [&](std::size_t begin, std::size_t end) {
    for (std::size_t stripe = begin; stripe < end; stripe++) {
      std::memset(codes + stripe * stripe_bytes, 0, stripe_bytes);
      const std::uint8_t* rows = packed + stripe * kTileRows * row_bytes;
      for_codes_of_stripe(
          layout, stripe,
          [&](std::size_t r, std::size_t index, std::size_t tile, std::size_t position) {
            const unsigned code = read_code(rows + r * row_bytes, row_bytes, index, layout.bits);
            for (int p = 0; p < planes.count; p++) {
              const Plane& plane = planes.plane[p];
              const Place place = places[std::size_t(p) * kTileK + position];
              const unsigned field = code >> plane.low & ((1u << plane.width) - 1);
              codes[tile + place.byte + r * plane.row_bytes()] |=
                  std::uint8_t(field << place.shift);
            }
          });
    }
  });
}

void unpack_codes(const Layout& layout, const std::uint8_t* codes, std::uint8_t* packed,
                  std::size_t threads) {
  const std::size_t row_bytes = ceil_div(layout.k * std::size_t(layout.bits), 8);
  const Planes planes = planes_of(layout.bits);
  const std::vector<Place> places = places_of(planes);
  std::memset(packed, 0, layout.n * row_bytes);
  parallel_for(layout.stripes, 1, threads, [&](std::size_t begin, std::size_t end) {
    for (std::size_t stripe = begin; stripe < end; stripe++) {
      std::uint8_t* rows = packed + stripe * kTileRows * row_bytes;
      for_codes_of_stripe(
          layout, stripe,
          [&](std::size_t r, std::size_t index, std::size_t tile, std::size_t position) {
            unsigned code = 0;
            for (int p = 0; p < planes.count; p++) {
              const Plane& plane = planes.plane[p];
              const Place place = places[std::size_t(p) * kTileK + position];
              const unsigned byte = codes[tile + place.byte + r * plane.row_bytes()];
              code |= (byte >> place.shift & ((1u << plane.width) - 1)) << plane.low;
            }
            write_code(rows + r * row_bytes, row_bytes, index, layout.bits, code);
          });
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
