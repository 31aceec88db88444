// Looks up the values of codes: NEON, byte by byte in registers or one by one in memory.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "arm/codes_neon-inl.h"
#include "common/simd-inl.h"

namespace fdk {
namespace {

// Up to 6 bits a table fits registers, and `tbl` looks up 16 of its bytes at once. A wider one
// would fill 16 or 32 registers (8 bits: 5.1 instructions per code).
constexpr bool in_registers(int bits) { return bits <= 6; }

// The highest kBytes bytes of float32 values, each in its own registers. Up to 4 bits a table
// has 16 entries: at 2 bits an index stands for two codes, at 1 bit for four, with a table for each
// of them.
template <int kBits, int kBytes>
class ByteTable {
 public:
  FDK_INLINE explicit ByteTable(const float* table) {
    FDK_UNROLL
    for (int i = 0; i < kCodes; i++) {
      FDK_UNROLL
      for (int b = 0; b < kBytes; b++) {
        std::uint8_t entries[kEntries];
        for (int e = 0; e < kEntries; e++) {
          std::uint32_t bits;
          std::memcpy(&bits, table + (e >> (i * kBits) & ((1 << kBits) - 1)), sizeof bits);
          entries[e] = std::uint8_t(bits >> (8 * (4 - kBytes + b)));
        }
        load(entries, bytes_[i][b]);
      }
    }
  }

  // Bytes b and b + 1 of the values of 16 codes, for block h of a step: of the even and of the odd
  // codes.
  template <int h, int b>
  FDK_INLINE void pairs(uint8x16_t index, uint16x8_t& even, uint16x8_t& odd) const {
    constexpr int i = kBits == 1 ? h : kBits == 2 ? h / 2 : 0;
    const uint8x16_t low = look_up(bytes_[i][b], index), high = look_up(bytes_[i][b + 1], index);
    even = vreinterpretq_u16_u8(vtrn1q_u8(low, high));
    odd = vreinterpretq_u16_u8(vtrn2q_u8(low, high));
  }

 private:
  static constexpr int kCodes = kBits == 1 ? 4 : kBits == 2 ? 2 : 1;  // per index
  static constexpr int kEntries = kBits <= 4 ? 16 : 1 << kBits;
  // The type that the lookup takes, so that no lookup copies a table to adjacent registers.
  using Registers =
      std::conditional_t<kEntries == 16, uint8x16_t,
                         std::conditional_t<kEntries == 32, uint8x16x2_t, uint8x16x4_t>>;

  static FDK_INLINE void load(const std::uint8_t* p, uint8x16_t& to) { to = vld1q_u8(p); }
  static FDK_INLINE void load(const std::uint8_t* p, uint8x16x2_t& to) { to = vld1q_u8_x2(p); }
  static FDK_INLINE void load(const std::uint8_t* p, uint8x16x4_t& to) { to = vld1q_u8_x4(p); }
  static FDK_INLINE uint8x16_t look_up(uint8x16_t t, uint8x16_t i) { return vqtbl1q_u8(t, i); }
  static FDK_INLINE uint8x16_t look_up(const uint8x16x2_t& t, uint8x16_t i) {
    return vqtbl2q_u8(t, i);
  }
  static FDK_INLINE uint8x16_t look_up(const uint8x16x4_t& t, uint8x16_t i) {
    return vqtbl4q_u8(t, i);
  }

  Registers bytes_[kCodes][kBytes];
};

// T is the highest 16 bits of a float32, or all 32.
template <int kBits, class T>
class MemoryTable {
 public:
  explicit MemoryTable(const float* table) {
    for (int i = 0; i < 1 << kBits; i++) {
      std::uint32_t bits;
      std::memcpy(&bits, table + i, sizeof bits);
      entries_[i] = T(bits >> (32 - 8 * sizeof(T)));
    }
  }

  // The value of byte i of `codes` in lane 0, loaded into a vector register: moving it from a
  // general register would wait for the only pipe that does so.
  template <int i>
  FDK_INLINE uint32x2_t value(std::uint64_t codes) const {
    const std::uint64_t code = codes >> (8 * i) & 0xFF;
    uint32x2_t lane;
    if constexpr (sizeof(T) == 2) {
      asm("ldr %h0, [%1, %2, lsl #1]" : "=w"(lane) : "r"(entries_), "r"(code), "m"(entries_));
    } else {
      asm("ldr %s0, [%1, %2, lsl #2]" : "=w"(lane) : "r"(entries_), "r"(code), "m"(entries_));
    }
    return lane;
  }

 private:
  T entries_[1 << kBits];
};

}  // namespace
}  // namespace fdk
