"""Files: golden bytes, round trips of tensors and models, and damaged files."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from fdk_formats import (
    QuantisedLinear,
    load,
    load_model,
    parameters_on_meta,
    quantise,
    quantise_model,
    save,
    save_model,
)
from fdk_formats.files import load_metadata
from fdk_formats.format import Format
from fdk_formats.packing import pack
from fdk_formats.tensor import QuantisedTensor

FORMATS = [
    *(f"custom{bits}-g16" for bits in range(1, 9)),
    *(f"custom{bits}-row-fp16-search" for bits in (3, 8)),
    *(f"affine{bits}-g32-fp16" for bits in range(1, 9)),
    *(f"affine{bits}-row-fp32-zint" for bits in range(1, 9)),
    "custom5-g16-e8m0",
    "custom2-g16-hadamard",
    "affine4-g16-e8m0",
    "affine4-g16-e8m0-zint",
    "nf4-g64-fp32",
]


def make_weight(text, n=3, k=192, seed=0):
    """Returns a weight of random codes, scales and table."""
    generator = torch.Generator().manual_seed(seed)
    format = Format.parse(text)
    groups = (n, k // format.group_size_for(k))
    codes = torch.randint(1 << format.bits, (n, k), generator=generator)
    scale = torch.rand(groups, generator=generator) - 0.5
    scale_dtype = format.stored_scale_dtype
    if format.scale_dtype == "e8m0":
        scale = torch.randint(0, 240, groups, generator=generator)  # products are finite
    grid = {}
    if format.is_affine:
        zero = torch.rand(groups, generator=generator) * 15
        grid["zero_point"] = zero.to(format.stored_zero_point_dtype)
    else:
        grid["codebook"] = torch.randn(1 << format.bits, generator=generator).sort().values
    return QuantisedTensor(
        format=format,
        shape=(n, k),
        packed=pack(codes, format.bits),
        scale=scale.to(scale_dtype),
        **grid,
    )


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert raw(a) == raw(b)
        return
    assert a.format == b.format
    assert a.shape == b.shape
    assert a.tensors().keys() == b.tensors().keys()
    for name, tensor in a.tensors().items():
        assert_same(tensor, b.tensors()[name])


def raw(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("text", FORMATS)
def test_round_trip(path, text):
    weight = make_weight(text)
    save(path, {"layer.weight": weight})
    (name, back), *rest = load(path).items()
    assert name == "layer.weight"
    assert not rest
    assert_same(back, weight)


@pytest.mark.parametrize("text", ["custom3-g16", "affine4-row"])
def test_round_trip_of_a_weight_without_rows(path, text):
    weight = make_weight(text, n=0)
    save(path, {"w": weight})
    back = load(path)["w"]
    assert_same(back, weight)
    assert back.dequantise().shape == (0, 192)


def test_round_trip_of_plain_tensors(path):
    torch.manual_seed(0)
    tensors = {
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "bias": torch.nn.Parameter(torch.randn(5)),
        "transposed": torch.randn(3, 5, dtype=torch.bfloat16).T,
        "strided": torch.arange(20, dtype=torch.int16)[::3],
        "mask": torch.tensor([True, False, True]),
        "nan": torch.tensor([math.nan, math.inf, -0.0], dtype=torch.float16),
        "fp8": torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn),
    }
    save(path, tensors)
    back = load(path)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same(back[name], tensor.detach())


def test_golden_file(path):
    """The codes 3 0 1 2 four times are the byte 0xC6 four times."""
    weight = QuantisedTensor(
        format=Format.parse("custom2-g16"),
        shape=(1, 16),
        packed=pack(torch.tensor([[3, 0, 1, 2] * 4]), 2),
        scale=torch.tensor([[1.0]], dtype=torch.bfloat16),
        codebook=torch.tensor([-1.0, 0.0, 1.0, 2.0]),
    )
    save(path, {"w": weight, "b": torch.tensor([7], dtype=torch.uint8)}, metadata={"by": "hand"})
    header = (
        '{"__metadata__":{"by":"hand",'
        '"fdk.aliases":"{}",'
        '"fdk.version":"1",'
        '"fdk.weights":"{\\"w\\": {\\"format\\": \\"custom2-g16\\", \\"shape\\": [1, 16]}}"},'
        '"w.codebook":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
        '"w.scale":{"dtype":"BF16","shape":[1,1],"data_offsets":[16,18]},'
        '"b":{"dtype":"U8","shape":[1],"data_offsets":[18,19]},'
        '"w.packed":{"dtype":"U8","shape":[1,4],"data_offsets":[19,23]}}'
    )
    header += " " * (-len(header) % 8)
    data = bytes.fromhex("000080bf 00000000 0000803f 00000040 803f 07 c6c6c6c6")
    assert path.read_bytes() == len(header).to_bytes(8, "little") + header.encode() + data
    assert load_metadata(path) == {"by": "hand"}


def test_file_is_safetensors(path):
    from safetensors.torch import load_file

    weight = make_weight("affine3-g16")
    save(path, {"w": weight})
    back = load_file(path)
    assert back.keys() == {"w.packed", "w.scale", "w.zero_point"}
    for part, tensor in weight.tensors().items():
        assert_same(back[f"w.{part}"], tensor)


def test_tied_names_come_back_tied(path):
    weight, table = make_weight("custom4-g64"), torch.arange(25.0).view(5, 5)
    again = QuantisedTensor(format=weight.format, shape=weight.shape, **weight.tensors())
    tied = {"head": weight, "embed": again, "a": table, "b": table.view(5, 5), "t": table.T}
    save(path, tied)
    back = load(path)
    assert back["embed"] is back["head"]
    assert back["b"] is back["a"]
    assert back["t"] is not back["a"]  # the same memory, read in another order
    for name, value in tied.items():
        assert_same(back[name], value)


def test_overlapping_memory_is_saved_apart(path):
    base = torch.arange(10.0)
    tensors = {"all": base, "head": base[:4], "tail": base[2:]}
    save(path, tensors)
    back = load(path)
    for name, tensor in tensors.items():
        assert_same(back[name], tensor)


def test_empty_tensors_are_not_tied(path):
    save(path, {"a": torch.empty(0, 2), "b": torch.empty(0, 2)})
    back = load(path)
    assert back["a"] is not back["b"]
    assert [list(tensor.shape) for tensor in back.values()] == [[0, 2], [0, 2]]


def test_loaded_tensors_do_not_write_to_the_file(path):
    save(path, {"a": torch.zeros(4)})
    load(path)["a"].fill_(1)
    assert load(path)["a"].tolist() == [0, 0, 0, 0]


def test_same_tensors_give_same_bytes(path):
    tensors = {"w": make_weight("custom3-g16"), "b": torch.randn(3)}
    save(path, tensors, metadata={"one": "1", "two": "2"})
    first = path.read_bytes()
    save(path, tensors, metadata={"two": "2", "one": "1"})
    assert path.read_bytes() == first


def test_plain_tensor_named_packed(path):
    save(path, {"x.packed": torch.ones(3)})
    assert load(path)["x.packed"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("part", ["packed", "scale", "codebook"])
@pytest.mark.parametrize("first", [True, False])
def test_name_collision(path, part, first):
    named = [("x", make_weight("custom4-g64")), (f"x.{part}", torch.ones(3))]
    with pytest.raises(ValueError, match=rf"save: x\.{part} is used twice"):
        save(path, dict(named if first else reversed(named)))
    assert not path.exists()


def test_alias_collision(path):
    tensor = torch.ones(2)
    with pytest.raises(ValueError, match=r"save: x\.scale is used twice"):
        save(path, {"a": tensor, "x.scale": tensor, "x": make_weight("custom4-g64")})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "x must be a QuantisedTensor or a tensor, got list"),
        (torch.ones(2, dtype=torch.complex64), r"x must be one of .*, got torch\.complex64"),
        (torch.eye(2).to_sparse(), "x must be a dense tensor with data, got torch.sparse_coo"),
        (torch.empty(2, device="meta"), "x must be a dense tensor with data, got .* on meta"),
    ],
    ids=["list", "complex", "sparse", "meta"],
)
def test_unsupported_values(path, value, message):
    with pytest.raises(TypeError, match=message):
        save(path, {"x": value})


def test_save_requires_a_mapping(path):
    with pytest.raises(TypeError, match="save: wanted a mapping of names to tensors, got list"):
        save(path, [torch.ones(2)])
    assert not path.exists()


@pytest.mark.parametrize("name", ["", "__metadata__", 3])
def test_bad_name(path, name):
    with pytest.raises(ValueError, match="a name must be a string that is not empty"):
        save(path, {name: torch.ones(1)})


def test_bad_metadata(path):
    with pytest.raises(TypeError, match="metadata must be strings, got 'epoch': 3"):
        save(path, {}, metadata={"epoch": 3})
    with pytest.raises(ValueError, match=r"keys with 'fdk\.' are reserved, got 'fdk\.version'"):
        save(path, {}, metadata={"fdk.version": "9"})


def test_failed_save_leaves_the_old_file_and_no_other(path, monkeypatch):
    save(path, {"a": torch.ones(2)})

    def full(_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        save(path, {"a": torch.zeros(2)})
    assert os.listdir(path.parent) == [path.name]
    assert load(path)["a"].tolist() == [1, 1]


LONE = "\udcff"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metadata": {"x": LONE}}, "truncated or no safetensors file"),
        ({"metadata": {LONE: "x"}}, "truncated or no safetensors file"),
        ({"tensors": {LONE: torch.zeros(2)}}, "truncated or no safetensors file"),
        ({"tensors": {LONE: make_weight("custom4-g64")}}, "truncated or no safetensors file"),
        ({"metadata": {"x": "y" * 101_000_000}}, "truncated or no safetensors file"),
    ],
    ids=["metadata", "key", "tensor", "weight", "large"],
)
def test_a_header_that_cannot_be_read_back_replaces_nothing(path, arguments, message):
    save(path, {"a": torch.ones(3)})
    arguments = {"tensors": {"a": torch.zeros(3)}} | arguments
    with pytest.raises(ValueError, match=f"save: .* cannot be read back, .*: {message}") as error:
        save(path, **arguments)
    assert "fdk-" not in str(error.value)  # the temporary file
    assert os.listdir(path.parent) == [path.name]
    assert load(path)["a"].tolist() == [1, 1, 1]


def test_a_bool_that_load_would_refuse_replaces_nothing(path):
    save(path, {"a": torch.ones(3)})
    with pytest.raises(ValueError, match="save: a: a bool must be a byte of 0 or 1"):
        save(path, {"a": torch.tensor([0, 1, 2], dtype=torch.uint8).view(torch.bool)})
    assert load(path)["a"].tolist() == [1, 1, 1]


def test_a_lone_surrogate_in_an_alias(path):
    tensor = torch.ones(2)
    with pytest.raises(ValueError, match=r"cannot be read back, .*surrogates"):
        save(path, {"a": tensor, LONE: tensor})
    assert os.listdir(path.parent) == []


def test_names_and_metadata_of_any_unicode_text(path):
    text = '\0\n"\\/\u00e9\u2028\ufffe\U0001f600'
    tensors = {text: torch.ones(2), f"{text}w": make_weight("custom4-g64")}
    save(path, tensors, metadata={text: text})
    assert load(path).keys() == tensors.keys()
    assert load_metadata(path) == {text: text}


def test_save_into_no_folder(path):
    with pytest.raises(FileNotFoundError):
        save(path.parent / "nowhere" / "x", {"a": torch.ones(2)})


def test_save_through_a_link(path):
    link = path.parent / "link"
    save(path, {"a": torch.ones(2)})
    link.symlink_to(path)
    save(link, {"a": torch.zeros(2)})
    assert link.is_symlink()
    assert load(path)["a"].tolist() == [0, 0]


def test_pickle_is_refused_and_not_run(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    path.write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    with pytest.raises(ValueError, match="truncated or no safetensors file"):
        load(path)
    assert os.listdir() == [path.name]


# Damaged files: save a file, change its header or tensors, and check the error of load.
def read_parts(path):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def write_parts(path, header, data):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def damage_metadata(path, **changes):
    header, data = read_parts(path)
    for key, value in changes.items():
        metadata = header["__metadata__"]
        metadata.pop(f"fdk.{key}")
        if value is not None:
            metadata[f"fdk.{key}"] = value if isinstance(value, str) else json.dumps(value)
    write_parts(path, header, data)


def weights(format="custom4-g64", shape=(3, 192)):
    return {"w": {"format": format, "shape": shape}}


@pytest.fixture
def saved(path):
    save(path, {"w": make_weight("custom4-g64"), "b": torch.ones(3)})
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": None}, r"not a file of fdk: no fdk\.version"),
        ({"version": "2"}, r"fdk\.version must be 1, got 2"),
        ({"weights": None}, r"damaged metadata: fdk\.weights is missing"),
        ({"weights": "{"}, r"damaged metadata: fdk\.weights: damaged JSON"),
        ({"weights": "[" * 100_000}, r"damaged metadata: fdk\.weights: damaged JSON"),
        ({"weights": []}, r"fdk\.weights: must be a JSON object, got \[\]"),
        ({"weights": {"w": {}}}, r"w must have a format and a shape, got \{\}"),
        ({"weights": {"w": 3}}, "w must have a format and a shape, got 3"),
        ({"weights": weights("kmeans9-g64")}, "w: format: kmeans takes 1 to 8 bits, got 9"),
        ({"weights": weights("zip4-g64")}, "w: format: codebook must be one of .*, got 'zip'"),
        ({"weights": weights(4)}, "w: format: wanted a string or a Format, got int"),
        ({"weights": weights(shape=[3])}, r"shape of w must be 2 integers.*, got \[3\]"),
        (
            {"weights": weights(shape=[3, -192])},
            r"must be 2 integers of 0 or more, got \[3, -192\]",
        ),
        (
            {"weights": weights(shape=[3, 192.0])},
            r"must be 2 integers of 0 or more, got \[3, 192\.0\]",
        ),
        (
            {"weights": weights(shape=[True, 192])},
            r"must be 2 integers of 0 or more, got \[True, 192\]",
        ),
        ({"weights": weights(shape=[3, 0])}, r"shape of w must have k of 1 or more, got \[3, 0\]"),
        ({"weights": weights(shape="ab")}, "must be 2 integers of 0 or more, got 'ab'"),
        ({"weights": weights(shape=[3, 100])}, "k must be a positive multiple of 64, got k=100"),
        ({"weights": weights(shape=[3, 1 << 62])}, r"shape of w must have at most \d+ elements"),
        (
            {"weights": weights(shape=[3, 1 << 60])},
            r"w: .*packed of a \[3, \d+\] weight must be \[3, \d+\], got \[3, 96\]",
        ),
        ({"weights": '{"w": 1, "w": 2}'}, r"fdk\.weights: damaged JSON: the key 'w' occurs twice"),
        ({"aliases": '{"c": "b", "c": "b"}'}, r"fdk\.aliases: damaged JSON: .* 'c' occurs twice"),
        ({"weights": '{"\\ud800": 1}'}, r"fdk\.weights: damaged JSON: .*surrogates"),
        ({"weights": '{"w": Infinity}'}, r"fdk\.weights: damaged JSON: a number must be finite"),
        ({"weights": weights("custom5-g64")}, r"packed .* must be \[3, 120\], got \[3, 96\]"),
        ({"weights": weights("custom4-g64-fp16")}, r"scale must be .*float16, got .*bfloat16"),
        ({"weights": weights("affine4-g64")}, r"w \(affine4-g64\) needs .* w\.zero_point: missing"),
        ({"weights": {"v": weights()["w"]}}, r"v \(custom4-g64\) needs the tensor v\.packed"),
        ({"aliases": None}, r"fdk\.aliases is missing"),
        ({"aliases": {"c": "nothing"}}, "c must be a further name of a tensor .*, got 'nothing'"),
        ({"aliases": {"c": "d", "d": "b"}}, "c must be a further name of a tensor .*, got 'd'"),
        ({"aliases": {"b": "w"}}, "b must be a further name"),
        ({"aliases": {"c": 3}}, "c must be a further name of a tensor in the file, got 3"),
    ],
)
def test_damaged_metadata(saved, changes, message):
    damage_metadata(saved, **changes)
    with pytest.raises(ValueError, match=message) as error:
        load(saved)
    assert str(saved) in str(error.value)


def test_weight_and_plain_tensor_of_one_name(path):
    save(path, {"w": make_weight("custom4-g64"), "v": torch.ones(3)})
    header, data = read_parts(path)
    header["w"] = header.pop("v")
    write_parts(path, header, data)
    with pytest.raises(ValueError, match="w is both a weight and a plain tensor"):
        load(path)


@pytest.mark.parametrize("keep", [0, 5, 8, 40, -1])
def test_truncated_file(saved, keep):
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(ValueError, match="truncated or no safetensors file") as error:
        load(saved)
    assert str(saved) in str(error.value)


def test_truncations_and_flipped_header_bits_raise_value_errors(path):
    weight = make_weight("custom1-g16", n=1, k=16)
    save(path, {"w": weight})
    data = path.read_bytes()
    header = int.from_bytes(data[:8], "little") + 8
    for keep in range(len(data)):
        path.write_bytes(data[:keep])
        with pytest.raises(ValueError, match="truncated"):
            load(path)
    caught = 0
    for at in range(header):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        try:
            load(path)
        except ValueError:
            caught += 1
    assert caught > 0.8 * header


def test_missing_file(path):
    with pytest.raises(FileNotFoundError):
        load(path)


@pytest.mark.parametrize("read", [load, load_metadata])
def test_fifo_instead_of_a_file(path, read):
    os.mkfifo(path)
    with pytest.raises(ValueError, match="wanted a regular file, got a FIFO"):
        read(path)


@pytest.mark.parametrize("shape", [[0, 1 << 62, 4], [1 << 62, 0, 1 << 62]])
def test_shapes_that_torch_cannot_hold(path, shape):
    save(path, {"a": torch.empty(0)})
    header, data = read_parts(path)
    header["a"]["shape"] = shape
    write_parts(path, header, data)
    with pytest.raises(ValueError, match="a: shape must have at most 9223372036854775807 elements"):
        load(path)


@pytest.mark.parametrize("read", [load, load_metadata])
def test_folder_instead_of_a_file(tmp_path, read):
    with pytest.raises(IsADirectoryError, match="wanted a file, got a folder") as error:
        read(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_dtype_of_a_part_changed(saved):
    header, data = read_parts(saved)
    header["w.packed"]["dtype"] = "I8"
    write_parts(saved, header, data)
    with pytest.raises(ValueError, match=r"w: .*packed must be torch\.uint8, got torch\.int8"):
        load(saved)


BAD_VALUES = [
    ("custom4-g64", "scale", math.nan, "scale must be finite, got 1 that are not"),
    ("custom4-g64-fp16", "scale", -math.inf, "scale must be finite, got 1 that are not"),
    ("custom4-g64-e8m0", "scale", 255, "scale must be finite, got 1 that are not"),
    ("affine4-g64", "zero_point", math.inf, "zero_point must be finite, got 1 that are not"),
    ("custom4-g64", "codebook", math.nan, "codebook must be finite and ascend"),
    ("custom4-g64", "codebook", math.inf, "codebook must be finite and ascend"),
    ("custom4-g64", "codebook", 100.0, "codebook must be finite and ascend"),
    ("custom4-g64", "codebook", -65505.0, r"codebook must be within \+-65504, got 65505; divide"),
    ("custom4-g64-fp32", "scale", 3.4e38, "scale must have finite float32 products .*, got 1"),
    ("custom4-g64-e8m0", "scale", 254, "scale must have finite float32 products .*, got 1"),
    (
        "affine4-g64-fp32",
        "zero_point",
        -(2.0**24 + 2),
        r"zero_point must be within \+-2\^24, got 1",
    ),
    ("affine4-g64-fp32", "scale", -3e37, "scale must have finite float32 products .*, got 1"),
]


@pytest.mark.parametrize(("text", "part", "value", "message"), BAD_VALUES)
def test_bad_values(path, text, part, value, message):
    weight = make_weight(text)
    save(path, {"w": weight})
    header, data = read_parts(path)
    tensor = getattr(weight, part).clone()
    tensor.view(-1)[0] = value
    start, end = header[f"w.{part}"]["data_offsets"]
    write_parts(path, header, data[:start] + bytes(raw(tensor)) + data[end:])
    with pytest.raises(ValueError, match=f"w: {message}"):
        load(path)
    with pytest.raises(ValueError, match=f"save: w: {message}"):
        save(path, {"w": QuantisedTensor(**vars(weight) | {part: tensor})})


def test_repeated_codebook_entries_are_allowed(path):
    weight = make_weight("custom2-g64")
    weight.codebook.copy_(torch.tensor([-1.0, 0.0, 0.0, 1.0]))
    save(path, {"w": weight})
    assert_same(load(path)["w"], weight)


def test_save_replaces_the_file_and_never_writes_into_it(tmp_path):
    path, old = tmp_path / "weights", tmp_path / "old"
    save(path, {"x": torch.zeros(4)})
    os.link(path, old)  # stands for a reader with the file open
    save(path, {"x": torch.ones(4)})
    assert load(old)["x"].tolist() == [0, 0, 0, 0]
    assert load(path)["x"].tolist() == [1, 1, 1, 1]


def test_views_that_negate_and_odd_strides(tmp_path):
    ones, complex_one = torch.ones(3), torch.tensor([1 + 2j])
    given = {
        "ones": ones,
        "less": torch._neg_view(ones),
        "imaginary": complex_one.imag,  # one element, stride 2
        "conjugate": complex_one.conj().imag,
    }
    save(tmp_path / "x.safetensors", given)
    loaded = load(tmp_path / "x.safetensors")
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
        "ones": [1, 1, 1],
        "less": [-1, -1, -1],
        "imaginary": [2],
        "conjugate": [-2],
    }


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_wide_unsigned_integers(dtype, tmp_path):
    given = torch.tensor([0, 1, torch.iinfo(dtype).max], dtype=dtype)
    save(tmp_path / "x.safetensors", {"x": given})
    loaded = load(tmp_path / "x.safetensors")["x"]
    assert loaded.dtype == dtype
    assert torch.equal(loaded, given)


def test_a_file_that_is_replaced_keeps_its_mode(tmp_path):
    path = tmp_path / "x.safetensors"
    save(path, {"x": torch.ones(1)})
    path.chmod(0o600)
    save(path, {"x": torch.zeros(1)})
    assert path.stat().st_mode & 0o777 == 0o600
    assert load(path)["x"] == 0


class Net(nn.Module):
    """A model with tied linear layers, a head tied to the embedding, and a buffer."""

    def __init__(self, k=32):
        super().__init__()
        self.embed = nn.Embedding(20, k)
        self.first = nn.Linear(k, k)
        self.second = nn.Linear(k, k, bias=False)
        self.second.weight = self.first.weight
        self.lm_head = nn.Linear(k, 20, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor([3]))

    def forward(self, ids):
        y = self.lm_head(self.second(torch.relu(self.first(self.embed(ids)))))
        return y


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def net(seed=0, k=32):
    torch.manual_seed(seed)
    return Net(k)


def quantised(model):
    return quantise_model(model, "kmeans4-g32", backend="reference", progress=False)


@pytest.fixture
def model_path(tmp_path):
    save_model(tmp_path / "net.safetensors", quantised(net()), metadata={"made": "here"})
    return tmp_path / "net.safetensors"


def test_the_file_is_canonical(model_path):
    tensors = load(model_path)
    expected = ["embed.weight", "first.bias", "first.weight", "lm_head.weight", "second.weight"]
    assert sorted(tensors) == [*expected, "steps"]
    q = quantise(net().first.weight, "kmeans4-g32")
    assert torch.equal(tensors["first.weight"].packed, q.packed)
    assert tensors["first.weight"] is tensors["second.weight"]
    assert tensors["embed.weight"] is tensors["lm_head.weight"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_load_model(model_path, device):
    with torch.device(device):
        skeleton = net(seed=1)
    model = load_model(model_path, skeleton, backend="reference")
    assert torch.equal(model(IDS), quantised(net())(IDS))
    assert isinstance(model.first, QuantisedLinear)
    assert model.first.stored is model.second.stored
    assert model.lm_head.weight is model.embed.weight
    assert model.steps.tolist() == [3]
    assert type(skeleton.first) is nn.Linear
    assert skeleton.embed.weight.device.type == device


def test_a_single_layer(tmp_path):
    source = QuantisedLinear.from_linear(nn.Linear(32, 8), "nf4-g16", backend="reference")
    save_model(tmp_path / "layer", source)
    layer = load_model(tmp_path / "layer", nn.Linear(32, 8), backend="reference")
    x = torch.randn(3, 32)
    assert torch.equal(layer(x), source(x))


def test_model_must_be_a_module(tmp_path):
    with pytest.raises(TypeError, match="model must be a module, got Tensor"):
        save_model(tmp_path / "x", torch.ones(3))


def test_errors_name_tensors_that_do_not_fit(model_path, tmp_path):
    with pytest.raises(ValueError, match=r"needs a Linear, .* of weight \[32, 32\], .*\[64, 64\]"):
        load_model(model_path, net(k=64), backend="reference")
    with pytest.raises(ValueError, match=r"first\.weight: the model has no layer 'first'"):
        load_model(model_path, nn.Module(), backend="reference")
    other = net()
    other.extra = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"missing extra\.weight, extra\.bias; unexpected nothing"):
        load_model(model_path, other, backend="reference")
    save(tmp_path / "more", load(model_path) | {"surplus": torch.ones(1)})
    with pytest.raises(ValueError, match="missing nothing; unexpected surplus"):
        load_model(tmp_path / "more", net(), backend="reference")
    save(tmp_path / "steps", load(model_path) | {"steps": torch.ones(2, dtype=torch.int64)})
    with pytest.raises(ValueError, match=r"(?s)does not fit the model: .*size mismatch for steps"):
        load_model(tmp_path / "steps", net(), backend="reference")


def test_buffers_that_state_dict_leaves_out_are_kept(tmp_path):
    source = net()
    source.register_buffer("inv_freq", torch.tensor([1.0, 0.5]), persistent=False)
    save_model(tmp_path / "net", quantised(source))
    with torch.device("meta"):
        skeleton = net()
        skeleton.register_buffer("inv_freq", torch.ones(2), persistent=False)
    model = load_model(tmp_path / "net", skeleton, backend="reference")
    assert model.inv_freq.tolist() == [1.0, 0.5]
    assert "inv_freq" not in model.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_result_has_the_dtype_of_the_model(tmp_path, dtype):
    save_model(tmp_path / "net", quantised(net().to(torch.bfloat16)))
    model = load_model(tmp_path / "net", net().to(dtype), backend="reference")
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {dtype}
    assert model(IDS).dtype == dtype


def test_a_missing_buffer_cannot_come_from_meta(model_path):
    with torch.device("meta"):
        skeleton = net()
        skeleton.register_buffer("inv_freq", torch.ones(2), persistent=False)
    with pytest.raises(ValueError, match="holds no inv_freq, which the model has on the meta"):
        load_model(model_path, skeleton, backend="reference")


class Table(nn.Module):
    """A frozen embedding, a buffer of integers and one that ``state_dict`` leaves out."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4).requires_grad_(False)
        self.register_buffer("steps", torch.tensor([3]))
        self.register_buffer("freq", torch.ones(2), persistent=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("embed.weight", torch.arange(32).view(8, 4).bool()),
        ("embed.weight", torch.arange(32, dtype=torch.uint8).view(8, 4)),
        ("embed.weight", torch.arange(32).view(8, 4)),
        ("steps", torch.tensor([3.0])),
        ("steps", torch.tensor([3], dtype=torch.int32)),
        ("steps", torch.tensor([True])),
        ("freq", torch.tensor([1, 2])),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value.dtype),
)
@pytest.mark.parametrize("by_path", [True, False], ids=["path", "mapping"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_only_floating_tensors_are_cast(tmp_path, name, value, by_path, device):
    good = {"embed.weight": torch.ones(8, 4, dtype=torch.bfloat16), "steps": torch.tensor([4])}
    with torch.device(device):
        model = Table()
    if device == "meta":
        good["freq"] = torch.ones(2, dtype=torch.float64)
    assert load_model(good, model).embed.weight.dtype == torch.float32
    source = good | {name: value}
    if by_path:
        save(tmp_path / "x", source)
        source = tmp_path / "x"
    with pytest.raises(ValueError, match=rf"{name} must be torch\.\w+ as in the model, got"):
        load_model(source, model)


def test_a_bias_of_integers_is_refused():
    source = {
        "weight": quantise(torch.randn(8, 32), "nf4-g16"),
        "bias": torch.ones(8, dtype=torch.int8),
    }
    with pytest.raises(
        ValueError, match=r"bias must be torch\.float32 as in the model, got .*int8"
    ):
        load_model(source, nn.Linear(32, 8), backend="reference")


USE_AFTER_CHANGE = """
import os, sys, torch
from torch import nn
from fdk_formats import load, load_model, quantise, save

path, how, change = sys.argv[1:]
n, k = 256, 4096  # more than a page of each tensor
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(k, n), nn.Linear(n, k))
save(path, {
    "0.weight": quantise(model[0].weight.detach(), "nf4-g64-fp32"),
    **{name: value for name, value in model.state_dict().items() if name != "0.weight"},
})
if how == "load":
    tensors = load(path, mmap=False)
    use = lambda: [t for v in tensors.values()
                   for t in ([v.dequantise()] if hasattr(v, "dequantise") else [v.clone()])]
else:
    loaded = load_model(path, model, backend="reference", mmap=how == "mapped")
    x = torch.randn(2, k)
    use = lambda: [loaded(x).detach()]
before = None if change == "truncate" and how == "mapped" else use()
if change == "truncate":
    os.truncate(path, 100)
else:
    size = os.path.getsize(path)
    with open(path, "r+b") as file:
        file.write(bytes(size))
after = use()
same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
print("same" if same else "changed")
"""


@pytest.mark.parametrize("change", ["truncate", "overwrite"])
@pytest.mark.parametrize("how", ["load", "copied"])
def test_a_copying_load_does_not_depend_on_the_file(path, how, change):
    command = [sys.executable, "-c", USE_AFTER_CHANGE, str(path), how, change]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout) == (0, "same\n"), run.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="documents what a map does on Linux")
