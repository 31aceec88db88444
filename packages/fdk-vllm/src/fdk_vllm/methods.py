"""Methods of linear layers, heads and embeddings, for vLLM and engines with its interface."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fdk_formats.embedding import dequantised_rows
from fdk_formats.tensor_parallel import check_cut
from fdk_vllm.cut import REMEDY, Part, part_of
from fdk_vllm.product import Weight
from fdk_vllm.weights import LayerWeights, Plan


class LinearMethod:
    """Loads and computes one linear layer, or several that vLLM merges.

    Args:
        plan: how to make its weights.
        name: name of the layer, for messages.

    Attributes:
        engine: what differs between engines: ``ranks_of`` and ``is_dummy_load``, see
            ``vllm_versions``.
    """

    engine: Any

    def __init__(self, plan: Plan, name: str) -> None:
        self.plan, self.name = plan, name
        self.weights: LayerWeights
        self._is_dummy = False

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """See ``LinearMethodBase`` of vLLM.

        Raises:
            ValueError: if the format does not fit the layer, or its part of one process.
        """
        rank, ranks = self.engine.ranks_of(layer)
        try:
            for source in self.plan.sources:
                if source.format is not None:
                    source.format.group_size_for(input_size)
                    across = input_size // input_size_per_partition
                    check_cut(source.format, input_size, across, REMEDY)
            parts = self._parts(
                layer, output_partition_sizes, (input_size_per_partition, input_size), rank, ranks
            )
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        self._make_weights(layer, parts, input_size_per_partition, params_dtype)

    def _make_weights(
        self, layer: nn.Module, parts: Sequence[Part], k: int, dtype: torch.dtype, **more: Any
    ) -> None:
        device = torch.empty(0).device  # vLLM builds models under its device
        self._is_dummy = self.engine.is_dummy_load()
        self.weights = LayerWeights(self.name, self.plan, parts, k, dtype, device, **more)
        self.weights.add_parameters(layer)

    def _parts(
        self,
        layer: Any,
        local: Sequence[int],
        inputs: tuple[int, int],
        rank: int,
        ranks: int,
    ) -> list[Part]:
        """Returns the part of this process of each weight that vLLM merges."""
        local_k, k = inputs
        full = full_sizes(layer, local)
        is_stored_merged = len(self.plan.sources) == 1
        parts, offset = [], 0
        for n, own in zip(full, local, strict=True):
            parts.append(part_of((n, k), (own, local_k), rank, ranks, offset))
            offset += n if is_stored_merged else 0
        return parts

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """See ``QuantizeMethodBase`` of vLLM.

        Raises:
            ValueError: if the checkpoint lacks a tensor of the layer.
        """
        self.weights.finish(self._is_dummy)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See ``LinearMethodBase`` of vLLM."""
        assert self.weights.product is not None
        return self.weights.product(x, bias)


class EmbeddingMethod(LinearMethod):
    """Loads an embedding or a head, cut along the vocabulary.

    Args:
        plan: how to make its weights.
        name: name of the layer, for messages.
        is_head: whether it computes logits; otherwise rows are looked up. A tied one does both.
    """

    def __init__(self, plan: Plan, name: str, is_head: bool) -> None:
        super().__init__(plan, name)
        self.is_head = is_head
        self._tied_to: Any = None

    def _make_weights(
        self, layer: nn.Module, parts: Sequence[Part], k: int, dtype: torch.dtype, **more: Any
    ) -> None:
        kept = {"keeps_canonical": not self.is_head, "multiplies": self.is_head}
        super()._make_weights(layer, parts, k, dtype, **kept)

    def _parts(
        self,
        layer: Any,
        local: Sequence[int],
        inputs: tuple[int, int],
        rank: int,
        ranks: int,
    ) -> list[Part]:
        indices, (n,) = layer.shard_indices, local
        if indices.num_added_elements:
            raise ValueError("a vocabulary extended by adapters is not supported")
        return [Part(indices.org_vocab_start_index, indices.org_vocab_end_index, n)]

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Ties a head to an embedding: one weight for both, or that of a 16-bit embedding."""
        for name in list(layer._parameters):
            if name != "bias":
                delattr(layer, name)
        if "weight" in layer._modules:
            del layer.weight
        layer.weight = embed_tokens.weight
        if isinstance(embed_tokens.quant_method, EmbeddingMethod):
            embed_tokens.quant_method.weights.multiplies = True
            layer.quant_method = embed_tokens.quant_method
        else:
            self._tied_to = embed_tokens
        return layer

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """See ``QuantizeMethodBase`` of vLLM."""
        if self._tied_to is not None and not self._is_dummy:
            self._quantise_tied()
        super().process_weights_after_loading(layer)

    def _quantise_tied(self) -> None:
        """Quantises the head from the 16-bit embedding that it is tied to."""
        weights = self.weights
        (part,), (source,) = weights.parts, self.plan.sources
        own = self._tied_to.weight.data[: part.stop - part.start]
        if (
            self.engine.ranks_of(self._tied_to)[1] > 1
            and source.format is not None
            and source.format.is_fitted
        ):
            raise ValueError(
                f"{self.name}: {source.format} fits a codebook to the whole head, and each process "
                "has a part of the 16-bit embedding that it is tied to: choose a format without "
                "k-means for it, such as int8-g64"
            )
        whole = weights._quantised([own])
        here = Part(0, len(own), part.n)
        weights.hold([Weight(here.of(weight.q)) for weight in whole])

    def embedding(self, layer: nn.Module, input_: Tensor) -> Tensor:
        """Looks up rows of the table, ``[..., k]`` for ids ``[...]``."""
        q = self.weights.canonical
        assert q is not None
        fields = q.packed, q.scale, q.codebook, q.zero_point
        found: Tensor = dequantised_rows(
            input_, *fields, str(q.format), q.shape[1], self.weights.dtype
        )
        return found


def full_sizes(layer: Any, local: Sequence[int]) -> list[int]:
    """Returns the rows of each merged weight in the checkpoint.

    ``output_sizes`` of a layer of queries, keys and values counts replicated heads more than once.
    """
    if hasattr(layer, "total_num_kv_heads") and len(local) == 3:
        heads = layer.total_num_heads, layer.total_num_kv_heads, layer.total_num_kv_heads
        sizes = layer.head_size, layer.head_size, getattr(layer, "v_head_size", layer.head_size)
        return [count * size for count, size in zip(heads, sizes, strict=True)]
    return list(getattr(layer, "output_sizes", [layer.output_size]))
