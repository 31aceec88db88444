"""The part of a quantised weight that one process of tensor or expert parallelism holds."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fdk_formats.tensor import CanonicalWeight, QuantisedStack, QuantisedTensor
from fdk_formats.tensor_parallel import check_cut

REMEDY = "serve with fewer GPUs (--tensor-parallel-size)"

# A weight, or a stack of experts.
W = TypeVar("W", bound=CanonicalWeight)


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
        """Cuts the part from a whole weight, whose memory it may share."""
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


@dataclass(frozen=True)
class ExpertPart:
    """The part of a layer's experts that a process holds: some experts, some of their inner size.

    Attributes:
        experts: the experts, in the order in which the process numbers them.
        rank: index of the process along the inner size.
        ranks: number of parts of the inner size.
        gates: ``first`` where the first projection has the rows of gates, then those of what they
            multiply; ``interleaved`` where these take turns; ``none`` without gates.
    """

    experts: tuple[int, ...]
    rank: int = 0
    ranks: int = 1
    gates: str = "first"

    def of_first(self, q: W) -> W:
        """Cuts the rows of gates and of what they multiply, each into ``ranks``."""
        if self.ranks == 1:
            return q
        n = q.shape[-2]
        halves = 2 if self.gates == "first" else 1
        chosen = torch.arange(n, device=q.device).view(halves, self.ranks, -1)[:, self.rank]
        chosen = chosen.flatten()
        return _of_rows(q, len(chosen), lambda tensor: tensor.index_select(-2, chosen))

    def of_down(self, q: W) -> W:
        """Cuts the columns of the second projection."""
        return columns(q, self.rank, self.ranks)

    def chosen(self, stack: QuantisedStack) -> QuantisedStack:
        """Returns the experts of this process."""
        if self.experts == tuple(range(len(stack))):
            return stack
        chosen = torch.tensor(self.experts, device=stack.device)
        tensors: dict[str, Any] = {
            name: tensor if name == "codebook" and len(tensor) == 1 else tensor[chosen]
            for name, tensor in stack.tensors().items()
        }
        return QuantisedStack(stack.format, (len(chosen), *stack.shape[1:]), **tensors)


def rows(q: W, start: int, stop: int) -> W:
    """Returns rows ``start`` to ``stop`` of a weight, or of each expert of a stack; no copies."""
    return _of_rows(q, stop - start, lambda tensor: tensor[..., start:stop, :])


def copied(q: W, device: torch.device) -> W:
    """Copies a weight to a device, even where it is: a checkpoint's tensors may be its file."""
    tensors: dict[str, Any] = {
        name: tensor.to(device, copy=True) for name, tensor in q.tensors().items()
    }
    return replace(q, **tensors)


def columns(q: W, rank: int, ranks: int) -> W:
    """Copies one of ``ranks`` parts along k of a weight; scales of whole rows stay whole.

    Raises:
        ValueError: if a group or a byte of codes would be cut, with a format that fits.
    """
    if ranks == 1:
        return q
    *others, k = q.shape
    check_cut(q.format, k, ranks, REMEDY)
    is_whole_row = q.group_size == k
    tensors: dict[str, Any] = {
        name: tensor
        if name == "codebook" or (is_whole_row and name != "packed")
        else tensor.chunk(ranks, -1)[rank].contiguous()
        for name, tensor in q.tensors().items()
    }
    part = k // ranks
    # A group of the whole row is one of the part's whole row.
    format = replace(q.format, group_size=None) if is_whole_row else q.format
    return type(q)(format, (*others, part), **tensors)


def padded(q: QuantisedTensor, n: int) -> QuantisedTensor:
    """Adds rows of zeros up to ``n``: scales of 0."""
    more = n - q.shape[0]
    if more == 0:
        return q
    return _of_rows(q, n, lambda tensor: torch.nn.functional.pad(tensor, (0, 0, 0, more)))


def _of_rows(q: W, n: int, change: Callable[[Tensor], Tensor]) -> W:
    tensors: dict[str, Any] = {
        name: tensor if name == "codebook" else change(tensor)
        for name, tensor in q.tensors().items()
    }
    return type(q)(q.format, (*q.shape[:-2], n, q.shape[-1]), **tensors)
