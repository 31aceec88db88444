"""This machine: device, caches, memory, versions of modules."""

import os
import sys
from importlib import import_module, util
from pathlib import Path
from typing import Any

import torch

from fdk_bench.rows import Facts, cpu_name, gather_facts

MIB = 1 << 20
# A shared last-level cache may be larger than the system reports.
COLD_BYTES_CPU = 192 * MIB
COLD_BYTES_GPU = 256 * MIB
MODULES = ("torch", "triton", "numpy", "fdk_cpu", "fdk_cuda")


def default_device() -> str:
    """Return ``cuda`` where torch finds a GPU, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name(device: str) -> str:
    """Return the name of the GPU or of the processor."""
    if torch.device(device).type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return cpu_name()


def facts(benchmark: str, device: str, more: tuple[str, ...] = ()) -> Facts:
    """Gather the facts of a run; imports the backends that are installed, for their versions.

    Args:
        benchmark: name of the subcommand.
        device: ``cpu`` or ``cuda``.
        more: imported modules whose versions matter too.
    """
    for name in MODULES:
        module_or_none(name)
    return gather_facts(
        benchmark,
        device=device_name(device),
        threads=torch.get_num_threads(),
        modules=(*MODULES, *more),
    )


def caches() -> dict[str, int]:
    """Return the bytes of each cache of the first core, by ``L1 data`` and so on."""
    found = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind, size = (
                (folder / name).read_text().strip() for name in ("level", "type", "size")
            )
        except OSError:
            continue
        suffix = "" if kind == "Unified" else f" {kind.lower()}"
        unit = {"K": 1 << 10, "M": 1 << 20}.get(size[-1], 1)
        found[f"L{level}{suffix}"] = int(size.rstrip("KM")) * unit
    return found


def cold_bytes(device: str) -> int:
    """Return how many bytes copies of a weight must have so that each is cold in its turn."""
    if torch.device(device).type == "cuda":
        cache = int(torch.cuda.get_device_properties(device).L2_cache_size)
        return max(COLD_BYTES_GPU, 4 * cache)
    return max(COLD_BYTES_CPU, 2 * max(caches().values(), default=0))


def memory_bytes(device: str) -> int:
    """Return the bytes of memory of a device, used or free; no limit where it is unknown."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if not hasattr(os, "sysconf"):  # Windows
        return sys.maxsize
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def module_or_none(name: str) -> Any:
    """Return a module where it is installed and imports, else None."""
    if name in sys.modules:
        return sys.modules[name]
    try:
        return import_module(name) if util.find_spec(name) else None
    except Exception:  # a broken package, or one that raises where there is no GPU
        return None
