"""Whole models: time of a decoding step, of the first token, memory, share of the roofline."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol
from warnings import warn

import torch
from torch import Tensor, nn

from fdk_bench.cases import DTYPES
from fdk_bench.floor import Floor, read_floor
from fdk_bench.llama_ops import has_kernels
from fdk_bench.model_cases import ModelCase, ModelRow, ModelRun, ModelValues
from fdk_bench.records import Row
from fdk_bench.timing import summarise

# The read rate of a model is that of one large read.
RATE_BYTES = 1 << 30
FIRST_TOKEN_REPS = 3
WARM_STEPS = 4
CACHE_STEP = 64  # lengths of a cache, for attention kernels that want aligned masks


class Decoder(Protocol):
    """A model with a static cache. ``forward`` gives the logits after the last token."""

    def prepare(self, batch: int, length: int) -> None:
        """An empty cache."""

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """``tokens :: [b, t]`` at ``positions :: [t]`` to logits ``[b, vocabulary]``."""

    def compile_blocks(self) -> None:
        """Compiles what a step calls, anew; a part that cannot be compiled is an error."""

    @property
    def captures_prompts(self) -> bool:
        """Whether a prompt can be one CUDA graph too: nothing on the host asks for its values."""

    @property
    def module(self) -> nn.Module:
        """What holds the weights."""

    @property
    def cache_bytes(self) -> int:
        """Of keys and values."""

    @property
    def vocabulary(self) -> int:
        """Tokens that there are."""


@dataclass(frozen=True, eq=False)
class Built:
    """A model ready to decode, and what it took.

    Attributes:
        weight_bytes, stored_bytes, parameters, bits_per_weight, backends: see ``ModelValues``.
        perplexity, continuation: of the text that was given, or None.
    """

    decoder: Decoder
    weight_bytes: int
    stored_bytes: int
    parameters: int
    bits_per_weight: float
    backends: str
    perplexity: float | None = None
    continuation: str | None = None


Build = Callable[[ModelCase, Sequence[int]], Built]


def measure(
    run: ModelRun, build: Build, on_step: Callable[[str], None] = lambda text: None
) -> Iterator[ModelRow]:
    """Rows as they are measured; a model that fails is rows with its error."""
    floor = read_floor(run.device)
    floor.seconds(RATE_BYTES)  # its memory is taken before that of a model
    baseline: dict[tuple[str, int], float] = {}
    for model, format, backend in run.builds():
        cases = run.cases(model, format, backend)
        on_step(f"building {model} {format} {backend}")
        before, start = _allocated(run.device), time.perf_counter()
        try:
            built = build(cases[0], run.batches)
        except Exception as error:  # the run goes on
            yield from (Row(case, error=f"{type(error).__name__}: {error}") for case in cases)
            release()
            continue
        seconds = time.perf_counter() - start
        for case in cases:
            on_step(str(case))
            try:
                values = measure_case(case, built, floor, seconds, before)
            except Exception as error:
                yield Row(case, error=f"{type(error).__name__}: {error}")
                continue
            if format in DTYPES:
                baseline[model, case.batch] = values.tokens_per_second
            elif dense := baseline.get((model, case.batch)):
                values = replace(values, speedup_16=values.tokens_per_second / dense)
            yield Row(case, values)
        del built
        release()


def release() -> None:
    """Gives back the memory of a model that is no longer needed, and its compiled code."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def measure_case(
    case: ModelCase, built: Built, floor: Floor, build_seconds: float, before: int = 0
) -> ModelValues:
    """Decodes ``reps`` tokens after a prompt and times each step, see ``step_seconds``.

    ``before``: bytes of the device that were allocated before the model was built.
    """
    with torch.inference_mode(), dependent_launches() if case.compiled else nullcontext():
        return _measure_case(case, built, floor, build_seconds, before)


