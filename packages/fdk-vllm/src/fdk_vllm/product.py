"""Products of the weights that vLLM merges into one layer: q, k and v, or gate and up."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from fdk_formats.fuse import concatenated
from fdk_formats.stored_weight import pack_with
from fdk_formats.tensor import QuantisedTensor


@dataclass(frozen=True)
class Weight:
    """A weight, and the order of its inputs.

    Attributes:
        q: the weight.
        permutation: int32 ``[k]`` or None: column j is that of input ``permutation[j]``.
    """

    q: QuantisedTensor
    permutation: Tensor | None = None

    def joins(self, other: "Weight") -> bool:
        """Returns whether one product computes both: they differ in rows only."""
        if self.q.format != other.q.format or self.q.shape[1] != other.q.shape[1]:
            return False
        pairs = (self.q.codebook, other.q.codebook), (self.permutation, other.permutation)
        return all(
            (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b))
            for a, b in pairs
        )


class Product:
    """``x @ W_hat.T + bias`` of weights with one input, as few kernels as their codebooks allow.

    Neighbours of one format, codebook and order of inputs are one product. It is no module:
    vLLM's reload of weights would take its buffers for parameters of a checkpoint.

    Args:
        weights: the weights, in the order of their rows.
        dtype: dtype of x.
        backend: ``auto`` or a backend's name.
        activations: ``float`` or ``int8``.

    Raises:
        NoBackendError: if no backend supports a weight.
    """

    def __init__(
        self, weights: Sequence[Weight], dtype: torch.dtype, backend: str, activations: str
    ) -> None:
        groups: list[list[Weight]] = []
        for weight in weights:
            if groups and groups[-1][0].joins(weight):
                groups[-1].append(weight)
            else:
                groups.append([weight])
        self.layouts: list[Any] = []
        self.backends: list[str] = []
        self.permutations = [group[0].permutation for group in groups]
        ends = accumulate((sum(w.q.shape[0] for w in group) for group in groups), initial=0)
        self.spans = tuple(pairwise(ends))
        for group in groups:
            q = concatenated([weight.q for weight in group]) if len(group) > 1 else group[0].q
            layout, name = pack_with(backend, q, dtype, activations)
            self.layouts.append(layout)
            self.backends.append(name)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns ``[..., n]`` for ``x :: [..., k]``."""
        if len(self.layouts) == 1:
            return self._part(0, x, bias)
        return torch.cat(
            [
                self._part(i, x, None if bias is None else bias[start:stop])
                for i, (start, stop) in enumerate(self.spans)
            ],
            -1,
        )

    def _part(self, index: int, x: Tensor, bias: Tensor | None) -> Tensor:
        permutation = self.permutations[index]
        if permutation is not None:
            x = x.index_select(-1, permutation)
        y: Tensor = self.layouts[index](x, bias)
        return y

    def buffers(self) -> dict[str, Tensor]:
        """Returns the tensors that kernels read, by name."""
        return {
            f"{i}.{name}": buffer
            for i, layout in enumerate(self.layouts)
            for name, buffer in layout.named_buffers()
        } | {
            f"{i}.permutation": permutation
            for i, permutation in enumerate(self.permutations)
            if permutation is not None
        }

    def copy_from(self, other: "Product") -> None:
        """Replaces the values by those of another product, at the same addresses.

        CUDA graphs hold the addresses of the weights that they were captured with.

        Raises:
            ValueError: if the other product has other tensors or other settings.
        """
        own, new = self.buffers(), other.buffers()
        same = self.spans == other.spans and self.backends == other.backends
        if not same or _kinds(own) != _kinds(new) or self._constants() != other._constants():
            raise ValueError(
                "fdk: reloaded weights need other kernels than those in use, which CUDA graphs "
                "hold: wanted the same formats, and one codebook where there was one. Restart "
                "the server"
            )
        for name, buffer in own.items():
            buffer.copy_(new[name])

    def _constants(self) -> list[dict[str, object]]:
        plain = (bool, int, float, str, tuple)
        return [
            {name: value for name, value in vars(layout).items() if isinstance(value, plain)}
            for layout in self.layouts
        ]


def _kinds(buffers: dict[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in buffers.items()}
