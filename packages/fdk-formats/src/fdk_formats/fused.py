"""Fused layers: quantised layers of one input, computed by one product of all their rows.

A small product does not fill a GPU: q, k and v as one, and gate and up as one, take less time than
one after another. The layers stay where they are in the model, each with its own bias, hooks and
``state_dict`` entries; the first that is called with an x computes for all of them, and the others
hand out their rows of it.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fdk_formats.backends import Layout, NoBackendError
from fdk_formats.linear import QuantisedLinear, QuantisedWeight, packed_by
from fdk_formats.tensor import QuantisedTensor
from fdk_formats.torch_internals import in_place_version

# Names that layers of one input have in the models of transformers.
DEFAULT_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

logger = logging.getLogger(__name__)


def fuse_layers(
    model: nn.Module, groups: Iterable[Sequence[str]] = DEFAULT_GROUPS
) -> list[tuple[str, ...]]:
    """Computes sibling quantised layers as one product, in place; what is stored does not change.

    A group is left apart where a layer of it is missing or not quantised, shares its weight with
    another, or where formats, inputs, dtypes, devices or codebooks differ (k-means fits one for
    each weight, unless ``quantise_model`` was told to fuse). It is joined again whenever its
    weights are moved or loaded. What was left and why is logged at level INFO.

    The layers must be called with one and the same tensor, as attention and gated MLPs do; called
    with others, each computes the rows of all. Between their calls neither the tensor nor a bias
    may change in place (of the tensor that is noticed, outside inference mode and
    ``torch.compile``), nor the CUDA stream; tensor and product are kept until the last of them was
    called. What they return are views of one product, not contiguous for several rows, with one
    graph: ``backward`` goes through all of them at once.

    Args:
        model: of ``quantise_model`` or ``load_model``.
        groups: names of layers in one parent. A layer in several groups is fused in the first.

    Returns:
        The dotted names of each group that was fused.

    Raises:
        ValueError: where a group is not two or more different names without dots.
        TypeError: for a model that is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fuse_layers: model must be a module, got {type(model).__name__}")
    groups = groups_of(groups)
    layers = {
        name: module for name, module in model.named_modules() if type(module) is QuantisedLinear
    }
    uses = Counter(id(layer.weight) for layer in layers.values())
    fused = []
    for names in siblings(layers, groups):
        found = [layers[name] for name in names]
        group = Group(found)
        if any(uses[id(layer.weight)] > 1 for layer in found):
            reason: str | None = "a weight is shared"
        elif any(layer.weight.group is not None for layer in found):
            reason = "a layer is of a group already"
        else:
            reason = group.join()
        if reason:
            logger.info("left %s apart: %s", ", ".join(names), reason)
            continue
        for layer in found:
            layer.weight.group = group
        fused.append(names)
    return fused


