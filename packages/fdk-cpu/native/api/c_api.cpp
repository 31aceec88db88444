#include "fdk_cpu.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>

#include "common/linear_int8.h"
#include "common/dispatch.h"
#include "common/kernels.h"
#include "common/linear.h"
#include "common/memory.h"

namespace {

// An array, because to keep the text of an exception must not throw.
constexpr std::size_t kMaxError = 512;
thread_local char error[kMaxError] = "";

void keep(const char* text) { std::snprintf(error, kMaxError, "%s", text); }

// Runs f and keeps the text of an exception, which must not reach C.
template <class F>
int guarded(F f) {
  try {
    f();
    return 0;
  } catch (const std::exception& thrown) {
    keep(thrown.what());
  } catch (...) {
    keep("fdk-cpu: an error without a name");
  }
  return 1;
}

[[noreturn]] void refuse(const std::string& what, const std::string& wanted) {
  throw std::invalid_argument(what + ": wanted " + wanted);
}

void expect_pointer(const char* name, const void* pointer) {
  if (pointer == nullptr) refuse(name, "a pointer, got NULL");
}

void expect_aligned(const char* name, const void* pointer, std::size_t item) {
  const std::size_t off = reinterpret_cast<std::uintptr_t>(pointer) % item;
  if (off == 0) return;
  refuse(name, "a multiple of " + std::to_string(item) + " as its address, got one that is " +
                   std::to_string(off) + " more");
}

// A required array of values of `item` bytes.
void expect_array(const char* name, const void* pointer, std::size_t item) {
  expect_pointer(name, pointer);
  expect_aligned(name, pointer, item);
}

void expect_bytes(std::size_t bytes, std::size_t wanted) {
  if (bytes != wanted) {
    refuse("bytes", std::to_string(wanted) + ", got " + std::to_string(bytes));
  }
}

fdk::ScaleType scale_type(fdk_dtype dtype) {
  switch (dtype) {
    case FDK_BF16:
      return fdk::ScaleType::bf16;
    case FDK_FP16:
      return fdk::ScaleType::fp16;
    case FDK_FP32:
      return fdk::ScaleType::fp32;
    case FDK_E8M0:
      return fdk::ScaleType::e8m0;
    default:
      refuse("scale_dtype", "bf16, fp16, fp32 or e8m0, got " + std::to_string(dtype));
  }
}

fdk::ZeroType zero_type(fdk_dtype dtype) {
  switch (dtype) {
    case FDK_NONE:
      return fdk::ZeroType::none;
    case FDK_BF16:
      return fdk::ZeroType::bf16;
    case FDK_FP16:
      return fdk::ZeroType::fp16;
    case FDK_FP32:
      return fdk::ZeroType::fp32;
    case FDK_U8:
      return fdk::ZeroType::u8;
    default:
      refuse("zero_dtype", "none, bf16, fp16, fp32 or u8, got " + std::to_string(dtype));
  }
}

fdk::Activation activation(fdk_dtype dtype) {
  switch (dtype) {
    case FDK_BF16:
      return fdk::Activation::bf16;
    case FDK_FP16:
      return fdk::Activation::fp16;
    case FDK_FP32:
      return fdk::Activation::fp32;
    default:
      refuse("dtype", "bf16, fp16 or fp32, got " + std::to_string(dtype));
  }
}

std::size_t threads_of(std::size_t threads) {
  if (threads != 0) return threads;
  const unsigned all = std::thread::hardware_concurrency();
  return all == 0 ? 1 : all;
}

// The places of the tensors of a weight in its block, each aligned to a cache line.
struct Block {
  fdk::Layout layout;
  fdk::ScaleType scale_type;
  fdk::ZeroType zero_type;
  std::size_t scales, zeros, bytes;

  // Alignment of a block in memory: scales and zero points have up to 4 bytes each.
  static constexpr std::size_t kAlignment = 4;

  explicit Block(const fdk_format* format) : layout{} {
    expect_pointer("format", format);
    scale_type = ::scale_type(format->scale_dtype);
    zero_type = ::zero_type(format->zero_dtype);
    layout = fdk::layout_of(format->n, format->k, format->group_size, format->bits);
    scales = aligned(layout.code_bytes());
    zeros = scales + aligned(layout.scales() * fdk::bytes_of(scale_type));
    bytes = zeros + aligned(layout.scales() * fdk::bytes_of(zero_type));
  }

  // The weight without its codebook; `table`, called `name` in errors, must be null for zero
  // points.
  fdk::PackedWeight at(const void* block, std::size_t size, const char* name,
                       const void* table) const {
    expect_array("block", block, kAlignment);
    expect_bytes(size, bytes);
    const bool affine = zero_type != fdk::ZeroType::none;
    if (affine == (table != nullptr)) {
      refuse(name, affine ? "NULL, for the format has zero points" : "a pointer, got NULL");
    }
    const auto* at = static_cast<const std::uint8_t*>(block);
    const std::uint8_t* zeros_at = affine ? at + zeros : nullptr;
    return {layout, at, at + scales, scale_type, zeros_at, zero_type, nullptr};
  }

  fdk::PackedWeight at(const void* block, std::size_t size, const float* codebook) const {
    fdk::PackedWeight weight = at(block, size, "codebook", codebook);
    expect_aligned("codebook", codebook, sizeof(float));
    weight.codebook = codebook;
    return weight;
  }

