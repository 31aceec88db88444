"""What the kernels run on: instruction set and threads."""

import torch

from fdk_cpu import _native
from fdk_cpu._native import MAX_THREADS

# None: as many as torch uses.
_threads: int | None = None


def instruction_sets() -> list[str]:
    """The instruction sets that this machine runs, plainest first."""
    return _native.instruction_sets()


def instruction_set() -> str:
    """The one in use: the best of ``instruction_sets``, or what ``FDK_CPU_ISA`` names.

    ``auto`` there is the best too, as where it is empty or not set.

    Raises:
        ValueError: where ``FDK_CPU_ISA`` names one that this machine does not run.
    """
    return _native.instruction_set()


def set_instruction_set(name: str) -> None:
    """Pins the instruction set for the process; ``auto`` is the best there is.

    Raises:
        TypeError: for what is no text.
        ValueError: for one that this machine does not run, naming those it does, or that the system
            refuses.
    """
    if not isinstance(name, str):
        raise TypeError(f"set_instruction_set: wanted a name or 'auto', got {name!r}")
    _native.set_instruction_set(name)


def num_threads() -> int:
    """Threads a kernel uses at most: ``set_num_threads``, or as many as torch; 256 at most."""
    return min(torch.get_num_threads() if _threads is None else _threads, MAX_THREADS)


def set_num_threads(threads: int | None) -> None:
    """Sets how many threads a kernel uses at most; None follows ``torch.get_num_threads``.

    More than 256 count as 256.

    Raises:
        ValueError: for less than one.
    """
    if threads is not None and (type(threads) is not int or threads < 1):
        raise ValueError(f"set_num_threads: wanted 1 or more, or None, got {threads!r}")
    global _threads
    _threads = threads
