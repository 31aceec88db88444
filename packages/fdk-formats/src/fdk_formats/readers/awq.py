"""AWQ tensors (the GEMM layout): 4-bit codes, eight shuffled outputs to an int32 word."""

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from fdk_formats.readers.checkpoint import Checkpoint
from fdk_formats.readers.conversion import affine_weight, check_float, check_tensor
from fdk_formats.tensor import QuantisedTensor

BITS = 4
# Nibble j of a word (from the least significant) is output NIBBLE_OUTPUTS[j] of its eight.
NIBBLE_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)


def read_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> QuantisedTensor:
    """One weight as AutoAWQ's GEMM version stores it: ``W_hat = (code - zero) * scale``.

        qweight :: [k, n/8, int32]     eight outputs a word, nibbles in the order 0 2 4 6 1 3 5 7
        qzeros  :: [k/G, n/8, int32]   likewise
        scales  :: [k/G, n, fp16]      or bf16 or fp32

    Raises:
        TypeError, ValueError: for dtypes and shapes that are not as above.
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
    """An AWQ folder: ``<name>.weight`` for each weight, other tensors as they are.

    ``quantization_config`` in ``config.json`` (or ``quant_config.json``), where there is one, must
    say 4 bits and version ``gemm``.

    Raises:
        FileNotFoundError, ValueError: for a file or tensor that is missing, or another version.
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
    """``[r, n/8, int32]`` to ``[r, n, uint8]``."""
    codes = words.new_empty((*words.shape, 8), dtype=torch.uint8)
    for nibble, output in enumerate(NIBBLE_OUTPUTS):
        codes[..., output] = (words >> 4 * nibble & 0xF).to(torch.uint8)
    return codes.view(len(words), -1)
