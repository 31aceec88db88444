"""The read floor: the time that this machine takes to read a number of bytes from memory, once."""

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from fdk_bench.machine import cold_bytes, module_or_none
from fdk_bench.timing import Call, time_graphs

try:
    import triton  # type: ignore[import-untyped]
    import triton.language as tl  # type: ignore[import-untyped]
except ImportError:  # on a CPU without it
    triton = None

# GPU: sizes measured in each octave. They are 3 to 6 % apart, with a straight line in between.
SIZES_PER_OCTAVE = 16
SMALLEST = 64 << 10


class Floor(Protocol):
    """Measures reading in the same process and, on a CPU, in turns with the contenders."""

    def begin(self) -> None:
        """Forget earlier measurements, where the rate of the machine varies."""

    def probe(self) -> None:
        """Measure once more, where the rate of the machine varies."""

    def seconds(self, nbytes: int) -> float:
        """Return the time to read ``nbytes`` once."""


def read_floor(device: str) -> Floor:
    """Return the floor of a device."""
    return GpuFloor(device) if torch.device(device).type == "cuda" else CpuFloor()


class CpuFloor:
    """Bytes over the median bandwidth of the probes since ``begin``, for memory in no cache.

    Only probes of the same turns count: a shared machine drifts twofold within minutes. Reads with
    fdk-cpu, or with torch's sum (which is slower) where that is not installed.
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
        """Read the next quarter of the memory."""
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
    """The time of a kernel that only reads, in a CUDA graph with a cold L2, at ``nbytes``.

    A launch costs about a microsecond and small reads do not fill the machine, so times are
    measured at sizes close to each other and not divided from one rate.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._times: dict[int, float] = {}
        self._memory = torch.empty(0, dtype=torch.int32, device=device)

    def begin(self) -> None:
        """Do nothing: a GPU reads at one rate."""

    def probe(self) -> None:
        """Do nothing: sizes are measured when they are first asked for."""

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
        if triton is not None:
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
    """Return the measured sizes below and above a number of bytes, equal where it is one.

    Sizes are powers of two and ``SIZES_PER_OCTAVE`` even steps to the next.
    """
    nbytes = max(nbytes, SMALLEST)
    octave = 1 << nbytes.bit_length() - 1
    step = octave // SIZES_PER_OCTAVE
    below = octave + (nbytes - octave) // step * step
    return below, below if nbytes == below else below + step


def _torch_sum(data: Tensor) -> object:
    return data.view(torch.int64).sum() if data.nbytes % 8 == 0 else data.sum()


@dataclass(frozen=True)
class ReadConfig:
    """32-bit words per program of the read kernel, and its warps."""

    block: int
    warps: int


# Small blocks fill the machine at 1 MiB, large ones read fastest at 100 MiB.
CONFIGS = (ReadConfig(1024, 4), ReadConfig(4096, 4), ReadConfig(8192, 8), ReadConfig(16384, 8))
# A sum that never occurs: nothing is stored, yet the loads are not optimised away.
NEVER = -0x5EED5EED

if triton is not None:
    # data :: [size, int32]
    # out  :: [1, int32]
    @triton.jit  # type: ignore[untyped-decorator]
    def read_kernel(data, out, size, never, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: D103
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        words = tl.load(data + offsets, mask=offsets < size, other=0, eviction_policy="evict_first")
        total = tl.sum(words)
        tl.store(out, total, mask=total == never)


def read(data: Tensor, config: ReadConfig) -> Tensor:
    """Read ``data :: [size, int32]`` once."""
    out = torch.empty(1, dtype=torch.int32, device=data.device)
    grid = (triton.cdiv(data.numel(), config.block),)
    read_kernel[grid](data, out, data.numel(), NEVER, BLOCK=config.block, num_warps=config.warps)
    return out
