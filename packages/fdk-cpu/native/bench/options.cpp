#include <cstdlib>
#include <stdexcept>

#include "bench.h"

namespace bench {
namespace {

[[noreturn]] void refuse(const std::string& option, const char* wanted, const std::string& got) {
  throw std::invalid_argument(option + ": wanted " + wanted + ", got '" + got + "'");
}

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::size_t begin = 0, end;
  while ((end = text.find(separator, begin)) != std::string::npos) {
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  parts.push_back(text.substr(begin));
  return parts;
}

std::size_t number(const std::string& option, const std::string& text, std::size_t least,
                   std::size_t most, const char* wanted) {
  char* end = nullptr;
  const unsigned long long value = std::strtoull(text.c_str(), &end, 10);
  const bool whole = !text.empty() && text[0] >= '0' && text[0] <= '9' && *end == '\0';
  if (!whole || value < least || value > most) refuse(option, wanted, text);
  return std::size_t(value);
}

constexpr std::size_t kMaxSize = std::size_t(1) << 20;

std::vector<Size> sizes(const std::string& option, const std::string& text) {
  constexpr const char* kWanted = "sizes as 4096 or 4096x14336 (n by k)";
  std::vector<Size> out;
  for (const std::string& part : split(text, ',')) {
    const std::vector<std::string> sides = split(part, 'x');
    if (sides.size() > 2) refuse(option, kWanted, part);
    const std::size_t n = number(option, sides.front(), 1, kMaxSize, kWanted);
    out.push_back({n, number(option, sides.back(), 1, kMaxSize, kWanted)});
  }
  return out;
}

template <class T>
std::vector<T> numbers(const std::string& option, const std::string& text, std::size_t least,
                       std::size_t most, const char* wanted) {
  std::vector<T> out;
  for (const std::string& part : split(text, ',')) {
    out.push_back(T(number(option, part, least, most, wanted)));
  }
  return out;
}

fdk::Activation activation(const std::string& option, const std::string& text) {
  if (text == "bf16") return fdk::Activation::bf16;
  if (text == "fp16") return fdk::Activation::fp16;
  if (text == "fp32") return fdk::Activation::fp32;
  refuse(option, "bf16, fp16 or fp32", text);
}

bool is_int8(const std::string& option, const std::string& text) {
  if (text == "float" || text == "int8") return text == "int8";
  refuse(option, "float or int8", text);
}

unsigned long long mask(const std::string& option, const std::string& text) {
  char* end = nullptr;
  const unsigned long long value = std::strtoull(text.c_str(), &end, 16);
  if (text.empty() || *end != '\0' || value == 0) {
    refuse(option, "a mask in hexadecimal as f0 (cores 4 to 7)", text);
  }
  return value;
}

double seconds(const std::string& option, const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !(value >= 0) || value > 3600) {
    refuse(option, "seconds, 0 to 3600", text);
  }
  return value;
}

}  // namespace

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; i++) {
    const std::string name = argv[i];
    if (name == "--zero-points") {
      o.zero_points = true;
      continue;
    }
    if (i + 1 == argc) throw std::invalid_argument(name + ": wanted a value, got none");
    const std::string text = argv[++i];
    if (name == "--sizes") {
      o.sizes = sizes(name, text);
    } else if (name == "--bits") {
      o.bits = numbers<int>(name, text, 1, 8, "1 to 8");
    } else if (name == "--m") {
      o.rows = numbers<std::size_t>(name, text, 1, 65536, "rows of x, 1 to 65536");
    } else if (name == "--threads") {
      o.threads = numbers<std::size_t>(name, text, 1, 256, "threads, 1 to 256");
    } else if (name == "--group") {
      o.group = number(name, text, 1, kMaxSize, "the positions of a group");
    } else if (name == "--dtype") {
      o.activation = activation(name, text);
    } else if (name == "--activations") {
      o.int8 = is_int8(name, text);
    } else if (name == "--isa") {
      o.isas = split(text, ',');
    } else if (name == "--cores") {
      o.cores = mask(name, text);
    } else if (name == "--seconds") {
      o.seconds = seconds(name, text);
    } else if (name == "--rotate-mb") {
      o.rotate_bytes = number(name, text, 1, 65536, "MiB, 1 to 65536") << 20;
    } else if (name == "--out") {
      o.out = text;
    } else if (name == "--device") {
      o.device = text;
    } else if (name == "--commit") {
      o.commit = text;
    } else {
      throw std::invalid_argument("unknown option " + name + " (--help lists them)");
    }
  }
  return o;
}

std::string usage() {
  return R"(Times y = x @ W_hat.T over weights of 1 to 8 bits, with the read bandwidth of the process.

Every case is checked against the scalar kernels first; a wrong answer is not timed. Weights rotate
through more copies than the caches hold. A table goes to standard error, rows of JSON to --out.

  --sizes 4096,4096x14336  n by k; one number is both                        (4096)
  --bits 4,2,1             bits of a code                                    (4)
  --group 64               positions that share a scale; divides k           (64)
  --zero-points            affine formats instead of codebooks
  --m 1,8                  rows of x                                         (1)
  --dtype bf16             of x and y: bf16, fp16 or fp32                    (bf16)
  --activations float      or int8, which rounds x to 8 bits                 (float)
  --threads 1,4                                                              (1)
  --cores f0               run on these cores only; a mask in hexadecimal    (any)
  --isa auto               instruction sets, or `all`; see FDK_CPU_ISA       (auto)
  --seconds 0.5            for each case                                     (0.5)
  --rotate-mb 192          memory that the copies of a weight take           (192)
  --out FILE               rows of JSON, one a case                          (standard output)
  --device, --commit TEXT  written into the rows
)";
}

}  // namespace bench
