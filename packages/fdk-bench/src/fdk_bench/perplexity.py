"""Language models: perplexity, and divergence of the next token from the 16-bit model's."""

import errno
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

# Logits are read in pieces of so many positions: 262,144 words of float32 take 134 MB.
POSITIONS = 128


@dataclass(frozen=True)
class Estimate:
    """A mean over windows of text and its standard error; the error of one window is unknown."""

    mean: float
    error: float | None


@dataclass(frozen=True)
class Comparison:
    """A model's predictions of a text, and how far they are from those of the model as loaded.

    Attributes:
        loss: cross entropy of the next token, nats.
        excess: loss less that of the model as loaded, window by window: the windows' own
            differences cancel, so its error is far below that of ``loss``.
        divergence: Kullback-Leibler divergence of the next token's distribution from that of the
            model as loaded, nats.
        agreement: share of positions whose most likely token is the same.
    """

    loss: Estimate
    excess: Estimate
    divergence: Estimate
    agreement: float

    @property
    def perplexity(self) -> Estimate:
        """``exp(loss)``; its error to first order."""
        value = math.exp(min(self.loss.mean, math.log(1e300)))  # a broken model's may overflow
        return Estimate(value, None if self.loss.error is None else value * self.loss.error)


def estimate(values: Tensor) -> Estimate:
    """Return the mean of ``values :: [windows, positions]`` and its standard error.

    Positions of a window depend on each other, windows far apart do not, so the error is the
    deviation of the windows' means over the root of their number.
    """
    means = values.double().mean(1)
    error = means.std().item() / math.sqrt(len(means)) if len(means) > 1 else None
    return Estimate(means.mean().item(), error)


class Reference:
    """Next-token logits of a model as loaded, for windows of a text, kept in a temporary file.

    Exact, for every word: 16,384 tokens of 49,152 words take 3.2 GB in float32. They are read
    again for each model compared, which takes seconds where running the model takes a minute.

    Args:
        module: the model, with ``.logits`` in its output.
        windows: ``[windows, window, int64]``, on the device of the model.
        on_window: called after each window.

    Raises:
        OSError: where the folder of temporary files has no room.
    """

    def __init__(
        self, module: nn.Module, windows: Tensor, on_window: Callable[[], None] = lambda: None
    ) -> None:
        self.windows = windows
        self._logits = torch.empty(0)
        losses = []
        for number, (words, logits) in enumerate(_predictions(module, windows)):
            if not number:
                self._logits = _mapped((len(windows), *logits.shape), logits.dtype)
            self._logits[number] = logits.cpu()
            losses.append(torch.cat([_loss(q, w) for q, w in _pieces(logits, words)]))
            on_window()
        self.loss = torch.stack(losses)

    def compare(
        self, module: nn.Module, on_window: Callable[[], None] = lambda: None
    ) -> Comparison:
        """Run another model over the windows.

        Args:
            module: the other model, with the same vocabulary.
            on_window: called after each window.
        """
        found: list[Tensor] = []
        for number, (words, logits) in enumerate(_predictions(module, self.windows)):
            expected = self._logits[number].to(logits.device)
            both = zip(_pieces(expected, words), _pieces(logits, words), strict=True)
            parts = [
                torch.stack(
                    (
                        _loss(q, w),
                        (p.exp() * (p - q)).sum(-1),
                        (p.argmax(-1) == q.argmax(-1)).float(),
                    )
                )
                for (p, w), (q, _) in both
            ]
            found.append(torch.cat(parts, 1))
            on_window()
        loss, divergence, agreement = torch.stack(found, 1)
        return Comparison(
            estimate(loss),
            estimate(loss - self.loss),
            estimate(divergence),
            agreement.double().mean().item(),
        )


def _predictions(module: nn.Module, windows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the words that each window predicts, ``[window - 1]``, and the logits for them."""
    for ids in windows:
        with torch.inference_mode():
            logits: Tensor = module(input_ids=ids[None], use_cache=False).logits[0, :-1]
        yield ids[1:], logits


def _pieces(logits: Tensor, words: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield log probabilities in float32 of some positions at a time, and the words there."""
    for start in range(0, len(words), POSITIONS):
        piece = slice(start, start + POSITIONS)
        yield logits[piece].float().log_softmax(-1), words[piece]


def _loss(log_probabilities: Tensor, words: Tensor) -> Tensor:
    return -log_probabilities.gather(1, words[:, None])[:, 0]


def _mapped(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor whose bytes are those of a file that goes with it."""
    nbytes, folder = math.prod(shape) * dtype.itemsize, tempfile.gettempdir()
    # Written through a map, a full disk would be a bus error.
    if nbytes > (free := shutil.disk_usage(folder).free):
        raise OSError(
            errno.ENOSPC,
            f"the 16-bit model's logits need {nbytes / 1e9:.1f} GB in {folder}, which has "
            f"{free / 1e9:.1f}; set TMPDIR to a larger folder, or pass fewer --tokens",
        )
    with tempfile.TemporaryFile() as file:
        data = np.memmap(file, dtype=np.uint8, mode="w+", shape=(nbytes,))
    return torch.from_numpy(data).view(dtype).view(shape)
