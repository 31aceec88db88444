"""Readers of other projects' quantised weights, one module per project.

``read_*`` converts the tensors of one weight, ``load_*`` a published folder. The result dequantises
to the project's own weights exactly; a weight that no format can represent raises ValueError.
docs/guide/files.md lists what is read.
"""

from fdk_formats.readers.awq import load_awq, read_awq
from fdk_formats.readers.bitsandbytes import load_bitsandbytes, read_bitsandbytes
from fdk_formats.readers.dequant_gemm import read_dequant_gemm
from fdk_formats.readers.gguf import load_gguf
from fdk_formats.readers.gptq import load_gptq, read_gptq, read_gptq_act_order
from fdk_formats.readers.hqq import load_hqq, read_hqq
from fdk_formats.readers.one_bit_wonder import load_one_bit_wonder, read_one_bit_wonder

__all__ = [
    "load_awq",
    "load_bitsandbytes",
    "load_gguf",
    "load_gptq",
    "load_hqq",
    "load_one_bit_wonder",
    "read_awq",
    "read_bitsandbytes",
    "read_dequant_gemm",
    "read_gptq",
    "read_gptq_act_order",
    "read_hqq",
    "read_one_bit_wonder",
]
