"""Accuracy of formats: error of weights and layers, and change of the model's output."""

import copy
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import fdk_formats
from fdk_bench.cases import canonical
from fdk_bench.rows import CALIBRATED, Row
from fdk_bench.text_models import SENTENCES_PER_BATCH, TextModel, batches, embed, next_tokens
from fdk_formats import Format, NoBackendError, QuantisedLinear, QuantisedTensor
from fdk_formats.model import DEFAULT_SKIP

# Weights rounded to bf16: what a 16-bit model costs and loses.
BASELINE = "bf16"
# A pooler's output is no part of a mean-pooled embedding; an output head is often the embedding.
SKIP_POOLER_AND_HEAD = rf"pooler|{DEFAULT_SKIP}"
# Default format per width; the group size is added where a format names none.
DEFAULT_FORMATS = (
    BASELINE,
    *("kmeans8", "int8", "uniform8", "affine8"),
    *("kmeans4-search", "kmeans4", "kmeans4-g32", "kmeans4-row", "int4", "uniform4"),
    *("uniform4-search", "nf4", "sf4", "fp4", "crd_normal4", "affine4"),
    *("kmeans3", "int3", "uniform3"),
    *("kmeans2-search", "kmeans2", "int2", "uniform2", "uniform2-search"),
    *("kmeans1", "int1", "uniform1"),
)
# Inputs kept of each layer: 224 layers of 4096 inputs take 0.9 GB.
MOST_ROWS = 256
# The text of recorded results: fixed, because another text would change every number.
PACKAGED = "packaged"
PACKAGED_TEXT = Path(__file__).parent / "calibration.txt"
See = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class AccuracyCase:
    """A model in one format.

    Attributes:
        format: a format's short form, or ``BASELINE``.
        model: its name.
        backend: the backend that computes the outputs.
        skip: regular expression of layers that stay as they are.
        sentences: number of sentences whose outputs are compared.
        calibration: name of the text whose second moments weighed the error; empty for none.
        device, dtype: device and dtype of the model.
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
    """Size and error of a model in one format.

    Attributes:
        layers: linear layers quantised.
        weights: number of weights in those layers.
        bits_per_weight: codes, scales and zero points over weights.
        nbytes: bytes of all stored tensors, codebooks included.
        file_bytes: size of the file of the quantised layers.
        weight_error: root mean square of W_hat - W over that of W, over all weights together.
        output_error: relative error of x @ W_hat.T for the inputs that the sentences give each
            layer, root mean square over layers.
        cosine_mean: cosine similarity of quantised and original embedding, mean over sentences.
        cosine_min: the same for the sentence that changed most.
        seconds: time to quantise.
        backends: the backends that computed the embeddings; ``torch`` for the baseline.
        divergence: Kullback-Leibler divergence of the next token's distribution from the
            original's in nats, mean over tokens; None for a model without an output head.
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
    """A layer in one format; see ``AccuracyCase``."""

    format: str
    model: str
    layer: str
    calibration: str = ""
    device: str = "cpu"
    dtype: str = "fp32"

    @property
    def label(self) -> str:
        """See ``AccuracyCase``."""
        return f"{self.format} {CALIBRATED}" if self.calibration else self.format


@dataclass(frozen=True)
class LayerValues:
    """Error of one layer; ``output_error`` is None where the sentences do not reach it."""

    n: int
    k: int
    bits_per_weight: float
    weight_error: float
    output_error: float | None


AccuracyRow = Row[AccuracyCase, AccuracyValues]
LayerRow = Row[LayerCase, LayerValues]


@dataclass(frozen=True)
class CalibrationText:
    """Calibration text: the names of its files, and their paragraphs."""

    name: str
    paragraphs: Sequence[str]


