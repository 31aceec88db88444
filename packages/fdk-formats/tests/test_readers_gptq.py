"""GPTQ tensors against a packer written from the layout, and AutoGPTQ's dequantisation."""

import json

import pytest
import torch
from reader_oracles import gptq_dequantise, gptq_layer, pack_rows
from safetensors.torch import save_file

from fdk_formats.format import Format
from fdk_formats.readers import load_gptq, read_gptq, read_gptq_act_order
from fdk_formats.readers.gptq import group_permutation


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
    with pytest.raises(ValueError, match=r"g_idx must be i // 32 .* read_gptq_act_order reads"):
        read_gptq(**tensors, g_idx=order, bits=4)


# Act-order


def shuffled(tensors):
    order = torch.randperm(len(tensors["g_idx"]), generator=torch.Generator().manual_seed(1))
    return tensors | {"g_idx": tensors["g_idx"][order]}


def restored(weight, permutation, dtype=torch.float32):
    """Returns the weight with its columns in the order of the inputs."""
    columns = torch.empty(weight.shape, dtype=dtype)
    columns[:, permutation] = weight.dequantise(dtype)
    return columns


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("act_order", [False, True])
def test_equals_autogptq(bits, dtype, act_order):
    """AutoGPTQ packs a weight, reads it in float32 or fp16 and multiplies by I."""
    n, k, size = 64, 128, 32
    torch.manual_seed(bits)
    layer = gptq_layer(bits, size, k, n, dtype)
    scales = (torch.rand(n, k // size) * 0.1 + 0.05).to(dtype)
    zeros = torch.randint(1, 1 << bits, (n, k // size)).to(dtype)
    g_idx = torch.arange(k, dtype=torch.int32) // size
    if act_order:
        g_idx = g_idx[torch.randperm(k)]
    linear = torch.nn.Linear(k, n, bias=False, dtype=dtype)
    layer.pack(linear, scales, zeros, g_idx)
    names = ("qweight", "qzeros", "scales", "g_idx")
    tensors = {name: getattr(layer, name) for name in names}
    weight, permutation = read_gptq_act_order(**tensors, bits=bits, wrap_zeros=False)
    assert (permutation is not None) == act_order
    found = restored(weight, permutation, dtype) if act_order else weight.dequantise(dtype)
    assert torch.equal(found, gptq_dequantise(bits, tensors))
    x = torch.randn(3, k)
    if act_order:
        y = x[..., permutation] @ weight.dequantise().T
        torch.testing.assert_close(y, x @ restored(weight, permutation).T)


def test_permutation():
    """Inputs of a group keep their order; the codes follow."""
    g_idx = torch.tensor([1, 0, 0, 1, 0, 1], dtype=torch.int32)
    found = group_permutation(g_idx, 6, 2)
    assert found.dtype == torch.int32
    assert found.tolist() == [1, 2, 4, 0, 3, 5]
    assert group_permutation(torch.tensor([0, 0, 1, 1]), 4, 2) is None
    assert group_permutation(torch.tensor([1, 1, 0, 0]), 4, 2).tolist() == [2, 3, 0, 1]


@pytest.mark.parametrize(
    ("g_idx", "message"),
    [
        ([0, 0, 0, 1], "must have each of 0 to 1 2 times, and sorted it has 0 at 2"),
        ([0, 0, 1, 2], "sorted it has 2 at 3"),
        ([-1, 0, 1, 1], "sorted it has -1 at 0"),
        ([0, 0, 1], r"g_idx must be \[4\], got \[3\]"),
    ],
)
def test_groups_that_are_no_permutation(g_idx, message):
    with pytest.raises(ValueError, match=message):
        group_permutation(torch.tensor(g_idx), 4, 2)


def write_folder(folder, tensors, **config):
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 4} | config))
    save_file({f"q.{name}": t for name, t in tensors.items()}, folder / "m.safetensors")


def test_load_folder_in_act_order(tmp_path):
    codes, zeros, tensors = make(4, v1=False)
    tensors = shuffled(tensors)
    config = {"checkpoint_format": "gptq_v2", "desc_act": True, "group_size": 32, "sym": False}
    write_folder(tmp_path, tensors, **config)
    loaded = load_gptq(tmp_path)
    assert loaded.keys() == {"q.weight", "q.input_permutation"}
    groups = tensors["g_idx"].long()
    wanted = ((codes - zeros[groups]).half() * tensors["scales"][groups]).T
    found = restored(loaded["q.weight"], loaded["q.input_permutation"], torch.float16)
    assert torch.equal(found, wanted)


def test_layers_with_settings_of_their_own(tmp_path):
    """Reads 4 bits and, by ``dynamic`` of GPTQModel, 8 bits in groups of 16."""
    saved, wanted = {}, {}
    for name, bits, group in [("a", 4, 32), ("b", 8, 16)]:
        codes, zeros, tensors = make(bits, group=group, v1=False)
        saved |= {f"{name}.{key}": tensor for key, tensor in tensors.items()}
        wanted[f"{name}.weight"] = dequantise(codes, zeros, tensors["scales"], group)
    save_file(saved, tmp_path / "model.safetensors")
    hostile = "(a+)+$"  # never evaluated
    dynamic = {"-:c.*": {}, f"+:{hostile}": {"bits": 8, "group_size": 16}}
    config = {"bits": 4, "group_size": 32, "format": "gptq_v2", "dynamic": dynamic}
    (tmp_path / "quantize_config.json").write_text(json.dumps(config))
    loaded = load_gptq(tmp_path)
    for name, value in wanted.items():
        assert torch.equal(loaded[name].dequantise(torch.float16), value)
    config["dynamic"] = {"b": {"bits": 8}}
    (tmp_path / "quantize_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="b: GPTQ: the configuration has bits 4, the tensors 8"):
        load_gptq(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "awq"}, "GPTQ: quant_method must be gptq, got 'awq'"),
        ({"quant_method": ["gptq"]}, r"quant_method must be gptq, got \['gptq'\]"),
        ({"checkpoint_format": "marlin"}, "must be gptq or gptq_v2, got 'marlin'"),
        ({"is_marlin_format": True}, "must be gptq or gptq_v2, got 'marlin'"),
        ({"format": "bitblas"}, "must be gptq or gptq_v2, got 'bitblas'"),
        ({"checkpoint_format": "gptq", "format": "gptq_v2"}, "got 'gptq', 'gptq_v2'"),
        ({"checkpoint_format": {}}, r"must be gptq or gptq_v2, got \{\}"),
        ({"group_size": 64}, "q: GPTQ: the configuration has group_size 64, the tensors 32"),
        ({"group_size": -1}, "the configuration has group_size -1, the tensors 32"),
        ({"group_size": "32"}, "the configuration has group_size '32', the tensors 32"),
        ({"desc_act": False}, "desc_act is false and g_idx is not in order"),
        ({"sym": True}, r"sym is true and \d+ zero points are not 8"),
        ({"dynamic": [1]}, "dynamic must be an object, got list"),
        ({"dynamic": {"q": 8}}, "dynamic.'q'. must be an object, got 8"),
    ],
)
def test_configurations_that_contradict_the_tensors(tmp_path, config, message):
    _, _, tensors = make(4)
    write_folder(tmp_path, shuffled(tensors), **config)
    with pytest.raises(ValueError, match=message):
        load_gptq(tmp_path, wrap_zeros=True)


def test_act_order_without_groups_of_inputs(tmp_path):
    _, _, tensors = make(4, v1=False)
    del tensors["g_idx"]
    config = {"checkpoint_format": "gptq_v2", "desc_act": True}
    write_folder(tmp_path, tensors, **config)
    with pytest.raises(ValueError, match=r"desc_act is true and g_idx, .*, is missing"):
        load_gptq(tmp_path)
    _, _, tensors = make(4, v1=False, group=96)  # one group: its order does not matter
    del tensors["g_idx"]
    write_folder(tmp_path, tensors, **config, group_size=-1)
    assert load_gptq(tmp_path)["q.weight"].group_size == 96


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_symmetric_folders(tmp_path, bits):
    codes, zeros, tensors = make(bits, symmetric=True)
    write_folder(tmp_path, tensors, sym=True, bits=bits)
    wanted = dequantise(codes, zeros, tensors["scales"], 32)
    assert torch.equal(load_gptq(tmp_path)["q.weight"].dequantise(torch.float16), wanted)


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
        ({"scales": torch.ones(3, 0)}, "scales must have 1 output or more, got 0"),
        ({"scales": torch.ones(3, 32).to_sparse()}, "scales must be a dense tensor, got"),
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
