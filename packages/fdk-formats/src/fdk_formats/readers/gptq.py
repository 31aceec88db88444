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
    """One weight as AutoGPTQ and GPTQModel store it: ``W_hat = (code - zero) * scale``.

        qweight :: [k*b/32, n, int32]     code i of a column at bit b*i of the column
        qzeros  :: [k/G, n*b/32, int32]   likewise along a row; format gptq holds zero - 1
        scales  :: [k/G, n, fp16]         or bf16 or fp32
        g_idx   :: [k, int32]             the group of each input, or None for i // G

    ``bits`` is 2, 3, 4 or 8. ``checkpoint_format`` is ``gptq`` or ``gptq_v2``, which holds the
    zero itself. A stored 2^b - 1 in format gptq has two readings: kernels that add 1 and keep
    the sum read 2^b, kernels that wrap it (AutoGPTQ from 0.5 on) read 0. ``wrap_zeros`` says
    which; it is asked for only where such a zero occurs.

    Raises:
        TypeError, ValueError: for dtypes and shapes that are not as above, a ``g_idx`` of another
            order (act-order: its groups are no runs along k, so no format of ours holds them),
            or an ambiguous zero where ``wrap_zeros`` is None.
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
    """A GPTQ folder: ``<name>.weight`` for each weight, other tensors as they are.

    Bits and the checkpoint format are those of ``quantization_config`` in ``config.json``, or of
    ``quantize_config.json``.

    Raises:
        FileNotFoundError, ValueError: for a file or tensor that is missing or not as ``read_gptq``
            wants it, and for layers with bits of their own (``dynamic``).
    """
    checkpoint = Checkpoint(folder)
    config = checkpoint.config("config.json", "quantization_config")
    config = config or checkpoint.config("quantize_config.json")
    if "bits" not in config:
        raise ValueError(f"{checkpoint.folder}: quantization_config must name the bits")
    if config.get("dynamic"):
        raise ValueError(f"{checkpoint.folder}: layers with bits of their own (dynamic) not read")

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
