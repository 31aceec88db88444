"""GPTQ tensors: codes in int32 words down k, zero points in int32 words along n."""

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from fdk_formats.readers.checkpoint import Checkpoint
from fdk_formats.readers.conversion import (
    affine_weight,
    check_float,
    check_tensor,
    unpack_words,
    word_rows,
)
from fdk_formats.tensor import QuantisedTensor

BITS = (2, 3, 4, 8)
CHECKPOINT_FORMATS = ("gptq", "gptq_v2")


def read_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
    *,
    bits: int,
    checkpoint_format: str = "gptq",
    wrap_zeros: bool | None = None,
) -> QuantisedTensor:
    """Reads a weight of AutoGPTQ or GPTQModel: ``W_hat = (code - zero) * scale``.

    Args:
        qweight: ``[k*b/32, n, int32]``, code i of a column at bit b*i of the column.
        qzeros: ``[k/G, n*b/32, int32]``, likewise along a row. Format gptq stores zero - 1.
        scales: ``[k/G, n]`` in fp16, bf16 or fp32.
        g_idx: ``[k, int32]``, the group of each input; None is i // G.
        bits: b, which is 2, 3, 4 or 8.
        checkpoint_format: ``gptq``, or ``gptq_v2``, which stores the zero itself.
        wrap_zeros: how to read a stored 2^b - 1 in format gptq, if it occurs: True is 0 (AutoGPTQ
            from 0.5 on, whose kernels wrap the sum), False is 2^b.

    Raises:
        TypeError: if a tensor has another dtype.
        ValueError: if a shape does not fit; if ``g_idx`` has another order (act-order, whose groups
            no format represents); if a zero is ambiguous and ``wrap_zeros`` is None.
    """
    if type(bits) is not int or bits not in BITS:
        raise ValueError(f"GPTQ: bits must be 2, 3, 4 or 8, got {bits!r}")
    if checkpoint_format not in CHECKPOINT_FORMATS:
        raise ValueError(
            f"GPTQ: checkpoint_format must be gptq or gptq_v2, got {checkpoint_format!r}"
        )
    scales = check_float("GPTQ: scales", scales, shape=(None, None))
    groups, n = scales.shape
    qzeros = check_tensor(
        "GPTQ: qzeros", qzeros, torch.int32, shape=(groups, word_rows("GPTQ: n", bits, n))
    )
    qweight = check_tensor("GPTQ: qweight", qweight, torch.int32, shape=(None, n))
    k = len(qweight) * 32 // bits
    if k == 0 or word_rows("GPTQ: k", bits, k) != len(qweight) or groups == 0 or k % groups:
        raise ValueError(
            f"GPTQ: qweight of {len(qweight)} rows is k={k} at {bits} bits, "
            f"which the {groups} groups of scales do not divide"
        )
    _check_order(g_idx, k, k // groups)
    zeros = unpack_words(qzeros.T.contiguous(), bits).to(torch.int32)  # [n, k/G]
    if checkpoint_format == "gptq":
        zeros = _add_one(zeros, bits, wrap_zeros)
    return affine_weight(
        "GPTQ",
        unpack_words(qweight.contiguous(), bits).T,
        bits=bits,
        group_size=k // groups,
        scale=scales.T,
        zero_point=zeros,
    )


def load_gptq(
    folder: str | os.PathLike[str], *, wrap_zeros: bool | None = None
) -> dict[str, QuantisedTensor | Tensor]:
    """Loads a GPTQ folder: ``<name>.weight`` per quantised weight, other tensors unchanged.

    Bits and checkpoint format come from ``quantization_config`` in ``config.json``, or from
    ``quantize_config.json``.

    Args:
        folder: the folder.
        wrap_zeros: see ``read_gptq``.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a tensor is missing or malformed, or layers have different bits
            (``dynamic``).
    """
    checkpoint = Checkpoint(folder)
    config = checkpoint.config("config.json", "quantization_config")
    config = config or checkpoint.config("quantize_config.json")
    if "bits" not in config:
        raise ValueError(f"{checkpoint.folder}: quantization_config must name the bits")
    if config.get("dynamic"):
        raise ValueError(f"{checkpoint.folder}: layers with different bits (dynamic) not supported")

    def read(tensors: Mapping[str, Tensor]) -> QuantisedTensor:
        return read_gptq(
            tensors["qweight"],
            tensors["qzeros"],
            tensors["scales"],
            tensors.get("g_idx"),
            bits=config["bits"],
            checkpoint_format=config.get("checkpoint_format", "gptq"),
            wrap_zeros=wrap_zeros,
        )

    return checkpoint.read_weights(".qweight", read)


def _check_order(g_idx: Tensor | None, k: int, group_size: int) -> None:
    if g_idx is None:
        return
    g_idx = check_tensor("GPTQ: g_idx", g_idx, torch.int32, torch.int64, shape=(k,))
    wanted = torch.arange(k, device=g_idx.device) // group_size
    wrong = (g_idx != wanted).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(
            f"GPTQ: g_idx must be i // {group_size} (groups that are runs along k), got "
            f"{int(g_idx[at])} at {at}: a weight quantised in act-order keeps its inputs' own "
            "order here, and its groups cannot be held"
        )


def _add_one(zeros: Tensor, bits: int, wrap: bool | None) -> Tensor:
    top = (1 << bits) - 1
    ambiguous = int((zeros == top).sum())
    if ambiguous and wrap is None:
        raise ValueError(
            f"GPTQ: {ambiguous} stored zero points are {top}, which kernels read as 0 (the sum "
            f"with 1 wraps) or as {top + 1} (it does not): say wrap_zeros=True or False"
        )
    zeros = zeros + 1
    return zeros & top if wrap else zeros
