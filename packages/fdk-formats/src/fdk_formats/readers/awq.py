"""AWQ tensors (GEMM version): 4-bit codes, eight interleaved outputs in an int32 word."""

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from fdk_formats.readers.checkpoint import Checkpoint
from fdk_formats.readers.conversion import affine_weight, check_float, check_tensor
from fdk_formats.tensor import QuantisedTensor

BITS = 4
# Nibble j of a word, from the least significant, is output NIBBLE_OUTPUTS[j] of the eight.
NIBBLE_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)


def read_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> QuantisedTensor:
    """Reads a weight of AutoAWQ's GEMM version: ``W_hat = (code - zero) * scale``.

    Args:
        qweight: ``[k, n/8, int32]``, eight outputs per word, nibbles in the order 0 2 4 6 1 3 5 7.
        qzeros: ``[k/G, n/8, int32]``, likewise.
        scales: ``[k/G, n]`` in fp16, bf16 or fp32.

    Raises:
        TypeError: if a tensor has another dtype.
        ValueError: if a shape does not fit.
    """
    scales = check_float("AWQ: scales", scales, shape=(None, None))
    groups, n = scales.shape
    if n % 8 or groups == 0:
        raise ValueError(f"AWQ: scales must be [k/G, a multiple of 8], got {[groups, n]}")
    qzeros = check_tensor("AWQ: qzeros", qzeros, torch.int32, shape=(groups, n // 8))
    qweight = check_tensor("AWQ: qweight", qweight, torch.int32, shape=(None, n // 8))
    k = len(qweight)
    if k == 0 or k % groups:
        raise ValueError(f"AWQ: qweight has k={k} rows, which {groups} groups do not divide")
    return affine_weight(
        "AWQ",
        _unpack(qweight).T,
        bits=BITS,
        group_size=k // groups,
        scale=scales.T,
        zero_point=_unpack(qzeros).T,
    )


def load_awq(folder: str | os.PathLike[str]) -> dict[str, QuantisedTensor | Tensor]:
    """Loads an AWQ folder: ``<name>.weight`` per quantised weight, other tensors unchanged.

    ``quantization_config`` in ``config.json`` (or ``quant_config.json``), if present, must have
    4 bits and version ``gemm``.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a tensor is missing or malformed, or the version is another one.
    """
    checkpoint = Checkpoint(folder)
    config = checkpoint.config("config.json", "quantization_config")
    config = config or checkpoint.config("quant_config.json")
    bits = config.get("bits", config.get("w_bit", BITS))
    version = str(config.get("version", "gemm")).lower()
    if bits != BITS or version != "gemm":
        raise ValueError(
            f"{checkpoint.folder}: AWQ must be {BITS} bits and version gemm, "
            f"got {bits!r} bits and version {version}"
        )

    def read(tensors: Mapping[str, Tensor]) -> QuantisedTensor:
        return read_awq(tensors["qweight"], tensors["qzeros"], tensors["scales"])

    return checkpoint.read_weights(".qweight", read)


def _unpack(words: Tensor) -> Tensor:
    """Unpacks ``[r, n/8, int32]`` to ``[r, n, uint8]``."""
    codes = words.new_empty((*words.shape, 8), dtype=torch.uint8)
    for nibble, output in enumerate(NIBBLE_OUTPUTS):
        codes[..., output] = (words >> 4 * nibble & 0xF).to(torch.uint8)
    return codes.view(len(words), -1)
