"""HQQ tensors: codes packed in blocks of rows; float scales and zeros, or quantised ones."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fdk_formats.format import MIN_GROUP_SIZE
from fdk_formats.readers.checkpoint import Checkpoint, Reader
from fdk_formats.readers.conversion import FLOAT_NAMES, affine_weight, check_float, check_tensor
from fdk_formats.tensor import QuantisedTensor
from fdk_formats.untrusted import check_shape


@dataclass(frozen=True)
class Packing:
    """A packing of HQQ. The first block of rows is in the most significant of the bits used.

    Attributes:
        bits: bits of a code; 3bit_32 uses 30 of 32.
        per_word: codes in a word.
        dtype: of a word.
        nbits: what ``nbits`` may be: 5 to 7 are packed as 8, 1.58 (ternary) as 2.
    """

    bits: int
    per_word: int
    dtype: torch.dtype
    nbits: tuple[float, ...]


PACKINGS = {
    "8bit_u8": Packing(8, 1, torch.uint8, (8, 7, 6, 5)),
    "4bit_u8": Packing(4, 2, torch.uint8, (4,)),
    "3bit_32": Packing(3, 10, torch.int32, (3,)),
    "2bit_u8": Packing(2, 4, torch.uint8, (2, 1.58)),
    "1bit_u8": Packing(1, 8, torch.uint8, (1,)),
}
# Meta entries that HQQ stores as scalar tensors or as character codes in safetensors files.
NUMBERS = ("nbits", "group_size", "axis", "quant_scale", "quant_zero")
TEXTS = ("packing", "compute_dtype")
MAX_TEXT = 64
COMPUTE_DTYPES = {str(dtype): dtype for dtype in FLOAT_NAMES}


def read_hqq(W_q: Tensor, meta: Mapping[str, Any]) -> QuantisedTensor:
    """Reads a weight of an ``HQQLinear``: ``W_hat = (code - zero) * scale``.

    HQQ rounds ``code - zero`` to its compute dtype before the product and ``dequantise`` does not:
    the two are equal in float32, and equal up to rounding in 16 bits. Quantised scales and zeros
    (``quant_scale``, ``quant_zero``, ``offload_meta``) are dequantised as HQQ does, in its compute
    dtype.

    Args:
        W_q: ``[ceil(n*k/G / E), G]`` in uint8 or int32, E codes per word: code e of the words in
            row r belongs to row ``e * ceil(n*k/G / E) + r`` of the codes.
        meta: ``nbits``, ``group_size`` (G, or None for rows), ``shape`` (n, k), ``axis``,
            ``packing``, and ``scale`` and ``zero``, ``[n*k/G, 1]`` in bf16, fp16 or fp32; or
            ``scale_q`` and ``meta_scale``, ``zero_q`` and ``meta_zero``, or ``zero_scale``.

    Raises:
        TypeError: if a tensor has another dtype.
        ValueError: if an entry is missing or a shape does not fit; if no format holds the weight:
            ``axis`` is 0 (each input has scales of its own), or G is below 16 or not a divisor
            of k.
    """
    n, k = _shape(meta)
    if reason := _not_held(meta):
        raise ValueError(
            f"HQQ: {reason}; quantise with axis=1 and a group_size of 16 or more that divides k, "
            "or dequantise: load_hqq(folder, dequantise=torch.bfloat16)"
        )
    meta = _with_plain_scales(meta)
    group_size = meta.get("group_size") or k
    rows = n * (k // group_size)
    codes = _unpack(W_q, meta, rows, group_size)
    scale, zero = (_per_group(meta, name, (rows, 1)) for name in ("scale", "zero"))
    return affine_weight(
        "HQQ",
        codes.view(n, k),
        bits=_bits(meta),
        group_size=group_size if meta.get("group_size") else None,
        scale=scale.view(n, -1),
        zero_point=zero.view(n, -1),
    )


def load_hqq(
    folder: str | os.PathLike[str], *, dequantise: torch.dtype | None = None
) -> dict[str, QuantisedTensor | Tensor]:
    """Loads an HQQ folder: ``<name>.weight`` per quantised weight, other tensors unchanged.

    HQQ stores meta as tensors: numbers as scalars, text as character codes. The older
    ``qmodel.pt`` is a pickle, which can run code, and is not read.

    Args:
        folder: the folder.
        dequantise: dtype of weights that no format holds (axis 0), computed as HQQ does. None
            refuses them.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a tensor is missing or malformed, see ``read_hqq``.
        TypeError: if ``dequantise`` is not a floating dtype.
    """
    if dequantise is not None and not dequantise.is_floating_point:
        raise TypeError(f"HQQ: dequantise must be a floating dtype or None, got {dequantise}")

    return Checkpoint(folder).read_weights(".W_q", weight_reader(dequantise))


def weight_reader(dequantise: torch.dtype | None = None) -> Reader:
    """Makes the function that converts the tensors of one weight, see ``Checkpoint.read_weights``.

    Args:
        dequantise: see ``load_hqq``.
    """

    def read(tensors: Mapping[str, Tensor]) -> dict[str, QuantisedTensor | Tensor]:
        meta = _decoded(tensors)
        if dequantise is not None and _not_held(meta):
            values = _dequantised(meta["W_q"], _with_plain_scales(meta))
            return {"weight": values.to(dequantise)}
        return {"weight": read_hqq(meta["W_q"], meta)}

    return read


def _decoded(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns W_q and the meta entries below a prefix of a file, decoded."""
    # Accessing everything but the bias removes unused meta from the loaded tensors.
    meta: dict[str, Any] = {
        name: tensors[name] for name in tensors if "." not in name and name != "bias"
    }
    for name in ("W_q", "shape", "packing"):
        meta[name] = tensors[name]
    meta["shape"] = meta["shape"].flatten()[:3].tolist()
    for name in TEXTS:
        if name in meta:
            text = check_tensor(f"HQQ: {name}", meta[name], torch.uint8, shape=(None,))
            meta[name] = bytes(text[:MAX_TEXT].tolist()).decode("ascii", errors="replace")
    for name in NUMBERS:
        if name in meta:
            if meta[name].numel() != 1:
                raise ValueError(
                    f"HQQ: {name} must be one number, got {meta[name].flatten()[:8].tolist()}"
                )
            meta[name] = meta[name].item()
    return meta


