"""Whole models: time of a decoding step, of the first token, memory, share of the roofline."""

import gc
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fdk_bench.cases import DTYPES, KernelCase
from fdk_bench.floor import Floor, read_floor
from fdk_bench.llama import SIZES, Llama
from fdk_bench.llama_ops import has_kernels
from fdk_bench.peers.base import Prepared, check
from fdk_bench.peers.dense import codebook_bytes
from fdk_bench.records import Row
from fdk_bench.timing import summarise
from fdk_bench.weights import exact_weight, random_weight
from fdk_formats import Format, QuantisedLinear, QuantisedTensor

# The read rate of a model is that of one large read.
RATE_BYTES = 1 << 30
FIRST_TOKEN_REPS = 3
CACHE_STEP = 64  # lengths of a cache, for attention kernels that want aligned masks


@dataclass(frozen=True)
class ModelCase:
    """A model decoding ``batch`` sequences; ``format`` is a name of ``DTYPES`` for no quantisation.

    Attributes:
        model: a size of ``SIZES``, or a Hugging Face folder or id.
        context: tokens of the prompt.
        reps: decoding steps measured.
        fused: q, k and v as one layer, gate and up as one; a real model is as its files have it.
        layers: blocks of a random llama, where it is to have others than its size says.
    """

    model: str
    batch: int
    format: str
    backend: str
    dtype: str
    device: str
    skip: str
    context: int
    reps: int
    compiled: bool
    fused: bool = True
    layers: int | None = None

    def __str__(self) -> str:
        blocks = "" if self.layers is None else f"-l{self.layers}"
        return f"{self.model}{blocks}-b{self.batch}-{self.format}-{self.backend}-{self.device}"


@dataclass(frozen=True)
class ModelValues:
    """What a model takes. Times are seconds.

    Attributes:
        backends: that computed the quantised layers; ``torch`` where there are none.
        parameters: all of them.
        bits_per_weight: of the quantised layers' weights; 16 where there are none.
        weight_bytes: read in one step: every layer and norm, of the embedding nothing.
        stored_bytes: of the whole model, embedding included.
        cache_bytes: keys and values of ``batch`` sequences of ``context + reps`` tokens.
        memory: of the device that is allocated while decoding; None on a CPU.
        step_time, step_time_min, spread: of one decoding step, see ``Timing``.
        tokens_per_second: ``batch`` over ``step_time``.
        first_token_time: from prompts on the device to their first tokens, the best of three.
        floor: time to read ``weight_bytes`` at the read rate measured between the steps.
        floor_share: floor over step_time: the share of the roofline.
        graph: whether a step was one CUDA graph.
        build_seconds: to make or load and quantise the model.
        compile_seconds: of the first prompt and the first steps.
        perplexity: on the text that was given, or None.
        speedup_16: tokens per second over those of the model that is not quantised, or None.
    """

    backends: str
    parameters: int
    bits_per_weight: float
    weight_bytes: int
    stored_bytes: int
    cache_bytes: int
    memory: int | None
    step_time: float
    step_time_min: float
    spread: float
    tokens_per_second: float
    first_token_time: float
    floor: float
    floor_share: float
    graph: bool
    build_seconds: float
    compile_seconds: float
    perplexity: float | None = None
    speedup_16: float | None = None


ModelRow = Row[ModelCase, ModelValues]


