// The decode step: teams of threads, shared products, and the operations between them.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "common/barrier.h"
#include "common/buffers.h"
#include "common/decode_ops.h"
#include "common/decode_step.h"
#include "common/float_convert.h"
#include "common/shared_gemv.h"
#include "common/thread_pool.h"
#include "checks.h"

namespace {

constexpr Activation kTypes[] = {Activation::bf16, Activation::fp16, Activation::fp32};

struct Tables {
  const char* name;
  const fdk::DecodeOps* ops;
};

std::vector<Tables> tables() {
  std::vector<Tables> found{{"scalar", &fdk::kDecodeOpsScalar}};
#if defined(__aarch64__)
  found.push_back({"neon", &fdk::kDecodeOpsNeon});
#endif
#if defined(__x86_64__)
  if (fdk::supported(fdk::Isa::avx2)) found.push_back({"avx2", &fdk::kDecodeOpsAvx2});
#endif
  return found;
}

Bytes values(Random& random, Activation type, std::size_t count, float factor = 1) {
  Bytes out(count * fdk::bytes_of(type));
  for (std::size_t i = 0; i < count; i++) put(out, i, int(type), factor * random.normal());
  return out;
}

double at(const Bytes& bytes, std::size_t i, Activation type) { return get(bytes, i, int(type)); }

// One rounding of each of the few operations, and the error of float32 sums.
double unit_of(Activation type) {
  return type == Activation::bf16 ? 0x1p-7 : type == Activation::fp16 ? 0x1p-10 : 0x1p-18;
}

void expect(const std::string& what, double got, double wanted, double allowed) {
  if (!(std::abs(got - wanted) <= allowed)) {
    fail(what + ": wanted " + std::to_string(wanted) + ", got " + std::to_string(got));
  }
}

void check_elementwise(const Tables& table, Activation type, std::size_t n, Random& random) {
  const std::string name =
      std::string(table.name) + " " + std::to_string(int(type)) + " n" + std::to_string(n) + " ";
  const double unit = unit_of(type);
  const Bytes x = values(random, type, n, 3), w = values(random, type, n);
  Bytes out(x.size());
  double squares = 0, product = 0, magnitude = 0;
  for (std::size_t i = 0; i < n; i++) {
    squares += at(x, i, type) * at(x, i, type);
    product += at(x, i, type) * at(w, i, type);
    magnitude += std::abs(at(x, i, type) * at(w, i, type));
  }
  std::vector<float> wide(n);
  table.ops->widen(type, x.data(), n, wide.data());
  for (std::size_t i = 0; i < n; i++) expect(name + "widen", wide[i], at(x, i, type), 0);
  expect(name + "dot", table.ops->dot(type, wide.data(), w.data(), n), product, 1e-6 * magnitude);
  table.ops->rms_norm(type, x.data(), w.data(), n, 1e-5f, out.data());
  for (std::size_t i = 0; i < n; i++) {
    const double wanted = at(x, i, type) / std::sqrt(squares / double(n) + 1e-5) * at(w, i, type);
    expect(name + "rms_norm", at(out, i, type), wanted, 2 * unit * std::abs(wanted) + 1e-7);
  }
  table.ops->swiglu(type, x.data(), w.data(), n, out.data());
  for (std::size_t i = 0; i < n; i++) {
    const double gate = at(x, i, type), wanted = gate / (1 + std::exp(-gate)) * at(w, i, type);
    expect(name + "swiglu", at(out, i, type), wanted, 2 * unit * std::abs(wanted) + 1e-7);
  }
  out = x;
  table.ops->add(type, out.data(), w.data(), n);
  for (std::size_t i = 0; i < n; i++) {
    const double wanted = at(x, i, type) + at(w, i, type);
    expect(name + "add", at(out, i, type), wanted, unit * std::abs(wanted));
  }
  if (n % 2 != 0) return;
  const Bytes cos = values(random, type, n), sin = values(random, type, n);
  table.ops->rotary(type, x.data(), cos.data(), sin.data(), n, out.data());
  for (std::size_t i = 0; i < n; i++) {
    const std::size_t other = (i + n / 2) % n;
    const double turned = (i < n / 2 ? -1 : 1) * at(x, other, type) * at(sin, i, type);
    const double kept = at(x, i, type) * at(cos, i, type);
    expect(name + "rotary", at(out, i, type), kept + turned,
           2 * unit * (std::abs(kept) + std::abs(turned)));
  }
}

void check_attention(const Tables& table, Activation type, std::size_t d, std::size_t length,
                     Random& random) {
  const Bytes q = values(random, type, d), keys = values(random, type, d * length),
              kept = values(random, type, d * length);
  const std::size_t item = fdk::bytes_of(type), last = (length - 1) * d * item;
  // The cache has no room for the last position, which AddressSanitizer would see read.
  const Bytes cached_keys(keys.begin(), keys.begin() + std::ptrdiff_t(last));
  const Bytes cached_values(kept.begin(), kept.begin() + std::ptrdiff_t(last));
  std::vector<float> scores(length), sums(2 * d);
  Bytes out(d * item);
  const float scale = 2 / std::sqrt(float(d));
  table.ops->attend(type,
                    {q.data(), cached_keys.data(), cached_values.data(), keys.data() + last,
                     kept.data() + last, length, d, scale, scores.data(), sums.data(), out.data()});
  std::vector<double> power(length), wanted(d);
  double total = 0;
  for (std::size_t i = 0; i < length; i++) {
    double score = 0;
    for (std::size_t j = 0; j < d; j++) score += at(q, j, type) * at(keys, i * d + j, type);
    total += power[i] = std::exp(double(scale) * score);
  }
  for (std::size_t j = 0; j < d; j++) {
    double sum = 0, magnitude = 0;
    for (std::size_t i = 0; i < length; i++) {
      sum += power[i] / total * at(kept, i * d + j, type);
      magnitude += power[i] / total * std::abs(at(kept, i * d + j, type));
    }
    expect(std::string(table.name) + " attend d" + std::to_string(d) + " length " +
               std::to_string(length),
           at(out, j, type), sum, unit_of(type) * std::abs(sum) + 1e-5 * magnitude);
  }
}

// A model of plain weights, which exist for as long as it does.
struct PlainModel {
  fdk::LlamaShape shape;
  std::vector<Bytes> memory;
  std::vector<fdk::LlamaBlock> blocks;
  const void* norm;
  fdk::RowsOfWeight head;

