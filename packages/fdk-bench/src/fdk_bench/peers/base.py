"""Interface of a contender, and the check of its answers before it is timed."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import util
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from fdk_bench.cases import KernelCase
from fdk_bench.machine import cold_bytes, memory_bytes
from fdk_bench.timing import Turn, run_here
from fdk_formats.testing import nrmse, poisoned

# Times the error of torch in the same dtype over the same dequantised weight.
ALLOWED = 2.0
MOST_COPIES = 512
Layer = TypeVar("Layer", bound=nn.Module)


class WrongAnswerError(RuntimeError):
    """A kernel's answer is not that of its own weight; it is not timed."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A weight packed by a contender, in enough copies that each is cold in its turn.

    Attributes:
        calls: one function per copy, from ``x :: [m, k]`` to ``y :: [m, n]``.
        weight: returns the weight that the codes stand for, ``[n, k]``, in a dtype.
        nbytes: bytes of one copy, which a call must read.
        backend: name of the backend that computes y.
        codebook_bytes: the part of ``nbytes`` that does not grow with the weight.
        extra_error: relative error that the method adds by design (8-bit activations).
        rest: called after each turn, to stop worker threads that would spin until the next call.
        place: runs a turn of calls, for instance in a separate thread.
        definition: for methods that do not compute the exact product: their own definition of y,
            in float32, which answers are checked against.
    """

    calls: Sequence[Callable[[Tensor], Tensor]]
    weight: Callable[[torch.dtype], Tensor]
    nbytes: int
    backend: str
    codebook_bytes: int = 0
    extra_error: float = 0.0
    rest: Callable[[], object] = lambda: None
    place: Callable[[Turn], list[float]] = run_here
    definition: Callable[[Tensor], Tensor] | None = None


class Peer:
    """A contender. Its package is imported by ``prepare`` alone: some take seconds, or print.

    Attributes:
        name: its name in options and rows.
        note: how its activations and scales differ from fdk's.
        module, package: the module it needs and the package to install; ``""`` needs none.
        needs_gpu: whether it needs an NVIDIA GPU.
        bits, dtypes, group_sizes: supported values; ``group_sizes = ()`` means any.
        steps: n and k must be multiples of these.
    """

    name = ""
    note = ""
    module = ""
    package = ""
    needs_gpu = False
    bits: tuple[int, ...] = tuple(range(1, 9))
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")
    group_sizes: tuple[int, ...] = ()
    steps = (1, 1)

    def missing(self) -> str | None:
        """Return which package has to be installed, or None."""
        if self.needs_gpu and not torch.cuda.is_available():
            return "needs an NVIDIA GPU: torch finds none"
        if self.module and util.find_spec(self.module) is None:
            return f"pip install {self.package or self.module}"
        return None

    def unsupported(self, case: KernelCase) -> str | None:
        """Return why it does not support a case ("needs 4 bits, got ..."), or None."""
        if self.needs_gpu and torch.device(case.device).type != "cuda":
            return f"needs cuda, got {case.device}"
        if case.quantised is None or case.bits not in self.bits:
            return f"needs {' or '.join(map(str, self.bits))} bits, got {case.format}"
        if case.dtype not in self.dtypes:
            return f"needs {' or '.join(self.dtypes)} activations, got {case.dtype}"
        if self.group_sizes and case.group_size not in self.group_sizes:
            sizes = " or ".join(map(str, self.group_sizes))
            return f"needs groups of {sizes}, got {case.group_size}"
        n_step, k_step = self.steps
        if case.n % n_step or case.k % k_step:
            return f"needs n % {n_step} == 0 and k % {k_step} == 0, got n={case.n}, k={case.k}"
        return None

    def prepare(self, case: KernelCase, copies: int | None = None) -> Prepared:
        """Pack a weight of the case's n, k, bits and group size; ``case.m`` does not matter.

        Args:
            case: a case that it supports.
            copies: number of copies of the weight; None for enough to keep each out of the caches.
        """
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class IntegerWeight:
    """A weight on an integer grid: ``W_hat = (codes - 2^(bits-1)) * scale``.

    codes :: [n, k, uint8]
    scale :: [n, k/G, dtype]
    """

    codes: Tensor
    scale: Tensor
    bits: int

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """Return ``W_hat :: [n, k, dtype]``."""
        centred = self.codes.to(dtype).view(*self.scale.shape, -1) - (1 << self.bits - 1)
        return (centred * self.scale.to(dtype)[..., None]).view(self.codes.shape)


def random_integers(case: KernelCase) -> IntegerWeight:
    """Make a random weight of the case's shape, bits and group size, with scales in its dtype."""
    shape, groups = (case.n, case.k), case.k // case.group_size
    generator = torch.Generator(case.device).manual_seed(0)
    codes = torch.randint(
        1 << case.bits, shape, dtype=torch.uint8, device=case.device, generator=generator
    )
    scale = 0.5 + torch.rand(case.n, groups, device=case.device, generator=generator)
    scale /= case.k**0.5 * (1 << case.bits)
    return IntegerWeight(codes, scale.to(case.torch_dtype), case.bits)


def random_dense(case: KernelCase) -> Tensor:
    """Make a normal weight ``[n, k, float32]`` whose products are about as large as x."""
    generator = torch.Generator(case.device).manual_seed(0)
    W = torch.randn(case.n, case.k, device=case.device, generator=generator)
    return W / math.sqrt(case.k)


def copies_of(case: KernelCase, nbytes: int, copies: int | None) -> int:
    """Return the number of copies that makes each cold when its turn comes, or ``copies``.

    Raises:
        MemoryError: where the copies that were asked for do not fit into memory.
    """
    if copies is not None:
        if copies * nbytes > (memory := memory_bytes(case.device)):
            raise MemoryError(
                f"--copies: {copies} of {nbytes} bytes are more than the {memory} bytes of memory"
            )
        return copies
    return max(3, min(MOST_COPIES, -(-cold_bytes(case.device) // nbytes)))


def copied(layer: Layer, count: int) -> list[Layer]:
    """Return a layer and copies of it that share no memory."""
    return [layer, *(copy.deepcopy(layer) for _ in range(count - 1))]


def check(prepared: Prepared, inputs: Sequence[Tensor]) -> list[float]:
    """Return the error of each answer against the exact product with the contender's own weight.

    Raises:
        WrongAnswerError: where an error is more than twice that of torch in the same dtype; with a
            definition, where the error against that is.
    """
    dtype = inputs[0].dtype
    # Float32 is exact enough for 16-bit inputs, and 5 times as fast on a CPU.
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
        # torch.compile makes other code while memory is poisoned, so check what is timed too.
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
