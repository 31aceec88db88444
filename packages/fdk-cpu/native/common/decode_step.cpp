#include "common/decode_step.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "common/buffers.h"
#include "common/dispatch.h"
#include "common/rotation.h"
#include "common/thread_pool.h"

namespace fdk {
namespace {

// Stripes that a thread takes at a time: enough to amortise the tables that kernels build per call,
// and few enough that all threads end together.
constexpr std::size_t kMostStripes = 32, kPiecesPerThread = 3;

const DecodeOps& ops_for([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  if (isa >= Isa::avx2) return kDecodeOpsAvx2;
#endif
#if defined(__aarch64__)
  if (isa >= Isa::neon && isa < Isa::avx2) return kDecodeOpsNeon;
#endif
  return kDecodeOpsScalar;
}

}  // namespace

// Buffers that all members read and write, in the dtype of the model: [batch][...].
struct DecodeStep::Shared {
  Buffer<std::uint8_t> qkv, attended, gate_up, rows;

  Shared(const LlamaShape& s, std::size_t batch)
      : qkv(batch * (s.heads + 2 * s.kv_heads) * s.head_dim * bytes_of(s.type)),
        attended(batch * s.heads * s.head_dim * bytes_of(s.type)),
        gate_up(batch * 2 * s.ffn * bytes_of(s.type)),
        rows(batch * s.hidden * bytes_of(s.type)) {}
};

struct DecodeStep::Member {
  // In the dtype of the model: [batch][...].
  std::optional<Buffer<std::uint8_t>> x, rotated;
  std::vector<std::uint8_t> head;  // q, k and their norms, one head each
  std::vector<float> wide;         // x in float32, a zero after each row
  std::vector<float> scores, sums;
  SharedGemv::Scratch scratch;
  std::exception_ptr error;

