"""The configuration of a product: measured on this GPU and kept on disk, or the default.

One m is measured per bucket of ``BUCKETS``, its largest: no call is tuned for its own m. The
environment variable ``FDK_CUDA_TUNE`` controls it:

    not set   uses what is stored for this GPU; only ``tune_layers`` measures
    1         measures a bucket that is not stored at its first call, which takes seconds
    0         ignores what was stored or measured

Any other value is an error.
"""

import itertools
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import cache, partial
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from fdk_cuda.gpu import gpu_index
from fdk_cuda.precompile_args import Layer, check_activations, checked_layers
from fdk_cuda.triton import launch
from fdk_cuda.triton.autotune_cache import Entry, load_entries, store_entries
from fdk_cuda.triton.configs import Config, forward_config
from fdk_cuda.triton.configs.gemm import (
    WORDY_BITS,
    GemmConfig,
    GemmWgmmaConfig,
    fit,
    fits_gemm_wgmma,
)
from fdk_cuda.triton.configs.gemv import GemvConfig, as_run
from fdk_cuda.triton.configs.gpus import Gpu
from fdk_cuda.triton.kernels.decode import DTYPES, lookup_tables
from fdk_cuda.triton.kernels.ptx_smem import fits_gemv, table_bytes
from fdk_cuda.triton.layout import PackedLayout
from fdk_cuda.triton.packed_weight import PackedWeight

TUNE_VARIABLE = "FDK_CUDA_TUNE"
# Largest m of each bucket; beyond the last, weights are always dequantised.
BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
# A configuration replaces the default only where it is faster by more than noise.
GAIN = 0.98
LARGEST_ERROR = 6e-3  # relative to the dequantised product, from bf16 rounding
# The configuration class of each kernel name in the cache.
KINDS = {
    "gemv": GemvConfig,
    "gemm": GemmConfig,
    "gemm_wgmma": GemmWgmmaConfig,
    "dequantise": None,
}
# Copies of a weight, which together take CACHES times the L2.
MIN_COPIES, MAX_COPIES, CACHES = 2, 200, 5
Timer = Callable[[Sequence[Callable[[], Tensor]]], float]

_chosen: dict[tuple[object, ...], Config] = {}
# Counts measurements; earlier results of ``choose`` may no longer hold.
times_measured = 0
_counting = threading.Lock()
# A sentinel, because None is a configuration (dequantise, then cuBLAS).
_UNKNOWN: Any = object()
# GPU and key of measurements that failed at first use; they are not tried again.
_failed: set[tuple[str, str]] = set()


def choose(w: PackedWeight, m: int, dtype: torch.dtype, device: int) -> Config:
    """Returns the configuration for m rows of x: that measured for its bucket, or the default.

    Raises:
        ValueError: ``FDK_CUDA_TUNE`` is neither 0 nor 1.
    """
    bucket, mode = bucket_of(m), _mode()
    if bucket is None or mode == "0" or not (mode == "1" or _entries(_name(device))):
        return _default_of(w, m, device)
    # The key has the count because another thread may measure in between.
    key = (times_measured, device, m, dtype, *w.key)
    # Read once: another thread may clear it at any time.
    found: Config = _chosen.get(key, _UNKNOWN)
    if found is not _UNKNOWN:
        return found
    config = _stored_config(w, bucket, dtype, device)
    if config is _UNKNOWN and mode == "1":
        if _is_capturing():
            # Not cached: the next call outside of a capture measures.
            return _default_of(w, m, device)
        _first_use(w, bucket, dtype, device)
        config = _stored_config(w, bucket, dtype, device)
    if config is _UNKNOWN:
        config = _default_of(w, m, device)
    _chosen[key] = config
    return config


def _is_capturing() -> bool:
    return not launch.INTERPRETED and torch.cuda.is_current_stream_capturing()


def _first_use(w: PackedWeight, bucket: int, dtype: torch.dtype, device: int) -> None:
    """Measures a bucket during a call, which uses the default where that fails."""
    attempt = _name(device), key_of(w, bucket, dtype)
    if attempt in _failed:
        return
    zero_dtype = None if w.zero_point is None else w.zero_point.dtype
    try:
        ws = random_weights(w.layout, w.scale.dtype, zero_dtype, device)
        _tune_bucket(ws, bucket, dtype, device, graph_time)
    except Exception as error:
        _failed.add(attempt)
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(f"{attempt[1]} is not tuned, the default is used: {reason}", stacklevel=2)


