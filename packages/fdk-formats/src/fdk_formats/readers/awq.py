"""AWQ tensors: 4-bit codes in the layouts of AutoAWQ's GEMM, GEMV and GEMVFast kernels."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fdk_formats.readers.checkpoint import Checkpoint, Reader
from fdk_formats.readers.conversion import (
    affine_weight,
    check_float,
    check_tensor,
    unpack_words,
)
from fdk_formats.tensor import QuantisedTensor

BITS = 4
PER_WORD = 8
VERSIONS = ("gemm", "gemv", "gemv_fast")
# Nibble j of a word of GEMM, from the least significant, is output NIBBLE_OUTPUTS[j] of the eight.
NIBBLE_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
# GEMV pads the zero points of a row to a multiple of this many words, by the group size.
PADDING_WORDS = {32: 4, 64: 2}
UNPADDED_GROUP_SIZE = 128
# GEMVFast interleaves this many outputs, in runs of this many inputs.
INTERLEAVED, RUN = 4, 64


def read_awq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    *,
    version: str = "gemm",
    group_size: int | None = None,
) -> QuantisedTensor:
    """Reads a weight of AutoAWQ: ``W_hat = (code - zero) * scale``.

    The three versions hold the same weights in different layouts. Scales are fp16, bf16 or fp32.
    GEMVFast stores ``-zero * scale`` rounded to the dtype of scale, of which the integer zero is
    recovered: the result is that of the GEMM version of the model.

    Args:
        qweight: ``gemm``: ``[k, n/8, int32]``, eight outputs per word, nibbles in the order
            0 2 4 6 1 3 5 7. ``gemv``: ``[n, k/8, int32]``, nibbles in order. ``gemv_fast``:
            ``[n/4, k, int16]``, interleaved.
        qzeros: ``gemm``: ``[k/G, n/8, int32]``. ``gemv``: ``[n, words, int32]``. ``gemv_fast``:
            like the scales.
        scales: ``gemm``: ``[k/G, n]``. ``gemv``: ``[n, 8 * words]``. ``gemv_fast``:
            ``[8 * words, n]``. Both have padding after the first k/G.
        version: ``gemm``, ``gemv`` or ``gemv_fast``.
        group_size: G, or -1 for k. The tensors of ``gemm`` say it, and must agree if it is given;
            the other versions need it.

    Raises:
        TypeError: if a tensor has another dtype.
        ValueError: if a shape does not fit, or a zero of GEMVFast is not an integer of 4 bits.
    """
    if version not in VERSIONS:
        raise ValueError(f"AWQ: version must be {', '.join(VERSIONS)}, got {version!r}")
    whole = type(group_size) is int and (group_size == -1 or group_size > 0)
    if group_size is not None and not whole:
        raise ValueError(f"AWQ: group_size must be 1 or more, or -1 for k, got {group_size!r}")
    if version == "gemm":
        return _read_gemm(qweight, qzeros, scales, group_size)
    if group_size is None:
        raise ValueError(f"AWQ: version {version} pads its groups and needs group_size, got None")
    read = _read_gemv if version == "gemv" else _read_gemv_fast
    return read(qweight, qzeros, scales, group_size)


def load_awq(folder: str | os.PathLike[str]) -> dict[str, QuantisedTensor | Tensor]:
    """Loads an AWQ folder: ``<name>.weight`` per quantised weight, other tensors unchanged.

    ``quantization_config`` in ``config.json`` (or ``quant_config.json``), if present, must have
    4 bits, a version that ``read_awq`` knows, and the group size of the tensors.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a tensor is missing or malformed, or the configuration is another one.
    """
    checkpoint = Checkpoint(folder)
    config = checkpoint.config("config.json", "quantization_config")
    config = config or checkpoint.config("quant_config.json")
    try:
        read = weight_reader(config)
    except ValueError as error:
        raise ValueError(f"{checkpoint.folder}: {error}") from error
    return checkpoint.read_weights(".qweight", read)


def weight_reader(config: Mapping[str, Any]) -> Reader:
    """Makes the function that converts the tensors of one weight, see ``Checkpoint.read_weights``.

    Args:
        config: ``quantization_config`` of ``config.json``, or ``quant_config.json``.

    Raises:
        ValueError: if it is another configuration than ``load_awq`` wants.
    """
    bits = config.get("bits", config.get("w_bit", BITS))
    version = str(config.get("version", "gemm")).lower()
    method = config.get("quant_method", "awq")
    if bits != BITS or version not in VERSIONS or method != "awq":
        raise ValueError(
            f"AWQ must be quant_method awq, {BITS} bits and version "
            f"{', '.join(VERSIONS)}, got {method!r}, {bits!r} bits and version {version}"
        )
    if config.get("zero_point") is False:
        raise ValueError("AWQ must have zero_point true, got false")
    group_size = config.get("group_size", config.get("q_group_size"))

    def read(tensors: Mapping[str, Tensor]) -> dict[str, QuantisedTensor]:
        parts = (tensors["qweight"], tensors["qzeros"], tensors["scales"])
        return {"weight": read_awq(*parts, version=version, group_size=group_size)}

    return read


def _read_gemm(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, group_size: int | None
) -> QuantisedTensor:
    scales = check_float("AWQ: scales", scales, shape=(None, None))
    groups, n = scales.shape
    if n == 0 or n % PER_WORD or groups == 0:
        raise ValueError(f"AWQ: scales must be [k/G, a multiple of 8], got {[groups, n]}")
    qzeros = check_tensor("AWQ: qzeros", qzeros, torch.int32, shape=(groups, n // PER_WORD))
    qweight = check_tensor("AWQ: qweight", qweight, torch.int32, shape=(None, n // PER_WORD))
    k = len(qweight)
    if k == 0 or k % groups:
        raise ValueError(f"AWQ: qweight has k={k} rows, which {groups} groups do not divide")
    if group_size is not None and (k if group_size == -1 else group_size) * groups != k:
        raise ValueError(f"AWQ: group_size is {group_size}, the tensors have {k // groups}")
    return affine_weight(
        "AWQ",
        _unpack(qweight).T,
        bits=BITS,
        group_size=k // groups,
        scale=scales.T,
        zero_point=_unpack(qzeros).T,
    )


def _read_gemv(qweight: Tensor, qzeros: Tensor, scales: Tensor, group_size: int) -> QuantisedTensor:
    qweight = check_tensor("AWQ: qweight", qweight, torch.int32, shape=(None, None))
    n, k = len(qweight), qweight.shape[1] * PER_WORD
    size, groups, words = _padded(n, k, group_size)
    qzeros = check_tensor("AWQ: qzeros", qzeros, torch.int32, shape=(n, words))
    scales = check_float("AWQ: scales", scales, shape=(n, words * PER_WORD))
    return affine_weight(
        "AWQ",
        unpack_words(qweight.T.contiguous(), BITS).T,
        bits=BITS,
        group_size=size,
        scale=scales[:, :groups],
        zero_point=unpack_words(qzeros.T.contiguous(), BITS).T[:, :groups],
    )


def _read_gemv_fast(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, group_size: int
) -> QuantisedTensor:
    qweight = check_tensor("AWQ: qweight", qweight, torch.int16, shape=(None, None))
    n, k = len(qweight) * INTERLEAVED, qweight.shape[1]
    if k % RUN:
        raise ValueError(f"AWQ: qweight must have a multiple of {RUN} columns, got {k}")
    size, groups, words = _padded(n, k, group_size)
    scales = check_float("AWQ: scales", scales, shape=(words * PER_WORD, n))
    qzeros = check_tensor("AWQ: qzeros", qzeros, scales.dtype, shape=(words * PER_WORD, n))
    scales, qzeros = scales[:groups].T, qzeros[:groups].T
    zeros = torch.nan_to_num(-qzeros.float() / scales.float(), nan=0.0).round().clamp(0, 15)
    wrong = int(((-scales.float() * zeros).to(scales.dtype) != qzeros).sum())
    if wrong:
        raise ValueError(
            f"AWQ: qzeros of gemv_fast must be -zero * scale for a zero of 0 to 15, got {wrong} "
            "that are not"
        )
    shifts = torch.arange(0, 16, BITS, dtype=torch.int16, device=qweight.device)
    nibbles = (qweight[..., None] >> shifts & 0xF).to(torch.uint8)  # [n/4, k, 4]
    rows = nibbles.view(len(qweight), k // RUN, INTERLEAVED, RUN).transpose(1, 2)
    # In each 32 inputs, the packer moved pair p of four runs of eight together, then even inputs
    # of each eight before odd ones. Undo both.
    codes = rows.reshape(n, k // 32, 4, 2, 4).transpose(3, 4)
    codes = codes.reshape(n, k // 32, 4, 4, 2).transpose(2, 3)
    return affine_weight(
        "AWQ",
        codes.reshape(n, k),
        bits=BITS,
        group_size=size,
        scale=scales,
        zero_point=zeros.to(torch.uint8),
    )


def _padded(n: int, k: int, group_size: int) -> tuple[int, int, int]:
    """Returns group size, groups of a row and the words of its padded zero points."""
    size = k if group_size == -1 else group_size
    if n == 0 or k == 0 or k % size:
        raise ValueError(f"AWQ: group_size must divide k={k}, got {group_size}, for n={n} outputs")
    if size not in PADDING_WORDS and size < UNPADDED_GROUP_SIZE:
        raise ValueError(f"AWQ: group_size must be 32, 64 or from 128 on, got {size}")
    words, step = -(-(k // size) // PER_WORD), PADDING_WORDS.get(size, 1)
    return size, k // size, -(-words // step) * step


def _unpack(words: Tensor) -> Tensor:
    """Unpacks ``[r, n/8, int32]`` of GEMM to ``[r, n, uint8]``."""
    codes = words.new_empty((*words.shape, PER_WORD), dtype=torch.uint8)
    for nibble, output in enumerate(NIBBLE_OUTPUTS):
        codes[..., output] = (words >> 4 * nibble & 0xF).to(torch.uint8)
    return codes.flatten(1)
