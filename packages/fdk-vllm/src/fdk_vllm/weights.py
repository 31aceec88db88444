"""Loading of one vLLM layer: collects its tensors, converts or quantises, cuts, and packs.

A layer is complete when its last tensor has come. It is packed at once, so that a checkpoint never
needs more memory than the packed model and one layer, whatever its own size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fdk_formats.format import Format
from fdk_formats.quantise import quantise
from fdk_formats.readers.gptq import INPUT_PERMUTATION
from fdk_formats.tensor import QuantisedTensor
from fdk_vllm.cut import Part, copied, rows
from fdk_vllm.importers import parameter_name
from fdk_vllm.product import Product, Weight

# Rows of a made-up weight that differ; the others repeat them.
DUMMY_ROWS = 64
DUMMY_DEVIATION = 0.02

Converter = Callable[[Mapping[str, Tensor]], Weight]


@dataclass(frozen=True)
class Source:
    """A weight of the checkpoint that a layer is made from.

    Attributes:
        name: dotted name of its layer in the checkpoint.
        tensors: dtypes of its tensors, by name below the layer.
        format: its format, or None if only its tensors tell.
        convert: makes the weight from the tensors; None for a 16-bit ``weight``, which is
            quantised.
    """

    name: str
    tensors: Mapping[str, torch.dtype]
    format: Format | None
    convert: Converter | None

    @property
    def is_packed(self) -> bool:
        """True where the checkpoint holds the weight in a format of fdk."""
        return self.format is not None and self.convert is not None


@dataclass(frozen=True)
class Plan:
    """How to make a layer from a checkpoint.

    Attributes:
        sources: the weights: one for each that vLLM merges, or a single one that is stored merged.
        activations: ``float`` or ``int8``.
        backend: ``auto`` or a backend's name.
        fuse: whether 16-bit sources of one k-means format get one codebook.
    """

    sources: tuple[Source, ...]
    activations: str = "float"
    backend: str = "auto"
    fuse: bool = True


class TensorsBelow(nn.Module):
    """The module ``weight``, which holds the parameters of ``weight.packed`` and so on."""

    @property
    def device(self) -> torch.device:
        """The device of the layer, where vLLM puts adapters."""
        return next(self.parameters()).device


@dataclass
class LayerWeights:
    """The weights of one layer of vLLM on their way from the checkpoint to a product.

    Attributes:
        name: name of the layer, for messages.
        plan: how to make it.
        parts: for each weight that vLLM merges, its part of this process.
        input_size: k of this process.
        dtype: dtype of x.
        device: where to put the weights.
        product: the packed weights, once they have come.
        canonical: the weight in canonical form, if ``keeps_canonical``.
        keeps_canonical: whether rows of the weight are looked up, as in an embedding.
        multiplies: whether the weight is multiplied with.
    """

    name: str
    plan: Plan
    parts: Sequence[Part]
    input_size: int
    dtype: torch.dtype
    device: torch.device
    keeps_canonical: bool = False
    multiplies: bool = True
    product: Product | None = None
    canonical: QuantisedTensor | None = None
    _arrived: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def add_parameters(self, layer: nn.Module) -> None:
        """Adds a parameter for each tensor of the checkpoint, with this loader.

        A parameter has one element for each source, which marks its tensor as arrived: vLLM's
        reload of weights counts the elements that loaders write, to know when a layer is complete.
        """
        for tensor_name, dtype in self._tensors().items():
            path, _, last = parameter_name(tensor_name).rpartition(".")
            if path and path not in layer._modules:
                layer.add_module(path, TensorsBelow())
            owner = layer.get_submodule(path) if path else layer
            parameter = nn.Parameter(
                torch.zeros(len(self.plan.sources), dtype=dtype, device=self.device),
                requires_grad=False,
            )
            parameter.weight_loader = self._loader(tensor_name)  # type: ignore[attr-defined]
            owner.register_parameter(last, parameter)

    def _tensors(self) -> dict[str, torch.dtype]:
        return {
            name: dtype
            for source in reversed(self.plan.sources)
            for name, dtype in source.tensors.items()
        }

    def _loader(self, tensor_name: str) -> Callable[..., None]:
        # vLLM's reload wraps loaders and looks for an argument `param`.
        def load(param: nn.Parameter, loaded_weight: Tensor, shard_id: Any = None) -> None:
            index = self.add(tensor_name, loaded_weight, shard_id)
            param.data.narrow(0, index, 1).copy_(torch.ones(1))

        return load

    def add(self, tensor_name: str, tensor: Tensor, shard_id: Any = None) -> int:
        """Takes a tensor of the checkpoint; packs the layer if it was the last one.

        Args:
            tensor_name: its name below the layer.
            tensor: the whole tensor.
            shard_id: which of the merged weights it belongs to: ``q``, ``k``, ``v``, an index, or
                None where the checkpoint stores them merged.

        Returns:
            The index of the source.
        """
        index = {"q": 0, "k": 1, "v": 2}.get(shard_id, shard_id)
        index = index if isinstance(index, int) and len(self.plan.sources) > 1 else 0
        self._arrived.setdefault(index, {})[tensor_name] = tensor
        if not self._missing():
            self._finish()
        return index

    def _missing(self) -> list[str]:
        return [
            f"{source.name}.{name}"
            for index, source in enumerate(self.plan.sources)
            for name in source.tensors
            if name not in self._arrived.get(index, {})
        ]

    def _finish(self) -> None:
        arrived, self._arrived = self._arrived, {}
        try:
            weights = self._weights([arrived[i] for i in range(len(self.plan.sources))])
            self.hold(weights)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.name}: {error}") from error

    def _weights(self, arrived: Sequence[Mapping[str, Tensor]]) -> list[Weight]:
        """Returns the part of this process of each merged weight."""
        whole: list[Weight] = []
        for source, tensors in zip(self.plan.sources, arrived, strict=True):
            if source.convert is not None:
                whole.append(source.convert(tensors))
        if not whole:
            whole = self._quantised([tensors["weight"] for tensors in arrived])
        sources = self.plan.sources
        if len(whole) == 1 and len(self.parts) > 1:
            whole, sources = whole * len(self.parts), sources * len(self.parts)
        parts = [self._cut(weight, part) for weight, part in zip(whole, self.parts, strict=True)]
        # On the device, which is quicker.
        for source, part in zip(sources, parts, strict=True):
            if source.is_packed:
                part.q.check_values(source.name)
        return parts

    def _quantised(self, weights: Sequence[Tensor]) -> list[Weight]:
        """Quantises whole weights on this process's device: every process gets the same."""
        formats: list[Any] = [source.format for source in self.plan.sources]
        on_device = [weight.to(self.device) for weight in weights]
        if self._shares_codebook():
            joint = quantise(torch.cat(on_device), formats[0])
            spans = pairwise(accumulate((len(weight) for weight in weights), initial=0))
            return [Weight(rows(joint, *span)) for span in spans]
        pairs = zip(on_device, formats, strict=True)
        return [Weight(quantise(weight, format)) for weight, format in pairs]

    def _shares_codebook(self) -> bool:
        formats = {source.format for source in self.plan.sources}
        fitted = [format for format in formats if format is not None and format.is_fitted]
        return self.plan.fuse and len(formats) == len(fitted) == 1

    def _cut(self, weight: Weight, part: Part) -> Weight:
        permutation = weight.permutation
        if permutation is not None and part.ranks > 1:
            raise ValueError(
                "a weight with permuted inputs (act-order) cannot be cut along k: serve with "
                "--tensor-parallel-size 1"
            )
        q = weight.q
        if q.shape[1] != self.input_size * part.ranks or q.shape[0] < part.stop:
            wanted = [part.stop, self.input_size * part.ranks]
            raise ValueError(f"wanted a weight of at least {wanted}, got {list(q.shape)}")
        moved = copied(part.of(q), self.device)
        return Weight(moved, None if permutation is None else permutation.to(self.device))

    def hold(self, weights: Sequence[Weight]) -> None:
        """Packs weights; where there were some already, at the same addresses."""
        settings = self.dtype, self.plan.backend, self.plan.activations
        if self.keeps_canonical:
            (weight,) = weights
            if self.canonical is None:
                self.canonical = weight.q
            else:
                for name, tensor in self.canonical.tensors().items():
                    tensor.copy_(weight.q.tensors()[name])
        if self.multiplies:
            product = Product(weights, *settings)
            if self.product is None:
                self.product = product
            else:
                self.product.copy_from(product)

    @property
    def is_ready(self) -> bool:
        """Whether the weights have come."""
        return (self.product is not None or not self.multiplies) and (
            self.canonical is not None or not self.keeps_canonical
        )

    def finish(self, is_dummy: bool) -> None:
        """Checks that the layer is complete, or makes up its weights.

        Raises:
            ValueError: if tensors have not come, naming them.
        """
        if self.is_ready:
            return
        if not is_dummy:
            raise ValueError(f"{self.name}: the checkpoint has no {', '.join(self._missing())}")
        made = [self._made_up(i, part) for i, part in enumerate(self.parts)]
        if self._shares_codebook():  # as many products as of weights that were quantised
            made = [Weight(replace(each.q, codebook=made[0].q.codebook)) for each in made]
        self.hold(made)

    def _made_up(self, index: int, part: Part) -> Weight:
        source = self.plan.sources[index if len(self.plan.sources) > 1 else 0]
        if source.format is None:
            raise ValueError(f"{self.name}: imported weights cannot be made up (load_format dummy)")
        random = torch.randn(DUMMY_ROWS, self.input_size, device=self.device) * DUMMY_DEVIATION
        q = quantise(random, source.format)
        order = torch.arange(part.n, device=self.device) % DUMMY_ROWS
        tensors: dict[str, Any] = {
            name: tensor if name == "codebook" else tensor[order]
            for name, tensor in q.tensors().items()
        }
        return Weight(QuantisedTensor(q.format, (part.n, self.input_size), **tensors))


