"""Language models trained with few bits: a small llama on text that comes with Python.

    python -m fdk_bench.qat_demo --output qat                # miniature, minutes on a CPU
    python -m fdk_bench.qat_demo --device cuda --width 256 --layers 6 --steps 3000 --processes 13

Each model is trained from scratch on the help texts of Python (bytes, no tokenizer), in 16 bits or
with ``prepare_qat``, converted, and measured on the last tenth. After models of one size come wider
ones with fewer bits in the memory of the model of 16 bits, the comparison of 1-Bit-Wonder.
"""

import argparse
import json
import math
import pydoc_data.topics
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fdk_formats import Format, convert, prepare_qat

BYTES = 256
HEAD = 32  # width of an attention head, and of a group of weights
HELD_OUT = 0.1
WARM_STEPS = 0.1
FORMATS = (None, *(f"{kind}{bits}-g32" for kind in ("kmeans", "int") for bits in (4, 2, 1)))


@dataclass(frozen=True)
class Settings:
    """Settings that all models of a run share.

    Attributes:
        width: of the models of one size; a multiple of ``HEAD``.
        layers: number of blocks.
        steps: of training.
        batch: windows in a step.
        length: bytes in a window.
        rate: peak learning rate at ``width``; wider models get less, by the root of the ratio.
        device: ``cpu`` or ``cuda``.
    """

    width: int = 64
    layers: int = 2
    steps: int = 300
    batch: int = 8
    length: int = 128
    rate: float = 4e-3
    device: str = "cpu"


@dataclass(frozen=True)
class Row:
    """Result of one model.

    Attributes:
        format: of its linear layers, ``bf16`` for 16 bits.
        width: of the model.
        comparison: ``size`` or ``memory``.
        megabytes: of all weights, embedding and head in 16 bits.
        bits_per_byte: cross-entropy of the held-out text.
        seconds: of training.
    """

    format: str
    width: int
    comparison: str
    megabytes: float
    bits_per_byte: float
    seconds: float


def text() -> Tensor:
    """Returns the help texts of Python, ``[bytes, uint8]``."""
    topics = pydoc_data.topics.topics
    joined = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(joined.encode()), dtype=torch.uint8)


def build(width: int, settings: Settings) -> LlamaForCausalLM:
    """Makes a llama with random weights, the same at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=BYTES,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=settings.layers,
        num_attention_heads=width // HEAD,
        max_position_embeddings=settings.length,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    nn.Module.to(model, settings.device)
    return model


def megabytes(width: int, layers: int, format: str | None) -> float:
    """Returns the bytes of a model's weights, by count."""
    linear = layers * (4 + 3 * 3) * width * width
    bits = 16.0 if format is None else Format.parse(format).bits_per_weight(width)
    return (linear * bits / 8 + BYTES * width * 2) / 1e6


def width_of_equal_memory(format: str, settings: Settings) -> int:
    """Returns the largest width whose weights are no larger than those of the 16-bit model."""
    limit, width = megabytes(settings.width, settings.layers, None), settings.width
    while megabytes(width + HEAD, settings.layers, format) <= limit:
        width += HEAD
    return width


