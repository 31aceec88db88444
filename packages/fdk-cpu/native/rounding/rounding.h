// Rounding of weights to a codebook of up to 16 entries, and what a search for scales, a training
// step and error compensation need of it. Bit for bit the values of fdk_formats' CodebookEncoder;
// sums, and residuals of columns, differ in order and fusion of their operations.
//
//   values     :: [groups, size]               float32
//   scale      :: [groups]                     float32; zero rounds every value as zero
//   importance :: [importance_groups, size]    float32, used again for every importance_groups
#pragma once

#include <cstddef>
#include <cstdint>

namespace fdk {

inline constexpr std::size_t kMaxRoundingEntries = 16;

// The code of a value over its scale is the number of midpoints below it.
struct RoundingTable {
  std::size_t entries;
  float midpoint[kMaxRoundingEntries];  // entries - 1 of them, ascending; then infinity
  float entry[kMaxRoundingEntries];     // the last one repeated
};

struct Groups {
  const float* values;
  const float* scale;
  const float* importance;  // null for ones
  std::size_t groups, size, importance_groups;
};

// Columns of a weight that are rounded one after the other. Column i wants
//
//   u = wanted_i + sum over j < i of feedback_ij residual_j
//
// and gets the code of u / scale_i + zero_i; residual_i is reference_i - (entry - zero_i) scale_i.
//
//   wanted, reference, scale :: [columns, rows]
//   zero                     :: [columns, rows], or null for zeros
//   feedback                 :: [columns, columns], below the diagonal
struct Columns {
  const float *wanted, *reference, *feedback, *scale, *zero;
  std::size_t columns, rows;
};

// midpoints :: [entries - 1], entries :: [entries]
RoundingTable rounding_table_of(const float* midpoints, const float* entries, std::size_t count);

// Writes the code and the value, entry times scale, of each.
void round_groups(const RoundingTable& table, const Groups& groups, std::uint8_t* codes,
                  float* rounded, std::size_t threads);

// Writes the squared error of each group, weighted by importance: [groups].
void group_errors(const RoundingTable& table, const Groups& groups, float* errors,
                  std::size_t threads);

// Writes the weighted sums of value times entry and of squared entries: [groups] each.
void group_products(const RoundingTable& table, const Groups& groups, float* product, float* square,
                    std::size_t threads);

// Writes codes and residual, [columns, rows] each.
void round_columns(const RoundingTable& table, const Columns& columns, std::uint8_t* codes,
                   float* residual, std::size_t threads);

// The kernels of an instruction set, for groups or rows [begin, end).
struct RoundingKernels {
  void (*round)(const RoundingTable&, const Groups&, std::size_t begin, std::size_t end,
                std::uint8_t* codes, float* rounded);
  void (*errors)(const RoundingTable&, const Groups&, std::size_t begin, std::size_t end,
                 float* errors);
  void (*products)(const RoundingTable&, const Groups&, std::size_t begin, std::size_t end,
                   float* product, float* square);
  void (*columns)(const RoundingTable&, const Columns&, std::size_t begin, std::size_t end,
                  std::uint8_t* codes, float* residual);
};

extern const RoundingKernels kRoundingBaseline;
#if defined(__x86_64__)
extern const RoundingKernels kRoundingAvx2;
extern const RoundingKernels kRoundingAvx512;
#endif

}  // namespace fdk
