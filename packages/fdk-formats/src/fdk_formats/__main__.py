"""Quantises a Hugging Face model folder with calibration: `python -m fdk_formats`."""

import argparse
import json
import logging
import math
import shutil
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fdk_formats.calibration import (
    EPOCHS,
    CalibratedLayer,
    calibrate_weights,
    random_windows,
    token_windows,
)
from fdk_formats.files import save_model
from fdk_formats.format import Format
from fdk_formats.mixed import mix_formats, parse_mix, some_windows
from fdk_formats.model import choose_formats, replace_layers

# Files of a model folder that the weights are not in.
KEPT = ("*.json", "*.jinja", "*.txt", "*.model")
# Windows of a text: 16,384 tokens in windows of 512.
WINDOWS = 32
# In the place of the texts: random tokens.
RANDOM = "random"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, quantises, and writes the folder and the report."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        report = quantise_folder(options)
    except (ValueError, OSError) as error:
        sys.exit(f"fdk_formats: {error}")
    print(json.dumps({key: value for key, value in report.items() if key != "layers"}, indent=1))


def quantise_folder(options: argparse.Namespace) -> dict[str, Any]:
    """Quantises the model of a folder into another; returns the report.

    Args:
        options: as ``_parser`` describes them.
    """
    start = time.monotonic()
    out = Path(options.out)
    if out.exists() and any(out.iterdir()) and not options.resume:
        raise ValueError(f"{out} is not empty; give another --out, or --resume to go on with it")
    model, tokenizer = _load(options.model)
    if options.calibration == [RANDOM]:
        inputs = random_windows(tokenizer, options.length, options.windows or WINDOWS)
    else:
        texts = [Path(file).read_text(encoding="utf-8") for file in options.calibration]
        inputs = torch.cat([_windows(text, tokenizer, options) for text in texts])
    formats = _formats(model, inputs, options)
    out.mkdir(parents=True, exist_ok=True)
    work = out / "calibration"
    layers = calibrate_weights(
        model, formats, inputs.split(options.batch),
        epochs=options.epochs, device=options.device, folder=work,
    )  # fmt: skip
    seconds = time.monotonic() - start
    # Only to be saved: files are the same from every backend, and there may be no other.
    found = {name: layer.quantised for name, layer in layers.items()}
    replace_layers(model, found, backend="reference")
    save_model(out / "model.safetensors", model, for_folder=True)
    for pattern in KEPT:
        for file in sorted(Path(options.model).glob(pattern)):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, out / file.name)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    # fdk-transformers loads the folder; the formats of layers are in the metadata of the file.
    config["quantization_config"] = {"quant_method": "fdk"}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    report: dict[str, Any] = {
        "format": str(options.format),
        "bits_per_weight": _bits(layers.values()),
        "calibration_tokens": inputs.numel(),
        "seconds": round(seconds, 1),
    }
    if options.held_out:
        text = Path(options.held_out).read_text(encoding="utf-8")
        windows = _windows(text, tokenizer, options)
        report |= divergence(_load(options.model)[0], model, windows)
    report["layers"] = [
        {
            "name": layer.name,
            "format": str(layer.quantised.format),
            "relative_error": layer.relative_error,
            "output_error": layer.output_error,
        }
        for layer in layers.values()
    ]
    (out / "report.json").write_text(json.dumps(report, indent=1))
    shutil.rmtree(work)
    return report


@torch.inference_mode()
def divergence(source: nn.Module, model: nn.Module, windows: Tensor) -> dict[str, float]:
    """Compares the next-token distributions of two language models.

    Args:
        source: the model in 16 or 32 bits.
        model: the quantised model.
        windows: token ids, ``[windows, tokens, int64]``.

    Returns:
        KL from source to model in nats per token, its standard error over windows, and the
        perplexity of both.
    """
    losses: list[list[float]] = []
    kls = []
    for window in windows:
        a, b = (
            each(input_ids=window[None]).logits[0, :-1].float().log_softmax(-1)
            for each in (source, model)
        )
        kls.append(float((a.exp() * (a - b)).sum(-1).mean()))
        wanted = window[1:, None]
        losses.append([-float(each.gather(1, wanted).mean()) for each in (a, b)])
    kl = torch.tensor(kls, dtype=torch.float64)
    mean = torch.tensor(losses, dtype=torch.float64).mean(0)
    return {
        "kl": float(kl.mean()),
        "kl_standard_error": float(kl.std() / math.sqrt(len(kl))) if len(kl) > 1 else math.nan,
        "perplexity_source": math.exp(mean[0]),
        "perplexity": math.exp(mean[1]),
        "held_out_tokens": windows.numel(),
    }


