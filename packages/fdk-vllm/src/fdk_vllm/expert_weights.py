"""Loading of the experts of one layer: collects tensors, converts or quantises, cuts, and packs.

vLLM calls the projections of an expert w1 (gate), w3 (up) and w2 (down), and w1 and w3 of all
experts w13. A checkpoint stores them packed as stacks of all experts, packed one by one, or in 16
bits, to be quantised one by one as they arrive.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fdk_formats.format import Format
from fdk_formats.fuse import concatenated
from fdk_formats.quantise import quantise
from fdk_formats.tensor import QuantisedStack, QuantisedTensor
from fdk_vllm.cut import ExpertPart, rows
from fdk_vllm.gates import Gate
from fdk_vllm.product import ExpertProduct, Weight
from fdk_vllm.weights import DUMMY_DEVIATION, DUMMY_ROWS

SHARDS = {"w13": ("w1", "w3"), "w2": ("w2",)}


@dataclass(frozen=True)
class ExpertSource:
    """A projection of experts in a checkpoint.

    Attributes:
        format: its format, or the one to quantise it in.
        tensors: dtypes of its tensors by name: those of the format, or ``weight`` in 16 bits.
        shape: ``(experts, n, k)`` of a stack, ``(n, k)`` of one expert; None in 16 bits.
    """

    format: Format
    tensors: Mapping[str, torch.dtype]
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ExpertPlan:
    """How to make the experts of a layer from a checkpoint.

    Attributes:
        sources: by projection: ``w13`` and ``w2`` if they are stacks, else ``w1``, ``w3`` (unless
            the experts have no gates) and ``w2``.
        backend: ``auto`` or a backend's name.
    """

    sources: Mapping[str, ExpertSource]
    backend: str = "auto"

    @property
    def is_stacked(self) -> bool:
        """True if the checkpoint holds stacks."""
        return "w13" in self.sources

    @property
    def is_quantised_here(self) -> bool:
        """True if the checkpoint holds 16 bits."""
        return self.sources["w2"].shape is None

    def of(self, projection: str) -> dict[str, ExpertSource]:
        """Returns the sources of ``w13`` or ``w2`` by shard."""
        names = (projection,) if self.is_stacked else SHARDS[projection]
        return {name: self.sources[name] for name in names if name in self.sources}


@dataclass
class ExpertWeights:
    """The experts of one layer of vLLM on their way from the checkpoint to a product.

    Attributes:
        name: name of the layer, for messages.
        plan: how to make them.
        part: the part of this process.
        gate: what is computed between the projections.
        hidden: inputs of the first projection and outputs of the second.
        inner: inputs of the second projection, of this process.
        dtype: dtype of x.
        device: where to put the weights.
        product: the packed weights, once they have come.
    """

    name: str
    plan: ExpertPlan
    part: ExpertPart
    gate: Gate
    hidden: int
    inner: int
    dtype: torch.dtype
    device: torch.device
    product: ExpertProduct | None = None
    # Tensors by shard and expert, None for stacks.
    _arrived: dict[tuple[str, int | None], dict[str, Tensor]] = field(default_factory=dict)
    # Weights made from these tensors, by projection and expert.
    _made: dict[str, dict[int | None, Any]] = field(default_factory=dict)

    def add_parameters(self, layer: nn.Module) -> None:
        """Adds parameters such as ``w13_packed`` or ``w2_weight``, with this loader.

        A parameter has one element for each tensor of the checkpoint, which marks it as arrived:
        see ``LayerWeights.add_parameters``.
        """
        for projection in SHARDS:
            sources = self.plan.of(projection)
            count = 1 if self.plan.is_stacked else len(self.part.experts) * len(sources)
            names = {name: kind for each in sources.values() for name, kind in each.tensors.items()}
            for name, dtype in names.items():
                zeros = torch.zeros(count, dtype=dtype, device=self.device)
                parameter = nn.Parameter(zeros, requires_grad=False)
                loader = self._loader(projection, name)
                parameter.weight_loader = loader  # type: ignore[attr-defined]
                layer.register_parameter(f"{projection}_{name}", parameter)

    def _loader(self, projection: str, tensor_name: str) -> Callable[..., bool | None]:
        # The signature of vLLM's loaders of experts, whose reload looks for an argument `param`.
        def load(
            param: nn.Parameter,
            loaded_weight: Tensor,
            weight_name: str = "",
            shard_id: str | None = None,
            expert_id: int | None = None,
            return_success: bool = False,
        ) -> bool | None:
            index = self.add(projection, tensor_name, loaded_weight, shard_id, expert_id)
            if index is not None:
                param.data.narrow(0, index, 1).copy_(torch.ones(1))
            return index is not None if return_success else None

        return load

    def add(
        self,
        projection: str,
        tensor_name: str,
        tensor: Tensor,
        shard: str | None = None,
        expert: int | None = None,
    ) -> int | None:
        """Takes a tensor of the checkpoint; packs the experts if it was the last one.

        Args:
            projection: ``w13`` or ``w2``.
            tensor_name: name of the tensor in its source.
            tensor: the whole tensor.
            shard: ``w1``, ``w2`` or ``w3``; None for a stack.
            expert: the expert, as the model numbers them; None for a stack.

        Returns:
            Its number among the tensors of this name, or None for an expert of another process.
        """
        local: int | None = None
        if expert is not None:
            if expert not in self.part.experts:
                return None
            local = self.part.experts.index(expert)
        sources = self.plan.of(projection)
        own = shard if shard is not None and not self.plan.is_stacked else projection
        self._arrived.setdefault((own, local), {})[tensor_name] = tensor
        if not self._missing(projection, local):
            self._convert(projection, local)
        return 0 if local is None else local * len(sources) + list(sources).index(own)

    def _missing(self, projection: str, local: int | None) -> list[str]:
        return [
            f"{shard} {name}"
            for shard, source in self.plan.of(projection).items()
            for name in source.tensors
            if name not in self._arrived.get((shard, local), {})
        ]

    def _convert(self, projection: str, local: int | None) -> None:
        """Makes the weights of a stack or of one expert, cut; and the product if all are there."""
        sources = self.plan.of(projection)
        arrived = {shard: self._arrived.pop((shard, local)) for shard in sources}
        try:
            made = self._weights(projection, sources, arrived)
            self._made.setdefault(projection, {})[local] = made
            count = 1 if self.plan.is_stacked else len(self.part.experts)
            if [len(self._made.get(each, {})) for each in SHARDS] == [count] * len(SHARDS):
                self._finish()
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.name}: {error}") from error

    def _weights(
        self,
        projection: str,
        sources: Mapping[str, ExpertSource],
        arrived: Mapping[str, Mapping[str, Tensor]],
    ) -> list[Any]:
        """Returns this process's part of a stack, or of the weights of one expert."""
        whole: list[Any]
        if self.plan.is_quantised_here:
            weights = [arrived[shard]["weight"].to(self.device) for shard in sources]
            (wanted,) = {source.format for source in sources.values()}
            # Gates and what they multiply are one weight, as those of transformers are.
            whole = [quantise(torch.cat(weights), wanted)]
        else:
            kind: Any = QuantisedStack if self.plan.is_stacked else QuantisedTensor
            whole = [
                kind(source.format, source.shape, **arrived[shard])
                for shard, source in sources.items()
            ]
            if self.plan.is_stacked:
                whole = [self.part.chosen(stack) for stack in whole]
        full = self.inner * self.part.ranks
        is_merged = len(whole) == 1 and self.gate.order != "none"
        outputs = 2 * full if is_merged else full
        wanted_shape = (self.hidden, full) if projection == "w2" else (outputs, self.hidden)
        for q in whole:
            if q.shape[-2:] != wanted_shape:
                raise ValueError(
                    f"{projection}: wanted experts {list(wanted_shape)}, got {list(q.shape[-2:])}"
                )
        if projection == "w2":
            cut = [self.part.of_down(q) for q in whole]
        elif is_merged:
            cut = [self.part.of_first(q) for q in whole]
        else:
            start = self.part.rank * self.inner
            cut = [rows(q, start, start + self.inner) for q in whole]
        moved = [q.to(self.device) for q in cut]
        if not self.plan.is_quantised_here:
            for q in moved:
                q.check_values("experts")
        return moved

    def _finish(self) -> None:
        made, self._made = self._made, {}
        if self.plan.is_stacked:
            self.hold(made["w13"][None], made["w2"][None][0])
            return
        first, down = (
            [made[projection][i] for i in range(len(self.part.experts))] for projection in SHARDS
        )
        if len(first[0]) == 2 and all(Weight(gate).joins(Weight(up)) for gate, up in first):
            first = [[concatenated(pair)] for pair in first]
        stacks = [QuantisedStack.of(experts) for experts in zip(*first, strict=True)]
        self.hold(stacks, QuantisedStack.of([q for (q,) in down]))

    def hold(self, first: list[QuantisedStack], down: QuantisedStack) -> None:
        """Packs the experts; where there were some already, at the same addresses."""
        product = ExpertProduct(first, down, self.gate, self.dtype, self.plan.backend)
        if self.product is None:
            self.product = product
        else:
            self.product.copy_from(product)

    def finish(self, is_dummy: bool) -> None:
        """Checks that all experts have come, or makes up their weights.

        Raises:
            ValueError: if tensors have not come, naming some.
        """
        if self.product is not None:
            return
        if is_dummy:
            self.hold([self._made_up("w13")], self._made_up("w2"))
            return
        experts = (None,) if self.plan.is_stacked else range(len(self.part.experts))
        missing = [
            name if local is None else f"{name} of expert {self.part.experts[local]}"
            for projection in SHARDS
            for local in experts
            if local not in self._made.get(projection, {})
            for name in self._missing(projection, local)
        ]
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ValueError(f"{self.name}: the checkpoint has no {', '.join(missing[:5])}{more}")

    def _made_up(self, projection: str) -> QuantisedStack:
        halves = 1 if self.gate.order == "none" else 2
        n, k = (
            (halves * self.inner, self.hidden) if projection == "w13" else (self.hidden, self.inner)
        )
        format = next(iter(self.plan.of(projection).values())).format
        q = quantise(torch.randn(DUMMY_ROWS, k, device=self.device) * DUMMY_DEVIATION, format)
        order = torch.arange(n, device=self.device) % DUMMY_ROWS
        experts = len(self.part.experts)
        tensors: dict[str, Any] = {}
        for name, tensor in q.tensors().items():
            if name == "codebook":
                tensors[name] = tensor.repeat(experts if format.is_fitted else 1, 1)
            else:
                tensors[name] = tensor[order].repeat(experts, 1, 1)
        return QuantisedStack(q.format, (experts, n, k), **tensors)
