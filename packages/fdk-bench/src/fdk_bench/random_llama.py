"""Llamas of random weights, each layer made on the device as it is stored."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from fdk_bench.cases import DTYPES
from fdk_bench.decoding import Built
from fdk_bench.llama import SIZES, Llama
from fdk_bench.llama_ops import has_kernels
from fdk_bench.model_cases import ModelCase
from fdk_bench.peers.base import Prepared, check
from fdk_bench.peers.dense import codebook_bytes
from fdk_bench.weights import exact_weight, random_weight
from fdk_formats import Format, QuantisedLinear, QuantisedTensor


def build_llama(case: ModelCase, batches: Sequence[int]) -> Built:
    """A llama of random weights, each layer made on the device as it is stored.

    A layer of a shape that was not seen before is checked for every batch size first.

    Raises:
        ValueError: where nothing is quantised.
        WrongAnswerError: where a layer does not compute with its own weight.
    """
    dtype = DTYPES[case.dtype]
    format = None if case.format in DTYPES else Format.parse(case.format)
    weights, bits = [0], [0.0, 0.0]
    backends: set[str] = set()
    checked: set[tuple[int, int]] = set()
    checked_dense: set[tuple[int, int]] = set()
    make_dense, dense_name = dense_linear(case)

    def linear(name: str, n: int, k: int) -> nn.Module:
        if format is None or (case.skip and re.search(case.skip, name)):
            W = torch.empty(n, k, device=case.device, dtype=dtype).normal_(std=k**-0.5)
            layer = make_dense(k, n, bias=False, device="meta")
            layer.weight = nn.Parameter(W, requires_grad=False)
            weights[0] += W.nbytes
            if make_dense is not nn.Linear and (n, k) not in checked_dense:
                checked_dense.add((n, k))
                check_dense(layer, case, batches)
            return layer
        q = random_weight(format, n, k, case.device, seed=weights[0] % 2**31)
        quantised = QuantisedLinear.from_quantised(q, backend=case.backend, dtype=dtype)
        if (n, k) not in checked:
            checked.add((n, k))
            check_layer(quantised, q, case, batches)
        weights[0] += q.nbytes
        bits[0] += q.bits_per_weight * n * k
        bits[1] += n * k
        backends.add(quantised.weight.backend_name)
        return quantised

    size = SIZES[case.model]
    if case.layers is not None:
        size = replace(size, layers=case.layers)
    llama = Llama(size, linear, device=case.device, dtype=dtype, fused=case.fused)
    if format is not None and not backends:
        raise ValueError(f"{case.model}: wanted layers to quantise, and skip leaves none")
    norms = (2 * size.layers + 1) * size.dim * dtype.itemsize
    weight_bytes = weights[0] + norms
    return Built(
        decoder=llama,
        weight_bytes=weight_bytes,
        stored_bytes=weight_bytes + llama.embedding.nbytes,
        parameters=size.parameters,
        bits_per_weight=bits[0] / bits[1] if bits[1] else dtype.itemsize * 8,
        backends=", ".join(sorted(backends)) or dense_name,
    )


def dense_linear(case: ModelCase) -> tuple[type[nn.Linear], str]:
    """What makes layers that are not quantised, and its name: ours where we have a kernel."""
    has_gemv = has_kernels(case.device) and DTYPES[case.dtype].itemsize == 2
    if not (case.compiled and has_gemv):
        return nn.Linear, "torch"
    from fdk_bench.gemv_kernel import RowLinear

    return RowLinear, "torch, gemv for one row"


def check_layer(
    layer: nn.Module, q: QuantisedTensor, case: ModelCase, batches: Sequence[int]
) -> None:
    """Checks a layer's answers for every batch size, as a kernel's are.

    Raises:
        WrongAnswerError: where one is wrong.
    """
    weight = partial(exact_weight, q, DTYPES[case.dtype])
    prepared = Prepared([layer], weight, q.nbytes, case.backend, codebook_bytes(q))
    _check(prepared, q.shape[1], case, batches)


def check_dense(layer: nn.Linear, case: ModelCase, batches: Sequence[int]) -> None:
    """The same of a layer that is not quantised."""
    W = layer.weight
    _check(Prepared([layer], W.to, W.nbytes, "gemv"), W.shape[1], case, batches)


def _check(prepared: Prepared, k: int, case: ModelCase, batches: Sequence[int]) -> None:
    generator = torch.Generator(case.device).manual_seed(0)
    rows = [torch.randn(m, k, device=case.device, generator=generator) for m in batches]
    with torch.inference_mode():
        check(prepared, [x.to(DTYPES[case.dtype]) for x in rows])
