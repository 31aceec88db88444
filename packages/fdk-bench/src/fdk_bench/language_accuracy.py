"""Accuracy of quantised language models: perplexity and divergence by method and stored bits."""

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fdk_formats
from fdk_bench.accuracy import layers_of, mean_squares
from fdk_bench.cases import DTYPES, canonical
from fdk_bench.peers.quantisers import QuantisedWeights, Quantiser
from fdk_bench.perplexity import Estimate, Reference
from fdk_bench.rows import Row
from fdk_bench.text_models import TextModel
from fdk_formats import calibrate_weights, mix_formats, random_windows
from fdk_formats.mixed import parse_mix, some_windows
from fdk_formats.model_inputs import has_bfloat16_units

TOKENS = 16384
WINDOW = 512
ORIGINAL = "original"
# Calibration windows in a call of the model.
BATCH = 2
# 16 bits; k-means, integers and NF4 at 4; k-means below, where a method decides.
DEFAULT_METHODS = (
    ORIGINAL,
    *("kmeans4", "kmeans4+importance", "int4", "nf4"),
    *("kmeans3", "kmeans3+importance", "kmeans2", "kmeans2+importance"),
)


@dataclass(frozen=True)
class LanguageCase:
    """A language model quantised by one method.

    Attributes:
        method: ``original``; a format with how it was fitted (``kmeans3-g64+importance``); or a
            peer's row.
        by: ``fdk``, or the peer.
        model: its name.
        skip: regular expression of layers that stay as they are.
        text: name of the held-out text.
        tokens, window: its tokens, and those of a window.
        calibration: name of the calibration text; empty where the method uses none.
        calibration_tokens: its tokens; 0 where the method uses none.
        device, dtype: device and dtype in which every method is evaluated.
    """

    method: str
    by: str
    model: str
    skip: str
    text: str
    tokens: int
    window: int
    calibration: str
    calibration_tokens: int
    device: str
    dtype: str

    def __str__(self) -> str:
        return self.method


@dataclass(frozen=True)
class LanguageValues:
    """Size and accuracy; see ``Comparison``. Errors are standard errors over windows.

    Attributes:
        layers: linear layers quantised.
        weights: weights in those layers.
        bits_per_weight: all stored bits of those layers (codes, scales, zero points, codebooks)
            over their weights.
        other_weights: the model's other weights, such as embedding and output head.
        model_bits_per_weight: the same for the whole model, the others in 16 bits.
        weight_error: root mean square of W_hat - W over that of W, over all weights together.
        perplexity, perplexity_error: of the held-out text.
        excess, excess_error: cross entropy above that of the model as loaded, nats per token.
        divergence, divergence_error: of the next token from the model as loaded, nats.
        agreement: share of tokens whose most likely successor is the same.
        seconds: time to quantise, for a peer with the start of its process.
        version: of the peer.
        tasks: metrics of lm-eval by ``task metric``, where tasks were asked for.
    """

    layers: int
    weights: int
    bits_per_weight: float
    other_weights: int
    model_bits_per_weight: float
    weight_error: float
    perplexity: float
    perplexity_error: float | None
    excess: float
    excess_error: float | None
    divergence: float
    divergence_error: float | None
    agreement: float
    seconds: float
    version: str = ""
    tasks: Mapping[str, float] | None = None


LanguageRow = Row[LanguageCase, LanguageValues]


@dataclass(frozen=True, eq=False)
class Text:
    """A text as windows of tokens, ``[windows, window]``, on the device of the model."""

    name: str
    windows: Tensor

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.windows.numel()


@dataclass(frozen=True, eq=False)
class Subject:
    """A language model, the layers to quantise, and the texts.

    Attributes:
        model: the model.
        skip: regular expression of layers that stay as they are.
        layers: the layers to quantise, by name.
        held_out: the text that is measured.
        calibration: the text that methods may fit to; of another kind than ``held_out``.
    """

    model: TextModel
    skip: str
    layers: Mapping[str, nn.Linear]
    held_out: Text
    calibration: Text | None

    @property
    def other_weights(self) -> int:
        """Parameters outside the layers' weights; tied ones count once."""
        total = sum(parameter.numel() for parameter in self.model.module.parameters())
        return total - self.weights

    @property
    def weights(self) -> int:
        """Weights of the layers."""
        return sum(layer.weight.numel() for layer in self.layers.values())


