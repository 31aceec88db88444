// The Python module _native: addresses and sizes in; every size is checked before a kernel runs.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <deque>
#include <stdexcept>
#include <string>

#include "common/dense.h"
#include "blockwise/blockwise.h"
#include "common/decode_step.h"
#include "common/linear_int8.h"
#include "common/dispatch.h"
#include "common/expert_linear.h"
#include "common/kernels.h"
#include "common/layout.h"
#include "common/linear.h"
#include "common/memory.h"
#include "common/rotation.h"
#include "common/thread_pool.h"
#include "rounding/rounding.h"

namespace py = pybind11;

namespace {

// The address and size in bytes of a tensor.
struct Bytes {
  std::uintptr_t address;
  std::size_t size;

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(address);
  }
};

Bytes bytes_of(const py::tuple& pair) {
  return {pair[0].cast<std::uintptr_t>(), pair[1].cast<std::size_t>()};
}

void expect(const char* name, const Bytes& bytes, std::size_t wanted) {
  if (bytes.size != wanted) {
    throw std::invalid_argument("fdk_cpu: " + std::string(name) + " must be " +
                                std::to_string(wanted) + " bytes, got " +
                                std::to_string(bytes.size));
  }
  if (bytes.size != 0 && bytes.address == 0) {
    throw std::invalid_argument("fdk_cpu: " + std::string(name) + " must be " +
                                std::to_string(wanted) + " bytes, got no memory");
  }
}

template <class E>
E choice(const char* what, const std::string& name, std::initializer_list<const char*> names) {
  int i = 0;
  for (const char* candidate : names) {
    if (name == candidate) return E(i);
    i++;
  }
  throw std::invalid_argument("fdk_cpu: there is no " + std::string(what) + " " + name);
}

fdk::ScaleType scale_type(const std::string& name) {
  return choice<fdk::ScaleType>("scale type", name, {"bf16", "fp16", "fp32", "e8m0"});
}
fdk::ZeroType zero_type(const std::string& name) {
  return choice<fdk::ZeroType>("zero point type", name, {"none", "bf16", "fp16", "fp32", "u8"});
}
fdk::Activation activation_type(const std::string& name) {
  return choice<fdk::Activation>("activation type", name, {"bf16", "fp16", "fp32"});
}

// A packed weight, built once per layout so that a call passes few arguments.
class PyWeight {
 public:
  PyWeight(std::size_t n, std::size_t k, std::size_t group, int bits, const py::tuple& codes,
           const py::tuple& scales, const std::string& scale_name, const py::tuple& zeros,
           const std::string& zero_name, const py::tuple& codebook)
      : weight_{} {
    weight_.layout = fdk::layout_of(n, k, group, bits);
    const fdk::Layout& layout = weight_.layout;
    weight_.scale_type = scale_type(scale_name);
    weight_.zero_type = zero_type(zero_name);
    const Bytes c = bytes_of(codes), s = bytes_of(scales), z = bytes_of(zeros),
                b = bytes_of(codebook);
    const bool affine = weight_.zero_type != fdk::ZeroType::none;
    expect("codes", c, layout.code_bytes());
    expect("scales", s, layout.scales() * fdk::bytes_of(weight_.scale_type));
    expect("zero points", z, layout.scales() * fdk::bytes_of(weight_.zero_type));
    expect("codebook", b, affine ? 0 : sizeof(float) << bits);
    weight_.codes = c.as<const std::uint8_t>();
    weight_.scales = s.as<const void>();
    weight_.zeros = affine ? z.as<const void>() : nullptr;
    weight_.codebook = affine ? nullptr : b.as<const float>();
  }

  void linear(const std::string& activation, const py::tuple& x, std::size_t m,
              const py::tuple& bias, const py::tuple& y, std::size_t threads,
              bool batch_invariant) const {
    const fdk::Activation type = activation_type(activation);
    const std::size_t item = fdk::bytes_of(type);
    const Bytes in = bytes_of(x), add = bytes_of(bias), out = bytes_of(y);
    expect("x", in, m * weight_.layout.k * item);
    if (add.size != 0) expect("bias", add, weight_.layout.n * item);
    expect("y", out, m * weight_.layout.n * item);
    const void* added = add.size == 0 ? nullptr : add.as<const void>();
    const py::gil_scoped_release release;
    fdk::linear(weight_, type, in.as<const void>(), m, added, out.as<void>(), threads,
                batch_invariant);
  }