@pytest.mark.parametrize(("change", "result"), [("truncate", -7), ("overwrite", "changed\n")])
def test_a_mapped_load_does(path, change, result):
    command = [sys.executable, "-c", USE_AFTER_CHANGE, str(path), "mapped", change]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result in (run.returncode, run.stdout), run.stderr


class Counter(nn.Module):
    """A module whose state is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def get_extra_state(self):
        return torch.tensor(self.count)

    def set_extra_state(self, state):
        self.count = int(state)


def test_extra_state_is_stored(tmp_path):
    model = nn.Sequential(nn.Linear(64, 4), Counter())
    model[1].count = 7
    small = quantise_model(model, "int4-g64", backend="reference", progress=False)
    save_model(tmp_path / "m.safetensors", small)
    model[1].count = 0
    again = load_model(tmp_path / "m.safetensors", model, backend="reference")
    assert again[1].count == 7


class Normed(nn.Module):
    """A layer and a BatchNorm, whose buffers are in ``state_dict``."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x):
        y = self.norm(self.linear(x))
        return y


def test_buffers_have_the_dtype_of_the_model(tmp_path):
    model = Normed()
    model.norm.running_mean += 1.5
    save_model(tmp_path / "m.safetensors", quantise_model(model, "int4-g32", backend="reference"))
    loaded = load_model(tmp_path / "m.safetensors", Normed().bfloat16().eval(), "reference")
    assert isinstance(loaded, Normed)
    assert loaded.norm.running_mean.dtype == torch.bfloat16
    assert loaded.norm.running_mean.tolist() == [1.5] * 32
    assert loaded.norm.num_batches_tracked.dtype == torch.int64
    assert loaded(torch.ones(2, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_ties_of_the_file_and_of_the_model(model_path):
    apart = net()
    apart.lm_head.weight = nn.Parameter(apart.lm_head.weight.detach().clone())
    loaded = load_model(model_path, apart, "reference")
    assert isinstance(loaded, Net)
    assert torch.equal(loaded.lm_head.weight, loaded.embed.weight)
    loaded.embed.weight.data.zero_()
    assert loaded.lm_head.weight.abs().max() > 0
    tied = load_model(model_path, net(), "reference")
    assert isinstance(tied, Net)
    assert tied.lm_head.weight is tied.embed.weight


def test_a_shared_bias_stays_shared(tmp_path):
    def model():
        layers = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        layers[1].bias = layers[0].bias
        return layers

    save_model(tmp_path / "m.safetensors", quantise_model(model(), "int4-g32", backend="reference"))
    loaded = load_model(tmp_path / "m.safetensors", model(), "reference")
    assert isinstance(loaded, nn.Sequential)
    assert loaded[0].bias is loaded[1].bias


def test_buffers_that_are_not_persistent_have_the_dtype_of_the_model(tmp_path):
    class Placed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)
            self.register_buffer("place", torch.ones(32), persistent=False)
            self.register_buffer("count", torch.tensor([2]))

    path = tmp_path / "m.safetensors"
    save_model(path, quantise_model(Placed(), "int4-g32", backend="reference"))
    loaded = load_model(path, Placed().bfloat16(), "reference")
    dtypes = {name: buffer.dtype for name, buffer in loaded.named_buffers() if "." not in name}
    assert dtypes == {"place": torch.bfloat16, "count": torch.int64}


def test_tensors_by_name_in_place_of_a_file(model_path):
    tensors = load(model_path)
    loaded = load_model(tensors, net(seed=1), backend="reference")
    assert torch.equal(loaded(IDS), quantised(net())(IDS))
    assert loaded.first.stored is loaded.second.stored
    assert loaded.lm_head.weight is loaded.embed.weight
    loaded.embed.weight.data.zero_()
    assert tensors["embed.weight"].abs().max() > 0
    with pytest.raises(ValueError, match=r"load_model: does not fit .* unexpected surplus"):
        load_model(tensors | {"surplus": torch.ones(1)}, net(), backend="reference")
    with pytest.raises(TypeError, match=r"first\.bias must be a QuantisedTensor or .*, got list"):
        load_model(tensors | {"first.bias": [1.0]}, net(), backend="reference")
    with pytest.raises(TypeError, match="load_model: model must be a module, got NoneType"):
        load_model(tensors, None)


def test_one_name_of_a_tied_parameter_is_enough(model_path):
    tensors = load(model_path)
    del tensors["lm_head.weight"]
    loaded = load_model(tensors, net(seed=1), backend="reference")
    assert torch.equal(loaded(IDS), quantised(net())(IDS))
    assert loaded.lm_head.weight is loaded.embed.weight


def test_parameters_on_meta():
    with parameters_on_meta():
        skeleton = net()
        frozen = nn.Module()
        frozen.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        lazy = nn.LazyLinear(3)
    assert {p.device.type for p in skeleton.parameters()} == {"meta"}
    assert skeleton.lm_head.weight is skeleton.embed.weight
    assert skeleton.second.weight is skeleton.first.weight
    assert skeleton.steps.tolist() == [3]
    assert not frozen.scale.requires_grad
    assert isinstance(lazy.weight, nn.UninitializedParameter)
    assert nn.Linear(2, 2).weight.device.type == "cpu"
