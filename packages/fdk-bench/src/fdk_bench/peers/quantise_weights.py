"""Quantises a model's weights with another project's method: a script for a process of its own.

The projects need versions of torch and transformers that differ from each other and from fdk's, and
some patch torch for the whole process. So this file runs by the Python that has the project, and
imports nothing of fdk: ``python -P quantise_weights.py REQUEST``. The request is a file of
``torch.save`` with the fields of ``accuracy_peers.request``; the answer, a file that it names, has
``weights`` (by layer, ``[n, k]``: what the codes stand for), ``nbytes`` (what they take) and
``version``.
"""

import ctypes
import importlib.metadata
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Request = dict[str, Any]
Answer = Iterator[tuple[str, Tensor, float]]  # layer, values, bytes

# Names and numbers of ggml's weight types, and its functions that decode them.
GGML_TYPES = {
    "Q4_K": (12, "q4_K"),
    "Q3_K": (11, "q3_K"),
    "Q2_K": (10, "q2_K"),
    "IQ4_XS": (23, "iq4_xs"),
    "IQ3_S": (21, "iq3_s"),
    "IQ3_XXS": (18, "iq3_xxs"),
    "IQ2_S": (22, "iq2_s"),
    "IQ2_XS": (17, "iq2_xs"),
    "IQ2_XXS": (16, "iq2_xxs"),
    "IQ1_S": (19, "iq1_s"),
}
GGML_BLOCK = 256


def grouped_bytes(W: Tensor, bits: int, group_size: int, extra_bits: float) -> float:
    """Return the bytes of codes, and of scales and zero points per group."""
    n, k = W.shape
    return (n * k * bits + n * math.ceil(k / group_size) * extra_bits) / 8


def hqq(request: Request) -> Answer:
    """Quantise each weight by HQQ: integers, a float16 scale and zero point per group."""
    from hqq.core.quantize import Quantizer  # type: ignore[import-not-found,unused-ignore]

    bits, group_size = request["bits"], request["group_size"]
    for name, W in request["weights"].items():
        codes, state = Quantizer.quantize(
            W.float(),
            nbits=bits,
            channel_wise=True,
            group_size=group_size,
            optimize=True,
            axis=1,
            device="cpu",
            compute_dtype=torch.float32,
        )
        values = Quantizer.dequantize(codes, state)
        yield name, values, grouped_bytes(W, bits, group_size, 32)


def bitsandbytes(request: Request) -> Answer:
    """Quantise each weight to NF4 with float32 scales, as ``Linear4bit`` does by default."""
    from bitsandbytes import functional

    group_size = request["group_size"]
    for name, W in request["weights"].items():
        codes, state = functional.quantize_4bit(
            W.float().contiguous(), blocksize=group_size, quant_type="nf4"
        )
        values = functional.dequantize_4bit(codes, state)
        yield name, values, codes.nbytes + state.absmax.nbytes


def torchao(request: Request) -> Answer:
    """Quantise each weight to integers with a scale and a zero point (bf16) per group."""
    from torchao.quantization import (  # type: ignore[import-not-found,unused-ignore]
        IntxWeightOnlyConfig,
        MappingType,
        PerGroup,
        quantize_,
    )

    bits, group_size = request["bits"], request["group_size"]
    config = IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, f"int{bits}"),
        granularity=PerGroup(group_size),
        mapping_type=MappingType.ASYMMETRIC,
        scale_dtype=torch.bfloat16,
    )
    for name, W in request["weights"].items():
        n, k = W.shape
        layer = torch.nn.Sequential(torch.nn.Linear(k, n, bias=False))
        layer[0].weight = torch.nn.Parameter(W.float())
        quantize_(layer, config)
        values = layer[0].weight.dequantize()
        # Zero points are integers of the codes' width.
        yield name, values.detach(), grouped_bytes(W, bits, group_size, 16 + bits)


def llama_cpp(request: Request) -> Answer:
    """Quantise each weight by ggml, with the importance matrix that llama.cpp computes.

    That matrix is the mean square of each input, as fdk's importance. Blocks have 256 weights:
    where k is no multiple of it, rows are joined until their length is, as llama.cpp itself would
    not do (it takes a wider type for such layers).
    """
    number, suffix = GGML_TYPES[request["type"]]
    path = next(Path(request["ggml"]).glob("libggml-base.*"))
    ggml = ctypes.CDLL(str(path))
    ggml.ggml_row_size.restype = ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    ggml.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
    ggml.ggml_quantize_chunk.argtypes = [
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
        *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p),
    ]
    decode = getattr(ggml, f"dequantize_row_{suffix}")
    decode.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    decode.restype = None
    ggml.ggml_quantize_init(number)
    for name, W in request["weights"].items():
        n, k = W.shape
        joined = math.lcm(k, GGML_BLOCK) // k
        if n % joined:
            raise ValueError(f"{name}: wanted rows in groups of {joined} for k={k}, got n={n}")
        W = W.float().contiguous()
        # A layer that the text does not reach (an expert, say) has no importance.
        importance = request["importance"].get(name, torch.ones(k))
        importance = importance.float().repeat(joined).contiguous()
        rows, length = n // joined, k * joined
        codes = torch.empty(rows, ggml.ggml_row_size(number, length), dtype=torch.uint8)
        ggml.ggml_quantize_chunk(
            number, W.data_ptr(), codes.data_ptr(), 0, rows, length, importance.data_ptr()
        )
        values = torch.empty_like(W)
        decode(codes.data_ptr(), values.data_ptr(), W.numel())
        yield name, values, codes.nbytes


