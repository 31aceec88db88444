"""Decoding steps with a static cache, of which each is the replay of one CUDA graph."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fdk_transformers.cuda_graph import CallGraph, is_captured
from fdk_transformers.decode.next_token import Sequences, choose

logger = logging.getLogger(__name__)


class Step(Protocol):
    """The decoding of a batch of sequences by one model, with a static cache of its own.

    A step keeps no reference to the model itself, so a model can keep its step.

    Attributes:
        batch: number of sequences.
        max_length: tokens of a sequence that fit.
    """

    batch: int
    max_length: int

    def __init__(self, model: Any, batch: int, max_length: int) -> None: ...

    @classmethod
    def supports(cls, model: Any, max_length: int) -> str | None:
        """Return the reason why the step cannot decode sequences of a model, or None."""

    def reset(self) -> None:
        """Forget all tokens; called before prompts."""

    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Begin sequences with prompts.

        Args:
            input_ids: ``[b, t, int64]``.
            attention_mask: ``[b, t]``, 0 for padding, which comes first; None for none.

        Returns:
            Logits of the next tokens, ``[b, vocabulary]``.
        """

    def decode(self, input_ids: Tensor) -> Tensor:
        """Append a token to each sequence.

        Args:
            input_ids: ``[b, int64]``.

        Returns:
            Logits of the next tokens, ``[b, vocabulary]``; the next call may overwrite them.
        """


class GraphStep(ABC):
    """A ``Step`` whose forward pass is captured, alone or with the choice of the next tokens.

    It reads the model's weights where they are, so those that change in place need no new step.

    Args:
        device: device of the model.
        batch, max_length: see ``Step``.

    Attributes:
        tokens, positions: the last tokens, and the positions of those that entered the cache
            last; with greedy choice, of ``tokens``. See ``Sequences``.
        prompt_chunk: tokens of each prompt in one pass; None for the step's own choice.
    """

    def __init__(self, device: torch.device, batch: int, max_length: int) -> None:
        self.device, self.batch, self.max_length = device, batch, max_length
        with torch.inference_mode():
            self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)
            self.positions = torch.zeros(batch, dtype=torch.int64, device=device)
            self.sequences = Sequences.of(self.tokens, self.positions, max_length)
        self._graphs: dict[tuple[str, str], CallGraph | None] = {}
        self.prompt_chunk: int | None = None

    @abstractmethod
    def forward(self) -> Tensor:
        """Return logits ``[b, vocabulary]`` after ``tokens``, which enter the cache."""

    @torch.inference_mode()
    def reset(self) -> None:
        """See ``Step``; ``prefill`` overwrites the cache."""
        self.positions.zero_()

    @abstractmethod
    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """See ``Step``."""

    def counters(self) -> Sequence[Tensor]:
        """Return the tensors that ``forward`` and ``choose`` advance."""
        s = self.sequences
        return s.tokens, s.positions, s.columns, s.unfinished

    @property
    def variant(self) -> str:
        """Name of the graph that the present sequences need, where they need different ones."""
        return ""

    @torch.inference_mode()
    def decode(self, input_ids: Tensor) -> Tensor:
        """See ``Step``."""
        self.tokens.copy_(input_ids[:, None])
        logits: Tensor = self._run("decode", self._decode)
        return logits

    @torch.inference_mode()
    def begin_greedy(self, logits: Tensor, ends: Tensor | None, pad: Tensor | None) -> None:
        """Choose the first tokens after a prompt.

        Args:
            logits: the result of ``prefill``.
            ends, pad: see ``Sequences.restart``.
        """
        self.sequences.restart(ends, pad)
        choose(logits, self.sequences)

    @torch.inference_mode()
    def decode_greedy(self) -> None:
        """Decode and choose the next tokens, which are appended to ``sequences``."""
        self._run("greedy", self._decode_greedy)

    @property
    def is_graph(self) -> bool:
        """True if a step is the replay of a graph."""
        return bool(self._graphs) and None not in self._graphs.values()

    def _decode(self) -> Tensor:
        self.positions.add_(1)
        return self.forward()

    def _decode_greedy(self) -> None:
        choose(self.forward(), self.sequences)

    def _run(self, name: str, call: Callable[[], Any]) -> Any:
        """Replay the graph of a call, captured at the first one; on a CPU, call."""
        if not is_captured(self.device):
            return call()
        key = name, self.variant
        if key not in self._graphs:
            try:
                self._graphs[key] = CallGraph(call, self.device, self.counters())
            except RuntimeError as error:  # a layer that synchronises with the device
                logger.warning("steps are not captured as a CUDA graph: %s", error)
                self._graphs[key] = None
        return (self._graphs[key] or call)()
