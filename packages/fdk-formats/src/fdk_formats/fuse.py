"""Fused layers: quantised layers with one input, computed as one product of all their rows.

A small product does not fill a GPU, so q, k and v as one product, and gate and up as one, are
faster than one after another. The layers stay in their place in the model with their own bias,
hooks and ``state_dict`` entries. The first one called with an x computes the product for all, and
the others return their rows of it.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fdk_formats import tensor_parallel
from fdk_formats.backends import Layout, NoBackendError
from fdk_formats.linear import QuantisedLinear
from fdk_formats.packed_module import compute_dtype
from fdk_formats.rotated_layout import RotatedLayout
from fdk_formats.stored_weight import pack_with
from fdk_formats.tensor import QuantisedTensor
from fdk_formats.torch_internals import in_place_version

# Names of layers with one input in the models of transformers.
DEFAULT_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

logger = logging.getLogger(__name__)


def fuse_layers(
    model: nn.Module, groups: Iterable[Sequence[str]] = DEFAULT_GROUPS
) -> list[tuple[str, ...]]:
    """Computes sibling quantised layers as one product, in place. Files do not change.

    A group stays separate if one of its layers is missing, not quantised or shares its weight with
    another layer, or if formats, inputs, dtypes, devices or codebooks differ. (k-means fits a
    codebook to each weight, unless ``quantise_model`` fuses.) It is fused again whenever its
    weights are moved or loaded. Groups that stay separate are logged with the reason at level INFO.

    The layers must be called with the same tensor object, as attention and gated MLPs do; called
    with different ones, each computes the rows of all. Between their calls, neither the tensor nor
    a bias may change in place (a change of the tensor is detected outside inference mode and
    ``torch.compile``), nor the CUDA stream. Input and product stay alive until the last layer was
    called. The outputs are views of one product: not contiguous for several rows, and with one
    autograd graph.

    Args:
        model: result of ``quantise_model`` or ``load_model``.
        groups: names of layers in one parent module. A layer in several groups is fused in the
            first.

    Returns:
        The dotted names of each group that was fused.

    Raises:
        ValueError: if a group is not two or more different names without dots.
        TypeError: if ``model`` is not a module.

    Example:
        >>> fuse_layers(model, [("query", "key", "value")])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fuse_layers: model must be a module, got {type(model).__name__}")
    groups = checked_groups(groups)
    layers = {
        name: module for name, module in model.named_modules() if type(module) is QuantisedLinear
    }
    uses = Counter(id(layer.stored) for layer in layers.values())
    fused = []
    for names in siblings(layers, groups):
        found = [layers[name] for name in names]
        group = Group(found)
        if any(uses[id(layer.stored)] > 1 for layer in found):
            reason: str | None = "a weight is shared"
        elif any(layer.group is not None for layer in found):
            reason = "a layer is in a group already"
        else:
            reason = group.reason_apart()
        if reason:
            logger.info("left %s apart: %s", ", ".join(names), reason)
            continue
        for layer in found:
            layer.group = group
        fused.append(names)
    return fused