 private:
  static std::size_t aligned(std::size_t bytes) { return fdk::ceil_div(bytes, 64) * 64; }
};

}  // namespace

int fdk_packed_size(const fdk_format* format, size_t* bytes) {
  return guarded([&] {
    expect_pointer("bytes", bytes);
    *bytes = Block(format).bytes;
  });
}

int fdk_pack(const fdk_format* format, const uint8_t* codes, const void* scales, const void* zeros,
             void* out, size_t bytes, size_t threads) {
  return guarded([&] {
    const Block block(format);
    expect_pointer("codes", codes);
    expect_array("scales", scales, fdk::bytes_of(block.scale_type));
    expect_array("out", out, Block::kAlignment);
    const bool affine = block.zero_type != fdk::ZeroType::none;
    if (affine != (zeros != nullptr)) {
      refuse("zeros", affine ? "a pointer, got NULL" : "NULL, for the format has no zero points");
    }
    if (affine) expect_aligned("zeros", zeros, fdk::bytes_of(block.zero_type));
    expect_bytes(bytes, block.bytes);
    auto* to = static_cast<std::uint8_t*>(out);
    fdk::advise_huge(to, bytes);
    std::fill_n(to, bytes, std::uint8_t(0));  // the gaps too, so that equal weights are equal bytes
    fdk::pack_codes(block.layout, codes, to, threads_of(threads));
    fdk::pack_groups(block.layout, static_cast<const std::uint8_t*>(scales), to + block.scales,
                     fdk::bytes_of(block.scale_type));
    if (!affine) return;
    fdk::pack_groups(block.layout, static_cast<const std::uint8_t*>(zeros), to + block.zeros,
                     fdk::bytes_of(block.zero_type));
  });
}

int fdk_linear(const fdk_format* format, const void* block, size_t bytes, const float* codebook,
               fdk_dtype dtype, const void* x, size_t m, const void* bias, void* y,
               size_t threads) {
  return guarded([&] {
    const fdk::PackedWeight weight = Block(format).at(block, bytes, codebook);
    const fdk::Activation type = activation(dtype);
    if (m == 0) return;
    expect_array("x", x, fdk::bytes_of(type));
    expect_aligned("bias", bias, fdk::bytes_of(type));
    expect_array("y", y, fdk::bytes_of(type));
    fdk::linear(weight, type, x, m, bias, y, threads_of(threads));
  });
}

int fdk_make_int8_table(const float* codebook, int bits, fdk_int8_table* table) {
  return guarded([&] {
    expect_pointer("codebook", codebook);
    expect_pointer("table", table);
    expect_aligned("codebook", codebook, sizeof(float));
    if (bits < 1 || bits > fdk::kMaxBits) refuse("bits", "1 to 8, got " + std::to_string(bits));
    for (int i = 0; i < 1 << bits; i++) {
      if (std::isfinite(codebook[i])) continue;
      refuse("codebook",
             "finite values, got " + std::to_string(codebook[i]) + " at " + std::to_string(i));
    }
    const fdk::Int8Table made = fdk::int8_table_of(codebook, bits);
    std::copy_n(made.levels, fdk::kMaxLevels, table->levels);
    table->step = made.step;
    table->offset = made.offset;
  });
}

int fdk_linear_int8(const fdk_format* format, const void* block, size_t bytes,
                    const fdk_int8_table* table, fdk_dtype dtype, const void* x, size_t m,
                    const void* bias, void* y, size_t threads) {
  return guarded([&] {
    const fdk::PackedWeight weight = Block(format).at(block, bytes, "table", table);
    const fdk::Activation type = activation(dtype);
    if (m == 0) return;
    expect_array("x", x, fdk::bytes_of(type));
    expect_aligned("bias", bias, fdk::bytes_of(type));
    expect_array("y", y, fdk::bytes_of(type));
    fdk::Int8Table levels{};
    if (table != nullptr) {
      std::copy_n(table->levels, fdk::kMaxLevels, levels.levels);
      levels.step = table->step;
      levels.offset = table->offset;
    }
    fdk::linear_int8(weight, table == nullptr ? nullptr : &levels, type, x, m, bias, y,
                     threads_of(threads));
  });
}

int fdk_linear_grad_x(const fdk_format* format, const void* block, size_t bytes,
                      const float* codebook, fdk_dtype dtype, const void* grad_y, size_t m,
                      void* grad_x, size_t threads) {
  return guarded([&] {
    const fdk::PackedWeight weight = Block(format).at(block, bytes, codebook);
    const fdk::Activation type = activation(dtype);
    if (m == 0) return;
    expect_array("grad_y", grad_y, fdk::bytes_of(type));
    expect_array("grad_x", grad_x, fdk::bytes_of(type));
    fdk::linear_grad_x(weight, type, grad_y, m, grad_x, threads_of(threads));
  });
}

const char* fdk_isa(void) {
  const char* name = nullptr;
  guarded([&] { name = fdk::name_of(fdk::current_isa()); });
  return name;
}

int fdk_set_isa(const char* name) {
  return guarded([&] {
    expect_pointer("name", name);
    fdk::set_isa(name, "fdk_set_isa");
  });
}

const char* fdk_error(void) { return error; }
