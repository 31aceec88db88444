"""QuantisedEmbedding: an embedding whose table is stored in 1 to 8 bits."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.library import Library

from fdk_formats.format import Format
from fdk_formats.instance_attributes import check_forward
from fdk_formats.ops import define_op
from fdk_formats.quantise import quantise
from fdk_formats.quantised_module import QuantisedModule
from fdk_formats.reference import ReferenceLayout
from fdk_formats.stored_weight import StoredWeight, zero_weight
from fdk_formats.tensor import QuantisedTensor
from fdk_formats.torch_internals import constant_in_graphs, without_dispatch_modes


def _rows(ids: Tensor, packed: Tensor, scale: Tensor, *args: Any) -> Tensor:
    codebook, zero_point, format, k, dtype = args
    flat = ids.reshape(-1)
    q = QuantisedTensor(
        Format.parse(format),
        (flat.numel(), k),
        packed.index_select(0, flat),
        scale.index_select(0, flat),
        codebook,
        None if zero_point is None else zero_point.index_select(0, flat),
    )
    return q.dequantise(dtype).view(*ids.shape, k)


def _fake_rows(ids: Tensor, packed: Tensor, scale: Tensor, *args: Any) -> Tensor:
    *_, k, dtype = args
    return packed.new_empty((*ids.shape, k), dtype=dtype)


_library = Library("fdk_formats", "FRAGMENT")
# ids :: [...], result :: [..., k, dtype]
dequantised_rows = define_op(
    _library,
    "dequantised_rows(Tensor ids, Tensor packed, Tensor scale, Tensor? codebook, "
    "Tensor? zero_point, str format, int k, ScalarType dtype) -> Tensor",
    run=_rows,
    fake=_fake_rows,
)


class QuantisedEmbedding(QuantisedModule, nn.Embedding):
    """An embedding ``[n, k]`` whose table is stored in 1 to 8 bits; its rows are dequantised.

    It works in place of ``nn.Embedding``; the table is constant. The canonical tensors are used
    as they are.

    Args:
        num_embeddings: n.
        embedding_dim: k.
        padding_idx: as for ``nn.Embedding``.
        device: device of the table, which is zero until it is loaded.
        dtype: dtype of the result; torch's default if None.
        format: format of the table, for example ``"int8-g64"``.

    Raises:
        ValueError: if k does not fit the format.

    Example:
        >>> embedding = QuantisedEmbedding.from_embedding(nn.Embedding(1000, 64), "int8-g64")
        >>> x = embedding(torch.tensor([1, 2, 3]))
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        format: Format | str,
    ) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = padding_idx, None, 2.0
        self.scale_grad_by_freq = self.sparse = False
        self.backend_name = "reference"
        zero = zero_weight(Format.parse(format), (num_embeddings, embedding_dim), device)
        self._init_weight(StoredWeight(zero), torch.get_default_dtype() if dtype is None else dtype)

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, format: Format | str, *, importance: Tensor | None = None
    ) -> "QuantisedEmbedding":
        """Quantises a copy of an embedding.

        Args:
            embedding: the embedding, left untouched.
            format: format of the table.
            importance: ``[k]`` or ``[n, k]``, see ``quantise``.

        Raises:
            ValueError: see ``quantise``; if the embedding renormalises its rows (``max_norm``), or
                has another ``forward`` than ``nn.Embedding``.
            TypeError: if ``embedding`` is not an ``nn.Embedding``.
        """
        if not isinstance(embedding, nn.Embedding):
            got = type(embedding).__name__
            raise TypeError(f"QuantisedEmbedding: wanted a torch.nn.Embedding, got {got}")
        check_forward("QuantisedEmbedding.from_embedding", embedding, nn.Embedding)
        if embedding.max_norm is not None:
            raise ValueError("QuantisedEmbedding: max_norm changes the table at each call")
        q = quantise(embedding.weight.detach(), format, importance)
        return cls.from_quantised(q, embedding.padding_idx, dtype=embedding.weight.dtype)

    @classmethod
    def from_quantised(
        cls,
        q: QuantisedTensor,
        padding_idx: int | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> "QuantisedEmbedding":
        """Makes an embedding from a quantised table, whose tensors it holds themselves.

        Raises:
            ValueError: if a value is out of range, see ``QuantisedTensor.check_values``.
        """
        q.check_values(cls.__name__)
        made = cls(*q.shape, padding_idx, "meta", dtype, format=q.format)
        made._set_stored(StoredWeight(q))
        return made

    @property
    def weight_shape(self) -> tuple[int, int]:
        """``(n, k)``."""
        return self.num_embeddings, self.embedding_dim

    def _set_shape(self, *shape: int) -> None:
        self.num_embeddings, self.embedding_dim = shape

    def forward(self, input: Tensor) -> Tensor:
        """Returns the rows of the table.

        Args:
            input: ids, ``[...]``, integers.

        Returns:
            ``[..., k]`` in ``dtype``.

        Raises:
            TypeError: if ``input`` is not a tensor of int32 or int64.
            IndexError: if an id is not in the table (on a CPU).
        """
        if not isinstance(input, Tensor) or input.dtype not in (torch.int32, torch.int64):
            got = input.dtype if isinstance(input, Tensor) else type(input).__name__
            raise TypeError(
                f"QuantisedEmbedding: ids must be a tensor of int32 or int64, got {got}"
            )
        tensors = self._canonical()
        rows: Tensor = dequantised_rows(
            input, *tensors, str(self.format), self.embedding_dim, self.dtype
        )
        return rows

    def _canonical(self) -> tuple[Tensor | None, ...]:
        """Returns the tensors: in a graph those that it was traced with."""
        if torch.compiler.is_compiling():
            self._hold_for_graph()
            layout = self._layout_in_graph()
        else:
            layout = self._hold()
        return layout.packed, layout.scale, layout.codebook, layout.zero_point

    def _hold(self) -> ReferenceLayout:
        """Returns the canonical tensors as a layout, whose attributes a graph can read."""
        stored = self.stored
        if not isinstance(stored.layout, ReferenceLayout):
            stored.hold_in(ReferenceLayout(stored.quantised()), "reference")
        return stored.layout  # type: ignore[return-value]

    @constant_in_graphs
    def _hold_for_graph(self) -> bool:
        with without_dispatch_modes():
            self._hold()
        return True

    def _dequantised_in_graph(self) -> Tensor:
        self._hold_for_graph()
        layout = self._layout_in_graph()
        weight: Tensor = self(torch.arange(self.num_embeddings, device=layout.packed.device))
        return weight

    def extra_repr(self) -> str:
        """Shows the sizes as nn.Embedding does, and the format."""
        return f"{super().extra_repr()}, {self.format}"
