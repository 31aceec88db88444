"""Checkpoints of other projects loaded into models of transformers."""

import json
import os
from pathlib import Path

import pytest
import torch
from reader_oracles import pack_rows
from safetensors.torch import save_file
from torch import nn

from fdk_formats import (
    QuantisedLinear,
    QuantisedTensor,
    load_model,
    parameters_on_meta,
    quantise,
    save,
    save_model,
)
from fdk_formats.readers import load_gguf, load_gptq, load_one_bit_wonder

transformers = pytest.importorskip("transformers", reason="transformers, whose llama is loaded")


PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


def llama(*, tied):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


def write_one_bit_wonder(folder, source):
    """Writes a folder of 2-bit weights, and their values to ``source``."""
    tied = source.config.tie_word_embeddings
    tensors = dict(source.state_dict())
    if tied:  # transformers stores one of the two names
        del tensors["lm_head.weight"]
    for name, module in source.named_modules():
        if type(module) is not nn.Linear or name == "lm_head":
            continue
        q = quantise(tensors.pop(f"{name}.weight"), "kmeans2-g64")
        tensors |= {
            f"{name}.weight_packed": q.packed,
            f"{name}.scales": q.scale,
            f"{name}.centroids": q.codebook,
        }
        module.weight.copy_(q.dequantise())
    save_file(tensors, folder / "model.safetensors")
    config = {"bits": 2, "block_size": 64, "relative_scale": "absmean"}
    (folder / "quantization_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("through_a_file", [False, True])
def test_a_checkpoint_into_a_llama(tmp_path, tied, through_a_file):
    dequantised = llama(tied=tied)
    write_one_bit_wonder(tmp_path, dequantised)
    source = load_one_bit_wonder(tmp_path)
    if through_a_file:
        save(tmp_path / "ours.safetensors", source)
        source = tmp_path / "ours.safetensors"
    with parameters_on_meta():
        skeleton = llama(tied=tied)
    assert {p.device.type for p in skeleton.parameters()} == {"meta"}
    model = load_model(source, skeleton, backend="reference")
    assert isinstance(model.model.layers[1].mlp.down_proj, QuantisedLinear)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert torch.equal(model(PROMPT).logits, dequantised(PROMPT).logits)


def test_buffers_on_meta_are_refused_with_a_remedy(tmp_path):
    write_one_bit_wonder(tmp_path, llama(tied=False))
    with torch.device("meta"):
        skeleton = llama(tied=False)
    said = r"load_model: holds no model\.rotary_emb\.inv_freq, .* fdk_formats\.parameters_on_meta"
    with pytest.raises(ValueError, match=said):
        load_model(load_one_bit_wonder(tmp_path), skeleton, backend="reference")


# GPTQ in act-order


def write_gptq(folder, source, group=32):
    """Writes 4-bit weights in act-order, and GPTQ's own values of them to ``source``."""
    tensors = dict(source.state_dict())
    for name, module in source.named_modules():
        if type(module) is not nn.Linear or name == "lm_head":
            continue
        del tensors[f"{name}.weight"]
        n, k = module.weight.shape
        g_idx = (torch.arange(k, dtype=torch.int32) // group)[torch.randperm(k)]
        codes, zeros = torch.randint(16, (k, n)), torch.randint(1, 16, (k // group, n))
        scales = torch.rand(k // group, n) * 0.02 + 0.01
        tensors |= {
            f"{name}.qweight": pack_rows(codes, 4),
            f"{name}.qzeros": pack_rows(zeros.T, 4).T.contiguous(),
            f"{name}.scales": scales,
            f"{name}.g_idx": g_idx,
        }
        module.weight.copy_(((codes - zeros[g_idx.long()]) * scales[g_idx.long()]).T)
    save_file(tensors, folder / "model.safetensors")
    config = {"bits": 4, "group_size": group, "desc_act": True, "sym": False}
    config |= {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))


def test_a_gptq_checkpoint_in_act_order_into_a_llama(tmp_path):
    dequantised = llama(tied=False)
    write_gptq(tmp_path, dequantised)
    source = load_gptq(tmp_path)
    permutations = {name: value for name, value in source.items() if "permutation" in name}
    assert len(permutations) == 14
    for name, permutation in permutations.items():
        weight = name.replace("input_permutation", "weight")
        columns = torch.empty(source[weight].shape)
        columns[:, permutation] = source[weight].dequantise()
        assert torch.equal(columns, dequantised.state_dict()[weight])
    model = load_model(source, llama(tied=False), backend="reference")
    layer = model.model.layers[0].mlp.down_proj
    assert torch.equal(
        layer.dequantise(), dequantised.state_dict()["model.layers.0.mlp.down_proj.weight"]
    )
    assert torch.equal(layer.weight @ torch.eye(layer.in_features), layer.dequantise())
    save_model(tmp_path / "model", model)
    again = load_model(tmp_path / "model", llama(tied=False), backend="reference")
    assert torch.equal(again(PROMPT).logits, model(PROMPT).logits)
    empty = load_model(tmp_path / "model", llama(tied=False), backend="reference")
    empty.model.layers[0].mlp.down_proj.permute_inputs(None)
    empty.load_state_dict(model.state_dict())
    assert torch.equal(empty(PROMPT).logits, model(PROMPT).logits)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, layer.in_features)
    assert torch.equal(compiled(x), layer(x))
    with pytest.raises(ValueError, match="input_permutation must hold each of 0 to"):
        layer.permute_inputs(torch.zeros(layer.in_features, dtype=torch.int32))
    # The sums of a product run in the order of the columns, which is another one.
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(model(PROMPT).logits, dequantised(PROMPT).logits, **close)


# GGUF

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.slow
def test_a_gguf_file_into_a_llama():
    """SmolLM2-135M, 210 weights in Q4_1, beside transformers' own dequantisation."""
    folder = os.environ.get("FDK_EXAMPLE_GGUF", "")
    if not (Path(folder) / GGUF).exists():
        pytest.skip(f"FDK_EXAMPLE_GGUF names no folder with {GGUF}, which nox -s test-formats does")
    source = load_gguf(Path(folder) / GGUF)
    assert sum(isinstance(value, QuantisedTensor) for value in source.values()) == 210
    dequantised = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=GGUF,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    ).eval()
    state = dequantised.state_dict()
    for name, value in source.items():
        found = value if isinstance(value, torch.Tensor) else value.dequantise()
        # Twice the float32 spacing at the largest minimum, 2.9.
        torch.testing.assert_close(found, state[name], rtol=0, atol=4.8e-7)
    with parameters_on_meta():
        skeleton = transformers.AutoModelForCausalLM.from_config(dequantised.config)
    model = load_model(source, skeleton.float(), backend="reference").eval()
    with torch.no_grad():
        found, wanted = model(PROMPT).logits, dequantised(PROMPT).logits
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))
    assert float((found - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