  // With x rounded to 8 bits. levels :: [2^bits, int8], empty for affine formats.
  void linear_int8(const std::string& activation, const py::tuple& levels, float step, float offset,
                   const py::tuple& x, std::size_t m, const py::tuple& bias, const py::tuple& y,
                   std::size_t threads, bool batch_invariant) const {
    const fdk::Activation type = activation_type(activation);
    const std::size_t item = fdk::bytes_of(type);
    const Bytes table = bytes_of(levels), in = bytes_of(x), add = bytes_of(bias), out = bytes_of(y);
    const bool affine = weight_.codebook == nullptr;
    expect("levels", table, affine ? 0 : std::size_t(1) << weight_.layout.bits);
    expect("x", in, m * weight_.layout.k * item);
    if (add.size != 0) expect("bias", add, weight_.layout.n * item);
    expect("y", out, m * weight_.layout.n * item);
    fdk::Int8Table of_codebook{{}, step, offset};
    if (!affine) std::copy_n(table.as<const std::int8_t>(), table.size, of_codebook.levels);
    const void* added = add.size == 0 ? nullptr : add.as<const void>();
    const py::gil_scoped_release release;
    fdk::linear_int8(weight_, affine ? nullptr : &of_codebook, type, in.as<const void>(), m, added,
                     out.as<void>(), threads, batch_invariant);
  }

  void grad_x(const std::string& activation, const py::tuple& grad_y, std::size_t m,
              const py::tuple& grad_x, std::size_t threads) const {
    const fdk::Activation type = activation_type(activation);
    const std::size_t item = fdk::bytes_of(type);
    const Bytes in = bytes_of(grad_y), out = bytes_of(grad_x);
    expect("grad_y", in, m * weight_.layout.n * item);
    expect("grad_x", out, m * weight_.layout.k * item);
    const py::gil_scoped_release release;
    fdk::linear_grad_x(weight_, type, in.as<const void>(), m, out.as<void>(), threads);
  }

  const fdk::PackedWeight& packed() const { return weight_; }

 private:
  fdk::PackedWeight weight_;
};

// Packed weights of experts, one after another.
class PyExpertStack {
 public:
  PyExpertStack(std::size_t experts, std::size_t n, std::size_t k, std::size_t group, int bits,
                const py::tuple& codes, const py::tuple& scales, const std::string& scale_name,
                const py::tuple& zeros, const std::string& zero_name, const py::tuple& codebooks)
      : stack_{} {
    PackedWeight& weight = stack_.first;
    weight.layout = fdk::layout_of(n, k, group, bits);
    weight.scale_type = scale_type(scale_name);
    weight.zero_type = zero_type(zero_name);
    stack_.experts = experts;
    const std::size_t groups = experts * weight.layout.scales(), table = std::size_t(1) << bits;
    const Bytes c = bytes_of(codes), s = bytes_of(scales), z = bytes_of(zeros),
                b = bytes_of(codebooks);
    const bool affine = weight.zero_type != fdk::ZeroType::none;
    const bool is_shared = b.size == sizeof(float) * table;
    expect("codes", c, experts * weight.layout.code_bytes());
    expect("scales", s, groups * fdk::bytes_of(weight.scale_type));
    expect("zero points", z, groups * fdk::bytes_of(weight.zero_type));
    expect("codebooks", b, affine ? 0 : (is_shared ? 1 : experts) * sizeof(float) * table);
    weight.codes = c.as<const std::uint8_t>();
    weight.scales = s.as<const void>();
    weight.zeros = affine ? z.as<const void>() : nullptr;
    weight.codebook = affine ? nullptr : b.as<const float>();
    stack_.codebook_stride = is_shared ? 0 : table;
  }

