"""Saving, dequantising, pushing to a hub, and folders that others wrote."""

import copy
import json
import re
from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from fdk_formats import QuantisedLinear, load_model, quantise_model, save_model
from fdk_formats.__main__ import main as quantise_folder
from fdk_transformers import FdkConfig, model_card

X = tiny_models.inputs("llama")


def quantised(tmp_path, name="llama", **rules):
    tiny_models.make(name).save_pretrained(tmp_path / "source")
    kind = tiny_models.model_class(name)
    config = FdkConfig("int4-g32", **rules)
    return kind.from_pretrained(tmp_path / "source", quantization_config=config)


@torch.no_grad()
def logits(model, x=X):
    return model(**x).logits


def test_what_is_saved(tmp_path):
    rules = {"overrides": {r"down_proj$": "int8-g32", "q_proj": None}, "activations": "int8"}
    importance = {"model.layers.0.mlp.up_proj": torch.ones(64)}
    model = quantised(tmp_path, backend="cpu", importance=importance, **rules)
    model.save_pretrained(tmp_path / "small")
    saved = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    assert saved == {
        "quant_method": "fdk",
        "format": "int4-g32",
        "overrides": {r"down_proj$": "int8-g32", "q_proj": None},
        "skip": [],
        "default_skip": True,
        "include": [],
        "activations": "int8",
    }
    with safe_open(tmp_path / "small" / "model.safetensors", "pt") as file:
        names, metadata = set(file.keys()), file.metadata()
        size = file.get_slice("model.layers.0.mlp.up_proj.weight.packed").get_shape()
    assert size == [128, 32]
    assert metadata["format"] == "pt"
    weights = json.loads(metadata["fdk.weights"])
    assert weights["model.layers.0.mlp.down_proj.weight"] == {
        "format": "int8-g32",
        "shape": [64, 128],
    }
    assert not [name for name in names if "weight_" in name]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert again.model.layers[0].mlp.up_proj.activations == "int8"
    assert torch.equal(logits(again), logits(model))


def test_saved_again(tmp_path):
    model = quantised(tmp_path)
    for name in ("one", "two"):
        model.save_pretrained(tmp_path / name)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("name", ["llama", "smollm", "gpt2", "mixtral"])
@pytest.mark.parametrize("reload", [False, True])
def test_dequantise(tmp_path, name, reload):
    settings = tiny_models.MODELS[name][2]
    rules = settings | ({"skip": None, "include": ["embedding"]} if name == "smollm" else {})
    model, kind, x = quantised(tmp_path, name, **rules), tiny_models.model_class(name), X
    if reload:
        model.save_pretrained(tmp_path / "small")
        model = kind.from_pretrained(tmp_path / "small")
    wanted = logits(model, x)
    dense = model.dequantize()
    assert not [m for m in dense.modules() if isinstance(m, QuantisedLinear)]
    assert not hasattr(dense.config, "quantization_config")
    found = logits(dense, x)
    assert (found - wanted).norm() / wanted.norm() < 0.02
    if name == "gpt2":
        assert type(dense.transformer.h[0].mlp.c_fc) is Conv1D
    if name == "smollm":
        assert dense.lm_head.weight is dense.model.embed_tokens.weight
        assert type(dense.model.embed_tokens) is nn.Embedding
    dense.save_pretrained(tmp_path / "dense")
    again, info = kind.from_pretrained(tmp_path / "dense", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(logits(again, x), found)


def test_dequantise_to_a_dtype(tmp_path):
    model = quantised(tmp_path).dequantize(torch.float32)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32


def test_a_damaged_file(tmp_path):
    model = quantised(tmp_path)
    model.save_pretrained(tmp_path / "small")
    path = tmp_path / "small" / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"up_proj.weight.scale", b"up_proj.weight.elacs"))
    with pytest.raises(ValueError, match=r"needs the tensor .*up_proj\.weight\.scale: missing"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "small")


def test_values_outside_the_valid_range(tmp_path):
    model = quantised(tmp_path)
    layer = model.model.layers[0].mlp.up_proj
    layer.weight_scale.data = torch.full_like(layer.weight_scale, torch.nan)
    model.save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.up_proj"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "small")


def test_a_file_of_another_model(tmp_path):
    quantised(tmp_path).save_pretrained(tmp_path / "small")
    config = AutoConfig.from_pretrained(tmp_path / "small", intermediate_size=96)
    with pytest.raises(ValueError, match=r"of weight \[128, 64\], the model has Linear \[96, 64\]"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "small", config=config)


