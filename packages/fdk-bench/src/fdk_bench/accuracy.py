"""Formats against the error of weights and layers, and the change of a model's output."""

import copy
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import fdk_formats
from fdk_bench.accuracy_cases import (
    BASELINE,
    SKIP_POOLER_AND_HEAD,
    AccuracyCase,
    AccuracyRow,
    AccuracyValues,
    LayerCase,
    LayerRow,
    LayerValues,
    takes_importance,
)
from fdk_bench.calibration import Calibration, CalibrationText, calibrate, rows_of
from fdk_bench.models import TextModel, embed, next_tokens
from fdk_bench.records import Row
from fdk_formats import NoBackendError, QuantisedLinear, QuantisedTensor


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, the layers of it that are quantised, and what it computes before that.

    Attributes:
        embeddings: of the sentences, ``[sentences, hidden]``.
        rows: what each layer is given by them, ``[rows, k]``.
        next_tokens: log probabilities ``[tokens, vocabulary]``; None without an output head.
        calibration: importance of the inputs, where a text was given.
    """

    model: TextModel
    skip: str
    layers: Mapping[str, nn.Linear]
    sentences: Sequence[str]
    embeddings: Tensor
    rows: Mapping[str, Tensor]
    next_tokens: Tensor | None = None
    calibration: Calibration | None = None


def prepare(
    model: TextModel,
    sentences: Sequence[str],
    skip: str = SKIP_POOLER_AND_HEAD,
    calibration: CalibrationText | None = None,
) -> Subject:
    """Picks the linear layers whose names ``skip`` (a regular expression) does not match.

    Raises:
        ValueError: where no sentence is given, or no layer is left.
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
    return Subject(
        model,
        skip,
        layers,
        sentences,
        embed(model, model.module, sentences),
        rows_of(model, layers, sentences),
        next_tokens(model, model.module, sentences) if model.causal else None,
        calibrate(model, layers, calibration) if calibration else None,
    )


def measured_formats(subject: Subject, formats: Sequence[str]) -> list[tuple[str, bool]]:
    """What is measured: each format, and once more calibrated where that can change its codes."""
    calibrated = subject.calibration is not None
    return [
        (name, weighed)
        for name in formats
        for weighed in ((False, True) if calibrated and takes_importance(name) else (False,))
    ]


def measure_formats(
    subject: Subject,
    formats: Sequence[str],
    backend: str = "auto",
    on_layer: Callable[[str], None] = lambda name: None,
    on_layers: Callable[[Sequence[LayerRow]], None] = lambda rows: None,
) -> Iterator[AccuracyRow]:
    """Measures one format after another; one that fails is a row with its error.

    ``on_layer`` is called with the format after each layer that was quantised, ``on_layers`` with
    the rows of the layers before the row of a format.
    """
    for name, weighed in measured_formats(subject, formats):
        text = subject.calibration.text if weighed and subject.calibration else ""
        model, where = subject.model, subject.model.device.type
        case = AccuracyCase(
            name,
            model.name,
            backend,
            subject.skip,
            len(subject.sentences),
            text,
            where,
            model.dtype,
        )
        try:
            values, layers = measure(
                subject, name, backend, partial(on_layer, case.label), weighed=weighed
            )
        except Exception as error:  # whatever a format or a backend raises: the run goes on
            yield Row(case, error=f"{type(error).__name__}: {error}")
        else:
            cases = (
                LayerCase(name, model.name, layer, text, where, model.dtype) for layer in layers
            )
            on_layers([Row(*pair) for pair in zip(cases, layers.values(), strict=True)])
            yield Row(case, values)


def measure(
    subject: Subject,
    format: str,
    backend: str = "auto",
    on_layer: Callable[[], None] = lambda: None,
    *,
    weighed: bool = False,
) -> tuple[AccuracyValues, dict[str, LayerValues]]:
    """Quantises every layer to ``format``; what that costs and loses, as a whole and by layer.

    ``weighed`` counts errors by the importance of their inputs.
    """
    start = time.perf_counter()
    importance = subject.calibration.importance if weighed and subject.calibration else {}
    stored: dict[str, QuantisedTensor | Tensor] = {}
    for name, linear in subject.layers.items():
        weight = linear.weight.detach()
        if format == BASELINE:
            stored[name] = weight.bfloat16()
        else:
            weights = importance.get(name)
            # A layer that the text does not reach (an expert, say) has no importance to weigh.
            weights = weights if weights is not None and weights.any() else None
            stored[name] = fdk_formats.quantise(weight, format, weights)
        on_layer()
    seconds = time.perf_counter() - start
    layers = {n: layer_of(w, subject.layers[n], backend) for n, w in stored.items()}
    changed = with_layers(subject, layers)
    cosines = torch.cosine_similarity(
        embed(subject.model, changed, subject.sentences).double(), subject.embeddings.double()
    )
    weights_of = {name: linear.weight.numel() for name, linear in subject.layers.items()}
    by_layer = {name: layer_values(subject, name, weight) for name, weight in stored.items()}
    bits = sum(v.bits_per_weight * v.n * v.k for v in by_layer.values())
    values = AccuracyValues(
        layers=len(stored),
        weights=sum(weights_of.values()),
        bits_per_weight=bits / sum(weights_of.values()),
        nbytes=sum(weight.nbytes for weight in stored.values()),
        file_bytes=file_bytes(stored),
        weight_error=weight_error(subject, by_layer),
        output_error=root_mean_square(
            [v.output_error for v in by_layer.values() if v.output_error is not None]
        ),
        cosine_mean=cosines.mean().item(),
        cosine_min=cosines.min().item(),
        seconds=seconds,
        backends=", ".join(sorted({_backend_name(layer) for layer in layers.values()})),
        divergence=divergence(subject, changed),
    )
    return values, by_layer