def checked_groups(fuse: bool | Iterable[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Returns the groups that a ``fuse`` argument asks for: the default ones for True.

    Raises:
        ValueError: if a group is not two or more different names without dots.
    """
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
    """Returns, as dotted names, the groups whose names all exist under one parent."""
    existing = dict.fromkeys(names)
    found = []
    for group in groups:
        for name in existing:
            parent, dot, last = name.rpartition(".")
            dotted = tuple(f"{parent}{dot}{other}" for other in group)
            if last == group[0] and all(other in existing for other in dotted):
                found.append(dotted)
    return found


class Group:
    """Layers that are computed as one product while their weights allow it.

    Attributes:
        layers: all of them.
        separate: indices of the layers that have their own layout; their biases may be on
            another device than the product of the others.
    """

    def __init__(self, layers: Sequence[QuantisedLinear]) -> None:
        self.layers = tuple(layers)  # a tuple, so that no module registers them as its own
        self.separate: tuple[int, ...] = ()

    def reason_apart(self) -> str | None:
        """Returns the reason why the layers cannot be one product, or None."""
        first, *others = self.layers
        if any(tensor_parallel.is_sharded(layer) for layer in self.layers):
            return "weights are sharded"
        if any(layer.input_permutation is not None for layer in self.layers):
            return "inputs are permuted"
        if len({_kind(layer) for layer in self.layers}) > 1:
            return "formats, inputs, dtypes or devices differ"
        codebook = first.quantised.codebook
        if codebook is not None:
            if codebook.device.type == "meta":
                return "codebooks on meta cannot be compared"
            tables = [layer.quantised.codebook for layer in others]
            if not all(torch.equal(codebook, table) for table in tables if table is not None):
                return "codebooks differ"
        return None

    def join(self, dtype: torch.dtype) -> None:
        """Packs the weights as one for x of a dtype, unless they stay separate."""
        stored = [layer.stored for layer in self.layers]
        self.separate = tuple(
            i for i, weight in enumerate(stored) if not isinstance(weight.layout, FusedRows)
        )
        if self.reason_apart():
            return
        first = self.layers[0]
        quantised = [weight.quantised() for weight in stored]
        try:
            layout, name = pack_with(
                first.backend, concatenated(quantised), dtype, first.activations
            )
        except (NoBackendError, ValueError) as error:
            logger.info("left layers of one input apart: %s", error)
            return
        product = Product(cast("Layout", layout), self)
        for index, weight in enumerate(stored):
            weight.hold_in(FusedRows(product, index), name)
        self.separate = ()


def _kind(layer: QuantisedLinear) -> tuple[object, ...]:
    """Returns what layers must have in common to be fused."""
    return (
        layer.format,
        layer.in_features,
        layer.dtype,
        layer.device,
        layer.activations,
        layer.backend,
    )


def product_of(layers: Sequence[nn.Module]) -> "Product | None":
    """Returns the product of all rows of layers that are fused in this order, or None.

    Calling it is calling the layers without their hooks.
    """
    layouts = [layer.layout for layer in layers if type(layer) is QuantisedLinear]
    fused = [layout for layout in layouts if isinstance(layout, FusedRows)]
    if not fused or len(fused) < len(layers):
        return None
    product = fused[0].product
    if any(layout.product is not product for layout in fused):
        return None
    in_order = [layout.index for layout in fused] == list(range(len(product.spans)))
    return product if in_order else None


def unrotated_layouts(layers: Sequence[nn.Module], dtype: torch.dtype) -> list[Layout]:
    """Returns the layouts to call with an x of layers that is rotated once for all of them.

    Calling them is calling the layers without their hooks.

    Args:
        layers: layers of one input, with biases of its dtype or none.
        dtype: dtype of x.

    Returns:
        A layout for each layer; none where a layer does not rotate x, permutes or casts it, or is
        the only one.
    """
    if len(layers) < 2:
        return []
    found = []
    for layer in layers:
        if type(layer) is not QuantisedLinear or layer.format.rotation is None:
            return []
        layout, bias = layer.layout, layer.bias
        is_plain = layer.input_permutation is None and (bias is None or bias.dtype == dtype)
        if not is_plain or type(layout) is not RotatedLayout or dtype not in layout.dtypes:
            return []
        found.append(layout.layout)
    return found


def concatenated(weights: Sequence[QuantisedTensor]) -> QuantisedTensor:
    """Concatenates the rows of weights that have one format and codebook."""
    first = weights[0]
    tensors: dict[str, Any] = {
        name: torch.cat([q.tensors()[name] for q in weights])
        for name in first.tensors()
        if name != "codebook"
    }
    return replace(first, shape=(sum(q.shape[0] for q in weights), first.shape[1]), **tensors)


def rows_of(q: QuantisedTensor, start: int, stop: int) -> QuantisedTensor:
    """Copies rows ``start`` to ``stop`` of a weight to a separate weight."""
    tensors: dict[str, Any] = {
        name: tensor.clone() if name == "codebook" else tensor[start:stop].clone()
        for name, tensor in q.tensors().items()
    }
    return replace(q, shape=(stop - start, q.shape[1]), **tensors)


class LastProduct:
    """The last product, and the layers that have not fetched their rows. Copies are empty."""

    def __init__(self) -> None:
        # x, its version, whether gradients were recorded, y by layer, indices of the remaining ones
        self.value: tuple[Tensor, object, bool, Sequence[Tensor], tuple[int, ...]] | None = None

    def __reduce__(self) -> tuple[type["LastProduct"], tuple[()]]:
        return LastProduct, ()


class Product(nn.Module):
    """A layout of the rows of several layers.

    Args:
        layout: the layout of all rows.
        group: the layers, for their biases.
    """

    def __init__(self, layout: Layout, group: Group) -> None:
        super().__init__()
        self.layout, self._group, self._last = layout, group, LastProduct()
        ends = accumulate((layer.out_features for layer in group.layers), initial=0)
        self.spans = tuple(pairwise(ends))
        self.sizes = [stop - start for start, stop in self.spans]

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs of all layers for ``x :: [..., k]``, concatenated, with biases."""
        return self._of_all(x, self._bias())

    def rows(self, x: Tensor, index: int, bias: Tensor | None) -> Tensor:
        """Returns the output of layer ``index`` for ``x :: [..., k]``, bias included."""
        if bias is not self._group.layers[index].bias:  # another module calls the weight
            start, stop = self.spans[index]
            padded = None if bias is None else pad(bias, (start, self.spans[-1][1] - stop))
            return self._of_all(x, padded)[..., start:stop]
        version, grad = in_place_version(x), torch.is_grad_enabled()
        last = self._last.value  # read once: another thread may replace it
        if (
            last is not None
            and last[0] is x
            and last[1] == version
            and last[2] == grad
            and index in last[4]
        ):
            ys, remaining = last[3], last[4]
        else:
            y, remaining = self._of_all(x, self._bias()), tuple(range(len(self.spans)))
            # Views would share a version: work in place on one would spoil what autograd saved of
            # another.
            ys = torch.unsafe_split_with_sizes(y, self.sizes, -1)
        remaining = tuple(other for other in remaining if other != index)
        self._last.value = (x, version, grad, ys, remaining) if remaining else None
        return ys[index]

    def _of_all(self, x: Tensor, bias: Tensor | None) -> Tensor:
        dtype = compute_dtype(x)
        if bias is not None:
            bias = bias.to(dtype)
        y: Tensor = self.layout(x.to(dtype), bias)
        return y

    def _bias(self) -> Tensor | None:
        """Concatenates the biases: zeros for layers without one or separate; None without any."""
        layers, separate = self._group.layers, self._group.separate
        biases = [None if i in separate else layer.bias for i, layer in enumerate(layers)]
        given = [bias for bias in biases if bias is not None]
        if not given:
            return None
        pairs = zip(biases, self.sizes, strict=True)
        return torch.cat([given[0].new_zeros(n) if bias is None else bias for bias, n in pairs])

    def extra_repr(self) -> str:
        """Shows the rows of each layer."""
        return f"rows={[list(span) for span in self.spans]}"


class FusedRows(Layout):
    """The rows of one layer in a shared product."""

    casts = True

    def __init__(self, product: Product, index: int) -> None:
        super().__init__()
        self.product, self.index, self.dtypes = product, index, product.layout.dtypes

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See ``Layout``."""
        return self.product.rows(x, self.index, bias)

    def unpack(self) -> QuantisedTensor:
        """See ``Layout``."""
        layout: Any = self.product.layout
        return rows_of(layout.unpack(), *self.product.spans[self.index])
