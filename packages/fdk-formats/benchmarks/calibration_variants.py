"""Measures variants of calibrated quantisation on a language model.

    python packages/fdk-formats/benchmarks/calibration_variants.py --model FOLDER \\
        --calibrate calibration.txt --text held_out.txt --variants base,gptaq,hadamard+gptaq-half

Prints how far each quantised model is from the model as loaded, on held-out text. A variant is one
or more of these, joined by +:

    base         the product: calibrate_weights with --epochs of distillation
    epochsN      N epochs of distillation
    sequential   layers of a block quantised one input after another (q, k and v; o; gate and up;
                 down), each on what the quantised ones before it give; GPTQ's true-sequential
    gptaq[-P]    sequential, with weights that first make up for what the quantised layers before
                 changed: W + P W C, where W + W C maps the quantised model's inputs to the outputs
                 of the 16-bit model with least squares. P is 1 by default, half is 0.5. GPTAQ, Li
                 et al. 2025
    fisher[-P]   second moments in which each token counts by the squared gradient of the log
                 likelihood for the layer's output, to the power P; 1 by default, sqrt is 0.5. The
                 Fisher information as in GuidedQuant, Kim et al. 2025, with one group of outputs
    rows-N       a codebook per N rows or fewer
    hadamard     the format with rotated inputs, kmeans3-g64-hadamard for kmeans3-g64

These are experiments: they replace private functions of fdk_formats.calibration (_Moments,
_run_block and _quantised) while a variant runs, and use others of fdk_formats and fdk_bench. A
renamed one is an error. Needs fdk-bench and transformers.
"""

import argparse
import gc
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn

from fdk_bench.accuracy import layers_of, read_texts
from fdk_bench.cases import DTYPES
from fdk_bench.language_accuracy import BATCH, TOKENS, WINDOW, _narrowest
from fdk_bench.machine import default_device
from fdk_bench.perplexity import Estimate, Reference
from fdk_bench.random_llama import SIZES, llama_config
from fdk_bench.text_models import TextModel, load_text_model
from fdk_formats import CalibratedLayer, Format, calibration, token_windows
from fdk_formats.compensate import DAMPING, Hessian, add_moments
from fdk_formats.distil import Teacher, frozen
from fdk_formats.model import DEFAULT_SKIP
from fdk_formats.model_inputs import Call, calls_of, device_of, has_bfloat16_units, in_fast_dtype

Row = dict[str, Any]
# One of each kind, and kinds together.
QUICK_VARIANTS = (
    "base,epochs0,sequential,gptaq,gptaq-half,fisher,fisher-sqrt,fisher-0.25,rows-64,hadamard,"
    "rows-64+fisher,hadamard+gptaq-half+fisher-sqrt"
)
QUICK_TOKENS, QUICK_WINDOW = 512, 64
HEADER = (
    "| variant | epochs | bits | KL | perplexity | excess | agreement | seconds | notes |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|---|"
)


@dataclass(frozen=True)
class Variant:
    """A recipe.

    Attributes:
        name: its parts, joined by +.
        epochs: epochs of distillation.
        fisher: power of a token's squared gradient in the second moments; None counts all equally.
        gptaq: share of the correction of the weights.
        sequential: whether layers of a block are quantised one input after another.
        rows: most rows of a codebook; None for all.
        hadamard: whether the inputs of layers are rotated.
    """

    name: str
    epochs: int
    fisher: float | None = None
    gptaq: float = 0.0
    sequential: bool = False
    rows: int | None = None
    hadamard: bool = False

    @classmethod
    def parse(cls, name: str, epochs: int) -> "Variant":
        """Reads a variant, such as ``hadamard+gptaq-half``.

        Args:
            name: the variant.
            epochs: epochs of distillation where it names none.

        Raises:
            ValueError: if it is none.
        """
        variant = cls(name, epochs)
        for part in name.split("+"):
            kind, _, value = part.partition("-")
            if part.startswith("epochs"):
                variant = replace(variant, epochs=int(part.removeprefix("epochs")))
            elif kind == "fisher":
                power = {"": 1.0, "sqrt": 0.5}.get(value)
                variant = replace(variant, fisher=float(value) if power is None else power)
            elif kind == "gptaq":
                share = {"": 1.0, "half": 0.5}.get(value)
                share = float(value) if share is None else share
                variant = replace(variant, gptaq=share, sequential=True)
            elif part == "sequential":
                variant = replace(variant, sequential=True)
            elif kind == "rows":
                variant = replace(variant, rows=int(value))
            elif part == "hadamard":
                variant = replace(variant, hadamard=True)
            elif part != "base":
                raise ValueError(
                    f"{part!r}: wanted base, epochsN, sequential, gptaq[-P], fisher[-P], rows-N "
                    "or hadamard"
                )
        return variant