Fit = Callable[[Subject, str, Mapping[str, Tensor]], Iterator[tuple[str, Tensor, float]]]


def _plain(
    subject: Subject, format: str, importance: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor, float]]:
    """Quantise each layer on its own, its errors weighed where there is importance."""
    for name, layer in subject.layers.items():
        stored = fdk_formats.quantise(layer.weight.detach(), format, importance.get(name))
        yield name, stored.dequantise(), stored.nbytes


def _calibrated(
    subject: Subject, format: str, importance: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor, float]]:
    """Quantise block after block with errors compensated, on what the blocks before give."""
    assert subject.calibration is not None, "the command asks for one"
    return _calibrated_on(subject, format, subject.calibration.windows)


def _random(
    subject: Subject, format: str, importance: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor, float]]:
    """Calibrate on random tokens, as many as ``TOKENS``."""
    window = subject.held_out.windows.shape[1]
    windows = random_windows(subject.model.tokenizer, window, max(1, TOKENS // window))
    return _calibrated_on(subject, format, windows.to(subject.model.device))


def _calibrated_on(
    subject: Subject, format: str, windows: Tensor
) -> Iterator[tuple[str, Tensor, float]]:
    module = copy.deepcopy(subject.model.module)
    # In the dtype of the files, as users calibrate, where that is faster.
    dtype = _narrowest(subject.layers) if has_bfloat16_units(subject.model.device) else None
    if subject.model.dtype == "fp32" and dtype is not None:
        module = module.to(dtype)
    ladder, bits = parse_mix(format)
    formats = dict.fromkeys(subject.layers, ladder[0])
    if bits is not None:
        formats = mix_formats(module, list(formats), ladder, bits, some_windows(windows))
    found = calibrate_weights(module, formats, windows.split(BATCH), progress=False)
    for name, layer in found.items():
        yield name, layer.quantised.dequantise(), layer.quantised.nbytes


# How a format is fitted, by what follows it in a method's name. Each gets the importance of the
# inputs, empty without calibration, and yields layer, W_hat and bytes.
FITS: dict[str, tuple[Fit, bool]] = {
    "": (_plain, False),
    "importance": (_plain, True),
    "calibrated": (_calibrated, True),
    "random": (_random, False),
}
MIXING_FITS = ("calibrated", "random")


@dataclass(frozen=True, eq=False)
class Method:
    """A way to quantise the layers.

    Attributes:
        name: name of its rows.
        by: ``fdk``, or the peer.
        calibrated: whether it uses the calibration text.
        quantise: from subject and importance to weights and bytes; None leaves the model as it is.
    """

    name: str
    by: str
    calibrated: bool
    quantise: Callable[[Subject, Mapping[str, Tensor]], QuantisedWeights] | None


def methods_named(texts: Sequence[str], group_size: str = "64") -> list[Method]:
    """Return fdk's methods, each once: ``original``, or a format with an optional ``+fit``.

    Raises:
        ValueError: for anything else.
    """
    found = {}
    for text in texts:
        format, _, fit = text.partition("+")
        if fit not in FITS:
            wanted = ", ".join(f"+{name}" for name in FITS if name)
            raise ValueError(f"{text!r}: wanted a format, alone or with one of {wanted}")
        if text == ORIGINAL:
            found[text] = Method(ORIGINAL, "fdk", False, None)
            continue
        names, at, bits = format.partition("@")
        format = ":".join(canonical(name, group_size) for name in names.split(":")) + at + bits
        if parse_mix(format)[1] is not None and fit not in MIXING_FITS:
            wanted = " and ".join(f"+{name}" for name in MIXING_FITS)
            raise ValueError(f"{text!r}: formats are mixed with {wanted} only")
        name = f"{format}+{fit}" if fit else format
        found[name] = Method(name, "fdk", FITS[fit][1], partial(_fitted, format, fit))
    return list(found.values())


def _fitted(
    format: str, fit: str, subject: Subject, importance: Mapping[str, Tensor]
) -> QuantisedWeights:
    function, calibrated = FITS[fit]
    weights, nbytes = {}, {}
    for name, values, size in function(subject, format, importance if calibrated else {}):
        weights[name], nbytes[name] = values, float(size)
    return QuantisedWeights(weights, nbytes, fdk_formats.__version__)


def peer_method(quantiser: Quantiser, row: str, python: str, source: str) -> Method:
    """Return a peer's method.

    Args:
        quantiser, row: the peer and the name of its row.
        python: path of the Python that has it.
        source: folder or id of the model.
    """

    def quantise(subject: Subject, importance: Mapping[str, Tensor]) -> QuantisedWeights:
        weights = {name: layer.weight.detach() for name, layer in subject.layers.items()}
        ids = subject.calibration.windows if subject.calibration else torch.empty(0, 0)
        return quantiser.quantise(row, python, source, weights, importance, ids)

    return Method(row, quantiser.name, quantiser.calibrated, quantise)


def prepare(model: TextModel, skip: str, held_out: Text, calibration: Text | None) -> Subject:
    """Choose the layers that ``skip`` does not match.

    Raises:
        ValueError: where no layer is left.
    """
    return Subject(model, skip, layers_of(model, skip), held_out, calibration)


def case_of(subject: Subject, method: Method) -> LanguageCase:
    """Return the case of a method."""
    text = subject.calibration if method.calibrated else None
    return LanguageCase(
        method=method.name,
        by=method.by,
        model=subject.model.name,
        skip=subject.skip,
        text=subject.held_out.name,
        tokens=subject.held_out.tokens,
        window=subject.held_out.windows.shape[1],
        calibration=text.name if text else "",
        calibration_tokens=text.tokens if text else 0,
        device=subject.model.device.type,
        dtype=subject.model.dtype,
    )


def measure(
    subject: Subject,
    methods: Sequence[Method],
    score: Callable[[nn.Module], Mapping[str, float]] | None = None,
    on_step: Callable[[str], None] = lambda text: None,
) -> Iterator[LanguageRow]:
    """Measure each method in turn by one evaluator; one that fails yields a row with its error.

    Every method's layers are dequantised into a copy of the model, in its dtype, so that rows
    differ by the weights alone.

    Args:
        subject: the model.
        methods: what to measure; calibrated ones need ``subject.calibration``.
        score: computes the metrics of tasks for a model.
        on_step: called with a text after each window.
    """
    if not methods:
        return
    module = subject.model.module
    reference = Reference(module, subject.held_out.windows, partial(on_step, "16-bit model"))
    importance: Mapping[str, Tensor] = {}
    if any(method.calibrated for method in methods):
        assert subject.calibration is not None, "the command asks for one"
        on_step("calibration")
        importance = mean_squares(subject.model, subject.layers, subject.calibration.windows)
    changed = _copy_with_own_weights(subject)
    for method in methods:
        case = case_of(subject, method)
        on_step(method.name)
        try:
            values = _measure_method(
                subject, method, importance, reference, changed, score, partial(on_step, str(case))
            )
        except Exception as error:  # of a format or another project; the run goes on
            yield Row(case, error=f"{type(error).__name__}: {error}")
        else:
            yield Row(case, values)


def _copy_with_own_weights(subject: Subject) -> nn.Module:
    """Return a copy of the model that shares every tensor but the layers' weights."""
    module = subject.model.module
    own = {id(layer.weight) for layer in subject.layers.values()}
    shared = (*module.parameters(), *module.buffers())
    return copy.deepcopy(module, {id(t): t for t in shared if id(t) not in own})


def _measure_method(
    subject: Subject,
    method: Method,
    importance: Mapping[str, Tensor],
    reference: Reference,
    changed: nn.Module,
    score: Callable[[nn.Module], Mapping[str, float]] | None,
    on_window: Callable[[], None],
) -> LanguageValues:
    started = time.perf_counter()
    done = _original(subject) if method.quantise is None else method.quantise(subject, importance)
    seconds = time.perf_counter() - started
    squares = errors = 0.0
    for name, layer in subject.layers.items():
        W, W_hat = layer.weight.detach(), done.weights[name].to(layer.weight.device)
        if W_hat.shape != W.shape:
            raise ValueError(f"{name}: wanted {list(W.shape)}, got {list(W_hat.shape)}")
        squares += W.double().square().sum().item()
        errors += (W_hat.double() - W.double()).square().sum().item()
        with torch.no_grad():
            changed.get_parameter(f"{name}.weight").copy_(W_hat)
    nbytes = sum(done.nbytes[name] for name in subject.layers)
    compared = reference.compare(changed, on_window)
    if not math.isfinite(compared.divergence.mean):
        raise ValueError("the model's predictions are not finite")
    weights, others = subject.weights, subject.other_weights
    return LanguageValues(
        layers=len(subject.layers),
        weights=weights,
        bits_per_weight=8 * nbytes / weights,
        other_weights=others,
        model_bits_per_weight=(8 * nbytes + 16 * others) / (weights + others),
        weight_error=(errors / squares) ** 0.5,
        **_flat("perplexity", compared.perplexity),
        **_flat("excess", compared.excess),
        **_flat("divergence", compared.divergence),
        agreement=compared.agreement,
        seconds=seconds,
        version=done.version,
        tasks=None if score is None else score(changed),
    )


def _flat(name: str, found: Estimate) -> dict[str, Any]:
    return {name: found.mean, f"{name}_error": found.error}


def _original(subject: Subject) -> QuantisedWeights:
    weights = {name: layer.weight.detach() for name, layer in subject.layers.items()}
    size = 4 if _narrowest(subject.layers) is None else 2
    return QuantisedWeights(weights, {name: size * W.numel() for name, W in weights.items()})


def _narrowest(layers: Mapping[str, nn.Linear]) -> torch.dtype | None:
    """Return the 16-bit dtype that holds the weights exactly; None if there is none.

    They may have been read in another dtype than that of the files.
    """
    weights = [layer.weight.detach() for layer in layers.values()]
    for dtype in (DTYPES["bf16"], DTYPES["fp16"]):
        if all(torch.equal(W.to(dtype).to(W.dtype), W) for W in weights):
            return dtype
    return None


def task_scores(
    model: TextModel, tasks: Sequence[str], limit: int | None
) -> Callable[[nn.Module], Mapping[str, float]]:
    """Return a function that computes lm-eval's metrics for a model.

    Args:
        model: with the tokenizer.
        tasks: names of lm-eval's tasks.
        limit: documents of each task; None for all.

    Raises:
        ImportError: where lm-eval is not installed.
        ValueError: for an unknown task.
    """
    import lm_eval  # type: ignore[import-not-found,unused-ignore]
    from lm_eval.models.huggingface import HFLM  # type: ignore[import-not-found,unused-ignore]
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found,unused-ignore]

    manager = TaskManager()
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise ValueError(f"lm-eval {lm_eval.__version__} has no task {', '.join(unknown)}")

    def score(module: nn.Module) -> Mapping[str, float]:
        wrapped = HFLM(pretrained=module, tokenizer=model.tokenizer, backend="causal")
        found = lm_eval.simple_evaluate(
            wrapped, tasks=list(tasks), limit=limit, task_manager=manager, bootstrap_iters=0
        )
        return {
            f"{task} {metric.partition(',')[0]}": float(value)
            for task, metrics in found["results"].items()
            for metric, value in metrics.items()
            if isinstance(value, float) and "stderr" not in metric
        }

    return score
