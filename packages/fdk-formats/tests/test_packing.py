import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdk_formats import pack, unpack
from fdk_formats.packing import CODES_PER_CHUNK, packed_width
from fdk_formats.testing import golden_codes, golden_packed


def bit_string(codes, bits):
    """Packs by writing out binary digits, independent of the code under test."""
    digits = "".join(f"{code:0{bits}b}" for code in codes)
    digits += "0" * (-len(digits) % 8)
    return bytes(int(digits[i : i + 8], 2) for i in range(0, len(digits), 8))


@pytest.mark.parametrize(
    ("bits", "codes", "packed"),
    [
        (1, [1, 0, 1, 1, 0, 0, 0, 1, 1], [0b10110001, 0b10000000]),
        (2, [3, 0, 1, 2], [0xC6]),
        (3, [7, 0, 5, 2, 1, 6, 3, 4], [0b11100010, 0b10100011, 0b10011100]),
        (4, [0xA, 0x5, 0xF], [0xA5, 0xF0]),
        (5, [31, 0, 21], [0b11111000, 0b00101010]),
        (6, [63, 1, 2, 3], [0b11111100, 0b00010000, 0b10000011]),
        (7, [127, 0], [0b11111110, 0]),
        (8, [0, 255, 7], [0, 255, 7]),
    ],
)
def test_pack_by_hand(bits, codes, packed):
    assert pack(torch.tensor(codes), bits).tolist() == packed
    assert unpack(torch.tensor(packed, dtype=torch.uint8), bits, len(codes)).tolist() == codes


@given(bits=st.integers(1, 8), data=st.data())
def test_pack_is_the_bit_stream(bits, data):
    codes = data.draw(st.lists(st.integers(0, (1 << bits) - 1), max_size=40))
    packed = pack(torch.tensor(codes, dtype=torch.int64), bits)
    assert packed.dtype == torch.uint8
    assert bytes(packed.tolist()) == bit_string(codes, bits)
    assert unpack(packed, bits, len(codes)).tolist() == codes


@pytest.mark.parametrize("bits", range(1, 9))
def test_golden_bytes(bits):
    codes, packed = golden_codes(bits), golden_packed(bits)
    assert codes.shape == (3, 19)
    assert codes.max() == (1 << bits) - 1
    assert torch.equal(pack(codes, bits), packed)
    assert torch.equal(unpack(packed, bits, 19), codes)


@pytest.mark.parametrize("bits", [3, 4])
def test_pack_in_chunks(bits):
    k = 1001
    n = 2 * CODES_PER_CHUNK // k + 3
    codes = torch.randint(1 << bits, (n, k), dtype=torch.uint8)
    packed = pack(codes, bits)
    for row in (0, CODES_PER_CHUNK // k, n - 1):
        assert bytes(packed[row].tolist()) == bit_string(codes[row].tolist(), bits)
    assert torch.equal(unpack(packed, bits, k), codes)


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), (2, 0, 5)])
def test_pack_of_nothing(shape):
    packed = pack(torch.zeros(shape, dtype=torch.uint8), 3)
    assert packed.shape == (*shape[:-1], packed_width(3, shape[-1]))
    assert unpack(packed, 3, shape[-1]).shape == shape


def test_pack_takes_any_integer_strided_and_of_any_rank():
    codes = torch.randint(8, (2, 3, 26), dtype=torch.int16)[..., ::2]
    packed = pack(codes, 3)
    assert packed.shape == (2, 3, 5)
    assert torch.equal(unpack(packed, 3, 13), codes.to(torch.uint8))
    assert torch.equal(unpack(packed.transpose(0, 1), 3, 13), codes.transpose(0, 1))


@pytest.mark.parametrize("bits", range(1, 9))
def test_pack_takes_transposed_codes(bits):
    codes = torch.randint(1 << bits, (16, 24), dtype=torch.uint8)
    packed = pack(codes.T, bits)
    assert torch.equal(packed, pack(codes.T.contiguous(), bits))
    assert torch.equal(unpack(packed.T.contiguous().T, bits, 16), codes.T)


@pytest.mark.parametrize("bits", [0, 9, -1, 2.0, True])
def test_bits_are_checked(bits):
    with pytest.raises(ValueError, match=f"pack: bits must be 1 to 8, got {bits}"):
        pack(torch.zeros(8, dtype=torch.uint8), bits)
    with pytest.raises(ValueError, match=f"unpack: bits must be 1 to 8, got {bits}"):
        unpack(torch.zeros(8, dtype=torch.uint8), bits, 8)


def test_pack_refuses():
    with pytest.raises(ValueError, match="codes of 2 bits must be in 0 to 3, got 0 to 4"):
        pack(torch.tensor([0, 4]), 2)
    with pytest.raises(ValueError, match="must be in 0 to 3, got -1 to 0"):
        pack(torch.tensor([0, -1]), 2)
    for dtype in (torch.float32, torch.complex64, torch.bool, torch.uint16, torch.uint64):
        with pytest.raises(TypeError, match=f"codes must be uint8 or int8 to int64, got {dtype}"):
            pack(torch.zeros(4, dtype=dtype), 1)
    with pytest.raises(TypeError, match="pack: codes must be a tensor, got list"):
        pack([1, 2], 2)
    with pytest.raises(ValueError, match="pack: needs values, got a tensor on meta"):
        pack(torch.zeros(4, dtype=torch.uint8, device="meta"), 2)
    with pytest.raises(ValueError, match="at least one dimension"):
        pack(torch.tensor(1), 2)


def test_unpack_refuses():
    packed = torch.zeros(2, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"9 codes of 3 bits take \[..., 4\] bytes, got \[2, 3\]"):
        unpack(packed, 3, 9)
    with pytest.raises(ValueError, match="-1 codes"):
        unpack(packed, 3, -1)
    with pytest.raises(TypeError, match=r"packed must be uint8, got torch\.int8"):
        unpack(packed.to(torch.int8), 3, 8)
    with pytest.raises(TypeError, match="unpack: packed must be a tensor, got list"):
        unpack([1], 4, 2)
    with pytest.raises(TypeError, match=r"unpack: k must be an integer, got 8\.0"):
        unpack(packed, 3, 8.0)
