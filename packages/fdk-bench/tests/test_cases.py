"""Bytes, operations, shapes and formats of kernel cases, by hand."""

import pytest
import torch

from fdk_bench.cases import KernelCase, formats_of, random_weight, shapes_of
from fdk_formats import Format
from fdk_formats.testing.conformance import exact_weight


def case(format, *, m=1, n=4096, k=4096, dtype="bf16"):
    return KernelCase(m, n, k, format, dtype, "cpu", "auto")


@pytest.mark.parametrize(
    ("format", "nbytes"),
    [
        ("bf16", 4096 * 4096 * 2),
        # Codes 4096 * 4096 / 2 = 8388608, scales 4096 * 64 * 2 = 524288, 16 entries of 4 bytes.
        ("custom4-g64", 8388608 + 524288 + 64),
        ("int1-g64", 2097152 + 524288 + 8),
        ("int3-row", 4096 * 1536 + 4096 * 2 + 32),
        # A zero point of 16 bits for each scale, no codebook.
        ("affine4-g128", 8388608 + 4096 * 32 * 4),
        ("affine4-g128-zint", 8388608 + 4096 * 32 * 3),
        ("nf4-g64-e8m0", 8388608 + 4096 * 64 + 64),
    ],
)
def test_weight_bytes(format, nbytes):
    assert case(format).weight_bytes == nbytes


def test_weight_bytes_of_rows_that_end_within_a_byte():
    # 5 codes of 3 bits are 15 bits, 2 bytes; 2 rows, a scale of 2 bytes each, 8 entries.
    assert case("int3-row", n=2, k=5).weight_bytes == 2 * 2 + 2 * 2 + 32


@pytest.mark.parametrize("format", ["custom3-g16", "affine5-g32", "affine2-g32-zint", "int4-row"])
def test_weight_bytes_are_those_of_a_weight(format):
    q = random_weight(Format.parse(format), 6, 96, "cpu")
    assert case(format, n=6, k=96).weight_bytes == q.nbytes


def test_activations_and_operations():
    # x 16 * 64, y 16 * 32, 2 bytes each; 2 * 16 * 32 * 64.
    small = case("int4-g64", m=16, n=32, k=64)
    assert (small.activation_bytes, small.operations) == (16 * 64 * 2 + 16 * 32 * 2, 65536)
    assert case("fp32", m=1, n=2, k=4, dtype="fp32").activation_bytes == 24


def test_bits_and_text():
    assert [case(f).bits for f in ("bf16", "int3-g64")] == [16, 3]
    assert case("fp32", dtype="fp32").bits == 32
    assert str(case("int4-g64", m=3)) == "m3-n4096-k4096-int4-g64-bf16-cpu-auto"


def test_formats_of():
    assert formats_of([4, 16, 1], [], "64", "bf16") == ["bf16", "custom4-g64", "custom1-g64"]
    asked = ["int", "nf4-g32", "kmeans3-search"]
    expected = ["int4-row", "nf4-g32", "kmeans3-row-search", "int2-row"]
    assert formats_of([2, 4], asked, "row", "bf16") == expected
    assert formats_of([16, 4], ["int", "int4"], "64", "fp16") == ["fp16", "int4-g64"]
    with pytest.raises(ValueError, match="wanted 1 to 8, or 16 for no quantisation; got 9"):
        formats_of([9, 5], ["nf"], "64", "bf16")
    assert formats_of([4], ["fp32"], "64", "fp32") == ["fp32"]
    with pytest.raises(ValueError, match="format fp32: wanted bf16"):
        formats_of([4], ["fp32"], "64", "bf16")
    with pytest.raises(ValueError, match="fp"):
        formats_of([5], ["fp"], "64", "bf16")


def test_shapes_of(tmp_path):
    default = (7, 8)
    assert shapes_of([], [], [], default) == [(7, 8)]
    assert shapes_of([], [], [64, 128], default) == [(64, 64), (128, 128)]
    assert shapes_of([], [5, 6], [64], default) == [(5, 64), (6, 64)]
    assert shapes_of([], [5], [], default) == [(5, 8)]
    file = tmp_path / "shapes"
    file.write_text("# n x k\n12x34\n\n5x6  # small\nllama-8b\n")
    llama = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
    assert shapes_of([str(file), "5x6"], [1], [1], default) == [(12, 34), (5, 6), *llama]
    with pytest.raises(ValueError, match=r"^--shapes: .*one of llama-1b, .*; got 'llama-9b'"):
        shapes_of(["llama-9b"], [], [], default)
    with pytest.raises(ValueError, match="got '0x64'"):
        shapes_of(["0x64"], [], [], default)
    file.write_text("12x34\n\n64 128\n")
    with pytest.raises(
        ValueError, match=r"^--shapes: .*shapes:3: wanted NxK or one of .*; got '64 128'"
    ):
        shapes_of([str(file)], [], [], default)
    file.write_text("# none\n")
    with pytest.raises(ValueError, match="shapes has none"):
        shapes_of([str(file)], [], [], default)


@pytest.mark.parametrize(
    "text",
    ["custom3-g16", "int4-row", "kmeans2-g32", "affine4-g64", "affine3-g32-zint", "nf4-g64-e8m0"],
)
def test_random_weight(text):
    format = Format.parse(text)
    q = random_weight(format, 40, 192, "cpu")
    again = random_weight(format, 40, 192, "cpu")
    assert all(torch.equal(q.tensors()[name], t) for name, t in again.tensors().items())
    assert len(q.codes().unique()) == 1 << format.bits
    W = exact_weight(q, torch.bfloat16, torch.float64)
    # Rounded once more, it is the definition of the format.
    assert torch.equal(W.to(torch.float32).bfloat16(), q.dequantise(torch.bfloat16))
    # y of a standard normal x is of the size of x, within a power of two or so.
    assert 0.1 < W.norm(dim=1).mean() < 4


def test_random_weight_ends_rows_in_zeros():
    q = random_weight(Format.parse("int3-row"), 50, 5, "cpu")  # 15 bits, 1 spare
    assert (q.packed[:, -1] & 1 == 0).all()
    assert q.packed[:, -1].any()
