"""GPTQ tensors against a packer written from the layout, and AutoGPTQ's dequantisation."""

import json

import pytest
import torch
from safetensors.torch import save_file

from fdk_formats.format import Format
from fdk_formats.readers import load_gptq, read_gptq

# AutoGPTQ's three-word pattern of 3-bit codes: word, shift left, shift right. Codes 10 and 21 are
# in two words each.
THREE_BITS = (
    *((0, 3 * i, 0) for i in range(10)),
    ((0, 30, 0), (1, 0, 2)),
    *((1, 3 * i + 1, 0) for i in range(10)),
    ((1, 31, 0), (2, 0, 1)),
    *((2, 3 * i + 2, 0) for i in range(10)),
)


def pack_rows(codes, bits):
    """Packs ``[r, c]`` codes into int32 words down each column, in Python integers."""
    rows, columns = codes.shape
    words = [[0] * columns for _ in range(rows * bits // 32)]
    for i in range(rows):
        if bits == 3:
            places = THREE_BITS[i % 32]
            base, places = i // 32 * 3, places if isinstance(places[0], tuple) else (places,)
        else:
            base, places = i // (32 // bits), ((0, i % (32 // bits) * bits, 0),)
        for column in range(columns):
            for word, shift, down in places:
                moved = (int(codes[i, column]) >> down << shift) & 0xFFFFFFFF
                words[base + word][column] |= moved
    signed = [[w - (1 << 32) if w >> 31 else w for w in row] for row in words]
    return torch.tensor(signed, dtype=torch.int32)


def make(bits, *, k=96, n=32, group=32, v1=True, dtype=torch.float16, symmetric=False, top=None):
    torch.manual_seed(bits)
    codes = torch.randint(1 << bits, (k, n))
    zeros = torch.randint(1, 1 << bits, (k // group, n))  # from 1: format gptq stores zero - 1
    if symmetric:
        zeros[:] = 1 << bits - 1
    if top is not None:
        zeros[0, 0] = top
    scales = (torch.rand(k // group, n) + 0.1).to(dtype)
    stored = (zeros - 1) % (1 << bits) if v1 else zeros
    tensors = {
        "qweight": pack_rows(codes, bits),
        "qzeros": pack_rows(stored.T, bits).T.contiguous(),
        "scales": scales,
        "g_idx": torch.arange(k, dtype=torch.int32) // group,
    }
    return codes, zeros, tensors


def dequantise(codes, zeros, scales, group):
    """Computes ``(code - zero) * scale`` in the scale's dtype, ``[n, k]``."""
    groups = torch.arange(len(codes)) // group
    return ((codes - zeros[groups]).to(scales.dtype) * scales[groups]).T


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("v1", [True, False], ids=["gptq", "gptq_v2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_read(bits, v1, dtype, symmetric):
    codes, zeros, tensors = make(bits, v1=v1, dtype=dtype, symmetric=symmetric)
    name = "gptq" if v1 else "gptq_v2"
    weight = read_gptq(**tensors, bits=bits, checkpoint_format=name)
    suffix = "-fp16" if dtype == torch.float16 else ""
    assert weight.format == Format.parse(f"affine{bits}-g32{suffix}-zint")
    assert weight.shape == (32, 96)
    assert torch.equal(weight.codes().long(), codes.T)
    assert torch.equal(weight.zero_point.long(), zeros.T)
    wanted = dequantise(codes, zeros, tensors["scales"], 32)
    assert torch.equal(weight.dequantise(dtype), wanted)
    assert torch.equal(weight.dequantise(), dequantise(codes, zeros, tensors["scales"].float(), 32))


def test_read_by_hand():
    """At 4 bits the first code is the low nibble, and a stored zero of 6 means 7."""
    weight = read_gptq(
        torch.tensor([[0x76543210] * 8, [-0x01234568] * 8], dtype=torch.int32),  # 0xFEDCBA98
        torch.tensor([[0x66666666]], dtype=torch.int32),
        torch.full((1, 8), 0.5, dtype=torch.float16),
        bits=4,
    )
    assert weight.codes()[0].tolist() == list(range(16))
    assert weight.dequantise()[0].tolist() == [(i - 7) / 2 for i in range(16)]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zero_points_at_the_top(bits):
    """A stored 2^b - 1 is ambiguous: 0 if the sum wraps, else 2^b."""
    top = 1 << bits
    codes, zeros, tensors = make(bits, top=top)
    with pytest.raises(ValueError, match=rf"1 stored zero points are {top - 1}, .* as {top} "):
        read_gptq(**tensors, bits=bits)
    kept = read_gptq(**tensors, bits=bits, wrap_zeros=False)
    wanted = dequantise(codes, zeros, tensors["scales"], 32)
    assert torch.equal(kept.dequantise(torch.float16), wanted)
    assert kept.format.zero_point == ("float" if bits == 8 else "int")  # 256 does not fit a byte
    wrapped = read_gptq(**tensors, bits=bits, wrap_zeros=True)
    wanted = dequantise(codes, zeros % top, tensors["scales"], 32)
    assert torch.equal(wrapped.dequantise(torch.float16), wanted)
    assert wrapped.format.zero_point == "int"


def test_group_order():
    _, _, tensors = make(4)
    order = tensors.pop("g_idx")
    assert torch.equal(
        read_gptq(**tensors, bits=4).packed, read_gptq(**tensors, g_idx=order, bits=4).packed
    )
    order[[5, 40]] = order[[40, 5]]
    with pytest.raises(ValueError, match=r"g_idx must be i // 32 .*, got 1 at 5: .* act-order"):
        read_gptq(**tensors, g_idx=order, bits=4)


@pytest.mark.parametrize("version", ["config.json", "quantize_config.json"])
def test_load_folder(tmp_path, version):
    codes, zeros, tensors = make(4, v1=False)
    config = {"bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}
    text = {"quantization_config": config} if version == "config.json" else config
    (tmp_path / version).write_text(json.dumps(text))
    saved = {f"q.{name}": tensor for name, tensor in tensors.items()}
    save_file(saved | {"q.bias": torch.ones(32)}, tmp_path / "model.safetensors")
    loaded = load_gptq(tmp_path)
    assert loaded.keys() == {"q.weight", "q.bias"}
    wanted = dequantise(codes, zeros, tensors["scales"], 32)
    assert torch.equal(loaded["q.weight"].dequantise(torch.float16), wanted)


def test_duplicate_weight(tmp_path):
    _, _, tensors = make(4, v1=False)
    config = {"bits": 4, "checkpoint_format": "gptq_v2"}
    (tmp_path / "quantize_config.json").write_text(json.dumps(config))
    saved = {f"q.{name}": tensor for name, tensor in tensors.items()}
    save_file(saved | {"q.weight": torch.ones(32, 96)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"q\.weight is stored twice: quantised \(by its \.qweight"
    ):
        load_gptq(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "quantization_config must name the bits"),
        ({"bits": 4, "dynamic": {"q": {"bits": 8}}}, "layers with different bits"),
        ({"bits": 8}, r"q: GPTQ: qzeros must be \[3, 8\], got \[3, 4\]"),
    ],
)
def test_bad_folder(tmp_path, config, message):
    (tmp_path / "quantize_config.json").write_text(json.dumps(config))
    _, _, tensors = make(4)
    save_file({f"q.{name}": t for name, t in tensors.items()}, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=message):
        load_gptq(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "bits must be 2, 3, 4 or 8, got 5"),
        ({"bits": 4.0}, r"bits must be 2, 3, 4 or 8, got 4\.0"),
        ({"checkpoint_format": "marlin"}, "must be gptq or gptq_v2, got 'marlin'"),
        ({"scales": torch.ones(3, 12)}, "n must be a multiple of 8 to fill .* 4 bits, got 12"),
        ({"scales": torch.ones(5, 32)}, r"qzeros must be \[5, 4\], got \[3, 4\]"),
        ({"scales": torch.full((3, 32), torch.inf)}, "GPTQ: scale must be finite, got 96"),
        ({"qweight": torch.zeros(12, 31).int()}, r"qweight must be \[any, 32\], got \[12, 31\]"),
        ({"qweight": torch.zeros(12, 32).long()}, "qweight must be torch.int32, got torch.int64"),
        ({"qweight": torch.zeros(10, 32).int()}, "qweight of 10 rows is k=80 at 4 bits"),
        ({"qweight": torch.zeros(0, 32).int()}, "qweight of 0 rows is k=0"),
        ({"g_idx": torch.zeros(9).int()}, r"g_idx must be \[96\], got \[9\]"),
    ],
)
def test_bad_tensors(change, message):
    _, _, tensors = make(4)
    with pytest.raises((TypeError, ValueError), match=message):
        read_gptq(**{"bits": 4} | tensors | change)


def test_three_bit_rows_fill_runs_of_words():
    _, _, tensors = make(3)
    with pytest.raises(ValueError, match=r"k must be a multiple of 32 to fill .* 3 bits, got 85"):
        read_gptq(**tensors | {"qweight": torch.zeros(8, 32).int()}, bits=3)
