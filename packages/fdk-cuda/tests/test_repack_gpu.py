"""Packing and unpacking by kernel gives the bytes of the torch functions."""

import itertools

import pytest
import torch

from fdk_cuda.marlin import repack
from fdk_cuda.marlin.layout import Geometry, pack_layout, unpack_layout
from fdk_formats.format import BITS
from fdk_formats.packing import packed_width
from fdk_formats.testing import poisoned

pytestmark = pytest.mark.gpu

# n, k and group size: whole tiles, one row, rows of an odd number of bytes, long groups, groups
# that end inside 64 columns, and more than a block of threads side by side and one below another.
SHAPES = (
    *((64, 512, 64), (1, 128, 32), (33, 13, 13), (37, 88, 88), (70, 192, 96), (100, 288, 32)),
    *((5, 1056, 1056), (129, 1152, 128), (65, 640, 64), (2000, 4160, 64)),
)
KINDS = (
    (torch.bfloat16, False),
    (torch.float16, True),
    (torch.float32, False),
    (torch.float32, True),
)


def stored(bits, n, k, group_size, dtype, has_zero_point, *, device="cuda", seed=0):
    """Returns a geometry, canonical bytes with random padding bits, scale and zero point."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = n, packed_width(bits, k)
    packed = torch.randint(256, shape, dtype=torch.uint8, device=device, generator=generator)
    kinds = [
        torch.randn(n, k // group_size, device=device, generator=generator).to(dtype)
        for _ in range(2 if has_zero_point else 1)
    ]
    geometry = Geometry(bits, n, k, group_size, dtype, has_zero_point)
    return geometry, packed, kinds[0], kinds[1] if has_zero_point else None


def check(geometry, packed, scale, zero_point):
    wanted = pack_layout(geometry, packed, scale, zero_point)
    with poisoned():
        laid_out = repack.pack(geometry, packed, scale, zero_point)
        unpacked = repack.unpack(geometry, wanted)
    assert torch.equal(laid_out, wanted)
    for got, given in zip(unpacked, unpack_layout(geometry, wanted), strict=True):
        assert (got is None and given is None) or torch.equal(got, given)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_give_the_bytes_of_torch(bits, shape):
    for dtype, has_zero_point in KINDS:
        check(*stored(bits, *shape, dtype, has_zero_point))


def test_what_is_given_comes_back():
    geometry, packed, *kinds = stored(3, 70, 192, 64, torch.bfloat16, True)
    laid_out = repack.pack(geometry, packed, *kinds)
    for got, given in zip(repack.unpack(geometry, laid_out), (packed, *kinds), strict=True):
        assert torch.equal(got, given)


@pytest.mark.parametrize("bits", BITS)
def test_bytes_that_are_not_aligned_or_not_contiguous(bits):
    geometry, packed, scale, _ = stored(bits, 70, 256, 64, torch.bfloat16, False)
    moved = torch.empty(packed.numel() + 1, dtype=torch.uint8, device="cuda")[1:]
    moved = moved.view_as(packed).copy_(packed)
    strided = torch.cat([packed, packed], dim=1)[:, : packed.shape[1]]
    assert moved.data_ptr() % 8
    assert not strided.is_contiguous()
    for other in (moved, strided):
        check(geometry, other, scale.t().contiguous().t(), None)


def test_without_a_compiler_torch_does_it(monkeypatch):
    monkeypatch.setattr(repack, "unavailable_reason", lambda: "missing")
    monkeypatch.setattr(repack, "Launch", None)
    check(*stored(4, 70, 192, 64, torch.bfloat16, True))


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_on_a_stream_and_another_gpu(device):
    if torch.cuda.device_count() <= torch.device(device).index:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        given = stored(4, 512, 1024, 64, torch.bfloat16, False, device=device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda.synchronize(device)
        check(*given)


def test_memory():
    """Allocates only what it returns; torch needs about 20 bytes per code."""
    geometry, *weight = stored(4, 4096, 8192, 64, torch.bfloat16, True)

    def check_peak(run):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = run()
        size = sum(result.nbytes for result in results)
        assert torch.cuda.max_memory_allocated() - before <= size + 4096
        return results

    (laid_out,) = check_peak(lambda: (repack.pack(geometry, *weight),))
    check_peak(lambda: repack.unpack(geometry, laid_out))


@pytest.mark.parametrize(("bits", "k"), list(itertools.product(BITS, (4096, 4104))))
def test_many_rows(bits, k):
    """Thousands of thread blocks, and a partial last tile."""
    check(*stored(bits, 8200, k, k, torch.bfloat16, False))
