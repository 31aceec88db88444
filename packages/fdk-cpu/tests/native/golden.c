/* Hashes of packed weights and of their decoded values, the same on every machine.
 *
 * One line per format: its name, the hash of the packed block, and the hash of W_hat from one-hot
 * x, exactly. Rows are multiplied one at a time and all at once, with the same result.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <fdk_cpu.h>

enum { kRows = 5, kMaxK = 600 };

static uint32_t state = 1;

static uint32_t next_random(void) { return state = state * 1664525u + 1013904223u; }

static uint64_t hash_of(uint64_t hash, const void* data, size_t bytes) { /* FNV-1a */
  for (size_t i = 0; i < bytes; i++) {
    hash = (hash ^ ((const uint8_t*)data)[i]) * 0x100000001b3u;
  }
  return hash;
}

static void expect(int status) {
  if (status == 0) return;
  fprintf(stderr, "FAILED: %s\n", fdk_error());
  exit(1);
}

static float x[kMaxK * kMaxK], one[kRows], all[kMaxK * kRows];

static uint64_t block_hash, value_hash;

static void add_golden(int bits, size_t k, size_t group, fdk_dtype zero_dtype) {
  const fdk_format format = {kRows, k, group, bits, FDK_FP32, zero_dtype};
  const size_t width = (k * (size_t)bits + 7) / 8, groups = kRows * (k / group);
  uint8_t codes[kRows * kMaxK] = {0}, zeros[kRows * kMaxK];
  float scales[kRows * kMaxK], codebook[256];
  for (size_t row = 0; row < kRows; row++) {
    for (size_t i = 0; i < width; i++) codes[row * width + i] = (uint8_t)(next_random() >> 24);
    const unsigned unused = (unsigned)(8 * width - k * (size_t)bits); /* bits at a row's end */
    codes[row * width + width - 1] &= (uint8_t)(0xFFu << unused);
  }
  for (size_t i = 0; i < groups; i++) {
    scales[i] = (float)(next_random() >> 24) / 64;
    zeros[i] = (uint8_t)(next_random() >> 24);
  }
  for (int i = 0; i < 256; i++) codebook[i] = (float)(i * i) / 16 - 3;
  const int affine = zero_dtype != FDK_NONE;
  const float* table = affine ? NULL : codebook;

  size_t bytes;
  expect(fdk_packed_size(&format, &bytes));
  uint8_t* block = aligned_alloc(64, bytes);
  if (block == NULL) exit(1);
  expect(fdk_pack(&format, codes, scales, affine ? zeros : NULL, block, bytes, 1));
  memset(x, 0, sizeof x);
  for (size_t i = 0; i < k; i++) x[i * k + i] = 1;
  expect(fdk_linear(&format, block, bytes, table, FDK_FP32, x, k, NULL, all, 2));
  for (size_t i = 0; i < k; i++) {
    expect(fdk_linear(&format, block, bytes, table, FDK_FP32, x + i * k, 1, NULL, one, 1));
    for (size_t row = 0; row < kRows; row++) {
      if (one[row] != all[i * kRows + row]) {
        fprintf(stderr, "FAILED: b%d-g%zu: W_hat[%zu][%zu] is %g alone and %g in a panel\n", bits,
                group, row, i, (double)one[row], (double)all[i * kRows + row]);
        exit(1);
      }
      all[i * kRows + row] += 0.0f; /* -0 and 0 are one value */
    }
  }
  block_hash = hash_of(block_hash, block, bytes);
  value_hash = hash_of(value_hash, all, k * kRows * sizeof(float));
  free(block);
}

int main(void) {
  static const size_t shapes[][2] = {{256, 64}, {128, 16}, {48, 24}, {200, 200}, {384, 128}};
  for (int bits = 1; bits <= 8; bits++) {
    block_hash = value_hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
      add_golden(bits, shapes[i][0], shapes[i][1], FDK_NONE);
    }
    add_golden(bits, 256, 64, FDK_U8);
    add_golden(bits, 34, 17, FDK_U8);
    printf("b%d %016llx %016llx\n", bits, (unsigned long long)block_hash,
           (unsigned long long)value_hash);
  }
  return 0;
}
