/* y = x @ W_hat.T with x rounded to 8 bits, by a codebook and by zero points.
 *
 * The rows of x: ones, which are exact; ones and a NaN; zeros.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <fdk_cpu.h>

enum { kRows = 3, kN = 2, kK = 16 };

static void expect(int status) {
  if (status == 0) return;
  fprintf(stderr, "FAILED: %s\n", fdk_error());
  exit(1);
}

static void print_products(const char* name, const fdk_format* format, const uint8_t* zeros,
                           const fdk_int8_table* table) {
  /* Codes 0 1 2 3 in every byte of the first row of W, 3 3 3 3 in those of the second. */
  const uint8_t codes[kN][4] = {{0x1B, 0x1B, 0x1B, 0x1B}, {0xFF, 0xFF, 0xFF, 0xFF}};
  const float scales[kN] = {2.0f, 10.0f}, bias[kN] = {0.5f, 0.0f};
  float x[kRows][kK], y[kRows][kN];
  for (int i = 0; i < kK; i++) {
    x[0][i] = x[1][i] = 1.0f;
    x[2][i] = 0.0f;
  }
  x[1][7] = NAN;

  size_t bytes;
  expect(fdk_packed_size(format, &bytes));
  void* block = aligned_alloc(64, bytes);
  if (block == NULL) exit(1);
  expect(fdk_pack(format, codes[0], scales, zeros, block, bytes, 1));
  expect(fdk_linear_int8(format, block, table, FDK_FP32, x[0], kRows, bias, y[0], 1));
  printf("%s %s:", fdk_isa(), name);
  for (int i = 0; i < kRows * kN; i++) {
    const float value = y[i / kN][i % kN];
    if (isnan(value)) {
      printf(" nan");
    } else {
      printf(" %g", value);
    }
  }
  printf("\n");
  free(block);
}

int main(void) {
  fdk_format format = {.n = kN, .k = kK, .group_size = kK, .bits = 2, .scale_dtype = FDK_FP32};
  const float codebook[4] = {-1.0f, 0.0f, 0.5f, 1.0f};
  const uint8_t zeros[kN] = {1, 0};
  fdk_int8_table table;
  expect(fdk_make_int8_table(codebook, format.bits, &table));
  print_products("codebook", &format, NULL, &table);
  format.zero_dtype = FDK_U8;
  print_products("zero points", &format, zeros, NULL);
  return 0;
}
