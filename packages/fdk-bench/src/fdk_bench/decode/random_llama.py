"""Llamas with random weights, each layer made on the device in the format that it is stored in."""

import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from fdk_bench.cases import DTYPES, random_weight
from fdk_bench.decode.llama import SIZES, Llama, has_kernels
from fdk_bench.models import Built, ModelCase, check_dense, check_layer
from fdk_formats import Format, QuantisedLinear


def build_llama(case: ModelCase, batches: Sequence[int]) -> Built:
    """Make a llama of a case.

    The first layer of each shape is checked for every batch size.

    Raises:
        ValueError: where nothing is quantised.
        WrongAnswerError: where a layer does not compute with its own weight.
    """
    dtype = DTYPES[case.dtype]
    format = None if case.format in DTYPES else Format.parse(case.format)
    weight_bytes, code_bits, coded_weights = 0, 0.0, 0
    backends: set[str] = set()
    checked: set[tuple[bool, int, int]] = set()
    make_dense, dense_name = dense_linear(case)

    def linear(name: str, n: int, k: int) -> nn.Module:
        nonlocal weight_bytes, code_bits, coded_weights
        is_dense = format is None or bool(case.skip and re.search(case.skip, name))
        is_new = (is_dense, n, k) not in checked
        checked.add((is_dense, n, k))
        if is_dense or format is None:
            W = torch.empty(n, k, device=case.device, dtype=dtype).normal_(std=k**-0.5)
            layer = make_dense(k, n, bias=False, device="meta")
            layer.weight = nn.Parameter(W, requires_grad=False)
            weight_bytes += W.nbytes
            if is_new and make_dense is not nn.Linear:
                check_dense(layer, case, batches)
            return layer
        q = random_weight(format, n, k, case.device, seed=weight_bytes % 2**31)
        quantised = QuantisedLinear.from_quantised(q, backend=case.backend, dtype=dtype)
        if is_new:
            check_layer(quantised, q, case, batches)
        weight_bytes += q.nbytes
        code_bits += q.bits_per_weight * n * k
        coded_weights += n * k
        backends.add(quantised.backend_name)
        return quantised

    size = SIZES[case.model]
    if case.layers is not None:
        size = replace(size, layers=case.layers)
    llama = Llama(size, linear, device=case.device, dtype=dtype, fused=case.fused)
    if format is not None and not backends:
        raise ValueError(f"{case.model}: wanted layers to quantise, but --skip leaves none")
    weight_bytes += (2 * size.layers + 1) * size.dim * dtype.itemsize  # norms
    return Built(
        decoder=llama,
        weight_bytes=weight_bytes,
        stored_bytes=weight_bytes + llama.embedding.nbytes,
        parameters=size.parameters,
        bits_per_weight=code_bits / coded_weights if coded_weights else dtype.itemsize * 8,
        backends=", ".join(sorted(backends)) or dense_name,
    )


def dense_linear(case: ModelCase) -> tuple[type[nn.Linear], str]:
    """Return the class of layers that are not quantised, and its name in rows."""
    has_gemv = has_kernels(case.device) and DTYPES[case.dtype].itemsize == 2
    if not (case.compiled and has_gemv):
        return nn.Linear, "torch"
    from fdk_bench.decode.gemv_bf16 import RowLinear

    return RowLinear, "torch, gemv for one row"