def train(model: nn.Module, data: Tensor, settings: Settings, rate: float) -> None:
    """Trains a model on random windows, the same ones at every call."""
    codebooks = [p for name, p in model.named_parameters() if name.endswith("codebook")]
    others = [p for name, p in model.named_parameters() if not name.endswith("codebook")]
    optimiser = torch.optim.AdamW(others, lr=rate, weight_decay=0.05)
    if codebooks:
        optimiser.add_param_group({"params": codebooks, "weight_decay": 0.0})
    warm = max(1, int(WARM_STEPS * settings.steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser,
        lambda step: min(
            (step + 1) / warm, 0.05 + 0.95 * (1 + math.cos(math.pi * step / settings.steps)) / 2
        ),
    )
    generator = torch.Generator().manual_seed(0)
    model.train()
    for _ in range(settings.steps):
        starts = torch.randint(len(data) - settings.length, (settings.batch,), generator=generator)
        windows = torch.stack([data[s : s + settings.length] for s in starts.tolist()])
        windows = windows.to(settings.device, torch.int64)
        loss = model(input_ids=windows, labels=windows).loss
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()


@torch.no_grad()
def bits_per_byte(model: nn.Module, data: Tensor, settings: Settings) -> float:
    """Returns the cross-entropy over a text."""
    count = len(data) // settings.length
    windows = data[: count * settings.length].view(count, settings.length)
    model.eval()
    losses: list[float] = [
        model(input_ids=part, labels=part).loss.item() * len(part)
        for part in windows.to(settings.device, torch.int64).split(32)
    ]
    return sum(losses) / count / math.log(2)


def measure(format: str | None, width: int, comparison: str, settings: Settings) -> Row:
    """Trains, converts and measures one model."""
    data = text()
    cut = int(len(data) * (1 - HELD_OUT))
    model: nn.Module = build(width, settings)
    if format is not None:
        learn = ["codebook"] if Format.parse(format).is_fitted else []
        model = prepare_qat(model, format, learn=learn, inplace=True)
    start = time.perf_counter()
    train(model, data[:cut], settings, settings.rate * (settings.width / width) ** 0.5)
    seconds = time.perf_counter() - start
    model = (
        model.bfloat16() if format is None else convert(model, backend="reference", inplace=True)
    )
    loss = bits_per_byte(model, data[cut:], settings)
    size = megabytes(width, settings.layers, format)
    return Row(format or "bf16", width, comparison, size, loss, seconds)


def cases(settings: Settings) -> Iterator[tuple[str | None, int, str]]:
    """Yields format, width and comparison of the models of one size, then those of one memory."""
    for format in FORMATS:
        yield format, settings.width, "size"
    for format in FORMATS:
        if format is not None:
            yield format, width_of_equal_memory(format, settings), "memory"


def rows(settings: Settings, processes: int = 1) -> Iterator[Row]:
    """Yields a row per model, in order; trains as many at once as there are processes."""
    columns: Iterable[tuple[str | int | None, ...]] = zip(*cases(settings), strict=True)
    if processes == 1:
        yield from map(measure, *columns, repeat(settings))
        return
    # A forked process cannot use CUDA.
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        yield from pool.map(measure, *columns, repeat(settings))


def table(found: list[Row]) -> str:
    """Returns the rows as Markdown."""
    lines = [
        "| comparison | weights | width | MB | bits per byte | s |",
        "|---|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row.comparison} | {row.format} | {row.width} | {row.megabytes:.2f} "
        f"| {row.bits_per_byte:.3f} | {row.seconds:.0f} |"
        for row in found
    ]
    return "\n".join(lines)


def plot(found: list[Row], path: Path) -> None:
    """Draws the loss over the bytes of the weights."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for kind in ("bf16", "kmeans", "int"):
        for comparison, marker in (("size", "o"), ("memory", "^")):
            own = [r for r in found if r.format.startswith(kind) and r.comparison == comparison]
            if own:
                axes.scatter(
                    [r.megabytes for r in own],
                    [r.bits_per_byte for r in own],
                    marker=marker,
                    label=f"{kind}, one {comparison}",
                )
    for row in found:
        axes.annotate(f" {row.format}", (row.megabytes, row.bits_per_byte), fontsize=7)
    axes.set_xlabel("MB of weights")
    axes.set_ylabel("bits per held-out byte")
    axes.set_xscale("log")
    axes.margins(x=0.2)  # room for names
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Writes ``<output>.jsonl`` and ``<output>.png``, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in asdict(Settings()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--processes", type=int, default=1, help="models trained at once")
    parser.add_argument("--output", type=Path, default=None)
    arguments = vars(parser.parse_args())
    output, processes = arguments.pop("output"), arguments.pop("processes")
    settings = Settings(**arguments)
    found: list[Row] = []
    for row in rows(settings, processes):
        found.append(row)
        print(json.dumps(asdict(row)), flush=True)
    print(table(found))
    if output is not None:
        lines = [json.dumps(asdict(row)) + "\n" for row in found]
        output.with_suffix(".jsonl").write_text("".join(lines))
        plot(found, output.with_suffix(".png"))


if __name__ == "__main__":
    main()