def groups_of(fuse: bool | Iterable[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """The groups that ``fuse`` of ``quantise_model`` asks for, checked: see ``fuse_layers``."""
    if isinstance(fuse, bool):
        return DEFAULT_GROUPS if fuse else ()
    groups = tuple(fuse)
    for group in groups:
        few = isinstance(group, str) or len(group) < 2 or len(set(group)) < len(group)
        if few or any("." in name for name in group):
            raise ValueError(
                f"fuse: a group is two or more different names of layers in one parent, such as "
                f"{DEFAULT_GROUPS[0]}, got {group!r}"
            )
    return tuple(map(tuple, groups))


def siblings(names: Iterable[str], groups: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """The groups all of whose names are there, under one parent, as dotted names."""
    there = dict.fromkeys(names)
    found = []
    for group in groups:
        for name in there:
            parent, dot, last = name.rpartition(".")
            whole = tuple(f"{parent}{dot}{other}" for other in group)
            if last == group[0] and all(other in there for other in whole):
                found.append(whole)
    return found


class Group:
    """Layers that are one product while their weights allow it.

    Attributes:
        layers: all of them.
        apart: the indices of those that have a layout of their own; what they have beside it, such
            as a bias, may be on another device than the product of the others.
    """

    def __init__(self, layers: Sequence[QuantisedLinear]) -> None:
        self.layers = tuple(layers)  # a tuple: no module registers them as its own
        self.apart: tuple[int, ...] = ()

    def join(self) -> str | None:
        """Packs the weights as one; why not, where they stay as they are, or None."""
        weights = [layer.weight for layer in self.layers]
        self.apart = tuple(i for i, w in enumerate(weights) if not isinstance(w.layout, FusedRows))
        if len({_kind(weight) for weight in weights}) > 1:
            return "formats, inputs, dtypes or devices differ"
        parts = [weight.unpack() for weight in weights]
        first, kind = parts[0], weights[0]
        if first.codebook is not None:
            if first.device.type == "meta":
                return "codebooks on meta cannot be compared"
            others = [part.codebook for part in parts[1:]]
            if not all(torch.equal(first.codebook, table) for table in others if table is not None):
                return "codebooks differ"
        try:
            layout, name = packed_by(
                kind.backend, concatenated(parts), kind.dtype, kind.activations
            )
        except (NoBackendError, ValueError) as error:  # raised, it would end a move half-way
            return str(error)
        product = Product(layout, kind.dtype, self)
        for index, weight in enumerate(weights):
            weight.layout, weight.backend_name = FusedRows(product, index), name
        self.apart = ()
        return None


def _kind(weight: QuantisedWeight) -> tuple[object, ...]:
    device, k = weight.device, weight.shape[1]
    return weight.format, k, weight.dtype, device, weight.activations, weight.backend


def concatenated(parts: Sequence[QuantisedTensor]) -> QuantisedTensor:
    """Weights of one format and codebook, one below the other."""
    first = parts[0]
    tensors: dict[str, Any] = {
        name: torch.cat([part.tensors()[name] for part in parts])
        for name in first.tensors()
        if name != "codebook"
    }
    return replace(first, shape=(sum(part.shape[0] for part in parts), first.shape[1]), **tensors)


def rows_of(q: QuantisedTensor, start: int, stop: int) -> QuantisedTensor:
    """Rows ``start`` to ``stop`` of a weight as a weight of its own, copied."""
    tensors: dict[str, Any] = {
        name: tensor.clone() if name == "codebook" else tensor[start:stop].clone()
        for name, tensor in q.tensors().items()
    }
    return replace(q, shape=(stop - start, q.shape[1]), **tensors)


class Kept:
    """The last product and who has not had his rows of it yet. Copies and pickles are empty."""

    def __init__(self) -> None:
        # x, its version, whether gradients were recorded, y, the indices that are left
        self.last: tuple[Tensor, object, bool, Tensor, tuple[int, ...]] | None = None

    def __reduce__(self) -> tuple[type["Kept"], tuple[()]]:
        return Kept, ()


class Product(nn.Module):
    """One layout of the rows of several layers.

    Args:
        layout: of all rows.
        dtype: of its activations; under autocast x has another.
        group: the layers, for their biases.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, group: Group) -> None:
        super().__init__()
        self.layout, self.dtype, self._group, self._kept = layout, dtype, group, Kept()
        ends = accumulate((layer.out_features for layer in group.layers), initial=0)
        self.spans = tuple(pairwise(ends))

    def part(self, x: Tensor, index: int, bias: Tensor | None) -> Tensor:
        """What layer ``index`` makes of ``x :: [..., k]``, bias included: ``[..., n]``."""
        start, stop = self.spans[index]
        if bias is not self._group.layers[index].bias:  # the weight is called by another
            alone = None if bias is None else pad(bias, (start, self.spans[-1][1] - stop))
            return self._of_all(x, alone)[..., start:stop]
        version, grad = in_place_version(x), torch.is_grad_enabled()
        last = self._kept.last  # read once: another thread may put its own there
        if (
            last is not None
            and last[0] is x
            and last[1] == version
            and last[2] == grad
            and index in last[4]
        ):
            y, left = last[3], last[4]
        else:
            y, left = self._of_all(x, self._bias()), tuple(range(len(self.spans)))
        left = tuple(other for other in left if other != index)
        self._kept.last = (x, version, grad, y, left) if left else None
        return y[..., start:stop]

    def _of_all(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = self.layout(x if x.dtype == self.dtype else x.to(self.dtype), bias)
        return y

    def _bias(self) -> Tensor | None:
        """The biases of all, zeros where a layer has none or is apart; None if all are."""
        layers, apart = self._group.layers, self._group.apart
        biases = [None if i in apart else layer.bias for i, layer in enumerate(layers)]
        given = [bias for bias in biases if bias is not None]
        if not given:
            return None
        sizes = [stop - start for start, stop in self.spans]
        pairs = zip(biases, sizes, strict=True)
        return torch.cat([given[0].new_zeros(n) if bias is None else bias for bias, n in pairs])

    def extra_repr(self) -> str:
        """The rows of each layer."""
        return f"rows={[list(span) for span in self.spans]}"


class FusedRows(Layout):
    """One layer's rows of a product that it shares."""

    casts = True

    def __init__(self, product: Product, index: int) -> None:
        super().__init__()
        self.product, self.index = product, index

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See ``Layout``."""
        return self.product.part(x, self.index, bias)

    def unpack(self) -> QuantisedTensor:
        """See ``Layout``."""
        layout: Any = self.product.layout
        return rows_of(layout.unpack(), *self.product.spans[self.index])
