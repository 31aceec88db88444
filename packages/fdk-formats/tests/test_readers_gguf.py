"""GGUF files written by the package gguf, against its own dequantisation."""

import io
import struct

import numpy as np
import pytest
import torch

from fdk_formats import QuantisedTensor
from fdk_formats.readers import load_gguf
from fdk_formats.readers.gguf import (
    ARCHITECTURES,
    LAYER_MODULES,
    MODULES,
    PERMUTED_ARCHITECTURES,
    read_gguf,
)
from fdk_formats.readers.gguf_blocks import BLOCK_TYPES
from fdk_formats.readers.gguf_file import TENSOR_TYPES

gguf = pytest.importorskip("gguf", reason="gguf, which writes the files and is the oracle")

N, K = 6, 512
EXACT = [name for name, block_type in BLOCK_TYPES.items() if block_type.is_exact]
ROUNDED = [name for name, block_type in BLOCK_TYPES.items() if not block_type.is_exact]
# Bytes of the float16 scales and minima in a block, which random bytes would make NaN.
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "MXFP4": [],
}


def random_blocks(name, shape=(N, K), seed=0):
    """Makes blocks of random bytes whose scales are finite and of either sign."""
    rng = np.random.default_rng(seed)
    block = BLOCK_TYPES[name]
    count = np.prod(shape) // block.weights
    blocks = rng.integers(0, 256, (count, block.nbytes), dtype=np.uint8)
    for at in HALVES[name]:
        halves = rng.standard_normal(count).astype(np.float16)
        halves[:2] = 0, -0.0
        halves[2:3] = 6e-8  # subnormal
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(100, 140, count)
    return blocks.reshape(*shape[:-1], -1)


def qtype(name):
    return gguf.GGMLQuantizationType[name]


def oracle(name, data):
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(data, qtype(name)))


def write(path, tensors, *, architecture="llama", alignment=None, **metadata):
    """Writes ``name: (type, data)`` with the package gguf."""
    writer = gguf.GGUFWriter(path, architecture)
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "dé"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5, -1.0])
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    for key, value in metadata.items():
        add = writer.add_array if isinstance(value, list) else writer.add_uint32
        add(f"{architecture}.{key}", value)
    for name, (kind, data) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=qtype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def magnitude(name, data):
    """Returns ``|scale * q| + |minimum|`` of each weight, from the oracle's own values.

    With all codes 0 the oracle gives -minimum.
    """
    block = BLOCK_TYPES[name]
    at = {"Q4_1": 4, "Q5_1": 4, "Q2_K": 16, "Q4_K": 16, "Q5_K": 16}[name]
    end = 80 if name == "Q2_K" else None
    without = data.reshape(-1, block.nbytes).copy()
    without[:, at:end] = 0
    minimum = oracle(name, without.reshape(data.shape))
    return (oracle(name, data).double() - minimum).abs() + minimum.abs()


def test_types_are_those_of_gguf():
    theirs = {
        kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGML_QUANT_SIZES
    }
    assert theirs == TENSOR_TYPES
    for name, block in BLOCK_TYPES.items():
        assert (block.weights, block.nbytes) == gguf.GGML_QUANT_SIZES[qtype(name)]


@pytest.mark.parametrize("name", EXACT)
def test_exact_types_equal_gguf(tmp_path, name):
    data = random_blocks(name)
    weight = load_gguf(write(tmp_path / "m.gguf", {"w": (name, data)}), hf_names=False)["w"]
    assert weight.format == BLOCK_TYPES[name].format
    assert torch.equal(weight.dequantise(), oracle(name, data))


