"""Decoding steps of a model with a static cache; on a GPU each is the replay of a CUDA graph."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol
from warnings import warn

import torch
from torch import Tensor, nn

from fdk_bench.decode.llama import has_kernels
from fdk_formats.torch_internals import inductor_config

WARM_STEPS = 4


class Decoder(Protocol):
    """A model with a static cache; calling it gives the logits after the last token."""

    def prepare(self, batch: int, length: int) -> None:
        """Make an empty cache."""

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return logits ``[b, vocabulary]`` for ``tokens :: [b, t]`` at ``positions :: [t]``."""

    def compile_blocks(self) -> None:
        """Compile the parts of a step again; raise where one cannot be compiled."""

    @property
    def captures_prompts(self) -> bool:
        """True if a prompt can be one CUDA graph: the host reads no value from the device."""

    @property
    def module(self) -> nn.Module:
        """The module that holds the weights."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values."""

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""


class Step:
    """A sequence of decoding steps.

    Token and position stay on the device and each step updates them, so the host does nothing but
    replay a graph.
    """

    def __init__(self, decoder: Decoder, tokens: Tensor, position: int) -> None:
        self._decoder = decoder
        self.tokens = tokens.clone()
        self.position = torch.tensor([position], device=tokens.device)
        self._replay: Callable[[], Any] | None = None
        self._argmax: Callable[[Tensor, Tensor, Tensor], None] | None = None
        if has_kernels(str(tokens.device)):
            from fdk_bench.decode.argmax_kernel import argmax_step

            self._argmax = argmax_step

    def warm_up(self) -> None:
        """Compile, and capture the graph; token and position stay as they are."""
        position, tokens = self.position.clone(), self.tokens.clone()
        for _ in range(3):
            self._advance()
        if self.tokens.is_cuda:
            self._replay = captured(self._advance)
        self.position.copy_(position)
        self.tokens.copy_(tokens)

    @property
    def is_graph(self) -> bool:
        """True if a step is the replay of a graph."""
        return self._replay is not None

    def __call__(self) -> None:
        """Decode the next token of each sequence."""
        (self._replay or self._advance)()

    def _advance(self) -> None:
        logits = self._decoder(self.tokens, self.position)
        if self._argmax is not None:
            self._argmax(logits, self.tokens, self.position)
            return
        self.tokens.copy_(logits.argmax(-1, keepdim=True))
        self.position += 1


def step_seconds(
    step: Step, device: torch.device, reps: int, probe: Callable[[], None] = lambda: None
) -> list[float]:
    """Time ``reps`` steps after ``WARM_STEPS`` that are not timed.

    On a GPU the host starts the steps without waiting, and a step lasts from the end of the one
    before to its own end, so that delays of the host are not counted. On a CPU ``probe`` is called
    before each step.
    """
    for _ in range(WARM_STEPS):
        step()
    if device.type != "cuda":
        times = []
        for _ in range(reps):
            probe()
            times.append(call_seconds(device, step))
        return times
    events = [torch.cuda.Event(enable_timing=True) for _ in range(reps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    events[-1].synchronize()
    return [float(a.elapsed_time(b)) / 1e3 for a, b in pairwise(events)]


@contextmanager
def dependent_launches() -> Iterator[None]:
    """Let torch's compiler use PDL on Hopper while the context is open; every model gets it."""
    config = inductor_config()
    if not hasattr(config.triton, "enable_pdl"):
        yield
        return
    with config.patch({"triton.enable_pdl": True}):
        yield


def first_tokens(decoder: Decoder, prompt: Tensor) -> Tensor:
    """Fill the cache with prompts ``[b, t]`` and return the tokens after them, ``[b, 1]``."""
    positions = torch.arange(prompt.shape[1], device=prompt.device)
    return decoder(prompt, positions).argmax(-1, keepdim=True)


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return the replay of a CUDA graph of a call, which must have run (and compiled) before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@dataclass(frozen=True)
class Prompt:
    """A function that returns the first tokens after a prompt, and whether it replays a graph."""

    call: Callable[[], Any]
    is_graph: bool


def captured_prompt(decoder: Decoder, prompt: Tensor) -> Prompt:
    """Return ``first_tokens`` of a prompt as a graph, or as plain calls where that fails."""

    def call() -> Tensor:
        return first_tokens(decoder, prompt)

    if not decoder.captures_prompts:
        return Prompt(call, is_graph=False)
    try:
        return Prompt(captured(call), is_graph=True)
    except RuntimeError as error:  # a library that synchronises with the device
        warn(f"the first token is timed without a graph: {error}", stacklevel=2)
        return Prompt(call, is_graph=False)


def held_bytes(decoder: Decoder) -> int:
    """Return the bytes of a model's parameters, buffers and cache; shared bytes count once."""
    module = decoder.module
    held = end = 0
    # Fused layers, tied weights and a mapped file share bytes.
    tensors = (*module.parameters(), *module.buffers())
    for start, nbytes in sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors):
        held += max(0, start + nbytes - max(start, end))
        end = max(end, start + nbytes)
    return held + decoder.cache_bytes


def call_seconds(device: torch.device, call: Callable[[], Any]) -> float:
    """Time a call by the host, from an idle device to an idle device."""
    synchronise(device)
    start = time.perf_counter()
    call()
    synchronise(device)
    return time.perf_counter() - start


def synchronise(device: torch.device) -> None:
    """Wait for a GPU; nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