  // x :: [tokens, k] or [tokens, top_k, k]; ids :: [tokens, top_k, int64]; bias :: [experts, n] and
  // routing_weights :: [tokens, top_k, fp32] may be empty; y :: [tokens, top_k, n], or [tokens, n]
  // with routing weights.
  void linear(const std::string& activation, const py::tuple& x, const py::tuple& ids,
              std::size_t tokens, std::size_t top_k, const py::tuple& bias,
              const py::tuple& routing_weights, const py::tuple& y, std::size_t threads,
              bool batch_invariant) const {
    const fdk::Activation type = activation_type(activation);
    const std::size_t item = fdk::bytes_of(type), n = stack_.first.layout.n;
    const std::size_t k = stack_.first.layout.k, pairs = tokens * top_k;
    const Bytes in = bytes_of(x), own = bytes_of(ids), add = bytes_of(bias), out = bytes_of(y),
                weights = bytes_of(routing_weights);
    const bool has_places = in.size != tokens * k * item;
    const bool is_summed = weights.size != 0;
    expect("x", in, (has_places ? pairs : tokens) * k * item);
    expect("expert ids", own, pairs * sizeof(std::int64_t));
    if (add.size != 0) expect("bias", add, stack_.experts * n * item);
    if (is_summed) expect("routing weights", weights, pairs * sizeof(float));
    expect("y", out, (is_summed ? tokens : pairs) * n * item);
    const fdk::Routing routing{own.as<const std::int64_t>(), tokens, top_k};
    const void* added = add.size == 0 ? nullptr : add.as<const void>();
    const float* weighted = is_summed ? weights.as<const float>() : nullptr;
    const py::gil_scoped_release release;
    fdk::expert_linear(stack_, type, routing, in.as<const void>(), has_places, added, weighted,
                       out.as<void>(), threads, batch_invariant);
  }

  // grad_y :: [tokens, top_k, n], grad_x :: [tokens, top_k, k]
  void grad_x(const std::string& activation, const py::tuple& grad_y, const py::tuple& ids,
              std::size_t tokens, std::size_t top_k, const py::tuple& grad_x,
              std::size_t threads) const {
    const fdk::Activation type = activation_type(activation);
    const std::size_t item = fdk::bytes_of(type), pairs = tokens * top_k;
    const Bytes in = bytes_of(grad_y), own = bytes_of(ids), out = bytes_of(grad_x);
    expect("grad_y", in, pairs * stack_.first.layout.n * item);
    expect("expert ids", own, pairs * sizeof(std::int64_t));
    expect("grad_x", out, pairs * stack_.first.layout.k * item);
    const fdk::Routing routing{own.as<const std::int64_t>(), tokens, top_k};
    const py::gil_scoped_release release;
    fdk::expert_linear_grad_x(stack_, type, routing, in.as<const void>(), out.as<void>(), threads);
  }

 private:
  using PackedWeight = fdk::PackedWeight;
  fdk::ExpertStack stack_;
};

// The decode step of a llama. Python keeps the tensors alive, whose addresses it has.
class PyDecodeStep {
 public:
  PyDecodeStep(std::size_t hidden, std::size_t heads, std::size_t kv_heads, std::size_t head_dim,
               std::size_t ffn, std::size_t vocabulary, float eps, float scale,
               const std::string& dtype)
      : step_({hidden, heads, kv_heads, head_dim, ffn, vocabulary, eps, scale,
               activation_type(dtype)}) {
    if (kv_heads == 0 || heads % kv_heads != 0 || head_dim == 0 || head_dim % 2 != 0) {
      throw std::invalid_argument(
          "fdk_cpu: a decode step needs heads of an even size, and a multiple of kv_heads, got " +
          std::to_string(heads) + " of " + std::to_string(head_dim) + " and kv_heads " +
          std::to_string(kv_heads));
    }
  }

  // A product: a list of (weight, rows), as `rows_of` takes them.
  void add_block(const py::tuple& norms, const py::list& qkv, const py::list& o,
                 const py::list& gate_up, const py::list& down) {
    const fdk::LlamaShape& s = step_.shape();
    const auto norm = [&](std::size_t i, std::size_t n, bool optional) {
      const Bytes bytes = bytes_of(norms[i].cast<py::tuple>());
      if (optional && bytes.size == 0) return static_cast<const void*>(nullptr);
      expect("a norm", bytes, n * fdk::bytes_of(s.type));
      return bytes.as<const void>();
    };
    step_.add_block({norm(0, s.hidden, false), norm(1, s.hidden, false), norm(2, s.head_dim, true),
                     norm(3, s.head_dim, true), rows_of(qkv), rows_of(o), rows_of(gate_up),
                     rows_of(down)});
  }

