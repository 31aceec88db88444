// Random cases, comparisons and the checks of the other files.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "common/float_convert.h"
#include "common/dispatch.h"
#include "common/kernels.h"
#include "common/linear_int8.h"

using fdk::Activation;
using fdk::ScaleType;
using fdk::ZeroType;
using Bytes = std::vector<std::uint8_t>;

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::exit(1);
}

// The instruction sets of this machine, or those of FDK_TEST_ISAS=sve,sve2 that it has.
inline std::vector<const char*> tested_isas() {
  const char* const listed = std::getenv("FDK_TEST_ISAS");
  const std::string names = listed == nullptr ? "" : "," + std::string(listed) + ",";
  std::vector<const char*> isas;
  for (int isa = 0; isa < fdk::kIsas; isa++) {
    const char* const name = fdk::name_of(fdk::Isa(isa));
    const bool wanted = names.empty() || names.find("," + std::string(name) + ",") != names.npos;
    if (wanted && fdk::supported(fdk::Isa(isa))) isas.push_back(name);
  }
  return isas;
}

struct Case {
  std::size_t n, k, group, m;
  int bits;
  bool affine;
  ScaleType scale_type;
  ZeroType zero_type;
  Activation activation;
  std::size_t threads = 1;

  std::string text() const {
    return "m" + std::to_string(m) + "-n" + std::to_string(n) + "-k" + std::to_string(k) + "-g" +
           std::to_string(group) + "-b" + std::to_string(bits) + (affine ? "-affine" : "") +
           "-scale" + std::to_string(int(scale_type)) + "-x" + std::to_string(int(activation));
  }
};

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  std::size_t upto(std::size_t top) { return engine_() % (top + 1); }
  float normal() { return normal_(engine_); }
  Bytes bytes(std::size_t count) {
    Bytes out(count);
    for (auto& byte : out) byte = std::uint8_t(engine_());
    return out;
  }

 private:
  std::mt19937 engine_;
  std::normal_distribution<float> normal_;
};

inline void put(Bytes& to, std::size_t i, int type,
                float value) {  // type: of ScaleType or Activation
  if (type == 2) {
    std::memcpy(&to[4 * i], &value, 4);
  } else {
    const std::uint16_t half = type == 0 ? to_bf16(value) : to_fp16(value);
    std::memcpy(&to[2 * i], &half, 2);
  }
}

inline float get(const Bytes& from, std::size_t i, int type) {
  if (type == 3) return from_e8m0(from[i]);
  if (type == 2) {
    float value;
    std::memcpy(&value, &from[4 * i], 4);
    return value;
  }
  std::uint16_t half;
  std::memcpy(&half, &from[2 * i], 2);
  return type == 0 ? from_bf16(half) : from_fp16(half);
}

// Packs codes canonically: first code in the most significant bits, zero bits at the end of a row.
inline Bytes pack_canonical(const std::vector<unsigned>& codes, const Case& c) {
  const std::size_t width = fdk::ceil_div(c.k * std::size_t(c.bits), 8);
  Bytes packed(c.n * width);
  for (std::size_t i = 0; i < codes.size(); i++) {
    for (int b = 0; b < c.bits; b++) {
      if ((codes[i] >> (c.bits - 1 - b) & 1) == 0) continue;
      const std::size_t bit = i % c.k * std::size_t(c.bits) + std::size_t(b);
      packed[i / c.k * width + bit / 8] |= std::uint8_t(0x80 >> bit % 8);
    }
  }
  return packed;
}

// Compares with an error relative to `scale`, the largest sum of magnitudes.
inline void expect_near(const Case& c, const char* isa, const char* what, const Bytes& got,
                        const std::vector<double>& wanted, double scale) {
  const double unit = c.activation == Activation::bf16   ? 0x1p-8
                      : c.activation == Activation::fp16 ? 0x1p-11
                                                         : 0x1p-20;
  for (std::size_t i = 0; i < wanted.size(); i++) {
    const double value = get(got, i, int(c.activation));
    const double allowed = unit * std::abs(wanted[i]) + unit * scale;
    if (!(std::abs(value - wanted[i]) <= allowed)) {
      fail(c.text() + " " + isa + " " + what + " " + std::to_string(i) + ": wanted " +
           std::to_string(wanted[i]) + ", got " + std::to_string(value));
    }
  }
}

// AMX tiles in plain memory (check_amx.cpp).
void check_tiles(Random& random);
// Extreme values of x (check_activations.cpp).
void check_outliers(Random& random);
void check_outlier_share(Random& random);
void check_outlier_limit(Random& random);
void check_extreme_x(Random& random);
// The thread pool, dense products, sizes and conversions (check_common.cpp).
void check_thread_counts(Random& random);
void check_pool_errors();
void check_dense_gemm(Random& random);
void check_sizes_are_refused();
void check_conversions();
// Teams, the decode step and its products (check_decode.cpp).
void check_teams();
void check_decode(Random& random);
void check_shared_gemv(const Case& c, const char* isa, const fdk::PackedWeight& w,
                       const fdk::Int8Table* table, bool int8, const Bytes& x, const Bytes& bias,
                       const std::vector<double>& y, double scale);