  PlainModel(Activation type, std::size_t layers, bool head_norms, Random& random)
      : shape{24, 6, 3, 10, 33, 50, 1e-5f, 0.3f, type} {
    const fdk::LlamaShape& s = shape;
    const auto plain = [&](std::size_t n, std::size_t k) {
      const void* w = add(values(random, type, n * k, 1 / std::sqrt(float(k))));
      return fdk::RowsOfWeight{nullptr, false, nullptr, w, 0, n, k, add(values(random, type, n))};
    };
    for (std::size_t i = 0; i < layers; i++) {
      const std::size_t d = s.head_dim, q = s.heads * d, kv = s.kv_heads * d;
      blocks.push_back({add(values(random, type, s.hidden)),
                        add(values(random, type, s.hidden)),
                        head_norms ? add(values(random, type, d)) : nullptr,
                        head_norms ? add(values(random, type, d)) : nullptr,
                        {plain(q, s.hidden), plain(kv, s.hidden), plain(kv, s.hidden)},
                        {plain(s.hidden, q)},
                        {plain(s.ffn, s.hidden), plain(s.ffn, s.hidden)},
                        {plain(s.hidden, s.ffn)}});
    }
    norm = add(values(random, type, s.hidden));
    head = plain(s.vocabulary, s.hidden);
  }

  const void* add(Bytes bytes) {
    memory.push_back(std::move(bytes));
    return memory.back().data();
  }

  // The logits of a few tokens of two sequences, the second of which starts later.
  Bytes logits(std::size_t threads, Random random) const {
    constexpr std::size_t kBatch = 2, kLength = 5;
    const std::size_t item = fdk::bytes_of(shape.type);
    fdk::DecodeStep step(shape);
    for (const fdk::LlamaBlock& block : blocks) step.add_block(block);
    step.set_head(norm, {head});
    const std::int64_t starts[kBatch] = {0, 1};
    const Bytes cos = values(random, shape.type, kLength * shape.head_dim);
    const Bytes sin = values(random, shape.type, kLength * shape.head_dim);
    Bytes cache(blocks.size() * 2 * kBatch * shape.kv_heads * kLength * shape.head_dim * item);
    Bytes all, out(kBatch * shape.vocabulary * item);
    for (std::size_t slot = 1; slot < kLength; slot++) {
      Bytes x = values(random, shape.type, kBatch * shape.hidden);
      step.run({kBatch, kLength, slot, x.data(), cos.data(), sin.data(), starts, cache.data(),
                out.data()},
               threads);
      all.insert(all.end(), out.begin(), out.end());
    }
    return all;
  }
};

void check_step(Activation type, Random& random) {
  const PlainModel model(type, 2, type != Activation::fp16, random);
  const Random same = random;
  fdk::set_isa("scalar");
  const Bytes wanted = model.logits(1, same);
  const std::size_t count = wanted.size() / fdk::bytes_of(type);
  double squares = 0;
  for (std::size_t i = 0; i < count; i++) squares += at(wanted, i, type) * at(wanted, i, type);
  if (!(squares > 0)) fail("the logits of a decode step are not finite, or zero");
  for (const char* name : tested_isas()) {
    fdk::set_isa(name);
    const Bytes alone = model.logits(1, same);
    if (model.logits(3, same) != alone) fail(std::string(name) + ": threads change the logits");
    double error = 0;
    for (std::size_t i = 0; i < count; i++) {
      error += std::pow(at(alone, i, type) - at(wanted, i, type), 2);
    }
    expect(std::string(name) + " logits", std::sqrt(error / squares), 0, 2 * unit_of(type));
  }
}

}  // namespace

