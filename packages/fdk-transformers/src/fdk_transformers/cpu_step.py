"""Decoding on the CPU: llama-kind models of transformers, a native call per token."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from fdk_cpu.decode_step import DecodeStep, LlamaBlock, LlamaSizes, unsupported_layer

# Model classes whose blocks are norm, rotary attention, norm, gated MLP with SiLU.
MODELS = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
# Their frequencies change with the length of the sequence.
CHANGING_ROPES = frozenset({"dynamic", "longrope"})
QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")


class CpuStep:
    """Decodes with a static cache: a prompt by the model, then one token of each row per call.

    ``prefill`` runs the model's own forward and copies its cache. ``decode`` runs every layer in
    one native call (``fdk_cpu.decode_step``). The weights are those of the time of construction.

    Args:
        model: model of transformers on the CPU, quantised or not, see ``supports``.
        batch: rows.
        max_length: most tokens of a row, padding included.

    Attributes:
        length: tokens in the cache, padding included.

    Raises:
        ValueError: if ``supports`` returns a reason.

    Example:
        >>> step = CpuStep(model, batch=1, max_length=512)
        >>> logits = step.prefill(tokenizer("The capital of", return_tensors="pt").input_ids)
        >>> logits = step.decode(logits.argmax(-1))
    """

    def __init__(self, model: Any, batch: int, max_length: int) -> None:
        reason = self.supports(model, max_length)
        if reason is not None:
            raise ValueError(f"CpuStep: {reason}")
        self.batch, self.max_length, self.length = batch, max_length, 0
        self._model = model
        self._embed = model.get_input_embeddings()
        self._step = DecodeStep(
            _sizes(model),
            [_block(layer) for layer in model.model.layers],
            model.model.norm.weight,
            model.lm_head,
        )
        self._cache = self._step.new_cache(batch, max_length)
        self._starts = torch.zeros(batch, dtype=torch.int64)
        with torch.no_grad():
            positions = torch.arange(max_length)[None]
            x = torch.empty(0, dtype=model.dtype)
            cos, sin = model.model.rotary_emb(x, positions)
        self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()

    @staticmethod
    def supports(model: Any, max_length: int | None = None) -> str | None:
        """Return the reason why a model cannot be decoded this way, or None.

        Args:
            model: model of transformers.
            max_length: most tokens of a row; sliding windows must hold them. None: any number.
        """
        name, config = type(model).__name__, getattr(model, "config", None)
        if (
            config is None
            or name not in MODELS
            or not type(model).__module__.startswith("transformers.")
        ):
            return f"needs a model of {', '.join(sorted(MODELS))}, got {name}"
        if model.device.type != "cpu":
            return f"needs a model on the CPU, got {model.device}"
        if model.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"needs bf16, fp16 or fp32, got {model.dtype}"
        if config.hidden_act != "silu":
            return f"needs the activation silu, got {config.hidden_act}"
        rope = model.model.rotary_emb.rope_type
        if rope in CHANGING_ROPES:
            return f"rotary frequencies of type {rope} change with the length"
        window = _window(config)
        if window is not None and (max_length is None or max_length > window):
            wanted = "unlimited tokens" if max_length is None else f"{max_length} tokens"
            return f"a sliding window of {window} tokens does not hold {wanted}"
        return _changed_module(model) or _unsupported_layers(model)

    def reset(self) -> None:
        """Forget all tokens."""
        self.length = 0

    @torch.no_grad()
    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Run a prompt, and return the logits of its last tokens, ``[b, vocabulary]``.

        Args:
            input_ids: ``[b, t]``.
            attention_mask: ``[b, t]``, zero for padding, which must come first; None without any.

        Raises:
            ValueError: if the cache holds tokens already, for other sizes, and for padding
                elsewhere.
        """
        if self.length != 0:
            raise ValueError(
                f"prefill: {self.length} tokens are in the cache, wanted reset() first"
            )
        batch, t = input_ids.shape
        if batch != self.batch or not 0 < t <= self.max_length:
            raise ValueError(
                f"prefill: wanted [{self.batch}, 1 to {self.max_length}] tokens, got [{batch}, {t}]"
            )
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
        if not bool((mask.diff(dim=1) >= 0).all() & (mask[:, -1] == 1).all()):
            raise ValueError("prefill: padding must come before the tokens (padding_side='left')")
        cache = DynamicCache()  # without the config: a sliding window would drop tokens
        output = self._model(
            input_ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        layers: list[Any] = cache.layers
        for kept, layer in zip(self._cache, layers, strict=True):
            kept[0, :, :, :t].copy_(layer.keys)
            kept[1, :, :, :t].copy_(layer.values)
        self._starts, self.length = t - mask.sum(-1), t
        logits: Tensor = output.logits[:, -1]
        return logits

    @torch.no_grad()
    def decode(self, input_ids: Tensor) -> Tensor:
        """Append a token to each row, and return the logits of the next, ``[b, vocabulary]``.

        Args:
            input_ids: ``[b]``.

        Raises:
            ValueError: for another number of tokens, and if the cache is full.
        """
        if input_ids.shape != (self.batch,):
            raise ValueError(f"decode: wanted [{self.batch}] tokens, got {list(input_ids.shape)}")
        if self.length == self.max_length:
            raise ValueError(f"decode: the cache holds max_length={self.max_length} tokens already")
        x = self._embed(input_ids)
        logits = self._step(x, self._cos, self._sin, self._starts, self._cache, self.length)
        self.length += 1
        return logits

    def decode_greedy(self, input_ids: Tensor) -> Tensor:
        """Append a token to each row, and return the most likely next ones, ``[b, int64]``."""
        return self.decode(input_ids).argmax(-1)


def _sizes(model: Any) -> LlamaSizes:
    config, attention = model.config, model.model.layers[0].self_attn
    return LlamaSizes(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        ffn=config.intermediate_size,
        vocabulary=model.lm_head.out_features,
        eps=config.rms_norm_eps,
        scale=attention.scaling,
        dtype=model.dtype,
    )


def _block(layer: Any) -> LlamaBlock:
    attention, mlp = layer.self_attn, layer.mlp
    norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    q_norm, k_norm = (None if norm is None else norm.weight for norm in norms)
    return LlamaBlock(
        layer.input_layernorm.weight,
        layer.post_attention_layernorm.weight,
        [getattr(attention, name) for name in QKV],
        attention.o_proj,
        [getattr(mlp, name) for name in GATE_UP],
        mlp.down_proj,
        q_norm,
        k_norm,
    )


def _window(config: Any) -> int | None:
    """Return the sliding window of a model, or None if every layer attends to all tokens."""
    kinds = getattr(config, "layer_types", None)
    window: int | None = getattr(config, "sliding_window", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    return window


def _changed_module(model: Any) -> str | None:
    """Return which module computes more than its class does, or None."""
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
            return f"{name or 'the model'} has hooks or a forward of its own"
    return None


def _unsupported_layers(model: Any) -> str | None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            reason = unsupported_layer(module, model.dtype)
            if reason is not None:
                return f"{name} {reason}"
    return None