@pytest.mark.parametrize("name", ROUNDED)
def test_types_with_a_minimum_equal_gguf_to_float32_rounding(tmp_path, name):
    data = random_blocks(name)
    weight = load_gguf(write(tmp_path / "m.gguf", {"w": (name, data)}), hf_names=False)["w"]
    assert weight.format == BLOCK_TYPES[name].format
    wanted, found = oracle(name, data).double(), weight.dequantise().double()
    assert bool(((found - wanted).abs() <= 2**-22 * magnitude(name, data)).all())


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_weights_quantised_by_gguf(tmp_path, name):
    """Round trip of a normal weight; equal after rounding to 16 bits but for near-ties."""
    rng = np.random.default_rng(1)
    data = gguf.quants.quantize(rng.standard_normal((N, K)).astype(np.float32), qtype(name))
    weight = load_gguf(write(tmp_path / "m.gguf", {"w": (name, data)}), hf_names=False)["w"]
    wanted = oracle(name, data)
    torch.testing.assert_close(weight.dequantise(), wanted, rtol=0, atol=2e-6)
    if BLOCK_TYPES[name].is_exact:
        assert torch.equal(weight.dequantise(), wanted)


@pytest.mark.parametrize("name", list(BLOCK_TYPES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantise_equals_gguf_exactly(tmp_path, name, dtype):
    """What is returned dense has ggml's own arithmetic, whatever its dimensions."""
    data = random_blocks(name, (2, 3, K))
    path = write(tmp_path / "m.gguf", {"experts": (name, data)})
    with pytest.raises(ValueError, match=r"experts has 3 dimensions.*dequantise=torch\.bfloat16"):
        load_gguf(path, hf_names=False)
    found = load_gguf(path, hf_names=False, dequantise=dtype)["experts"]
    assert torch.equal(found, oracle(name, data).to(dtype))


def test_a_type_without_a_format_is_refused_or_dequantised(tmp_path):
    rng = np.random.default_rng(0)
    data = gguf.quants.quantize(rng.standard_normal((N, K)).astype(np.float32), qtype("TQ2_0"))
    path = write(tmp_path / "m.gguf", {"w": ("TQ2_0", data)})
    with pytest.raises(ValueError, match=r"m\.gguf: w is TQ2_0, which no format holds .*Q4_K"):
        load_gguf(path, hf_names=False)
    found = load_gguf(path, hf_names=False, dequantise=torch.float16)["w"]
    assert torch.equal(found, oracle("TQ2_0", data).half())
    with pytest.raises(TypeError, match=r"must be a floating dtype or None, got torch\.int8"):
        load_gguf(path, dequantise=torch.int8)


def test_a_type_that_gguf_does_not_dequantise(tmp_path):
    path = write(tmp_path / "m.gguf", {"w": ("Q1_0", np.zeros((N, 72), np.uint8))})
    with pytest.raises(ValueError, match="w: gguf does not dequantise Q1_0"):
        load_gguf(path, hf_names=False, dequantise=torch.float16)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, np.int8, np.int32])
def test_plain_tensors_are_unchanged(tmp_path, dtype):
    name = {"float": "F", "int": "I"}[np.dtype(dtype).name.rstrip("0123456789")]
    data = (np.arange(24).reshape(2, 3, 4) - 5).astype(dtype)
    kind = f"{name}{np.dtype(dtype).itemsize * 8}"
    path = write(tmp_path / "m.gguf", {"x": (kind, data), "y": (kind, data[:1])}, alignment=64)
    found = load_gguf(path, hf_names=False)
    assert torch.equal(found["x"], torch.from_numpy(data))
    assert torch.equal(found["y"], torch.from_numpy(data[:1]))


def test_bf16_tensors(tmp_path):
    values = torch.randn(3, 8).bfloat16()
    data = values.view(torch.uint8).numpy()
    found = load_gguf(write(tmp_path / "m.gguf", {"x": ("BF16", data)}), hf_names=False)
    assert torch.equal(found["x"], values)


def test_groups_without_a_scale_hold_their_minimum(tmp_path):
    """A Q4_1 block of equal weights has d = 0 and m: the value is m whatever the codes."""
    data = gguf.quants.quantize(np.full((2, 64), 0.75, np.float32), qtype("Q4_1"))
    assert (data.reshape(-1, 20)[:, :2] == 0).all()
    weight = load_gguf(write(tmp_path / "m.gguf", {"w": ("Q4_1", data)}), hf_names=False)["w"]
    assert torch.equal(weight.dequantise(), torch.full((2, 64), 0.75))


