"""Models to measure, and what is measured of each."""

from collections.abc import Sequence
from dataclasses import dataclass

from fdk_bench.cases import DTYPES
from fdk_bench.records import Row


@dataclass(frozen=True)
class ModelCase:
    """A model decoding ``batch`` sequences; ``format`` is a name of ``DTYPES`` for no quantisation.

    Attributes:
        model: a size of ``SIZES``, or a Hugging Face folder or id.
        context: tokens of the prompt.
        reps: decoding steps measured.
        fused: q, k and v as one product, gate and up as one; a real model that is not quantised is
            as its files have it.
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
        backends: that computed the quantised layers; where there are none, ``torch``, and ``gemv``
            where that is what one row goes through.
        parameters: all of them.
        bits_per_weight: of the quantised layers' weights; 16 where there are none.
        weight_bytes: read in one step: every layer and norm, of the embedding nothing.
        stored_bytes: of the whole model, embedding included.
        cache_bytes: keys and values of ``batch`` sequences of ``context + reps`` tokens, those of
            steps that are not timed, and on to a multiple of 64.
        memory: of a GPU, what the model has allocated while decoding; on a CPU the bytes of its
            parameters, buffers and cache (None in older rows), and nothing of what libraries take.
        step_time, step_time_min, spread: of one decoding step, see ``Timing`` and ``step_seconds``.
        tokens_per_second: ``batch`` over ``step_time``.
        first_token_time: from prompts on the device to their first tokens, the best of three.
        floor: time to read ``weight_bytes`` at the read rate measured in the run: on a CPU between
            the steps, on a GPU before the first model.
        floor_share: floor over step_time: the share of the roofline.
        graph: whether a step was one CUDA graph.
        first_token_graph: whether the first token was one too, as that of a llama on a GPU is where
            it can be captured; None in rows of before this was told.
        build_seconds: to make or load and quantise the model.
        compile_seconds: of the first prompt and the first steps.
        perplexity: on the text that was given, or None.
        continuation: of the first tokens of that text, each the likeliest; None in older rows too.
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
    first_token_graph: bool | None = None
    continuation: str | None = None


ModelRow = Row[ModelCase, ModelValues]


@dataclass(frozen=True)
class ModelRun:
    """What to measure: each model in each format, by each backend, at each batch size."""

    models: Sequence[str]
    formats: Sequence[str]
    batches: Sequence[int]
    backends: Sequence[str]
    dtype: str
    device: str
    skip: str
    context: int
    reps: int
    compiled: bool
    fused: bool = True
    layers: int | None = None

    def builds(self) -> list[tuple[str, str, str]]:
        """Models to build: size or name, format and backend; 16 bits are torch's, once."""
        return [
            (model, format, backend)
            for model in self.models
            for format in self.formats
            for backend in (("torch",) if format in DTYPES else self.backends)
        ]

    def cases(self, model: str, format: str, backend: str) -> list[ModelCase]:
        """One for each batch size."""
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
        return len(self.builds()) * len(self.batches)
