"""The instruction set and the number of threads that the kernels use."""

import torch

from fdk_cpu import _native
from fdk_cpu._native import MAX_THREADS

# None follows torch.get_num_threads.
_threads: int | None = None


def instruction_sets() -> list[str]:
    """Return the instruction sets that this machine supports, ``scalar`` first."""
    return _native.instruction_sets()


def instruction_set() -> str:
    """Return the instruction set in use.

    It is the best of ``instruction_sets`` unless ``FDK_CPU_ISA`` or ``set_instruction_set`` names
    another; empty and ``auto`` mean the best.

    Raises:
        ValueError: if ``FDK_CPU_ISA`` names one that this machine does not support.
    """
    return _native.instruction_set()


def set_instruction_set(name: str) -> None:
    """Pin the instruction set of this process; ``auto`` is the best one.

    Raises:
        TypeError: if the name is not a string.
        ValueError: if this machine does not support it, or the system refuses it.
    """
    if not isinstance(name, str):
        raise TypeError(f"set_instruction_set: wanted a name or 'auto', got {name!r}")
    _native.set_instruction_set(name)


def num_threads() -> int:
    """Return the most threads a kernel uses: torch's number, or that of ``set_num_threads``."""
    return min(torch.get_num_threads() if _threads is None else _threads, MAX_THREADS)


def set_num_threads(threads: int | None) -> None:
    """Set how many threads a kernel uses at most; None follows ``torch.get_num_threads``.

    More than 256 count as 256.

    Raises:
        ValueError: if the number is less than one.
    """
    if threads is not None and (type(threads) is not int or threads < 1):
        raise ValueError(f"set_num_threads: wanted 1 or more, or None, got {threads!r}")
    global _threads
    _threads = threads
