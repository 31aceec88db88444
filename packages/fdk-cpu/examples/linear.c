/* y = x @ W_hat.T for a weight [2, 16] of 2 bits with one scale per row.
 *
 * After `cmake --install`, from the root of the repository:
 *
 *   cc packages/fdk-cpu/examples/linear.c $(pkg-config --cflags --libs fdk-cpu) -o linear
 */
#include <stdio.h>
#include <stdlib.h>

#include <fdk_cpu.h>

int main(void) {
  const fdk_format format = {.n = 2, .k = 16, .group_size = 16, .bits = 2, .scale_dtype = FDK_FP32};
  const float codebook[4] = {-1.0f, 0.0f, 0.5f, 1.0f};
  const float scales[2] = {2.0f, 10.0f};
  /* Codes 0 1 2 3 in every byte of the first row, 3 3 3 3 in those of the second. */
  const uint8_t codes[2][4] = {{0x1B, 0x1B, 0x1B, 0x1B}, {0xFF, 0xFF, 0xFF, 0xFF}};
  float x[16], y[2];
  for (int i = 0; i < 16; i++) x[i] = 1.0f;

  size_t bytes;
  if (fdk_packed_size(&format, &bytes) != 0) return fprintf(stderr, "%s\n", fdk_error()), 1;
  void* block = aligned_alloc(64, bytes);
  if (block == NULL) return 1;
  if (fdk_pack(&format, codes[0], scales, NULL, block, bytes, 1) != 0 ||
      fdk_linear(&format, block, bytes, codebook, FDK_FP32, x, 1, NULL, y, 1) != 0) {
    return fprintf(stderr, "%s\n", fdk_error()), 1;
  }
  printf("%s: %g %g\n", fdk_isa(), y[0], y[1]); /* 4 * (-1 + 0 + 0.5 + 1) * 2 and 16 * 1 * 10 */
  free(block);
  return 0;
}
