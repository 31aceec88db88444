"""GGUF files of llama.cpp: block-quantised weights under GGUF's or Hugging Face's names."""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from fdk_formats.readers.gguf_blocks import BLOCK_TYPES
from fdk_formats.readers.gguf_file import GgufTensor, read_header
from fdk_formats.tensor import QuantisedTensor
from fdk_formats.untrusted import check_int, open_regular

PLAIN_TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
# Architectures whose tensors have the names below. convert_hf_to_gguf.py permutes the rows of q
# and k of llama (and of Mistral, which it calls llama too).
ARCHITECTURES = ("llama", "qwen2", "qwen3")
PERMUTED_ARCHITECTURES = ("llama",)
MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EMBEDDING = "token_embd.weight"
# Frequencies that the model computes from its configuration.
COMPUTED = "rope_freqs.weight"


def load_gguf(
    path: str | os.PathLike[str], *, hf_names: bool = True, dequantise: torch.dtype | None = None
) -> dict[str, QuantisedTensor | Tensor]:
    """Loads a GGUF file: quantised weights, and tensors in 16 or 32 bits unchanged.

    Q4_0, Q5_0, Q8_0, Q3_K, Q6_K, IQ4_NL, IQ4_XS and MXFP4 become formats with exactly ggml's
    values, see ``gguf_blocks``. Q4_1, Q5_1, Q2_K, Q4_K and Q5_K are ``scale * q - minimum`` there
    and ``(q - minimum / scale) * scale`` here, all in float32: the two differ by at most
    ``2^-22 * (|scale * q| + |minimum|)``, less than a thousandth of a rounding to 16 bits.

    Args:
        path: the file, of version 2 or 3.
        hf_names: rename the tensors of llama, Mistral, Qwen2 and Qwen3 as transformers does,
            restore the order of llama's q and k rows, return the embedding dequantised, and leave
            out ``rope_freqs.weight``. False keeps names, order and quantisation of the file.
        dequantise: dtype of tensors that no format holds, and of the embedding. None refuses
            the former and makes the latter float32.

    Returns:
        Weights and tensors by name, for ``load_model``.

    Raises:
        ValueError: if the file is truncated or malformed or no file, or a tensor has another type.
        TypeError: if ``dequantise`` is not a floating dtype.
        FileNotFoundError: if the file does not exist.
        ImportError: if a tensor of another type is to be dequantised without the package gguf.

    Example:
        >>> config = AutoConfig.from_pretrained("folder", gguf_file="model.gguf")
        >>> with parameters_on_meta():
        ...     skeleton = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        >>> model = load_model(load_gguf("folder/model.gguf"), skeleton)
    """
    with open_regular(path) as file:
        try:
            return read_gguf(file, hf_names=hf_names, dequantise=dequantise)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error


def read_gguf(
    file: BinaryIO, *, hf_names: bool = True, dequantise: torch.dtype | None = None
) -> dict[str, QuantisedTensor | Tensor]:
    """Reads an open GGUF file, see ``load_gguf``."""
    if dequantise is not None and not dequantise.is_floating_point:
        raise TypeError(f"GGUF: dequantise must be a floating dtype or None, got {dequantise}")
    header = read_header(file)
    renamed = _Renamer(header.metadata) if hf_names else None
    tensors: dict[str, QuantisedTensor | Tensor] = {}
    for info in header.tensors:
        if renamed is None:
            tensors[info.name] = _read(file, info, dequantise)
        elif info.name != COMPUTED:
            is_embedding = info.name == EMBEDDING
            value = (
                _dequantised(file, info, dequantise or torch.float32)
                if is_embedding
                else _read(file, info, dequantise)
            )
            tensors[renamed.name(info.name)] = renamed.rows(info.name, value)
    return tensors


