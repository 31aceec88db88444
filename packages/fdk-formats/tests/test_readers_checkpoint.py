"""Folders of safetensors files: what an index says, and what is refused."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from fdk_formats.readers.checkpoint import INDEX, Checkpoint

DEEP = "[" * 100_000


def tensor(value):
    return torch.full((4,), float(value))


def write_index(folder, weight_map):
    (folder / INDEX).write_text(
        json.dumps({"metadata": {"total_size": 48}, "weight_map": weight_map})
    )


@pytest.fixture
def sharded(tmp_path):
    save_file({"a": tensor(0), "b": tensor(1)}, tmp_path / "one.safetensors")
    save_file({"c": tensor(2)}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    return tmp_path


def values(folder, **options):
    return {name: value.tolist()[0] for name, value in Checkpoint(folder, **options).items()}


@pytest.mark.parametrize(
    "stray", ["consolidated.safetensors", "adapter_model.safetensors", "model.safetensors"]
)
@pytest.mark.parametrize("damaged", [False, True])
def test_files_beside_an_index_are_left_alone(sharded, stray, damaged):
    save_file({"a": tensor(7), "z": tensor(8)}, sharded / stray)
    if damaged:
        (sharded / stray).write_bytes(b"damaged")
    assert values(sharded) == {"a": 0, "b": 1, "c": 2}


def test_a_whole_file_without_an_index(tmp_path):
    save_file({"a": tensor(0)}, tmp_path / "model.safetensors")
    save_file({"a": tensor(7), "z": tensor(8)}, tmp_path / "adapter_model.safetensors")
    assert values(tmp_path) == {"a": 0}


def test_files_of_other_names_without_an_index(sharded):
    (sharded / INDEX).unlink()
    assert values(sharded) == {"a": 0, "b": 1, "c": 2}
    save_file({"a": tensor(7)}, sharded / "three.safetensors")
    with pytest.raises(ValueError, match=r"a is both in .*one\.safetensors and in .*three\.safe"):
        Checkpoint(sharded)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"d": "two.safetensors"}, ValueError, r"places d in two\.safetensors, which does not"),
        ({"a": "two.safetensors"}, ValueError, r"places a in two\.safetensors, which does not"),
        ({"d": "gone.safetensors"}, FileNotFoundError, r"no gone\.safetensors in this folder"),
        ({"b": None}, ValueError, r"one\.safetensors: holds b, which the index .* does not place"),
        ({"d": "../x.safetensors"}, ValueError, r"must name files in its folder, got '\.\./x"),
        ({"d": "/x.safetensors"}, ValueError, "must name files in its folder, got '/x"),
        ({"d": ".."}, ValueError, "must name files in its folder"),
        ({"d": ""}, ValueError, "must name files in its folder"),
        ({"d": 3}, ValueError, "must hold names of files, got int"),
        ({"d": "x" * 5000}, FileNotFoundError, "no x* in this folder"),
        ({"d": "folder"}, ValueError, "folder: wanted a file, got a folder"),
        ({"d": "fifo"}, ValueError, "fifo: wanted a regular file, got a FIFO"),
        ({"d": "text"}, ValueError, "text: truncated or no safetensors file"),
        ({"a": None, "b": None, "c": None}, ValueError, "weight_map must name a tensor"),
    ],
    ids=range(14),
)
def test_an_index_that_differs_from_its_files(sharded, change, error, message):
    (sharded / "folder").mkdir()
    os.mkfifo(sharded / "fifo")
    (sharded / "text").write_text("text")
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"] | change
    write_index(sharded, {name: file for name, file in weight_map.items() if file is not None})
    with pytest.raises(error, match=message) as raised:
        Checkpoint(sharded)
    assert str(sharded) in str(raised.value)


def test_a_tensor_in_two_listed_files(sharded):
    save_file({"a": tensor(7), "c": tensor(2)}, sharded / "two.safetensors")
    with pytest.raises(ValueError, match=r"two\.safetensors: holds a, which the index"):
        Checkpoint(sharded)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DEEP, "damaged JSON: nested deeper"),
        ("{}", "weight_map must name a tensor"),
        ('{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}', "'a' occurs twice"),
        ("\udcff".encode("utf-8", "surrogatepass"), "damaged JSON: .*can't decode"),
        ('{"weight_map": []}', "weight_map must be a JSON object, got list"),
    ],
    ids=range(5),
)
def test_a_damaged_index(sharded, text, message):
    (sharded / INDEX).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        Checkpoint(sharded)


def test_an_index_that_is_no_file(sharded):
    (sharded / INDEX).unlink()
    os.mkfifo(sharded / INDEX)
    with pytest.raises(ValueError, match="wanted a regular file, got a FIFO"):
        Checkpoint(sharded)


@pytest.mark.parametrize("name", ["x.safetensors", "model.safetensors"])
def test_a_folder_named_as_a_file(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"{name}: wanted a file, got a folder"):
        Checkpoint(tmp_path)


def test_configurations(sharded):
    checkpoint = Checkpoint(sharded)
    assert checkpoint.config("config.json") == {}
    (sharded / "config.json").write_text('{"time_step_limit": [0.0, Infinity], "q": {"bits": 4}}')
    assert checkpoint.config("config.json", "q") == {"bits": 4}
    assert checkpoint.config("config.json", "other") == {}
    (sharded / "config.json").write_text(DEEP)
    with pytest.raises(ValueError, match=r"config\.json: damaged JSON: nested deeper"):
        checkpoint.config("config.json")


@pytest.mark.parametrize("mmap", [True, False])
def test_a_copy_does_not_depend_on_the_file(sharded, mmap):
    value = Checkpoint(sharded, mmap=mmap)["c"]
    path = sharded / "two.safetensors"
    with open(path, "r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert value.tolist() == [0 if mmap else 2] * 4


def test_links_are_followed(sharded, tmp_path):
    """Snapshots in the cache of huggingface_hub are links."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for name in ("one.safetensors", "two.safetensors", INDEX):
        (snapshot / name).symlink_to(sharded / name)
    assert values(snapshot) == {"a": 0, "b": 1, "c": 2}
