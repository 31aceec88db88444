"""1-Bit-Wonder checkpoints: k-means codes in canonical packing, one table, bf16 scales."""

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from fdk_formats.format import Format
from fdk_formats.readers.checkpoint import Checkpoint
from fdk_formats.readers.conversion import FLOAT_NAMES, check_float, check_tensor
from fdk_formats.tensor import QuantisedTensor

CONFIG = "quantization_config.json"
SCALE_RULES = ("absmax", "absmean", "rms")


def read_one_bit_wonder(
    weight_packed: Tensor, scales: Tensor, centroids: Tensor, *, relative_scale: str
) -> QuantisedTensor:
    """Reads a weight of a 1-Bit-Wonder checkpoint, whose packed bytes are canonical.

    The number of centroids gives the bits b, the bytes give k and the scales give G.

    Args:
        weight_packed: ``[n, k*b/8, uint8]``, b = 1, 2, 4 or 8.
        scales: ``[n, k/G]`` in bf16, fp16 or fp32.
        centroids: ``[2^b, fp32]``, ascending.
        relative_scale: the rule of the scales: ``absmax``, ``absmean`` or ``rms``.

    Raises:
        TypeError: if a tensor has another dtype.
        ValueError: if a shape, a value or the rule is not as above.
    """
    where = "1-Bit-Wonder: "
    packed = check_tensor(where + "weight_packed", weight_packed, torch.uint8, shape=(None, None))
    n, width = packed.shape
    scales = check_float(where + "scales", scales, shape=(n, None))
    centroids = check_tensor(where + "centroids", centroids, torch.float32, shape=(None,))
    bits = {2: 1, 4: 2, 16: 4, 256: 8}.get(len(centroids))
    if bits is None:
        raise ValueError(f"{where}centroids must be 2, 4, 16 or 256, got {len(centroids)}")
    if relative_scale not in SCALE_RULES:
        raise ValueError(
            f"{where}relative_scale must be {', '.join(SCALE_RULES)}, got {relative_scale!r}"
        )
    k, groups = width * 8 // bits, scales.shape[1]
    if groups == 0 or k % groups:
        raise ValueError(f"{where}scales must divide the k={k} weights of a row, got {groups}")
    format = Format(
        codebook="kmeans",
        bits=bits,
        group_size=k // groups,
        scale_rule=relative_scale,
        scale_dtype=FLOAT_NAMES[scales.dtype],
    )
    weight = QuantisedTensor(
        format=format, shape=(n, k), packed=packed, scale=scales, codebook=centroids
    )
    weight.check_values("1-Bit-Wonder")
    return weight


def load_one_bit_wonder(folder: str | os.PathLike[str]) -> dict[str, QuantisedTensor | Tensor]:
    """Loads a 1-Bit-Wonder folder: ``<name>.weight`` per quantised weight, others unchanged.

    ``quantization_config.json`` (or ``quantization_config`` in ``config.json``) must have
    ``relative_scale``; its ``bits`` and ``block_size`` must agree with the tensors.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a tensor or entry is missing or malformed.
    """
    checkpoint = Checkpoint(folder)
    config = checkpoint.config(CONFIG) or checkpoint.config("config.json", "quantization_config")
    if "relative_scale" not in config:
        raise ValueError(f"{checkpoint.folder}: {CONFIG} must name the relative_scale")

    def read(tensors: Mapping[str, Tensor]) -> dict[str, QuantisedTensor]:
        weight = read_one_bit_wonder(
            tensors["weight_packed"],
            tensors["scales"],
            tensors["centroids"],
            relative_scale=config["relative_scale"],
        )
        found = {"bits": weight.format.bits, "block_size": weight.group_size}
        for key, value in found.items():
            if config.get(key, value) != value:
                raise ValueError(f"{CONFIG} has {key} {config[key]}, the tensors {value}")
        return {"weight": weight}

    return checkpoint.read_weights(".weight_packed", read)