@dataclass(frozen=True, eq=False)
class Subject:
    """The model and the texts that variants are compared on.

    Attributes:
        model: the model as loaded.
        windows: calibration text, ``[windows, window, int64]``.
        reference: predictions of the model for the held-out text.
        format: the format of every layer.
        damping: of GPTAQ's correction, in units of the mean of the Hessian's diagonal.
        check: whether to measure the changed model before it is quantised, too.
    """

    model: TextModel
    windows: Tensor
    reference: Reference
    format: Format
    damping: float
    check: bool


def measure(variant: Variant, subject: Subject) -> Row:
    """Quantises a copy of the model and compares its predictions with those of the original.

    Args:
        variant: the recipe.
        subject: the model and the texts.
    """
    began = time.perf_counter()
    if variant.hadamard:
        subject = replace(subject, format=replace(subject.format, rotation="hadamard"))
    changed = changed_model(variant, subject.model)
    names = list(layers_of(changed, DEFAULT_SKIP))
    # Calibrated in the dtype of the files, as users do where that is fast.
    module = deepcopy(changed.module)
    fast = has_bfloat16_units(subject.model.device) and subject.model.dtype == "fp32"
    dtype = _narrowest(layers_of(subject.model, DEFAULT_SKIP)) if fast else None
    if dtype is not None:
        module = module.to(dtype)
    unquantised = subject.reference.compare(changed.module) if subject.check else None

    weights = None
    if variant.fisher is not None:
        weights = fisher_weights(module, names, subject.windows, variant.fisher)
    streams = TwoStreams() if variant.sequential else None
    layers = calibrated(module, names, variant, subject, weights, streams)

    bits = numbers = 0
    for name, layer in layers.items():
        q = layer.quantised
        with torch.no_grad():
            changed.module.get_parameter(f"{name}.weight").copy_(q.dequantise())
        # Codebooks, of float32, count as 16-bit numbers.
        bits += 8 * q.nbytes - (0 if q.codebook is None else 16 * q.codebook.numel())
        numbers += math.prod(q.shape)
    compared = subject.reference.compare(changed.module)
    return {
        "variant": variant.name,
        "format": str(subject.format),
        "epochs": variant.epochs,
        "bits_per_weight": bits / numbers,
        **estimated("divergence", compared.divergence),
        **estimated("perplexity", compared.perplexity),
        **estimated("excess", compared.excess),
        "agreement": compared.agreement,
        "seconds": time.perf_counter() - began,
        "unquantised_divergence": unquantised and unquantised.divergence.mean,
        "weight_of_top_percent": weights and share_of_top_percent(weights.values()),
        "drift": streams and streams.drift,
    }


def estimated(name: str, value: Estimate) -> Row:
    """Returns a mean and its standard error as fields of a row."""
    return {name: value.mean, f"{name}_error": value.error}


def calibrated(
    module: nn.Module,
    names: Sequence[str],
    variant: Variant,
    subject: Subject,
    weights: Mapping[str, Tensor] | None,
    streams: "TwoStreams | None",
) -> dict[str, CalibratedLayer]:
    """Runs ``calibrate_weights`` with its private functions replaced by those of a variant."""
    patches: dict[str, Any] = {}
    if weights is not None or streams is not None:
        correct = variant.gptaq > 0
        gptaq = Gptaq(streams, variant.gptaq, subject.damping) if streams and correct else None
        patches["_Moments"] = partial(VariantMoments, weights, gptaq)
    if streams is not None:
        patches["_run_block"] = streams.run_block
        patches["_quantised"] = partial(quantised_corrected, calibration._quantised)
    with ExitStack() as stack:
        for name, value in patches.items():
            stack.enter_context(patch.object(calibration, name, value))
        return calibration.calibrate_weights(
            module,
            dict.fromkeys(names, subject.format),
            subject.windows.split(BATCH),
            epochs=variant.epochs,
            progress=False,
        )


