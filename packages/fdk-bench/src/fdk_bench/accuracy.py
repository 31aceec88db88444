"""Formats against weight error and against the change in a trained model's output."""

import copy
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import fdk_formats
from fdk_bench.models import TextModel, embed
from fdk_bench.records import Row
from fdk_formats import Format, NoBackendError, QuantisedLinear, QuantisedTensor

# Weights rounded to bf16: what a 16-bit model costs and loses.
BASELINE = "bf16"
DEFAULT_SKIP = "pooler"  # its output is no part of a mean-pooled embedding
# By width; a group size is added where none is named.
DEFAULT_FORMATS = (
    BASELINE,
    *("kmeans8", "int8", "uniform8", "affine8"),
    *(
        "kmeans4-search",
        "kmeans4",
        "kmeans4-g32",
        "kmeans4-row",
        "int4",
        "uniform4",
        "uniform4-search",
    ),
    *("nf4", "sf4", "fp4", "crd_normal4", "affine4"),
    *("kmeans3", "int3", "uniform3"),
    *("kmeans2-search", "kmeans2", "int2", "uniform2", "uniform2-search"),
    *("kmeans1", "int1", "uniform1"),
)
# The widths at which k-means must beat the uniform grid, and the codebooks that are such a grid.
COMPARED_BITS = (2, 3, 4)
UNIFORM_GRIDS = ("uniform", "int")


@dataclass(frozen=True)
class AccuracyCase:
    """What was measured: ``format`` is a format's short form or ``BASELINE``."""

    format: str
    model: str
    backend: str
    skip: str
    sentences: int


@dataclass(frozen=True)
class AccuracyValues:
    """What a format costs and what it loses.

    Attributes:
        layers: linear layers quantised.
        weights: weights in them.
        bits_per_weight: codes, scales and zero points over weights.
        nbytes: bytes of all stored tensors, codebooks included.
        file_bytes: size of the file that holds the quantised layers.
        weight_error: root mean square of W_hat - W over that of W, over all weights together.
        cosine_mean: cosine similarity of quantised and original embedding, mean over sentences.
        cosine_min: the same for the sentence that changed most.
        seconds: time to quantise.
        backends: names of the backends that computed the embeddings; ``torch`` for the baseline.
    """

    layers: int
    weights: int
    bits_per_weight: float
    nbytes: int
    file_bytes: int
    weight_error: float
    cosine_mean: float
    cosine_min: float
    seconds: float
    backends: str


AccuracyRow = Row[AccuracyCase, AccuracyValues]


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, the layers of it that are quantised, and its embeddings before."""

    model: TextModel
    skip: str
    layers: Mapping[str, nn.Linear]
    sentences: Sequence[str]
    embeddings: Tensor


@dataclass(frozen=True)
class Comparison:
    """k-means beside a uniform grid that differs from it in nothing but the codebook."""

    bits: int
    kmeans: str
    kmeans_error: float
    uniform: str
    uniform_error: float

    @property
    def holds(self) -> bool:
        """Whether k-means has the lower weight error."""
        return self.kmeans_error < self.uniform_error


def parse_formats(texts: Sequence[str], group_size: str = "64") -> list[str]:
    """Canonical short forms, each once; ``group_size`` (a number or ``row``) where none is named.

    Raises:
        ValueError: for text that is no format.
    """
    suffix = "row" if group_size == "row" else f"g{group_size}"
    formats = []
    for text in texts:
        named = any(re.fullmatch(r"row|g\d+", part) for part in text.split("-"))
        full = text if named or text == BASELINE else f"{text}-{suffix}"
        try:
            formats.append(BASELINE if full == BASELINE else str(Format.parse(full)))
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from None
    return list(dict.fromkeys(formats))


def prepare(model: TextModel, sentences: Sequence[str], skip: str = DEFAULT_SKIP) -> Subject:
    """Picks the linear layers whose names ``skip`` (a regular expression) does not match.

    Raises:
        ValueError: where no sentence is given or no layer is left.
    """
    if not sentences:
        raise ValueError("accuracy: wanted at least one sentence, got none")
    linears = {n: m for n, m in model.module.named_modules() if isinstance(m, nn.Linear)}
    layers = {n: m for n, m in linears.items() if not (skip and re.search(skip, n))}
    if not layers:
        raise ValueError(
            f"accuracy: wanted linear layers, but {model.name} has {len(linears)} and "
            f"skip={skip!r} leaves none"
        )
    embeddings = embed(model, model.module, sentences)
    return Subject(model, skip, layers, sentences, embeddings)


def measure_formats(
    subject: Subject,
    formats: Sequence[str],
    backend: str = "auto",
    on_layer: Callable[[str], None] = lambda name: None,
) -> Iterator[AccuracyRow]:
    """Measures one format after another; one that fails is a row with its error.

    ``on_layer`` is called with the format after each layer that was quantised.
    """
    for name in formats:
        case = AccuracyCase(name, subject.model.name, backend, subject.skip, len(subject.sentences))
        try:
            values = measure(subject, name, backend, partial(on_layer, name))
        except Exception as error:  # whatever a format or a backend raises: the run goes on
            yield Row(case, error=f"{type(error).__name__}: {error}")
        else:
            yield Row(case, values)


def measure(
    subject: Subject,
    format: str,
    backend: str = "auto",
    on_layer: Callable[[], None] = lambda: None,
) -> AccuracyValues:
    """Quantises every layer to ``format`` and measures what that costs and loses."""
    start = time.perf_counter()
    stored: dict[str, QuantisedTensor | Tensor] = {}
    for name, linear in subject.layers.items():
        weight = linear.weight.detach()
        if format == BASELINE:
            stored[name] = weight.bfloat16()
        else:
            stored[name] = fdk_formats.quantise(weight, format)
        on_layer()
    seconds = time.perf_counter() - start
    layers = {n: layer_of(w, subject.layers[n], backend) for n, w in stored.items()}
    cosines = torch.cosine_similarity(
        embed(subject.model, with_layers(subject, layers), subject.sentences).double(),
        subject.embeddings.double(),
    )
    weights = sum(linear.weight.numel() for linear in subject.layers.values())
    return AccuracyValues(
        layers=len(stored),
        weights=weights,
        bits_per_weight=sum(_bits(weight) for weight in stored.values()) / weights,
        nbytes=sum(weight.nbytes for weight in stored.values()),
        file_bytes=file_bytes(stored),
        weight_error=weight_error(subject, stored),
        cosine_mean=cosines.mean().item(),
        cosine_min=cosines.min().item(),
        seconds=seconds,
        backends=", ".join(sorted({_backend_name(layer) for layer in layers.values()})),
    )


def with_layers(subject: Subject, layers: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of the model with other layers in place; every other tensor is shared, not copied."""
    module = subject.model.module
    # deepcopy takes what its memo holds instead of a copy.
    memo: dict[int, object] = {id(t): t for t in (*module.parameters(), *module.buffers())}
    memo |= {id(subject.layers[name]): layer for name, layer in layers.items()}
    return copy.deepcopy(module, memo)