def packed_source(
    name: str, tensors: Mapping[str, torch.dtype], format: Format, shape: tuple[int, int]
) -> Source:
    """Returns the source of a weight that ``fdk_formats.save_model`` stored."""
    permutation = {INPUT_PERMUTATION} & set(tensors)
    wanted = [f"weight.{field}" for field in format.tensor_names] + sorted(permutation)
    if missing := [f"{name}.{each}" for each in wanted if each not in tensors]:
        raise ValueError(f"{name}: the checkpoint has no {', '.join(missing)}")

    def convert(arrived: Mapping[str, Tensor]) -> Weight:
        fields: dict[str, Any] = {each: arrived[f"weight.{each}"] for each in format.tensor_names}
        q = QuantisedTensor(format, shape, **fields)
        return Weight(q, arrived.get(INPUT_PERMUTATION))

    return Source(name, {each: tensors[each] for each in wanted}, format, convert)


def imported_source(
    name: str, tensors: Mapping[str, torch.dtype], read: Callable[..., Mapping[str, Any]]
) -> Source:
    """Returns the source of a weight of another project."""

    def convert(arrived: Mapping[str, Tensor]) -> Weight:
        try:
            found = read(arrived)
        except KeyError as error:
            raise ValueError(f"needs the tensor {name}.{error.args[0]}: missing") from error
        return Weight(found["weight"], found.get(INPUT_PERMUTATION))

    return Source(name, tensors, None, convert)


def unquantised_source(name: str, dtype: torch.dtype, format: Format) -> Source:
    """Returns the source of a 16-bit weight, which is quantised while loading."""
    return Source(name, {"weight": dtype}, format, None)