def _load(folder: str) -> tuple[nn.Module, Any]:
    """Loads model and tokenizer of a Hugging Face folder."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise ValueError(
            "a Hugging Face folder needs the package transformers: pip install transformers"
        ) from None
    if not Path(folder, "config.json").exists():
        raise ValueError(f"{folder} is no Hugging Face folder: it has no config.json")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")  # in evaluation mode
    return model, AutoTokenizer.from_pretrained(folder)


def _windows(text: str, tokenizer: Any, options: argparse.Namespace) -> Tensor:
    """Returns as many windows of a text as asked for, or up to WINDOWS."""
    if options.windows is not None:
        return token_windows(text, tokenizer, options.length, options.windows)
    windows = token_windows(text, tokenizer, options.length)
    count = min(WINDOWS, len(windows))
    return windows[torch.arange(count) * len(windows) // count]


def _formats(model: nn.Module, inputs: Tensor, options: argparse.Namespace) -> dict[str, Format]:
    """Returns the format of each layer to quantise."""
    ladder, bits = parse_mix(options.format)
    overrides = _overrides(options.override)
    settings = {"skip": options.skip, "overrides": overrides, "backend": "reference"}
    formats, *others = (choose_formats(model, f, **settings) for f in ladder)
    if not formats:
        raise ValueError("the model has no linear layer to quantise")
    if bits is None:
        return formats
    mixed = [name for name in formats if formats[name] != others[0][name]]  # not overridden
    linear = {name for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    if experts := [name for name in mixed if name not in linear]:
        raise ValueError(
            f"bits are mixed over linear layers only: give {experts[0]} and other experts a format "
            f"of their own, for example --override 'experts={ladder[0]}'"
        )
    model.to(options.device)
    some = some_windows(inputs).split(options.batch)
    formats |= mix_formats(model, mixed, ladder, bits, some)
    model.to("cpu")
    return formats


def _overrides(texts: Sequence[str]) -> dict[str, str | None]:
    overrides: dict[str, str | None] = {}
    for text in texts:
        pattern, equals, format = text.rpartition("=")
        if not equals:
            raise ValueError(f"--override takes REGEX=FORMAT, got {text!r}")
        overrides.setdefault(pattern, None if format == "none" else format)
    return overrides


def _bits(layers: Collection[CalibratedLayer]) -> float:
    sizes = [math.prod(layer.quantised.shape) for layer in layers]
    bits = (layer.quantised.bits_per_weight for layer in layers)
    return sum(size * each for size, each in zip(sizes, bits, strict=True)) / sum(sizes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m fdk_formats", description=__doc__)
    parser.add_argument("model", help="folder of a causal language model")
    parser.add_argument(
        "format", help="such as kmeans3-g64, or kmeans2-g64:kmeans3-g64@2.6: 2.6 bits on average"
    )
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument(
        "--calibration", required=True, nargs="+",
        help=f"text files; broad text works best; {RANDOM} for random tokens, where there is none",
    )  # fmt: skip
    parser.add_argument("--length", type=int, default=512, help="tokens in a window")
    parser.add_argument("--windows", type=int, help=f"windows per text (default: up to {WINDOWS})")
    parser.add_argument("--batch", type=int, default=2, help="windows per call")
    parser.add_argument(
        "--epochs", type=int, default=EPOCHS,
        help=f"how often scales are trained on each window (default: {EPOCHS})",
    )  # fmt: skip
    parser.add_argument(
        "--skip", action="append", default=[], help="regex of layers to leave beside the head"
    )
    parser.add_argument(
        "--override", action="append", default=[], metavar="REGEX=FORMAT",
        help="another format for some layers, or none to leave them; the first match counts",
    )  # fmt: skip
    parser.add_argument(
        "--device", default="cpu", help="where blocks run, such as cuda (default: cpu)"
    )
    parser.add_argument("--resume", action="store_true", help="go on with a folder cut short")
    parser.add_argument("--held-out", help="text file: report perplexity and KL on it")
    return parser


if __name__ == "__main__":
    main()
