"""Layers that are not quantised, our own backends, and the reference under torch.compile."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fdk_bench.cases import KernelCase
from fdk_bench.peers.base import Prepared, copied, copies_of
from fdk_bench.peers.packages import missing
from fdk_bench.weights import exact_weight, random_weight
from fdk_formats import Problem, QuantisedTensor, select
from fdk_formats.int8 import int8_linear

COMPILERS = ("g++", "clang++")


class Dense:
    """torch's linear layer over 16- or 32-bit weights: cuBLAS on a GPU, oneDNN or MKL on a CPU."""

    name = "torch"
    note = "weights not quantised"

    def missing(self) -> str | None:
        """See ``Peer``."""
        return None

    def unsupported(self, case: KernelCase) -> str | None:
        """See ``Peer``."""
        return None

    def prepare(self, case: KernelCase, copies: int | None = None) -> Prepared:
        """See ``Peer``."""
        generator = torch.Generator(case.device).manual_seed(0)
        W = torch.randn(case.n, case.k, device=case.device, generator=generator) / case.k**0.5
        W = W.to(case.torch_dtype)
        weights = [W, *(W.clone() for _ in range(copies_of(case, W.nbytes, copies) - 1))]
        calls = [partial(self.product, W) for W in weights]
        return Prepared(calls, W.to, W.nbytes, self.name)

    @staticmethod
    def product(W: Tensor, x: Tensor) -> Tensor:
        """``x @ W.T`` for ``W :: [n, k]``, ``x :: [m, k]``."""
        return linear(x, W)


class DenseTriton(Dense):
    """A GEMV and a GEMM in plain Triton over 16-bit weights: what Triton gives without codes."""

    name = "triton-16"
    note = "weights not quantised, a GEMV and a GEMM in plain Triton"

    def missing(self) -> str | None:
        """See ``Peer``."""
        needs_gpu = not _is_interpreted()
        return missing("fdk_cuda", gpu=needs_gpu, package="fdk-cuda") or missing("triton")

    def unsupported(self, case: KernelCase) -> str | None:
        """See ``Peer``."""
        if torch.device(case.device).type != "cuda" and not _is_interpreted():
            return f"needs cuda, got {case.device}"
        if case.quantised is not None:
            return f"needs 16 bits, got {case.format}"
        if case.dtype not in ("bf16", "fp16"):
            return f"needs bf16 or fp16, got {case.dtype}"
        return None

    @staticmethod
    def product(W: Tensor, x: Tensor) -> Tensor:
        """See ``Dense``."""
        from fdk_cuda.triton import bf16_baseline

        return bf16_baseline.gemv(x[0], W)[None] if x.shape[0] == 1 else bf16_baseline.gemm(x, W)


class Ours:
    """The backend that ``select`` gives for the case."""

    name = "fdk"
    note = ""

    def missing(self) -> str | None:
        """See ``Peer``."""
        return None

    def unsupported(self, case: KernelCase) -> str | None:
        """Never: ``prepare`` raises with the reason of every backend."""
        return None

    def prepare(self, case: KernelCase, copies: int | None = None) -> Prepared:
        """See ``Peer``.

        Raises:
            NoBackendError: where no backend takes the case.
        """
        format = case.quantised
        assert format is not None
        device = torch.device(case.device)
        problem = Problem(format, case.n, case.k, case.torch_dtype, device, case.activations)
        backend = select(problem, case.backend)
        q = random_weight(format, case.n, case.k, device)
        count = copies_of(case, q.nbytes, copies)
        # A layout may keep a tensor as it is, and q is for the check. Packed once, then copied.
        weight = partial(exact_weight, q, case.torch_dtype)
        table = codebook_bytes(q)
        if case.activations == "float":
            layouts = copied(backend.pack(copy_of(q), dtype=case.torch_dtype), count)
            return Prepared(layouts, weight, q.nbytes, backend.name, table)
        pack = partial(backend.pack, dtype=case.torch_dtype, activations=case.activations)
        layouts = copied(pack(copy_of(q)), count)
        name = f"{backend.name} {case.activations}"
        return Prepared(layouts, weight, q.nbytes, name, table, definition=partial(_int8, q))