  void reserve(const LlamaShape& shape, std::size_t batch, std::size_t length) {
    const std::size_t widest = std::max({shape.hidden, shape.heads * shape.head_dim, shape.ffn});
    x.emplace(batch * widest * bytes_of(shape.type));
    rotated.emplace(batch * widest * bytes_of(shape.type));
    wide.resize(batch * (widest + 1));
    head.resize(4 * shape.head_dim * bytes_of(shape.type));
    scores.resize(length);
    sums.resize(2 * shape.head_dim);
  }
};

DecodeStep::DecodeStep(const LlamaShape& shape) : shape_(shape) {}
DecodeStep::~DecodeStep() = default;

void DecodeStep::check(const char* name, const std::vector<RowsOfWeight>& product, std::size_t n,
                       std::size_t k) const {
  std::size_t rows = 0;
  for (const RowsOfWeight& of : product) {
    rows += of.n;
    const bool fits = of.packed == nullptr ||
                      (of.first % kTileRows == 0 && of.first <= of.packed->layout.n &&
                       of.n <= of.packed->layout.n - of.first && of.packed->layout.k == of.k);
    if (of.rotated && rotation_block(k) < kMinRotationBlock) {
      throw std::invalid_argument("fdk_cpu: " + std::string(name) +
                                  " cannot rotate k=" + std::to_string(k));
    }
    if (of.k != k || !fits) {
      throw std::invalid_argument(
          "fdk_cpu: " + std::string(name) + " must be rows of a weight [n, " + std::to_string(k) +
          "] from a multiple of " + std::to_string(kTileRows) + " on, got [" +
          std::to_string(of.n) + ", " + std::to_string(of.k) + "] from " +
          std::to_string(of.first) + " on");
    }
  }
  if (rows == n) return;
  throw std::invalid_argument("fdk_cpu: " + std::string(name) + " must have " + std::to_string(n) +
                              " rows, got " + std::to_string(rows));
}

void DecodeStep::add_block(const LlamaBlock& block) {
  const LlamaShape& s = shape_;
  check("qkv", block.qkv, (s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden);
  check("o", block.o, s.hidden, s.heads * s.head_dim);
  check("gate_up", block.gate_up, 2 * s.ffn, s.hidden);
  check("down", block.down, s.hidden, s.ffn);
  sources_.push_back(block);
  isa_ = -1;
}

void DecodeStep::set_head(const void* norm, const std::vector<RowsOfWeight>& head) {
  check("head", head, shape_.vocabulary, shape_.hidden);
  final_norm_ = norm;
  head_source_ = head;
  isa_ = -1;
}

DecodeStep::Product DecodeStep::planned(const std::vector<RowsOfWeight>& rows,
                                        ColumnOrders& orders) const {
  Product product;
  for (const RowsOfWeight& of : rows) {
    // Rows of one weight share what is computed from it.
    std::shared_ptr<const SharedGemv> gemv;
    if (of.packed != nullptr) {
      const bool same = !product.empty() && product.back().of.packed == of.packed;
      gemv = same ? product.back().gemv
                  : std::make_shared<const SharedGemv>(*of.packed, shape_.type, of.int8, of.table,
                                                       orders);
    }
    product.push_back({gemv, of});
  }
  return product;
}

void DecodeStep::plan() {
  const Isa isa = current_isa();
  if (isa_ == int(isa)) return;
  ops_ = &ops_for(isa);
  ColumnOrders orders;
  blocks_.clear();
  for (const LlamaBlock& source : sources_) {
    blocks_.push_back({source, planned(source.qkv, orders), planned(source.o, orders),
                       planned(source.gate_up, orders), planned(source.down, orders)});
  }
  head_ = planned(head_source_, orders);
  members_.clear();  // scratch memory may hold what was packed in another order
  isa_ = int(isa);
}

void DecodeStep::run(const Call& call, std::size_t threads) {
  const std::lock_guard<std::mutex> alone(running_);
  plan();
  const LlamaShape& s = shape_;
  threads = usable_threads(threads);
  while (members_.size() < threads) members_.push_back(std::make_unique<Member>());
  for (std::size_t i = 0; i < threads; i++) members_[i]->reserve(s, call.batch, call.length);
  shared_ = std::make_unique<Shared>(s, call.batch);

  struct Context {
    DecodeStep* step;
    const Call* call;
    Barrier barrier;
  };
  Context context{this, &call, Barrier()};
  run_team(
      threads,
      [](void* shared, std::size_t index, std::size_t members) {
        Context& team = *static_cast<Context*>(shared);
        Member& member = *team.step->members_[index];
        try {
          team.step->work(*team.call, team.barrier, member, members);
        } catch (...) {
          member.error = std::current_exception();
          team.barrier.fail();
        }
      },
      &context);
  for (std::size_t i = 0; i < threads; i++) {
    const std::exception_ptr error = std::exchange(members_[i]->error, nullptr);
    if (error) std::rethrow_exception(error);
  }
}

void DecodeStep::work(const Call& call, Barrier& barrier, Member& member, std::size_t members) {
  const LlamaShape& s = shape_;
  const std::size_t item = bytes_of(s.type), batch = call.batch;
  std::uint8_t* const x = member.x->get();
  const auto normed = [&](const void* weight) {
    for (std::size_t b = 0; b < batch; b++) {
      const std::size_t at = b * s.hidden * item;
      ops_->rms_norm(s.type, static_cast<const std::uint8_t*>(call.x) + at, weight, s.hidden, s.eps,
                     x + at);
    }
  };
  for (std::size_t i = 0; i < blocks_.size(); i++) {
    const Block& block = blocks_[i];
    normed(block.source.input_norm);
    const std::size_t heads = (s.heads + 2 * s.kv_heads) * s.head_dim;
    multiply(block.qkv, x, batch, shared_->qkv.get(), heads, nullptr, barrier, member, members);
    if (!barrier.wait(members)) return;
    attend(call, block, i, barrier, member);
    if (!barrier.wait(members)) return;
    multiply(block.o, shared_->attended.get(), batch, shared_->rows.get(), s.hidden, call.x,
             barrier, member, members);
    if (!barrier.wait(members)) return;
    normed(block.source.post_norm);
    multiply(block.gate_up, x, batch, shared_->gate_up.get(), 2 * s.ffn, nullptr, barrier, member,
             members);
    if (!barrier.wait(members)) return;
    for (std::size_t b = 0; b < batch; b++) {
      const std::uint8_t* gate = shared_->gate_up.get() + b * 2 * s.ffn * item;
      ops_->swiglu(s.type, gate, gate + s.ffn * item, s.ffn, x + b * s.ffn * item);
    }
    multiply(block.down, x, batch, shared_->rows.get(), s.hidden, call.x, barrier, member, members);
    if (!barrier.wait(members)) return;
  }
  normed(final_norm_);
  multiply(head_, x, batch, call.logits, s.vocabulary, nullptr, barrier, member, members);
}

// y :: [batch][n], and x += y if there is a residual x :: [batch][n].
void DecodeStep::multiply(const Product& product, const void* x, std::size_t batch, void* y,
                          std::size_t n, void* residual, Barrier& barrier, Member& member,
                          std::size_t members) {
  const Activation type = shape_.type;
  const std::size_t item = bytes_of(type), k = product.front().of.k;
  const auto widen = [&](const void* rows) {
    for (std::size_t b = 0; b < batch; b++) {
      float* wide = member.wide.data() + b * (k + 1);
      ops_->widen(type, static_cast<const std::uint8_t*>(rows) + b * k * item, k, wide);
      wide[k] = 0;
    }
  };
  const void* const given = x;
  widen(x);
  const SharedGemv* packed_for = nullptr;
  bool is_rotated = false;
  const std::size_t share = ceil_div(ceil_div(n, kTileRows), kPiecesPerThread * members);
  const std::size_t piece = std::clamp<std::size_t>(share, 1, kMostStripes);
  std::size_t taken = barrier.take(piece), before = 0, column = 0;
  for (const Rows& rows : product) {
    const RowsOfWeight& of = rows.of;
    const std::size_t after = before + ceil_div(of.n, kTileRows);
    if (taken < after && of.rotated != is_rotated) {
      is_rotated = of.rotated;
      x = is_rotated ? member.rotated->get() : given;
      if (is_rotated) {
        rotate_blocks(type, given, batch * k, rotation_block(k), false, member.rotated->get());
      }
      widen(x);
      packed_for = nullptr;
    }
    while (taken < after) {
      const std::size_t begin = std::max(taken, before) - before;
      const std::size_t end = std::min(taken + piece, after) - before;
      const std::size_t row = begin * kTileRows, count = std::min(of.n, end * kTileRows) - row;
      std::uint8_t* const out = static_cast<std::uint8_t*>(y) + (column + row) * item;
      if (rows.gemv != nullptr) {
        if (packed_for != rows.gemv.get()) {
          rows.gemv->prepare(x, member.wide.data(), batch, packed_for != nullptr, member.scratch);
        }
        packed_for = rows.gemv.get();
        const std::size_t first = of.first / kTileRows;
        rows.gemv->multiply(x, batch, first + begin, first + end, count, offset(of.bias, row, type),
                            out, n, member.scratch);
      } else {
        multiply_plain(of, member.wide.data(), batch, row, count, out, n);
      }
      for (std::size_t b = 0; residual != nullptr && b < batch; b++) {
        const std::size_t at = (b * n + column + row) * item;
        ops_->add(type, static_cast<std::uint8_t*>(residual) + at,
                  static_cast<std::uint8_t*>(y) + at, count);
      }
      if (taken + piece > after) break;  // the rest of the piece has rows of the next weight
      taken = barrier.take(piece);
    }
    before = after;
    column += of.n;
  }
}

// The rows [row, row + count) of a plain weight; y has the first of them.
void DecodeStep::multiply_plain(const RowsOfWeight& of, const float* x, std::size_t batch,
                                std::size_t row, std::size_t count, void* y,
                                std::size_t y_stride) const {
  const Activation type = shape_.type;
  for (std::size_t i = row; i < row + count; i++) {
    const void* const w = offset(of.plain, i * of.k, type);
    const float bias = of.bias == nullptr ? 0 : read(of.bias, i, type);
    for (std::size_t b = 0; b < batch; b++) {
      const float sum = ops_->dot(type, x + b * (of.k + 1), w, of.k);
      write(y, b * y_stride + i - row, type, sum + bias);
    }
  }
}

void DecodeStep::attend(const Call& call, const Block& block, std::size_t index, Barrier& barrier,
                        Member& member) {
  const LlamaShape& s = shape_;
  const std::size_t d = s.head_dim, item = bytes_of(s.type), head_bytes = d * item;
  const std::size_t group = s.heads / s.kv_heads, all = s.heads + 2 * s.kv_heads;
  const std::size_t kept = call.batch * s.kv_heads * call.length * head_bytes;  // keys, or values
  std::uint8_t *const q = member.head.data(), *const k = q + head_bytes;
  std::uint8_t* const normed = k + head_bytes;
  for (std::size_t at = barrier.take(1); at < call.batch * s.heads; at = barrier.take(1)) {
    const std::size_t b = at / s.heads, head = at % s.heads, kv = head / group;
    const std::size_t start = std::size_t(call.starts[b]), position = call.slot - start;
    const std::uint8_t* const rows = shared_->qkv.get() + b * all * head_bytes;
    const auto turned = [&](const std::uint8_t* from, const void* norm, std::uint8_t* to) {
      if (norm != nullptr) {
        ops_->rms_norm(s.type, from, norm, d, s.eps, normed);
        from = normed;
      }
      ops_->rotary(s.type, from, offset(call.cos, position * d, s.type),
                   offset(call.sin, position * d, s.type), d, to);
    };
    turned(rows + head * head_bytes, block.source.q_norm, q);
    // Each head of a group turns the key again, which takes less time than a barrier.
    turned(rows + (s.heads + kv) * head_bytes, block.source.k_norm, k);
    const std::uint8_t* const value = rows + (s.heads + s.kv_heads + kv) * head_bytes;
    std::uint8_t* const keys = static_cast<std::uint8_t*>(call.cache) + 2 * index * kept +
                               (b * s.kv_heads + kv) * call.length * head_bytes;
    std::uint8_t* const values = keys + kept;
    ops_->attend(s.type,
                 AttentionTask{q, keys + start * head_bytes, values + start * head_bytes, k, value,
                               position + 1, d, s.scale, member.scores.data(), member.sums.data(),
                               shared_->attended.get() + (b * s.heads + head) * head_bytes});
    if (head % group != 0) continue;
    std::memcpy(keys + call.slot * head_bytes, k, head_bytes);
    std::memcpy(values + call.slot * head_bytes, value, head_bytes);
  }
}

}  // namespace fdk
