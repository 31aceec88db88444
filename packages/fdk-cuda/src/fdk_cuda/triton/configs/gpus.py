"""GPUs that the kernels are configured for: sizes, and up to which m each kernel runs."""

from dataclasses import dataclass

from fdk_cuda.triton.layout import TILE_N

# Shared memory that a program gets without asking for more.
STATIC_SMEM_BYTES = 48 << 10
# The wgmma kernels: two warp groups, which compute 128 outputs.
WGMMA_WARPS = 8
WGMMA_TILE_N = TILE_N * WGMMA_WARPS
H200_PROCESSORS = 132


@dataclass(frozen=True)
class Limits:
    """The largest m of each kernel; past the last, dequantise and cuBLAS. 0: never used."""

    gemv_m: int = 16
    # H200, 4 bits, 8192 x 8192, fused and dequantised: m = 128 48 and 88 us, m = 256 90 and 95.
    gemm_m: int = 128
    gemm_wgmma_m: int = 0
    dgrad_m: int = 64
    dgrad_wgmma_m: int = 0


@dataclass(frozen=True)
class Gpu:
    """The GPUs of one compute capability.

    Attributes:
        architecture: the name in the configuration tables: ``ampere`` (8.x, Ada included),
            ``hopper`` or ``blackwell``.
        shared_bytes: shared memory that a program may ask for.
        processors: streaming multiprocessors of the largest such GPU.
        limits: up to which m each kernel runs.
    """

    architecture: str
    shared_bytes: int
    processors: int
    limits: Limits = Limits()

    @property
    def is_measured(self) -> bool:
        """True where configurations were timed (on an H200), not only checked for spills."""
        return self.architecture == "hopper"

    @property
    def can_overlap(self) -> bool:
        """True where it has programmatic dependent launch and bulk L2 prefetch (9.0 and later)."""
        return self.architecture != "ampere"

    @property
    def few_outputs(self) -> int:
        """Outputs up to which a GEMV has too few programs: 4096 on an H200."""
        return 4096 * self.processors // H200_PROCESSORS // TILE_N * TILE_N

    @property
    def enough_programs(self) -> int:
        """Programs that occupy every processor about twice: 256 on an H200."""
        return 256 * self.processors // H200_PROCESSORS


GPUS = {
    (8, 0): Gpu("ampere", 163 << 10, 108),  # A100
    (8, 6): Gpu("ampere", 99 << 10, 84),  # RTX 3090, A40
    (8, 9): Gpu("ampere", 99 << 10, 142),  # L40S, RTX 4090
    (9, 0): Gpu("hopper", 227 << 10, H200_PROCESSORS, Limits(gemm_wgmma_m=1024, dgrad_wgmma_m=256)),
    (10, 0): Gpu("blackwell", 227 << 10, 148),  # B200
    (12, 0): Gpu("blackwell", 99 << 10, 188),  # RTX PRO 6000, RTX 5090
}
H200 = GPUS[9, 0]


def gpu_of(capability: tuple[int, int]) -> Gpu:
    """Returns the data of a compute capability, or of the nearest one below it."""
    known = [own for own in GPUS if own <= capability]
    return GPUS[max(known)] if known else GPUS[min(GPUS)]