def _default_of(w: PackedWeight, m: int, device: int) -> Config:
    affine = w.zero_point is not None
    return forward_config(w.layout, m, launch.gpu_at(device), affine=affine)


def bucket_of(m: int) -> int | None:
    """Returns the bucket of m rows, or None past the last."""
    return next((bucket for bucket in BUCKETS if m <= bucket), None)


def tune_layers(
    layers: Iterable[Layer],
    *,
    ms: Iterable[int] = BUCKETS,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | int | None = None,
    timer: Timer | None = None,
) -> int:
    """Measures configurations for layers, and stores the fastest for later processes.

    Buckets that are stored are skipped. Layers of the same width, group size, dtypes, n and k share
    their entries; so do all codebooks.

    Args:
        layers: format, n and k of each.
        ms: rows of x; each selects its bucket, or none past the last.
        dtype: dtype of the activations.
        device: the GPU; the current one by default.
        timer: returns microseconds per call of equivalent functions; by default from a CUDA graph.

    Returns:
        The number of buckets measured.

    Raises:
        RuntimeError: if torch finds no GPU, or no configuration of a bucket gives right results.
        TypeError, ValueError: for unsupported activations, or invalid layers or ms.
    """
    check_activations("tune_layers", dtype, DTYPES)
    checked, buckets = checked_layers("tune_layers", layers), _buckets_of(ms)
    index = -1 if launch.INTERPRETED else gpu_index("tune_layers", device)
    count = 0
    for format, n, k in checked:
        a = PackedLayout(n, k, format.bits, format.group_size_for(k))
        zero_dtype = format.stored_zero_point_dtype if format.is_affine else None
        ws: list[PackedWeight] = []
        for bucket in buckets:
            scale_dtype = format.stored_scale_dtype
            ws = ws or random_weights(a, scale_dtype, zero_dtype, index)
            if _stored_config(ws[0], bucket, dtype, index) is _UNKNOWN:
                _tune_bucket(ws, bucket, dtype, index, timer or graph_time)
                count += 1
    return count


def _buckets_of(ms: Iterable[int]) -> list[int]:
    ms = list(ms)
    for m in ms:
        if type(m) is not int or m < 1:
            raise ValueError(f"tune_layers: ms must be whole numbers of at least 1, got {m!r}")
    return sorted({bucket for m in ms if (bucket := bucket_of(m)) is not None})


def key_of(w: PackedWeight, bucket: int, dtype: torch.dtype) -> str:
    """Returns the cache key: sizes, and dtypes of x, scale and, if affine, zero point."""
    a, zero = w.layout, w.zero_point
    kind = "codebook" if zero is None else "affine"
    dtypes = (dtype, w.scale.dtype, *([] if zero is None else [zero.dtype]))
    names = "-".join(str(each).removeprefix("torch.") for each in dtypes)
    return f"{kind}{a.bits}-n{a.n}-k{a.k}-g{a.group_size}-{names}-m{bucket}"


def candidates(layout: PackedLayout, m: int, gpu: Gpu, *, affine: bool) -> list[Config]:
    """Returns every configuration worth trying for m rows of x, among those that fit."""
    bits, found = layout.bits, list[Config]()
    if m <= gpu.limits.gemv_m:
        options: tuple[dict[str, Any], ...] = (
            {},
            {"overlap": True},
            {"overlap": True, "fetch": 2},
            {"overlap": True, "fetch": 2, "ahead": 0},
        )
        table = table_bytes(bits, affine)
        fitting = (
            as_run(GemvConfig(n_tiles=tiles, warps=warps, **option), gpu)
            for tiles, warps, option in itertools.product((1, 2, 4), (4, 8, 16), options)
            if fits_gemv(tiles, 1 if m <= 8 else 2, warps, table)
        )
        # Some are equal on a GPU without overlap of kernels.
        found += dict.fromkeys(fitting)
    if m > gpu.limits.gemv_m // 2:
        base = {
            fit(GemmConfig(tiles, warps, block, split, stages), bits, gpu.shared_bytes)
            for (tiles, warps), block, split, stages in itertools.product(
                ((1, 4), (1, 8), (2, 4), (2, 8)), (16, 32, 64, 128, 256), (1, 2, 4), (2, 3)
            )
            if m <= 2 * block < 4 * m + 32 and tiles * warps * 16 * block <= 256 * 128
        }
        found += [*sorted(base, key=str), None]
    if 32 < m <= gpu.limits.gemm_wgmma_m and fits_gemm_wgmma(layout):
        blocks = (64,) if m <= 64 else (128,) if m <= 128 or bits in WORDY_BITS else (128, 256)
        splits = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2))
        found += [
            GemmWgmmaConfig(block_m=block, split_k=split, cluster=cluster)
            for block, (split, cluster) in itertools.product(blocks, splits)
            if split <= layout.k_tiles
        ]
    return found


