// Checks and times a case.
#pragma once

#include <cstddef>

#include "options.h"

namespace bench {

struct Times {
  double nrmse, min_us, median_us, read_gb_s;
  std::size_t nbytes, runs;
};

// Throws std::runtime_error if the result differs from that of the scalar kernels.
Times measure(const Options& options, const Case& c);

}  // namespace bench
