"""The part of a quantised weight that one process of tensor parallelism holds."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fdk_formats.tensor import QuantisedTensor
from fdk_formats.tensor_parallel import check_cut

REMEDY = "serve with fewer GPUs (--tensor-parallel-size)"


@dataclass(frozen=True)
class Part:
    """The part of a logical weight ``[full_n, full_k]`` that a process holds.

    Attributes:
        start: its first row.
        stop: the row after its last.
        n: its rows with padding, which is zero.
        rank: its index along k.
        ranks: number of parts along k.
    """

    start: int
    stop: int
    n: int
    rank: int = 0
    ranks: int = 1

    def of(self, q: QuantisedTensor) -> QuantisedTensor:
        """Cuts the part from a whole weight."""
        return padded(columns(rows(q, self.start, self.stop), self.rank, self.ranks), self.n)


def part_of(
    full: tuple[int, int], local: tuple[int, int], rank: int, ranks: int, offset: int = 0
) -> Part:
    """Returns the part of a logical weight that vLLM gives a process.

    Args:
        full: ``(n, k)`` of the whole weight.
        local: those of the part. Where n of the whole is cut into fewer parts than there are
            processes, neighbours hold the same part (heads of keys and values that are replicated).
        rank: index of the process.
        ranks: number of processes.
        offset: first row of the weight in the one that is stored (q, k and v stored as one).

    Raises:
        ValueError: if the parts do not divide the whole.
    """
    for name, whole, part in (("n", full[0], local[0]), ("k", full[1], local[1])):
        if whole % part:
            raise ValueError(f"{name}={whole} is not a multiple of the {part} of each process")
    across_n, across_k = full[0] // local[0], full[1] // local[1]
    start = offset + rank * across_n // ranks * local[0]
    return Part(
        start, start + local[0], local[0], rank * across_k // ranks if across_k > 1 else 0, across_k
    )


def rows(q: QuantisedTensor, start: int, stop: int) -> QuantisedTensor:
    """Copies rows ``start`` to ``stop`` of a weight."""
    return _of_rows(q, stop - start, lambda tensor: tensor[start:stop].clone())


def columns(q: QuantisedTensor, rank: int, ranks: int) -> QuantisedTensor:
    """Copies one of ``ranks`` parts along k of a weight; scales of whole rows stay whole.

    Raises:
        ValueError: if a group or a byte of codes would be cut, with a format that fits.
    """
    if ranks == 1:
        return q
    n, k = q.shape
    check_cut(q.format, k, ranks, REMEDY)
    is_whole_row = q.group_size == k
    tensors: dict[str, Any] = {
        name: tensor
        if name == "codebook" or (is_whole_row and name != "packed")
        else tensor.chunk(ranks, 1)[rank].contiguous()
        for name, tensor in q.tensors().items()
    }
    part = k // ranks
    # A group of the whole row is one of the part's whole row.
    format = replace(q.format, group_size=None) if is_whole_row else q.format
    return QuantisedTensor(format, (n, part), **tensors)


def padded(q: QuantisedTensor, n: int) -> QuantisedTensor:
    """Adds rows of zeros up to ``n``: scales of 0."""
    more = n - q.shape[0]
    if more == 0:
        return q
    return _of_rows(q, n, lambda tensor: torch.nn.functional.pad(tensor, (0, 0, 0, more)))


def _of_rows(q: QuantisedTensor, n: int, change: Any) -> QuantisedTensor:
    tensors: dict[str, Tensor] = {
        name: tensor if name == "codebook" else change(tensor)
        for name, tensor in q.tensors().items()
    }
    return QuantisedTensor(q.format, (n, q.shape[1]), **tensors)
