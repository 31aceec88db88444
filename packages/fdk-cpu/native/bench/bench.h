// The benchmark executable: its options, the cases that they give, their times and their records.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "common/layout.h"

namespace bench {

struct Size {
  std::size_t n, k;
};

struct Options {
  std::vector<Size> sizes{{4096, 4096}};
  std::vector<int> bits{4};
  std::vector<std::size_t> rows{1};  // m
  std::vector<std::size_t> threads{1};
  std::vector<std::string> isas{"auto"};
  std::size_t group = 64;
  bool zero_points = false;
  fdk::Activation activation = fdk::Activation::bf16;
  bool int8 = false;             // x rounded to 8 bits
  unsigned long long cores = 0;  // a mask; 0 for no pinning
  double seconds = 0.5;          // per case
  std::size_t rotate_bytes = std::size_t(192) << 20;
  std::string out;  // file of the rows; empty for standard output
  std::string device, commit;
};

// Throws std::invalid_argument with what was wanted and what was given.
Options parse(int argc, char** argv);
std::string usage();

// The sizes of a product and how it is run.
struct Case {
  Size size;
  int bits;
  std::size_t m, threads;
  std::string isa;
};

struct Times {
  double nrmse, min_us, median_us, read_gb_s;
  std::size_t nbytes, runs;
};

// Throws std::runtime_error if the result differs from that of the scalar kernels.
Times measure(const Options& options, const Case& c);

struct Facts {
  std::string started, command, device, commit, platform;
};

Facts facts_of(const Options& options, int argc, char** argv);
std::string format_of(const Options& options, const Case& c);

// A row of JSON in the format of fdk-bench: benchmark, case, values, error, then the machine.
// `times` is null if the case failed.
std::string row_of(const Options& options, const Facts& facts, const Case& c, const Times* times,
                   const std::string& error);

}  // namespace bench
