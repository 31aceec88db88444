"""Settings of quantization_config; what they refuse is in test_serving.py too."""

import pytest

from fdk_formats import Format
from fdk_vllm.settings import Settings, format_from_environment


def parsed(**config):
    return Settings.parse({"quant_method": "fdk", "format": "kmeans4-g64"} | config)


@pytest.mark.parametrize(
    ("config", "name", "wanted"),
    [
        ({}, "model.layers.0.mlp.up_proj", "kmeans4-g64"),
        ({}, "lm_head", None),
        ({"default_skip": False}, "lm_head", "kmeans4-g64"),
        ({"skip": None}, "lm_head", "kmeans4-g64"),
        ({"skip": ["up_proj"]}, "model.layers.0.mlp.up_proj", None),
        ({"skip": "up_proj"}, "model.layers.0.mlp.up_proj", None),
        ({"skip": ["up_proj"]}, "lm_head", None),
        ({"modules_to_not_convert": ["mlp"]}, "model.layers.0.mlp.up_proj", None),
        ({"modules_to_not_convert": ["ml"]}, "model.layers.0.mlp.up_proj", "kmeans4-g64"),
        # The first override wins, also over skip.
        ({"overrides": {"head": "int8-g64"}}, "lm_head", "int8-g64"),
        ({"overrides": {"mlp": None, "up": "int8-g64"}}, "model.layers.0.mlp.up_proj", None),
    ],
)
def test_format_of_a_layer(config, name, wanted):
    found = parsed(**config).format_of(name)
    assert found == (None if wanted is None else Format.parse(wanted))


def test_embeddings_are_included_by_request():
    name = "model.embed_tokens"
    assert parsed().format_of(name, "embedding") is None
    assert str(parsed(include=["embedding"]).format_of(name, "embedding")) == "kmeans4-g64"
    assert parsed(include=["embedding"], skip=["embed"]).format_of(name, "embedding") is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"overrides": ["up"]}, "overrides must be of type dict, got"),
        ({"overrides": {"up": "int4"}}, r"overrides\['up'\]: 'int4' names no group size"),
        ({"include": ["bias"]}, "include: wanted a list of embedding or conv1d"),
        ({"skip": [1]}, "skip must be a list of strings, got"),
        ({"modules_to_not_convert": "mlp"}, "modules_to_not_convert must be a list of names"),
        ({"default_skip": "no"}, "default_skip must be of type bool, got 'no'"),
        ({"fuse": "no"}, "fuse must be of type bool, got 'no'"),
        ({"format": "kmeans4g64"}, "format: 'kmeans4g64'"),
    ],
)
def test_refusals_name_the_key(config, message):
    with pytest.raises(ValueError, match=f"quantization_config: {message}"):
        parsed(**config)


def test_packed_checkpoints_need_no_format():
    settings = parsed(format=None)
    assert settings.format_of("lm_head") is None
    with pytest.raises(ValueError, match="up_proj is stored in 16 bits: needs a format, as in"):
        settings.format_of("up_proj")


def test_format_of_the_environment(monkeypatch):
    monkeypatch.delenv("FDK_VLLM_FORMAT", raising=False)
    with pytest.raises(ValueError, match="set FDK_VLLM_FORMAT=kmeans4-g64"):
        format_from_environment()
    monkeypatch.setenv("FDK_VLLM_FORMAT", "int1-g64")
    assert str(Settings.parse(format_from_environment()).format) == "int1-g64"
    monkeypatch.setenv("FDK_VLLM_FORMAT", "int1g64")
    with pytest.raises(ValueError, match="FDK_VLLM_FORMAT=int1g64: format: "):
        format_from_environment()