def _entry(meta: Mapping[str, Any], name: str) -> Any:
    if name not in meta:
        raise ValueError(f"HQQ: meta must have {name}, got {', '.join(map(str, meta))}")
    return meta[name]


def _shape(meta: Mapping[str, Any]) -> tuple[int, int]:
    n, k = check_shape("HQQ: shape", _entry(meta, "shape"), ndim=2)
    return n, k


def _group_size(meta: Mapping[str, Any]) -> int | None:
    group_size = meta.get("group_size") or None
    if group_size is not None and (type(group_size) is not int or group_size < 1):
        raise ValueError(f"HQQ: group_size must be 1 or more, or None, got {group_size!r}")
    return group_size


def _not_held(meta: Mapping[str, Any]) -> str | None:
    """Says why no format holds a weight; None if one does."""
    _, k = _shape(meta)
    axis, group_size = _entry(meta, "axis"), _group_size(meta)
    if not isinstance(axis, int) or axis not in (0, 1):
        raise ValueError(f"HQQ: axis must be 0 or 1, got {axis!r}")
    if axis == 0:
        return (
            "axis must be 1, got 0: at axis 0 a group runs along n (the outputs) and each input "
            "has a scale of its own, and in every format here runs of inputs share one"
        )
    if group_size is not None and (k % group_size or group_size < MIN_GROUP_SIZE):
        return f"group_size must divide k={k} and be {MIN_GROUP_SIZE} or more, got {group_size}"
    return None


