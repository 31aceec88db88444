"""1-Bit-Wonder tensors, by hand and by a packer of the documented rule."""

import json

import pytest
import torch
from safetensors.torch import save_file

from fdk_formats.format import Format
from fdk_formats.readers import load_one_bit_wonder, read_one_bit_wonder

RULES = {1: "absmean", 2: "absmean", 4: "absmax", 8: "rms"}


def make(bits, n=5, k=128, group=64, seed=0):
    """Returns codes and tensors, first code in the most significant bits of a byte."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(1 << bits, (n, k), generator=generator)
    packed = torch.zeros(n, k * bits // 8, dtype=torch.int64)
    for i in range(k):
        byte, place = divmod(i, 8 // bits)
        packed[:, byte] += codes[:, i] * 2 ** (8 - bits * (place + 1))
    scales = torch.rand(n, k // group, generator=generator).to(torch.bfloat16)
    centroids = torch.randn(1 << bits, generator=generator).sort().values
    return codes, (packed.to(torch.uint8), scales, centroids)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("group", [16, 64, 128])
def test_read(bits, group):
    codes, tensors = make(bits, group=group)
    weight = read_one_bit_wonder(*tensors, relative_scale=RULES[bits])
    _, scales, centroids = tensors
    assert weight.format == Format("kmeans", bits, group, RULES[bits])
    assert torch.equal(weight.codes().long(), codes)
    wanted = centroids[codes] * scales.float().repeat_interleave(group, dim=1)
    assert torch.equal(weight.dequantise(), wanted)


def test_read_by_hand():
    """Codes 3 0 1 2 at 2 bits are the byte 0xC6."""
    weight = read_one_bit_wonder(
        torch.full((1, 4), 0xC6, dtype=torch.uint8),
        torch.tensor([[2.0]], dtype=torch.bfloat16),
        torch.tensor([-1.0, -0.5, 0.25, 1.0]),
        relative_scale="absmean",
    )
    assert weight.dequantise().tolist() == [[2.0, -2.0, -1.0, 0.5] * 4]


@pytest.mark.parametrize("where", ["quantization_config.json", "config.json"])
def test_load_folder(tmp_path, where):
    """Two shards with an index, and a norm."""
    config = {"quant_method": "1bw", "bits": 1, "block_size": 64, "relative_scale": "absmean"}
    text = config if where.startswith("quant") else {"quantization_config": config}
    (tmp_path / where).write_text(json.dumps(text))
    wanted, index = {}, {}
    for i, name in enumerate(["model.q_proj", "model.k_proj"]):
        codes, (packed, scales, centroids) = make(1, n=3 + i, seed=i)
        tensors = {
            f"{name}.weight_packed": packed,
            f"{name}.scales": scales,
            f"{name}.centroids": centroids,
            f"model.norm{i}.weight": torch.full((2,), float(i)),
        }
        save_file(tensors, tmp_path / f"model-{i}.safetensors")
        index |= dict.fromkeys(tensors, f"model-{i}.safetensors")
        wanted[f"{name}.weight"] = centroids[codes] * scales.float().repeat_interleave(64, dim=1)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    loaded = load_one_bit_wonder(tmp_path)
    assert loaded.keys() == wanted.keys() | {"model.norm0.weight", "model.norm1.weight"}
    assert loaded["model.norm1.weight"].tolist() == [1.0, 1.0]
    for name, value in wanted.items():
        assert torch.equal(loaded[name].dequantise(), value)


def save_folder(folder, tensors=None, **config):
    _, (packed, scales, centroids) = make(1)
    config = {"bits": 1, "block_size": 64, "relative_scale": "absmean"} | config
    (folder / "quantization_config.json").write_text(json.dumps(config))
    saved = {"q.weight_packed": packed, "q.scales": scales, "q.centroids": centroids}
    saved |= tensors or {}
    saved = {name: tensor for name, tensor in saved.items() if tensor is not None}
    save_file(saved, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"relative_scale": "none"}, "q: 1-Bit-Wonder: relative_scale must be .*, got 'none'"),
        ({"bits": 2}, "q: quantization_config.json has bits 2, the tensors 1"),
        ({"block_size": 32}, "has block_size 32, the tensors 64"),
        ({"tensors": {"q.scales": None}}, r"q needs the tensor q\.scales: missing"),
        ({"tensors": {"q.weight_packed": None}}, r"no tensor is called <name>\.weight_packed"),
    ],
)
def test_bad_folder(tmp_path, change, message):
    with pytest.raises(ValueError, match=message) as error:
        load_one_bit_wonder(save_folder(tmp_path, **change))
    assert str(tmp_path) in str(error.value)


def test_folder_without_relative_scale(tmp_path):
    (save_folder(tmp_path) / "quantization_config.json").unlink()
    with pytest.raises(ValueError, match=r"quantization_config\.json must name the relative_scale"):
        load_one_bit_wonder(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "damaged JSON"), ("[]", "must be a JSON object")]
)
def test_folder_with_a_damaged_config(tmp_path, text, message):
    (save_folder(tmp_path) / "quantization_config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"quantization_config\.json: {message}"):
        load_one_bit_wonder(tmp_path)


def test_folder_with_missing_shard(tmp_path):
    index = {"weight_map": {"q.scales": "model-2.safetensors"}}
    (save_folder(tmp_path) / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match=r"no model-2\.safetensors in this folder"):
        load_one_bit_wonder(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (["q.scales"], "weight_map must be a JSON object, got list"),
        ({"q.scales": ["model-1.safetensors"]}, "weight_map must hold names of files, got list"),
    ],
)
def test_folder_with_a_damaged_index(tmp_path, weight_map, message):
    index = save_folder(tmp_path) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=rf"model\.safetensors\.index\.json: {message}"):
        load_one_bit_wonder(tmp_path)


def test_folder_without_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors in this folder"):
        load_one_bit_wonder(tmp_path)


def test_folder_with_a_tensor_twice(tmp_path):
    (save_folder(tmp_path) / "model.safetensors").rename(tmp_path / "one.safetensors")
    save_file({"q.scales": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"q\.scales is both in .*one.* and in .*other"):
        load_one_bit_wonder(tmp_path)


def test_folder_with_a_truncated_file(tmp_path):
    path = save_folder(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors: truncated"):
        load_one_bit_wonder(tmp_path)


@pytest.mark.parametrize(
    ("at", "tensor", "message"),
    [
        (0, torch.zeros(5, 16), "weight_packed must be torch.uint8, got torch.float32"),
        (0, torch.zeros(16, dtype=torch.uint8), r"weight_packed must be \[any, any\], got \[16\]"),
        (1, torch.zeros(4, 2), r"scales must be \[5, any\], got \[4, 2\]"),
        (1, torch.zeros(5, 3), "scales must divide the k=128 weights of a row, got 3"),
        (1, torch.zeros(5, 2).long(), "scales must be .*bfloat16 or .*, got torch.int64"),
        (2, torch.zeros(3), "centroids must be 2, 4, 16 or 256, got 3"),
        (2, torch.tensor([1.0, -1.0]), r"codebook must be finite and ascend, got \[1.0, -1.0\]"),
        (2, [0.0, 1.0], "centroids must be a tensor, got list"),
    ],
)
def test_bad_tensors(at, tensor, message):
    _, tensors = make(1)
    changed = [tensor if i == at else value for i, value in enumerate(tensors)]
    with pytest.raises((TypeError, ValueError), match=message):
        read_one_bit_wonder(*changed, relative_scale="absmean")
