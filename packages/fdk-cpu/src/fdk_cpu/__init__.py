"""Linear layers with 1- to 8-bit weights on x86 and ARM CPUs.

Importing this package registers the backend ``cpu`` of ``fdk_formats``, which ``backend="auto"``
selects for CPU tensors, and the kernels of its blockwise ops.
"""

try:
    from fdk_cpu import _native as _native
except ImportError as error:
    raise ImportError(
        "fdk_cpu: the compiled module _native is missing or does not load here "
        f"({error}); install a wheel, or build the package with a C++20 compiler"
    ) from error

from fdk_cpu import blockwise as blockwise
from fdk_cpu import rotation as rotation
from fdk_cpu import rounding as rounding
from fdk_cpu.backend import CpuBackend, CpuLayout, register_backends
from fdk_cpu.memory import copy_memory, read_sum
from fdk_cpu.runtime import (
    instruction_set,
    instruction_sets,
    num_threads,
    set_instruction_set,
    set_num_threads,
)

__version__ = "0.1.0"

__all__ = [
    "CpuBackend",
    "CpuLayout",
    "copy_memory",
    "instruction_set",
    "instruction_sets",
    "num_threads",
    "read_sum",
    "register_backends",
    "set_instruction_set",
    "set_num_threads",
]
