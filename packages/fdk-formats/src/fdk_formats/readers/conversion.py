"""Checks and conversions for readers: int32 words to codes, codes to affine weights."""

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
    """Returns ``tensor`` detached if it has one of the dtypes and the shape.

    Args:
        where: the start of error messages.
        tensor: anything.
        dtypes: the accepted dtypes.
        shape: the expected shape; None is any size.

    Raises:
        TypeError: if it is not a tensor of one of the dtypes.
        ValueError: if it has another shape, or is not dense.
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
    if tensor.layout != torch.strided:
        raise ValueError(f"{where} must be a dense tensor, got {tensor.layout}")
    return tensor.detach()


def check_float(where: str, tensor: object, *, shape: tuple[int | None, ...]) -> Tensor:
    """Checks that ``tensor`` is bf16, fp16 or fp32, see ``check_tensor``."""
    return check_tensor(where, tensor, *FLOAT_NAMES, shape=shape)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Unpacks ``words :: [r, c, int32]``, a little-endian bit stream down each column.

    The first code is in the least significant bits of the first word. At 3 bits a code may cross
    from one word into the next.

    Returns:
        The codes, ``[r * 32 / bits, c, uint8]``.
    """
    rows, columns = words.shape
    per_run = 1 if WORD_BITS % bits == 0 else bits  # words until a code begins at bit 0 again
    assert rows % per_run == 0, "the caller has checked the rows"
    codes_per_run = per_run * WORD_BITS // bits
    runs = words.view(rows // per_run, per_run, columns)
    codes = words.new_empty((len(runs), codes_per_run, columns), dtype=torch.uint8)
    for i in range(codes_per_run):
        word, shift = divmod(i * bits, WORD_BITS)
        low = min(bits, WORD_BITS - shift)
        code = runs[:, word] >> shift & (1 << low) - 1
        if low < bits:
            code |= (runs[:, word + 1] & (1 << bits - low) - 1) << low
        codes[:, i] = code.to(torch.uint8)
    return codes.view(len(runs) * codes_per_run, columns)


def word_rows(where: str, bits: int, codes: int) -> int:
    """Returns the int32 words of ``codes`` codes.

    Raises:
        ValueError: if the codes do not fill whole words.
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
    """Makes ``W_hat = (codes - zero_point) * scale`` in the smallest format that is exact.

    Integer zero points are stored in a byte; if 256 occurs, in the scale's dtype. Float zero points
    of another dtype than the scale make both float32.

    Args:
        where: the start of error messages.
        codes: ``[n, k, uint8]``.
        bits: width of a code.
        group_size: G; None for whole rows.
        scale: ``[n, k/G]`` in bf16, fp16 or fp32.
        zero_point: ``[n, k/G]`` in int32 (0 to 256), uint8, bf16, fp16 or fp32.

    Raises:
        ValueError: if shapes or group size do not fit a format, or a value is not finite.
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
