"""GPTQ tensors: codes in int32 words down k, zero points in int32 words along n.

A weight quantised in act-order (``desc_act``) has the groups of its inputs in ``g_idx``. Sorted by
group, its columns are those of a format; the permutation that sorts them applies to x.
"""

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
    word_rows,
)
from fdk_formats.tensor import QuantisedTensor

BITS = (2, 3, 4, 8)
CHECKPOINT_FORMATS = ("gptq", "gptq_v2")
# The tensor beside an act-order weight, [k, int32]: y = x[..., permutation] @ W_hat.T.
INPUT_PERMUTATION = "input_permutation"


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
        ValueError: if a shape does not fit; if ``g_idx`` has another order (act-order: see
            ``read_gptq_act_order``); if a zero is ambiguous and ``wrap_zeros`` is None.
    """
    weight, permutation = read_gptq_act_order(
        qweight,
        qzeros,
        scales,
        g_idx,
        bits=bits,
        checkpoint_format=checkpoint_format,
        wrap_zeros=wrap_zeros,
    )
    if permutation is not None:
        raise ValueError(
            f"GPTQ: g_idx must be i // {weight.group_size} (groups that are runs along k): this "
            "weight was quantised in act-order, which read_gptq_act_order reads, with a "
            "permutation of x"
        )
    return weight


def read_gptq_act_order(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
    *,
    bits: int,
    checkpoint_format: str = "gptq",
    wrap_zeros: bool | None = None,
) -> tuple[QuantisedTensor, Tensor | None]:
    """Reads a weight whose groups need not be runs along k.

    Args:
        qweight: see ``read_gptq``, as are the others.
        qzeros: zero points.
        scales: scales.
        g_idx: the group of each input, in any order; each group has k/G inputs.
        bits: width of a code.
        checkpoint_format: ``gptq`` or ``gptq_v2``.
        wrap_zeros: how to read an ambiguous zero.

    Returns:
        The weight with its columns sorted by group, and the permutation that sorted them,
        ``[k, int32]``: ``y = x[..., permutation] @ W_hat.T``. None if they were in order.

    Raises:
        TypeError: if a tensor has another dtype.
        ValueError: if a shape does not fit, groups have different sizes, or a zero is ambiguous.
    """
    if type(bits) is not int or bits not in BITS:
        raise ValueError(f"GPTQ: bits must be 2, 3, 4 or 8, got {bits!r}")
    if checkpoint_format not in CHECKPOINT_FORMATS:
        raise ValueError(
            f"GPTQ: checkpoint_format must be gptq or gptq_v2, got {checkpoint_format!r}: the "
            "layouts of kernels (marlin, bitblas, ...) are made from these two, and not read"
        )
    scales = check_float("GPTQ: scales", scales, shape=(None, None))
    groups, n = scales.shape
    if n == 0:
        raise ValueError("GPTQ: scales must have 1 output or more, got 0")
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
    permutation = None if g_idx is None else group_permutation(g_idx, k, groups)
    codes = unpack_words(qweight.contiguous(), bits).T
    if permutation is not None:
        codes = codes[:, permutation]
    zeros = unpack_words(qzeros.T.contiguous(), bits).to(torch.int32)  # [n, k/G]
    if checkpoint_format == "gptq":
        zeros = _add_one(zeros, bits, wrap_zeros)
    weight = affine_weight(
        "GPTQ",
        codes,
        bits=bits,
        group_size=k // groups,
        scale=scales.T,
        zero_point=zeros,
    )
    return weight, permutation


def group_permutation(g_idx: Tensor, k: int, groups: int) -> Tensor | None:
    """Returns the order of inputs that makes groups runs, ``[k, int32]``; None if they are.

    Inputs of one group keep their order.

    Args:
        g_idx: the group of each input, ``[k, int32 or int64]``.
        k: inputs.
        groups: groups of ``k / groups`` inputs each.

    Raises:
        TypeError: if ``g_idx`` has another dtype.
        ValueError: if it has another shape, or groups of another size.
    """
    g_idx = check_tensor("GPTQ: g_idx", g_idx, torch.int32, torch.int64, shape=(k,))
    sorted_groups, order = g_idx.sort(stable=True)
    wanted = torch.arange(k, device=g_idx.device) // (k // groups)
    wrong = (sorted_groups != wanted).nonzero()
    if len(wrong):
        raise ValueError(
            f"GPTQ: g_idx must have each of 0 to {groups - 1} {k // groups} times, and sorted it "
            f"has {int(sorted_groups[wrong[0]])} at {int(wrong[0])}"
        )
    return None if torch.equal(g_idx, sorted_groups) else order.to(torch.int32)


def load_gptq(
    folder: str | os.PathLike[str], *, wrap_zeros: bool | None = None
) -> dict[str, QuantisedTensor | Tensor]:
    """Loads a GPTQ folder: ``<name>.weight`` per quantised weight, other tensors unchanged.

    Bits and checkpoint format come from ``quantization_config`` in ``config.json``, or from
    ``quantize_config.json``; what else these say must agree with the tensors. Layers may have
    settings of their own (``dynamic`` of GPTQModel). A layer quantised in act-order
    (``desc_act``) also has ``<name>.input_permutation``, see ``read_gptq_act_order``.

    Args:
        folder: the folder.
        wrap_zeros: see ``read_gptq``.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a tensor is missing or malformed, the configuration is not of GPTQ or
            contradicts the tensors, or the checkpoint is in the layout of a kernel.
    """
    checkpoint = Checkpoint(folder)
    config = checkpoint.config("config.json", "quantization_config")
    config = config or checkpoint.config("quantize_config.json")
    try:
        read = weight_reader(config, wrap_zeros=wrap_zeros)
    except ValueError as error:
        raise ValueError(f"{checkpoint.folder}: {error}") from error
    return checkpoint.read_weights(".qweight", read)


def weight_reader(config: Mapping[str, Any], *, wrap_zeros: bool | None = None) -> Reader:
    """Makes the function that converts the tensors of one weight, see ``Checkpoint.read_weights``.

    Args:
        config: ``quantization_config`` of ``config.json``, or ``quantize_config.json``.
        wrap_zeros: see ``read_gptq``.

    Raises:
        ValueError: if the configuration is not of GPTQ, or of the layout of a kernel.
    """
    settings = _settings(config)

    def read(tensors: Mapping[str, Tensor]) -> dict[str, QuantisedTensor | Tensor]:
        names = ("qweight", "qzeros", "scales")
        parts = {name: tensors[name] for name in names}
        g_idx = tensors.get("g_idx")
        weight, permutation = read_gptq_act_order(
            **parts,
            g_idx=g_idx,
            bits=_bits(settings, parts),
            checkpoint_format=settings[0]["checkpoint_format"],
            wrap_zeros=wrap_zeros,
        )
        in_order = None if g_idx is None else permutation is None
        contradictions = [_contradiction(setting, weight, in_order) for setting in settings]
        if all(contradictions):
            raise ValueError(f"GPTQ: {contradictions[0]}")
        found: dict[str, QuantisedTensor | Tensor] = {"weight": weight}
        return found if permutation is None else found | {INPUT_PERMUTATION: permutation}

    return read


def _settings(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the settings of the configuration, and those of layers that have their own.

    The keys of ``dynamic`` are regular expressions for names of layers. They are not evaluated: a
    hostile one would not end, and the tensors say which settings a layer has.
    """
    if "bits" not in config:
        raise ValueError("GPTQ: quantization_config must name the bits")
    method = config.get("quant_method", config.get("method", "gptq"))
    if method != "gptq":
        raise ValueError(f"GPTQ: quant_method must be gptq, got {method!r}")
    names = ("checkpoint_format", "format")
    formats = [config[name] for name in names if config.get(name) is not None] or ["gptq"]
    if config.get("is_marlin_format"):
        formats = ["marlin"]
    if formats[0] not in CHECKPOINT_FORMATS or formats[-1] != formats[0]:
        raise ValueError(
            f"GPTQ: checkpoint_format must be gptq or gptq_v2, got {', '.join(map(repr, formats))}"
        )
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise ValueError(f"GPTQ: dynamic must be an object, got {type(dynamic).__name__}")
    base = {"desc_act": None, "group_size": None, "sym": None} | dict(config)
    base["checkpoint_format"] = formats[0]
    settings = [base]
    for pattern, own in dynamic.items():
        if pattern.startswith("-:"):  # such layers are not quantised
            continue
        if not isinstance(own, dict):
            raise ValueError(f"GPTQ: dynamic[{pattern!r}] must be an object, got {own!r}")
        settings.append(base | own | {"checkpoint_format": formats[0]})
    return settings