// All members of a team run at the same time, share the work between two barriers, and leave
// together when one fails.
void check_teams() {
  for (const std::size_t threads : {1, 2, 4}) {
    struct Context {
      fdk::Barrier barrier;
      std::atomic<std::size_t> ran{0}, taken[3] = {{0}, {0}, {0}}, left{0};
      bool fails = false;
    };
    for (const bool fails : {false, true}) {
      Context context;
      context.fails = fails;
      fdk::run_team(
          threads,
          [](void* shared, std::size_t member, std::size_t members) {
            Context& team = *static_cast<Context*>(shared);
            team.ran++;
            for (auto& taken : team.taken) {
              while (team.barrier.take(3) < 100) taken++;
              if (team.fails && member + 1 == members) return team.barrier.fail();
              if (!team.barrier.wait(members)) {
                team.left++;
                return;
              }
            }
          },
          &context);
      const std::size_t members = context.ran;
      if (members == 0 || members > threads) fail("a team of another size");
      if (fails && context.left + 1 != members) fail("a member waits for one that failed");
      for (std::size_t i = 0; i < (fails ? 1 : 3); i++) {
        if (context.taken[i] != 34) fail("work between barriers is lost or done twice");
      }
    }
  }
}

void check_decode(Random& random) {
  for (const Tables& table : tables()) {
    for (const Activation type : kTypes) {
      for (const std::size_t n : {1, 8, 27, 64, 130}) check_elementwise(table, type, n, random);
      for (const std::size_t d : {6, 64, 72, 128}) {
        for (const std::size_t length : {1, 2, 19}) {
          check_attention(table, type, d, length, random);
        }
      }
    }
  }
  for (const Activation type : kTypes) check_step(type, random);
}

// Compares a shared product, whose stripes are taken in pieces, with y.
void check_shared_gemv(const Case& c, const char* isa, const fdk::PackedWeight& w,
                       const fdk::Int8Table* table, bool int8, const Bytes& x, const Bytes& bias,
                       const std::vector<double>& y, double scale) {
  const std::size_t item = fdk::bytes_of(c.activation);
  fdk::ColumnOrders orders;
  const fdk::SharedGemv gemv(w, c.activation, int8, table, orders);
  fdk::SharedGemv::Scratch scratch;
  std::vector<float> wide(c.m * (c.k + 1));
  // Whole rows are read from an aligned block, as in the step.
  const fdk::Buffer<std::uint8_t> aligned(x.size());
  std::memcpy(aligned.get(), x.data(), x.size());
  for (std::size_t row = 0; row < c.m; row++) {
    for (std::size_t i = 0; i < c.k; i++) {
      wide[row * (c.k + 1) + i] = get(x, row * c.k + i, int(c.activation));
    }
  }
  Bytes out(y.size() * item, 0xFF);
  gemv.prepare(aligned.get(), wide.data(), c.m, false, scratch);
  constexpr std::size_t kPiece = 3;
  for (std::size_t begin = 0; begin < w.layout.stripes; begin += kPiece) {
    const std::size_t end = std::min(w.layout.stripes, begin + kPiece);
    const std::size_t first = begin * fdk::kTileRows;
    const std::size_t count = std::min(c.n, end * fdk::kTileRows) - first;
    gemv.multiply(aligned.get(), c.m, begin, end, count, bias.data() + first * item,
                  out.data() + first * item, c.n, scratch);
  }
  expect_near(c, isa, int8 ? "shared int8 y" : "shared y", out, y, scale);
}
