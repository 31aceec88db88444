"""The paths by which whole models decode: fdk's ``generate``, transformers' own, and vLLM."""

import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

ENGINES = ("fdk", "transformers", "vllm")
GPU_MEMORY_SHARE = 0.5  # of vLLM, beside the model that it was saved from


class Engine(Protocol):
    """A path by which a model decodes, as a user calls it."""

    def generate(self, prompt: Tensor, count: int) -> None:
        """Decode ``count`` tokens after prompts ``[b, t]``, greedily, and wait for them."""

    @property
    def is_graph(self) -> bool | None:
        """True if a step is one CUDA graph; None if unknown."""

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of keys and values; None if unknown."""


class TransformersEngine:
    """``model.generate``: the loop of transformers, with a static cache on a GPU.

    Args:
        model: a model of transformers.
        compiled: whether transformers may compile the step.
    """

    def __init__(self, model: Any, *, compiled: bool) -> None:
        self.model = model
        self.options: dict[str, Any] = {"disable_compile": not compiled}
        if model.device.type == "cuda":
            self.options["cache_implementation"] = "static"

    def generate(self, prompt: Tensor, count: int) -> None:
        """See ``Engine``."""
        self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=count,
            min_new_tokens=0,
            do_sample=False,
            **self.options,
        )
        if prompt.is_cuda:
            torch.cuda.synchronize(prompt.device)

    @property
    def is_graph(self) -> bool | None:
        """See ``Engine``."""
        return None

    @property
    def cache_bytes(self) -> int | None:
        """See ``Engine``."""
        return None


class FdkEngine(TransformersEngine):
    """``model.generate`` with ``custom_generate=fdk_transformers.generate``."""

    def __init__(self, model: Any, *, compiled: bool) -> None:
        from fdk_transformers import generate

        super().__init__(model, compiled=compiled)
        self.options = {"disable_compile": not compiled, "custom_generate": generate}

    @property
    def is_graph(self) -> bool | None:
        """See ``Engine``."""
        return bool(getattr(self._step, "is_graph", False))

    @property
    def cache_bytes(self) -> int | None:
        """See ``Engine``."""
        found: int | None = getattr(self._step, "cache_bytes", None)
        return found

    @property
    def step_name(self) -> str:
        """Name of the kind of step, after the first call."""
        return type(self._step).__name__

    @property
    def _step(self) -> Any:
        from fdk_transformers.step_cache import kept_step

        return kept_step(self.model)


class VllmEngine:
    """vLLM's ``LLM`` with the model, which is saved for it.

    Args:
        model: a model of transformers, quantised or not.
        length: the most tokens of a sequence.
    """

    def __init__(self, model: Any, length: int) -> None:
        from vllm import LLM

        self._folder = tempfile.TemporaryDirectory()
        model.save_pretrained(self._folder.name)
        self.llm = LLM(
            self._folder.name,
            skip_tokenizer_init=True,
            max_model_len=length,
            enable_prefix_caching=False,
            gpu_memory_utilization=GPU_MEMORY_SHARE,
        )

    def generate(self, prompt: Tensor, count: int) -> None:
        """See ``Engine``."""
        from vllm import SamplingParams

        how = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in prompt.tolist()]
        self.llm.generate(prompts, how, use_tqdm=False)

    @property
    def is_graph(self) -> bool | None:
        """See ``Engine``."""
        return None

    @property
    def cache_bytes(self) -> int | None:
        """See ``Engine``."""
        return None


@contextmanager
def engine_of(name: str, model: nn.Module, *, compiled: bool, length: int) -> Iterator[Engine]:
    """Yield the engine of a name; what it holds is freed afterwards.

    Raises:
        ModuleNotFoundError: for vllm where it is not installed.
    """
    if name == "vllm":
        if importlib.util.find_spec("vllm") is None:
            raise ModuleNotFoundError("--engine vllm: vLLM is not installed here")
        yield VllmEngine(model, length)
    elif name == "transformers":
        yield TransformersEngine(model, compiled=compiled)
    else:
        from fdk_transformers import release_step

        try:
            yield FdkEngine(model, compiled=compiled)
        finally:
            release_step(model)
