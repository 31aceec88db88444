"""The models of transformers: quantised while loading, saved, loaded again, generating."""

import pytest
import tiny_models
import torch
from tiny_models import MODELS

from fdk_formats import QuantisedExperts, load_model, model_report, quantise_model, save_model
from fdk_transformers import FdkConfig

FORMAT = "int4-g32"


def states_equal(a, b):
    """Compares all parameters and buffers."""
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("name", "format"),
    [(name, FORMAT) for name in MODELS]
    + [(name, "kmeans2-g32-hadamard") for name in ("llama", "qwen3", "gpt2", "mixtral")],
)
@torch.no_grad()
def test_model(name, format, tmp_path):
    kind, x, settings = tiny_models.model_class(name), tiny_models.inputs(name), MODELS[name][2]
    tiny_models.make(name).save_pretrained(tmp_path / "source")

    config = FdkConfig(format, **settings)
    model = kind.from_pretrained(tmp_path / "source", quantization_config=config)
    wanted = quantise_model(
        kind.from_pretrained(tmp_path / "source"), format, progress=False, **settings
    )
    assert {str(layer.format) for layer in model_report(model).layers} == {format}
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


MIXTURES = ["mixtral", "qwen3_moe", "deepseek_v2", "gpt_oss"]


@pytest.mark.parametrize("name", MIXTURES)
@torch.no_grad()
def test_experts_are_those_of_the_dequantised_model(name, tmp_path, caplog):
    """Biases, transposed and interleaved weights included; nothing is left with a warning."""
    source = tiny_models.make(name, torch.float32)
    source.save_pretrained(tmp_path)
    kind, x = tiny_models.model_class(name), tiny_models.inputs(name)
    with caplog.at_level("WARNING", "fdk_formats"):
        model = kind.from_pretrained(tmp_path, quantization_config=FdkConfig(FORMAT))
    assert "3-D parameter" not in caplog.text
    rows = {row.name: row for row in model_report(model).layers}
    stack = rows["model.layers.1.mlp.experts.gate_up_proj"]
    assert stack.shape[::2] == (4, 64)
    assert stack.relative_error is not None
    experts = model.model.layers[1].mlp.experts
    assert isinstance(experts, QuantisedExperts)
    assert experts.is_swiglu == (name != "gpt_oss")
    logits = model(**x).logits
    dense = model.dequantize()
    assert type(dense.model.layers[1].mlp.experts) is type(source.model.layers[1].mlp.experts)
    torch.testing.assert_close(dense(**x).logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@torch.no_grad()
def test_one_projection_of_experts_is_skipped(name, tmp_path):
    tiny_models.make(name).save_pretrained(tmp_path / "source")
    kind, x = tiny_models.model_class(name), tiny_models.inputs(name)
    config = FdkConfig(FORMAT, skip=[r"experts\.down_proj$"])
    model = kind.from_pretrained(tmp_path / "source", quantization_config=config)
    names = {layer.name for layer in model_report(model).layers}
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    assert "model.layers.0.mlp.experts.down_proj" not in names
    logits = model(**x).logits
    model.save_pretrained(tmp_path / "small")
    again, info = kind.from_pretrained(tmp_path / "small", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(again(**x).logits, logits)
