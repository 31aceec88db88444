// The benchmark executable: what runs on a phone, where there is no Python.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <memory>
#include <random>
#include <stdexcept>

#if defined(__linux__)
#include <sched.h>
#include <sys/utsname.h>
#endif

#include "convert.h"
#include "int8.h"
#include "json.h"
#include "kernels.h"
#include "linear.h"
#include "memory.h"
#include "options.h"

namespace bench {
namespace {

using Bytes = std::vector<std::uint8_t>;
using Clock = std::chrono::steady_clock;

// A case: one weight and activations, and how they are multiplied.
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

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

template <class T>
double median(std::vector<T> values) {
  std::nth_element(values.begin(), values.begin() + long(values.size() / 2), values.end());
  return values[values.size() / 2];
}

// A weight of random codes, scales around 1 and a codebook of normal values, in `copies` copies.
class RandomWeight {
 public:
  RandomWeight(const Options& options, const Case& c)
      : layout_(fdk::layout_of(c.size.n, c.size.k, options.group, c.bits)),
        affine_(options.zero_points),
        codebook_(std::size_t(1) << c.bits) {
    std::mt19937 engine(unsigned(c.bits));
    std::normal_distribution<float> normal;
    Bytes packed(c.size.n * fdk::ceil_div(c.size.k * std::size_t(c.bits), 8));
    for (auto& byte : packed) byte = std::uint8_t(engine());
    for (auto& value : codebook_) value = normal(engine);
    std::sort(codebook_.begin(), codebook_.end());
    levels_ = fdk::int8_table_of(codebook_.data(), c.bits);
    const std::size_t groups = c.size.n * layout_.groups;
    std::vector<std::uint16_t> scales(groups), zeros(groups);
    for (auto& scale : scales) scale = to_bf16(1 + 0.1f * normal(engine));
    for (auto& zero : zeros) zero = to_bf16(float(1 << (c.bits - 1)) + normal(engine));
    Bytes codes(layout_.code_bytes());
    fdk::pack_codes(layout_, packed.data(), codes.data(), c.threads);
    const std::size_t count = 1 + options.rotate_bytes / nbytes();
    for (std::size_t i = 0; i < count; i++) {
      codes_.push_back(codes);
      scales_.push_back(laid_out(scales));
      zeros_.push_back(affine_ ? laid_out(zeros) : Bytes());
    }
  }

  // y = x @ W_hat.T with copy i, of x as it is or rounded to 8 bits.
  void multiply(const Options& options, const Case& c, std::size_t i, const Bytes& x,
                Bytes& y) const {
    const fdk::PackedWeight w = at(i);
    if (options.int8) {
      fdk::linear_int8(w, affine_ ? nullptr : &levels_, options.activation, x.data(), c.m, nullptr,
                       y.data(), c.threads);
    } else {
      fdk::linear(w, options.activation, x.data(), c.m, nullptr, y.data(), c.threads);
    }
  }

  std::size_t copies() const { return codes_.size(); }
  std::size_t nbytes() const { return layout_.code_bytes() + layout_.scales() * (affine_ ? 4 : 2); }

 private:
  fdk::PackedWeight at(std::size_t i) const {
    return {layout_,
            codes_[i].data(),
            scales_[i].data(),
            fdk::ScaleType::bf16,
            affine_ ? zeros_[i].data() : nullptr,
            fdk::ZeroType::bf16,
            affine_ ? nullptr : codebook_.data()};
  }

  Bytes laid_out(const std::vector<std::uint16_t>& groups) const {
    Bytes out(layout_.scales() * 2);
    fdk::pack_groups(layout_, reinterpret_cast<const std::uint8_t*>(groups.data()), out.data(), 2);
    return out;
  }