  void set_head(const py::tuple& norm, const py::list& head) {
    const Bytes bytes = bytes_of(norm);
    expect("a norm", bytes, step_.shape().hidden * fdk::bytes_of(step_.shape().type));
    step_.set_head(bytes.as<const void>(), rows_of(head));
    has_head_ = true;
  }

  void run(std::size_t batch, std::size_t length, std::size_t slot, const py::tuple& x,
           const py::tuple& cos, const py::tuple& sin, const py::tuple& starts,
           const py::tuple& cache, const py::tuple& logits, std::size_t threads) {
    const fdk::LlamaShape& s = step_.shape();
    const std::size_t item = fdk::bytes_of(s.type), turns = length * s.head_dim * item;
    const Bytes in = bytes_of(x), c = bytes_of(cos), t = bytes_of(sin), first = bytes_of(starts),
                kept = bytes_of(cache), out = bytes_of(logits);
    expect("x", in, batch * s.hidden * item);
    expect("cos", c, turns);
    expect("sin", t, turns);
    expect("starts", first, batch * sizeof(std::int64_t));
    expect("the cache", kept, step_.blocks() * 2 * batch * s.kv_heads * turns);
    expect("logits", out, batch * s.vocabulary * item);
    if (!has_head_) throw std::invalid_argument("fdk_cpu: a decode step needs set_head");
    if (slot >= length) throw std::invalid_argument("fdk_cpu: the cache is full");
    const auto* begin = first.as<const std::int64_t>();
    if (std::any_of(begin, begin + batch,
                    [&](std::int64_t at) { return at < 0 || std::size_t(at) > slot; })) {
      throw std::invalid_argument("fdk_cpu: a sequence starts after the slot");
    }
    const py::gil_scoped_release release;
    step_.run({batch, length, slot, in.as<void>(), c.as<const void>(), t.as<const void>(), begin,
               kept.as<void>(), out.as<void>()},
              threads);
  }

 private:
  // Each is (plain, n, k, bias) with plain :: [n, k] in the dtype of the model, or (weight, first,
  // n, bias, None or (levels, step, offset) to round x to 8 bits, whether to rotate x).
  std::vector<fdk::RowsOfWeight> rows_of(const py::list& product) {
    const std::size_t item = fdk::bytes_of(step_.shape().type);
    std::vector<fdk::RowsOfWeight> rows;
    for (const py::handle& entry : product) {
      const auto given = entry.cast<py::tuple>();
      fdk::RowsOfWeight of{};
      Bytes bias;
      if (given.size() == 4) {
        of.n = given[1].cast<std::size_t>();
        of.k = given[2].cast<std::size_t>();
        const Bytes plain = bytes_of(given[0].cast<py::tuple>());
        expect("a plain weight", plain, of.n * of.k * item);
        of.plain = plain.as<const void>();
        bias = bytes_of(given[3].cast<py::tuple>());
      } else {
        const PyWeight& weight = given[0].cast<const PyWeight&>();
        kept_.append(given[0]);
        of.packed = &weight.packed();
        of.k = of.packed->layout.k;
        of.first = given[1].cast<std::size_t>();
        of.n = given[2].cast<std::size_t>();
        bias = bytes_of(given[3].cast<py::tuple>());
        if (!given[4].is_none()) {
          of.int8 = true;
          of.table = add_table(weight, given[4].cast<py::tuple>());
        }
        of.rotated = given[5].cast<bool>();
      }
      if (bias.size != 0) {
        expect("bias", bias, of.n * item);
        of.bias = bias.as<const void>();
      }
      rows.push_back(of);
    }
    return rows;
  }

  const fdk::Int8Table* add_table(const PyWeight& weight, const py::tuple& given) {
    const Bytes levels = bytes_of(given[0].cast<py::tuple>());
    if (weight.packed().codebook == nullptr) return nullptr;
    expect("levels", levels, std::size_t(1) << weight.packed().layout.bits);
    tables_.push_back({{}, given[1].cast<float>(), given[2].cast<float>()});
    std::copy_n(levels.as<const std::int8_t>(), levels.size, tables_.back().levels);
    return &tables_.back();
  }

