"""Decoding with a Hugging Face model: the same measurements on real weights, and perplexity."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fdk_bench.cases import DTYPES
from fdk_bench.decoding import Built
from fdk_bench.model_cases import ModelCase
from fdk_bench.random_llama import check_layer
from fdk_formats import QuantisedWeight, model_report, quantise_model

PERPLEXITY_TOKENS = 2048  # a window of the text; each is scored on its own
BEGIN_TOKENS, CONTINUED_TOKENS = 32, 24


class HfDecoder:
    """A causal language model of transformers with its static cache."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self._forward = self.model.forward
        self._cache: Any = None

    def prepare(self, batch: int, length: int) -> None:
        """See ``Decoder``.

        Raises:
            ValueError: for a layer that keeps something else than keys and values.
        """
        from transformers import StaticCache
        from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

        self._forward = self.model.forward
        self._cache = StaticCache(config=self.model.config, max_cache_len=length)
        layers = self._cache.layers
        for i, layer in enumerate(layers):
            if type(layer) not in (StaticLayer, StaticSlidingWindowLayer):
                raise ValueError(f"wanted attention in every layer, got {type(layer).__name__}")
            # A cache of a window forgets, and so cannot go back; masks leave out what is beyond it.
            layers[i] = layer if type(layer) is StaticLayer else StaticLayer(length)
        # Its tensors are made at the first use, which must not be while a graph is captured.
        with torch.inference_mode():
            ids = torch.zeros(batch, 1, dtype=torch.int64, device=self.model.device)
            self(ids, torch.zeros(1, dtype=torch.int64, device=self.model.device))

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """See ``Decoder``."""
        # A cache appends at a place of its own, on the device; prompts and steps may go back.
        for layer in self._cache.layers:
            layer.cumulative_length.copy_(positions[0])
        output = self._forward(
            input_ids=tokens,
            position_ids=positions[None].expand(tokens.shape[0], -1),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def compile_blocks(self) -> None:
        """Compiles the model as a whole."""
        self._forward = torch.compile(self.model.forward, fullgraph=True, dynamic=False)

    @property
    def captures_prompts(self) -> bool:
        """See ``Decoder``; code of other projects may ask for values while it makes masks."""
        return False

    @property
    def module(self) -> nn.Module:
        """See ``Decoder``."""
        module: nn.Module = self.model
        return module

    @property
    def cache_bytes(self) -> int:
        """See ``Decoder``."""
        layers = self._cache.layers
        return sum(int(layer.keys.nbytes + layer.values.nbytes) for layer in layers)

    @property
    def vocabulary(self) -> int:
        """See ``Decoder``."""
        return int(self.model.config.get_text_config().vocab_size)


def build_hf(case: ModelCase, batches: Sequence[int], text: str | None = None) -> Built:
    """Loads a model from a folder or by its id, quantises it, and scores a text if one is given.

    Raises:
        ValueError: where nothing is quantised.
        WrongAnswerError: see ``check_layers``.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(case.model, dtype=DTYPES[case.dtype])
    model = model.to(case.device).eval().requires_grad_(False)
    bits, backends, quantised = 8.0 * DTYPES[case.dtype].itemsize, "torch", model
    if case.format not in DTYPES:
        skip = case.skip or None
        quantised = quantise_model(model, case.format, skip, backend=case.backend, fuse=case.fused)
        if not _backends(quantised):
            raise ValueError(f"{case.model}: wanted layers to quantise, and skip leaves none")
        report = model_report(quantised)
        bits, backends = report.bits_per_weight, ", ".join(_backends(quantised))
        check_layers(quantised, case, batches)
    stored = stored_bytes(quantised)
    score, continued = (None, None) if text is None else read(quantised, case.model, text)
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    return Built(
        decoder=HfDecoder(quantised),
        weight_bytes=stored - (0 if tied else embedding.nbytes),
        stored_bytes=stored,
        parameters=sum(p.numel() for p in model.parameters()),
        bits_per_weight=bits,
        backends=backends,
        perplexity=score,
        continuation=continued,
    )


def check_layers(model: nn.Module, case: ModelCase, batches: Sequence[int]) -> None:
    """Checks the first quantised layer of each kind for every batch size, as a kernel's is.

    Raises:
        WrongAnswerError: where an answer is not that of the layer's own weight.
    """
    checked: set[tuple[str, tuple[int, int]]] = set()
    for name, module in model.named_modules():
        if isinstance(module, QuantisedWeight):
            # By name too: v has the shape of k, and may be other rows of one product.
            kind = name.removesuffix(".weight").rpartition(".")[2], module.shape
            if kind not in checked:
                checked.add(kind)
                check_layer(module, module.unpack(), case, batches)


def stored_bytes(model: nn.Module) -> int:
    """Bytes of the state of a model, a tensor that layers share counted once."""
    total, seen = 0, set()
    for module in model.modules():
        if isinstance(module, QuantisedWeight):
            total += module.canonical_bytes
    for parameter in model.parameters():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            total += parameter.nbytes
    return total


def _backends(model: nn.Module) -> list[str]:
    return sorted({m.backend_name for m in model.modules() if isinstance(m, QuantisedWeight)})


@torch.inference_mode()
def read(model: nn.Module, name: str, text: str) -> tuple[float, str]:
    """The perplexity of a text under a model, and how the model goes on from its beginning."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
    return perplexity_of(model, ids), str(tokenizer.decode(continued_from(model, ids)))


@torch.inference_mode()
def continued_from(model: Any, ids: Tensor, count: int = CONTINUED_TOKENS) -> Tensor:
    """``[count]`` tokens after the first ``BEGIN_TOKENS`` of ``ids :: [t]``, the likeliest each."""
    begin = ids[:BEGIN_TOKENS].to(model.device)
    found = begin
    for _ in range(count):
        logits = model(input_ids=found[None]).logits[0, -1]
        found = torch.cat([found, logits.argmax(-1, keepdim=True)])
    return found[len(begin) :]


def perplexity_of(model: Any, ids: Tensor) -> float:
    """Exponential of the mean negative log likelihood of ``ids :: [t]``, each window's first free.

    Raises:
        ValueError: for less than two tokens.
    """
    loss, count = 0.0, 0
    for window in ids.split(PERPLEXITY_TOKENS):
        if len(window) < 2:
            continue
        window = window.to(model.device)
        logits = model(input_ids=window[None]).logits[0, :-1].float()
        loss += nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
        count += len(window) - 1
    if not count:
        raise ValueError("perplexity: wanted a text of at least two tokens")
    return math.exp(loss / count)