def random_weights(
    a: PackedLayout, scale_dtype: torch.dtype, zero_dtype: torch.dtype | None, device: int
) -> list[PackedWeight]:
    """Returns random weights that together exceed the L2, so that each is read from memory."""
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
        found.append(PackedWeight(words, scale, zero, values, lanes, a))
    return found


def graph_time(calls: Sequence[Callable[[], Tensor]], replays: int = 15) -> float:
    """Returns the median microseconds of a call; all calls are replayed as one CUDA graph."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # With thread_local, other threads may allocate during the capture.
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


def _tune_bucket(
    ws: list[PackedWeight], bucket: int, dtype: torch.dtype, device: int, timer: Timer
) -> None:
    """Measures a bucket and stores its fastest configuration."""
    a = ws[0].layout
    first, *others = configs = _configs_to_try(ws[0], bucket, device)
    # A separate generator: the state of the global one does not change.
    place = ws[0].words.device
    generator = torch.Generator(place).manual_seed(0)
    x = torch.randn(bucket, a.k, dtype=torch.float32, device=place, generator=generator).to(dtype)
    with torch.no_grad(), launch.on_device_of(x):
        oracle = x.float() @ launch.dequantise(ws[0], dtype).float().T
        times: dict[Config, float] = {}
        for config in dict.fromkeys(configs):
            try:
                y = launch.linear(x, ws[0], None, config).float()
            except triton.OutOfResources:
                continue
            if not (y - oracle).norm() <= LARGEST_ERROR * oracle.norm():
                warnings.warn(f"{a}, m = {bucket}: {config} is wrong, and not used", stacklevel=2)
                continue
            times[config] = timer([partial(launch.linear, x, w, None, config) for w in ws])
    if not times:
        raise RuntimeError(f"{a}, m = {bucket}: of {len(others) + 1} configurations none is right")
    best = min(times, key=lambda config: times[config])
    if times[best] > GAIN * times.get(first, float("inf")):
        best = first
    entry: Entry = _fields_of(best) | {
        "us": round(times[best], 2),
        "default_us": round(times[first], 2) if first in times else None,
    }
    new = {key_of(ws[0], bucket, dtype): entry}
    global times_measured
    # Without the lock, concurrent increments could be lost and stale choices stay.
    with _counting:
        _entries(_name(device)).update(new)
        times_measured += 1
        _chosen.clear()
    store_entries(_name(device), new)


@cache
def _entries(name: str) -> dict[str, Entry]:
    """Returns the entries of a GPU, by ``_name``: read once, then extended."""
    return load_entries(name)


def _stored_config(w: PackedWeight, bucket: int, dtype: torch.dtype, device: int) -> Config:
    """Returns the stored configuration of a bucket, or ``_UNKNOWN``.

    A file may hold any value: only a configuration that tuning would try here is used.
    """
    found: Config = _UNKNOWN
    if entry := _entries(_name(device)).get(key_of(w, bucket, dtype)):
        stored = {name: entry.get(name) for name in ("kernel", "config")}
        tried = _configs_to_try(w, bucket, device)
        found = next((config for config in tried if _fields_of(config) == stored), found)
    return found


def _configs_to_try(w: PackedWeight, bucket: int, device: int) -> list[Config]:
    """Returns the default of a bucket, then its candidates."""
    gpu, affine = launch.gpu_at(device), w.zero_point is not None
    first = forward_config(w.layout, bucket, gpu, affine=affine)
    return [first, *candidates(w.layout, bucket, gpu, affine=affine)]


def _fields_of(config: Config) -> Entry:
    return {"kernel": _kernel_of(config), "config": {} if config is None else asdict(config)}


def _kernel_of(config: Config) -> str:
    return next(name for name, make in KINDS.items() if make is None or isinstance(config, make))


@cache
def _name(device: int) -> str:
    """Returns the name of the GPU model and the version of Triton."""
    gpu = "interpreter" if device < 0 else torch.cuda.get_device_name(device)
    return f"{gpu}, triton {triton.__version__}"


@cache
def _mode() -> str | None:
    mode = os.environ.get(TUNE_VARIABLE) or None
    if mode not in (None, "0", "1"):
        raise ValueError(f"{TUNE_VARIABLE} must be 0, 1 or not set, got {mode!r}")
    return mode
