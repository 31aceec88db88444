"""What the readers share: checks, bit fields of int32 words, and the affine format that fits."""

import torch
from torch import Tensor

from fdk_formats.format import Format
from fdk_formats.packing import pack
from fdk_formats.tensor import QuantisedTensor

FLOAT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
WORD_BITS = 32
MAX_INT_ZERO_POINT = 255


def check_tensor(
    where: str, tensor: object, *dtypes: torch.dtype, shape: tuple[int | None, ...]
) -> Tensor:
    """``tensor``, where it has one of the dtypes and the shape; None in a shape is any size.

    Raises:
        TypeError, ValueError: naming what was wanted and what came.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{where} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{where} must be {wanted}, got {tensor.dtype}")
    fits = len(shape) == tensor.ndim and all(
        wanted in (None, size) for wanted, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{where} must be {_shape(shape)}, got {list(tensor.shape)}")
    return tensor.detach()


def check_float(where: str, tensor: object, *, shape: tuple[int | None, ...]) -> Tensor:
    """``check_tensor`` for bf16, fp16 or fp32."""
    return check_tensor(where, tensor, *FLOAT_NAMES, shape=shape)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Codes of ``words :: [r, c, int32]``, a little-endian bit stream down each column.

    The first code is in the least significant bits of the first word; at 3 bits a code may begin
    in one word and end in the next. Returns ``[r * 32 / bits, c, uint8]``.
    """
    rows, columns = words.shape
    per_run = 1 if WORD_BITS % bits == 0 else bits  # words until a code begins at bit 0 again
    assert rows % per_run == 0, "the caller has checked the rows"
    codes_per_run = per_run * WORD_BITS // bits
    runs = words.view(-1, per_run, columns)
    codes = words.new_empty((len(runs), codes_per_run, columns), dtype=torch.uint8)
    for i in range(codes_per_run):
        word, shift = divmod(i * bits, WORD_BITS)
        low = min(bits, WORD_BITS - shift)
        code = runs[:, word] >> shift & (1 << low) - 1
        if low < bits:
            code |= (runs[:, word + 1] & (1 << bits - low) - 1) << low
        codes[:, i] = code.to(torch.uint8)
    return codes.view(-1, columns)


def word_rows(where: str, bits: int, codes: int) -> int:
    """int32 words that ``codes`` codes take; the codes must fill whole runs of words.

    Raises:
        ValueError: where they do not.
    """
    per_run = WORD_BITS // bits if WORD_BITS % bits == 0 else WORD_BITS
    if codes % per_run:
        raise ValueError(
            f"{where} must be a multiple of {per_run} to fill words at {bits} bits, got {codes}"
        )
    return codes * bits // WORD_BITS


def affine_weight(
    where: str,
    codes: Tensor,
    *,
    bits: int,
    group_size: int | None,
    scale: Tensor,
    zero_point: Tensor,
) -> QuantisedTensor:
    """``W_hat = (codes - zero_point) * scale`` in the smallest format that holds it exactly.

        codes      :: [n, k, uint8]
        scale      :: [n, k/G, bf16 | fp16 | fp32]
        zero_point :: [n, k/G, int32 of 0 to 256 | uint8 | bf16 | fp16 | fp32]

    Integer zero points of 0 to 255 take a byte; with a 256 among them they take the scale's
    dtype. Float ones of another dtype than the scale make both float32.

    Raises:
        ValueError: for shapes or a group size that no format takes, or values that are not finite.
    """
    if zero_point.dtype.is_floating_point:
        if zero_point.dtype != scale.dtype:
            scale, zero_point = scale.float(), zero_point.float()
        kind = "float"
    elif bool((zero_point <= MAX_INT_ZERO_POINT).all()):
        zero_point, kind = zero_point.to(torch.uint8), "int"
    else:
        assert bool((zero_point <= 256).all()), "codes have 8 bits: all scale dtypes hold 256"
        zero_point, kind = zero_point.to(scale.dtype), "float"
    format = Format(
        codebook="affine",
        bits=bits,
        group_size=group_size,
        scale_dtype=FLOAT_NAMES[scale.dtype],
        zero_point=kind,
    )
    weight = QuantisedTensor(
        format=format,
        shape=(codes.shape[0], codes.shape[1]),
        packed=pack(codes.contiguous(), bits),
        scale=scale.contiguous(),
        zero_point=zero_point.contiguous(),
    )
    weight.check_values(where)
    return weight


def _shape(shape: tuple[int | None, ...]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
