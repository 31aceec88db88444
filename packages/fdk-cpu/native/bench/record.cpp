#include <cmath>
#include <cstdio>
#include <ctime>

#if defined(__linux__)
#include <sys/utsname.h>
#endif

#include "bench.h"

namespace bench {
namespace {

// A JSON object as text.
class Json {
 public:
  Json& add(const char* name, const std::string& value) { return put(name, quoted(value)); }
  Json& add(const char* name, const char* value) { return put(name, quoted(value)); }
  Json& add(const char* name, std::size_t value) { return put(name, std::to_string(value)); }
  Json& add(const char* name, const Json& value) { return put(name, value.text()); }
  Json& add_null(const char* name) { return put(name, "null"); }
  Json& add(const char* name, double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.6g", value);
    return put(name, std::isfinite(value) ? text : "null");  // JSON has no infinity
  }
  std::string text() const { return "{" + members_ + "}"; }

 private:
  Json& put(const char* name, const std::string& value) {
    members_ += (members_.empty() ? "" : ", ") + quoted(name) + ": " + value;
    return *this;
  }

  static std::string quoted(const std::string& value) {
    std::string out = "\"";
    for (const char c : value) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", unsigned(static_cast<unsigned char>(c)));
      const bool plain = static_cast<unsigned char>(c) >= 0x20 && c != '"' && c != '\\';
      plain ? out += c : out += escape;
    }
    return out + "\"";
  }

  std::string members_;
};

const char* name_of(fdk::Activation type) {
  return type == fdk::Activation::bf16 ? "bf16" : type == fdk::Activation::fp16 ? "fp16" : "fp32";
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

}  // namespace

Facts facts_of(const Options& options, int argc, char** argv) {
  return {now(), command_of(argc, argv), options.device, options.commit, platform()};
}

std::string format_of(const Options& options, const Case& c) {
  const std::string group = options.group == c.size.k ? "row" : "g" + std::to_string(options.group);
  return (options.zero_points ? "affine" : "custom") + std::to_string(c.bits) + "-" + group;
}

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

}  // namespace bench
