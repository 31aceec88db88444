// Random bytes for the fuzz target, where libFuzzer is not at hand: a test of every run.
//
// Arguments: seconds (default 2), seed (default 1).
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 2;
  std::mt19937 random(argc > 2 ? unsigned(std::atoi(argv[2])) : 1);
  const auto start = std::chrono::steady_clock::now();
  int cases = 0;
  while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() <
         seconds) {
    std::vector<std::uint8_t> bytes(random() % 3000);
    for (auto& byte : bytes) byte = std::uint8_t(random());
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    cases++;
  }
  std::printf("%d cases passed\n", cases);
}
