// Rounding with vectors of kVectorBytes, by the compiler's vector extensions: one text for every
// instruction set. Comparisons give -1 or 0 in each lane.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "common/simd-inl.h"
#include "rounding/rounding.h"

namespace fdk {
namespace {

using Float = float __attribute__((vector_size(kVectorBytes)));
using Lanes = std::int32_t __attribute__((vector_size(kVectorBytes)));
using Codes = std::uint8_t __attribute__((vector_size(kVectorBytes / 4)));
constexpr std::size_t kLanes = kVectorBytes / 4;

FDK_INLINE Float broadcast(float x) { return x - Float{}; }  // keeps the sign of zero

FDK_INLINE Float load(const float* p) {
  Float v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

FDK_INLINE Float load_some(const float* p, std::size_t count) {
  Float v{};
  std::memcpy(&v, p, count * sizeof(float));
  return v;
}

FDK_INLINE float sum_of(Float v) {
  float sum = 0;
  for (std::size_t i = 0; i < kLanes; i++) sum += v[i];
  return sum;
}

// The table in registers, as far as they go. kEntries is 2, 4, 8 or 16.
template <int kEntries>
struct Table {
  Float midpoint[kEntries - 1], entry[kEntries];

  explicit FDK_INLINE Table(const RoundingTable& table) {
    FDK_UNROLL
    for (int i = 0; i < kEntries; i++) entry[i] = broadcast(table.entry[i]);
    FDK_UNROLL
    for (int i = 0; i + 1 < kEntries; i++) midpoint[i] = broadcast(table.midpoint[i]);
  }

  FDK_INLINE Float nearest(Float v) const {
    Float value = entry[0];
    FDK_UNROLL
    for (int i = 0; i + 1 < kEntries; i++) value = v > midpoint[i] ? entry[i + 1] : value;
    return value;
  }

  FDK_INLINE Codes codes(Float v) const {
    Lanes code{};
    FDK_UNROLL
    for (int i = 0; i + 1 < kEntries; i++) code -= v > midpoint[i];
    return __builtin_convertvector(code, Codes);
  }
};

FDK_INLINE Float divisor_of(float scale) {
  return broadcast(scale == 0 ? std::numeric_limits<float>::infinity() : scale);
}

template <int kEntries>
void round_of(const RoundingTable& constants, const Groups& groups, std::size_t begin,
              std::size_t end, std::uint8_t* codes, float* rounded) {
  const Table<kEntries> table(constants);
  for (std::size_t group = begin; group < end; group++) {
    const Float divisor = divisor_of(groups.scale[group]);
    const Float scale = broadcast(groups.scale[group]);
    std::size_t at = group * groups.size;
    const std::size_t stop = at + groups.size;
    for (; at + kLanes <= stop; at += kLanes) {
      const Float v = load(groups.values + at) / divisor;
      const Float value = table.nearest(v) * scale;
      const Codes code = table.codes(v);
      std::memcpy(rounded + at, &value, sizeof value);
      std::memcpy(codes + at, &code, sizeof code);
    }
    if (at < stop) {
      const Float v = load_some(groups.values + at, stop - at) / divisor;
      const Float value = table.nearest(v) * scale;
      const Codes code = table.codes(v);
      std::memcpy(rounded + at, &value, (stop - at) * sizeof(float));
      std::memcpy(codes + at, &code, stop - at);
    }
  }
}

// Calls f(value, entry, importance) for the vectors of a group. Lanes past its end have importance
// zero.
template <int kEntries, class F>
FDK_INLINE void for_group(const Table<kEntries>& table, const Groups& groups, std::size_t group,
                          F f) {
  const Float divisor = divisor_of(groups.scale[group]);
  const float* values = groups.values + group * groups.size;
  const float* weights = nullptr;
  if (groups.importance != nullptr) {
    weights = groups.importance + group % groups.importance_groups * groups.size;
  }
  std::size_t at = 0;
  for (; at + kLanes <= groups.size; at += kLanes) {
    const Float value = load(values + at);
    f(value, table.nearest(value / divisor), weights ? load(weights + at) : broadcast(1));
  }
  if (const std::size_t left = groups.size - at) {
    const Float value = load_some(values + at, left);
    Float weight{};
    for (std::size_t i = 0; i < left; i++) weight[i] = weights ? weights[at + i] : 1;
    f(value, table.nearest(value / divisor), weight);
  }
}

template <int kEntries>
void errors_of(const RoundingTable& constants, const Groups& groups, std::size_t begin,
               std::size_t end, float* errors) {
  const Table<kEntries> table(constants);
  for (std::size_t group = begin; group < end; group++) {
    const Float scale = broadcast(groups.scale[group]);
    Float sum{};
    for_group(table, groups, group, [&](Float value, Float entry, Float weight) FDK_LAMBDA {
      const Float error = entry * scale - value;
      sum += error * error * weight;
    });
    errors[group] = sum_of(sum);
  }
}

template <int kEntries>
void products_of(const RoundingTable& constants, const Groups& groups, std::size_t begin,
                 std::size_t end, float* product, float* square) {
  const Table<kEntries> table(constants);
  for (std::size_t group = begin; group < end; group++) {
    Float products{}, squares{};
    for_group(table, groups, group, [&](Float value, Float entry, Float weight) FDK_LAMBDA {
      products += value * entry * weight;
      squares += entry * entry * weight;
    });
    product[group] = sum_of(products);
    square[group] = sum_of(squares);
  }
}

// Vectors of rows that a tile has: sums that do not wait for each other.
constexpr std::size_t kTile = 4;

// Rounds kTile vectors of rows, from row `first`; of a tile that is not whole only `count` rows are
// read and written.
template <int kEntries, bool kWhole>
FDK_INLINE void round_tile(const Table<kEntries>& table, const Columns& given, std::size_t first,
                           std::size_t count, Float* residual_of_tile, std::uint8_t* codes,
                           float* residual) {
  const auto lanes_of = [&](std::size_t vector) FDK_LAMBDA {
    if (kWhole) return kLanes;
    return count <= vector * kLanes ? 0 : std::min(kLanes, count - vector * kLanes);
  };
  for (std::size_t i = 0; i < given.columns; i++) {
    const std::size_t at = i * given.rows + first;
    Float wanted[kTile];
    FDK_UNROLL
    for (std::size_t v = 0; v < kTile; v++)
      wanted[v] = load_some(given.wanted + at + v * kLanes, lanes_of(v));
    const float* feedback = given.feedback + i * given.columns;
    for (std::size_t j = 0; j < i; j++) {
      const Float factor = broadcast(feedback[j]);
      FDK_UNROLL
      for (std::size_t v = 0; v < kTile; v++) wanted[v] += factor * residual_of_tile[j * kTile + v];
    }
    FDK_UNROLL
    for (std::size_t v = 0; v < kTile; v++) {
      const std::size_t lanes = lanes_of(v), place = at + v * kLanes;
      const Float scale = load_some(given.scale + place, lanes);
      const Float divisor = scale == 0 ? broadcast(std::numeric_limits<float>::infinity()) : scale;
      Float zero{};
      if (given.zero != nullptr) zero = load_some(given.zero + place, lanes);
      const Float u = wanted[v] / divisor + zero;
      const Float rounded = (table.nearest(u) - zero) * scale;
      const Float rest = load_some(given.reference + place, lanes) - rounded;
      const Codes code = table.codes(u);
      residual_of_tile[i * kTile + v] = rest;
      std::memcpy(residual + place, &rest, lanes * sizeof(float));
      std::memcpy(codes + place, &code, lanes);
    }
  }
}

template <int kEntries>
void columns_of(const RoundingTable& constants, const Columns& given, std::size_t begin,
                std::size_t end, std::uint8_t* codes, float* residual) {
  const Table<kEntries> table(constants);
  std::vector<Float> residual_of_tile(given.columns * kTile);
  std::size_t first = begin;
  for (; first + kTile * kLanes <= end; first += kTile * kLanes)
    round_tile<kEntries, true>(table, given, first, 0, residual_of_tile.data(), codes, residual);
  if (first < end)
    round_tile<kEntries, false>(table, given, first, end - first, residual_of_tile.data(), codes,
                                residual);
}

// Calls f with the number of entries, rounded up, as a constant.
template <class F>
FDK_INLINE void with_entries(std::size_t entries, F f) {
  if (entries <= 2) return f(Int<2>{});
  if (entries <= 4) return f(Int<4>{});
  if (entries <= 8) return f(Int<8>{});
  return f(Int<16>{});
}

void round_range(const RoundingTable& table, const Groups& groups, std::size_t begin,
                 std::size_t end, std::uint8_t* codes, float* rounded) {
  with_entries(table.entries, [&](auto entries) {
    round_of<decltype(entries)::value>(table, groups, begin, end, codes, rounded);
  });
}

void errors_range(const RoundingTable& table, const Groups& groups, std::size_t begin,
                  std::size_t end, float* errors) {
  with_entries(table.entries, [&](auto entries) {
    errors_of<decltype(entries)::value>(table, groups, begin, end, errors);
  });
}

void products_range(const RoundingTable& table, const Groups& groups, std::size_t begin,
                    std::size_t end, float* product, float* square) {
  with_entries(table.entries, [&](auto entries) {
    products_of<decltype(entries)::value>(table, groups, begin, end, product, square);
  });
}

void columns_range(const RoundingTable& table, const Columns& columns, std::size_t begin,
                   std::size_t end, std::uint8_t* codes, float* residual) {
  with_entries(table.entries, [&](auto entries) {
    columns_of<decltype(entries)::value>(table, columns, begin, end, codes, residual);
  });
}

constexpr RoundingKernels kKernels{round_range, errors_range, products_range, columns_range};

}  // namespace
}  // namespace fdk
