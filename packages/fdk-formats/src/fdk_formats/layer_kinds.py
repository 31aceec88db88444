"""The kinds of layers that have a quantised counterpart."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fdk_formats import tensor_parallel
from fdk_formats.embedding import QuantisedEmbedding
from fdk_formats.experts import ExpertLinear, QuantisedExpertLinear
from fdk_formats.instance_attributes import is_patched
from fdk_formats.linear import QuantisedLinear
from fdk_formats.quantised_module import QuantisedModule
from fdk_formats.tensor import CanonicalWeight, QuantisedStack, QuantisedTensor

# Kinds of layers that ``include`` of ``quantise_model`` adds to linear layers.
OPTIONAL_KINDS = ("embedding", "conv1d")


def kind_of(module: nn.Module) -> str | None:
    """Returns the kind of a layer that has a quantised counterpart, else None.

    Subclasses have none: their owners may do more than call them. ``conv1d`` is the linear layer
    of GPT-2 in transformers, whose weight is ``[k, n]``; ``experts`` a projection of experts.
    """
    kind = type(module)
    if kind is nn.Linear:
        return "linear"
    if kind is nn.Embedding:
        return "embedding"
    if kind is ExpertLinear:
        return "experts"
    is_conv1d = kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    return "conv1d" if is_conv1d else None


def parameter_name(name: str, source: nn.Module) -> str:
    """Returns the name of a layer's weight: that of a projection of experts is the layer's."""
    return name if isinstance(source, ExpertLinear) else f"{name}.weight"


def check_include(include: Collection[str]) -> None:
    """Raises ValueError for a kind that ``quantise_model`` does not know."""
    unknown = [kind for kind in include if kind not in OPTIONAL_KINDS]
    if isinstance(include, str) or unknown:
        raise ValueError(
            f"include: wanted a list of {' or '.join(OPTIONAL_KINDS)}, got {include!r}"
        )


def matrix_of(source: Any) -> Tensor:
    """Returns the weight of a layer as ``[n, k]``, that of experts as ``[experts, n, k]``."""
    if isinstance(source, ExpertLinear):
        return source.stack()
    weight: Tensor = source.weight
    return weight.t() if kind_of(source) == "conv1d" else weight


def check_source(caller: str, name: str, linear: Any) -> None:
    """Raises ValueError if a layer is more than its weight and bias."""
    parameters = dict(linear.named_parameters(recurse=False))
    for attribute in ("weight", "bias"):
        if getattr(linear, attribute, None) is not None and attribute not in parameters:
            raise ValueError(
                f"{caller}: layer {name}: its {attribute} must be a parameter, and is "
                f"computed from others (pruned or normed): make that permanent, or leave it"
            )
    if is_patched(linear.owner[0] if isinstance(linear, ExpertLinear) else linear):
        raise ValueError(
            f"{caller}: layer {name}: its forward is patched (by an attribute of the layer), "
            f"and a quantised layer would not call it: remove the patch, or leave the layer"
        )
    if getattr(linear, "max_norm", None) is not None:
        raise ValueError(
            f"{caller}: layer {name}: max_norm changes the table at each call; leave it"
        )
    more = [own for own in parameters if own not in ("weight", "bias")]
    more += [own for own, _ in linear.named_buffers(recurse=False)]
    more += [own for own, _ in linear.named_children()]
    if more:
        raise ValueError(
            f"{caller}: layer {name}: holds {', '.join(more)} besides weight and bias, which "
            f"a quantised layer would drop: remove them, or leave the layer"
        )
    if tensor_parallel.is_dtensor(linear.weight):
        raise ValueError(
            f"{caller}: layer {name}: its weight is a DTensor: quantise the model before it "
            f"is sharded, and shard the result"
        )


def quantised_like(
    source: Any,
    q: CanonicalWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    settings: Mapping[str, Any],
) -> QuantisedModule:
    """Makes the quantised counterpart of a layer.

    Args:
        source: the layer.
        q: the weight.
        bias: ``[n]``, ``[experts, n]`` or None.
        dtype: dtype of the activations.
        settings: arguments ``backend`` and ``activations`` of ``QuantisedLinear``.
    """
    if isinstance(q, QuantisedStack):
        backend = settings["backend"]
        return QuantisedExpertLinear.from_quantised(q, bias, dtype=dtype, backend=backend)
    assert isinstance(q, QuantisedTensor)
    if kind_of(source) == "embedding":
        return QuantisedEmbedding.from_quantised(q, source.padding_idx, dtype=dtype)
    return QuantisedLinear.from_quantised(q, bias, dtype=dtype, **settings)
