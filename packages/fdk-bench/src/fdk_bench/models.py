"""Whole models: a decoding step, the first token, memory, and the share of the roofline."""

import gc
import importlib
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fdk_bench.cases import BITSANDBYTES, DTYPES
from fdk_bench.engines import Engine, engine_of
from fdk_bench.peers.base import Prepared, check
from fdk_bench.peers.dense import codebook_bytes
from fdk_bench.roofline import Floor, read_floor
from fdk_bench.rows import Row
from fdk_bench.timing import summarise
from fdk_formats import QuantisedLinear, QuantisedTensor, model_report, quantise_model
from fdk_formats.testing.conformance import exact_weight

RATE_BYTES = 1 << 30  # the read rate of a model is that of one large read
ROUNDS = 5  # calls timed with many tokens, and with one
NF4_BITS = 4.5  # a float32 scale for 64 weights
PERPLEXITY_TOKENS = 2048  # tokens of a window, each scored on its own
BEGIN_TOKENS, CONTINUED_TOKENS = 32, 24


@dataclass(frozen=True)
class ModelCase:
    """A model decoding ``batch`` sequences.

    Attributes:
        model: a size of ``SIZES``, or a Hugging Face folder or id.
        batch: sequences decoded together.
        format: a format's short form, a name of ``DTYPES`` for no quantisation, or
            ``BITSANDBYTES``.
        backend: backend of the quantised layers.
        dtype: dtype of activations, a name of ``DTYPES``.
        device: ``cpu`` or ``cuda``.
        skip: regular expression of layers that are not quantised.
        context: tokens of the prompt.
        reps: tokens decoded by a call that is timed.
        compiled: whether torch may compile what has no kernels of ours.
        fused: whether q, k and v are one product, and gate and up another. A real model that is
            not quantised keeps the layers of its files.
        layers: blocks of a random llama; None for those of its size.
        engine: see ``ENGINES``.
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
    engine: str = "fdk"

    def __str__(self) -> str:
        blocks = "" if self.layers is None else f"-l{self.layers}"
        name = f"{self.model}{blocks}-b{self.batch}-{self.format}-{self.backend}-{self.device}"
        return f"{name}-{self.engine}"


@dataclass(frozen=True)
class ModelValues:
    """Measurements of a model; times are seconds.

    Attributes:
        backends: those of the quantised layers; without any, ``torch`` or ``bitsandbytes``.
        parameters: all of them.
        bits_per_weight: bits per weight of the quantised layers; 16 without any.
        weight_bytes: read in one step: all layers and norms, nothing of the embedding.
        stored_bytes: bytes of the whole model, embedding included.
        cache_bytes: keys and values of ``batch`` sequences, or None where the engine does not say.
        memory: on a GPU the most that was allocated while decoding; on a CPU parameters, buffers
            and cache; None for vLLM.
        step_time, step_time_min, spread: of a token after the first, see ``token_seconds``.
        tokens_per_second: ``batch`` over ``step_time``.
        first_token_time: of a call for one token, prompt included, the best of its rounds.
        floor: time to read ``weight_bytes`` at the read rate measured in the run: on a CPU between
            the rounds, on a GPU before the first model.
        floor_share: floor over step_time, the share of the roofline.
        graph: whether a step was one CUDA graph, or None where the engine does not say.
        build_seconds: time to make or load the model and quantise it.
        compile_seconds: time of the first call, which compiles and captures.
        perplexity: on the text that was given, or None.
        speedup_16: tokens per second over those of the model that is not quantised, or None.
        continuation: continuation of the first tokens of the text that was given, greedy; or None.
    """

    backends: str
    parameters: int
    bits_per_weight: float
    weight_bytes: int
    stored_bytes: int
    cache_bytes: int | None
    memory: int | None
    step_time: float
    step_time_min: float
    spread: float
    tokens_per_second: float
    first_token_time: float
    floor: float
    floor_share: float
    graph: bool | None
    build_seconds: float
    compile_seconds: float
    perplexity: float | None = None
    speedup_16: float | None = None
    continuation: str | None = None


ModelRow = Row[ModelCase, ModelValues]


@dataclass(frozen=True)
class ModelRun:
    """Models to measure: each in each format, by each backend, at each batch size.

    Attributes:
        models, formats, batches, backends: combined with each other; 16 bits run once, by torch.
        engines: by which each model decodes.
        case: everything else, shared by all cases.
    """

    models: Sequence[str]
    formats: Sequence[str]
    batches: Sequence[int]
    backends: Sequence[str]
    case: ModelCase
    engines: Sequence[str] = ("fdk",)

    def builds(self) -> list[ModelCase]:
        """Return a case for each model to build, with the first batch size."""
        return [
            replace(self.case, model=model, format=format, backend=backend, batch=self.batches[0])
            for model in self.models
            for format in self.formats
            for backend in self.backends_of(format)
        ]

    def backends_of(self, format: str) -> Sequence[str]:
        """Return the backends of a format; other projects' layers are their own."""
        if format in DTYPES:
            return ("torch",)
        return ("bitsandbytes",) if format == BITSANDBYTES else self.backends

    def cases(self) -> list[ModelCase]:
        """Return the case of each row."""
        return [case for first in self.builds() for case in self.cases_of(first)]

    def cases_of(self, first: ModelCase) -> list[ModelCase]:
        """Return the cases of a model to build."""
        return [
            replace(first, batch=batch, engine=engine)
            for batch in self.batches
            for engine in self.engines
        ]


