"""What other projects compute from the tensors that our readers read: their own code, called.

AutoGPTQ and AutoAWQ cannot be imported beside transformers 5, and need CUDA for their kernels; HQQ
beside transformers makes it import torch's compiler. The single modules of each that pack and
dequantise in plain torch are imported from a folder apart, which `nox -s test-formats` fills.
"""

import importlib.util
import os
import sys
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import torch

FOLDER = Path(os.environ.get("FDK_ORACLES") or Path(__file__).parents[3] / ".nox" / "oracles")


@cache
def import_alone(name):
    """Imports a module of ``FOLDER`` without running the ``__init__`` of the packages around it.

    Nothing of it stays importable. Skips the test where it is not in the folder.
    """
    top, *_ = parts = name.split(".")
    if not (FOLDER / top).is_dir():
        pytest.skip(f"no {top}, the oracle, in FDK_ORACLES, which nox -s test-formats fills")
    sys.path.insert(0, str(FOLDER))
    try:
        for depth in range(1, len(parts)):
            package = ".".join(parts[:depth])
            if package not in sys.modules:
                spec = importlib.util.find_spec(package)
                sys.modules[package] = importlib.util.module_from_spec(spec)  # not executed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # theirs, and torch's of what they use
            return import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
        for module in [m for m in sys.modules if m.partition(".")[0] == top]:
            del sys.modules[module]


# AutoGPTQ's three-word pattern of 3-bit codes: word, shift left, shift right. Codes 10 and 21 are
# in two words each.
THREE_BITS = (
    *((0, 3 * i, 0) for i in range(10)),
    ((0, 30, 0), (1, 0, 2)),
    *((1, 3 * i + 1, 0) for i in range(10)),
    ((1, 31, 0), (2, 0, 1)),
    *((2, 3 * i + 2, 0) for i in range(10)),
)


def pack_rows(codes, bits):
    """Packs ``[r, c]`` codes into int32 words down each column, in Python integers."""
    rows, columns = codes.shape
    words = [[0] * columns for _ in range(rows * bits // 32)]
    for i in range(rows):
        if bits == 3:
            places = THREE_BITS[i % 32]
            base, places = i // 32 * 3, places if isinstance(places[0], tuple) else (places,)
        else:
            base, places = i // (32 // bits), ((0, i % (32 // bits) * bits, 0),)
        for column in range(columns):
            for word, shift, down in places:
                moved = (int(codes[i, column]) >> down << shift) & 0xFFFFFFFF
                words[base + word][column] |= moved
    signed = [[w - (1 << 32) if w >> 31 else w for w in row] for row in words]
    return torch.tensor(signed, dtype=torch.int32)


def gptq_layer(bits, group_size, k, n, dtype=torch.float16):
    """Makes AutoGPTQ's layer, which multiplies in plain torch where there is no CUDA."""
    module = import_alone("auto_gptq.nn_modules.qlinear.qlinear_cuda")
    return module.QuantLinear(bits, group_size, k, n, bias=False, weight_dtype=dtype)


def gptq_dequantise(bits, tensors):
    """Returns AutoGPTQ's weight ``[n, k]`` in the dtype of the scales: its product with I.

    Version 0.7.1 does not wrap ``zero + 1``.
    """
    k, n = len(tensors["qweight"]) * 32 // bits, tensors["qweight"].shape[1]
    scales = tensors["scales"]
    layer = gptq_layer(bits, k // len(scales), k, n, scales.dtype)
    for name, tensor in tensors.items():
        setattr(layer, name, tensor)
    return layer(torch.eye(k, dtype=scales.dtype)).T


def awq_dequantise(tensors):
    """Returns AutoAWQ's weight ``[n, k]`` of the GEMM version, in the dtype of the scales."""
    packing = import_alone("awq.utils.packing_utils")
    size = len(tensors["qweight"]) // len(tensors["scales"])
    parts = (tensors["qweight"], tensors["qzeros"], tensors["scales"])
    return packing.dequantize_gemm(*parts, bits=4, group_size=size).T


def hqq_oracle():
    """Returns HQQ's Quantizer, which packs and dequantises."""
    return import_alone("hqq.core.quantize").Quantizer