# Models with other linear layers: codebooks per rows


def changed_model(variant: Variant, model: TextModel) -> TextModel:
    """Returns a copy of the model with the linear layers of a variant."""
    module = deepcopy(model.module)
    if variant.rows is not None:
        for name in layers_of(model, DEFAULT_SKIP):
            module.set_submodule(name, RowSplitLinear(module.get_submodule(name), variant.rows))
    return replace(model, module=module)


class RowSplitLinear(nn.Module):
    """A linear layer as several of some rows each, so that each has its own codebook."""

    def __init__(self, linear: nn.Linear, rows: int) -> None:
        super().__init__()
        count = -(-linear.out_features // rows)
        weights = linear.weight.detach().tensor_split(count)
        biases = [None] * count if linear.bias is None else linear.bias.detach().tensor_split(count)
        self.parts = nn.ModuleList(map(linear_of, weights, biases))

    def forward(self, x: Tensor) -> Tensor:
        """Computes the rows of each part in turn."""
        return torch.cat([part(x) for part in self.parts], -1)


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Returns a frozen linear layer with copies of a weight and a bias."""
    n, k = weight.shape
    layer = nn.Linear(k, n, bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return layer.eval()


# Fisher information of tokens


def fisher_weights(
    model: nn.Module, names: Iterable[str], windows: Tensor, power: float
) -> dict[str, Tensor]:
    """Computes how much each token counts in the second moments of each layer.

    The squared gradient of the log likelihood for the layer's output, summed over outputs. Tokens
    are drawn from the model's predictions, as the Fisher information asks.

    Args:
        model: the model before it is quantised.
        names: its layers.
        windows: ``[windows, window, int64]``.
        power: applied to the squared gradients.

    Returns:
        ``[tokens, float32]`` by layer, of mean 1.
    """
    squares: dict[str, list[Tensor]] = {name: [] for name in names}
    calls = calls_of(windows.split(BATCH))
    device = device_of(model)
    generator = torch.Generator(device).manual_seed(0)

    def likelihood(predictions: Tensor, _: slice) -> Tensor:
        drawn = predictions.detach().exp().multinomial(1, generator=generator)
        return predictions.gather(1, drawn).sum()

    def watch(name: str, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        output.register_hook(
            lambda gradient: squares[name].append(gradient.float().square().sum(-1).flatten())
        )

    with ExitStack() as stack:
        stack.enter_context(in_fast_dtype(model, calls, device))
        stack.enter_context(frozen(model))
        stack.enter_context(torch.enable_grad())
        for name in squares:
            layer = model.get_submodule(name)
            stack.callback(layer.register_forward_hook(partial(watch, name)).remove)
        # Parameters are frozen: the graph starts at the embedding's output.
        start = model.get_input_embeddings().register_forward_hook(
            lambda _, args, output: output.requires_grad_(True)
        )
        stack.callback(start.remove)
        teacher = Teacher(model, [])
        for call in calls:
            state = teacher.state_of(partial(call.run, model))
            state.backward(teacher._differentiate(state, likelihood)[1])
    weights = {}
    for name, parts in squares.items():
        weight = torch.cat(parts).pow(power)
        if len(weight) != windows.numel() or not bool(torch.isfinite(weight).all()):
            raise ValueError(
                f"{name}: wanted finite gradients of {windows.numel()} tokens, got {len(weight)}"
            )
        weights[name] = weight / weight.mean().clamp(min=1e-30)
    return weights


def share_of_top_percent(weights: Iterable[Tensor]) -> float:
    """Returns the share of all weight that the heaviest 1 % of tokens have, mean over layers."""
    shares = [float(w.topk(max(1, len(w) // 100)).values.sum() / w.sum()) for w in weights]
    return sum(shares) / len(shares)


# Second moments, and targets from the 16-bit model


@dataclass(frozen=True, eq=False)
class Gptaq:
    """Correction of weights for the difference of the two streams.

    Attributes:
        streams: has the inputs of the 16-bit model.
        share: of the correction.
        damping: added to the Hessian's diagonal, in units of its mean.
    """

    streams: "TwoStreams"
    share: float
    damping: float

    def correction(self, hessian: Hessian, cross: Tensor) -> Tensor:
        """Computes ``share * cross (H + damping I)^-1``: the C of ``W + W C``, ``[k, k]``.

        Args:
            hessian: second moments of the quantised model's inputs x.
            cross: mean of ``(x_16bit - x) x^T`` in the units of ``hessian``, ``[k, k]``.
        """
        damping = self.damping
        eye = torch.eye(len(cross), device=cross.device, dtype=torch.float64)
        while True:
            factor, info = torch.linalg.cholesky_ex(hessian.matrix.double() + damping * eye)
            if info.item() == 0:
                solved = torch.cholesky_solve(cross.double().T, factor).T.float()
                return self.share * solved
            damping *= 10


class CorrectedHessian(Hessian):
    """Second moments with the C by which weights of that input change to ``W + W C`` first."""

    correction: Tensor


def quantised_corrected(
    quantised: Callable[..., Any], weight: Tensor, format: Format, hessian: Hessian | None
) -> Any:
    """Takes the place of ``_quantised``: corrects the weight, if its moments say how."""
    if isinstance(hessian, CorrectedHessian):
        weight = weight.float().to(hessian.correction.device)
        weight = weight + weight @ hessian.correction
    return quantised(weight, format, hessian)


class VariantMoments:
    """Takes the place of ``_Moments``: tokens may be weighted, and compared with the 16-bit model.

    Args:
        weights: weight of each token in the order of the calls, ``[tokens]`` by layer. Layers of
            one input then have moments of their own.
        gptaq: how weights are corrected, if they are.
    """

    def __init__(self, weights: Mapping[str, Tensor] | None, gptaq: Gptaq | None) -> None:
        self.weights, self.gptaq = weights, gptaq
        self.leader: dict[str, str] = {}  # the first layer of the same input
        self.latest: dict[str, Tensor] = {}  # the last input of each leader
        self.total: dict[str, Tensor] = {}
        self.cross: dict[str, Tensor] = {}  # sums of (x_16bit - x) x^T
        self.count: dict[str, int] = {}

    def hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        """Returns a forward pre-hook for a layer."""

        def add(_: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0]
            if self.weights is not None:
                self.leader[name] = name
            elif self._is_counted(name, x):
                return
            rows = x.detach().reshape(-1, x.shape[-1])
            if name not in self.total:
                shape = (rows.shape[1],) * 2
                self.total[name] = torch.zeros(shape, dtype=torch.float32, device=x.device)
                self.count[name] = 0
                if self.gptaq is not None:
                    self.cross[name] = torch.zeros_like(self.total[name])
            start = self.count[name]
            self.count[name] += len(rows)
            weighted = rows
            if self.weights is None:
                add_moments(self.total[name], rows)
            else:
                weight = self.weights[name][start : start + len(rows)].to(rows.device)
                weighted = rows.float() * weight[:, None]
                self.total[name].addmm_(weighted.T, rows.float())
            if self.gptaq is not None:
                full = self.gptaq.streams.inputs[name].reshape(rows.shape)
                difference = full.float() - rows.float()
                self.cross[name].addmm_(difference.T, weighted.float())

        return add

    def _is_counted(self, name: str, x: Tensor) -> bool:
        """Returns whether another layer has counted this input; else the layer is to count it."""
        if name not in self.leader:
            found = (other for other, seen in self.latest.items() if seen is x)
            self.leader[name] = next(found, name)
        leader = self.leader[name]
        if leader != name and self.latest.get(leader) is x:
            return True
        self.leader[name] = name
        self.latest[name] = x
        return False

    def hessians(self) -> dict[str, Hessian]:
        """Returns the mean of ``x x^T`` by layer, with the correction of weights."""
        self.latest.clear()
        means: dict[str, Hessian] = {}
        for name, total in self.total.items():
            moments = total / max(1, self.count[name])
            if self.weights is not None:
                moments = (moments + moments.T) / 2
            if self.gptaq is None:
                means[name] = Hessian(moments)
                continue
            means[name] = hessian = CorrectedHessian(moments)
            cross = self.cross[name] / max(1, self.count[name]) / moments.diagonal().mean()
            hessian.correction = self.gptaq.correction(hessian, cross)
        return {name: means[leader] for name, leader in self.leader.items()}


class TwoStreams:
    """The hidden states of the 16-bit model beside those of the quantised one, block after block.

    Layers of a block are quantised one input after another: all at once, each would make up for the
    same difference of the streams.

    Attributes:
        inputs: what each layer receives in the 16-bit model, in the current call.
        drift: relative RMS difference of the streams after each block.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.drift: list[float] = []
        self._states: list[Tensor] | None = None
        self._full: list[Tensor] = []

    def run_block(
        self,
        block: nn.Module,
        names: Sequence[str],
        sources: Mapping[str, nn.Module],
        states: list[Tensor],
        calls: Sequence[Call],
        device: object,
    ) -> Iterator[Any]:
        """Takes the place of ``_run_block``: yields the layers of each input of a block in turn.

        Blocks run where the model is: ``device`` is not used.
        """
        if self._states is not states:  # a new chain
            self._states, self._full = states, list(states)

        def output(state: Tensor, call: Call) -> Tensor:
            return calibration._first(block(state, *call.args[1:], **call.kwargs))

        inputs: dict[str, list[Tensor]] = {name: [] for name in names}  # of each call, 16-bit

        def keep(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
            inputs[name].append(args[0])

        with ExitStack() as hooks:
            for name in names:
                hook = sources[name].register_forward_pre_hook(partial(keep, name))
                hooks.callback(hook.remove)
            self._full = [
                output(state, call) for state, call in zip(self._full, calls, strict=True)
            ]

        def run(group: Sequence[str]) -> None:
            for i, call in enumerate(calls):
                self.inputs = {name: inputs[name][i] for name in group if inputs[name]}
                output(states[i], call)
            self.inputs = {}

        # By input, in the order of the model; layers that were never called come last.
        groups: dict[int | None, list[str]] = {}
        for name in sorted(names, key=lambda name: not inputs[name]):
            groups.setdefault(id(inputs[name][0]) if inputs[name] else None, []).append(name)
        for group in groups.values():
            yield calibration._Block(group, partial(run, group), sources)
        for i, call in enumerate(calls):
            states[i] = output(states[i], call)
        pairs = list(zip(states, self._full, strict=True))
        error = sum((a.float() - b.float()).square().sum() for a, b in pairs)
        total = sum(b.float().square().sum() for _, b in pairs)
        self.drift.append(float((error / total).sqrt()))


# Command


def line_of(row: Row) -> str:
    """Returns a row of the table."""
    if row["error"] is not None:
        return f"| {row['variant']} | {row['epochs']} | {row['error']} |"
    notes = []
    if row["unquantised_divergence"] is not None:
        notes.append(f"unquantised KL {row['unquantised_divergence']:.2g}")
    if row["weight_of_top_percent"] is not None:
        notes.append(f"1 % of tokens have {row['weight_of_top_percent']:.0%} of the weight")
    if row["drift"]:
        notes.append(f"drift {row['drift'][0]:.3f} to {row['drift'][-1]:.3f}")

    def estimate(name: str, digits: int) -> str:
        error = row[f"{name}_error"]  # one window has none
        return f"{row[name]:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")

    return (
        f"| {row['variant']} | {row['epochs']} | {row['bits_per_weight']:.4f} "
        f"| {estimate('divergence', 4)} | {estimate('perplexity', 2)} | {row['excess']:.4f} "
        f"| {row['agreement']:.3f} | {row['seconds']:.0f} | {'; '.join(notes)} |"
    )


def random_llama(device: str) -> TextModel:
    """Returns a tiny llama of random weights in float32 that bfloat16 holds exactly."""
    torch.manual_seed(0)
    # Weights of 0.1 make predictions that differ from token to token.
    config = llama_config(SIZES["tiny"], initializer_range=0.1, tie_word_embeddings=False)
    module = transformers.LlamaForCausalLM(config).bfloat16().float().to(device)
    return TextModel("random llama", module.eval().requires_grad_(False), None, causal=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table of variants.

    Raises:
        SystemExit: if a variant failed; the others are measured all the same.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or id of a Hugging Face model")
    parser.add_argument("--calibrate", type=Path, help="calibration text")
    parser.add_argument("--text", type=Path, help="held-out text")
    parser.add_argument("--variants", help="comma-separated; default base, with --quick all kinds")
    parser.add_argument("--format", type=Format.parse, default="kmeans3-g64")
    parser.add_argument("--epochs", type=int, default=calibration.EPOCHS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the held-out text")
    parser.add_argument("--calibrate-tokens", type=int, help="default: as --tokens")
    parser.add_argument("--window", type=int, default=WINDOW)
    parser.add_argument("--device", default=default_device(), choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="fp32", choices=DTYPES, help="of the comparison")
    parser.add_argument("--gptaq-damping", type=float, default=DAMPING)
    parser.add_argument("--check", action="store_true", help="measure unquantised variants, too")
    parser.add_argument("--out", type=Path, help="append the rows to a file of JSON lines")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny random model and random tokens; with --check"
    )
    options = parser.parse_args(arguments)
    if not options.quick and None in (options.model, options.calibrate, options.text):
        parser.error("wanted --model, --calibrate and --text, or --quick")
    names = options.variants or (QUICK_VARIANTS if options.quick else "base")
    try:
        variants = [Variant.parse(name.strip(), options.epochs) for name in names.split(",")]
    except ValueError as error:
        parser.error(str(error))

    if options.quick:
        model = random_llama(options.device)
        shape = (2, QUICK_TOKENS // QUICK_WINDOW, QUICK_WINDOW)
        tokens = torch.randint(SIZES["tiny"].vocabulary, shape)
        held_out, windows = tokens.to(model.device)
    else:
        model = load_text_model(options.model, options.device, options.dtype)
        cut = partial(token_windows, tokenizer=model.tokenizer, length=options.window)
        held_out = cut(
            options.text.read_text(encoding="utf-8"), count=options.tokens // options.window
        ).to(model.device)
        windows = cut(
            "\n\n".join(read_texts([options.calibrate]).paragraphs),  # as fdk-bench joins them
            count=(options.calibrate_tokens or options.tokens) // options.window,
        ).to(model.device)
    reference = Reference(model.module, held_out)
    perplexity = math.exp(reference.loss.double().mean())
    subject = Subject(
        model,
        windows,
        reference,
        options.format,
        options.gptaq_damping,
        options.check or options.quick,
    )
    facts = {
        "model": model.name,
        "tokens": held_out.numel(),
        "calibration_tokens": windows.numel(),
        "window": held_out.shape[1],
        "original_perplexity": perplexity,
        "gptaq_damping": options.gptaq_damping,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "dtype": model.dtype,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(
        f"{model.name} in {options.format}, {held_out.numel()} held-out tokens, {windows.numel()} "
        f"to calibrate; perplexity as loaded {perplexity:.3f}; torch {torch.__version__}\n\n"
        f"{HEADER}",
        flush=True,
    )
    failed = []
    for variant in variants:
        try:
            row = measure(variant, subject) | {"error": None}
        except Exception as error:  # the others go on
            traceback.print_exc(file=sys.stderr)
            failed.append(variant.name)
            row = {
                "variant": variant.name,
                "format": str(options.format),
                "epochs": variant.epochs,
                "error": f"{type(error).__name__}: {error}",
            }
        print(line_of(row), flush=True)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row | facts) + "\n")
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
