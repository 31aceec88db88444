"""Checkpoints of other projects, computed by fdk's kernels with ``--quantization fdk``."""

import json

import numpy
import pytest
import serving
import torch
from safetensors.torch import save_file
from serving import TINY, assert_same_tokens, engine, prompts

from fdk_formats import load_model, quantise
from fdk_formats.codebooks import NF4
from fdk_formats.readers import load_awq, load_bitsandbytes, load_gptq, load_hqq

pytest.importorskip("vllm", reason="needs vLLM: nox -s test-vllm")

PROMPTS = prompts(8, TINY["vocab_size"])
GROUP = 64
BNB_NF4 = "weight.quant_state.bitsandbytes__nf4"


def affine(weight):
    """Returns codes ``[n, k]``, zero points and scales ``[n, k/G]`` of 4 bits."""
    q = quantise(weight, f"affine4-g{GROUP}-fp16-zint")
    return q.codes().int(), q.zero_point.int().clamp(1, 15), q.scale


def words(codes, order=range(8)):
    """Packs 4-bit codes along the last dimension into int32, the first lowest."""
    codes = codes.view(*codes.shape[:-1], -1, 8)[..., list(order)].long()
    packed = (codes << torch.arange(0, 32, 4)).sum(-1)
    return torch.from_numpy(packed.numpy().astype(numpy.uint32).view(numpy.int32))


def gptq(weight, order=None):
    k = weight.shape[1]
    codes, zeros, scales = affine(weight if order is None else weight[:, order])
    groups = torch.arange(k) // GROUP
    if order is not None:  # row i of the stored codes is input i
        inverse = order.argsort()
        codes, groups = codes[:, inverse], groups[inverse]
    return {
        "qweight": words(codes).T.contiguous(),
        "qzeros": words(zeros.T - 1),
        "scales": scales.T.contiguous(),
        "g_idx": groups.int(),
    }


def act_order_gptq(weight):
    generator = torch.Generator().manual_seed(weight.shape[1])
    return gptq(weight, torch.randperm(weight.shape[1], generator=generator))


def awq(weight):
    codes, zeros, scales = affine(weight)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": words(codes.T, order),
        "qzeros": words(zeros.T, order),
        "scales": scales.T.contiguous(),
    }


def bitsandbytes(weight):
    table = torch.tensor(NF4)
    blocks = weight.reshape(-1, GROUP)
    absmax = blocks.abs().amax(1)
    codes = ((blocks / absmax[:, None])[..., None] - table).abs().argmin(-1).flatten()
    packed = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
    shape = list(weight.shape)
    info = {"quant_type": "nf4", "blocksize": GROUP, "dtype": "float32", "shape": shape}
    state = json.dumps(info).encode()
    return {
        "weight": packed,
        "weight.absmax": absmax,
        "weight.quant_map": table,
        BNB_NF4: torch.tensor(list(state), dtype=torch.uint8),
    }


def hqq(weight):
    codes, zeros, scales = affine(weight)
    rows = codes.reshape(-1, GROUP).to(torch.uint8)
    half = len(rows) // 2

    def text(value):
        return torch.tensor(list(value.encode()), dtype=torch.uint8)

    return {
        "W_q": rows[:half] << 4 | rows[half:],
        "scale": scales.reshape(-1, 1).half(),
        "zero": zeros.reshape(-1, 1).half(),
        "shape": torch.tensor(weight.shape),
        "nbits": torch.tensor(4),
        "group_size": torch.tensor(GROUP),
        "axis": torch.tensor(1),
        "packing": text("4bit_u8"),
        "compute_dtype": text("torch.float16"),
    }


PROJECTS = {
    "gptq": (gptq, load_gptq, {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}),
    "gptq act-order": (
        act_order_gptq,
        load_gptq,
        {"bits": 4, "group_size": GROUP, "desc_act": True, "sym": False},
    ),
    "awq": (awq, load_awq, {"bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "bitsandbytes": (bitsandbytes, load_bitsandbytes, {"load_in_4bit": True}),
    "hqq": (hqq, load_hqq, {}),
}


@pytest.mark.parametrize("project", PROJECTS)
def test_imported(project, tmp_path):
    convert, load, settings = PROJECTS[project]
    model = serving.tiny_model()
    tensors = {}
    for name, tensor in model.state_dict().items():
        layer = name.removesuffix(".weight")
        if layer.endswith("_proj"):
            below = convert(tensor)
            tensors |= {f"{layer}.{key}": value.contiguous() for key, value in below.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    method = project.split()[0]
    serving.write_config(tmp_path, model, {"quant_method": method} | settings)
    wanted = load_model(load(tmp_path), model)
    with engine(tmp_path, quantization="fdk") as llm:
        assert_same_tokens(wanted, llm, PROMPTS)
        layers = serving.model_of(llm).model.layers
        assert layers[0].self_attn.qkv_proj.quant_method.weights.product.backends[0] == "cpu"


def test_packed_weights_of_another_project_are_refused(tmp_path):
    model = serving.tiny_model(num_hidden_layers=1)
    serving.plain_folder(tmp_path, model)
    serving.write_config(tmp_path, model, {"quant_method": "awq", "bits": 4})
    message = "config.json says awq, and its files hold no tensor called <layer>.qweight"
    with pytest.raises(Exception, match=message), engine(tmp_path, quantization="fdk"):
        pass
