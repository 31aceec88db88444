"""bitsandbytes 4-bit weights against bitsandbytes itself."""

import pytest
import torch
from safetensors.torch import save_file

from fdk_formats.format import Format
from fdk_formats.readers import load_bitsandbytes, read_bitsandbytes

bnb = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes, the oracle, is missing")

N, K = 6, 256


def quantise(kind="nf4", blocksize=64, nested=False, dtype=torch.float32, shape=(N, K), **options):
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=dtype)
    weight.view(-1)[:blocksize] = 0  # a block of zeros
    return bnb.quantize_4bit(
        weight, blocksize=blocksize, quant_type=kind, compress_statistics=nested, **options
    )


def state_dict(state):
    return state.as_dict(packed=True)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", [32, 64, 128, 256])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("entries", [lambda state: state, state_dict], ids=["live", "saved"])
def test_equals_bitsandbytes(kind, blocksize, nested, entries):
    packed, state = quantise(kind, blocksize, nested)
    weight = read_bitsandbytes(packed, entries(state))
    name = {"nf4": "nf4", "fp4": "custom4"}[kind]
    assert weight.format == Format.parse(f"{name}-g{blocksize}-fp32")
    assert weight.shape == (N, K)
    assert torch.equal(weight.dequantise(), bnb.dequantize_4bit(packed, state))


def test_nested_absmax_over_more_than_one_outer_block():
    packed, state = quantise(nested=True, shape=(30, 1024))  # 480 blocks, in outer blocks of 256
    assert len(state.state2.absmax) == 2
    weight = read_bitsandbytes(packed, state)
    assert torch.equal(weight.dequantise(), bnb.dequantize_4bit(packed, state))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weight(dtype):
    packed, state = quantise(dtype=dtype)
    wanted = bnb.dequantize_4bit(packed, state)
    assert wanted.dtype == dtype
    assert torch.equal(read_bitsandbytes(packed, state).dequantise().to(dtype), wanted)


def test_nf4_bytes_are_canonical():
    packed, state = quantise("nf4")
    weight = read_bitsandbytes(packed, state)
    assert weight.packed.view(-1).tolist() == packed.view(-1).tolist()
    assert torch.equal(weight.codebook, state.code)


def test_fp4_codes_are_renumbered():
    """+1 is FP4 code 3 and rank 15 of the ascending values; -1 is code 11 and rank 0."""
    _, state = quantise("fp4", 64, shape=(1, 64))
    packed = torch.full((32, 1), 0x3B, dtype=torch.uint8)
    weight = read_bitsandbytes(packed, state)
    assert weight.packed.tolist() == [[0xF0] * 32]
    assert torch.equal(weight.codebook, state.code.sort().values)


def test_quant_storage_of_another_dtype():
    packed, state = quantise(quant_storage=torch.bfloat16)
    assert packed.dtype == torch.bfloat16
    plain, _ = quantise()
    assert torch.equal(
        read_bitsandbytes(packed, state).packed, read_bitsandbytes(plain, state).packed
    )


def test_load_folder(tmp_path):
    """Returns tensors under the keys of Linear4bit and transformers."""
    tensors, wanted = {"norm.weight": torch.ones(3), "a.bias": torch.zeros(N)}, {}
    for name, kind, nested in [("a", "nf4", True), ("b", "fp4", False)]:
        packed, state = quantise(kind, nested=nested)
        tensors[f"{name}.weight"] = packed
        tensors |= {f"{name}.weight.{key}": value for key, value in state_dict(state).items()}
        wanted[f"{name}.weight"] = bnb.dequantize_4bit(packed, state)
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_bitsandbytes(tmp_path)
    assert loaded.keys() == {"a.weight", "b.weight", "norm.weight", "a.bias"}
    for name, value in wanted.items():
        assert torch.equal(loaded[name].dequantise(), value)