@dataclass(frozen=True, eq=False)
class Built:
    """A model ready to decode.

    Attributes:
        model: a model of transformers.
        weight_bytes, stored_bytes, parameters, bits_per_weight, backends, perplexity, continuation:
            see ``ModelValues``.
    """

    model: Any
    weight_bytes: int
    stored_bytes: int
    parameters: int
    bits_per_weight: float
    backends: str
    perplexity: float | None = None
    continuation: str | None = None


Build = Callable[[ModelCase, Sequence[int]], Built]


def measure(
    run: ModelRun,
    build: Build,
    on_step: Callable[[str], None] = lambda text: None,
    earlier: Sequence[ModelRow] = (),
) -> Iterator[ModelRow]:
    """Yield rows as they are measured; a model that fails gives rows with its error.

    Args:
        run: what to measure.
        build: makes a model, checked for all batch sizes.
        on_step: called with a text before each step of the run.
        earlier: rows of cases that have been measured, which are left out.
    """
    measured = {row.case: row.values for row in earlier if row.values is not None}
    if all(case in measured for case in run.cases()):
        return
    device = run.case.device
    floor = read_floor(device)
    floor.seconds(RATE_BYTES)  # allocates its memory before that of a model is counted
    baseline = {
        (case.model, case.batch, case.engine): values.tokens_per_second
        for case, values in measured.items()
        if case.format in DTYPES
    }
    for first in run.builds():
        cases = [case for case in run.cases_of(first) if case not in measured]
        if not cases:
            continue
        on_step(f"building {first.model} {first.format} {first.backend}")
        before, start = _allocated(device), time.perf_counter()
        try:
            built = build(first, run.batches)
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
            key = case.model, case.batch, case.engine
            if case.format in DTYPES:
                baseline[key] = values.tokens_per_second
            elif dense := baseline.get(key):
                values = replace(values, speedup_16=values.tokens_per_second / dense)
            yield Row(case, values)
        del built
        release()