def _read(
    file: BinaryIO, info: GgufTensor, dequantise: torch.dtype | None
) -> QuantisedTensor | Tensor:
    if info.type in PLAIN_TYPES:
        return info.read(file).view(PLAIN_TYPES[info.type]).view(info.shape)
    block_type = BLOCK_TYPES.get(info.type)
    if block_type is not None and len(info.shape) == 2:
        try:
            return block_type.quantised(info.read(file), *info.shape)
        except ValueError as error:
            raise ValueError(f"{info.name}: {error}") from error
    if dequantise is not None:
        return _dequantised(file, info, dequantise)
    reason = (
        f"is {info.type}, which no format holds ({', '.join(BLOCK_TYPES)} have one)"
        if block_type is None
        else f"has {len(info.shape)} dimensions, and a quantised weight has 2"
    )
    raise ValueError(
        f"{info.name} {reason}: dequantise=torch.bfloat16 returns such tensors in 16 bits"
    )


def _dequantised(file: BinaryIO, info: GgufTensor, dtype: torch.dtype) -> Tensor:
    data = info.read(file)
    if info.type in PLAIN_TYPES:
        return data.view(PLAIN_TYPES[info.type]).view(info.shape).to(dtype)
    if info.type in BLOCK_TYPES:
        n, k = math.prod(info.shape[:-1]), info.shape[-1]
        return BLOCK_TYPES[info.type].dequantised(data, n, k, dtype).view(info.shape)
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError as error:
        raise ImportError(
            f"GGUF: {info.name} is {info.type}, which the package gguf dequantises: "
            "pip install gguf"
        ) from error
    try:
        rows = data.view(math.prod(info.shape[:-1]), -1).numpy()
        rows = quants.dequantize(rows, GGMLQuantizationType[info.type])
    except (KeyError, NotImplementedError) as error:
        raise ValueError(f"{info.name}: gguf does not dequantise {info.type}") from error
    return torch.from_numpy(np.ascontiguousarray(rows)).to(dtype).view(info.shape)


class _Renamer:
    """Hugging Face's names and order of rows for the tensors of a file."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.architecture = metadata.get("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"the architecture must be {', '.join(ARCHITECTURES)} for Hugging Face's names, "
                f"got {self.architecture!r}: hf_names=False keeps the names of the file"
            )
        self.metadata = metadata

    def name(self, name: str) -> str:
        """Returns Hugging Face's name of a tensor."""
        match = re.fullmatch(r"(?:blk\.(0|[1-9][0-9]*)\.)?([a-z_]+)\.(weight|bias)", name)
        layer, module, kind = match.groups() if match else (None, "", "")
        found = (MODULES if layer is None else LAYER_MODULES).get(module)
        if found is None:
            raise ValueError(
                f"{name} has no name in Hugging Face's {self.architecture} models: "
                "hf_names=False keeps the names of the file"
            )
        prefix = "" if layer is None else f"model.layers.{int(layer)}."
        return f"{prefix}{found}.{kind}"

    def rows(self, name: str, value: QuantisedTensor | Tensor) -> QuantisedTensor | Tensor:
        """Restores the order of the rows of q and k.

        ggml rotates neighbouring rows 2i and 2i + 1 of a head, transformers rows i and i + d/2.
        """
        match = re.fullmatch(r"blk\.([0-9]+)\.attn_([qk])\..*", name)
        if match is None or self.architecture not in PERMUTED_ARCHITECTURES:
            return value
        heads = self._heads(int(match[1]), match[2])
        n = value.shape[0]
        if n % (2 * heads):
            raise ValueError(f"{name} has {n} rows, which {heads} heads do not divide evenly")
        order = torch.arange(n).view(heads, -1, 2).transpose(1, 2).reshape(-1)
        if isinstance(value, Tensor):
            return value[order]
        moved = {field: tensor[order] for field, tensor in value.tensors().items()}
        if value.codebook is not None:
            moved["codebook"] = value.codebook
        return replace(value, **moved)  # type: ignore[arg-type]

    def _heads(self, layer: int, kind: str) -> int:
        key = f"{self.architecture}.attention.head_count"
        keys = [f"{key}_kv", key] if kind == "k" else [key]
        heads = next((self.metadata[key] for key in keys if key in self.metadata), None)
        if isinstance(heads, np.ndarray) and layer < len(heads):
            heads = heads[layer].item()
        return check_int(keys[0], heads, low=1)
