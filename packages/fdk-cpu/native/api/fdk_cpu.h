/* fdk-cpu for C: linear layers with 1- to 8-bit weights, by pointers and sizes.
 *
 * A weight [n, k] is stored in groups of group_size positions along k, each with a scale:
 *
 *   W_hat[i][j] = codebook[code[i][j]] * scale[i][j / group_size]
 *   W_hat[i][j] = (code[i][j] - zero[i][j / group_size]) * scale[i][j / group_size]   (zero points)
 *
 * fdk_pack turns the stored tensors into one block of bytes, the same on every machine, so that it
 * may be written to a file and mapped; fdk_linear multiplies with it. Functions return 0, or
 * another number where fdk_error says what was wanted and what came. They may be called from any
 * thread. Of more threads than 256, 256 are used.
 */
#ifndef FDK_CPU_C_API_H
#define FDK_CPU_C_API_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define FDK_API __attribute__((visibility("default")))
#else
#define FDK_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fdk_dtype {
  FDK_NONE = 0,
  FDK_BF16 = 1,
  FDK_FP16 = 2,
  FDK_FP32 = 3,
  FDK_E8M0 = 4, /* 2^(value - 127), of scales only */
  FDK_U8 = 5    /* of zero points only */
} fdk_dtype;

typedef struct fdk_format {
  size_t n, k;           /* outputs and inputs, at least 1 */
  size_t group_size;     /* divides k; k itself is one scale a row */
  int bits;              /* 1 to 8 */
  fdk_dtype scale_dtype; /* FDK_BF16, FDK_FP16, FDK_FP32 or FDK_E8M0 */
  fdk_dtype zero_dtype;  /* FDK_NONE for a codebook; FDK_BF16, FDK_FP16, FDK_FP32 or FDK_U8 */
} fdk_format;

/* Bytes of the block that fdk_pack writes. */
FDK_API int fdk_packed_size(const fdk_format* format, size_t* bytes);

/* codes  :: [n, ceil(k * bits / 8)]   each row a bit stream, first code in the highest bits
 * scales :: [n, k / group_size, scale_dtype]
 * zeros  :: [n, k / group_size, zero_dtype], or NULL where zero_dtype is FDK_NONE
 * out    :: [bytes], of fdk_packed_size; best aligned to 64, and where it is large to 2 MiB: on
 *           Linux whole 2 MiB of it are advised to be huge pages, which are read faster
 * threads: 1 is the caller alone, 0 as many as the machine has. */
FDK_API int fdk_pack(const fdk_format* format, const uint8_t* codes, const void* scales,
                     const void* zeros, void* out, size_t bytes, size_t threads);

/* y = x @ W_hat.T (+ bias), summed in float32.
 *
 * block    :: what fdk_pack wrote
 * codebook :: [2^bits] ascending, or NULL where the format has zero points
 * x        :: [m, k, dtype]   dtype: FDK_BF16, FDK_FP16 or FDK_FP32
 * bias     :: [n, dtype] or NULL
 * y        :: [m, n, dtype] */
FDK_API int fdk_linear(const fdk_format* format, const void* block, const float* codebook,
                       fdk_dtype dtype, const void* x, size_t m, const void* bias, void* y,
                       size_t threads);

/* A codebook for fdk_linear_int8: value i is taken as (levels[i] - offset) * step, the best of the
 * tables with 128 to 255 steps. */
typedef struct fdk_int8_table {
  int8_t levels[256];
  float step, offset;
} fdk_int8_table;

/* codebook :: [2^bits] ascending */
FDK_API int fdk_make_int8_table(const float* codebook, int bits, fdk_int8_table* table);

/* fdk_linear with x rounded to 8 bits: faster, with a relative error of about 0.6 % for normal x
 * (and 0.1 to 0.6 % for a codebook that is not equidistant). Each 128 positions of a row of x are
 * rounded to -127 to 127 times their largest magnitude / 127; one outlier takes from the precision
 * of the 127 beside it. A row of x with NaN or infinity gives a row of NaN.
 *
 * table: of the codebook, or NULL where the format has zero points; the rest as in fdk_linear. */
FDK_API int fdk_linear_int8(const fdk_format* format, const void* block,
                            const fdk_int8_table* table, fdk_dtype dtype, const void* x, size_t m,
                            const void* bias, void* y, size_t threads);

/* grad_x = grad_y @ W_hat, the gradient of fdk_linear with respect to x.
 *
 * grad_y :: [m, n, dtype]
 * grad_x :: [m, k, dtype] */
FDK_API int fdk_linear_grad_x(const fdk_format* format, const void* block, const float* codebook,
                              fdk_dtype dtype, const void* grad_y, size_t m, void* grad_x,
                              size_t threads);

/* The instruction set in use: the best of this machine, or FDK_CPU_ISA of the environment, or what
 * fdk_set_isa chose. FDK_CPU_ISA=auto is the best too. NULL where FDK_CPU_ISA names none of this
 * machine. */
FDK_API const char* fdk_isa(void);
FDK_API int fdk_set_isa(const char* name); /* or "auto" */

/* What failed last on this thread; an empty text where nothing has. */
FDK_API const char* fdk_error(void);

#ifdef __cplusplus
}
#endif
#endif