def release() -> None:
    """Free the memory of a model that is no longer needed, and its compiled code."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def measure_case(
    case: ModelCase, built: Built, floor: Floor, build_seconds: float, before: int = 0
) -> ModelValues:
    """Decode with a model as a user does, and time the first token and the others.

    Args:
        case: case of the model that was built.
        built: the model.
        floor: read floor of its device.
        build_seconds: time to build the model, stored in the row.
        before: bytes that were allocated on the device before the model was built.
    """
    device = torch.device(case.device)
    generator = torch.Generator(device).manual_seed(0)
    vocabulary = int(built.model.config.get_text_config().vocab_size)
    shape, length = (case.batch, case.context), case.context + 1 + case.reps
    prompt = torch.randint(vocabulary, shape, device=device, generator=generator)
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with engine_of(case.engine, built.model, compiled=case.compiled, length=length) as engine:
        start = time.perf_counter()
        engine.generate(prompt, 1 + case.reps)
        compile_seconds = time.perf_counter() - start
        floor.begin()
        firsts, steps = token_seconds(engine, prompt, case.reps, floor.probe)
        timing = summarise(steps, "calls")
        cache_bytes, is_graph = engine.cache_bytes, engine.is_graph
    memory: int | None = None
    if case.engine != "vllm":
        peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
        memory = peak or held_bytes(built.model) + (cache_bytes or 0)
    least = built.weight_bytes * floor.seconds(RATE_BYTES) / RATE_BYTES
    return ModelValues(
        backends=built.backends,
        parameters=built.parameters,
        bits_per_weight=built.bits_per_weight,
        weight_bytes=built.weight_bytes,
        stored_bytes=built.stored_bytes,
        cache_bytes=cache_bytes,
        memory=memory,
        step_time=timing.median,
        step_time_min=timing.minimum,
        spread=timing.spread,
        tokens_per_second=case.batch / timing.median,
        first_token_time=min(firsts),
        floor=least,
        floor_share=least / timing.median,
        graph=is_graph,
        build_seconds=build_seconds,
        compile_seconds=compile_seconds,
        perplexity=built.perplexity,
        continuation=built.continuation,
    )


def token_seconds(
    engine: Engine, prompt: Tensor, count: int, probe: Callable[[], None] = lambda: None
) -> tuple[list[float], list[float]]:
    """Time calls for one token, and the tokens after it.

    A round is a call for one token and one for ``1 + count``; a token takes the difference over
    ``count``. Calls begin and end with an idle device, so all that the host does is counted.

    Returns:
        Seconds of the calls for one token, and of a token after it, one each of ``ROUNDS``.
    """
    firsts, steps = [], []
    for _ in range(ROUNDS):
        probe()
        times = []
        for tokens in (1, 1 + count):
            start = time.perf_counter()
            engine.generate(prompt, tokens)
            times.append(time.perf_counter() - start)
        firsts.append(times[0])
        steps.append((times[1] - times[0]) / count)
    return firsts, steps


def held_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers; shared bytes count once."""
    held = end = 0
    # Fused layers, tied weights and a mapped file share bytes.
    tensors = (*model.parameters(), *model.buffers())
    for start, nbytes in sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors):
        held += max(0, start + nbytes - max(start, end))
        end = max(end, start + nbytes)
    return held


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated(device) if torch.device(device).type == "cuda" else 0


def check_layer(
    layer: nn.Module, q: QuantisedTensor, case: ModelCase, batches: Sequence[int]
) -> None:
    """Check a quantised layer's answers for every batch size, as kernels are checked.

    Raises:
        WrongAnswerError: where one is wrong.
    """
    weight = partial(exact_weight, q, DTYPES[case.dtype])
    prepared = Prepared([layer], weight, q.nbytes, case.backend, codebook_bytes(q))
    _check(prepared, q.shape[1], case, batches)


def _check(prepared: Prepared, k: int, case: ModelCase, batches: Sequence[int]) -> None:
    generator = torch.Generator(case.device).manual_seed(0)
    inputs = [torch.randn(m, k, device=case.device, generator=generator) for m in batches]
    with torch.inference_mode():
        check(prepared, [x.to(DTYPES[case.dtype]) for x in inputs])


