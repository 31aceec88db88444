"""The read floor: how long this machine takes to read so many bytes once, from memory."""

import statistics
import time
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from fdk_bench.machine import cold_bytes, module_or_none
from fdk_bench.timing import Call, time_graphs

# Sizes that are measured on a GPU, to an octave: 3 to 6 % apart, with a line between them. Each is
# a search over configurations, and each m, width and peer has a size of its own.
SIZES_PER_OCTAVE = 16
SMALLEST = 64 << 10


class Floor(Protocol):
    """Measures reading in the same process and, on a CPU, in turns with what is measured."""

    def begin(self) -> None:
        """Forgets what was measured before, where the rate of the machine varies."""

    def probe(self) -> None:
        """Measures once more, where the rate of the machine varies."""

    def seconds(self, nbytes: int) -> float:
        """Time to read so many bytes once."""


def read_floor(device: str) -> Floor:
    """The floor of a device."""
    return GpuFloor(device) if torch.device(device).type == "cuda" else CpuFloor()


class CpuFloor:
    """Bytes over the bandwidth at which memory that no cache holds is read; median of the probes.

    Those since ``begin``: with all of a run, a 4-bit layer took 63 % of its floor once the machine
    had become faster (a shared one; its speed drifts twofold within minutes).

    Reads with fdk-cpu, and with torch's sum (which is slower) where that is not installed.
    """

    def __init__(self) -> None:
        native = module_or_none("fdk_cpu")
        self._read = native.read_sum if native else _torch_sum
        self._memory = torch.ones(cold_bytes("cpu"), dtype=torch.uint8)
        self._rates: list[float] = []
        self._turn = 0
        self.probe()

    def begin(self) -> None:
        """See ``Floor``."""
        self._rates.clear()

    def probe(self) -> None:
        """Reads the quarter after that which was read last."""
        quarter = self._memory.nbytes // 4
        self._turn += 1
        part = self._memory[self._turn % 4 * quarter :][:quarter]
        start = time.perf_counter()
        self._read(part)
        self._rates.append(quarter / (time.perf_counter() - start))

    def seconds(self, nbytes: int) -> float:
        """See ``Floor``."""
        return nbytes / statistics.median(self._rates)


class GpuFloor:
    """Reads just as many bytes with a kernel that does nothing else, in a CUDA graph, L2 cold.

    A launch costs about a microsecond and small reads do not fill the machine, so times are
    measured at sizes close to each other and not divided from one rate.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._times: dict[int, float] = {}
        self._memory = torch.empty(0, dtype=torch.int32, device=device)
        self._has_triton = module_or_none("triton") is not None

    def begin(self) -> None:
        """Nothing: see ``probe``."""

    def probe(self) -> None:
        """Nothing: a GPU reads at one rate, and sizes are measured when first asked for."""

    def seconds(self, nbytes: int) -> float:
        """See ``Floor``."""
        below, above = neighbours(nbytes)
        for size in (below, above):
            if size not in self._times:
                self._times[size] = self._measure(size)
        share = (nbytes - below) / (above - below) if above > below else 1.0
        return self._times[below] + share * (self._times[above] - self._times[below])

    def _measure(self, size: int) -> float:
        cold = cold_bytes(self._device)
        copies = max(2, -(-cold // size))
        if self._memory.nbytes < copies * size:
            self._memory = torch.ones(copies * size // 4, dtype=torch.int32, device=self._device)
        contenders: list[list[Call]]
        parts = [self._memory[i * size // 4 : (i + 1) * size // 4] for i in range(copies)]
        if self._has_triton:
            from fdk_bench.read_kernel import CONFIGS, read

            contenders = [[partial(read, part, config) for part in parts] for config in CONFIGS]
        else:
            contenders = [[partial(_torch_sum, part) for part in parts]]
        timings = time_graphs(contenders)
        errors = [timing for timing in timings if isinstance(timing, Exception)]
        measured = [timing.median for timing in timings if not isinstance(timing, Exception)]
        if not measured:
            raise errors[0]
        return min(measured)


def neighbours(nbytes: int) -> tuple[int, int]:
    """The measured sizes around a number of bytes, the same twice where it is one of them.

    A power of two and ``SIZES_PER_OCTAVE`` even steps to the next.
    """
    nbytes = max(nbytes, SMALLEST)
    octave = 1 << nbytes.bit_length() - 1
    step = octave // SIZES_PER_OCTAVE
    below = octave + (nbytes - octave) // step * step
    return below, below if nbytes == below else below + step


def _torch_sum(data: Tensor) -> object:
    return data.view(torch.int64).sum() if data.nbytes % 8 == 0 else data.sum()
