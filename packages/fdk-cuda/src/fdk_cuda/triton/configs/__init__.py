"""What a configuration of each Triton kernel is, and the GPUs: data, with no kernel in sight.

Which is chosen is in ``small_configs``, ``many_configs`` and ``gradient_configs``.
``tune.tune_layers`` measures better ones for a GPU and a layer; these are what is used until then.
"""

from dataclasses import dataclass

from fdk_cuda.triton.layout import TILE_N


@dataclass(frozen=True)
class SmallConfig:
    """Of ``small_kernel``: 16 * n_tiles outputs a program, k shared between its warps.

    A warp loads its words ``ahead`` tiles before it needs them, and the program has them brought to
    the L2 ``fetch`` rounds before. With ``overlap`` it starts before the last kernel ends. These
    two are for compute capability 9.0 and later, and do nothing elsewhere. A thread has at most
    ``registers``, of 0 as many as ptxas likes. With ``minus``, where x's dtype holds the zero
    points of an affine format, these are an operand, and no sums of x are made.
    """

    n_tiles: int
    warps: int
    ahead: int = 1
    fetch: int = 0
    overlap: bool = False
    registers: int = 0
    minus: bool = False


@dataclass(frozen=True)
class GemmConfig:
    """Of ``gemm_kernel``: 16 * tiles * warps outputs and block_m rows a program."""

    tiles: int
    warps: int
    block_m: int
    split_k: int = 1
    stages: int = 3


@dataclass(frozen=True)
class ManyConfig:
    """Of ``many_kernel``: 128 outputs and block_m rows a program.

    k is in ``split_k`` parts. Programs of two parts are a cluster with ``cluster`` of 2, and add up
    among themselves.
    """

    block_m: int
    split_k: int = 1
    cluster: int = 1

    @property
    def parts(self) -> int:
        """Sums that ``reduce_kernel`` adds."""
        return self.split_k // self.cluster

    @property
    def stages(self) -> int:
        """Of 64 columns of x: 192 KiB of them at most."""
        return 6 if self.block_m > 128 else 8


@dataclass(frozen=True)
class ManyTransposedConfig:
    """Of ``many_transposed_kernel``: block_m rows a program, 64, 128 or 256, in split_n parts of n.

    It decodes ``tiles`` of 16 rows of the weight while products of as many run.
    """

    block_m: int = 64
    split_n: int = 1
    tiles: int = 1

    @property
    def positions(self) -> int:
        """Of a warp: as many as sums leave registers for."""
        return 256 // self.block_m

    @property
    def stages(self) -> int:
        """Of 64 columns of dy: 128 KiB of them at most."""
        return 6 if self.block_m < 256 else 4


@dataclass(frozen=True)
class TransposedConfig:
    """Of ``transposed_kernel``: 8 * m_tiles rows and some positions of a tile a program.

    Its warps share n, and so do split_n programs; a warp loads ``ahead`` rounds before it needs
    what it loads. With ``table`` a program fills one in shared memory; with ``overlap`` it starts
    before the last kernel ends.
    """

    tiles: int
    warps: int
    m_tiles: int
    split_n: int = 1
    ahead: int = 1
    positions: int = 8
    table: bool = False
    overlap: bool = False


@dataclass(frozen=True)
class DequantiseConfig:
    """Of ``dequantise_kernel``: a tile of k a warp, ``rounds`` of them along n.

    With ``ahead``, without which there is one round, the words of the next are loaded before one is
    stored. With ``table`` a program fills one in shared memory.
    """

    warps: int = 4
    rounds: int = 1
    ahead: bool = False
    table: bool = False


@dataclass(frozen=True)
class Limits:
    """Up to which m each kernel serves; above the last of its direction, dequantise and cuBLAS."""

    small_m: int = 16
    # H200, 4 bits, fused and dequantised, 4096 x 4096, 8192 x 8192 and 28672 x 8192: m = 128 19.0
    # and 24.6 us, 48.3 and 88, 191 and 288; m = 256 45 and 26, 90 and 95, 329 and 337, and of 1
    # bit, 8192 x 8192, 112 and 90.
    gemm_m: int = 128
    transposed_m: int = 64
    # 0: nowhere.
    many_m: int = 0
    many_transposed_m: int = 0


# Of ``many_kernel``: two groups of 64 outputs.
MANY_WARPS = 8
MANY_OUTPUTS = TILE_N * MANY_WARPS


@dataclass(frozen=True)
class Gpu:
    """What decides about configurations on the GPUs of one compute capability.

    Attributes:
        measured_on: the GPU that the numbers are measured on, or None: scaled by the number of
            processors from those of the H200, and not timed.
        shared_bytes: of shared memory that a program may take.
        processors: of the largest such GPU.
        can_overlap: whether kernels overlap and fetch to the L2: compute capability 9.0 or later.
        limits: up to which m each kernel serves.
    """

    measured_on: str | None
    shared_bytes: int
    processors: int
    can_overlap: bool = True
    limits: Limits = Limits()

    @property
    def few_outputs(self) -> int:
        """Up to so many outputs, the more warps share k."""
        # H200, 4096 x 4096, 4 bits, m = 1: 9.5 us -> 7.9 us.
        return 4096 * self.processors // H200_PROCESSORS // TILE_N * TILE_N

    @property
    def enough_programs(self) -> int:
        """Programs that fill the machine with some to spare: 256 on an H200."""
        return 256 * self.processors // H200_PROCESSORS


H200_PROCESSORS = 132
# Of shared memory a program gets as much unasked.
UNASKED_BYTES = 48 << 10
GPUS = {
    (8, 0): Gpu(None, 163 << 10, 108, can_overlap=False),  # A100
    (8, 6): Gpu(None, 99 << 10, 84, can_overlap=False),  # RTX 3090, A40
    (8, 9): Gpu(None, 99 << 10, 142, can_overlap=False),  # L40S, RTX 4090
    (9, 0): Gpu(
        "NVIDIA H200", 227 << 10, H200_PROCESSORS, limits=Limits(many_m=1024, many_transposed_m=256)
    ),
    (10, 0): Gpu(None, 227 << 10, 148),  # B200
    (12, 0): Gpu(None, 99 << 10, 188),  # RTX PRO 6000, RTX 5090
}
H200 = GPUS[9, 0]


def gpu_of(capability: tuple[int, int]) -> Gpu:
    """The data for a compute capability: its own, or the nearest before it."""
    known = [own for own in GPUS if own <= capability]
    return GPUS[max(known)] if known else GPUS[min(GPUS)]