@dataclass(frozen=True, eq=False)
class Calibration:
    """Mean squares of the inputs of each layer over a text.

    Attributes:
        text: names of the files, for rows.
        importance: by layer, ``[k, float32]``: weight of the squared error of an input.
    """

    text: str
    importance: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, the layers to quantise, and its outputs before quantisation.

    Attributes:
        model: the model.
        skip: regular expression of layers that stay as they are.
        layers: the layers to quantise, by name.
        sentences: the sentences whose outputs are compared.
        embeddings: embeddings of the sentences, ``[sentences, hidden]``.
        rows: inputs of each layer, ``[rows, k]``.
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


def parse_formats(texts: Sequence[str], group_size: str = "64") -> list[str]:
    """Return canonical short forms, each once, with ``group_size`` where none is named.

    Raises:
        ValueError: for text that is not a format.
    """
    return list(dict.fromkeys(t if t == BASELINE else canonical(t, group_size) for t in texts))


def takes_importance(format: str) -> bool:
    """Return whether importance can change the codes of a format."""
    if format == BASELINE:
        return False
    parsed = Format.parse(format)
    return parsed.codebook == "kmeans" or parsed.scale_rule == "search"


def layers_of(model: TextModel, skip: str) -> dict[str, nn.Linear]:
    """Return the linear layers whose names ``skip`` (a regular expression) does not match.

    Raises:
        ValueError: where no layer is left.
    """
    linears = {n: m for n, m in model.module.named_modules() if isinstance(m, nn.Linear)}
    layers = {n: m for n, m in linears.items() if not (skip and re.search(skip, n))}
    if not layers:
        raise ValueError(
            f"accuracy: wanted linear layers, but {model.name} has {len(linears)} and "
            f"skip={skip!r} leaves none"
        )
    return layers


def prepare(
    model: TextModel,
    sentences: Sequence[str],
    skip: str = SKIP_POOLER_AND_HEAD,
    calibration: CalibrationText | None = None,
) -> Subject:
    """Choose the linear layers whose names ``skip`` (a regular expression) does not match.

    Raises:
        ValueError: where no sentence is given, or no layer is left.
    """
    if not sentences:
        raise ValueError("accuracy: wanted at least one sentence, got none")
    layers = layers_of(model, skip)
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


def cases_of(subject: Subject, formats: Sequence[str], backend: str) -> list[AccuracyCase]:
    """Return a case for each format, and one more, calibrated, where that can change its codes."""
    model, calibration = subject.model, subject.calibration
    return [
        AccuracyCase(
            name,
            model.name,
            backend,
            subject.skip,
            len(subject.sentences),
            text,
            model.device.type,
            model.dtype,
        )
        for name in formats
        for text in (("", calibration.text) if calibration and takes_importance(name) else ("",))
    ]


def measure_formats(
    subject: Subject,
    cases: Sequence[AccuracyCase],
    on_layer: Callable[[str], None] = lambda name: None,
    on_layers: Callable[[Sequence[LayerRow]], None] = lambda rows: None,
) -> Iterator[AccuracyRow]:
    """Measure each case in turn; one that fails yields a row with its error.

    Args:
        subject: the model.
        cases: some of ``cases_of``.
        on_layer: called with the label of the case after each layer that was quantised.
        on_layers: called with the rows of the layers before the row of a case.
    """
    for case in cases:
        format, text = case.format, case.calibration
        try:
            values, layers = measure(
                subject, format, case.backend, partial(on_layer, case.label), weighed=bool(text)
            )
        except Exception as error:  # from a format or backend; the run goes on
            yield Row(case, error=f"{type(error).__name__}: {error}")
        else:
            names = (
                LayerCase(format, case.model, layer, text, case.device, case.dtype)
                for layer in layers
            )
            on_layers([Row(*pair) for pair in zip(names, layers.values(), strict=True)])
            yield Row(case, values)


