"""Checks of the arguments of ``precompile`` and ``tune_layers``, before anything runs."""

from collections.abc import Iterable

import torch

from fdk_formats.format import Format

Layer = tuple[Format | str, int, int]


def checked_layers(caller: str, layers: Iterable[Layer]) -> list[tuple[Format, int, int]]:
    """Returns format, n and k of each layer, without layers of n = 0, which need no kernel.

    The kernels of a rotated format are those of the unrotated one.

    Args:
        caller: function named in errors.
        layers: format or its short form, n and k of each.

    Raises:
        TypeError: a layer is not such a triple.
        ValueError: a format does not parse, n is negative, or groups do not fill k.
    """
    checked = []
    for layer in layers:
        if not isinstance(layer, tuple | list) or len(layer) != 3:
            raise TypeError(f"{caller}: a layer must be (format, n, k), got {layer!r}")
        name, n, k = layer
        format = Format.parse(name)
        if type(n) is not int or type(k) is not int:
            raise TypeError(f"{caller}: n and k of {format} must be int, got {n!r} and {k!r}")
        if n < 0:
            raise ValueError(f"{caller}: n of {format} must be at least 0, got {n}")
        format.group_size_for(k)
        if n > 0:
            checked.append((format.unrotated, n, k))
    return checked


def check_activations(caller: str, dtype: torch.dtype, supported: tuple[torch.dtype, ...]) -> None:
    """Raises TypeError where kernels do not support the dtype of activations."""
    if dtype not in supported:
        raise TypeError(f"{caller}: dtype must be {' or '.join(map(str, supported))}, got {dtype}")