  fdk::DecodeStep step_;
  std::deque<fdk::Int8Table> tables_;
  py::list kept_;  // the weights
  bool has_head_ = false;
};

// x :: [m, k], w :: [n, k], y :: [m, n]; `gemv` for m = 1.
void dense_linear(bool gemv, const std::string& dtype, const py::tuple& x, std::size_t m,
                  const py::tuple& w, std::size_t n, std::size_t k, const py::tuple& y,
                  std::size_t threads) {
  const fdk::Activation type = activation_type(dtype);
  const std::size_t item = fdk::bytes_of(type);
  if (type == fdk::Activation::fp16 || (gemv && m != 1)) {
    throw std::invalid_argument("fdk_cpu: plain products are of bf16 or fp32, and a gemv of one x");
  }
  const Bytes in = bytes_of(x), weight = bytes_of(w), out = bytes_of(y);
  expect("x", in, m * k * item);
  expect("w", weight, n * k * item);
  expect("y", out, m * n * item);
  const py::gil_scoped_release release;
  if (gemv) {
    fdk::dense_gemv(type, in.as<void>(), weight.as<void>(), n, k, out.as<void>(), threads);
  } else {
    fdk::dense_gemm(type, in.as<void>(), m, weight.as<void>(), n, k, out.as<void>(), threads);
  }
}

// The search for the nearest of 256 or 16 entries, built once per table.
class PyNearestCode {
 public:
  PyNearestCode(const py::tuple& code, const std::string& order) {
    const std::size_t entries = order.size();
    if (entries != 16 && entries != 256) throw std::invalid_argument("fdk_cpu: 16 or 256 codes");
    const auto* codes = reinterpret_cast<const std::uint8_t*>(order.data());
    for (std::size_t i = 0; i < entries; i++) {
      if (codes[i] >= entries) throw std::invalid_argument("fdk_cpu: there is no such code");
    }
    const Bytes values = bytes_of(code);
    expect("code", values, entries * sizeof(float));
    nearest_ = fdk::nearest_code_of(values.as<const float>(), codes, entries);
  }

  void quantise(const std::string& dtype, const py::tuple& values, std::size_t block,
                const py::tuple& packed, const py::tuple& absmax, std::size_t threads) const {
    const fdk::Activation type = activation_type(dtype);
    const Bytes in = bytes_of(values), out = bytes_of(packed), largest = bytes_of(absmax);
    const std::size_t n = in.size / fdk::bytes_of(type), bits = nearest_.entries == 16 ? 4 : 8;
    expect_blocks(bits, n, block, out, largest);
    const py::gil_scoped_release release;
    fdk::quantise_blocks(nearest_, type, in.as<const void>(), n, block, out.as<std::uint8_t>(),
                         largest.as<float>(), threads);
  }

  static void expect_blocks(std::size_t bits, std::size_t n, std::size_t block, const Bytes& packed,
                            const Bytes& absmax) {
    if (block == 0 || (bits == 4 && block % 2 != 0)) {
      throw std::invalid_argument("fdk_cpu: blocks of " + std::to_string(block));
    }
    expect("packed", packed, bits == 4 ? fdk::ceil_div(n, 2) : n);
    expect("absmax", absmax, fdk::ceil_div(n, block) * sizeof(float));
  }

 private:
  fdk::NearestCode nearest_;
};

void dequantise_blocks(int bits, const py::tuple& code, const std::string& dtype,
                       const py::tuple& packed, const py::tuple& absmax, std::size_t block,
                       const py::tuple& values, std::size_t threads) {
  const fdk::Activation type = activation_type(dtype);
  const Bytes table = bytes_of(code), in = bytes_of(packed), largest = bytes_of(absmax),
              out = bytes_of(values);
  if (bits != 4 && bits != 8) throw std::invalid_argument("fdk_cpu: blocks have 4 or 8 bits");
  const std::size_t n = out.size / fdk::bytes_of(type);
  expect("code", table, sizeof(float) << bits);
  PyNearestCode::expect_blocks(std::size_t(bits), n, block, in, largest);
  const py::gil_scoped_release release;
  fdk::dequantise_blocks(bits, table.as<const float>(), type, in.as<const std::uint8_t>(),
                         largest.as<const float>(), n, block, out.as<void>(), threads);
}