def _measure_case(
    case: ModelCase, built: Built, floor: Floor, build_seconds: float, before: int
) -> ModelValues:
    decoder, device = built.decoder, torch.device(case.device)
    length = -(-(case.context + case.reps + WARM_STEPS) // CACHE_STEP) * CACHE_STEP
    decoder.prepare(case.batch, length)
    generator = torch.Generator(device).manual_seed(0)
    shape = (case.batch, case.context)
    prompt = torch.randint(decoder.vocabulary, shape, device=device, generator=generator)
    if case.compiled:
        # Static shapes: two variants a batch size, and torch stops at 8 of one function.
        torch._dynamo.reset()
        decoder.compile_blocks()
    start = time.perf_counter()
    tokens = first_tokens(decoder, prompt)
    step = Step(decoder, tokens, case.context)
    step.warm_up()
    _synchronise(device)
    compile_seconds = time.perf_counter() - start
    begin = captured_prompt(decoder, prompt)
    first = min(_seconds(device, begin.call) for _ in range(FIRST_TOKEN_REPS))
    first_is_graph = begin.is_graph
    del begin
    floor.begin()
    timing = summarise(step_seconds(step, device, case.reps, floor.probe), "steps")
    least = built.weight_bytes * floor.seconds(RATE_BYTES) / RATE_BYTES
    return ModelValues(
        backends=built.backends,
        parameters=built.parameters,
        bits_per_weight=built.bits_per_weight,
        weight_bytes=built.weight_bytes,
        stored_bytes=built.stored_bytes,
        cache_bytes=decoder.cache_bytes,
        memory=_allocated(case.device) - before if device.type == "cuda" else held_bytes(decoder),
        step_time=timing.median,
        step_time_min=timing.minimum,
        spread=timing.spread,
        tokens_per_second=case.batch / timing.median,
        first_token_time=first,
        floor=least,
        floor_share=least / timing.median,
        graph=step.is_graph,
        first_token_graph=first_is_graph,
        build_seconds=build_seconds,
        compile_seconds=compile_seconds,
        perplexity=built.perplexity,
        continuation=built.continuation,
    )


def step_seconds(
    step: "Step", device: torch.device, reps: int, probe: Callable[[], None] = lambda: None
) -> list[float]:
    """Times of ``reps`` steps after ``WARM_STEPS`` that are not timed.

    On a GPU the host starts them without waiting, as it would to decode, and a step lasts from the
    end of the one before to its own: what keeps the host busy is not counted as a step's time. On a
    CPU the machine is probed before each.
    """
    for _ in range(WARM_STEPS):
        step()
    if device.type != "cuda":
        times = []
        for _ in range(reps):
            probe()
            times.append(_seconds(device, step))
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
    """Inside, torch's compiler launches kernels before the one ahead has ended, on Hopper.

    Every model gets it. 8 blocks of 12b at 4 bits and the head took 784 us without and 755 with
    (H200); at 1 bit nothing changed.
    """
    from torch._inductor import config

    if not hasattr(config.triton, "enable_pdl"):
        yield
        return
    with config.patch({"triton.enable_pdl": True}):
        yield


def first_tokens(decoder: Decoder, prompt: Tensor) -> Tensor:
    """The tokens after prompts ``[b, t]``, ``[b, 1]``; fills the cache."""
    positions = torch.arange(prompt.shape[1], device=prompt.device)
    return decoder(prompt, positions).argmax(-1, keepdim=True)


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """The replay of a CUDA graph of what was called, and so compiled, before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@dataclass(frozen=True)
class Prompt:
    """What gives the first tokens of a prompt, and whether it is the replay of a graph."""

    call: Callable[[], Any]
    is_graph: bool


def captured_prompt(decoder: Decoder, prompt: Tensor) -> Prompt:
    """``first_tokens`` of a prompt as a graph; as calls where that is not to be had."""

    def call() -> Tensor:
        return first_tokens(decoder, prompt)

    if not decoder.captures_prompts:
        return Prompt(call, is_graph=False)
    try:
        return Prompt(captured(call), is_graph=True)
    except RuntimeError as error:  # a library that asks the device for something
        warn(f"the first token is timed without a graph: {error}", stacklevel=2)
        return Prompt(call, is_graph=False)


class Step:
    """One decoding step after another, on a GPU as the replay of a CUDA graph.

    Token and position lie on the device and the step moves them on, so the host does nothing.
    """

    def __init__(self, decoder: Decoder, tokens: Tensor, position: int) -> None:
        self._decoder = decoder
        self.tokens = tokens.clone()
        self.position = torch.tensor([position], device=tokens.device)
        self._replay: Callable[[], Any] | None = None
        self._choose: Callable[[Tensor, Tensor, Tensor], None] | None = None
        if has_kernels(str(tokens.device)):
            from fdk_bench.choice_kernel import choose

            self._choose = choose

    def warm_up(self) -> None:
        """Compiles, and captures the graph; neither moves on."""
        position, tokens = self.position.clone(), self.tokens.clone()
        for _ in range(3):
            self._advance()
        if self.tokens.is_cuda:
            self._replay = captured(self._advance)
        self.position.copy_(position)
        self.tokens.copy_(tokens)

    @property
    def is_graph(self) -> bool:
        """Whether a step is the replay of a graph."""
        return self._replay is not None

    def __call__(self) -> None:
        """The next token of each sequence."""
        (self._replay or self._advance)()

    def _advance(self) -> None:
        logits = self._decoder(self.tokens, self.position)
        if self._choose is not None:
            self._choose(logits, self.tokens, self.position)
            return
        self.tokens.copy_(logits.argmax(-1, keepdim=True))
        self.position += 1


def held_bytes(decoder: Decoder) -> int:
    """Bytes of a model's parameters and buffers, packed as they are, and of its cache."""
    module = decoder.module
    held = end = 0
    # Layers that are one product, tied weights and a mapped file share bytes.
    tensors = (*module.parameters(), *module.buffers())
    for start, nbytes in sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors):
        held += max(0, start + nbytes - max(start, end))
        end = max(end, start + nbytes)
    return held + decoder.cache_bytes


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated(device) if torch.device(device).type == "cuda" else 0


def _seconds(device: torch.device, call: Callable[[], Any]) -> float:
    _synchronise(device)
    start = time.perf_counter()
    call()
    _synchronise(device)
    return time.perf_counter() - start


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
