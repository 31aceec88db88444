// The benchmark executable for devices without Python, such as phones.
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

#include "bench.h"
#include "common/dispatch.h"

namespace bench {
namespace {

void pin_cores(unsigned long long cores) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int core = 0; core < 64; core++) {
    if ((cores >> core & 1) != 0) CPU_SET(core, &set);
  }
  if (sched_setaffinity(0, sizeof set, &set) == 0) return;
#endif
  (void)cores;
  throw std::invalid_argument("--cores: this machine has none of these cores, or cannot pin");
}

// The names of instruction sets, with `auto` and `all` replaced.
std::vector<std::string> instruction_sets(const Options& options) {
  std::vector<std::string> names;
  const std::string best = fdk::name_of(fdk::current_isa());  // before the calls of set_isa below
  for (const std::string& name : options.isas) {
    if (name == "all") {
      for (int i = 0; i < fdk::kIsas; i++) {
        if (fdk::supported(fdk::Isa(i))) names.push_back(fdk::name_of(fdk::Isa(i)));
      }
    } else if (name == "auto") {
      names.push_back(best);
    } else {
      fdk::set_isa(name.c_str());  // throws if the machine does not have it
      names.push_back(name);
    }
  }
  return names;
}

std::vector<Case> cases_of(const Options& options) {
  std::vector<Case> cases;
  for (const std::string& isa : instruction_sets(options)) {
    for (const Size& size : options.sizes) {
      for (const int bits : options.bits) {
        for (const std::size_t m : options.rows) {
          for (const std::size_t threads : options.threads) {
            cases.push_back({size, bits, m, threads, isa});
          }
        }
      }
    }
  }
  return cases;
}

struct Close {
  void operator()(std::FILE* file) const {
    if (file != stdout) std::fclose(file);
  }
};

int run(int argc, char** argv) {
  const Options options = parse(argc, argv);
  if (options.cores != 0) pin_cores(options.cores);
  const std::vector<Case> cases = cases_of(options);
  const std::unique_ptr<std::FILE, Close> out(
      options.out.empty() ? stdout : std::fopen(options.out.c_str(), "w"));
  if (out == nullptr) throw std::invalid_argument("--out: cannot write " + options.out);
  const Facts facts = facts_of(options, argc, argv);
  std::fprintf(stderr, "%-10s %-14s %5s %11s %3s %9s %11s %7s %8s\n", "isa", "format", "m", "n x k",
               "thr", "min us", "median us", "GB/s", "of read");
  int failed = 0;
  for (const Case& c : cases) {
    const std::string format = format_of(options, c);
    const std::string shape = std::to_string(c.size.n) + "x" + std::to_string(c.size.k);
    std::fprintf(stderr, "%-10s %-14s %5zu %11s %3zu ", c.isa.c_str(), format.c_str(), c.m,
                 shape.c_str(), c.threads);
    try {
      const Times times = measure(options, c);
      const double gb_s = double(times.nbytes) / times.median_us / 1e3;
      std::fprintf(stderr, "%9.1f %11.1f %7.2f %7.0f%%\n", times.min_us, times.median_us, gb_s,
                   100 * gb_s / times.read_gb_s);
      std::fprintf(out.get(), "%s\n", row_of(options, facts, c, &times, "").c_str());
    } catch (const std::exception& error) {
      std::fprintf(stderr, "failed: %s\n", error.what());
      std::fprintf(out.get(), "%s\n", row_of(options, facts, c, nullptr, error.what()).c_str());
      failed = 1;
    }
    std::fflush(out.get());
  }
  return failed;
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  for (int i = 1; i < argc; i++) {
    if (std::strcmp(argv[i], "--help") == 0 || std::strcmp(argv[i], "-h") == 0) {
      std::fputs(bench::usage().c_str(), stdout);
      return 0;
    }
  }
  try {
    return bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fdk_cpu_bench: %s\n", error.what());
    return 2;
  }
}