fdk::RoundingTable rounding_table_of(const py::tuple& midpoints, const py::tuple& entries) {
  const Bytes middle = bytes_of(midpoints), entry = bytes_of(entries);
  const std::size_t count = entry.size / sizeof(float);
  if (count == 0 || count > fdk::kMaxRoundingEntries) {
    throw std::invalid_argument("fdk_cpu: a rounding has 1 to 16 entries");
  }
  expect("midpoints", middle, (count - 1) * sizeof(float));
  return fdk::rounding_table_of(middle.as<const float>(), entry.as<const float>(), count);
}

// The table and the groups of a rounding; `importance` may be empty.
struct RoundingArguments {
  fdk::RoundingTable table;
  fdk::Groups groups;

  RoundingArguments(const py::tuple& midpoints, const py::tuple& entries, const py::tuple& values,
                    const py::tuple& scale, const py::tuple& importance)
      : table(rounding_table_of(midpoints, entries)) {
    const Bytes in = bytes_of(values), scales = bytes_of(scale), weights = bytes_of(importance);
    const std::size_t n = scales.size / sizeof(float);
    const std::size_t size = n == 0 ? 0 : in.size / sizeof(float) / n;
    expect("values", in, n * size * sizeof(float));
    const std::size_t repeat = size == 0 ? 0 : weights.size / sizeof(float) / size;
    expect("importance", weights, repeat * size * sizeof(float));
    groups = {in.as<const float>(),
              scales.as<const float>(),
              repeat == 0 ? nullptr : weights.as<const float>(),
              n,
              size,
              repeat};
  }
};

void round_groups(const py::tuple& midpoints, const py::tuple& entries, const py::tuple& values,
                  const py::tuple& scale, const py::tuple& codes, const py::tuple& rounded,
                  std::size_t threads) {
  const RoundingArguments given(midpoints, entries, values, scale, py::make_tuple(0, 0));
  const Bytes code = bytes_of(codes), out = bytes_of(rounded);
  const std::size_t count = given.groups.groups * given.groups.size;
  expect("codes", code, count);
  expect("rounded", out, count * sizeof(float));
  const py::gil_scoped_release release;
  fdk::round_groups(given.table, given.groups, code.as<std::uint8_t>(), out.as<float>(), threads);
}

void group_errors(const py::tuple& midpoints, const py::tuple& entries, const py::tuple& values,
                  const py::tuple& scale, const py::tuple& importance, const py::tuple& errors,
                  std::size_t threads) {
  const RoundingArguments given(midpoints, entries, values, scale, importance);
  const Bytes out = bytes_of(errors);
  expect("errors", out, given.groups.groups * sizeof(float));
  const py::gil_scoped_release release;
  fdk::group_errors(given.table, given.groups, out.as<float>(), threads);
}

void group_products(const py::tuple& midpoints, const py::tuple& entries, const py::tuple& values,
                    const py::tuple& scale, const py::tuple& importance, const py::tuple& product,
                    const py::tuple& square, std::size_t threads) {
  const RoundingArguments given(midpoints, entries, values, scale, importance);
  const Bytes products = bytes_of(product), squares = bytes_of(square);
  expect("product", products, given.groups.groups * sizeof(float));
  expect("square", squares, given.groups.groups * sizeof(float));
  const py::gil_scoped_release release;
  fdk::group_products(given.table, given.groups, products.as<float>(), squares.as<float>(),
                      threads);
}