@pytest.mark.parametrize("minimum", [100.0, -100.0])
def test_scales_below_the_spacing_of_the_minimum(tmp_path, minimum):
    """A zero point beyond 2^24 is out of range: the group gets a wider scale."""
    block = np.zeros((1, 20), np.uint8)
    block[0, :4] = np.array([6e-8, minimum], np.float16).view(np.uint8)
    block[0, 4:] = np.arange(16) * 17
    weight = load_gguf(write(tmp_path / "m.gguf", {"w": ("Q4_1", block)}), hf_names=False)["w"]
    assert float(weight.zero_point.abs().max()) == 2**24
    wanted = oracle("Q4_1", block)
    assert bool(((weight.dequantise() - wanted).abs() <= 2**-22 * abs(minimum)).all())


def test_mxfp4_scale_that_e8m0_lacks(tmp_path):
    data = random_blocks("MXFP4", (1, 32))
    data[0, 0] = 0
    path = write(tmp_path / "m.gguf", {"w": ("MXFP4", data)})
    with pytest.raises(ValueError, match=r"w: GGUF: 1 MXFP4 scales are 2\^-127"):
        load_gguf(path, hf_names=False)


@pytest.mark.parametrize("name", [name for name, at in HALVES.items() if at])
def test_scales_that_are_not_finite(tmp_path, name):
    data = random_blocks(name)
    data.reshape(-1, BLOCK_TYPES[name].nbytes)[0, HALVES[name][-1] :][:2] = (0, 0x7C)  # infinity
    if name in ("Q4_K", "Q5_K", "Q2_K", "Q6_K"):  # times scales that are not all 0
        data.reshape(-1, BLOCK_TYPES[name].nbytes)[0, 4:16] = 255
    path = write(tmp_path / "m.gguf", {"w": (name, data)})
    with pytest.raises(ValueError, match=r"m\.gguf: w: GGUF: (scale|zero_point) must be finite"):
        load_gguf(path, hf_names=False)


# Names and order


def test_names_are_those_of_gguf():
    for architecture in ARCHITECTURES:
        kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        table = gguf.get_tensor_name_map(kind, 2)
        for ours, theirs in MODULES.items():
            assert table.get_name(theirs) == ours
        for ours, theirs in LAYER_MODULES.items():
            found = table.get_name(f"model.layers.1.{theirs}")
            assert found == f"blk.1.{ours}" or (found is None and "norm" in ours)