def _bits(settings: list[dict[str, Any]], parts: Mapping[str, Tensor]) -> Any:
    """Returns the bits among the settings at which zero points fill their words."""
    scales, qzeros = parts["scales"], parts["qzeros"]
    if scales.ndim == qzeros.ndim == 2:
        for bits in [setting["bits"] for setting in settings]:
            if type(bits) is int and qzeros.shape[1] * 32 == scales.shape[1] * bits:
                return bits
    return settings[0]["bits"]


def _contradiction(
    setting: Mapping[str, Any], weight: QuantisedTensor, in_order: bool | None
) -> str | None:
    """Says what in a setting is not so in a weight; ``in_order`` is None without g_idx."""
    k = weight.shape[1]
    bits, size = weight.format.bits, weight.group_size
    if setting["bits"] != bits:
        return f"the configuration has bits {setting['bits']!r}, the tensors {bits}"
    wanted = setting["group_size"]
    if wanted is not None and (k if wanted == -1 else wanted) != size:
        return f"the configuration has group_size {wanted!r}, the tensors {size}"
    if setting["desc_act"] and in_order is None and size != k:
        return "desc_act is true and g_idx, the group of each input, is missing"
    if setting["desc_act"] is False and in_order is False:
        return "desc_act is false and g_idx is not in order"
    assert weight.zero_point is not None
    middle = 1 << bits - 1
    if setting["sym"] and (wrong := int((weight.zero_point != middle).sum())):
        return f"sym is true and {wrong} zero points are not {middle}"
    return None


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
