"""Which configuration runs a product, and measuring better ones, kept on disk by GPU.

Measured is one m for each bucket of ``BUCKETS``, its largest: no call is tuned for its own m.
``FDK_CUDA_TUNE`` says when:

    not set   what was stored for this GPU is used, nothing is measured but by ``tune_layers``
    1         a bucket that is not stored is measured at its first call, seconds long
    0         what was stored or measured is not used either

Anything else is an error.
"""

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
from fdk_cuda.triton.autotune_candidates import (
    candidates,
    graph_time,
    many_candidates,
    random_weights,
)
from fdk_cuda.triton.configs import GemmConfig, Gpu, ManyConfig, SmallConfig
from fdk_cuda.triton.configs.gemm import (
    gemm_config,
    many_config,
    serves_many,
)
from fdk_cuda.triton.configs.gemv import as_run, small_config
from fdk_cuda.triton.kernels.decode import DTYPES
from fdk_cuda.triton.launch import Config, Weight
from fdk_cuda.triton.layout import Arrangement
from fdk_formats.scales import SCALE_DTYPES
from fdk_formats.tensor import zero_point_dtype

TUNE_VARIABLE = "FDK_CUDA_TUNE"
# A bucket holds m up to its number, from the one before; larger m is dequantised, always.
BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
# What is no faster than the default by more than noise does not replace it.
GAIN = 0.98
LARGEST_ERROR = 6e-3  # beside the dequantised weight, of bf16 rounding
# Kernels by the name an entry gives them, and what holds their configuration, if they have one.
KINDS = {"small": SmallConfig, "gemm": GemmConfig, "many": ManyConfig, "dequantise": None}
Timer = Callable[[Sequence[Callable[[], Tensor]]], float]

_chosen: dict[tuple[object, ...], Config] = {}
# How often something was measured: what ``choose`` said before may no longer hold.
times_measured = 0
_counting = threading.Lock()
# None is a configuration too.
_UNKNOWN: Any = object()
# What could not be measured at first use is not tried again: GPU and key.
_failed: set[tuple[str, str]] = set()


def choose(w: Weight, m: int, dtype: torch.dtype, device: int) -> Config:
    """For m rows of x: what was measured for its bucket, or the default.

    Raises:
        ValueError: ``FDK_CUDA_TUNE`` is neither 0 nor 1.
    """
    bucket, mode = bucket_of(m), _mode()
    if bucket is None or mode == "0" or not (mode == "1" or _entries(_name(device))):
        return _default_of(w, m, device)
    # With the count, for another thread may measure between a look at what is stored and the end.
    key = (times_measured, device, m, dtype, *w.key)
    # Read once: another thread may empty it at any time.
    found: Config = _chosen.get(key, _UNKNOWN)
    if found is not _UNKNOWN:
        return found
    entry = _entries(_name(device)).get(key_of(w, bucket, dtype))
    if entry is None and mode == "1":
        if _is_capturing():
            # Not remembered: the next call outside of a capture measures.
            return _default_of(w, m, device)
        entry = _first_use(w, bucket, dtype, device)
    config = _default_of(w, m, device) if entry is None else _config_of(entry)
    _chosen[key] = config
    return config


def _is_capturing() -> bool:
    return not launch.INTERPRETED and torch.cuda.is_current_stream_capturing()


def _first_use(w: Weight, bucket: int, dtype: torch.dtype, device: int) -> Entry | None:
    """Measures a bucket within a forward, which goes on by the default where that fails."""
    attempt = _name(device), key_of(w, bucket, dtype)
    if attempt in _failed:
        return None
    zero_dtype = None if w.zero_point is None else w.zero_point.dtype
    try:
        ws = random_weights(w.arrangement, w.scale.dtype, zero_dtype, device)
        return _tune_bucket(ws, bucket, dtype, device, graph_time)
    except Exception as error:
        _failed.add(attempt)
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(f"{attempt[1]} is not tuned, the default is used: {reason}", stacklevel=2)
        return None


def _default_of(w: Weight, m: int, device: int) -> Config:
    affine = w.zero_point is not None
    return default(w.arrangement, m, launch.gpu_at(device), affine=affine)


def default(a: Arrangement, m: int, gpu: Gpu, *, affine: bool = False) -> Config:
    """What the data of ``configs`` says."""
    if m <= gpu.limits.small_m:
        return as_run(small_config(a.n, m, a.bits, gpu, affine=affine), gpu)
    if serves_many(a, m, gpu, affine=affine):
        return many_config(a.n, m, a.bits, a.k_tiles, gpu, affine=affine)
    if m <= gpu.limits.gemm_m:
        return gemm_config(a.n, m, a.bits, a.k_tiles, gpu)
    return None


def bucket_of(m: int) -> int | None:
    """The bucket of m rows, or None above the last."""
    return next((bucket for bucket in BUCKETS if m <= bucket), None)


