// The options of the benchmark executable, and the cases that they give.
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

// The sizes of a product and how it is run.
struct Case {
  Size size;
  int bits;
  std::size_t m, threads;
  std::string isa;
};

// Throws std::invalid_argument with what was wanted and what came.
Options parse(int argc, char** argv);
std::string usage();

}  // namespace bench
