// A case, checked and timed.
#pragma once

#include <cstddef>

#include "case.h"
#include "options.h"

namespace bench {

struct Times {
  double nrmse, min_us, median_us, read_gb_s;
  std::size_t nbytes, runs;
};

// Throws std::runtime_error where the answer differs from the scalar one.
Times measure(const Options& options, const Case& c);

}  // namespace bench
