"""Decoding steps of any model of transformers: its own forward pass with a static cache."""

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from fdk_transformers.cuda_graph import is_captured
from fdk_transformers.graph_step import GraphStep
from fdk_transformers.transformers_internals import attention_implementation, compiles_whole

ATTENTION = ("eager", "sdpa")  # implementations with masks over a static cache


class TransformersStep(GraphStep):
    """A ``Step`` of a causal language model by the model's own code.

    Caches of sliding windows are as long as the others, and masks cut off what is beyond a window:
    a window's own cache is moved at each token, by an amount that the host decides.

    Args:
        model: the model; it is not kept alive.
        batch, max_length: see ``Step``.

    Attributes:
        compiles: whether torch.compile helps: on a GPU, where it takes the pass as one graph.
        compiled: whether torch compiles the pass of one token.
    """

    def __init__(self, model: Any, batch: int, max_length: int) -> None:
        super().__init__(model.device, batch, max_length)
        self._model = weakref.ref(model)
        accepted = inspect.signature(model.forward).parameters
        self._accepts_positions = "position_ids" in accepted
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self.compiles = self.compiled = is_captured(self.device) and compiles_whole(model)
        self._forward: Callable[..., Any] | None = None
        with torch.inference_mode():
            self.cache = static_cache(model, max_length)
            self._seen = torch.ones(batch, max_length, dtype=torch.int64, device=self.device)
        self._mask: Tensor | None = None

    @classmethod
    def supports(cls, model: Any, max_length: int) -> str | None:
        """See ``Step``."""
        implementation = attention_implementation(model.config)
        if implementation not in ATTENTION:
            wanted = " or ".join(ATTENTION)
            return f"attention is {implementation!r}, and a static cache needs {wanted}"
        try:
            static_cache(model, max_length)
        except (ValueError, KeyError) as error:
            return f"{type(model).__name__} has no static cache: {error}"
        return None

    @property
    def _layers(self) -> list[Any]:
        return list(self.cache.layers)

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values, once there are any."""
        layers = [layer for layer in self._layers if layer.is_initialized]
        return sum(int(layer.keys.nbytes) + int(layer.values.nbytes) for layer in layers)

    def counters(self) -> Sequence[Tensor]:
        """See ``GraphStep``."""
        return [*super().counters(), *(layer.cumulative_length for layer in self._layers)]

    @property
    def variant(self) -> str:
        """See ``GraphStep``."""
        return f"compiled={self.compiled} padding={self._mask is not None}"

    @torch.inference_mode()
    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """See ``Step``."""
        b, t = input_ids.shape
        for layer in self._layers:
            layer.cumulative_length.zero_()
        places, self._mask = torch.arange(t, device=self.device).expand(b, -1), None
        if attention_mask is not None:
            self._seen[:, :t], self._mask = attention_mask, self._seen
            places = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        self.positions.copy_(places[:, -1])
        chunk = self.prompt_chunk or t
        for ids, positions in zip(input_ids.split(chunk, 1), places.split(chunk, 1), strict=True):
            logits = self._call(self._loaded().forward, ids, positions)
        return logits

    def forward(self) -> Tensor:
        """See ``GraphStep``."""
        forward = self._loaded().forward
        if self.compiled:
            if self._forward is None:
                self._forward = torch.compile(forward, fullgraph=True, dynamic=False)
            forward = self._forward
        return self._call(forward, self.tokens, self.positions[:, None])

    def _loaded(self) -> Any:
        model = self._model()
        assert model is not None, "a step is used without its model"
        return model

    def _call(self, forward: Callable[..., Any], tokens: Tensor, positions: Tensor) -> Tensor:
        placed = {"position_ids": positions} if self._accepts_positions else {}
        output = forward(
            input_ids=tokens,
            attention_mask=self._mask,
            past_key_values=self.cache,
            use_cache=True,
            **placed,
            **self._options,
        )
        logits: Tensor = output.logits[:, -1]
        return logits


def static_cache(model: Any, length: int) -> StaticCache:
    """Return an empty cache of keys and values, of one length in all layers.

    Raises:
        ValueError: for a layer whose cache is not keys and values.
    """
    cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=length)
    for i, layer in enumerate(cache.layers):
        if type(layer) not in (StaticLayer, StaticSlidingWindowLayer):
            raise ValueError(f"wanted attention in every layer, got {type(layer).__name__}")
        cache.layers[i] = StaticLayer(length)
    return cache
