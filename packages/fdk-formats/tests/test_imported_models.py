"""Checkpoints of other projects loaded into models of transformers."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fdk_formats import QuantisedLinear, load_model, parameters_on_meta, quantise, save
from fdk_formats.readers import load_one_bit_wonder

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