def _with_plain_scales(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns meta with ``scale`` and ``zero`` as floats, dequantised if they are quantised."""
    plain = dict(meta)
    if "zero_scale" in plain:  # offload_meta keeps both in one tensor
        both = plain["zero_scale"]
        if not isinstance(both, Tensor) or both.ndim == 0 or len(both) != 2:
            got = list(both.shape) if isinstance(both, Tensor) else type(both).__name__
            raise ValueError(f"HQQ: zero_scale must be [2, ...], got {got}")
        suffix = "_q" if both.dtype == torch.uint8 else ""
        plain[f"zero{suffix}"], plain[f"scale{suffix}"] = both[0], both[1]
    for name in ("scale", "zero"):
        if plain.get(f"quant_{name}"):
            inner = _entry(plain, f"meta_{name}")
            if not isinstance(inner, Mapping):
                raise TypeError(f"HQQ: meta_{name} must be a mapping, got {type(inner).__name__}")
            plain[name] = _dequantised(_entry(plain, f"{name}_q"), inner)
    return plain


def _per_group(meta: Mapping[str, Any], name: str, shape: tuple[int, int]) -> Tensor:
    """Returns ``scale`` or ``zero`` in ``shape``; one for the whole weight is repeated."""
    value = _entry(meta, name)
    if isinstance(value, Tensor) and value.numel() == 1 and value.ndim != 1:
        value = value.reshape(1, 1).expand(shape)
    return check_float(f"HQQ: {name}", value, shape=shape)


def _packing(meta: Mapping[str, Any]) -> Packing:
    packing = _entry(meta, "packing")
    if not isinstance(packing, str) or packing not in PACKINGS:
        raise ValueError(f"HQQ: packing must be one of {', '.join(PACKINGS)}, got {packing!r}")
    return PACKINGS[packing]


def _bits(meta: Mapping[str, Any]) -> int:
    """Returns the bits of a code."""
    packing, nbits = _packing(meta), _entry(meta, "nbits")
    # A file holds 1.58 as float32.
    known = type(nbits) in (int, float) and math.isfinite(nbits) and round(nbits, 2)
    if known not in packing.nbits:
        wanted = " or ".join(map(str, packing.nbits))
        raise ValueError(f"HQQ: nbits of {meta['packing']} must be {wanted}, got {nbits!r}")
    return int(nbits) if packing.bits == 8 else packing.bits


def _unpack(W_q: Tensor, meta: Mapping[str, Any], rows: int, columns: int) -> Tensor:
    """Unpacks the codes, ``[rows, columns, uint8]``."""
    packing = _packing(meta)
    where, dtype = f"HQQ: W_q ({meta['packing']})", packing.dtype
    block = -(-rows // packing.per_word)
    if isinstance(W_q, Tensor) and W_q.is_floating_point() and W_q.ndim == 2:
        # view_as_float: the same bytes under a float dtype
        if W_q.shape[1] * W_q.itemsize % dtype.itemsize:
            raise ValueError(
                f"{where} must be {[block, columns]} under a float dtype, got {list(W_q.shape)} in "
                f"{W_q.dtype}"
            )
        W_q = W_q.detach().contiguous().view(dtype)
    words = check_tensor(where, W_q, dtype, shape=(block, columns))
    bits = packing.bits
    shifts = range(bits * (packing.per_word - 1), -1, -bits)
    codes = [(words >> shift & (1 << bits) - 1).to(torch.uint8) for shift in shifts]
    return torch.cat(codes)[:rows]


def _dequantised(W_q: Tensor, meta: Mapping[str, Any]) -> Tensor:
    """Computes HQQ's own dequantisation in its compute dtype, of any axis and shape.

    At axis 1 a row of the codes is a group, at axis 0 a column. Without groups the codes have the
    shape of the weight.
    """
    n, k = _shape(meta)
    axis, group_size = _entry(meta, "axis"), _group_size(meta)
    _bits(meta)
    rows, columns = n, k
    if group_size is not None:
        other, rest = divmod(n * k, group_size)
        if rest:
            raise ValueError(f"HQQ: group_size must divide n*k={n * k}, got {group_size}")
        rows, columns = (other, group_size) if axis == 1 else (group_size, other)
    name = meta.get("compute_dtype", torch.float16)
    dtype = COMPUTE_DTYPES.get(str(name))
    if dtype is None:
        raise ValueError(
            f"HQQ: compute_dtype must be one of {', '.join(COMPUTE_DTYPES)}, got {name!r}"
        )
    codes = _unpack(W_q, meta, rows, columns).to(dtype)
    wanted = (rows, 1) if axis == 1 else (1, columns)
    zero, scale = (_per_group(meta, part, wanted) for part in ("zero", "scale"))
    return ((codes - zero) * scale).reshape(n, k)