void round_columns(const py::tuple& midpoints, const py::tuple& entries, const py::tuple& wanted,
                   const py::tuple& reference, const py::tuple& feedback, const py::tuple& scale,
                   const py::tuple& zero, const py::tuple& codes, const py::tuple& residual,
                   std::size_t threads) {
  const fdk::RoundingTable table = rounding_table_of(midpoints, entries);
  const Bytes values = bytes_of(wanted), from = bytes_of(reference), matrix = bytes_of(feedback),
              scales = bytes_of(scale), zeros = bytes_of(zero), code = bytes_of(codes),
              out = bytes_of(residual);
  std::size_t columns = 0;
  while (columns * columns * sizeof(float) < matrix.size) columns++;
  expect("feedback", matrix, columns * columns * sizeof(float));
  const std::size_t count = values.size / sizeof(float);
  const std::size_t rows = columns == 0 ? 0 : count / columns;
  expect("wanted", values, columns * rows * sizeof(float));
  expect("reference", from, values.size);
  expect("scale", scales, values.size);
  if (zeros.size != 0) expect("zero", zeros, values.size);
  expect("codes", code, count);
  expect("residual", out, values.size);
  const fdk::Columns problem{values.as<const float>(),
                             from.as<const float>(),
                             matrix.as<const float>(),
                             scales.as<const float>(),
                             zeros.size == 0 ? nullptr : zeros.as<const float>(),
                             columns,
                             rows};
  const py::gil_scoped_release release;
  fdk::round_columns(table, problem, code.as<std::uint8_t>(), out.as<float>(), threads);
}

void rotate(const std::string& activation, const py::tuple& x, std::size_t block, bool inverse,
            const py::tuple& y, std::size_t threads) {
  const fdk::Activation type = activation_type(activation);
  const Bytes in = bytes_of(x), out = bytes_of(y);
  if (block < fdk::kMinRotationBlock || fdk::rotation_block(block) != block) {
    throw std::invalid_argument("fdk_cpu: a block must be a power of two from 16 to 256, got " +
                                std::to_string(block));
  }
  const std::size_t count = in.size / fdk::bytes_of(type) / block * block;
  expect("x, of whole blocks,", in, count * fdk::bytes_of(type));
  expect("y", out, in.size);
  const py::gil_scoped_release release;
  fdk::rotate(type, in.as<const void>(), count, block, inverse, out.as<void>(), threads);
}

// Canonical and packed codes of a weight.
struct CodeTensors {
  fdk::Layout layout;
  std::uint8_t *canonical, *packed;

  CodeTensors(std::size_t n, std::size_t k, std::size_t group, int bits, const py::tuple& flat,
              const py::tuple& stored)
      : layout(fdk::layout_of(n, k, group, bits)) {
    const Bytes from = bytes_of(flat), to = bytes_of(stored);
    expect("packed", from, n * fdk::ceil_div(k * std::size_t(bits), 8));
    expect("codes", to, layout.code_bytes());
    canonical = from.as<std::uint8_t>();
    packed = to.as<std::uint8_t>();
  }
};

void pack_codes(std::size_t n, std::size_t k, std::size_t group, int bits, const py::tuple& flat,
                const py::tuple& stored, std::size_t threads) {
  const CodeTensors codes(n, k, group, bits, flat, stored);
  const py::gil_scoped_release release;
  fdk::pack_codes(codes.layout, codes.canonical, codes.packed, threads);
}

void unpack_codes(std::size_t n, std::size_t k, std::size_t group, int bits,
                  const py::tuple& stored, const py::tuple& flat, std::size_t threads) {
  const CodeTensors codes(n, k, group, bits, flat, stored);
  const py::gil_scoped_release release;
  fdk::unpack_codes(codes.layout, codes.packed, codes.canonical, threads);
}

// Canonical and packed scales or zero points of a weight, of `item` bytes each.
struct GroupTensors {
  fdk::Layout layout;
  std::uint8_t *canonical, *packed;

  GroupTensors(std::size_t n, std::size_t k, std::size_t group, std::size_t item,
               const py::tuple& flat, const py::tuple& stored)
      : layout(fdk::layout_of(n, k, group, 1)) {
    const Bytes from = bytes_of(flat), to = bytes_of(stored);
    expect("groups", from, n * layout.groups * item);
    expect("packed groups", to, layout.scales() * item);
    canonical = from.as<std::uint8_t>();
    packed = to.as<std::uint8_t>();
  }
};

void pack_groups(std::size_t n, std::size_t k, std::size_t group, std::size_t item,
                 const py::tuple& flat, const py::tuple& stored) {
  const GroupTensors groups(n, k, group, item, flat, stored);
  const py::gil_scoped_release release;
  fdk::pack_groups(groups.layout, groups.canonical, groups.packed, item);
}