class CompiledReference:
    """Dequantise and multiply, written in torch and compiled: what needs no kernel of anybody's."""

    name = "torch.compile"
    note = "the reference backend under torch.compile"

    def missing(self) -> str | None:
        """See ``Peer``."""
        if torch.cuda.is_available() or any(map(shutil.which, COMPILERS)):
            return None
        return f"torch.compile needs a C++ compiler: {' or '.join(COMPILERS)}"

    def unsupported(self, case: KernelCase) -> str | None:
        """See ``Peer``."""
        format = case.quantised
        if format is None or format.bits not in (1, 2, 4, 8):
            return f"is written for 1, 2, 4 and 8 bits, got {case.format}"
        return None

    def prepare(self, case: KernelCase, copies: int | None = None) -> Prepared:
        """See ``Peer``."""
        format = case.quantised
        assert format is not None
        q = random_weight(format, case.n, case.k, case.device)
        compiled = compiled_by_rows()
        weights = [copy_of(q) for _ in range(copies_of(case, q.nbytes, copies))]
        calls = [
            partial(
                compiled,
                packed=w.packed,
                scale=w.scale,
                zero_point=w.zero_point,
                codebook=w.codebook,
                bits=format.bits,
            )
            for w in weights
        ]
        weight = partial(exact_weight, q, case.torch_dtype)
        return Prepared(calls, weight, q.nbytes, self.name, codebook_bytes(q))


def compiled_by_rows() -> Callable[..., Tensor]:
    """``compiled_linear`` compiled for each m; what cannot be compiled is an error.

    torch counts the variants of a code object, over all shapes and bits, and past 8 runs the
    Python: every m has a code object of its own.
    """

    @cache
    def compiled(m: int) -> Callable[..., Tensor]:
        code = compiled_linear.__code__.replace(co_name=f"compiled_linear_{m}")
        own = FunctionType(code, compiled_linear.__globals__)
        return torch.compile(own, fullgraph=True, dynamic=False)

    def call(x: Tensor, **weight: Any) -> Tensor:
        return compiled(x.shape[0])(x, **weight)

    return call


def compiled_linear(
    x: Tensor,  # [m, k, dtype]
    packed: Tensor,  # [n, k*bits/8, uint8]
    scale: Tensor,  # [n, k/G, dtype]
    zero_point: Tensor | None,
    codebook: Tensor | None,
    bits: int,
) -> Tensor:
    """``x @ W_hat.T`` for codes that do not cross a byte, in torch."""
    shifts = torch.arange(8 - bits, -1, -bits, device=packed.device, dtype=torch.uint8)
    codes = (packed[..., None] >> shifts) & (1 << bits) - 1  # [n, k*bits/8, 8/bits]
    codes = codes.reshape(*scale.shape, -1)  # [n, k/G, G]
    if codebook is not None:
        values = codebook.to(x.dtype)[codes.to(torch.int32)].to(torch.float32)
    else:
        assert zero_point is not None
        values = codes.to(torch.float32) - zero_point[..., None].to(torch.float32)
    W_hat = (values * scale[..., None].to(torch.float32)).to(x.dtype)
    return linear(x, W_hat.view(packed.shape[0], -1))


def copy_of(q: QuantisedTensor) -> QuantisedTensor:
    """The same weight in memory of its own."""
    tensors: dict[str, Any] = {name: tensor.clone() for name, tensor in q.tensors().items()}
    return replace(q, **tensors)


def codebook_bytes(q: QuantisedTensor) -> int:
    """Bytes of the table, 0 for an affine format."""
    return 0 if q.codebook is None else q.codebook.nbytes


def _is_interpreted() -> bool:
    """Whether Triton's interpreter runs kernels, which it does on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _int8(q: QuantisedTensor, x: Tensor) -> Tensor:
    return int8_linear(x.float(), q)
