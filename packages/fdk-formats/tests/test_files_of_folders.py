"""Folders: models in several files, as transformers saves them."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fdk_formats import load, load_model, quantise, quantise_model, save, save_model
from fdk_formats.files import stored_weights, weights_metadata


def model():
    torch.manual_seed(0)
    layers = nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)
    return quantise_model(nn.Sequential(*layers), "int4-g32", backend="reference", progress=False)


@pytest.fixture
def folder(tmp_path):
    """Two shards and their index: the tensors of one weight are in both."""
    save_model(tmp_path / "whole.safetensors", model())
    tensors = {}
    for name, value in load(tmp_path / "whole.safetensors").items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            tensors |= {f"{name}.{field}": each for field, each in value.tensors().items()}
    (tmp_path / "whole.safetensors").unlink()
    weights = {"0.weight": ("int4-g32", (32, 64)), "2.weight": ("int4-g32", (16, 32))}
    metadata = weights_metadata(weights, {})
    shards = {"a.safetensors": {}, "b.safetensors": {}}
    for i, name in enumerate(sorted(tensors)):
        shards["ab"[i % 2] + ".safetensors"][name] = tensors[name].contiguous()
    for name, part in shards.items():
        save_file(part, tmp_path / name, metadata)
    write_index(tmp_path, {name: file for file, part in shards.items() for name in part})
    return tmp_path


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_one_model(folder):
    wanted = model()
    empty = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
    loaded = load_model(folder, empty, "reference")
    x = torch.randn(3, 64)
    assert torch.equal(loaded(x), wanted(x))
    assert set(load(folder)) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_folder_with_one_file(tmp_path):
    q = quantise(torch.randn(8, 64), "int4-g32")
    save(tmp_path / "model.safetensors", {"weight": q})
    assert torch.equal(load(tmp_path)["weight"].packed, q.packed)


def test_stored_weights_reads_no_tensors(folder):
    files = [folder / "a.safetensors", folder / "b.safetensors"]
    weights, aliases, names = stored_weights(files)
    assert {name: (str(format), shape) for name, (format, shape) in weights.items()} == {
        "0.weight": ("int4-g32", (32, 64)),
        "2.weight": ("int4-g32", (16, 32)),
    }
    assert aliases == {}
    assert {"0.bias", "2.bias", "0.weight.packed"} <= names
    with pytest.raises(ValueError, match=r"needs the tensor 0\.weight\.\w+: missing"):
        stored_weights(files[:1])


def test_a_missing_shard(folder):
    (folder / "a.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no a\.safetensors in this folder"):
        load(folder)


def test_an_index_names_files_of_its_folder(folder):
    write_index(folder, {"0.bias": "../a.safetensors"})
    with pytest.raises(ValueError, match="weight_map must name files in its folder"):
        load(folder)


def test_shards_of_different_models(folder, tmp_path):
    save(tmp_path / "c.safetensors", {"other": torch.ones(1)})
    with pytest.raises(ValueError, match="other metadata than"):
        stored_weights([folder / "a.safetensors", tmp_path / "c.safetensors"])


def test_one_tensor_in_two_shards(folder):
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    with pytest.raises(ValueError, match="is in another file of the model too"):
        stored_weights([folder / "a.safetensors", folder / "b.safetensors"])


def test_an_alias_of_nothing(tmp_path):
    metadata = weights_metadata({}, {"head.weight": "embedding.weight"})
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors", metadata)
    with pytest.raises(ValueError, match="must be a further name of a tensor"):
        stored_weights([tmp_path / "model.safetensors"])


def test_an_empty_tensor_of_a_weights_name(tmp_path):
    """It stops loaders that do not know the format, and ours ignores it."""
    q = quantise(torch.randn(8, 64), "int4-g32")
    tensors = {f"weight.{field}": each for field, each in q.tensors().items()}
    metadata = weights_metadata({"weight": (q.format, q.shape)}, {})
    for size in (0, 1):
        guard = {"weight": torch.empty(size, dtype=torch.uint8)}
        save_file(tensors | guard, tmp_path / "model.safetensors", metadata)
        if size == 0:
            assert torch.equal(load(tmp_path)["weight"].packed, q.packed)
        else:
            with pytest.raises(ValueError, match="is both a weight and a plain tensor"):
                load(tmp_path)


def test_transformers_leaves_quantised_weights_as_they_are():
    from transformers import initialization

    layer = model()[0]
    before = layer.dequantise()
    initialization.normal_(layer.weight)
    assert torch.equal(layer.dequantise(), before)


def test_save_model_for_a_folder(tmp_path):
    from safetensors import safe_open

    for for_folder in (False, True):
        save_model(tmp_path / "model.safetensors", model(), for_folder=for_folder)
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            assert ("0.weight" in file.keys()) == for_folder  # noqa: SIM118
        empty = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
        loaded = load_model(tmp_path, empty, "reference")
        assert torch.equal(loaded[0].dequantise(), model()[0].dequantise())


def test_model_hooks(tmp_path, monkeypatch):
    from fdk_formats.quantised_module import MODEL_HOOKS

    seen = []
    hooks = [*MODEL_HOOKS, seen.append]
    monkeypatch.setattr("fdk_formats.quantised_module.MODEL_HOOKS", hooks)
    made = model()
    save_model(tmp_path / "model.safetensors", made)
    empty = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
    loaded = load_model(tmp_path / "model.safetensors", empty, "reference")
    assert seen == [made, loaded]
