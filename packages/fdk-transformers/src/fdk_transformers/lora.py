"""Adapters of PEFT on quantised models.

A ``QuantisedLinear`` is an ``nn.Linear`` to PEFT, whose layers call it, ask for its weight (DoRA)
and add to it (merging) without any registration. Merging alone needs a choice: PEFT's own adds to
the quantised weight, which is quantised again, and cannot be undone exactly.
"""

import re
from typing import Any

from fdk_formats import quantise_model
from fdk_transformers.quantiser import activations_of, quantised_layers


def merge_adapters(model: Any, *, requantise: bool = False) -> Any:
    """Adds the active adapters of a PEFT model to its weights, and removes them.

    The weights are dequantised first, so that the adapters are added without loss.

    Args:
        model: a ``PeftModel`` of a quantised model. It is used up.
        requantise: True quantises the layers again, each in the format that it had. What an adapter
            learned is partly lost: compare the results.

    Returns:
        The model of transformers without adapters, in 16 bits or quantised.

    Raises:
        ValueError: if no layer of the model is quantised.

    Example:
        >>> merge_adapters(model).save_pretrained("merged")
    """
    base = model.get_base_model()
    layers = quantised_layers(base)
    if not layers:
        raise ValueError("merge_adapters: no layer is quantised; use model.merge_and_unload()")
    formats = {name.removesuffix(".base_layer"): layer.format for name, layer in layers.items()}
    activations = activations_of(layers.values())
    base.dequantize()
    merged = model.merge_and_unload()
    if not requantise:
        return merged
    return quantise_model(
        merged,
        next(iter(formats.values())),
        skip=".",
        overrides={f"^{re.escape(name)}$": format for name, format in formats.items()},
        include=["embedding", "conv1d"],
        activations=activations,
        inplace=True,
        progress=False,
    )
