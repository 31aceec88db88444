// The end of a test with random cases: `[SECONDS | --cases N] [SEED]`.
#pragma once

#include <chrono>
#include <cstdlib>
#include <cstring>

// A number of cases does not depend on the load of the machine, seconds do.
class Limit {
 public:
  Limit(int argc, char** argv) {
    int next = 1;
    if (argc > 2 && std::strcmp(argv[1], "--cases") == 0) {
      cases_ = std::atoi(argv[2]);
      next = 3;
    } else if (argc > 1) {
      seconds_ = std::atof(argv[next++]);
    }
    if (argc > next) seed_ = unsigned(std::atoi(argv[next]));
  }

  unsigned seed() const { return seed_; }

  // Returns whether this many cases are enough. Seconds count from the first call.
  bool reached(int cases) {
    if (cases_ >= 0) return cases >= cases_;
    const auto now = std::chrono::steady_clock::now();
    if (cases == 0) start_ = now;
    return std::chrono::duration<double>(now - start_).count() >= seconds_;
  }

 private:
  int cases_ = -1;
  double seconds_ = 2;
  unsigned seed_ = 1;
  std::chrono::steady_clock::time_point start_;
};
