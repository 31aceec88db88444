"""What a model's linear layers are given: second moments to calibrate with, and a few rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fdk_bench.models import SENTENCES_PER_BATCH, TextModel, batches

See = Callable[[str, Tensor], None]
# Rows of x kept of each layer: 224 layers of 4096 inputs take 0.9 GB.
MOST_ROWS = 256
# The text of recorded results: fixed, for a document that changes would change every number.
PACKAGED = "packaged"
PACKAGED_TEXT = Path(__file__).parent / "calibration.txt"


@dataclass(frozen=True)
class CalibrationText:
    """What a model is run over: names of the files, and the paragraphs of all."""

    name: str
    paragraphs: Sequence[str]


@dataclass(frozen=True, eq=False)
class Calibration:
    """Mean squares of what each layer was given over a text.

    Attributes:
        text: names of the files, for rows.
        tokens: that were seen.
        importance: by layer, ``[k, float32]``: how much the squared error of a weight counts.
    """

    text: str
    tokens: int
    importance: Mapping[str, Tensor]


def read_texts(paths: Sequence[Path]) -> CalibrationText:
    """What blank lines part in some text files, each on one line.

    Raises:
        ValueError: for a file that is no UTF-8 text, and where nothing is left.
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
    """Runs the model over a text; each layer's importance is the mean square of each input.

    With x of one row, the squared error of an output is ``(sum_i dW[i] x[i])^2``; inputs taken as
    independent, its mean is ``sum_i dW[i]^2 mean(x[i]^2)``, which is what importance weighs.
    """
    totals = {
        name: torch.zeros(layer.in_features, dtype=torch.float64, device=model.device)
        for name, layer in layers.items()
    }
    tokens = 0

    def add(name: str, rows: Tensor) -> None:
        totals[name] += rows.double().square().sum(0)

    for count in _run(model, layers, text.paragraphs, add):
        tokens += count
    importance = {name: (total / tokens).float() for name, total in totals.items()}
    return Calibration(text.name, tokens, importance)


def rows_of(
    model: TextModel, layers: Mapping[str, nn.Linear], texts: Sequence[str]
) -> dict[str, Tensor]:
    """At most ``MOST_ROWS`` inputs of each layer, ``[rows, k, float32]``, spread over the texts."""
    kept = {
        name: [torch.zeros(0, layer.in_features, device=model.device)]
        for name, layer in layers.items()
    }
    share = -(-MOST_ROWS // -(-len(texts) // SENTENCES_PER_BATCH))

    def keep(name: str, rows: Tensor) -> None:
        kept[name].append(_spread(rows.float(), share))

    for _ in _run(model, layers, texts, keep):
        pass
    return {name: _spread(torch.cat(parts), MOST_ROWS) for name, parts in kept.items()}


def _spread(rows: Tensor, most: int) -> Tensor:
    return rows[:: max(1, -(-rows.shape[0] // most))].clone()


def _run(
    model: TextModel, layers: Mapping[str, nn.Linear], texts: Sequence[str], see: See
) -> Iterator[int]:
    """Runs the model a few texts at a time and shows each layer's rows; yields their tokens."""
    for ids, mask in batches(model, texts):
        with _hooked(layers, mask, see), torch.inference_mode():
            model.module(input_ids=ids, attention_mask=mask)
        yield int(mask.sum())


@contextmanager
def _hooked(layers: Mapping[str, nn.Linear], mask: Tensor, see: See) -> Iterator[None]:
    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def given(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0]
            # Padding is no text. Rows that are not one per token (a pooler's) have none.
            see(name, x[mask.bool()] if x.shape[:-1] == mask.shape else x.flatten(0, -2))

        return given

    handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