void unpack_groups(std::size_t n, std::size_t k, std::size_t group, std::size_t item,
                   const py::tuple& stored, const py::tuple& flat) {
  const GroupTensors groups(n, k, group, item, flat, stored);
  const py::gil_scoped_release release;
  fdk::unpack_groups(groups.layout, groups.packed, groups.canonical, item);
}

py::tuple layout_sizes(std::size_t n, std::size_t k, std::size_t group, int bits) {
  const fdk::Layout layout = fdk::layout_of(n, k, group, bits);
  return py::make_tuple(layout.code_bytes(), layout.scales());
}

std::uint64_t read_sum(const py::tuple& data, std::size_t threads) {
  const Bytes bytes = bytes_of(data);
  const py::gil_scoped_release release;
  return fdk::read_sum(bytes.as<std::uint8_t>(), bytes.size, threads);
}

void copy_memory(const py::tuple& from, const py::tuple& to, std::size_t threads) {
  const Bytes in = bytes_of(from), out = bytes_of(to);
  expect("the copy", out, in.size);
  const py::gil_scoped_release release;
  fdk::copy_memory(in.as<std::uint8_t>(), out.as<std::uint8_t>(), in.size, threads);
}

py::list instruction_sets() {
  py::list names;
  for (int i = 0; i < fdk::kIsas; i++) {
    if (fdk::supported(fdk::Isa(i))) names.append(fdk::name_of(fdk::Isa(i)));
  }
  return names;
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.attr("TILE_K") = fdk::kTileK;
  module.attr("MAX_THREADS") = fdk::kMaxThreads;
  module.def("layout_sizes", layout_sizes);
  module.def("pack_codes", pack_codes);
  module.def("unpack_codes", unpack_codes);
  module.def("pack_groups", pack_groups);
  module.def("unpack_groups", unpack_groups);
  module.def("dense_linear", dense_linear);
  module.def("dequantise_blocks", dequantise_blocks);
  py::class_<PyNearestCode>(module, "NearestCode")
      .def(py::init<const py::tuple&, const std::string&>())
      .def("quantise", &PyNearestCode::quantise);
  module.def("round_groups", round_groups);
  module.def("group_errors", group_errors);
  module.def("group_products", group_products);
  module.def("round_columns", round_columns);
  module.def("rotate", rotate);
  module.def("read_sum", read_sum);
  module.def("copy_memory", copy_memory);
  module.attr("HUGE_PAGE") = fdk::WeightMemory::kHugePage;
  py::class_<fdk::WeightMemory>(module, "WeightMemory", py::buffer_protocol())
      .def(py::init<std::size_t>())
      .def_buffer([](const fdk::WeightMemory& memory) {
        return py::buffer_info(memory.data(), py::ssize_t(memory.size()));
      });
  module.def("instruction_sets", instruction_sets);
  module.def("instruction_set", [] { return fdk::name_of(fdk::current_isa()); });
  module.def("set_instruction_set",
             [](const std::string& name) { fdk::set_isa(name.c_str(), "set_instruction_set"); });
  py::class_<PyWeight>(module, "Weight")
      .def(py::init<std::size_t, std::size_t, std::size_t, int, const py::tuple&, const py::tuple&,
                    const std::string&, const py::tuple&, const std::string&, const py::tuple&>())
      .def("linear", &PyWeight::linear)
      .def("linear_int8", &PyWeight::linear_int8)
      .def("grad_x", &PyWeight::grad_x);
  py::class_<PyExpertStack>(module, "ExpertStack")
      .def(py::init<std::size_t, std::size_t, std::size_t, std::size_t, int, const py::tuple&,
                    const py::tuple&, const std::string&, const py::tuple&, const std::string&,
                    const py::tuple&>())
      .def("linear", &PyExpertStack::linear)
      .def("grad_x", &PyExpertStack::grad_x);
  py::class_<PyDecodeStep>(module, "DecodeStep")
      .def(py::init<std::size_t, std::size_t, std::size_t, std::size_t, std::size_t, std::size_t,
                    float, float, const std::string&>())
      .def("add_block", &PyDecodeStep::add_block)
      .def("set_head", &PyDecodeStep::set_head)
      .def("run", &PyDecodeStep::run);
}
