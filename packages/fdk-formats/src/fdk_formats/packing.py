"""Canonical packing: each row is a dense bit stream, first code in the most significant bits."""

import torch
from torch import Tensor

# Rows are processed in chunks of about this many codes, to keep temporaries small. On a GPU, small
# chunks are bound by launches and waits: with 2^20 codes, quantising took twice as long. Those of
# 2^23 need 330 MB.
CODES_PER_CHUNK = 1 << 20
CODES_PER_CHUNK_OF_GPU = 1 << 23
# torch has wider unsigned integers too, but cannot compute their minimum.
CODE_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def packed_width(bits: int, k: int) -> int:
    """Returns the bytes of a row of ``k`` codes: ceil(k * bits / 8)."""
    return (k * bits + 7) // 8


def rows_per_chunk(device: torch.device, k: int, on_cpu: int | None = None) -> int:
    """Returns how many rows of ``k`` codes to process at a time on a device.

    Args:
        device: where they are.
        k: codes in a row.
        on_cpu: codes of a chunk on a CPU, if not ``CODES_PER_CHUNK``.
    """
    codes = (on_cpu or CODES_PER_CHUNK) if device.type == "cpu" else CODES_PER_CHUNK_OF_GPU
    return max(1, codes // k)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs codes into bytes, row by row.

    Args:
        codes: ``[..., k]`` in uint8 or int8 to int64, values 0 to 2^bits - 1.
        bits: width of a code, 1 to 8.

    Returns:
        ``[..., ceil(k * bits / 8), uint8]``. Bits after the last code of a row are zero.

    Raises:
        ValueError: if bits or a code are out of range, or the codes are on meta.
        TypeError: if ``codes`` is not an integer tensor.

    Example:
        >>> pack(torch.tensor([3, 0, 1, 2]), bits=2)  # 0b11_00_01_10
        tensor([198], dtype=torch.uint8)
    """
    _check_bits("pack", bits)
    _check_tensor("pack", "codes", codes)
    if codes.dtype not in CODE_DTYPES:
        raise TypeError(f"pack: codes must be uint8 or int8 to int64, got {codes.dtype}")
    if codes.is_meta:
        raise ValueError("pack: needs values, got a tensor on meta")
    if codes.ndim < 1:
        raise ValueError("pack: codes must have at least one dimension, got a scalar")
    if codes.numel():
        lo, hi = (int(v) for v in torch.aminmax(codes))
        if lo < 0 or hi >= 1 << bits:
            raise ValueError(
                f"pack: codes of {bits} bits must be in 0 to {(1 << bits) - 1}, got {lo} to {hi}"
            )
    *lead, k = codes.shape
    packed = codes.new_empty((*lead, packed_width(bits, k)), dtype=torch.uint8)
    if packed.numel() == 0:
        return packed
    rows, out = codes.reshape(-1, k), packed.view(-1, packed.shape[-1])
    step = rows_per_chunk(codes.device, k)
    for start in range(0, len(rows), step):
        out[start : start + step] = _pack_rows(rows[start : start + step], bits)
    return packed


def unpack(packed: Tensor, bits: int, k: int) -> Tensor:
    """Unpacks bytes into codes, the inverse of ``pack``.

    Args:
        packed: ``[..., ceil(k * bits / 8), uint8]``.
        bits: width of a code, 1 to 8.
        k: codes in a row.

    Returns:
        The codes, ``[..., k, uint8]``.

    Raises:
        ValueError: if bits are out of range, or the last dimension does not fit k.
        TypeError: if ``packed`` is not a uint8 tensor or ``k`` not an integer.
    """
    _check_bits("unpack", bits)
    _check_tensor("unpack", "packed", packed)
    if type(k) is not int:
        raise TypeError(f"unpack: k must be an integer, got {k!r}")
    if packed.dtype != torch.uint8:
        raise TypeError(f"unpack: packed must be uint8, got {packed.dtype}")
    if k < 0 or packed.ndim < 1 or packed.shape[-1] != packed_width(bits, k):
        raise ValueError(
            f"unpack: {k} codes of {bits} bits take [..., {packed_width(bits, k)}] bytes, "
            f"got {list(packed.shape)}"
        )
    codes = packed.new_empty((*packed.shape[:-1], k))
    if codes.numel() == 0:
        return codes
    rows, out = packed.reshape(-1, packed.shape[-1]), codes.view(-1, k)
    step = rows_per_chunk(packed.device, k)
    for start in range(0, len(rows), step):
        out[start : start + step] = _unpack_rows(rows[start : start + step], bits, k)
    return codes


def _check_bits(caller: str, bits: int) -> None:
    if type(bits) is not int or not 1 <= bits <= 8:
        raise ValueError(f"{caller}: bits must be 1 to 8, got {bits!r}")


def _check_tensor(caller: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{caller}: {name} must be a tensor, got {type(value).__name__}")


def _word(bits: int) -> tuple[int, int]:
    """Returns codes and bytes of the smallest whole word: 1 byte if bits divide 8, else 8 codes."""
    return (8 // bits, 1) if bits in (1, 2, 4, 8) else (8, bits)


def _pack_rows(codes: Tensor, bits: int) -> Tensor:
    n, k = codes.shape
    per_word, word_bytes = _word(bits)
    dtype = torch.uint8 if word_bytes == 1 else torch.int64
    codes = torch.nn.functional.pad(codes.to(dtype), (0, -k % per_word)).view(n, -1, per_word)
    word = codes[..., 0].clone()
    for i in range(1, per_word):
        word <<= bits
        word |= codes[..., i]
    if word_bytes == 1:
        return word
    shifts = torch.arange(8 * (word_bytes - 1), -1, -8, device=codes.device)
    out = (word[..., None] >> shifts).to(torch.uint8).reshape(n, -1)  # the cast keeps the low byte
    return out[:, : packed_width(bits, k)]


def _unpack_rows(packed: Tensor, bits: int, k: int) -> Tensor:
    n, width = packed.shape
    per_word, word_bytes = _word(bits)
    if word_bytes == 1:
        word = packed
    else:
        packed = torch.nn.functional.pad(packed, (0, -width % word_bytes)).view(n, -1, word_bytes)
        word = packed[..., 0].to(torch.int64)
        for i in range(1, word_bytes):
            word = word << 8 | packed[..., i]
    shifts = range(bits * (per_word - 1), -1, -bits)
    codes = torch.stack([(word >> s & (1 << bits) - 1).to(torch.uint8) for s in shifts], dim=-1)
    return codes.view(n, -1)[:, :k]
