"""Peak memory of quantising and of the blockwise ops, as torch's allocator counts it.

The memory of the process varies by 10 MiB from run to run: malloc keeps freed pages.
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
    """Returns the peak of allocated bytes during a call, and the bytes of its result."""
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
def test_extra_memory_of_blockwise_ops(op):
    to_codes, dequantise = OPS[op]
    torch.manual_seed(0)
    x = torch.randn(SIZE).to(torch.bfloat16)
    q = to_codes(x, nested=True)
    if dequantise is None:
        peak, kept = peak_and_kept(lambda: to_codes(x, nested=True))
    else:
        peak, kept = peak_and_kept(lambda: dequantise(q))
    extra = peak - kept
    # Quantising needs 6 float32 chunks, 12 MiB; a float32 copy of the tensor would be 64 MiB.
    # Dequantising needs the absmax, 1 MiB.
    limit = 6 * 4 * CHUNK if dequantise is None else 2 * MIB
    assert kept >= x.numel() // 2, "the profiler saw no result"
    assert extra < limit, f"{op} took {extra / MIB:.1f} MiB beyond its result"


@pytest.mark.parametrize("format", ["nf4-g64", "kmeans8-g64"])
def test_extra_memory_of_quantise(format):
    torch.manual_seed(0)
    weight = torch.randn(256, SIZE[1]).to(torch.bfloat16).repeat(16, 1)
    peak, kept = peak_and_kept(lambda: quantise(weight, format))
    assert kept >= weight.numel() // 2, "the profiler saw no result"
    # Less than two float32 copies of the weight.
    assert peak < 2 * 4 * weight.numel(), f"{format} took {peak / MIB:.1f} MiB"
