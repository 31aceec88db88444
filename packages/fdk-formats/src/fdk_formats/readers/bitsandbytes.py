"""bitsandbytes 4-bit weights: NF4 or FP4 codes, with plain or nested absmax."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fdk_formats.format import Format
from fdk_formats.packing import pack, unpack
from fdk_formats.readers.checkpoint import Checkpoint
from fdk_formats.readers.conversion import check_float, check_tensor
from fdk_formats.tensor import QuantisedTensor
from fdk_formats.untrusted import check_int, check_number, check_shape, parse_json_object

BITS = 4
# bitsandbytes' NF4 is our nf4. Its FP4 differs from e2m1 in one value (1/192 of the largest), so
# its table is a custom codebook.
CODEBOOKS = {"nf4": "nf", "fp4": "custom"}
STATE_KEY = "quant_state.bitsandbytes__"
# A state has six entries and takes some 200 bytes.
MAX_STATE_BYTES = 1 << 16


def read_bitsandbytes(weight: Tensor, state: object) -> QuantisedTensor:
    """Reads a 4-bit weight of bitsandbytes: ``W_hat = quant_map[code] * absmax``.

    Nested absmax is computed in float32 as bitsandbytes does. Codes of a table that does not ascend
    (FP4) are renumbered.

    Args:
        weight: ``[n * k / 2, 1, uint8]``, first code in the high nibble. Another dtype of
            ``quant_storage`` is read as bytes.
        state: the weight's ``bitsandbytes.functional.QuantState``, or a mapping with the keys of
            the state_dict: ``absmax``, ``quant_map``, ``quant_state.bitsandbytes__nf4`` (or
            ``__fp4``), and ``nested_absmax`` and ``nested_quant_map`` for nested absmax.

    Raises:
        TypeError: if an entry has another type or dtype.
        ValueError: if an entry is missing or malformed, or k is not a multiple of the block size:
            blocks would cross rows.
    """
    entries = dict(state) if isinstance(state, Mapping) else _entries_of(state)
    info = _info(entries)
    kind, block_size = info.get("quant_type"), info.get("blocksize")
    if not isinstance(kind, str) or kind not in CODEBOOKS:
        raise ValueError(f"bitsandbytes: quant_type must be nf4 or fp4, got {kind!r}")
    n, k = check_shape("bitsandbytes: shape", info.get("shape"), ndim=2)
    if type(block_size) is not int or block_size < 1 or k % block_size:
        raise ValueError(
            f"bitsandbytes: blocks of {block_size!r} over the flattened weight cross its rows of "
            f"k={k}, and a group here is within a row: k must be a multiple of the block size"
        )
    absmax = _absmax(entries, info, n * k // block_size)
    table = check_tensor(
        "bitsandbytes: quant_map", _entry(entries, "quant_map"), torch.float32, shape=(16,)
    )
    codebook, order = table.sort(stable=True)
    quantised = QuantisedTensor(
        format=Format(
            codebook=CODEBOOKS[kind],
            bits=BITS,
            group_size=block_size,
            scale_rule="absmax",
            scale_dtype="fp32",
        ),
        shape=(n, k),
        packed=_renumber(_bytes(weight, n, k), order),
        scale=absmax.view(n, -1),
        codebook=codebook,
    )
    quantised.check_values("bitsandbytes")
    return quantised


def load_bitsandbytes(folder: str | os.PathLike[str]) -> dict[str, QuantisedTensor | Tensor]:
    """Loads a folder of 4-bit weights by bitsandbytes or transformers, other tensors unchanged.

    The 8-bit weights of bitsandbytes are not read.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a tensor is missing or malformed, see ``read_bitsandbytes``.
    """
    return Checkpoint(folder).read_weights(".weight.quant_map", read_entries)


def read_entries(tensors: Mapping[str, Tensor]) -> dict[str, QuantisedTensor]:
    """Converts the tensors of one weight by the names of files, see ``Checkpoint.read_weights``."""
    names = [name for name in tensors if name.startswith("weight.")]
    state = {name.removeprefix("weight."): tensors[name] for name in names}
    return {"weight": read_bitsandbytes(tensors["weight"], state)}


def _entries_of(state: object) -> dict[str, Any]:
    """Returns the entries of a QuantState under their names in a state_dict."""
    as_dict = getattr(state, "as_dict", None)
    if as_dict is None:
        raise TypeError(
            "bitsandbytes: state must be a QuantState or a mapping of its state_dict, "
            f"got {type(state).__name__}"
        )
    entries: dict[str, Any] = as_dict(packed=False)
    return entries


def _info(entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the entries that are not tensors: JSON in a uint8 tensor, or plain entries."""
    packed = [name for name in entries if name.startswith(STATE_KEY)]
    if not packed:
        if "quant_type" in entries:
            return entries
        raise ValueError(f"bitsandbytes: needs {STATE_KEY}nf4 or __fp4, got {', '.join(entries)}")
    name = packed[0]
    text = check_tensor(f"bitsandbytes: {name}", entries[name], torch.uint8, shape=(None,))
    if text.numel() > MAX_STATE_BYTES:
        raise ValueError(
            f"bitsandbytes: {name} must have at most {MAX_STATE_BYTES} bytes, got {text.numel()}"
        )
    return parse_json_object(bytes(text.tolist()), f"bitsandbytes: {name}")


def _entry(entries: Mapping[str, Any], name: str) -> Any:
    if name not in entries:
        raise ValueError(f"bitsandbytes: needs {name}, got {', '.join(entries)}")
    return entries[name]


def _absmax(entries: Mapping[str, Any], info: Mapping[str, Any], blocks: int) -> Tensor:
    absmax = _entry(entries, "absmax")
    if "nested_absmax" not in entries:
        return check_float("bitsandbytes: absmax", absmax, shape=(blocks,)).float()
    absmax = check_tensor("bitsandbytes: absmax", absmax, torch.uint8, shape=(blocks,))
    size = check_int("bitsandbytes: nested_blocksize", info.get("nested_blocksize"), low=1)
    offset = check_number("bitsandbytes: nested_offset", info.get("nested_offset"))
    outer = check_tensor(
        "bitsandbytes: nested_absmax",
        entries["nested_absmax"],
        torch.float32,
        shape=(-(-blocks // size),),
    )
    table = check_tensor(
        "bitsandbytes: nested_quant_map",
        _entry(entries, "nested_quant_map"),
        torch.float32,
        shape=(256,),
    )
    block = torch.arange(blocks, device=outer.device) // min(size, blocks)
    values = table[absmax.to(torch.int32)] * outer[block]
    return values + torch.tensor(offset, dtype=torch.float32, device=values.device)


def _bytes(weight: Tensor, n: int, k: int) -> Tensor:
    if not isinstance(weight, Tensor):
        raise TypeError(f"bitsandbytes: weight must be a tensor, got {type(weight).__name__}")
    flat = weight.detach().contiguous().flatten().view(torch.uint8)
    if flat.numel() * 2 != n * k:
        raise ValueError(
            f"bitsandbytes: weight of shape {[n, k]} must be {n * k // 2} bytes, got {flat.numel()}"
        )
    return flat.view(n, -1)


def _renumber(packed: Tensor, order: Tensor) -> Tensor:
    """Replaces codes by their rank in the sorted table, a byte of two codes at a time."""
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    pairs = torch.arange(256, device=packed.device, dtype=torch.uint8)[:, None]
    pairs = pack(rank.to(packed.device)[unpack(pairs, BITS, 2).to(torch.int64)], BITS)  # [256, 1]
    return pairs.view(-1)[packed.to(torch.int32)]
