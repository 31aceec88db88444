"""Layers of a checkpoint, from headers of files and from the hub."""

import json
import types

import pytest
import torch
from safetensors.torch import save_file

from fdk_formats import Format, quantise, quantise_stack, save
from fdk_vllm.checkpoint import (
    EXPERT_RENAMES,
    MODEL_RENAMES,
    fetch_headers,
    read_headers,
    renamed_layer,
    split_name,
    stored_layers,
)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("a.b.weight", ("a.b", "weight")),
        ("a.b.weight.packed", ("a.b", "weight.packed")),
        ("a.b.weight.quant_state.x", ("a.b", "weight.quant_state.x")),
        ("a.b.qweight", ("a.b", "qweight")),
        ("lm_head.weight", ("lm_head", "weight")),
        ("weight", ("", "weight")),
    ],
)
def test_names(name, wanted):
    assert split_name(name) == wanted


def test_packed_and_plain_layers(tmp_path):
    up = quantise(torch.randn(8, 64), "kmeans4-g64")
    tensors = {"up.weight": up, "tied.weight": up, "up.bias": torch.zeros(8)}
    save(tmp_path / "model.safetensors", tensors | {"norm.weight": torch.ones(4).half()})
    layers = stored_layers(read_headers(tmp_path))
    assert layers["up"].format == Format.parse("kmeans4-g64")
    assert layers["up"].shape == (8, 64)
    assert layers["up"].tensors == {
        "weight.packed": torch.uint8,
        "weight.scale": torch.bfloat16,
        "weight.codebook": torch.float32,
    }
    assert layers["tied"] == layers["up"]
    assert layers["norm"].tensors == {"weight": torch.float16}
    assert layers["norm"].format is None


def test_stacks_of_experts(tmp_path):
    stack = quantise_stack(torch.randn(2, 8, 64), "int4-g64")
    save(tmp_path / "model.safetensors", {"mlp.experts.down_proj.weight": stack})
    (layer,) = stored_layers(read_headers(tmp_path)).values()
    assert (layer.format, layer.shape) == (stack.format, (2, 8, 64))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "layers.3.mlp.experts.gate_up_proj",
            "layers.3.block_sparse_moe.experts.routed_experts.w13",
        ),
        ("layers.3.mlp.experts.down_proj", "layers.3.block_sparse_moe.experts.routed_experts.w2"),
        ("layers.3.block_sparse_moe.experts.7.w1", "layers.3.block_sparse_moe.experts.7.w1"),
        ("layers.3.mlp.gate", "layers.3.block_sparse_moe.gate"),
        ("layers.3.mlp.down_proj", "layers.3.mlp.down_proj"),
        ("lm_head", "lm_head"),
    ],
)
def test_names_of_experts(name, wanted):
    renames = MODEL_RENAMES["mixtral"] | EXPERT_RENAMES
    assert renamed_layer(name, renames) == wanted
    assert renamed_layer(wanted, renames) == wanted


def test_shards_that_the_index_names(tmp_path):
    for name in ("a", "b", "c"):
        save(tmp_path / f"{name}.safetensors", {f"{name}.weight": torch.ones(2)})
    index = {"weight_map": {"a.weight": "a.safetensors", "b.weight": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(stored_layers(read_headers(tmp_path))) == {"a", "b"}
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"index\.json names b\.safetensors, not in this folder"):
        read_headers(tmp_path)


def test_a_folder_without_safetensors_has_no_layers(tmp_path):
    assert stored_layers(read_headers(tmp_path)) == {}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"fdk.weights": "["}, "damaged metadata: fdk.weights"),
        ({"fdk.weights": '{"up.weight": {"format": "int4-g64"}}'}, "up.weight must have a format"),
        ({"fdk.weights": '{"up.weight": {"format": "x", "shape": [1, 2]}}'}, "does not start"),
        (
            {"fdk.weights": '{"up.weight": {"format": "int4-g64", "shape": [1]}}'},
            "the shape of up.weight must be 2 integers",
        ),
        ({"fdk.aliases": "1"}, "damaged metadata: fdk.aliases"),
    ],
)
def test_damaged_metadata_are_refused(metadata, message, tmp_path):
    save_file({"up.weight": torch.ones(2)}, tmp_path / "model.safetensors", metadata)
    with pytest.raises(ValueError, match=message):
        stored_layers(read_headers(tmp_path))


def test_headers_of_the_hub(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub", reason="comes with transformers")
    q = quantise(torch.randn(8, 64), "int4-g64")
    save(tmp_path / "model.safetensors", {"up.weight": q})
    (local,) = read_headers(tmp_path)
    tensors = {name: types.SimpleNamespace(dtype=dtype) for name, dtype in local.tensors.items()}
    file = types.SimpleNamespace(metadata=dict(local.metadata), tensors=tensors)
    asked = []

    def get(model, revision=None):
        asked.append((model, revision))
        return types.SimpleNamespace(files_metadata={"model.safetensors": file})

    monkeypatch.setattr(hub, "get_safetensors_metadata", get)
    found = stored_layers(fetch_headers("somebody/model", "main"))
    assert found == stored_layers([local])
    assert asked == [("somebody/model", "main")]

    def absent(model, revision=None):
        raise hub.errors.NotASafetensorsRepoError("none")

    monkeypatch.setattr(hub, "get_safetensors_metadata", absent)
    assert fetch_headers("somebody/model", None) == []
