// Feeds random bytes to the fuzz target, without libFuzzer.
//
// run_limit.h has the arguments.
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "run_limit.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int argc, char** argv) {
  Limit limit(argc, argv);
  std::mt19937 random(limit.seed());
  int cases = 0;
  for (; !limit.reached(cases); cases++) {
    std::vector<std::uint8_t> bytes(random() % 3000);
    for (auto& byte : bytes) byte = std::uint8_t(random());
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  std::printf("%d cases passed\n", cases);
}
