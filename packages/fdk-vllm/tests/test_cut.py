"""Parts of weights: those of all processes together are the whole weight."""

import pytest
import torch

from fdk_formats import quantise
from fdk_vllm.cut import Part, copied, part_of

FORMATS = ("kmeans4-g32", "affine3-g64-zint", "int1-g64", "nf4-row", "affine4-row", "int8-g32-e8m0")


def weight(format, n=24, k=256):
    return quantise(torch.randn(n, k), format)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows(format, ranks):
    q = weight(format)
    parts = [part_of((24, 256), (24 // ranks, 256), rank, ranks) for rank in range(ranks)]
    cut = torch.cat([part.of(q).dequantise() for part in parts])
    assert torch.equal(cut, q.dequantise())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_columns(format, ranks):
    q = weight(format)
    parts = [part_of((24, 256), (24, 256 // ranks), rank, ranks) for rank in range(ranks)]
    cut = torch.cat([part.of(q).dequantise() for part in parts], 1)
    assert torch.equal(cut, q.dequantise())


def test_heads_that_are_replicated():
    starts = [part_of((16, 64), (8, 64), rank, 4).start for rank in range(4)]
    assert starts == [0, 0, 8, 8]
    assert [part_of((8, 64), (8, 64), rank, 4).start for rank in range(4)] == [0] * 4


def test_rows_of_a_merged_weight_begin_at_an_offset():
    q = weight("int4-g64")
    part = part_of((16, 256), (8, 256), 1, 2, offset=8)
    assert torch.equal(part.of(q).dequantise(), q.dequantise()[16:24])


@pytest.mark.parametrize("format", FORMATS)
def test_padding_is_zero(format):
    q = weight(format)
    padded = Part(8, 24, 20).of(q)
    assert torch.equal(padded.dequantise()[:16], q.dequantise()[8:])
    assert padded.shape == (20, 256)
    assert not padded.dequantise()[16:].any()


def test_a_copy_on_the_same_device_keeps_its_values():
    q = weight("kmeans4-g64")
    part = copied(Part(0, 8, 8).of(q), torch.device("cpu"))
    for tensor in q.tensors().values():
        tensor.zero_()
    assert all(tensor.any() for tensor in part.tensors().values())


@pytest.mark.parametrize(
    ("format", "k", "message"),
    [
        ("kmeans4-g64", 192, "whole groups of 64 .*fewer GPUs .*: kmeans4-g32 fits"),
        ("int1-row", 8, "whole bytes of 1-bit codes"),
    ],
)
def test_cuts_of_groups_and_bytes_are_refused(format, k, message):
    with pytest.raises(ValueError, match=message):
        Part(0, 4, 4, rank=0, ranks=2).of(weight(format, 4, k))


def test_rotated_blocks_stay_whole():
    q = weight("kmeans3-g64-hadamard", k=1024)
    parts = [part_of((24, 1024), (24, 256), rank, 4).of(q) for rank in range(4)]
    x = torch.randn(3, 1024)
    products = [x[:, 256 * i :][:, :256] @ part.dequantise().T for i, part in enumerate(parts)]
    torch.testing.assert_close(sum(products), x @ q.dequantise().T, rtol=1e-4, atol=1e-4)
    message = "whole blocks of 64 rotated inputs, and k/2 is 96; serve with fewer GPUs"
    with pytest.raises(ValueError, match=message):
        Part(0, 24, 24, rank=0, ranks=2).of(weight("int4-g32-hadamard", k=192))


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="n=10 is not a multiple of the 4 of each process"):
        part_of((10, 64), (4, 64), 0, 2)