def with_layers(subject: Subject, layers: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of the model with other layers in place; every other tensor is shared, not copied."""
    module = subject.model.module
    # deepcopy takes what its memo holds instead of a copy.
    memo: dict[int, object] = {id(t): t for t in (*module.parameters(), *module.buffers())}
    memo |= {id(subject.layers[name]): layer for name, layer in layers.items()}
    return copy.deepcopy(module, memo)


def layer_of(weight: QuantisedTensor | Tensor, linear: nn.Linear, backend: str) -> nn.Module:
    """A layer with the bias of ``linear`` and the stored weight, in its dtype in and out.

    ``auto`` is the backend that fdk_formats picks, and the reference where none takes the layer.
    """
    if isinstance(weight, Tensor):
        rounded = copy.deepcopy(linear)
        rounded.weight = nn.Parameter(weight.to(linear.weight.dtype), requires_grad=False)
        return rounded
    dtype = linear.weight.dtype
    build = partial(QuantisedLinear.from_quantised, weight, linear.bias, dtype=dtype)
    try:
        return build(backend=backend)
    except NoBackendError:
        if backend != "auto":
            raise
        return build(backend="reference")


def layer_values(subject: Subject, name: str, weight: QuantisedTensor | Tensor) -> LayerValues:
    """The errors of one layer, in double precision."""
    W = subject.layers[name].weight.detach().double()
    W_hat = weight.dequantise() if isinstance(weight, QuantisedTensor) else weight
    dW = W_hat.double() - W
    x = subject.rows[name].double()
    n, k = W.shape
    return LayerValues(
        n=n,
        k=k,
        bits_per_weight=_bits(weight) / (n * k),
        weight_error=_ratio(dW, W),
        output_error=_ratio(x @ dW.T, x @ W.T) if len(x) else None,
    )


def weight_error(subject: Subject, layers: Mapping[str, LayerValues]) -> float:
    """Root of (sum of (W_hat - W)^2 over sum of W^2), over all layers."""
    squares = {
        name: linear.weight.detach().double().square().sum().item()
        for name, linear in subject.layers.items()
    }
    error = sum(squares[name] * values.weight_error**2 for name, values in layers.items())
    return float((error / sum(squares.values())) ** 0.5)


def divergence(subject: Subject, module: nn.Module) -> float | None:
    """Mean of KL(original || ``module``) over the tokens of the sentences, in nats."""
    before = subject.next_tokens
    if before is None:
        return None
    after = next_tokens(subject.model, module, subject.sentences)
    return (before.exp() * (before - after)).sum(-1).double().mean().item()


def root_mean_square(values: Sequence[float]) -> float:
    """Of any numbers; 0 of none."""
    return float((sum(v * v for v in values) / len(values)) ** 0.5) if values else 0.0


def _ratio(error: Tensor, whole: Tensor) -> float:
    """Of the norms; 0 for a layer of zeros, which every format stores exactly."""
    norm = whole.norm().item()
    return error.norm().item() / norm if norm else 0.0


def file_bytes(stored: Mapping[str, QuantisedTensor | Tensor]) -> int:
    """Size of the file that ``fdk_formats.save`` writes of these layers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        fdk_formats.save(path, stored)
        return path.stat().st_size


def _backend_name(layer: nn.Module) -> str:
    return layer.weight.backend_name if isinstance(layer, QuantisedLinear) else "torch"


def _bits(weight: QuantisedTensor | Tensor) -> float:
    if isinstance(weight, QuantisedTensor):
        n, k = weight.shape
        return n * k * weight.bits_per_weight
    return 8.0 * weight.nbytes
