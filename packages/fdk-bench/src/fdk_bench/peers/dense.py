"""fdk's own backends, layers that are not quantised, and the compiled reference."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib import util
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from fdk_bench.cases import KernelCase, random_weight
from fdk_bench.peers.base import Peer, Prepared, copied, copies_of, random_dense
from fdk_formats import Problem, QuantisedTensor, select
from fdk_formats.int8 import int8_linear
from fdk_formats.testing.conformance import exact_weight

COMPILERS = ("g++", "clang++")


class Dense(Peer):
    """torch's linear layer over 16- or 32-bit weights: cuBLAS on a GPU, oneDNN or MKL on a CPU."""

    name = "torch"
    note = "weights not quantised"

    def unsupported(self, case: KernelCase) -> str | None:
        """See ``Peer``."""
        return None

    def prepare(self, case: KernelCase, copies: int | None = None) -> Prepared:
        """See ``Peer``."""
        W = random_dense(case).to(case.torch_dtype)
        weights = [W, *(W.clone() for _ in range(copies_of(case, W.nbytes, copies) - 1))]
        calls = [partial(self.product, W) for W in weights]
        return Prepared(calls, W.to, W.nbytes, self.name)

    @staticmethod
    def product(W: Tensor, x: Tensor) -> Tensor:
        """Return ``x @ W.T`` for ``W :: [n, k]`` and ``x :: [m, k]``."""
        return linear(x, W)


class DenseTriton(Dense):
    """A GEMV and a GEMM in plain Triton over 16-bit weights: what Triton gives without codes."""

    name = "triton-16"
    note = "weights not quantised, a GEMV and a GEMM in plain Triton"

    def missing(self) -> str | None:
        """See ``Peer``."""
        if not _is_interpreted() and not torch.cuda.is_available():
            return "needs an NVIDIA GPU: torch finds none"
        return None if util.find_spec("triton") else "pip install triton"

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
        from fdk_bench.peers import bf16_baseline

        return bf16_baseline.gemv(x[0], W)[None] if x.shape[0] == 1 else bf16_baseline.gemm(x, W)


class Fdk(Peer):
    """The backend that ``fdk_formats.select`` gives for the case."""

    name = "fdk"

    def unsupported(self, case: KernelCase) -> str | None:
        """Return None: ``prepare`` raises with the reason of every backend."""
        return None

    def prepare(self, case: KernelCase, copies: int | None = None) -> Prepared:
        """See ``Peer``.

        Raises:
            NoBackendError: where no backend supports the case.
        """
        format = case.quantised
        assert format is not None
        device = torch.device(case.device)
        problem = Problem(format, case.n, case.k, case.torch_dtype, device, case.activations)
        backend = select(problem, case.backend)
        q = random_weight(format, case.n, case.k, device)
        weight = partial(exact_weight, q, case.torch_dtype)
        is_float = case.activations == "float"
        options = {} if is_float else {"activations": case.activations}
        # A layout may keep a tensor as it is, and the check reads q: pack a copy.
        layout = backend.pack(copy_of(q), dtype=case.torch_dtype, **options)
        return Prepared(
            copied(layout, copies_of(case, q.nbytes, copies)),
            weight,
            q.nbytes,
            backend.name if is_float else f"{backend.name} {case.activations}",
            codebook_bytes(q),
            definition=None if is_float else partial(_int8, q),
        )


class CompiledReference(Peer):
    """Dequantise and multiply in torch, compiled: what needs no hand-written kernel."""

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
        compiled = compile_per_m()
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


def compile_per_m() -> Callable[..., Tensor]:
    """Return ``compiled_linear``, compiled anew for each m; what cannot be compiled is an error.

    torch counts the variants of a code object, over all shapes and bits, and runs plain Python
    after 8 of them, so every m gets its own code object.
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
    """Return ``x @ W_hat.T`` for codes that do not cross a byte."""
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
    """Return a copy of the weight that shares no memory with it."""
    tensors: dict[str, Any] = {name: tensor.clone() for name, tensor in q.tensors().items()}
    return replace(q, **tensors)


def codebook_bytes(q: QuantisedTensor) -> int:
    """Return the bytes of the codebook, 0 for an affine format."""
    return 0 if q.codebook is None else q.codebook.nbytes


def _is_interpreted() -> bool:
    """Return whether Triton's interpreter runs the kernels, which it does on any device."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _int8(q: QuantisedTensor, x: Tensor) -> Tensor:
    return int8_linear(x.float(), q)