def nf4_layer(source: nn.Linear) -> Any:
    """Return a layer of bitsandbytes with the weight of another, on its device.

    Raises:
        ModuleNotFoundError: without bitsandbytes.
    """
    modules: Any = importlib.import_module("bitsandbytes.nn")
    n, k, W = source.out_features, source.in_features, source.weight
    options = {"quant_type": "nf4", "compress_statistics": False}
    layer = modules.Linear4bit(k, n, bias=source.bias is not None, compute_dtype=W.dtype, **options)
    layer.weight = modules.Params4bit(W.cpu(), requires_grad=False, **options)
    layer.bias = source.bias
    return layer.to(W.device)


def build_hf(case: ModelCase, batches: Sequence[int], text: str | None = None) -> Built:
    """Load a model from a folder or by its id and quantise it; score ``text`` if one is given.

    The first quantised layer of each kind is checked for every batch size.

    Raises:
        ValueError: where nothing is quantised.
        WrongAnswerError: where a layer does not compute with its own weight.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(case.model, dtype=DTYPES[case.dtype])
    model = model.to(case.device).eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    bits, backends, quantised = 8.0 * DTYPES[case.dtype].itemsize, "torch", model
    if case.format == BITSANDBYTES:
        for name, module in list(model.named_modules()):
            if type(module) is nn.Linear and not re.search(case.skip or "$^", name):
                model.set_submodule(name, nf4_layer(module))
        bits, backends = NF4_BITS, "bitsandbytes"
    elif case.format not in DTYPES:
        skip = case.skip or None
        quantised = quantise_model(
            model,
            case.format,
            skip,
            backend=case.backend,
            default_skip=False,
            fuse=case.fused,
        )
        layers = [m for m in quantised.modules() if isinstance(m, QuantisedLinear)]
        if not layers:
            raise ValueError(f"{case.model}: wanted layers to quantise, but --skip leaves none")
        bits = model_report(quantised).bits_per_weight
        backends = ", ".join(sorted({layer.backend_name for layer in layers}))
        check_layers(quantised, case, batches)
    stored = stored_bytes(quantised)
    score, continued = (None, None) if text is None else read_text(quantised, case.model, text)
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    return Built(
        model=quantised,
        weight_bytes=stored - (0 if tied else embedding.nbytes),
        stored_bytes=stored,
        parameters=sum(p.numel() for p in model.parameters()),
        bits_per_weight=bits,
        backends=backends,
        perplexity=score,
        continuation=continued,
    )


def check_layers(model: nn.Module, case: ModelCase, batches: Sequence[int]) -> None:
    """Check the first quantised layer of each kind for every batch size.

    Raises:
        WrongAnswerError: where an answer is not that of the layer's own weight.
    """
    checked: set[tuple[str, tuple[int, int]]] = set()
    for name, module in model.named_modules():
        if isinstance(module, QuantisedLinear):
            # The name matters too: v has the shape of k, but may be other rows of a fused product.
            kind = name.rpartition(".")[2], module.weight_shape
            if kind not in checked:
                checked.add(kind)
                check_layer(module.layout, module.quantised, case, batches)


def stored_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's state; a tensor that layers share counts once."""
    return sum(parameter.nbytes for parameter in {id(p): p for p in model.parameters()}.values())


@torch.inference_mode()
def read_text(model: nn.Module, name: str, text: str) -> tuple[float, str]:
    """Return the perplexity of a text, and the greedy continuation of its first tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
    return perplexity_of(model, ids), str(tokenizer.decode(continued_from(model, ids)))


@torch.inference_mode()
def continued_from(model: Any, ids: Tensor, count: int = CONTINUED_TOKENS) -> Tensor:
    """Return ``[count]`` tokens after the first ``BEGIN_TOKENS`` of ``ids :: [t]``, greedy."""
    begin = ids[:BEGIN_TOKENS].to(model.device)
    found = begin
    for _ in range(count):
        logits = model(input_ids=found[None]).logits[0, -1]
        found = torch.cat([found, logits.argmax(-1, keepdim=True)])
    return found[len(begin) :]


def perplexity_of(model: Any, ids: Tensor) -> float:
    """Return the exponential of the mean negative log likelihood of ``ids :: [t]``.

    The first token of each window is not scored.

    Raises:
        ValueError: if there are fewer than two tokens.
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