def layer_of(weight: QuantisedTensor | Tensor, linear: nn.Linear, backend: str) -> nn.Module:
    """A layer with the bias of ``linear`` and the stored weight, float32 in and out.

    ``auto`` is the backend that fdk_formats picks, and the reference where none takes the layer.
    """
    if isinstance(weight, Tensor):
        rounded = copy.deepcopy(linear)
        rounded.weight = nn.Parameter(weight.float(), requires_grad=False)
        return rounded
    build = partial(QuantisedLinear.from_quantised, weight, linear.bias, dtype=torch.float32)
    try:
        return build(backend=backend)
    except NoBackendError:
        if backend != "auto":
            raise
        return build(backend="reference")


def weight_error(subject: Subject, stored: Mapping[str, QuantisedTensor | Tensor]) -> float:
    """Root of (sum of (W_hat - W)^2 over sum of W^2), over all layers."""
    error = total = 0.0
    for name, weight in stored.items():
        W = subject.layers[name].weight.detach().double()
        W_hat = weight.dequantise() if isinstance(weight, QuantisedTensor) else weight
        error += (W_hat.double() - W).square().sum().item()
        total += W.square().sum().item()
    return float((error / total) ** 0.5)


def file_bytes(stored: Mapping[str, QuantisedTensor | Tensor]) -> int:
    """Size of the file that ``fdk_formats.save`` writes of these layers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        fdk_formats.save(path, stored)
        return path.stat().st_size


def compare_kmeans(rows: Sequence[AccuracyRow]) -> list[Comparison]:
    """Every k-means row of 2, 3 or 4 bits beside its best uniform grid, where both were measured.

    Like for like: same bits, group size, scale rule and scale dtype.
    """
    errors = {r.case.format: r.values.weight_error for r in rows if r.values is not None}
    comparisons = []
    for name, error in errors.items():
        if name == BASELINE or (format := Format.parse(name)).codebook != "kmeans":
            continue
        grids = [str(replace(format, codebook=codebook)) for codebook in UNIFORM_GRIDS]
        found = [grid for grid in grids if grid in errors]
        if format.bits in COMPARED_BITS and found:
            best = min(found, key=errors.__getitem__)
            comparisons.append(Comparison(format.bits, name, error, best, errors[best]))
    return comparisons


def _backend_name(layer: nn.Module) -> str:
    return layer.weight.backend_name if isinstance(layer, QuantisedLinear) else "torch"


def _bits(weight: QuantisedTensor | Tensor) -> float:
    if isinstance(weight, QuantisedTensor):
        n, k = weight.shape
        return n * k * weight.bits_per_weight
    return 8.0 * weight.nbytes