def tune_layers(
    layers: Iterable[Layer],
    *,
    ms: Iterable[int] = BUCKETS,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | int | None = None,
    timer: Timer | None = None,
) -> int:
    """Measures the configurations of layers, and stores the fastest for later processes.

    Buckets that are stored already are left as they are. Layers of the same format (codebook or
    affine), n and k share what is found.

    Args:
        layers: format, n and k of each.
        ms: rows of x; each stands for its bucket, above the last for none.
        dtype: of the activations.
        device: the GPU; the current one by default.
        timer: microseconds a call of functions that do the same; a CUDA graph by default.

    Returns:
        How many buckets were measured.

    Raises:
        RuntimeError: where torch finds no GPU, or no configuration of a bucket runs and is right.
        TypeError, ValueError: for activations that Triton's kernels do not take, and for what is
            no layer or no number of rows.
    """
    check_activations("tune_layers", dtype, DTYPES)
    checked, buckets = checked_layers("tune_layers", layers), _buckets_of(ms)
    index = -1 if launch.INTERPRETED else gpu_index("tune_layers", device)
    count = 0
    for format, n, k in checked:
        a = Arrangement(n, k, format.bits, format.group_size_for(k))
        zero_dtype = zero_point_dtype(format) if format.is_affine else None
        ws: list[Weight] = []
        for bucket in buckets:
            scale_dtype = SCALE_DTYPES[format.scale_dtype]
            ws = ws or random_weights(a, scale_dtype, zero_dtype, index)
            if key_of(ws[0], bucket, dtype) not in _entries(_name(index)):
                _tune_bucket(ws, bucket, dtype, index, timer or graph_time)
                count += 1
    return count


def _buckets_of(ms: Iterable[int]) -> list[int]:
    ms = list(ms)
    for m in ms:
        if type(m) is not int or m < 1:
            raise ValueError(f"tune_layers: ms must be whole numbers of at least 1, got {m!r}")
    return sorted({bucket for m in ms if (bucket := bucket_of(m)) is not None})


def key_of(w: Weight, bucket: int, dtype: torch.dtype) -> str:
    """What a measurement holds for: sizes, dtypes of x, of scale and, if affine, of zero point."""
    a, zero = w.arrangement, w.zero_point
    kind = "codebook" if zero is None else "affine"
    dtypes = (dtype, w.scale.dtype, *([] if zero is None else [zero.dtype]))
    names = "-".join(str(each).removeprefix("torch.") for each in dtypes)
    return f"{kind}{a.bits}-n{a.n}-k{a.k}-g{a.group_size}-{names}-m{bucket}"


def _tune_bucket(
    ws: list[Weight], bucket: int, dtype: torch.dtype, device: int, timer: Timer
) -> Entry:
    """Measures one bucket and stores it."""
    a, gpu, affine = ws[0].arrangement, launch.gpu_at(device), ws[0].zero_point is not None
    first = default(a, bucket, gpu, affine=affine)
    # A generator of its own: that of the program stays where it is.
    place = ws[0].words.device
    generator = torch.Generator(place).manual_seed(0)
    x = torch.randn(bucket, a.k, dtype=torch.float32, device=place, generator=generator).to(dtype)
    with torch.no_grad(), launch.on_device_of(x):
        oracle = x.float() @ launch.dequantise(ws[0], dtype).float().T
        times: dict[Config, float] = {}
        others = candidates(bucket, a.bits, gpu, affine=affine) + many_candidates(a, bucket, gpu)
        for config in dict.fromkeys([first, *others]):
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
    entry: Entry = {
        "kernel": _kernel_of(best),
        "config": {} if best is None else asdict(best),
        "us": round(times[best], 2),
        "default_us": round(times[first], 2) if first in times else None,
    }
    new = {key_of(ws[0], bucket, dtype): entry}
    global times_measured
    # Of two counts at once one would be lost, and what was chosen before it would be kept.
    with _counting:
        _entries(_name(device)).update(new)
        times_measured += 1
        _chosen.clear()
    store_entries(_name(device), new)
    return entry


@cache
def _entries(name: str) -> dict[str, Entry]:
    """What is known for a GPU, by ``_name``: read once, added to."""
    entries = load_entries(name)
    return {key: entry for key, entry in entries.items() if _is_whole(entry)}


def _is_whole(entry: Entry) -> bool:
    try:
        _config_of(entry)
    except (KeyError, TypeError):
        return False
    return True


def _config_of(entry: Entry) -> Config:
    make = KINDS[entry["kernel"]]
    config: Config = None if make is None else make(**entry["config"])
    return config


def _kernel_of(config: Config) -> str:
    return next(name for name, make in KINDS.items() if make is None or isinstance(config, make))


@cache
def _name(device: int) -> str:
    """Of the GPU and the version of Triton, the same for every GPU of a kind."""
    gpu = "interpreter" if device < 0 else torch.cuda.get_device_name(device)
    return f"{gpu}, triton {triton.__version__}"


@cache
def _mode() -> str | None:
    mode = os.environ.get(TUNE_VARIABLE) or None
    if mode not in (None, "0", "1"):
        raise ValueError(f"{TUNE_VARIABLE} must be 0, 1 or not set, got {mode!r}")
    return mode
