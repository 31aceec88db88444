"""What other projects compute from the tensors that our readers read: their own code, called.

AutoGPTQ and AutoAWQ cannot be imported beside transformers 5, and need CUDA for their kernels. The
single modules that pack and dequantise in plain torch can, without the packages around them.
"""

import importlib.util
import sys
from importlib import import_module

import pytest
import torch


def import_alone(name):
    """Imports a module without running the ``__init__`` of the packages that hold it.

    Skips the test where the package is not installed.
    """
    parts = name.split(".")
    if importlib.util.find_spec(parts[0]) is None:
        pytest.skip(f"{parts[0]}, the oracle, is not installed (it has no wheel for this Python)")
    for depth in range(1, len(parts)):
        package = ".".join(parts[:depth])
        if package not in sys.modules:
            spec = importlib.util.find_spec(package)
            sys.modules[package] = importlib.util.module_from_spec(spec)  # not executed
    return import_module(name)


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


def hqq_quantizer():
    """Returns HQQ's Quantizer, which packs and dequantises."""
    return pytest.importorskip("hqq.core.quantize", reason="hqq, the oracle").Quantizer
