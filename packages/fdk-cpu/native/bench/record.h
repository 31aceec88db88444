// A result as a row of JSON.
#pragma once

#include <string>

#include "measure.h"
#include "options.h"

namespace bench {

struct Facts {
  std::string started, command, device, commit, platform;
};

Facts facts_of(const Options& options, int argc, char** argv);

std::string format_of(const Options& options, const Case& c);

// A row in the format of fdk-bench: benchmark, case, values, error, then the machine. `times` is
// null if the case failed.
std::string row_of(const Options& options, const Facts& facts, const Case& c, const Times* times,
                   const std::string& error);

}  // namespace bench