  fdk::Layout layout_;
  bool affine_;
  std::vector<float> codebook_;
  fdk::Int8Table levels_;
  std::vector<Bytes> codes_, scales_, zeros_;
};

double value_at(const Bytes& from, std::size_t i, fdk::Activation type) {
  if (type == fdk::Activation::fp32) {
    float value;
    std::memcpy(&value, &from[4 * i], sizeof value);
    return value;
  }
  std::uint16_t half;
  std::memcpy(&half, &from[2 * i], sizeof half);
  return type == fdk::Activation::bf16 ? from_bf16(half) : from_fp16(half);
}

Bytes random_x(std::size_t count, fdk::Activation type) {
  std::mt19937 engine(1);
  std::normal_distribution<float> normal;
  Bytes x(count * fdk::bytes_of(type));
  for (std::size_t i = 0; i < count; i++) {
    const float value = normal(engine);
    const std::uint16_t half = type == fdk::Activation::bf16 ? to_bf16(value) : to_fp16(value);
    if (type == fdk::Activation::fp32) {
      std::memcpy(&x[4 * i], &value, sizeof value);
    } else {
      std::memcpy(&x[2 * i], &half, sizeof half);
    }
  }
  return x;
}

// Root mean square of the difference over that of the reference.
double nrmse(const Bytes& got, const Bytes& wanted, std::size_t count, fdk::Activation type) {
  double error = 0, total = 0;
  for (std::size_t i = 0; i < count; i++) {
    const double reference = value_at(wanted, i, type), off = value_at(got, i, type) - reference;
    error += off * off;
    total += reference * reference;
  }
  return std::sqrt(error / total);
}

// Both outputs are rounded to the dtype; twice its unit is beyond what rounding can do.
double most_error(fdk::Activation type) {
  return type == fdk::Activation::bf16 ? 0x1p-7 : type == fdk::Activation::fp16 ? 0x1p-10 : 0x1p-18;
}

double checked(const Options& options, const Case& c, const RandomWeight& weight, const Bytes& x) {
  const fdk::Activation type = options.activation;
  const std::size_t count = c.m * c.size.n, item = fdk::bytes_of(type);
  Bytes wanted(count * item, 0xFF), got(count * item, 0xFF);
  fdk::set_isa("scalar");
  weight.multiply(options, c, 0, x, wanted);
  fdk::set_isa(c.isa.c_str());
  weight.multiply(options, c, 0, x, got);
  const double error = nrmse(got, wanted, count, type);
  if (!(error <= most_error(type))) {
    throw std::runtime_error("the answer differs from the scalar one: nrmse " +
                             std::to_string(error) + ", at most " +
                             std::to_string(most_error(type)) + "; not timed");
  }
  return error;
}

// Kernels and reads of memory in turns, so that both meet the same machine.
Times measure(const Options& options, const Case& c) {
  constexpr std::size_t kCalls = 8;  // of the kernel for one read
  const RandomWeight weight(options, c);
  const Bytes x = random_x(c.m * c.size.k, options.activation);
  Times times{checked(options, c, weight, x), 0, 0, 0, weight.nbytes(), 0};
  const Bytes memory(options.rotate_bytes, 1);
  const std::size_t quarter = memory.size() / 4;
  Bytes y(c.m * c.size.n * fdk::bytes_of(options.activation));
  std::vector<double> calls, bandwidths;
  const auto begin = Clock::now();
  for (std::size_t turn = 0; turn < 3 || since(begin) < options.seconds; turn++) {
    const auto start = Clock::now();
    const volatile std::uint64_t sum =
        fdk::read_sum(memory.data() + turn % 4 * quarter, quarter, c.threads);
    (void)sum;
    bandwidths.push_back(double(quarter) / since(start));
    for (std::size_t i = 0; i < kCalls; i++) {
      const std::size_t copy = (turn * kCalls + i) % weight.copies();
      const auto call = Clock::now();
      weight.multiply(options, c, copy, x, y);
      calls.push_back(since(call));
    }
  }
  times.min_us = *std::min_element(calls.begin(), calls.end()) * 1e6;
  times.median_us = median(calls) * 1e6;
  times.read_gb_s = median(bandwidths) / 1e9;
  times.runs = calls.size();
  return times;
}

// --- facts -----------------------------------------------------------------------------------

const char* name_of(fdk::Activation type) {
  return type == fdk::Activation::bf16 ? "bf16" : type == fdk::Activation::fp16 ? "fp16" : "fp32";
}

std::string format_of(const Options& options, const Case& c) {
  const std::string group = options.group == c.size.k ? "row" : "g" + std::to_string(options.group);
  return (options.zero_points ? "affine" : "custom") + std::to_string(c.bits) + "-" + group;
}

std::string now() {
  const std::time_t seconds = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S+00:00", &utc);
  return text;
}

std::string platform() {
#if defined(__linux__)
  utsname name{};
  if (uname(&name) == 0) return std::string(name.sysname) + "-" + name.release + "-" + name.machine;
#endif
  return "unknown";
}

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "gcc " __VERSION__;
#endif
}

std::string command_of(int argc, char** argv) {
  std::string text = "fdk_cpu_bench";
  for (int i = 1; i < argc; i++) text += std::string(" ") + argv[i];
  return text;
}

struct Facts {
  std::string started, command, device, commit, platform;
};

// A row as fdk_bench.records writes it: benchmark, case, values, error, then the facts.
std::string row_of(const Options& options, const Facts& facts, const Case& c, const Times* times,
                   const std::string& error) {
  Json shape = Json()
                   .add("op", "linear")
                   .add("backend", "cpu")
                   .add("instruction_set", c.isa)
                   .add("format", format_of(options, c))
                   .add("m", c.m)
                   .add("n", c.size.n)
                   .add("k", c.size.k)
                   .add("dtype", name_of(options.activation));
  if (options.int8) shape.add("activations", "int8");
  Json row = Json().add("benchmark", "kernels").add("case", shape);
  if (times != nullptr) {
    const double bandwidth = double(times->nbytes) / times->median_us / 1e3;
    row.add("values", Json()
                          .add("nbytes", times->nbytes)
                          .add("min_us", times->min_us)
                          .add("median_us", times->median_us)
                          .add("gb_s", bandwidth)
                          .add("read_gb_s", times->read_gb_s)
                          .add("nrmse", times->nrmse)
                          .add("runs", times->runs));
  } else {
    row.add_null("values");
  }
  times != nullptr ? row.add_null("error") : row.add("error", error);
  row.add("started", facts.started).add("command", facts.command);
  facts.commit.empty() ? row.add_null("commit") : row.add("commit", facts.commit);
  return row.add("device", facts.device)
      .add("threads", c.threads)
      .add("platform", facts.platform)
      .add("versions", Json().add("compiler", compiler()))
      .text();
}

// --- running ---------------------------------------------------------------------------------

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

// Names of instruction sets, `auto` and `all` resolved.
std::vector<std::string> instruction_sets(const Options& options) {
  std::vector<std::string> names;
  const std::string best = fdk::name_of(fdk::current_isa());  // before set_isa below
  for (const std::string& name : options.isas) {
    if (name == "all") {
      for (int i = 0; i < fdk::kIsas; i++) {
        if (fdk::supported(fdk::Isa(i))) names.push_back(fdk::name_of(fdk::Isa(i)));
      }
    } else if (name == "auto") {
      names.push_back(best);
    } else {
      fdk::set_isa(name.c_str());  // throws where the machine does not run it
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
  const Facts facts{now(), command_of(argc, argv), options.device, options.commit, platform()};
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