def permute(weights, heads):
    """Reorders the rows of each head as llama.cpp's convert_hf_to_gguf.py does."""
    return weights.reshape(heads, 2, -1, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("per_layer", [False, True])
def test_hugging_face_names_and_rows(tmp_path, architecture, per_layer):
    rng = np.random.default_rng(0)
    made = {
        name: rng.standard_normal((n, 64)).astype(np.float32)
        for name, n in {"q": 32, "k": 16, "v": 16, "embed": 8, "down": 16}.items()
    }
    bias = rng.standard_normal(32).astype(np.float32)
    permuted = architecture in PERMUTED_ARCHITECTURES
    order = permute if permuted else lambda values, heads: values
    stored = {
        "token_embd.weight": ("Q4_1", made["embed"]),
        "blk.0.attn_q.weight": ("Q8_0", order(made["q"], 4)),
        "blk.0.attn_q.bias": ("F32", order(bias, 4)),
        "blk.0.attn_k.weight": ("Q4_1", order(made["k"], 2)),
        "blk.0.attn_v.weight": ("IQ4_NL", made["v"]),
        "blk.0.attn_norm.weight": ("F32", bias),
        "blk.0.ffn_down.weight": ("F16", made["down"].astype(np.float16)),
        "rope_freqs.weight": ("F32", bias),
    }
    quantisable = {"Q8_0", "Q4_1"}
    data = {
        name: (kind, gguf.quants.quantize(value, qtype(kind)) if kind in quantisable else value)
        for name, (kind, value) in stored.items()
    }
    data["blk.0.attn_v.weight"] = ("IQ4_NL", random_blocks("IQ4_NL", (16, 64)))
    heads = {"attention.head_count": 4, "attention.head_count_kv": 2}
    if per_layer:
        heads = {key: [value, 9] for key, value in heads.items()}
    path = write(tmp_path / "m.gguf", data, architecture=architecture, **heads)
    found = load_gguf(path)
    layer = "model.layers.0"
    assert found.keys() == {
        "model.embed_tokens.weight",
        f"{layer}.self_attn.q_proj.weight",
        f"{layer}.self_attn.q_proj.bias",
        f"{layer}.self_attn.k_proj.weight",
        f"{layer}.self_attn.v_proj.weight",
        f"{layer}.input_layernorm.weight",
        f"{layer}.mlp.down_proj.weight",
    }
    # Rows are quantised one by one, so the order before or after makes no difference.
    q = gguf.quants.quantize(made["q"], qtype("Q8_0"))
    assert torch.equal(found[f"{layer}.self_attn.q_proj.weight"].dequantise(), oracle("Q8_0", q))
    assert torch.equal(found[f"{layer}.self_attn.q_proj.bias"], torch.from_numpy(bias))
    k = oracle("Q4_1", gguf.quants.quantize(made["k"], qtype("Q4_1")))
    close = {"rtol": 0, "atol": 2e-6}
    torch.testing.assert_close(found[f"{layer}.self_attn.k_proj.weight"].dequantise(), k, **close)
    embed = oracle("Q4_1", data["token_embd.weight"][1])
    assert torch.equal(found["model.embed_tokens.weight"], embed)
    half = load_gguf(path, dequantise=torch.bfloat16)["model.embed_tokens.weight"]
    assert torch.equal(half, embed.bfloat16())
    kept = load_gguf(path, hf_names=False)
    assert kept.keys() == data.keys()
    assert isinstance(kept["token_embd.weight"], QuantisedTensor)


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ({}, {"architecture": "gemma2"}, r"must be llama, qwen2, qwen3 .*, got 'gemma2'"),
        ({"blk.0.ffn_gate_inp.weight": 2}, {}, r"ffn_gate_inp\.weight has no name in Hugging"),
        ({"blk.00.attn_v.weight": 2}, {}, r"blk\.00\.attn_v\.weight has no name"),
        ({"blk.0.attn_q.weight": 6}, {}, r"head_count must be an integer .*, got None"),
        (
            {"blk.0.attn_q.weight": 6},
            {"heads": 0},
            "head_count must be an integer from 1 .*, got 0",
        ),
        ({"blk.0.attn_q.weight": 6}, {"heads": 2}, "has 6 rows, which 2 heads do not divide"),
        (
            {"blk.3.attn_k.weight": 6},
            {"heads": [3]},
            r"head_count_kv must be an integer .*, got array\(",
        ),
    ],
)
def test_names_that_are_refused(tmp_path, tensors, options, message):
    data = {name: ("F32", np.ones((n, 4), np.float32)) for name, n in tensors.items()}
    options = {{"heads": "attention.head_count"}.get(key, key): v for key, v in options.items()}
    path = write(tmp_path / "m.gguf", data, **options)
    with pytest.raises(ValueError, match=message):
        load_gguf(path)


# Hostile files


