"""Blockwise quantisation of flattened tensors, with the bytes of bitsandbytes."""

from fdk_formats.blockwise.blocks import NestedAbsmax, QuantisedBlocks
from fdk_formats.blockwise.codebooks import FP4_CODE, NF4_CODE, dynamic_map, four_bit_code
from fdk_formats.blockwise.kernels import Kernels, kernels_for, register_kernels
from fdk_formats.blockwise.ops import (
    dequantise_4bit,
    dequantise_blockwise,
    quantise_4bit,
    quantise_blockwise,
)
from fdk_formats.blockwise.torch_kernels import TORCH_KERNELS

__all__ = [
    "FP4_CODE",
    "NF4_CODE",
    "TORCH_KERNELS",
    "Kernels",
    "NestedAbsmax",
    "QuantisedBlocks",
    "dequantise_4bit",
    "dequantise_blockwise",
    "dynamic_map",
    "four_bit_code",
    "kernels_for",
    "quantise_4bit",
    "quantise_blockwise",
    "register_kernels",
]