def gptqmodel(request: Request) -> Answer:
    """Quantise the model by GPTQModel: GPTQ, symmetric integers, a float16 scale per group."""
    # 7.7.0 starts half as many threads as there are cores, and its loader wants two.
    if (os.cpu_count() or 1) <= 2:
        os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    from gptqmodel import GPTQModel, QuantizeConfig  # type: ignore[import-not-found,unused-ignore]

    bits, group_size = request["bits"], request["group_size"]
    config = QuantizeConfig(bits=bits, group_size=group_size, sym=True, device="cpu")
    model = GPTQModel.load(request["model"], config, dtype=torch.float32)
    ids = [
        {"input_ids": row.tolist(), "attention_mask": [1] * len(row)}
        for row in request["calibration"]
    ]
    model.quantize(ids, batch_size=1)
    layers = dict(model.model.named_modules())
    for name, W in request["weights"].items():
        values = layers[name].dequantize_weight().T
        # Scales only: a symmetric grid's zero points are all the same.
        yield name, values, grouped_bytes(W, bits, group_size, 16)


def llm_compressor(request: Request) -> Answer:
    """Quantise the model by llm-compressor: GPTQ, symmetric integers, a bf16 scale per group."""
    from datasets import Dataset  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from llmcompressor import oneshot  # type: ignore[import-not-found,unused-ignore]
    from llmcompressor.modifiers.quantization import (  # type: ignore[import-not-found,unused-ignore]
        GPTQModifier,
    )
    from transformers import AutoModelForCausalLM

    bits, group_size = request["bits"], request["group_size"]
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group_size,
    }
    layers = list(request["weights"])
    config = {"group_0": {"targets": layers, "weights": weights}}
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32)
    ids = request["calibration"]
    rows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in ids]
    oneshot(
        model=model,
        dataset=Dataset.from_list(rows),
        recipe=GPTQModifier(config_groups=config),
        num_calibration_samples=len(ids),
        max_seq_length=ids.shape[1],
    )
    modules = dict(model.named_modules())
    for name, W in request["weights"].items():
        # The weight has been replaced by what its codes stand for.
        values = modules[name].weight.detach()
        yield name, values, grouped_bytes(W, bits, group_size, 16)


def auto_round(request: Request) -> Answer:
    """Quantise the model by AutoRound: rounding learned block by block, a scale per group."""
    from auto_round import AutoRound  # type: ignore[import-not-found,unused-ignore]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    bits, group_size = request["bits"], request["group_size"]
    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32)
    ids = request["calibration"]
    rounding = AutoRound(
        model,
        AutoTokenizer.from_pretrained(request["model"]),
        bits=bits,
        group_size=group_size,
        sym=True,
        nsamples=len(ids),
        seqlen=ids.shape[1],
        dataset=[{"input_ids": row[None]} for row in ids],
        device_map="cpu",
        amp=False,
    )
    quantised, _ = rounding.quantize()
    modules = dict(quantised.named_modules())
    for name, W in request["weights"].items():
        # The weight has been replaced by what its codes stand for.
        values = modules[name].weight.detach()
        yield name, values, grouped_bytes(W, bits, group_size, 16)


METHODS: dict[str, Callable[[Request], Answer]] = {
    "hqq": hqq,
    "bitsandbytes": bitsandbytes,
    "torchao": torchao,
    "llama_cpp": llama_cpp,
    "gptqmodel": gptqmodel,
    "llm_compressor": llm_compressor,
    "auto_round": auto_round,
}


def main(path: str) -> None:
    """Answer a request."""
    request = torch.load(path, weights_only=True)
    torch.set_num_threads(request["threads"])
    weights, nbytes = {}, {}
    for name, values, size in METHODS[request["method"]](request):
        weights[name] = values.to(torch.float32).contiguous().clone()
        nbytes[name] = float(size)
    package = request["package"]
    version = importlib.metadata.version(package) if package else ""
    torch.save({"weights": weights, "nbytes": nbytes, "version": version}, request["answer"])


if __name__ == "__main__":
    main(sys.argv[1])