def header(tensors=(), metadata=(), *, version=3, counts=None, data=b""):
    """Builds a file byte by byte: ``(name, sizes, type, offset)`` and ``(key, type, bytes)``."""
    count, pairs = counts or (len(tensors), len(metadata))
    out = b"GGUF" + struct.pack("<IQQ", version, count, pairs)
    for key, kind, value in metadata:
        out += text(key) + struct.pack("<I", kind) + value
    for name, sizes, kind, offset in tensors:
        out += text(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        out += struct.pack("<IQ", kind, offset)
    return out + bytes(-len(out) % 32) + data


def text(value):
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


HUGE = 1 << 60
DEEP = struct.pack("<IQ", 9, 1) * 9 + struct.pack("<IQB", 0, 1, 7)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no GGUF file"),
        (b"GGML1234", "no GGUF file: it does not begin with GGUF"),
        (b"GGUF\3", r"truncated or damaged: version is 4 bytes at 4, the file has 5"),
        (header(version=1), "version must be 2 or 3, got 1$"),
        (header(version=3 << 24), r"got 50331648 \(big-endian: convert it first\)"),
        (header(counts=(HUGE, 0)), "the tensor name '' is empty"),
        (header(counts=(0, HUGE)), "truncated or damaged: "),
        (header(metadata=[("a", 8, struct.pack("<Q", HUGE))]), "a is 1152921504606846976 bytes"),
        (header(metadata=[("a", 9, struct.pack("<IQ", 4, HUGE))]), "truncated or damaged: a is"),
        (header(metadata=[("a", 9, struct.pack("<IQ", 8, HUGE))]), "truncated or damaged: a is"),
        (header(metadata=[("a", 9, DEEP)]), "'a' has the unknown type 9, arrays 4 deep"),
        (header(metadata=[("a", 13, b"")]), "metadata 'a' has the unknown type 13"),
        (header(metadata=[("a", 0, b"1"), ("a", 0, b"1")]), "metadata key 'a' occurs twice"),
        (header(metadata=[(b"\xff", 0, b"1")]), "a metadata key is no UTF-8"),
        (
            header(metadata=[("general.alignment", 4, struct.pack("<I", 0))]),
            "general.alignment must be an integer from 1 .*, got 0",
        ),
        (
            header(metadata=[("general.alignment", 4, struct.pack("<I", 12))]),
            "general.alignment must be a multiple of 8, got 12",
        ),
        (
            header(metadata=[("general.alignment", 8, text("32"))]),
            "general.alignment must be an integer from 1 .*, got '32'",
        ),
        (header([("a", (4,), 0, 0)]), r"a \(F32 \[4\]\) ends at byte \d+, the file has"),
        (header([("a", (4,), 99, 0)]), "a has the unknown tensor type 99"),
        (header([("a", (), 0, 0)]), "a must have 1 to 4 dimensions, got 0"),
        (header([("a", (1,) * 5, 0, 0)]), "a must have 1 to 4 dimensions, got 5"),
        (header([("a", (0,), 0, 0)]), r"a \(F32\) must have sizes of 1 or more .*got \[0\]"),
        (header([("a", (48,), 2, 0)]), r"a \(Q4_0\) .* rows of a multiple of 32, got \[48\]"),
        (header([("a", (HUGE, HUGE), 0, 0)]), r"a \(F32 .*\) ends at byte"),
        (header([("a", (4,), 0, 4)]), "a: offset must be a multiple of 32, got 4"),
        (header([("a", (4,), 0, HUGE)], data=bytes(64)), r"a \(F32 \[4\]\) ends at byte"),
        (header([("", (4,), 0, 0)]), "the tensor name '' is empty"),
        (header([("a", (4,), 0, 0)] * 2, data=bytes(64)), "tensor name 'a' occurs twice"),
        (
            header([("a", (16,), 0, 0), ("b", (4,), 0, 32)], data=bytes(64)),
            "a and b overlap at byte",
        ),
    ],
)
def test_malformed_files(tmp_path, content, message):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"m\.gguf: .*{message}"):
        load_gguf(path, hf_names=False)


def test_every_cut_of_a_file_is_refused(tmp_path):
    data = random_blocks("Q4_0", (2, 32))
    whole = write(tmp_path / "m.gguf", {"w": ("Q4_0", data)}).read_bytes()
    end = whole.rindex(data.tobytes()) + data.nbytes
    for size in range(end):
        with pytest.raises(ValueError, match=r"truncated|no GGUF file"):
            read_gguf(io.BytesIO(whole[:size]), hf_names=False)
    assert read_gguf(io.BytesIO(whole[:end]), hf_names=False).keys() == {"w"}


def test_a_file_cut_while_it_is_read():
    class Cut(io.BytesIO):
        def readinto(self, buffer):
            return 0

    file = Cut(header([("a", (4,), 0, 0)], data=bytes(32)))
    with pytest.raises(ValueError, match="a: wanted 16 bytes, the file has 0"):
        read_gguf(file, hf_names=False)


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_gguf(tmp_path / "none.gguf")
    with pytest.raises(ValueError, match="wanted a file, got a folder"):
        load_gguf(tmp_path)
