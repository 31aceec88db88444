"""A format for each layer, for a number of bits per weight on average.

To second order, errors of a layer's outputs raise the divergence of a language model's predictions
by half the sum of error squared times gradient squared, where the gradient is that of the log
likelihood of a token drawn from the predictions (the Fisher information). The squared error is
taken as a share of the squared output that depends on the format alone: its error on Gaussian
weights.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fdk_formats.distil import Teacher, frozen
from fdk_formats.format import Format
from fdk_formats.model_inputs import Call, calls_of, device_of, in_fast_dtype
from fdk_formats.quantise import quantise
from fdk_formats.tensor import relative_error

# Tokens, about, that formats are mixed by.
TOKENS = 4096
# Weights on which the error of a format is measured.
SAMPLE = (64, 3072)


def mix_formats(
    model: nn.Module,
    layers: Sequence[str],
    formats: Sequence[Format | str],
    bits: float,
    inputs: Iterable[Any],
) -> dict[str, Format]:
    """Chooses a format for each linear layer, for the least divergence of the predictions.

    Every layer begins with the smallest format. The layer whose next larger one saves most per
    stored bit gets it, until ``bits`` are spent.

    Args:
        model: a language model with ``get_output_embeddings`` and ``get_input_embeddings``, in
            evaluation mode.
        layers: dotted names of ``nn.Linear`` layers.
        formats: two or more, for example ``["kmeans2-g64", "kmeans3-g64"]``.
        bits: stored bits per weight, scales included, on average over the layers.
        inputs: see ``calibrate``; some 4,000 tokens are enough.

    Returns:
        The format of each layer by name.

    Raises:
        ValueError: if ``bits`` is not between the bits of the formats, or the model is no language
            model.

    Example:
        >>> formats = mix_formats(model, names, ["kmeans2-g64", "kmeans3-g64"], 2.6, tokens)
    """
    weights = {name: model.get_submodule(name).get_parameter("weight") for name in layers}
    found = dict.fromkeys({Format.parse(format) for format in formats})
    # By the bits of codes and scales; k matters only to formats of whole rows.
    sizes = {
        name: {format: format.bits_per_weight(weight.shape[1]) * weight.numel() for format in found}
        for name, weight in weights.items()
    }
    total = sum(weight.numel() for weight in weights.values())
    ladder = sorted(found, key=lambda format: sum(size[format] for size in sizes.values()))
    least, most = (sum(s[f] for s in sizes.values()) / total for f in (ladder[0], ladder[-1]))
    if not least <= bits <= most:
        raise ValueError(
            f"mix_formats: wanted {least:.4g} to {most:.4g} bits per weight, as the formats "
            f"{', '.join(map(str, ladder))} have, got {bits:g}"
        )
    shares = {format: _squared_error(format) for format in ladder}
    harm = _sensitivities(model, layers, calls_of(inputs))
    chosen = dict.fromkeys(layers, ladder[0])
    steps = [
        (harm[name] * (shares[a] - shares[b]) / (size[b] - size[a]), name, b)
        for name, size in sizes.items()
        for a, b in pairwise(ladder)
    ]
    left = (bits - least) * total + 1e-6 * total
    # A layer's gains fall from step to step, so that it takes them in order.
    for _, name, format in sorted(steps, key=lambda step: -step[0]):
        cost = sizes[name][format] - sizes[name][chosen[name]]
        if cost <= left and ladder.index(format) == ladder.index(chosen[name]) + 1:
            chosen[name], left = format, left - cost
    return chosen


def some_windows(windows: Tensor) -> Tensor:
    """Returns enough of the token windows ``[windows, tokens]`` for ``mix_formats``, spread out."""
    return windows[:: max(1, windows.numel() // TOKENS)]


def parse_mix(text: str) -> tuple[list[Format], float | None]:
    """Parses ``FORMAT`` or ``FORMAT:FORMAT...@BITS``.

    Returns:
        The formats, and the bits per weight on average; None for one format.

    Raises:
        ValueError: if the text is malformed.

    Example:
        >>> parse_mix("kmeans2-g64:kmeans3-g64@2.6")
    """
    names, at, bits = text.partition("@")
    formats = [Format.parse(name) for name in names.split(":")]
    try:
        average = float(bits) if at else None
    except ValueError:
        average = None
    if (len(formats) > 1) != (average is not None):
        raise ValueError(
            f"wanted a format, or several with their bits on average such as "
            f"kmeans2-g64:kmeans3-g64@2.6, got {text!r}"
        )
    return formats, average


def _squared_error(format: Format) -> float:
    """Returns the relative squared error of a format on Gaussian weights."""
    weight = torch.randn(SAMPLE, generator=torch.Generator().manual_seed(0))
    return relative_error(weight, quantise(weight, format)) ** 2


def _sensitivities(
    model: nn.Module, layers: Sequence[str], calls: Sequence[Call]
) -> dict[str, float]:
    """Returns, by layer, the divergence that errors as large as its outputs would make.

    Summed over the tokens of ``calls``: squared outputs, in the mean over outputs, times squared
    gradients, in the sum over them. Token by token, because some have huge outputs that hardly
    matter.
    """
    harm = dict.fromkeys(layers, 0.0)
    generator = torch.Generator().manual_seed(0)

    def watch(name: str, _: nn.Module, args: Any, output: Tensor) -> None:
        square = output.detach().float().square().mean(-1)

        def add(gradient: Tensor) -> None:
            harm[name] += float((gradient.float().square().sum(-1) * square).sum()) / 2

        output.register_hook(add)

    with ExitStack() as stack:
        stack.enter_context(in_fast_dtype(model, calls, device_of(model)))
        stack.enter_context(frozen(model))
        stack.enter_context(torch.enable_grad())
        for name in layers:
            hook = partial(watch, name)
            stack.callback(model.get_submodule(name).register_forward_hook(hook).remove)
        teacher = Teacher(model, [])
        # Gradients of the weights are not wanted: those of the outputs need a leaf before them.
        embedding = model.get_input_embeddings()  # type: ignore[operator]
        stack.callback(embedding.register_forward_hook(_require_gradient).remove)
        for call in calls:
            state = teacher.state_of(partial(call.run, model))
            state.backward(teacher.likelihood_gradient(state, generator))
    return harm


def _require_gradient(_: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.requires_grad_(True)
