// A JSON object as text, for one row of a benchmark.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdio>
#include <string>

namespace bench {

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

}  // namespace bench
