"""Llamas of transformers with random weights, each layer made on the device in its own format."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from fdk_bench.cases import BITSANDBYTES, DTYPES, random_weight
from fdk_bench.models import NF4_BITS, Built, ModelCase, check_layer, nf4_layer
from fdk_formats import Format, QuantisedLinear
from fdk_formats.fuse import fuse_layers, rows_of
from fdk_formats.packed_module import link_layers

NORM_EPS = 1e-5
ROTARY_BASE = 500_000.0
MOST_POSITIONS = 131_072


@dataclass(frozen=True)
class LlamaSize:
    """Sizes of a llama; a head has ``dim / heads`` channels."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int = 128_256

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.dim // self.heads

    @property
    def linear_parameters(self) -> int:
        """Weights of the linear layers of all blocks."""
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * self.head_dim
        return self.layers * (attention + 3 * self.dim * self.ffn)

    @property
    def parameters(self) -> int:
        """Total number of weights: blocks, embedding, output head and norms."""
        norms = (2 * self.layers + 1) * self.dim
        return self.linear_parameters + 2 * self.vocabulary * self.dim + norms


# 4b, 12b and 31b have the shapes of 1-Bit-Wonder's models (arXiv 2602.15563); 1b those of
# Llama 3.2 1B, with an output head that is not tied to the embedding; 8b those of Llama 3.1 8B.
SIZES = {
    "tiny": LlamaSize(128, 2, 4, 2, 256, vocabulary=512),
    "1b": LlamaSize(2048, 16, 32, 8, 8192),
    "4b": LlamaSize(3072, 24, 24, 8, 11264),
    "8b": LlamaSize(4096, 32, 32, 8, 14336),
    "12b": LlamaSize(4096, 48, 32, 8, 14336),
    "31b": LlamaSize(6144, 60, 48, 8, 21504),
}


def llama_config(size: LlamaSize, **settings: Any) -> Any:
    """Return the ``LlamaConfig`` of transformers for a size, with other settings."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.dim,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        rms_norm_eps=NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROTARY_BASE},
        **settings,
    )


def empty_llama(size: LlamaSize, dtype: torch.dtype, device: str) -> Any:
    """Return a llama of transformers whose linear layers are on meta; the rest is on the device."""
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = llama_config(
        size,
        max_position_embeddings=MOST_POSITIONS,
        tie_word_embeddings=False,
        dtype=dtype,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
        model.to(dtype)
    table = torch.randn(size.vocabulary, size.dim, device=device, dtype=dtype)
    model.model.embed_tokens.weight = nn.Parameter(table)
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.weight = nn.Parameter(torch.ones(size.dim, device=device, dtype=dtype))
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
    return model.eval().requires_grad_(False)


def build_llama(case: ModelCase, batches: Sequence[int]) -> Built:
    """Make a llama of a case.

    The first layer of each shape is checked for every batch size.

    Raises:
        ValueError: where nothing is quantised.
        WrongAnswerError: where a layer does not compute with its own weight.
    """
    dtype = DTYPES[case.dtype]
    is_dense = case.format in DTYPES or case.format == BITSANDBYTES
    format = None if is_dense else Format.parse(case.format)
    size = SIZES[case.model]
    if case.layers is not None:
        size = replace(size, layers=case.layers)
    model = empty_llama(size, dtype, case.device)
    weight_bytes, code_bits, coded_weights = 0, 0.0, 0
    backends: set[str] = set()
    checked: set[tuple[int, int]] = set()

    def dense(name: str, n: int, k: int) -> nn.Module:
        nonlocal weight_bytes
        layer = nn.Linear(k, n, bias=False, device="meta")
        W = torch.empty(n, k, device=case.device, dtype=dtype).normal_(std=k**-0.5)
        layer.weight = nn.Parameter(W, requires_grad=False)
        if case.format == BITSANDBYTES and not re.search(case.skip or "$^", name):
            layer = nf4_layer(layer)
        weight_bytes += layer.weight.nbytes
        return layer

    def quantised(names: Sequence[str], sizes: Sequence[int], k: int) -> list[nn.Module]:
        """Make layers of one input, with one codebook if they are to be one product."""
        nonlocal weight_bytes, code_bits, coded_weights
        assert format is not None
        whole = random_weight(format, sum(sizes), k, case.device, seed=weight_bytes % 2**31)
        spans = list(pairwise(accumulate(sizes, initial=0)))
        parts = [whole] if len(spans) == 1 else [rows_of(whole, *span) for span in spans]
        layers = []
        for q in parts:
            layer = QuantisedLinear.from_quantised(q, backend=case.backend, dtype=dtype)
            if q.shape not in checked:
                checked.add(q.shape)
                check_layer(layer, q, case, batches)
            layers.append(layer)
            backends.add(layer.backend_name)
        weight_bytes += whole.nbytes
        code_bits += whole.bits_per_weight * sum(sizes) * k
        coded_weights += sum(sizes) * k
        return list(layers)

    for group in groups_of(model, fused=case.fused):
        sources = [model.get_submodule(name) for name in group]
        ns, k = [source.out_features for source in sources], sources[0].in_features
        skipped = bool(case.skip and re.search(case.skip, group[0]))
        if format is None or skipped:
            made = [dense(name, n, k) for name, n in zip(group, ns, strict=True)]
        else:
            made = quantised(group, ns, k)
        for name, layer in zip(group, made, strict=True):
            model.set_submodule(name, layer)
    link_layers(model)
    if format is not None and not backends:
        raise ValueError(f"{case.model}: wanted layers to quantise, but --skip leaves none")
    if case.fused:
        fuse_layers(model)
    weight_bytes += (2 * size.layers + 1) * size.dim * dtype.itemsize  # norms
    bits = code_bits / coded_weights if coded_weights else dtype.itemsize * 8
    others = "torch"
    if case.format == BITSANDBYTES:
        bits, others = NF4_BITS, "bitsandbytes"
    return Built(
        model=model,
        weight_bytes=weight_bytes,
        stored_bytes=weight_bytes + model.model.embed_tokens.weight.nbytes,
        parameters=size.parameters,
        bits_per_weight=bits,
        backends=", ".join(sorted(backends)) or others,
    )


def groups_of(model: Any, *, fused: bool) -> list[tuple[str, ...]]:
    """Return the names of the linear layers, those of one input together if they are fused."""
    groups: list[tuple[str, ...]] = []
    for i in range(len(model.model.layers)):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        qkv = tuple(f"{attention}.{name}_proj" for name in "qkv")
        gate_up = (f"{mlp}.gate_proj", f"{mlp}.up_proj")
        for group in (qkv, (f"{attention}.o_proj",), gate_up, (f"{mlp}.down_proj",)):
            groups += [group] if fused else [(name,) for name in group]
    return [*groups, ("lm_head",)]
