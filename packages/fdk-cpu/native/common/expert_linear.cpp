// Groups rows by expert, and runs the products of linear.cpp expert by expert.
//
// Threads share each product, along n: an expert has enough stripes for them, and tokens are rarely
// spread evenly over experts.
#include "common/expert_linear.h"

#include <cstring>
#include <vector>

#include "common/buffers.h"
#include "common/float_convert.h"
#include "common/thread_pool.h"

namespace fdk {
namespace {

// Indices into [tokens, top_k], expert after expert.
struct Groups {
  std::vector<std::size_t> pairs;
  std::vector<std::size_t> ends;  // of each expert in pairs; ends[e - 1] is its begin
};

bool is_expert(std::int64_t id, std::size_t experts) {
  return id >= 0 && std::uint64_t(id) < experts;
}

Groups group_by_expert(const Routing& routing, std::size_t experts) {
  const std::size_t count = routing.tokens * routing.top_k;
  Groups groups;
  groups.ends.assign(experts + 1, 0);
  for (std::size_t i = 0; i < count; i++) {
    if (is_expert(routing.ids[i], experts)) groups.ends[routing.ids[i] + 1]++;
  }
  for (std::size_t e = 0; e < experts; e++) groups.ends[e + 1] += groups.ends[e];
  groups.pairs.resize(groups.ends[experts]);
  // ends[e] moves from the begin of an expert to its end.
  for (std::size_t i = 0; i < count; i++) {
    if (is_expert(routing.ids[i], experts)) groups.pairs[groups.ends[routing.ids[i]]++] = i;
  }
  return groups;
}

PackedWeight weight_of(const ExpertStack& stack, std::size_t expert) {
  PackedWeight weight = stack.first;
  const Layout& layout = weight.layout;
  const auto moved = [&](const void* p, std::size_t bytes) {
    return static_cast<const void*>(static_cast<const std::uint8_t*>(p) + expert * bytes);
  };
  weight.codes += expert * layout.code_bytes();
  weight.scales = moved(weight.scales, layout.scales() * bytes_of(weight.scale_type));
  if (weight.zeros != nullptr) {
    weight.zeros = moved(weight.zeros, layout.scales() * bytes_of(weight.zero_type));
  }
  if (weight.codebook != nullptr) weight.codebook += expert * stack.codebook_stride;
  return weight;
}

// Calls product(expert, rows of input, m, rows of output) for each expert with rows. Rows of the
// output without an expert are set to zero.
//
// input  :: [pairs / in_places, in_items, activation]
// output :: [pairs, out_items, activation]
template <class Product>
void for_each_expert(const ExpertStack& stack, Activation activation, const Routing& routing,
                     const void* input, std::size_t in_places, std::size_t in_items, void* output,
                     std::size_t out_items, std::size_t threads, Product product) {
  const Groups groups = group_by_expert(routing, stack.experts);
  const std::size_t item = bytes_of(activation);
  const std::size_t in_bytes = in_items * item, out_bytes = out_items * item;
  const auto from = static_cast<const std::uint8_t*>(input);
  const auto to = static_cast<std::uint8_t*>(output);
  if (groups.pairs.size() < routing.tokens * routing.top_k) {
    for (std::size_t i = 0; i < routing.tokens * routing.top_k; i++) {
      if (!is_expert(routing.ids[i], stack.experts)) std::memset(to + i * out_bytes, 0, out_bytes);
    }
  }
  std::size_t most = 0, begin = 0;
  for (std::size_t e = 0; e < stack.experts; e++) {
    most = std::max(most, groups.ends[e] - begin);
    begin = groups.ends[e];
  }
  const bool is_copied = most > 1;  // a single row is read and written in place
  const Buffer<std::uint8_t> rows(is_copied ? most * in_bytes : 0);
  const Buffer<std::uint8_t> results(is_copied ? most * out_bytes : 0);
  begin = 0;
  for (std::size_t e = 0; e < stack.experts; e++) {
    const std::size_t m = groups.ends[e] - begin;
    const std::size_t* const pairs = groups.pairs.data() + begin;
    begin = groups.ends[e];
    if (m == 0) continue;
    if (m == 1) {
      product(e, from + pairs[0] / in_places * in_bytes, m, to + pairs[0] * out_bytes);
      continue;
    }
    const std::size_t chunk = chunk_for(m, threads);
    parallel_for(m, chunk, threads, [&](std::size_t first, std::size_t last) {
      for (std::size_t i = first; i < last; i++) {
        std::memcpy(rows.get() + i * in_bytes, from + pairs[i] / in_places * in_bytes, in_bytes);
      }
    });
    product(e, rows.get(), m, results.get());
    parallel_for(m, chunk, threads, [&](std::size_t first, std::size_t last) {
      for (std::size_t i = first; i < last; i++) {
        std::memcpy(to + pairs[i] * out_bytes, results.get() + i * out_bytes, out_bytes);
      }
    });
  }
}

template <class T, class Read>
void add_scaled(const void* row, float weight, std::size_t n, float* sums, Read read) {
  const T* const values = static_cast<const T*>(row);
  for (std::size_t i = 0; i < n; i++) sums[i] += weight * read(values[i]);
}

// y[t] = sum over j of weights[t, j] * places[t, j], in the order of j.
void weighted_sum(const Routing& routing, Activation activation, const void* places,
                  const float* weights, std::size_t n, void* y, std::size_t threads) {
  const std::size_t chunk = chunk_for(routing.tokens, threads);
  parallel_for(routing.tokens, chunk, threads, [&](std::size_t begin, std::size_t end) {
    const Buffer<float> sums(n);
    for (std::size_t t = begin; t < end; t++) {
      std::fill_n(sums.get(), n, 0.0f);
      for (std::size_t j = 0; j < routing.top_k; j++) {
        const std::size_t pair = t * routing.top_k + j;
        const void* const row = offset(places, pair * n, activation);
        switch (activation) {
          case Activation::bf16:
            add_scaled<std::uint16_t>(row, weights[pair], n, sums.get(), from_bf16);
            break;
          case Activation::fp16:
            add_scaled<std::uint16_t>(row, weights[pair], n, sums.get(), from_fp16);
            break;
          case Activation::fp32:
            add_scaled<float>(row, weights[pair], n, sums.get(), [](float v) { return v; });
            break;
        }
      }
      write_row(sums.get(), 1, nullptr, activation, n, offset(y, t * n, activation));
    }
  });
}

}  // namespace

void expert_linear(const ExpertStack& stack, Activation activation, const Routing& routing,
                   const void* x, bool x_has_places, const void* bias, const float* weights,
                   void* y, std::size_t threads, bool batch_invariant) {
  const std::size_t n = stack.first.layout.n, k = stack.first.layout.k;
  const std::size_t pairs = routing.tokens * routing.top_k;
  threads = usable_threads(threads);
  const Buffer<std::uint8_t> summed(weights == nullptr ? 0 : pairs * n * bytes_of(activation));
  void* const places = weights == nullptr ? y : summed.get();
  const auto product = [&](std::size_t e, const void* rows, std::size_t m, void* out) {
    linear(weight_of(stack, e), activation, rows, m, offset(bias, e * n, activation), out, threads,
           batch_invariant);
  };
  for_each_expert(stack, activation, routing, x, x_has_places ? 1 : routing.top_k, k, places, n,
                  threads, product);
  if (weights != nullptr) weighted_sum(routing, activation, places, weights, n, y, threads);
}

void expert_linear_grad_x(const ExpertStack& stack, Activation activation, const Routing& routing,
                          const void* grad_y, void* grad_x, std::size_t threads) {
  const std::size_t n = stack.first.layout.n, k = stack.first.layout.k;
  threads = usable_threads(threads);
  const auto product = [&](std::size_t e, const void* rows, std::size_t m, void* out) {
    linear_grad_x(weight_of(stack, e), activation, rows, m, out, threads);
  };
  for_each_expert(stack, activation, routing, grad_y, 1, n, grad_x, k, threads, product);
}

}  // namespace fdk