class Decoder(Protocol):
    """A model with a static cache. ``forward`` gives the logits after the last token."""

    def prepare(self, batch: int, length: int) -> None:
        """An empty cache."""

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """``tokens :: [b, t]`` at ``positions :: [t]`` to logits ``[b, vocabulary]``."""

    def compile_blocks(self) -> None:
        """Compiles what a step calls, anew; a part that cannot be compiled is an error."""

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
        module: holds its tensors.
        weight_bytes, stored_bytes, parameters, bits_per_weight, backends: see ``ModelValues``.
        perplexity: on the text that was given, or None.
    """

    decoder: Decoder
    weight_bytes: int
    stored_bytes: int
    parameters: int
    bits_per_weight: float
    backends: str
    perplexity: float | None = None


Build = Callable[[ModelCase, Sequence[int]], Built]


@dataclass(frozen=True)
class ModelRun:
    """What to measure: each model in each format at each batch size."""

    models: Sequence[str]
    formats: Sequence[str]
    batches: Sequence[int]
    backend: str
    dtype: str
    device: str
    skip: str
    context: int
    reps: int
    compiled: bool
    fused: bool = True
    layers: int | None = None

    def cases(self, model: str, format: str) -> list[ModelCase]:
        """One for each batch size."""
        backend = "torch" if format in DTYPES else self.backend
        return [
            ModelCase(
                model=model,
                batch=batch,
                format=format,
                backend=backend,
                dtype=self.dtype,
                device=self.device,
                skip=self.skip,
                context=self.context,
                reps=self.reps,
                compiled=self.compiled,
                fused=self.fused,
                layers=self.layers,
            )
            for batch in self.batches
        ]

    def count(self) -> int:
        """How many rows there will be."""
        return len(self.models) * len(self.formats) * len(self.batches)


def measure(
    run: ModelRun, build: Build, on_step: Callable[[str], None] = lambda text: None
) -> Iterator[ModelRow]:
    """Rows as they are measured; a model that fails is rows with its error."""
    floor = read_floor(run.device)
    baseline: dict[tuple[str, int], float] = {}
    for model in run.models:
        for format in run.formats:
            cases = run.cases(model, format)
            on_step(f"building {model} {format}")
            start = time.perf_counter()
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
                    values = measure_case(case, built, floor, seconds)
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


@torch.inference_mode()
def measure_case(case: ModelCase, built: Built, floor: Floor, build_seconds: float) -> ModelValues:
    """Decodes ``reps`` tokens after a prompt and times each step, the read rate in between."""
    decoder, device = built.decoder, torch.device(case.device)
    length = -(-(case.context + case.reps + 4) // CACHE_STEP) * CACHE_STEP
    decoder.prepare(case.batch, length)
    generator = torch.Generator(device).manual_seed(0)
    shape = (case.batch, case.context)
    prompt = torch.randint(decoder.vocabulary, shape, device=device, generator=generator)
    if case.compiled:
        # Static shapes: two variants a batch size, and torch stops at 8 of one function.
        torch._dynamo.reset()
        use_dependent_launches()
        decoder.compile_blocks()
    start = time.perf_counter()
    tokens = first_tokens(decoder, prompt)
    step = Step(decoder, tokens, case.context)
    step.warm_up()
    _synchronise(device)
    compile_seconds = time.perf_counter() - start
    first = min(
        _seconds(device, lambda: first_tokens(decoder, prompt)) for _ in range(FIRST_TOKEN_REPS)
    )
    floor.begin()
    steps = []
    for _ in range(case.reps):
        floor.probe()
        steps.append(_seconds(device, step))
    timing = summarise(steps, "steps")
    least = built.weight_bytes * floor.seconds(RATE_BYTES) / RATE_BYTES
    memory = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
    return ModelValues(
        backends=built.backends,
        parameters=built.parameters,
        bits_per_weight=built.bits_per_weight,
        weight_bytes=built.weight_bytes,
        stored_bytes=built.stored_bytes,
        cache_bytes=decoder.cache_bytes,
        memory=memory,
        step_time=timing.median,
        step_time_min=timing.minimum,
        spread=timing.spread,
        tokens_per_second=case.batch / timing.median,
        first_token_time=first,
        floor=least,
        floor_share=least / timing.median,
        graph=step.graph is not None,
        build_seconds=build_seconds,
        compile_seconds=compile_seconds,
        perplexity=built.perplexity,
    )


def use_dependent_launches() -> None:
    """Has torch's compiler launch kernels before the one ahead has ended, where it can (Hopper).

    Every model gets it. 8 blocks of 12b at 4 bits and the head took 784 us without and 755 with
    (H200); at 1 bit nothing changed.
    """
    from torch._inductor import config

    if hasattr(config.triton, "enable_pdl"):
        config.triton.enable_pdl = True


def first_tokens(decoder: Decoder, prompt: Tensor) -> Tensor:
    """The tokens after prompts ``[b, t]``, ``[b, 1]``; fills the cache."""
    positions = torch.arange(prompt.shape[1], device=prompt.device)
    return decoder(prompt, positions).argmax(-1, keepdim=True)


class Step:
    """One decoding step after another, on a GPU as the replay of a CUDA graph.

    Token and position lie on the device and the step moves them on, so the host does nothing.
    """

    def __init__(self, decoder: Decoder, tokens: Tensor, position: int) -> None:
        self._decoder = decoder
        self.tokens = tokens.clone()
        self.position = torch.tensor([position], device=tokens.device)
        self.graph: torch.cuda.CUDAGraph | None = None
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
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._advance()
            self.graph = graph
        self.position.copy_(position)
        self.tokens.copy_(tokens)

    def __call__(self) -> None:
        """The next token of each sequence."""
        if self.graph is None:
            self._advance()
        else:
            self.graph.replay()

    def _advance(self) -> None:
        logits = self._decoder(self.tokens, self.position)
        if self._choose is not None:
            self._choose(logits, self.tokens, self.position)
            return
        self.tokens.copy_(logits.argmax(-1, keepdim=True))
        self.position += 1


def build_llama(case: ModelCase, batches: Sequence[int]) -> Built:
    """A llama of random weights, each layer made on the device as it is stored.

    A layer of a shape that was not seen before is checked for every batch size first.

    Raises:
        WrongAnswerError: where a layer does not compute with its own weight.
    """
    dtype = DTYPES[case.dtype]
    format = None if case.format in DTYPES else Format.parse(case.format)
    weights, bits = [0], [0.0, 0.0]
    backends: set[str] = set()
    checked: set[tuple[int, int]] = set()

    def linear(name: str, n: int, k: int) -> nn.Module:
        if format is None or (case.skip and re.search(case.skip, name)):
            W = torch.empty(n, k, device=case.device, dtype=dtype).normal_(std=k**-0.5)
            layer = nn.Linear(k, n, bias=False, device="meta")
            layer.weight = nn.Parameter(W, requires_grad=False)
            weights[0] += W.nbytes
            return layer
        q = random_weight(format, n, k, case.device, seed=weights[0] % 2**31)
        quantised = QuantisedLinear.from_quantised(q, backend=case.backend, dtype=dtype)
        if (n, k) not in checked:
            checked.add((n, k))
            check_layer(quantised, q, case, batches)
        weights[0] += q.nbytes
        bits[0] += q.bits_per_weight * n * k
        bits[1] += n * k
        backends.add(quantised.weight.backend_name)
        return quantised

    size = SIZES[case.model]
    if case.layers is not None:
        size = replace(size, layers=case.layers)
    llama = Llama(size, linear, device=case.device, dtype=dtype, fused=case.fused)
    norms = (2 * size.layers + 1) * size.dim * dtype.itemsize
    weight_bytes = weights[0] + norms
    return Built(
        decoder=llama,
        weight_bytes=weight_bytes,
        stored_bytes=weight_bytes + llama.embedding.nbytes,
        parameters=size.parameters,
        bits_per_weight=bits[0] / bits[1] if bits[1] else dtype.itemsize * 8,
        backends=", ".join(sorted(backends)) or "torch",
    )


def check_layer(
    layer: nn.Module, q: QuantisedTensor, case: ModelCase, batches: Sequence[int]
) -> None:
    """Checks a layer's answers for every batch size, as a kernel's are.

    Raises:
        WrongAnswerError: where one is wrong.
    """
    n, k = q.shape
    dtype = DTYPES[case.dtype]
    kernel = KernelCase(1, n, k, str(q.format), case.dtype, case.device, case.backend)

    def weight(oracle: torch.dtype) -> Tensor:
        return exact_weight(q, dtype, oracle)

    generator = torch.Generator(case.device).manual_seed(0)
    inputs = [torch.randn(m, k, device=case.device, generator=generator).to(dtype) for m in batches]
    with torch.inference_mode():
        check(Prepared([layer], weight, q.nbytes, kernel.backend, codebook_bytes(q)), inputs)


def _seconds(device: torch.device, call: Callable[[], Any]) -> float:
    _synchronise(device)
    start = time.perf_counter()
    call()
    _synchronise(device)
    return time.perf_counter() - start


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
