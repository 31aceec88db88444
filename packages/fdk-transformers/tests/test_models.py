"""The models of transformers: quantised while loading, saved, loaded again, generating."""

import pytest
import tiny_models
import torch
from tiny_models import MODELS

from fdk_formats import QuantisedLinear, load_model, model_report, quantise_model, save_model
from fdk_transformers import FdkConfig

FORMAT = "int4-g32"


def states_equal(a, b):
    """Compares all parameters and buffers."""
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_model(name, tmp_path):
    kind, x, settings = tiny_models.model_class(name), tiny_models.inputs(name), MODELS[name][2]
    tiny_models.make(name).save_pretrained(tmp_path / "source")

    config = FdkConfig(FORMAT, **settings)
    model = kind.from_pretrained(tmp_path / "source", quantization_config=config)
    wanted = quantise_model(
        kind.from_pretrained(tmp_path / "source"), FORMAT, progress=False, **settings
    )
    assert states_equal(model, wanted)
    layers = {layer.name for layer in model_report(model).layers}
    assert layers == {layer.name for layer in model_report(wanted).layers}
    assert len(layers) >= 4
    logits = model(**x).logits
    assert torch.equal(logits, wanted(**x).logits)

    model.save_pretrained(tmp_path / "small")
    again, info = kind.from_pretrained(tmp_path / "small", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert states_equal(again, model)
    assert torch.equal(again(**x).logits, logits)

    if model.can_generate():
        prompt = {key: value for key, value in x.items() if not key.startswith("decoder_")}
        tokens = again.generate(**prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        assert torch.equal(
            tokens, wanted.generate(**prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        )


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_files_are_those_of_fdk_formats(name, tmp_path):
    """load_model opens what save_pretrained wrote, and from_pretrained what save_model wrote."""
    kind, x, settings = tiny_models.model_class(name), tiny_models.inputs(name), MODELS[name][2]
    wanted = quantise_model(tiny_models.make(name), FORMAT, progress=False, **settings)
    logits = wanted(**x).logits
    tiny_models.make(name).save_pretrained(tmp_path)
    config = FdkConfig(FORMAT, **settings)
    model = kind.from_pretrained(tmp_path, quantization_config=config)
    model.save_pretrained(tmp_path / "small")
    loaded = load_model(tmp_path / "small", tiny_models.make(name))
    assert torch.equal(loaded(**x).logits, logits)

    save_model(tmp_path / "small" / "model.safetensors", wanted)
    again, info = kind.from_pretrained(tmp_path / "small", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(again(**x).logits, logits)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_are_left_with_a_warning(name, tmp_path, caplog):
    tiny_models.make(name).save_pretrained(tmp_path)
    with caplog.at_level("WARNING", "fdk_formats"):
        model = tiny_models.model_class(name).from_pretrained(
            tmp_path, quantization_config=FdkConfig(FORMAT)
        )
    assert "3-D parameter" in caplog.text
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.dtype == torch.bfloat16
    assert isinstance(model.model.layers[0].self_attn.q_proj, QuantisedLinear)
