"""Decoding steps of Llama, Mistral, Qwen2, Qwen3 and SmolLM with kernels between the layers.

The step calls the model's own linear layers, embedding and head, so adapters and layouts stay as
they are, and nothing is stored twice. It replaces what is between them by ``LlamaOps``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fdk_formats import QuantisedLinear
from fdk_formats.fuse import product_of, unrotated_layouts
from fdk_formats.rotation import rotate
from fdk_transformers.decode.llama_ops import HeadNorm, LlamaOps, TorchOps, TritonOps, has_kernels
from fdk_transformers.graph_step import GraphStep

MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Rotary embeddings whose table does not depend on the length of the prompt.
ROTARY = ("default", "linear", "llama3", "yarn")
MOST_HEADS, FEWEST_CHANNELS = 16, 16  # of the attention kernel: heads that share a key, channels
PROMPT_TOKENS = 8192  # of all sequences, in one pass


@dataclass(frozen=True, eq=False)
class Block:
    """The modules of one decoder layer.

    Attributes:
        qkv: projections of q, k and v.
        o, down: output projections of attention and MLP.
        gate_up: gate and up projections.
        attention_norm, mlp_norm: the RMSNorms.
        head_norm: norms of q and k, or None.
    """

    qkv: tuple[nn.Module, ...]
    o: nn.Module
    gate_up: tuple[nn.Module, ...]
    down: nn.Module
    attention_norm: Any
    mlp_norm: Any
    head_norm: tuple[Any, Any] | None

    @staticmethod
    def of(layer: Any) -> "Block":
        """Return the modules of a decoder layer of transformers."""
        attention, mlp = layer.self_attn, layer.mlp
        has_norm = hasattr(attention, "q_norm")
        return Block(
            qkv=(attention.q_proj, attention.k_proj, attention.v_proj),
            o=attention.o_proj,
            gate_up=(mlp.gate_proj, mlp.up_proj),
            down=mlp.down_proj,
            attention_norm=layer.input_layernorm,
            mlp_norm=layer.post_attention_layernorm,
            head_norm=(attention.q_norm, attention.k_norm) if has_norm else None,
        )


class LlamaStep(GraphStep):
    """A ``Step`` of a llama.

    Padding is moved behind the prompts, so sequences begin at position 0 and attention needs no
    mask.

    Args:
        model: a model of ``MODELS``.
        batch, max_length: see ``Step``.
        ops: the operations between the layers; None chooses.
    """

    def __init__(
        self,
        model: Any,
        batch: int,
        max_length: int,
        *,
        ops: LlamaOps | None = None,
    ) -> None:
        super().__init__(model.device, batch, max_length)
        config, body = model.config, model.model
        self.eps: float = config.rms_norm_eps
        self.embedding, self.head, self.norm = body.embed_tokens, model.lm_head, body.norm
        self.blocks = [Block.of(layer) for layer in body.layers[: config.num_hidden_layers]]
        kv_heads, head_dim = config.num_key_value_heads, body.layers[0].self_attn.head_dim
        if ops is None:
            crowded = not isinstance(self.blocks[0].o, QuantisedLinear)
            ops = TritonOps(crowded=crowded) if has_kernels(self.device) else TorchOps()
        self.ops = ops
        with torch.inference_mode():
            ops.prepare(batch, kv_heads, self.device)
            shape = (len(self.blocks), 2, batch, kv_heads, max_length, head_dim)
            self.cache = torch.zeros(shape, dtype=model.dtype, device=self.device)
            self.nothing = self.cache.new_zeros(batch, 1, config.hidden_size)
            places = torch.arange(max_length, device=self.device)[None]
            self.cos_sin = torch.cat(body.rotary_emb(self.nothing, places))

    @classmethod
    def supports(cls, model: Any, max_length: int) -> str | None:
        """See ``Step``."""
        if not has_kernels(model.device):
            return f"its kernels need a GPU and Triton, and the model is on {model.device}"
        return cls.reason_unlike(model, max_length)

    @staticmethod
    def reason_unlike(model: Any, max_length: int) -> str | None:
        """Return how a model differs from the llamas that the step computes, or None."""
        name, config = type(model).__name__, model.config
        if name not in MODELS or not type(model).__module__.startswith("transformers.models."):
            return f"{name} is none of {', '.join(MODELS)}"
        attention: Any = model.model.layers[0].self_attn
        head_dim, rotary = attention.head_dim, model.model.rotary_emb.rope_type
        group = config.num_attention_heads // config.num_key_value_heads
        if rotary not in ROTARY:
            return f"rotary positions of type {rotary!r} are none of {', '.join(ROTARY)}"
        if config.hidden_act != "silu":
            return f"the activation is {config.hidden_act}, not silu"
        if head_dim & (head_dim - 1) or head_dim < FEWEST_CHANNELS or group > MOST_HEADS:
            return (
                f"wanted a power of two of at least {FEWEST_CHANNELS} channels for a head and at "
                f"most {MOST_HEADS} heads for a key, got {head_dim} and {group}"
            )
        window = getattr(config, "sliding_window", None)
        if window is not None and max_length > window:
            return f"sequences of {max_length} tokens are longer than the window of {window}"
        return None

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values."""
        return self.cache.nbytes

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """See ``Step``."""
        b, t = input_ids.shape
        ends = torch.full((b, 1), t - 1, device=self.device)
        if attention_mask is not None:
            kept = attention_mask != 0
            order = (~kept).to(torch.uint8).argsort(dim=1, stable=True)
            input_ids, ends = input_ids.gather(1, order), kept.sum(1, keepdim=True) - 1
        self.positions.copy_(ends[:, 0])
        chunk = self.prompt_chunk or max(1, PROMPT_TOKENS // b)
        last = torch.zeros_like(self.nothing)
        for start in range(0, t, chunk):
            h = torch.add(*self._hidden(input_ids[:, start : start + chunk], start))
            place = ends - start
            inside = (place >= 0) & (place < h.shape[1])
            place = place.clamp(0, h.shape[1] - 1)[..., None].expand(-1, -1, h.shape[2])
            last = torch.where(inside[..., None], h.gather(1, place), last)
        return self._logits(last, self.nothing)

    def forward(self) -> Tensor:
        """See ``GraphStep``."""
        return self._logits(*self._hidden(self.tokens, None))

    def _hidden(self, tokens: Tensor, start: int | None) -> tuple[Tensor, Tensor]:
        """Return two tensors ``[b, t, dim]`` whose sum is the last block's output.

        Args:
            tokens: ``[b, t]``.
            start: position of the first one in prompts; None for one token at ``positions``.
        """
        ops, eps = self.ops, self.eps
        x: Tensor = self.embedding(tokens)
        # Zeros made once: filling new ones took 3 us of a step on an H200.
        added = self.nothing if start is None else torch.zeros_like(x)
        for block, cache in zip(self.blocks, self.cache, strict=True):
            x, h = ops.add_norm(x, added, block.attention_norm.weight, eps)
            qkv, norm = together(block.qkv, h), head_norm(block.head_norm, eps)
            if start is None:
                y = ops.attend(qkv, norm, self.cos_sin, self.positions, cache)
            else:
                y = ops.attend_prompt(qkv, norm, self.cos_sin, start, cache)
            x, h = ops.add_norm(x, together((block.o,), y), block.mlp_norm.weight, eps)
            added = together((block.down,), ops.swiglu(together(block.gate_up, h)))
        return x, added

    def _logits(self, x: Tensor, added: Tensor) -> Tensor:
        _, h = self.ops.add_norm(x, added, self.norm.weight, self.eps)
        return together((self.head,), h)[:, 0]


def head_norm(norms: tuple[Any, Any] | None, eps: float) -> HeadNorm | None:
    """Return the norms of q and k."""
    return None if norms is None else HeadNorm(norms[0].weight, norms[1].weight, eps)


def together(layers: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Return the outputs of layers for one input, concatenated: ``[..., k]`` to ``[..., n]``."""
    product = product_of(layers)
    if product is not None:
        whole: Tensor = product(x)
        return whole
    weights = gemv_weights(layers, x)
    if weights:
        from fdk_transformers.decode.gemv_bf16 import gemv

        x = x.contiguous()
        sizes = [len(weight) for weight in weights]
        out = x.new_empty(*x.shape[:-1], sum(sizes))
        for weight, part in zip(weights, out.split(sizes, -1), strict=True):
            gemv(x, weight, part)
        return out
    layouts = unrotated_layouts(layers, x.dtype)
    if layouts:
        rotated = rotate(x)
        parts: list[Tensor] = [
            layout(rotated, layer.bias) for layout, layer in zip(layouts, layers, strict=True)
        ]
        return torch.cat(parts, dim=-1)
    ys: list[Tensor] = [layer(x) for layer in layers]
    return ys[0] if len(ys) == 1 else torch.cat(ys, dim=-1)


def gemv_weights(layers: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """Return the weights of layers in 16 bits whose product with one row our kernel computes.

    Empty where a layer has another kind, or x several rows.
    """
    if not has_kernels(x.device):
        return []
    from fdk_transformers.decode.gemv_bf16 import takes

    dense: list[Any] = [m for m in layers if type(m) is nn.Linear and m.bias is None]
    weights: list[Tensor] = [layer.weight for layer in dense if takes(x, layer.weight)]
    return weights if len(weights) == len(layers) else []