def measure(
    subject: Subject,
    format: str,
    backend: str = "auto",
    on_layer: Callable[[], None] = lambda: None,
    *,
    weighed: bool = False,
) -> tuple[AccuracyValues, dict[str, LayerValues]]:
    """Quantise every layer to ``format``; measure the model and each layer.

    Args:
        subject: the model.
        format: short form, or ``BASELINE``.
        backend: the backend that computes the outputs.
        on_layer: called after each layer.
        weighed: whether errors count by the importance of their inputs.
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
    outputs = [v.output_error for v in by_layer.values() if v.output_error is not None]
    values = AccuracyValues(
        layers=len(stored),
        weights=sum(weights_of.values()),
        bits_per_weight=bits / sum(weights_of.values()),
        nbytes=sum(weight.nbytes for weight in stored.values()),
        file_bytes=file_bytes(stored),
        weight_error=weight_error(subject, by_layer),
        output_error=(sum(e * e for e in outputs) / len(outputs)) ** 0.5 if outputs else 0.0,
        cosine_mean=cosines.mean().item(),
        cosine_min=cosines.min().item(),
        seconds=seconds,
        backends=", ".join(sorted({_backend_name(layer) for layer in layers.values()})),
        divergence=divergence(subject, changed),
    )
    return values, by_layer


def with_layers(subject: Subject, layers: Mapping[str, nn.Module]) -> nn.Module:
    """Return a copy of the model with other layers; every other tensor is shared."""
    module = subject.model.module
    # deepcopy takes what its memo holds instead of a copy.
    memo: dict[int, object] = {id(t): t for t in (*module.parameters(), *module.buffers())}
    memo |= {id(subject.layers[name]): layer for name, layer in layers.items()}
    return copy.deepcopy(module, memo)


def layer_of(weight: QuantisedTensor | Tensor, linear: nn.Linear, backend: str) -> nn.Module:
    """Return a layer with the stored weight and the bias of ``linear``, in its dtype.

    ``auto`` is the backend that fdk_formats chooses, or the reference if none supports the layer.
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
    """Compute the errors of one layer in double precision."""
    W = subject.layers[name].weight.detach().double()
    W_hat = weight.dequantise() if isinstance(weight, QuantisedTensor) else weight
    dW = W_hat.double() - W
    x = subject.rows[name].double()
    n, k = W.shape
    coded = weight.bits_per_weight if isinstance(weight, QuantisedTensor) else None
    return LayerValues(
        n=n,
        k=k,
        bits_per_weight=8.0 * weight.nbytes / (n * k) if coded is None else coded,
        weight_error=_ratio(dW, W),
        output_error=_ratio(x @ dW.T, x @ W.T) if len(x) else None,
    )


def weight_error(subject: Subject, layers: Mapping[str, LayerValues]) -> float:
    """Return the root of sum of (W_hat - W)^2 over sum of W^2, over all layers."""
    squares = {
        name: linear.weight.detach().double().square().sum().item()
        for name, linear in subject.layers.items()
    }
    error = sum(squares[name] * values.weight_error**2 for name, values in layers.items())
    return float((error / sum(squares.values())) ** 0.5)


def divergence(subject: Subject, module: nn.Module) -> float | None:
    """Return the mean of KL(original || ``module``) over the tokens of the sentences, in nats."""
    before = subject.next_tokens
    if before is None:
        return None
    after = next_tokens(subject.model, module, subject.sentences)
    return (before.exp() * (before - after)).sum(-1).double().mean().item()


def _ratio(error: Tensor, whole: Tensor) -> float:
    """Return the ratio of the norms; 0 for a layer of zeros, which every format stores exactly."""
    norm = whole.norm().item()
    return error.norm().item() / norm if norm else 0.0


