"""HQQ tensors against a packer written from the layout."""

import pytest
import torch
from reader_oracles import hqq_oracle
from safetensors.torch import save_file

from fdk_formats.format import Format
from fdk_formats.readers import load_hqq, read_hqq

# nbits, packing, dtype of a word, codes per word, bits of a packed code
CASES = [
    (8, "8bit_u8", torch.uint8, 1, 8),
    (6, "8bit_u8", torch.uint8, 1, 8),
    (5, "8bit_u8", torch.uint8, 1, 8),
    (4, "4bit_u8", torch.uint8, 2, 4),
    (3, "3bit_32", torch.int32, 10, 3),
    (2, "2bit_u8", torch.uint8, 4, 2),
    (1, "1bit_u8", torch.uint8, 8, 1),
    (7, "8bit_u8", torch.uint8, 1, 8),
]
IDS = [f"{case[0]}bit" for case in CASES]


def pack_blocks(codes, dtype, per_word, bits):
    """Packs rows of codes in ``per_word`` blocks, the first in the highest bits, zero-padded."""
    block = -(-len(codes) // per_word)
    words = torch.zeros(block, codes.shape[1], dtype=torch.int64)
    for row in range(len(codes)):
        place, at = divmod(row, block)
        words[at] += codes[row] * 2 ** (bits * (per_word - 1 - place))
    return words.to(dtype)


def make(case, n=8, k=128, group=64, dtype=torch.float16, zero_dtype=None):
    nbits, packing, word, per_word, bits = case
    torch.manual_seed(nbits)
    size = group or k
    rows = n * k // size
    codes = torch.randint(1 << nbits, (rows, size))
    meta = {
        "nbits": nbits,
        "group_size": group,
        "shape": torch.Size([n, k]),
        "scale": (torch.rand(rows, 1) + 0.1).to(dtype),
        "zero": (torch.rand(rows, 1) * (1 << nbits)).to(zero_dtype or dtype),
        "axis": 1,
        "packing": packing,
        "quant_scale": False,
        "quant_zero": False,
    }
    return codes, pack_blocks(codes, word, per_word, bits), meta


def dequantise(codes, meta):
    """Computes HQQ's formula in float32."""
    weight = (codes.float() - meta["zero"].float()) * meta["scale"].float()
    return weight.reshape(meta["shape"])


@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize("group", [16, 64, None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_read(case, group, dtype):
    codes, words, meta = make(case, group=group, dtype=dtype)
    weight = read_hqq(words, meta)
    names = {torch.float16: "-fp16", torch.bfloat16: "", torch.float32: "-fp32"}
    size = f"g{group}" if group else "row"
    assert weight.format == Format.parse(f"affine{case[0]}-{size}{names[dtype]}")
    assert torch.equal(weight.codes().long(), codes.view(8, 128))
    wanted = dequantise(codes, meta)
    assert torch.equal(weight.dequantise(), wanted)
    assert torch.equal(weight.dequantise(torch.bfloat16), wanted.to(torch.bfloat16))


def test_three_bit_rows_that_do_not_fill_a_word():
    """7 x 2 groups are 14 rows of codes in two words of ten, six of them padding."""
    codes, words, meta = make(CASES[4], n=7)
    assert words.shape == (2, 64)
    assert torch.equal(read_hqq(words, meta).dequantise(), dequantise(codes, meta))


def test_read_by_hand():
    """At 4 bits the first of two rows is in the high nibbles."""
    meta = {
        "nbits": 4,
        "group_size": 16,
        "shape": (2, 16),
        "scale": torch.tensor([[2.0], [4.0]]),
        "zero": torch.tensor([[0.5], [1.0]]),
        "axis": 1,
        "packing": "4bit_u8",
    }
    weight = read_hqq(torch.full((1, 16), 0x3A, dtype=torch.uint8), meta)
    assert weight.dequantise()[:, 0].tolist() == [(3 - 0.5) * 2, (10 - 1) * 4]


def test_ternary_packed_as_two_bits():
    codes, words, meta = make(CASES[5])
    weight = read_hqq(words, meta | {"nbits": 1.58})
    assert weight.format.bits == 2
    assert torch.equal(weight.dequantise(), dequantise(codes, meta))


def test_words_under_a_float_dtype():
    """HQQ's view_as_float views the words as float16."""
    codes, words, meta = make(CASES[3])
    weight = read_hqq(words.view(torch.float16), meta)
    assert torch.equal(weight.dequantise(), dequantise(codes, meta))


def test_scale_and_zero_of_two_dtypes():
    codes, words, meta = make(CASES[3], dtype=torch.float16, zero_dtype=torch.bfloat16)
    weight = read_hqq(words, meta)
    assert weight.format == Format.parse("affine4-g64-fp32")
    assert torch.equal(weight.dequantise(), dequantise(codes, meta))


def encode(value):
    """Encodes numbers and text as tensors, as HQQ does in safetensors files."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, torch.dtype):
        value = str(value)
    if isinstance(value, str):
        return torch.tensor([ord(letter) for letter in value], dtype=torch.uint8)
    if isinstance(value, torch.Size):
        return torch.tensor(value)
    return torch.tensor(int(value), dtype=torch.int32)


def test_load_folder(tmp_path):
    tensors, wanted = {}, {}
    for name, case in [("q", CASES[3]), ("k", CASES[4])]:
        codes, words, meta = make(case)
        state = {"W_q": words, **meta, "compute_dtype": "torch.float16", "bias": torch.ones(8)}
        tensors |= {f"{name}.{key}": encode(value) for key, value in state.items()}
        wanted[f"{name}.weight"] = dequantise(codes, meta)
    save_file(tensors | {"norm.weight": torch.ones(2)}, tmp_path / "qmodel.safetensors")
    loaded = load_hqq(tmp_path)
    assert loaded.keys() == {"q.weight", "k.weight", "q.bias", "k.bias", "norm.weight"}
    for name, value in wanted.items():
        assert torch.equal(loaded[name].dequantise(), value)


def test_load_folder_without_a_shape(tmp_path):
    _, words, meta = make(CASES[3])
    del meta["shape"]
    state = {f"q.{key}": encode(value) for key, value in meta.items()}
    save_file(state | {"q.W_q": words}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"q needs the tensor q\.shape: missing"):
        load_hqq(tmp_path)


@pytest.mark.parametrize("name", ["nbits", "group_size", "axis"])
def test_load_folder_with_a_malformed_number(tmp_path, name):
    _, words, meta = make(CASES[3])
    state = {f"q.{key}": encode(value) for key, value in meta.items()}
    state[f"q.{name}"] = torch.tensor([4, 4])
    save_file(state | {"q.W_q": words}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"q: HQQ: {name} must be one number, got \[4, 4\]"):
        load_hqq(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"axis": 0}, r"axis must be 1, got 0: .* a group runs along n.*load_hqq\(folder, deq"),
        ({"axis": 2}, "axis must be 0 or 1, got 2"),
        ({"axis": None}, "axis must be 0 or 1, got None"),
        ({"axis": torch.tensor([1, 1])}, r"axis must be 0 or 1, got tensor\(\[1, 1\]\)"),
        ({"quant_zero": True}, "meta must have meta_zero, got nbits"),
        ({"quant_scale": True, "meta_scale": 3}, "meta_scale must be a mapping, got int"),
        ({"zero_scale": torch.ones(3, 16, 1)}, r"zero_scale must be \[2, ...\], got \[3, 16, 1\]"),
        ({"zero_scale": None}, r"zero_scale must be \[2, ...\], got NoneType"),
        ({"nbits": 8}, "nbits of 4bit_u8 must be 4, got 8"),
        ({"nbits": float("nan")}, "nbits of 4bit_u8 must be 4, got nan"),
        ({"nbits": None}, "nbits of 4bit_u8 must be 4, got None"),
        ({"packing": "4bit_32"}, "packing must be one of .*, got '4bit_32'"),
        ({"packing": "2bit_u8"}, r"W_q \(2bit_u8\) must be \[4, 64\], got \[8, 64\]"),
        ({"packing": "3bit_32"}, r"W_q \(3bit_32\) must be torch\.int32, got torch\.uint8"),
        ({"shape": (8, 96)}, "group_size must divide k=96 and be 16 or more, got 64"),
        ({"group_size": 8}, "group_size must divide k=128 and be 16 or more, got 8"),
        ({"shape": (8, 16, 8)}, r"shape must be 2 integers of 1 or more, got \(8, 16, 8\)"),
        ({"shape": (0, 128)}, r"shape must be 2 integers of 1 or more, got \(0, 128\)"),
        ({"shape": None}, r"shape must be 2 integers of 1 or more, got None"),
        ({"shape": [8.5, 128]}, r"shape must be 2 integers of 1 or more, got \[8\.5, 128\]"),
        ({"group_size": "64"}, "group_size must be 1 or more, or None, got '64'"),
        ({"group_size": -64}, "group_size must be 1 or more, or None, got -64"),
        ({"packing": ["4bit_u8"]}, r"packing must be one of .*, got \['4bit_u8'\]"),
        ({"scale": torch.ones(16)}, r"scale must be \[16, 1\], got \[16\]"),
        ({"zero": torch.ones(8, 1)}, r"zero must be \[16, 1\], got \[8, 1\]"),
        ({"zero": torch.full((16, 1), torch.inf)}, "HQQ: zero_point must be finite, got 16"),
        ({"scale": 0.5}, "scale must be a tensor, got float"),
    ],
)
def test_bad_meta(change, message):
    _, words, meta = make(CASES[3])
    with pytest.raises((TypeError, ValueError), match=message):
        read_hqq(words, meta | change)


def test_missing_meta():
    _, words, meta = make(CASES[3])
    for name in ("shape", "axis", "scale", "zero", "packing", "nbits"):
        less = {key: value for key, value in meta.items() if key != name}
        with pytest.raises(ValueError, match=rf"meta must have {name}, got (nbits|group_size)"):
            read_hqq(words, less)


def test_codes_beyond_nbits():
    _, words, meta = make(CASES[0])
    with pytest.raises(ValueError, match=r"codes of 5 bits must be in 0 to 31, got \d+ to \d+"):
        read_hqq(words, meta | {"nbits": 5})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (torch.tensor(3, dtype=torch.uint8), r"W_q \(4bit_u8\) must be \[8, 64\], got \[\]"),
        (torch.tensor(3.0), r"must be torch\.uint8, got torch\.float32"),
        (torch.zeros(8, 63, dtype=torch.uint8), r"must be \[8, 64\], got \[8, 63\]"),
        (torch.zeros(8, 33, dtype=torch.float16), r"must be \[8, 64\], got \[8, 66\]"),
        (None, "must be a tensor, got NoneType"),
    ],
)
def test_words_of_another_shape(words, message):
    _, _, meta = make(CASES[3])
    with pytest.raises((TypeError, ValueError), match=message):
        read_hqq(words, meta)


def test_words_of_an_odd_width_under_a_float_dtype():
    _, _, meta = make(CASES[4], n=7)
    words = torch.zeros(2, 127, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"must be \[2, 64\] under a float dtype, got \[2, 127\]"):
        read_hqq(words, meta)


# Against HQQ


def quantise(nbits, *, axis=1, group_size=64, shape=(40, 128), dtype=torch.float16, **options):
    """Quantises a random weight with HQQ; returns W_q and meta on the CPU, in a compute dtype."""
    quantizer = hqq_oracle()
    torch.manual_seed(0)
    weight = torch.randn(shape)
    W_q, meta = quantizer.quantize(
        weight,
        nbits=nbits,
        axis=axis,
        group_size=group_size,
        optimize=False,
        compute_dtype=dtype,
        device="cpu",
        **options,
    )
    meta |= {"compute_dtype": dtype, "quant_scale": False, "quant_zero": False}
    return quantizer.to_inplace(W_q, meta, "cpu")


def quantise_scales(meta, dtype, offload=False):
    """Quantises scales and zeros of a meta as HQQLinear does."""
    quantizer = hqq_oracle()
    options = {
        "scale": {"channel_wise": True, "group_size": 128},
        "zero": {"channel_wise": offload, "group_size": 128 if offload else None},
    }
    for name, more in options.items():
        value = meta.pop(name).float()
        inner, inner_meta = quantizer.quantize(value, nbits=8, optimize=False, device="cpu", **more)
        inner_meta["compute_dtype"] = dtype
        inner, inner_meta = quantizer.to_inplace(inner, inner_meta, "cpu")
        meta |= {f"{name}_q": inner, f"meta_{name}": inner_meta, f"quant_{name}": True}
    if offload:
        both = torch.stack((meta.pop("zero_q"), meta.pop("scale_q")))
        meta["zero_scale"] = both
    return meta


def restored(meta):
    """Returns meta as HQQLinear.dequantize makes it, with plain scale and zero."""
    quantizer = hqq_oracle()
    plain = dict(meta)
    if "zero_scale" in plain:
        plain["zero_q"], plain["scale_q"] = plain["zero_scale"]
    for name in ("scale", "zero"):
        plain[name] = quantizer.dequantize(plain[f"{name}_q"], plain[f"meta_{name}"])
    return plain


@pytest.mark.parametrize("nbits", [8, 6, 5, 4, 3, 2, 1.58, 1])
@pytest.mark.parametrize("view_as_float", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_equals_hqq(nbits, view_as_float, dtype):
    W_q, meta = quantise(nbits, view_as_float=view_as_float, dtype=dtype)
    weight = read_hqq(W_q, meta)
    in_float32 = meta | {"compute_dtype": torch.float32}
    in_float32 |= {name: meta[name].float() for name in ("scale", "zero")}
    assert torch.equal(weight.dequantise(), hqq_oracle().dequantize(W_q, in_float32))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_quantised_scales_equal_hqq(offload, dtype):
    W_q, meta = quantise(4, shape=(128, 128), dtype=dtype)
    meta = quantise_scales(meta, dtype, offload)
    weight = read_hqq(W_q, meta)
    wanted = restored(meta)
    assert torch.equal(weight.scale.view(-1, 1), wanted["scale"])
    assert torch.equal(weight.zero_point.view(-1, 1), wanted["zero"])


def test_offloaded_scales_that_are_not_quantised():
    codes, words, meta = make(CASES[3])
    both = torch.stack((meta["zero"], meta["scale"]))
    plain = {name: value for name, value in meta.items() if name not in ("zero", "scale")}
    weight = read_hqq(words, plain | {"zero_scale": both})
    assert torch.equal(weight.dequantise(), dequantise(codes, meta))


def test_one_scale_for_the_whole_weight():
    """HQQ without channel_wise has scalars."""
    W_q, meta = quantise(8, channel_wise=False, group_size=None, dtype=torch.float32)
    assert meta["scale"].ndim == 0
    found = read_hqq(W_q, meta)
    assert found.format == Format.parse("affine8-row-fp32")
    assert torch.equal(found.dequantise(), hqq_oracle().dequantize(W_q, meta))


@pytest.mark.parametrize(
    ("nbits", "axis", "group_size"),
    [(4, 0, 64), (3, 0, 64), (2, 0, None), (8, 0, 8), (4, 1, 8), (1, 1, 320)],
)
def test_weights_that_no_format_holds(tmp_path, nbits, axis, group_size):
    W_q, meta = quantise(nbits, axis=axis, group_size=group_size)
    wanted = hqq_oracle().dequantize(W_q, meta)
    state = {f"q.{key}": encode(v) for key, v in meta.items() if v is not None}
    state["q.compute_dtype"] = encode("torch.float16")
    del state["q.unpack_view_dtype"]
    save_file(state | {"q.W_q": W_q, "q.bias": torch.ones(8)}, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=r"q: HQQ: .*load_hqq\(folder, dequantise=torch\.bfloat16"):
        load_hqq(tmp_path)
    loaded = load_hqq(tmp_path, dequantise=torch.float32)
    assert loaded.keys() == {"q.weight", "q.bias"}
    assert torch.equal(loaded["q.weight"], wanted.float())
    with pytest.raises(TypeError, match=r"must be a floating dtype or None, got torch\.int8"):
        load_hqq(tmp_path, dequantise=torch.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 7}, r"group_size must divide n\*k=5120, got 7"),
        (
            {"compute_dtype": encode("torch.float8")},
            "compute_dtype must be one of .*'torch.float8'",
        ),
        ({"packing": torch.tensor(10**9)}, r"packing must be torch\.uint8, got torch\.int64"),
        ({"packing": torch.tensor(200, dtype=torch.uint8)}, r"packing must be \[any\], got \[\]"),
        ({"shape": torch.tensor(40)}, r"shape must be 2 integers of 1 or more, got \[40\]"),
        ({"scale": torch.ones(1, 79)}, r"scale must be \[1, 80\], got \[1, 79\]"),
    ],
)
def test_malformed_folders(tmp_path, change, message):
    W_q, meta = quantise(4, axis=0)
    state = {key: encode(v) for key, v in meta.items() if key != "unpack_view_dtype"}
    state |= {"compute_dtype": encode("torch.float16"), "W_q": W_q} | change
    save_file({f"q.{key}": encode(v) for key, v in state.items()}, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=message):
        load_hqq(tmp_path, dequantise=torch.float16)
