"""Cases and values of the accuracy benchmark, its formats, and which rows are compared."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fdk_bench.records import Row
from fdk_formats import Format
from fdk_formats.model import DEFAULT_SKIP

# Weights rounded to bf16: what a 16-bit model costs and loses. Of a model in bf16 nothing.
BASELINE = "bf16"
# A pooler's output is no part of a mean-pooled embedding; an output head is often the embedding.
SKIP_POOLER_AND_HEAD = rf"pooler|{DEFAULT_SKIP}"
CALIBRATED = "+cal"
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
    """What was measured: ``format`` is a format's short form or ``BASELINE``.

    ``calibration`` names the text whose second moments weighed the error; empty for none. The
    model ran on ``device`` in ``dtype``, which older rows do not say.
    """

    format: str
    model: str
    backend: str
    skip: str
    sentences: int
    calibration: str = ""
    device: str = "cpu"
    dtype: str = "fp32"

    def __str__(self) -> str:
        return self.label

    @property
    def label(self) -> str:
        """The format, marked where it was calibrated."""
        return f"{self.format} {CALIBRATED}" if self.calibration else self.format


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
        output_error: of x @ W_hat.T against x @ W.T for what each layer is given by the sentences:
            relative error as of the weights, the root mean square over layers.
        cosine_mean: cosine similarity of quantised and original embedding, mean over sentences.
        cosine_min: the same for the sentence that changed most.
        seconds: time to quantise.
        backends: names of the backends that computed the embeddings; ``torch`` for the baseline.
        divergence: of the next token's distribution, Kullback-Leibler in nats from the original's,
            mean over tokens; None for a model that has no output head.
    """

    layers: int
    weights: int
    bits_per_weight: float
    nbytes: int
    file_bytes: int
    weight_error: float
    output_error: float
    cosine_mean: float
    cosine_min: float
    seconds: float
    backends: str
    divergence: float | None = None


@dataclass(frozen=True)
class LayerCase:
    """One layer in one format; see ``AccuracyCase``."""

    format: str
    model: str
    layer: str
    calibration: str = ""
    device: str = "cpu"
    dtype: str = "fp32"


@dataclass(frozen=True)
class LayerValues:
    """What one layer loses; ``output_error`` is None where the sentences do not reach it."""

    n: int
    k: int
    bits_per_weight: float
    weight_error: float
    output_error: float | None


AccuracyRow = Row[AccuracyCase, AccuracyValues]
LayerRow = Row[LayerCase, LayerValues]


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


def takes_importance(format: str) -> bool:
    """Whether fitting leaves a choice that importance can weigh: a k-means, or a search."""
    if format == BASELINE:
        return False
    parsed = Format.parse(format)
    return parsed.codebook == "kmeans" or parsed.scale_rule == "search"


def compare_kmeans(rows: Sequence[AccuracyRow]) -> list[Comparison]:
    """Every k-means row of 2, 3 or 4 bits beside its best uniform grid, where both were measured.

    Like for like: same bits, group size, scale rule and scale dtype.
    """
    plain = [r for r in rows if not r.case.calibration]
    errors = {r.case.format: r.values.weight_error for r in plain if r.values is not None}
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


def compare_calibrated(rows: Sequence[AccuracyRow]) -> list[tuple[AccuracyRow, AccuracyRow]]:
    """Each format that was measured without and with calibration, as a pair."""
    plain = {r.case.format: r for r in rows if r.values is not None and not r.case.calibration}
    return [
        (plain[r.case.format], r)
        for r in rows
        if r.values is not None and r.case.calibration and r.case.format in plain
    ]
