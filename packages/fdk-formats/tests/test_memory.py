"""The peak memory of quantising and of the blockwise ops in torch, as torch's allocator counts it.

Not that of the process: malloc keeps freed pages, and from run to run 10 MiB more or fewer of them.
"""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fdk_formats.blockwise import (
    dequantise_4bit,
    dequantise_blockwise,
    quantise_4bit,
    quantise_blockwise,
)
from fdk_formats.blockwise.torch_kernels import CHUNK
from fdk_formats.quantise import quantise

MIB = 1 << 20
SIZE = (4096, 4096)
OPS = {
    "quantise_blockwise": (quantise_blockwise, None),
    "quantise_4bit": (quantise_4bit, None),
    "dequantise_blockwise": (quantise_blockwise, dequantise_blockwise),
    "dequantise_4bit": (quantise_4bit, dequantise_4bit),
}


def peak_and_kept(call):
    """The most bytes torch had allocated at once while ``call`` ran, and those of its result."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        result = call()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    del result
    return peak, live


@pytest.mark.parametrize("op", OPS)
def test_extra_memory_is_that_of_chunks(op):
    to_codes, dequantise = OPS[op]
    torch.manual_seed(0)
    x = torch.randn(SIZE).to(torch.bfloat16)
    q = to_codes(x, nested=True)
    if dequantise is None:
        peak, kept = peak_and_kept(lambda: to_codes(x, nested=True))
    else:
        peak, kept = peak_and_kept(lambda: dequantise(q))
    extra = peak - kept
    # 6 float32 chunks are 12 MiB to quantise; the tensor is 32 MiB, and its float32 copy would be
    # 64. Dequantising has the absmax where that is nested, 1 MiB, and little else.
    limit = 6 * 4 * CHUNK if dequantise is None else 2 * MIB
    assert kept >= x.numel() // 2, "the profiler saw no result"
    assert extra < limit, f"{op} took {extra / MIB:.1f} MiB beyond its result"


@pytest.mark.parametrize("format", ["nf4-g64", "kmeans8-g64"])
def test_quantising_a_weight_takes_little(format):
    torch.manual_seed(0)
    weight = torch.randn(256, SIZE[1]).to(torch.bfloat16).repeat(16, 1)
    peak, kept = peak_and_kept(lambda: quantise(weight, format))
    assert kept >= weight.numel() // 2, "the profiler saw no result"
    # Less than two float32 copies of the weight.
    assert peak < 2 * 4 * weight.numel(), f"{format} took {peak / MIB:.1f} MiB"
