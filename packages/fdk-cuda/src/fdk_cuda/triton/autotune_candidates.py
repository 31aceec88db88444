"""What ``tune`` measures: configurations worth trying, random weights, and the time of a call."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fdk_cuda.triton.configs import GemmConfig, Gpu, ManyConfig, SmallConfig
from fdk_cuda.triton.configs.gemm import WORDY_BITS, fit, fits_many
from fdk_cuda.triton.configs.gemv import as_run
from fdk_cuda.triton.kernels.decode import lookup_tables
from fdk_cuda.triton.kernels.ptx_smem import fits_small, table_bytes
from fdk_cuda.triton.launch import Config
from fdk_cuda.triton.layout import Arrangement
from fdk_cuda.triton.packed_weight import Weight

# Copies of a weight: so many times the L2 in all.
MIN_COPIES, MAX_COPIES, CACHES = 2, 200, 5


def candidates(m: int, bits: int, gpu: Gpu, *, affine: bool) -> list[Config]:
    """Every configuration worth trying for m rows, that fits."""
    found: list[Config] = []
    if m <= gpu.limits.small_m:
        ways = ((1, 0, False), (1, 0, True), (1, 2, True), (0, 2, True))
        grid = itertools.product((1, 2, 4), (4, 8, 16), ways)
        table = table_bytes(bits, affine)
        fitting = (
            as_run(SmallConfig(tiles, warps, *way), gpu)
            for tiles, warps, way in grid
            if fits_small(tiles, 1 if m <= 8 else 2, warps, table)
        )
        # On a GPU that does not overlap some are the same.
        found += dict.fromkeys(fitting)
    if m > gpu.limits.small_m // 2:
        base = {
            fit(GemmConfig(tiles, warps, block, split, stages), bits, gpu.shared_bytes)
            for (tiles, warps), block, split, stages in itertools.product(
                ((1, 4), (1, 8), (2, 4), (2, 8)), (16, 32, 64, 128, 256), (1, 2, 4), (2, 3)
            )
            if m <= 2 * block < 4 * m + 32 and tiles * warps * 16 * block <= 256 * 128
        }
        found += [*sorted(base, key=str), None]
    return found


def many_candidates(a: Arrangement, m: int, gpu: Gpu) -> list[Config]:
    """Likewise, of ``many_kernel`` for a weight."""
    if not 32 < m <= gpu.limits.many_m or not fits_many(a):
        return []
    blocks = (64,) if m <= 64 else (128,) if m <= 128 or a.bits in WORDY_BITS else (128, 256)
    parts = [ways for ways in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2)) if ways[0] <= a.k_tiles]
    return [ManyConfig(block, *ways) for block, ways in itertools.product(blocks, parts)]


def random_weights(
    a: Arrangement, scale_dtype: torch.dtype, zero_dtype: torch.dtype | None, device: int
) -> list[Weight]:
    """Copies of a random weight that together exceed the L2, so that each is read from memory."""
    place = torch.device("cpu") if device < 0 else torch.device("cuda", device)
    cache_bytes = 0 if device < 0 else torch.cuda.get_device_properties(device).L2_cache_size
    count = CACHES * cache_bytes * 8 // (a.n * a.k * a.bits) + 1
    affine = zero_dtype is not None
    codebook = torch.arange(2.0**a.bits) if affine else torch.linspace(-1, 1, 1 << a.bits)
    values, lanes = (table.to(place) for table in lookup_tables(codebook))
    full = 1 << 31
    found = []
    for seed in range(min(MAX_COPIES, max(MIN_COPIES, count))):
        generator = torch.Generator(place).manual_seed(seed)
        like: dict[str, Any] = {"device": place, "generator": generator}
        words = torch.randint(-full, full, a.words_shape, dtype=torch.int32, **like)
        shape = a.n_tiles, a.groups, 8, 2
        if scale_dtype == torch.uint8:
            scale = torch.randint(118, 122, shape, dtype=torch.uint8, **like)
        else:
            scale = ((torch.rand(shape, **like) + 0.5) / a.k**0.5).to(scale_dtype)
        zero = None
        if zero_dtype is not None:
            zero = (torch.rand(shape, **like) * ((1 << a.bits) - 1)).to(zero_dtype)
        found.append(Weight(words, scale, zero, values, lanes, a))
    return found


def graph_time(calls: Sequence[Callable[[], Tensor]], replays: int = 15) -> float:
    """Median microseconds of a call, all of them replayed together as a CUDA graph."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # What other threads do meanwhile, allocate for one, does not end the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times)[len(times) // 2]
