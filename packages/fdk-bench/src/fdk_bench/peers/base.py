"""What a contender of a kernel benchmark supplies, and the check that comes before the clock."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fdk_bench.cases import KernelCase
from fdk_bench.machine import cold_bytes, memory_bytes
from fdk_bench.timing import Turn, here
from fdk_formats.testing import nrmse, poisoned

# Beside the error of torch in the same dtype over the same dequantised weight.
ALLOWED = 2.0
MOST_COPIES = 512
Layer = TypeVar("Layer", bound=nn.Module)


class WrongAnswerError(RuntimeError):
    """A kernel whose answer is not that of its own weight; it is not timed."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A weight laid out by a contender, as often as it takes to find each copy cold.

    Attributes:
        calls: for each copy, ``x :: [m, k]`` to ``y :: [m, n]``.
        weight: gives the weight that the codes stand for, ``[n, k]``, of a dtype: its own answer.
        nbytes: what one copy takes and a call must read.
        backend: who computes it.
        codebook_bytes: of ``nbytes``, what does not grow with the weight.
        rest: ends a turn of calls: puts threads to sleep that would wait for the next one awake.
        place: runs a turn of calls, in a thread of their own where they need one.
        extra_error: relative error that the method adds by design (8-bit activations).
        definition: of a method that is not the exact product but has a definition: y of x, in
            float32; answers are checked against that.
    """

    calls: Sequence[Callable[[Tensor], Tensor]]
    weight: Callable[[torch.dtype], Tensor]
    nbytes: int
    backend: str
    codebook_bytes: int = 0
    extra_error: float = 0.0
    rest: Callable[[], object] = lambda: None
    place: Callable[[Turn], list[float]] = here
    definition: Callable[[Tensor], Tensor] | None = None


class Peer(Protocol):
    """A contender. Importing its package is left to ``prepare`` and ``missing``."""

    name: str
    # What is said of its rows: how its activations and scales differ from ours.
    note: str

    def missing(self) -> str | None:
        """What has to be installed, or None."""

    def unsupported(self, case: KernelCase) -> str | None:
        """Why it does not take a case ("needs 4 bits, got 3"), or None."""

    def prepare(self, case: KernelCase, copies: int | None = None) -> Prepared:
        """Lays out a weight of the case's n, k, bits and group size; ``m`` plays no part."""


def copies_of(case: KernelCase, nbytes: int, copies: int | None) -> int:
    """Copies that are cold when their turn comes again; as asked, where something is asked.

    Raises:
        MemoryError: where those asked for take more than the memory there is.
    """
    if copies is not None:
        if copies * nbytes > (memory := memory_bytes(case.device)):
            raise MemoryError(
                f"--copies: {copies} of {nbytes} bytes are more than the {memory} bytes of memory"
            )
        return copies
    return max(3, min(MOST_COPIES, -(-cold_bytes(case.device) // nbytes)))


def copied(layer: Layer, count: int) -> list[Layer]:
    """A layer and copies of it in memory of their own."""
    return [layer, *(copy.deepcopy(layer) for _ in range(count - 1))]


def check(prepared: Prepared, inputs: Sequence[Tensor]) -> list[float]:
    """The error of each answer against the exact product with the contender's own weight.

    Raises:
        WrongAnswerError: where one is more than twice that of torch in the same dtype; of a method
            with a definition, where the error against that is.
    """
    dtype = inputs[0].dtype
    # Float32 is exact enough for what 16-bit inputs give, and 5 times faster on a CPU.
    oracle = torch.float32 if inputs[0].is_cpu and dtype.itemsize == 2 else torch.float64
    W_exact = prepared.weight(oracle)
    W_rounded = W_exact.to(dtype)
    errors = []
    for x in inputs:
        expected = linear(x.to(oracle), W_exact)
        torch_error = nrmse(linear(x, W_rounded), expected.double())
        allowed = ALLOWED * torch_error + prepared.extra_error + 1e-6  # 1e-6: of the oracle
        right = expected if prepared.definition is None else prepared.definition(x)
        with poisoned():
            first = prepared.calls[0](x)
        # torch.compile writes other code while memory is poisoned: what is timed is checked too.
        for y in (first, prepared.calls[0](x)):
            if y.shape != expected.shape:
                raise WrongAnswerError(f"y must be {list(expected.shape)}, got {list(y.shape)}")
            error = nrmse(y, right.double())
            if not error <= allowed:
                raise WrongAnswerError(
                    f"wrong answer at m={x.shape[0]}, not timed: "
                    f"error {error:.2e}, allowed {allowed:.2e}"
                )
        errors.append(nrmse(y, expected.double()))
    return errors
