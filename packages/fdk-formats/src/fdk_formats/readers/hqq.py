"""HQQ tensors: codes packed in blocks of rows, float scale and zero point."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fdk_formats.readers.checkpoint import Checkpoint
from fdk_formats.readers.conversion import affine_weight, check_float, check_tensor
from fdk_formats.tensor import QuantisedTensor

# Bits of a code, codes per word and dtype of a word, by packing. The first block of rows is in the
# most significant of the bits used (3bit_32 uses 30 of 32).
PACKINGS = {
    "8bit_u8": (8, 1, torch.uint8),
    "4bit_u8": (4, 2, torch.uint8),
    "3bit_32": (3, 10, torch.int32),
    "2bit_u8": (2, 4, torch.uint8),
    "1bit_u8": (1, 8, torch.uint8),
}
# Meta entries that HQQ stores as scalar tensors in safetensors files.
NUMBERS = ("nbits", "group_size", "axis", "quant_scale", "quant_zero")


def read_hqq(W_q: Tensor, meta: Mapping[str, Any]) -> QuantisedTensor:
    """Reads a weight of an ``HQQLinear``: ``W_hat = (code - zero) * scale``.

    HQQ rounds ``code - zero`` to its compute dtype before the product and ``dequantise`` does not:
    the two are equal in float32, and equal up to rounding in 16 bits.

    Args:
        W_q: ``[ceil(n*k/G / E), G]`` in uint8 or int32, E codes per word: code e of the words in
            row r belongs to row ``e * ceil(n*k/G / E) + r`` of the codes.
        meta: ``nbits``, ``group_size`` (G, or None for rows), ``shape`` (n, k), ``axis``,
            ``packing``, and ``scale`` and ``zero``, ``[n*k/G, 1]`` in bf16, fp16 or fp32.

    Raises:
        TypeError: if a tensor has another dtype.
        ValueError: if an entry is missing or a shape does not fit; if ``axis`` is 0 (groups along
            n), scale or zero are quantised, groups do not divide k or the packing is unknown.
    """
    shape, axis = _entry(meta, "shape"), _entry(meta, "axis")
    sizes = list(shape) if isinstance(shape, Sequence) else [shape]
    if len(sizes) != 2 or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"HQQ: shape must be two sizes, got {sizes}")
    n, k = sizes
    if axis != 1:
        raise ValueError(
            f"HQQ: axis must be 1, got {axis}: at axis 0 a group runs along n (the outputs), and "
            "the groups of every format here run along k"
        )
    for name in ("scale", "zero"):
        if meta.get(f"quant_{name}"):
            raise ValueError(f"HQQ: {name} is quantised itself (quant_{name}): not read")
    group_size = meta.get("group_size") or k
    if type(group_size) is not int or k < 1 or k % group_size:
        raise ValueError(f"HQQ: group_size must divide k={k}, got {group_size!r}")
    rows = n * (k // group_size)
    scale = check_float("HQQ: scale", _entry(meta, "scale"), shape=(rows, 1))
    zero = check_float("HQQ: zero", _entry(meta, "zero"), shape=(rows, 1))
    codes = _unpack(W_q, _entry(meta, "packing"), rows, group_size)
    return affine_weight(
        "HQQ",
        codes.view(n, k),
        bits=_bits(meta),
        group_size=group_size if meta.get("group_size") else None,
        scale=scale.view(n, -1),
        zero_point=zero.view(n, -1),
    )


def load_hqq(folder: str | os.PathLike[str]) -> dict[str, QuantisedTensor | Tensor]:
    """Loads an HQQ folder: ``<name>.weight`` per quantised weight, other tensors unchanged.

    HQQ stores meta as tensors: numbers as scalars, text as character codes. The older
    ``qmodel.pt`` is a pickle, which can run code, and is not read.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a tensor is missing or malformed, see ``read_hqq``.
    """
    return Checkpoint(folder).read_weights(".W_q", _read_state)


def _read_state(tensors: Mapping[str, Tensor]) -> QuantisedTensor:
    # Accessing everything but the bias removes unused meta from the loaded tensors.
    meta: dict[str, Any] = {
        name: tensors[name] for name in tensors if "." not in name and name != "bias"
    }
    for name in ("W_q", "shape", "packing"):
        meta[name] = tensors[name]
    meta["shape"] = meta["shape"].tolist()
    meta["packing"] = bytes(meta["packing"].tolist()).decode("ascii", errors="replace")
    for name in NUMBERS:
        if name in meta:
            if meta[name].numel() != 1:
                raise ValueError(f"HQQ: {name} must be one number, got {meta[name].tolist()}")
            meta[name] = meta[name].item()
    return read_hqq(meta["W_q"], meta)


def _entry(meta: Mapping[str, Any], name: str) -> Any:
    if name not in meta:
        raise ValueError(f"HQQ: meta must have {name}, got {', '.join(map(str, meta))}")
    return meta[name]


def _bits(meta: Mapping[str, Any]) -> int:
    """Returns the bits of a code: 5 to 7 are packed as 8, 1.58 (ternary) as 2."""
    packing, nbits = meta["packing"], meta.get("nbits")
    if packing == "8bit_u8" and nbits in (5, 6, 7):
        return int(nbits)
    return PACKINGS[packing][0]


def _unpack(W_q: Tensor, packing: str, rows: int, group_size: int) -> Tensor:
    if not isinstance(packing, str) or packing not in PACKINGS:
        raise ValueError(f"HQQ: packing must be one of {', '.join(PACKINGS)}, got {packing!r}")
    bits, per_word, dtype = PACKINGS[packing]
    if isinstance(W_q, Tensor) and W_q.is_floating_point():
        W_q = W_q.detach().view(dtype)  # view_as_float: the same bytes under a float dtype
    block = -(-rows // per_word)
    words = check_tensor(f"HQQ: W_q ({packing})", W_q, dtype, shape=(block, group_size))
    shifts = range(bits * (per_word - 1), -1, -bits)
    codes = [(words >> shift & (1 << bits) - 1).to(torch.uint8) for shift in shifts]
    return torch.cat(codes)[:rows]
