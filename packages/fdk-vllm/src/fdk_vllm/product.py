"""Products of the weights that vLLM computes as one layer: merged ones, and experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from fdk_formats.fuse import concatenated
from fdk_formats.rotation import rotate
from fdk_formats.stored_weight import pack_with
from fdk_formats.tensor import CanonicalWeight, QuantisedStack, QuantisedTensor
from fdk_vllm.gates import Gate


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


class PackedWeights:
    """Weights in the layouts of their backends.

    It is no module: vLLM's reload of weights would take its buffers for parameters of a checkpoint.

    Args:
        weights: the weights, or stacks of experts.
        dtype: dtype of x.
        backend: ``auto`` or a backend's name.
        activations: ``float`` or ``int8``.

    Raises:
        NoBackendError: if no backend supports a weight.
    """

    def __init__(
        self,
        weights: Sequence[CanonicalWeight],
        dtype: torch.dtype,
        backend: str,
        activations: str = "float",
    ) -> None:
        self.layouts: list[Any] = []
        self.backends: list[str] = []
        for weight in weights:
            layout, name = pack_with(backend, weight, dtype, activations)
            self.layouts.append(layout)
            self.backends.append(name)

    def buffers(self) -> dict[str, Tensor]:
        """Returns the tensors that kernels read, by name."""
        return {
            f"{i}.{name}": buffer
            for i, layout in enumerate(self.layouts)
            for name, buffer in layout.named_buffers()
        }

    def copy_from(self, other: "PackedWeights") -> None:
        """Replaces the values by those of other weights, at the same addresses.

        CUDA graphs hold the addresses of the weights that they were captured with.

        Raises:
            ValueError: if the others have other tensors or other settings.
        """
        own, new = self.buffers(), other.buffers()
        same = self.backends == other.backends and self._constants() == other._constants()
        if not same or _kinds(own) != _kinds(new):
            raise ValueError(
                "fdk: reloaded weights need other kernels than those in use, which CUDA graphs "
                "hold: wanted the same formats, and one codebook where there was one. Restart "
                "the server"
            )
        for name, buffer in own.items():
            buffer.copy_(new[name])

    def _constants(self) -> list[object]:
        plain = (bool, int, float, str, tuple)
        return [
            {name: value for name, value in vars(layout).items() if isinstance(value, plain)}
            for outer in self.layouts
            for layout in outer.modules()  # of a rotated format: the one that it wraps
        ]


class Product(PackedWeights):
    """``x @ W_hat.T + bias`` of weights with one input, as few kernels as their codebooks allow.

    Neighbours of one format, codebook and order of inputs are one product. Where several products
    rotate the same x, it is rotated once.

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
        self.permutations = [group[0].permutation for group in groups]
        ends = accumulate((sum(w.q.shape[0] for w in group) for group in groups), initial=0)
        self.spans = tuple(pairwise(ends))
        joined = [
            concatenated([weight.q for weight in group]) if len(group) > 1 else group[0].q
            for group in groups
        ]
        permuted = any(permutation is not None for permutation in self.permutations)
        self.rotates = not permuted and all(q.format.rotation is not None for q in joined)
        if self.rotates:
            joined = [q.unrotated for q in joined]
        super().__init__(joined, dtype, backend, activations)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns ``[..., n]`` for ``x :: [..., k]``."""
        if self.rotates:
            x = rotate(x)
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
        return super().buffers() | {
            f"{i}.permutation": permutation
            for i, permutation in enumerate(self.permutations)
            if permutation is not None
        }

    def _constants(self) -> list[object]:
        return [*super()._constants(), self.spans, self.rotates]


class ExpertProduct(PackedWeights):
    """The two projections of the experts that a process holds, with a gate between them.

    Args:
        first: the first projection: one stack, or one of gates and one of what they multiply, where
            they have not the same codebooks.
        down: the second projection.
        gate: what is computed between them.
        dtype: dtype of x.
        backend: ``auto`` or a backend's name.

    Raises:
        NoBackendError: if no backend supports a stack.
    """

    def __init__(
        self,
        first: Sequence[QuantisedStack],
        down: QuantisedStack,
        gate: Gate,
        dtype: torch.dtype,
        backend: str,
    ) -> None:
        super().__init__([*first, down], dtype, backend)
        self.gate = gate

    def __call__(
        self,
        x: Tensor,
        expert_ids: Tensor,
        routing_weights: Tensor,
        bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor:
        """Computes the weighted sum of each token's experts.

        Args:
            x: ``[t, k]``.
            expert_ids: ``[t, top_k]``; -1 for experts of other processes.
            routing_weights: ``[t, top_k]``, floating.
            bias: of the first projection, ``[experts, outputs]`` or None.
            down_bias: of the second one.

        Returns:
            ``[t, n]``.
        """
        *first, down = self.layouts
        y: Tensor
        if len(first) == 1 and self.gate.function is None:
            y = first[0].mlp(down, x, expert_ids, routing_weights, bias, down_bias)
            return y
        biases = [None] * len(first) if bias is None else bias.chunk(len(first), -1)
        parts = [
            layout(x, expert_ids, None if own is None else own.contiguous())
            for layout, own in zip(first, biases, strict=True)
        ]
        y = down(self.gate(*parts), expert_ids, down_bias, routing_weights)
        return y


def _kinds(buffers: dict[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in buffers.items()}