def test_a_layer_that_the_model_does_not_have(tmp_path):
    """transformers would report its tensors as unexpected, and make up those of the model."""
    quantised(tmp_path).save_pretrained(tmp_path / "small")
    path = tmp_path / "small" / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"mlp.up_proj.weight", b"mlp.pu_proj.weight"))
    with pytest.raises(ValueError, match=r"has no layer 'model\.layers\.0\.mlp\.pu_proj'"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "small")


def test_a_state_dict_is_refused(tmp_path):
    model = quantised(tmp_path)
    with pytest.raises(ValueError, match=r"use fdk_formats\.load_model"):
        type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict())


def test_a_folder_of_the_command_line(tmp_path):
    """python -m fdk_formats writes a folder that from_pretrained opens."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    source, out, text = tmp_path / "source", tmp_path / "out", tmp_path / "text.txt"
    model = tiny_models.make("llama")
    model.save_pretrained(source)
    words = {f"w{i}": i for i in range(128)}
    base = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    base.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=base, unk_token="w0").save_pretrained(source)
    text.write_text(" ".join(f"w{i * 7 % 128}" for i in range(256)))
    arguments = [str(source), "int3-g32", "--out", str(out), "--calibration", str(text)]
    quantise_folder([*arguments, "--length", "32"])
    small = AutoModelForCausalLM.from_pretrained(out)
    assert isinstance(small.model.layers[0].mlp.up_proj, QuantisedLinear)
    loaded = load_model(out / "model.safetensors", tiny_models.make("llama"))
    assert torch.equal(logits(small), logits(loaded))
    names = set(safe_open(out / "model.safetensors", "pt").keys())
    assert "model.layers.0.self_attn.q_proj.weight" in names  # stops loaders without fdk


def test_push_to_hub(tmp_path, monkeypatch):
    """An uploaded folder can be opened by from_pretrained."""
    import transformers.utils.hub as hub

    model = quantised(tmp_path)
    uploaded = {}

    class Hub:
        def create_repo(self, repo_id, **kwargs):
            return type("Repo", (), {"repo_id": repo_id})

    def upload(self, folder, repo_id, **kwargs):
        for file in Path(folder).iterdir():
            uploaded[file.name] = file.read_bytes()

    class Card:
        data = type("Data", (), {"tags": None})

        def save(self, path):
            Path(path).write_text("tags: " + ", ".join(self.data.tags or []))

    monkeypatch.setattr(hub, "hf_api", Hub)
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *args, **kwargs: Card())
    monkeypatch.setattr(type(model), "_upload_modified_files", upload)
    model.push_to_hub("someone/small")
    (tmp_path / "hub").mkdir()
    for name, data in uploaded.items():
        (tmp_path / "hub" / name).write_bytes(data)
    assert {"README.md", "config.json", "model.safetensors"} <= uploaded.keys()
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "hub")), logits(model)
    )


def test_model_card(tmp_path):
    card = model_card(quantised(tmp_path), "someone/small")
    assert "int4-g32" in card
    assert "4.50 bits" in card
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    assert "import fdk_transformers" in code
    quantised(tmp_path).save_pretrained(tmp_path / "small")
    exec(code.replace("someone/small", str(tmp_path / "small")), names := {})
    assert isinstance(names["model"].model.layers[0].mlp.up_proj, QuantisedLinear)
    with pytest.raises(ValueError, match="no quantised layer"):
        model_card(tiny_models.make("llama"), "x")
    assert "BertForMaskedLM.from_pretrained" in model_card(quantised(tmp_path, "bert"), "x")


def test_models_of_quantise_model(tmp_path):
    """save_pretrained of what quantise_model and load_model return writes the folder too."""
    small = quantise_model(tiny_models.make("llama"), "int4-g32", progress=False)
    save_model(tmp_path / "model.safetensors", small)
    loaded = load_model(tmp_path / "model.safetensors", tiny_models.make("llama"))
    wanted = logits(small)  # the loop dequantises the model
    for name, model in {"made": small, "loaded": loaded}.items():
        model.save_pretrained(tmp_path / name)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert torch.equal(logits(again), wanted)
        copied = copy.deepcopy(model).float()  # which transformers refuses for its own
        assert copied.lm_head.weight.dtype == torch.float32
        assert torch.equal(logits(again.dequantize()), logits(model.dequantize()))