def file_bytes(stored: Mapping[str, QuantisedTensor | Tensor]) -> int:
    """Return the size of the file that ``fdk_formats.save`` writes of these layers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        fdk_formats.save(path, stored)
        return path.stat().st_size


def _backend_name(layer: nn.Module) -> str:
    return layer.backend_name if isinstance(layer, QuantisedLinear) else "torch"


def read_texts(paths: Sequence[Path]) -> CalibrationText:
    """Return the paragraphs of some text files, which blank lines separate, each on one line.

    Raises:
        ValueError: for a file that is not UTF-8 text, and where nothing is left.
    """
    found: list[str] = []
    for path in paths:
        path = PACKAGED_TEXT if str(path) == PACKAGED else path
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"wanted a UTF-8 text file: {error}") from None
        found += filter(None, (" ".join(part.split()) for part in text.split("\n\n")))
    if not found:
        raise ValueError(f"wanted text, {', '.join(map(str, paths))} has none")
    return CalibrationText(", ".join(path.name for path in paths), found)


def calibrate(
    model: TextModel, layers: Mapping[str, nn.Linear], text: CalibrationText
) -> Calibration:
    """Run the model over a text; a layer's importance is the mean square of each input.

    For one row of x the squared error of an output is ``(sum_i dW[i] x[i])^2``. With independent
    inputs its mean is ``sum_i dW[i]^2 mean(x[i]^2)``, which is what importance weighs.
    """
    squares = _mean_squares(layers, lambda see: _run(model, layers, text.paragraphs, see))
    return Calibration(text.name, squares)


def mean_squares(
    model: TextModel, layers: Mapping[str, nn.Linear], windows: Tensor
) -> dict[str, Tensor]:
    """Return the mean square of each input of each layer over windows of tokens.

    Args:
        model: the model.
        layers: its layers by name.
        windows: tokens, ``[windows, window]``.

    Returns:
        ``[k, float32]`` by layer.
    """
    masks = torch.ones_like(windows)
    batches = list(zip(windows.split(1), masks.split(1), strict=True))
    return _mean_squares(layers, lambda see: _run_batches(model, layers, batches, see))


def _mean_squares(
    layers: Mapping[str, nn.Linear], run: Callable[[See], Iterator[int]]
) -> dict[str, Tensor]:
    totals: dict[str, Tensor | float] = dict.fromkeys(layers, 0.0)

    def add(name: str, rows: Tensor) -> None:
        totals[name] = totals[name] + rows.double().square().sum(0)

    tokens = sum(run(add))
    # A layer that the text does not reach (an expert, say) has no importance.
    return {n: (sum_ / tokens).float() for n, sum_ in totals.items() if isinstance(sum_, Tensor)}


def rows_of(
    model: TextModel, layers: Mapping[str, nn.Linear], texts: Sequence[str]
) -> dict[str, Tensor]:
    """Return up to ``MOST_ROWS`` inputs of each layer, ``[rows, k, float32]``, from all texts."""
    kept = {
        name: [torch.zeros(0, layer.in_features, device=model.device)]
        for name, layer in layers.items()
    }
    share = -(-MOST_ROWS // -(-len(texts) // SENTENCES_PER_BATCH))

    def keep(name: str, rows: Tensor) -> None:
        kept[name].append(_thinned(rows.float(), share))

    for _ in _run(model, layers, texts, keep):
        pass
    return {name: _thinned(torch.cat(parts), MOST_ROWS) for name, parts in kept.items()}


def _thinned(rows: Tensor, most: int) -> Tensor:
    return rows[:: max(1, -(-rows.shape[0] // most))].clone()


def _run(
    model: TextModel, layers: Mapping[str, nn.Linear], texts: Sequence[str], see: See
) -> Iterator[int]:
    """Run the model a few texts at a time, show each layer's inputs, and yield their tokens."""
    yield from _run_batches(model, layers, batches(model, texts), see)


def _run_batches(
    model: TextModel,
    layers: Mapping[str, nn.Linear],
    batches: Iterable[tuple[Tensor, Tensor]],
    see: See,
) -> Iterator[int]:
    for ids, mask in batches:
        with _hooked(layers, mask, see), torch.inference_mode():
            model.module(input_ids=ids, attention_mask=mask)
        yield int(mask.sum())


@contextmanager
def _hooked(layers: Mapping[str, nn.Linear], mask: Tensor, see: See) -> Iterator[None]:
    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def given(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0]
            # Skip padding. Inputs without a row per token (a pooler's) have no padding.
            see(name, x[mask.bool()] if x.shape[:-1] == mask.shape else x.flatten(0, -2))

        return given

    handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
