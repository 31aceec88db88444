"""AWQ tensors against a packer written from the layout."""

import json

import pytest
import torch
from safetensors.torch import save_file

from fdk_formats.format import Format
from fdk_formats.readers import load_awq, read_awq

ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def pack_columns(codes):
    """Packs ``[r, n]`` to ``[r, n/8, int32]``: nibble j of a word is output ORDER[j]."""
    rows = []
    for row in codes.tolist():
        words = [
            sum(row[at + output] << 4 * nibble for nibble, output in enumerate(ORDER))
            for at in range(0, len(row), 8)
        ]
        rows.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def make(k=96, n=24, group=32, dtype=torch.float16):
    torch.manual_seed(0)
    codes, zeros = torch.randint(16, (k, n)), torch.randint(16, (k // group, n))
    scales = (torch.rand(k // group, n) + 0.1).to(dtype)
    tensors = {"qweight": pack_columns(codes), "qzeros": pack_columns(zeros), "scales": scales}
    return codes, zeros, tensors


def dequantise(codes, zeros, scales, group):
    groups = torch.arange(len(codes)) // group
    return ((codes - zeros[groups]).to(scales.dtype) * scales[groups]).T


@pytest.mark.parametrize("group", [16, 32, 96])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_read(group, dtype):
    codes, zeros, tensors = make(group=group, dtype=dtype)
    weight = read_awq(**tensors)
    suffix = "-fp16" if dtype == torch.float16 else ""
    assert weight.format == Format.parse(f"affine4-g{group}{suffix}-zint")
    assert torch.equal(weight.codes().long(), codes.T)
    scales = tensors["scales"]
    assert torch.equal(weight.dequantise(dtype), dequantise(codes, zeros, scales, group))
    assert torch.equal(weight.dequantise(), dequantise(codes, zeros, scales.float(), group))


def test_read_by_hand():
    weight = read_awq(
        torch.full((16, 1), 0x75316420, dtype=torch.int32),
        torch.full((1, 1), 0x11111111, dtype=torch.int32),
        torch.full((1, 8), 2.0, dtype=torch.float16),
    )
    assert weight.dequantise()[:, 0].tolist() == [-2, 0, 2, 4, 6, 8, 10, 12]


def save_folder(folder, config):
    codes, zeros, tensors = make()
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    saved = {f"q.{name}": tensor for name, tensor in tensors.items()}
    save_file(saved | {"q.bias": torch.ones(24)}, folder / "model.safetensors")
    return dequantise(codes, zeros, tensors["scales"], 32)


@pytest.mark.parametrize("config", [{}, {"bits": 4, "version": "gemm"}, {"w_bit": 4}])
def test_load_folder(tmp_path, config):
    wanted = save_folder(tmp_path, config)
    loaded = load_awq(tmp_path)
    assert loaded.keys() == {"q.weight", "q.bias"}
    assert torch.equal(loaded["q.weight"].dequantise(torch.float16), wanted)


@pytest.mark.parametrize("config", [{"bits": 3}, {"bits": 4, "version": "GEMV"}])
def test_other_versions(tmp_path, config):
    save_folder(tmp_path, config)
    with pytest.raises(ValueError, match=r"AWQ must be 4 bits and version gemm, got [34] bits"):
        load_awq(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": torch.ones(3, 20)}, r"scales must be \[k/G, a multiple of 8\], got \[3, 20\]"),
        ({"scales": torch.ones(5, 24)}, r"qzeros must be \[5, 3\], got \[3, 3\]"),
        ({"scales": torch.full((3, 24), torch.nan)}, "AWQ: scale must be finite, got 72"),
        ({"qweight": torch.zeros(96, 3)}, r"qweight must be torch\.int32, got torch\.float32"),
        ({"qweight": torch.zeros(95, 3).int()}, "qweight has k=95 rows, which 3 groups do not"),
    ],
)
def test_bad_tensors(change, message):
    _, _, tensors = make()
    with pytest.raises((TypeError, ValueError), match=message):
        read_awq(**tensors | change)