def test_blocks_that_cross_rows():
    packed, state = quantise(shape=(4, 96))
    with pytest.raises(ValueError, match=r"blocks of 64 .* cross its rows of k=96"):
        read_bitsandbytes(packed, state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_type": "int4"}, "quant_type must be nf4 or fp4, got 'int4'"),
        ({"quant_type": ["nf4"]}, r"quant_type must be nf4 or fp4, got \['nf4'\]"),
        ({"shape": [N * K]}, r"shape must be 2 integers of 1 or more, got \[1536\]"),
        ({"shape": None}, "shape must be 2 integers of 1 or more, got None"),
        ({"shape": [N, 2 * K]}, r"absmax must be \[48\], got \[24\]"),
        ({"blocksize": 0}, "blocks of 0 over the flattened weight"),
        ({"absmax": torch.ones(7)}, r"absmax must be \[24\], got \[7\]"),
        ({"absmax": torch.full((24,), float("nan"))}, "scale must be finite, got 24 that are not"),
        ({"quant_map": torch.ones(8)}, r"quant_map must be \[16\], got \[8\]"),
        ({"nested_absmax": torch.ones(1)}, "absmax must be torch.uint8, got torch.float32"),
    ],
)
def test_bad_state(change, message):
    packed, state = quantise()
    with pytest.raises((TypeError, ValueError), match=message):
        read_bitsandbytes(packed, state.as_dict() | change)


def test_bad_nested_state():
    packed, state = quantise(nested=True)
    entries = state.as_dict()
    del entries["nested_offset"]
    with pytest.raises(ValueError, match=r"nested_offset must be a number from .*, got None"):
        read_bitsandbytes(packed, entries)
    entries = state.as_dict() | {"nested_absmax": torch.ones(2)}
    with pytest.raises(ValueError, match=r"nested_absmax must be \[1\], got \[2\]"):
        read_bitsandbytes(packed, entries)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nested_blocksize": 10**9}, None),  # 24 blocks are in the first of these
        ({"nested_blocksize": 10**18}, None),
        ({"nested_blocksize": 10**19}, "nested_blocksize must be an integer from 1 to"),
        ({"nested_blocksize": 0}, "nested_blocksize must be an integer from 1 to .*, got 0"),
        ({"nested_blocksize": True}, "nested_blocksize must be an integer .*, got True"),
        ({"nested_offset": 10**400}, "nested_offset must be a number from .*, got 1000000"),
        ({"nested_offset": float("nan")}, "nested_offset must be a number from .*, got nan"),
        ({"nested_offset": 1e39}, r"nested_offset must be a number from .*, got 1e\+39"),
        ({"shape": [10**18, 10**18]}, "shape must have at most"),
    ],
)
def test_hostile_numbers(change, message):
    packed, state = quantise(nested=True)
    entries = state.as_dict() | change
    if message is None:
        plain = read_bitsandbytes(packed, state)
        assert torch.equal(read_bitsandbytes(packed, entries).scale, plain.scale)
    else:
        with pytest.raises(ValueError, match=message):
            read_bitsandbytes(packed, entries)


def test_state_type_is_checked():
    packed, state = quantise()
    with pytest.raises(ValueError, match=r"needs quant_state\.bitsandbytes__nf4 or __fp4, got a"):
        read_bitsandbytes(packed, {"a": torch.ones(1)})
    with pytest.raises(TypeError, match=r"state must be a QuantState .*, got int"):
        read_bitsandbytes(packed, 4)
    saved = state_dict(state)
    del saved["absmax"]
    with pytest.raises(ValueError, match="bitsandbytes: needs absmax"):
        read_bitsandbytes(packed, saved)
    for text, message in [
        (b"{", "damaged JSON"),
        (b"[]", r"must be a JSON object, got \[\]"),
        (b"[" * 60_000, "damaged JSON: nested deeper than 64"),
        (b" " * 100_000, "must have at most 65536 bytes, got 100000"),
        (b'{"nested_offset": 1' + b"0" * 400 + b"}", "an integer must fit 64 bits"),
        (b'{"shape": [1], "shape": [2]}', "the key 'shape' occurs twice"),
        (b'{"nested_offset": Infinity}', "a number must be finite, got Infinity"),
        (b"\xff", "damaged JSON"),
    ]:
        saved["quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
        with pytest.raises(ValueError, match=message):
            read_bitsandbytes(packed, saved)


def test_bad_weight():
    packed, state = quantise()
    with pytest.raises(ValueError, match=r"weight of shape \[6, 256\] must be 768 bytes, got 767"):
        read_bitsandbytes(packed[1:], state)
    with pytest.raises(TypeError, match="weight must be a tensor, got NoneType"):
        read_bitsandbytes(None, state)
