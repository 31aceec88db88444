// One token of a llama for a few sequences, on a team of threads that meets at barriers.
//
// A block takes five phases, each ended by a barrier:
//
//   qkv      norm of x, then rows of the q, k and v products
//   attend   heads: q-norm and k-norm, rotary positions, the cache, attention
//   o        rows of the product, added to x
//   gate_up  norm of x, then rows of both products
//   down     SwiGLU, then rows of the product, added to x
//
// Products hand out rows and attention hands out heads, so that a late thread does less. What all
// threads need and a barrier would cost more than (norms, SwiGLU, packing x), each computes for
// itself. Results are rounded to the dtype of the model where the models of transformers round
// them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "common/barrier.h"
#include "common/decode_ops.h"
#include "common/linear.h"
#include "common/linear_int8.h"
#include "common/shared_gemv.h"

namespace fdk {

struct LlamaShape {
  std::size_t hidden, heads, kv_heads, head_dim, ffn, vocabulary;
  float eps, scale;  // of the norms, and of q k^T
  Activation type;   // of x, the cache, norms, biases and plain weights
};

// The rows [first, first + n) of a weight, packed or plain; `first` is a multiple of kTileRows.
struct RowsOfWeight {
  const PackedWeight* packed;  // null: plain
  bool int8;                   // round x to 8 bits
  const Int8Table* table;      // see linear_int8
  const void* plain;           // [n, k]
  std::size_t first, n, k;
  const void* bias;      // [n], or null
  bool rotated = false;  // rotate x, before it is rounded to 8 bits
};

struct LlamaBlock {
  const void *input_norm, *post_norm;               // [hidden]
  const void *q_norm, *k_norm;                      // [head_dim], or null
  std::vector<RowsOfWeight> qkv, o, gate_up, down;  // their rows in this order
};

class DecodeStep {
 public:
  explicit DecodeStep(const LlamaShape& shape);
  ~DecodeStep();

  // Throws std::invalid_argument for products whose rows or columns do not fit the shape.
  void add_block(const LlamaBlock& block);
  void set_head(const void* norm, const std::vector<RowsOfWeight>& head);

  // x      :: [batch, hidden], embeddings; overwritten
  // cos    :: [length, head_dim], of all positions, and sin likewise
  // starts :: [batch], the slots of each sequence's first token; its position is slot - start
  // cache  :: [blocks, 2, batch, kv_heads, length, head_dim]; slots before `slot` are read, and
  //           `slot` is written
  // logits :: [batch, vocabulary]
  struct Call {
    std::size_t batch, length, slot;
    void* x;
    const void *cos, *sin;
    const std::int64_t* starts;
    void *cache, *logits;
  };
  // A call that is made during another one waits for it.
  void run(const Call& call, std::size_t threads);

  const LlamaShape& shape() const { return shape_; }
  std::size_t blocks() const { return sources_.size(); }

 private:
  struct Rows {
    std::shared_ptr<const SharedGemv> gemv;  // null: plain
    RowsOfWeight of;
  };
  using Product = std::vector<Rows>;
  struct Block {
    LlamaBlock source;
    Product qkv, o, gate_up, down;
  };
  struct Member;  // the memory of one thread
  struct Shared;

  void plan();
  Product planned(const std::vector<RowsOfWeight>& rows, ColumnOrders& orders) const;
  void check(const char* name, const std::vector<RowsOfWeight>& rows, std::size_t n,
             std::size_t k) const;
  void work(const Call& call, Barrier& barrier, Member& member, std::size_t members);
  void multiply(const Product& product, const void* x, std::size_t batch, void* y, std::size_t n,
                void* residual, Barrier& barrier, Member& member, std::size_t members);
  void multiply_plain(const RowsOfWeight& of, const float* x, std::size_t batch, std::size_t row,
                      std::size_t count, void* y, std::size_t y_stride) const;
  void attend(const Call& call, const Block& block, std::size_t index, Barrier& barrier,
              Member& member);

  LlamaShape shape_;
  std::mutex running_;
  const DecodeOps* ops_ = nullptr;
  int isa_ = -1;  // of the plan
  std::vector<LlamaBlock> sources_;
  const void* final_norm_ = nullptr;
  std::vector<RowsOfWeight> head_source_;
  std::vector<Block> blocks_;
  Product head_;
  std::vector<std::unique_ptr<Member>> members_;
  std::unique_ptr<Shared> shared_;
};

}  // namespace fdk
