/* fdk-cpu for C: linear layers with 1- to 8-bit weights on x86 and ARM CPUs.
 *
 * A weight [n, k] has groups of group_size positions along k, each with a scale:
 *
 *   W_hat[i][j] = codebook[code[i][j]] * scale[i][j / group_size]
 *   W_hat[i][j] = (code[i][j] - zero[i][j / group_size]) * scale[i][j / group_size]   (zero points)
 *
 * fdk_pack packs the stored tensors into one block of bytes. The block is the same on every
 * machine, so it can be written to a file and mapped. fdk_linear multiplies with it.
 *
 * Functions return 0 on success. Otherwise fdk_error returns a message with what was wanted and
 * what came. `threads` is the most that a call uses: 1 is the caller alone, 0 means as many as the
 * machine has, and more than 256 count as 256.
 *
 * Memory belongs to the caller. A function reads and writes it only until it returns and keeps no
 * pointer. Arrays are dense, in row-major order, and their sizes follow from the shapes below:
 * [m, k, dtype] is m * k * (bytes of dtype) bytes. Each array must be aligned to the size of its
 * values, and a block to 4 bytes; 64 are faster. Outputs must not overlap inputs. NULL pointers,
 * wrong alignments and wrong sizes of blocks are errors; other sizes cannot be checked.
 *
 * All functions may be called from any thread, also at once with the same weight, as long as no
 * thread writes what another one uses. fdk_set_isa holds for all threads.
 */
#ifndef FDK_CPU_H
#define FDK_CPU_H

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
  FDK_E8M0 = 4, /* 2^(value - 127); for scales only */
  FDK_U8 = 5    /* for zero points only */
} fdk_dtype;

typedef struct fdk_format {
  size_t n, k;           /* outputs and inputs, at least 1 */
  size_t group_size;     /* a divisor of k; k itself for one scale per row */
  int bits;              /* 1 to 8 */
  fdk_dtype scale_dtype; /* FDK_BF16, FDK_FP16, FDK_FP32 or FDK_E8M0 */
  fdk_dtype zero_dtype;  /* FDK_NONE for a codebook; FDK_BF16, FDK_FP16, FDK_FP32 or FDK_U8 */
} fdk_format;

/* Computes the size in bytes of the block that fdk_pack writes.
 *
 * format :: read; bytes :: written, one size_t */
FDK_API int fdk_packed_size(const fdk_format* format, size_t* bytes);

/* Packs a weight.
 *
 * codes  :: [n, ceil(k * bits / 8)]   each row a bit stream, first code in the highest bits
 * scales :: [n, k / group_size, scale_dtype]
 * zeros  :: [n, k / group_size, zero_dtype], or NULL if zero_dtype is FDK_NONE
 * out    :: [bytes], with the size from fdk_packed_size. Align it to 64 bytes, or to 2 MiB if it is
 *           large: on Linux, huge pages are requested for each whole 2 MiB, which are read faster.
 *
 * codes, scales and zeros are copied, so they may be freed afterwards. A block may be copied or
 * mapped from a file; it holds no addresses. */
FDK_API int fdk_pack(const fdk_format* format, const uint8_t* codes, const void* scales,
                     const void* zeros, void* out, size_t bytes, size_t threads);

/* Computes y = x @ W_hat.T (+ bias), summed in float32.
 *
 * block    :: [bytes], written by fdk_pack for the same format
 * bytes    :: size of the block from fdk_packed_size, checked
 * codebook :: [2^bits], ascending, or NULL if the format has zero points
 * x        :: [m, k, dtype]   dtype is FDK_BF16, FDK_FP16 or FDK_FP32
 * bias     :: [n, dtype] or NULL
 * y        :: [m, n, dtype]
 *
 * y is finite if W_hat, x and the sums are, also where a sum of codebook values times x, before its
 * scale, is not. With m = 0 nothing is read or written, and x and y may be NULL. */
FDK_API int fdk_linear(const fdk_format* format, const void* block, size_t bytes,
                       const float* codebook, fdk_dtype dtype, const void* x, size_t m,
                       const void* bias, void* y, size_t threads);

/* A codebook for fdk_linear_int8. Value i is approximated by (levels[i] - offset) * step. */
typedef struct fdk_int8_table {
  int8_t levels[256];
  float step, offset;
} fdk_int8_table;

/* Finds the best table for a codebook :: [2^bits], ascending, among those with 128 to 255 steps.
 * NaN and infinity in the codebook are errors. The table is a copy: it needs the codebook no more.
 */
FDK_API int fdk_make_int8_table(const float* codebook, int bits, fdk_int8_table* table);

/* Computes fdk_linear with x rounded to 8 bits: faster, with a relative error of about 0.6 % for
 * normal x, and 0.1 to 0.6 % more for a codebook that is not equidistant.
 *
 * Each 128 positions of a row of x are rounded to multiples of their absmax / 127, so one outlier
 * costs the precision of the other 127. A row of x with NaN or infinity gives a row of NaN.
 *
 * table is made from the codebook, or NULL if the format has zero points; the other arguments are
 * those of fdk_linear. */
FDK_API int fdk_linear_int8(const fdk_format* format, const void* block, size_t bytes,
                            const fdk_int8_table* table, fdk_dtype dtype, const void* x, size_t m,
                            const void* bias, void* y, size_t threads);

/* Computes grad_x = grad_y @ W_hat, the gradient of fdk_linear with respect to x.
 *
 * grad_y :: [m, n, dtype]
 * grad_x :: [m, k, dtype]
 *
 * The other arguments are those of fdk_linear. */
FDK_API int fdk_linear_grad_x(const fdk_format* format, const void* block, size_t bytes,
                              const float* codebook, fdk_dtype dtype, const void* grad_y, size_t m,
                              void* grad_x, size_t threads);

/* Returns the instruction set in use: that of fdk_set_isa, else of the environment variable
 * FDK_CPU_ISA, else the best of this machine; "auto" means the best. Returns NULL if FDK_CPU_ISA
 * names one that this machine does not have. The text is never freed; name is read during the call.
 */
FDK_API const char* fdk_isa(void);
FDK_API int fdk_set_isa(const char* name);

/* Returns the message of the last call that failed on this thread, or an empty text, of at most 511
 * characters; never NULL. Each thread has its own. The next call that fails on this thread writes
 * over it, and it is gone when the thread ends: copy what must last longer. Calls that succeed
 * leave it. Do not write to it or free it. */
FDK_API const char* fdk_error(void);

#ifdef __cplusplus
}
#endif
#endif
