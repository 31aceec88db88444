"""Configurations of the Triton kernels: data by GPU, width and size, with no kernel in sight.

``tune.tune_layers`` measures better ones for a GPU and a layer; these are what is used until then.
"""

from dataclasses import dataclass, replace

from fdk_cuda.triton.arrangement import POSITIONS, TABLE_BYTES, TILE_N, UNITS, Arrangement


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
    """Of ``many_transposed_kernel``: block_m rows, and four positions of eight tiles a program."""

    block_m: int = 64
    split_n: int = 1

    @property
    def stages(self) -> int:
        """Of 64 columns of dy: 48 KiB of them."""
        return 6


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


@dataclass(frozen=True)
class Choice:
    """Of ``small_kernel`` by the outputs: up to ``few_outputs``, up to twice as many, more."""

    few: SmallConfig
    some: SmallConfig
    many: SmallConfig

    @property
    def all(self) -> tuple[SmallConfig, ...]:
        """The three."""
        return self.few, self.some, self.many


ONE_TILE = SmallConfig(n_tiles=1, warps=8)
ONE_TILE_OVERLAP = SmallConfig(n_tiles=1, warps=8, overlap=True)
ONE_TILE_4_WARPS = SmallConfig(n_tiles=1, warps=4, overlap=True)
ONE_TILE_4_WARPS_FETCHED = SmallConfig(n_tiles=1, warps=4, fetch=2, overlap=True)
NOTHING_AHEAD = SmallConfig(n_tiles=1, warps=8, ahead=0, fetch=2)
NOTHING_AHEAD_OVERLAP = SmallConfig(n_tiles=1, warps=8, ahead=0, fetch=2, overlap=True)
NOTHING_AHEAD_4_WARPS = SmallConfig(n_tiles=1, warps=4, ahead=0, fetch=2, overlap=True)
TWO_TILES = SmallConfig(n_tiles=2, warps=4, overlap=True)
TWO_TILES_ALONE = SmallConfig(n_tiles=2, warps=4, fetch=3)
TWO_TILES_FETCHED = SmallConfig(n_tiles=2, warps=4, fetch=2, overlap=True)
TWO_TILES_8_WARPS = SmallConfig(n_tiles=2, warps=8)
TWO_TILES_8_WARPS_OVERLAP = SmallConfig(n_tiles=2, warps=8, overlap=True)
TWO_TILES_8_WARPS_FETCHED = SmallConfig(n_tiles=2, warps=8, fetch=2, overlap=True)
# By the bits of a code. Behind each, microseconds on an H200, 2026-11-22: 4096 x 4096, 8192 x 8192,
# 28672 x 8192; of 28672 x 8192, 6 to 8 bits, before sums went through shared memory as they do now.
FEW_ROWS = {
    1: Choice(TWO_TILES_8_WARPS_FETCHED, ONE_TILE_4_WARPS_FETCHED, TWO_TILES_FETCHED),  # 3.5 9.1 27
    2: Choice(TWO_TILES_8_WARPS_OVERLAP, TWO_TILES_8_WARPS_OVERLAP, TWO_TILES_FETCHED),  # - 10.3 33
    3: Choice(ONE_TILE, ONE_TILE_4_WARPS, ONE_TILE_4_WARPS),  # - 12.1 37.4
    4: Choice(ONE_TILE, ONE_TILE_OVERLAP, TWO_TILES_FETCHED),  # 5.7 12.0 38.8
    5: Choice(ONE_TILE, NOTHING_AHEAD_4_WARPS, NOTHING_AHEAD_4_WARPS),  # - 19.1 59.4
    6: Choice(ONE_TILE, ONE_TILE_4_WARPS_FETCHED, ONE_TILE_OVERLAP),  # - 19.6 71.6
    7: Choice(NOTHING_AHEAD, ONE_TILE_4_WARPS, NOTHING_AHEAD_OVERLAP),  # - 21.1 78.2
    8: Choice(ONE_TILE, ONE_TILE_OVERLAP, ONE_TILE_4_WARPS_FETCHED),  # - 20.4 73.8
}
# The same for 9 to 16 rows of x; 8 bits at 28672 x 8192 before sums went so.
MORE_ROWS = {
    1: Choice(TWO_TILES_8_WARPS, TWO_TILES_FETCHED, TWO_TILES_FETCHED),  # - 13.1 49.0
    2: Choice(TWO_TILES_8_WARPS, TWO_TILES_ALONE, TWO_TILES_FETCHED),  # - 17.5 49.0
    3: Choice(ONE_TILE, TWO_TILES, TWO_TILES),  # - 17.0 59.3
    4: Choice(TWO_TILES_8_WARPS, TWO_TILES_8_WARPS_OVERLAP, TWO_TILES_FETCHED),  # - 17.7 55.7
    5: Choice(NOTHING_AHEAD, NOTHING_AHEAD_4_WARPS, NOTHING_AHEAD_4_WARPS),  # - 28.7 86.1
    6: Choice(NOTHING_AHEAD, NOTHING_AHEAD_4_WARPS, NOTHING_AHEAD_4_WARPS),  # - 26.7 -
    7: Choice(NOTHING_AHEAD, NOTHING_AHEAD_4_WARPS, NOTHING_AHEAD_4_WARPS),  # - 34.2 -
    8: Choice(TWO_TILES_8_WARPS, TWO_TILES_8_WARPS_OVERLAP, TWO_TILES),  # - 24.2 81.1
}
# Of affine formats where it is not the same: the sums of x and the zero points take registers, and
# at 8192 outputs programs of 80 for 64 or of 137 for 128 no longer fit the machine all at once.
# H200, 8192 x 8192, m = 1, as codebooks and so: 1 bit 15.1 -> 12.3 us, 2 bits 14.7 -> 13.7, 3 bits
# 25.0 -> 15.2 (without ``minus``), 4 bits 19.4 -> 16.7, 7 bits 36.1 -> 24.9; m = 16, 3 bits 31.8 ->
# 25.6. ``minus`` takes fewer registers: m = 1, 1 bit 12.9 -> 12.3, 4 bits 17.2 -> 16.6, 6 bits 23.1
# -> 20.8; m = 16, one tile and four warps, 4 bits 25.0 -> 21.3, 6 bits 31.8 -> 25.0. But two tiles
# of 2 bits took 17.7 for 14.7, and with it 5 bits 24.3 for 21.7 and 30.4 for 27.7 with 16 rows, 7
# bits 29.7 for 25.8 and 36.3 for 33.3, 3 bits with 16 rows 30.7 for 26.3. 1 bit with 16 rows and,
# with Triton 3.7.1, 3 bits with one spill without it.
AFFINE_ONE_TILE_4_WARPS = replace(ONE_TILE_4_WARPS, registers=128, minus=True)
AFFINE_ONE_TILE_FETCHED = replace(ONE_TILE_4_WARPS_FETCHED, minus=True)
AFFINE_ONE_TILE = SmallConfig(1, warps=8, ahead=0, overlap=True, registers=64, minus=True)
AFFINE_NOTHING_AHEAD = SmallConfig(n_tiles=1, warps=4, ahead=0, overlap=True, minus=True)
AFFINE_TWO_TILES_FETCHED = replace(TWO_TILES_FETCHED, minus=True)
AFFINE_TWO_TILES_8_WARPS = replace(TWO_TILES_8_WARPS, minus=True)
AFFINE_FEW_ROWS: dict[int, Choice] = {
    1: Choice(TWO_TILES_8_WARPS_FETCHED, AFFINE_NOTHING_AHEAD, AFFINE_NOTHING_AHEAD),
    2: Choice(TWO_TILES_8_WARPS_OVERLAP, AFFINE_ONE_TILE_4_WARPS, TWO_TILES_FETCHED),
    3: Choice(ONE_TILE, AFFINE_ONE_TILE_4_WARPS, AFFINE_ONE_TILE_4_WARPS),
    4: Choice(ONE_TILE, AFFINE_ONE_TILE, AFFINE_ONE_TILE),
    6: Choice(ONE_TILE, AFFINE_ONE_TILE_FETCHED, ONE_TILE_OVERLAP),
    7: Choice(NOTHING_AHEAD, NOTHING_AHEAD_4_WARPS, NOTHING_AHEAD_4_WARPS),
}
AFFINE_MORE_ROWS: dict[int, Choice] = {
    1: Choice(AFFINE_TWO_TILES_8_WARPS, AFFINE_TWO_TILES_FETCHED, AFFINE_TWO_TILES_FETCHED),
    3: Choice(ONE_TILE, ONE_TILE_4_WARPS, ONE_TILE_4_WARPS),
    4: Choice(TWO_TILES_8_WARPS, AFFINE_ONE_TILE_4_WARPS, TWO_TILES_FETCHED),
    6: Choice(NOTHING_AHEAD, AFFINE_ONE_TILE_4_WARPS, NOTHING_AHEAD_4_WARPS),
}
# Where limits were not timed there are none, and 1 bit has one tile: with two, 184 bytes of stack
# for sm_80, 112 for sm_100, 200 for sm_120 (Triton 3.7.1).
AFFINE_MORE_ROWS_ELSEWHERE = replace(ONE_TILE_4_WARPS_FETCHED, minus=True)
# Of ``many_kernel``: two groups of 64 outputs.
MANY_WARPS = 8
MANY_OUTPUTS = TILE_N * MANY_WARPS
# Positions of a tile that a program of ``many_transposed_kernel`` has.
MANY_POSITIONS = 4
# Their words leave no registers for the sums of 256 rows: 8 and 336 bytes of stack.
WORDY_BITS = (5, 7)
GEMM_CONFIGS = (
    GemmConfig(tiles=1, warps=4, block_m=32),
    # H200, 4 bits, m = 64, 8192 x 8192: 34.7 us, 30.2 with a table, cuBLAS 38.5.
    GemmConfig(tiles=1, warps=8, block_m=64),
    GemmConfig(tiles=1, warps=8, block_m=128),
)
# The next three are for up to 8, 16 and 32 rows. H200, 8192 x 8192, m = 1, microseconds with four
# warps and with eight: 1 bit 16.6 and 15.8, 4 bits 15.7 both, 6 bits 25.8 and 23.6; but 2 bits
# 14.5 and 15.0. With more rows than 8 the sums leave no registers for words of the next tiles:
# m = 16, 2 bits 21.7, with them 22.1, 4 bits 23.1 and 24.0.
TRANSPOSED_CONFIGS = (
    TransposedConfig(tiles=1, warps=8, m_tiles=1, overlap=True),
    TransposedConfig(tiles=1, warps=4, m_tiles=2, ahead=0, overlap=True),
    TransposedConfig(tiles=1, warps=4, m_tiles=4, ahead=0, overlap=True),
)


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
        "NVIDIA H200", 227 << 10, H200_PROCESSORS, limits=Limits(many_m=1024, many_transposed_m=128)
    ),
    (10, 0): Gpu(None, 227 << 10, 148),  # B200
    (12, 0): Gpu(None, 99 << 10, 188),  # RTX PRO 6000, RTX 5090
}
H200 = GPUS[9, 0]


def gpu_of(capability: tuple[int, int]) -> Gpu:
    """The data for a compute capability: its own, or the nearest before it."""
    known = [own for own in GPUS if own <= capability]
    return GPUS[max(known)] if known else GPUS[min(GPUS)]


def small_config(n: int, m: int, bits: int, gpu: Gpu, *, affine: bool = False) -> SmallConfig:
    """For ``n`` outputs; the same for every m that a batch-invariant call may meet."""
    choice = (FEW_ROWS if m <= 8 else MORE_ROWS)[bits]
    if affine:
        choice = (AFFINE_FEW_ROWS if m <= 8 else AFFINE_MORE_ROWS).get(bits, choice)
    if n <= gpu.few_outputs:
        config = choice.few
    else:
        config = choice.some if n <= 2 * gpu.few_outputs else choice.many
    if gpu.measured_on is not None:
        return config
    if affine:
        if bits == 1 and m > 8:
            return AFFINE_MORE_ROWS_ELSEWHERE
        if bits == 3 and m <= 8:  # With eight warps 8 bytes of stack for sm_89 (Triton 3.7.1).
            config = choice.some
        return replace(config, registers=0)
    # With two tiles 16 bytes of stack for sm_120; with one as many for sm_80 (Triton 3.7.1).
    would_spill = bits == 3 and m > 8 and gpu.can_overlap and config.n_tiles == 2
    return ONE_TILE_4_WARPS if would_spill else config


def as_run(config: SmallConfig, gpu: Gpu) -> SmallConfig:
    """The configuration without what a GPU leaves aside."""
    return config if gpu.can_overlap else replace(config, fetch=0, overlap=False)


def gemm_config(n: int, m: int, bits: int, k_tiles: int, gpu: Gpu) -> GemmConfig:
    """For a product of m rows and n outputs."""
    config = next(c for c in GEMM_CONFIGS if m <= c.block_m or c is GEMM_CONFIGS[-1])
    if bits == 8:
        # Its tiles are short: with a fourth there is room for a table (``takes_table``).
        config = replace(config, stages=4)
    if gpu.measured_on is None:
        # Without stack (Triton 3.7.1): 128 rows of x took 48 bytes at 4 bits for sm_80 and sm_120,
        # 64 of 3 bits 16 for sm_100, of affine 6 bits 16 for sm_80, and so did eight warps of 7
        # bits; four of affine 3 bits 8 for sm_120.
        warps, most = {3: 8, 7: 4}.get(bits, config.warps), 32 if bits in (3, 6) else 64
        config = replace(config, warps=warps, block_m=min(config.block_m, most))
    config = fit(config, bits, gpu.shared_bytes)
    block_n = TILE_N * config.tiles * config.warps
    programs = -(-n // block_n) * -(-m // config.block_m)
    # One program of 128 rows fills a processor (8192 x 8192, 4 bits, m = 128: k in two 48.3 us, in
    # four 53.1), two of fewer rows do, but of 64 rows only at 4 and 8 bits (m = 64, k in two and in
    # four: 4 bits 31.6 and 28.6, 8 bits 40.7 and 37.6; 3 bits 35.3 and 38.1, 6 bits 38.2 and 42.1).
    fills = config.block_m >= 128 or (config.block_m == 64 and bits not in (4, 8))
    enough = gpu.enough_programs // (2 if fills else 1)
    split_k = 1
    # Parts of 1024 columns at least: 4096 x 4096, 4 bits, m = 64, k in eight 13.3 us, in four 12.8.
    columns = k_tiles * UNITS * POSITIONS[bits]
    while programs * split_k < enough and split_k < 8 and columns >= 2048 * split_k:
        split_k *= 2
    return replace(config, split_k=split_k)


def fits_many(a: Arrangement) -> bool:
    """Whether ``many_kernel`` takes a weight: one scale a step, rows of y where TMA may store."""
    return a.n % 8 == 0 and (a.groups == 1 or a.padded_group % 64 == 0)


def serves_many(a: Arrangement, m: int, gpu: Gpu, *, affine: bool = False) -> bool:
    """Whether ``many_kernel`` takes a product, and beats what else there is."""
    if not 32 < m <= _many_rows(a.bits, gpu, affine=affine) or not fits_many(a):
        return False
    size = a.n * a.k
    if m > 64:
        # H200, m = 256, 4096 x 4096: 4 bits 22.6 us, dequantised 25.1; wider codes are slower by
        # half. 8192 x 8192, 1 to 8 bits, 52 to 107 where it is 90 to 156.
        is_quick = a.bits <= 4 or (m <= 128 and a.bits in WORDY_BITS)
        return size >= (1 << 24 if is_quick else 1 << 25)
    if a.bits in WORDY_BITS:  # They leave gemm_kernel no registers: m = 64, 43.4 and 54.5 us for
        return size >= 1 << 24  # 51.4 and 177 (8192 x 8192).
    if a.bits == 3 and not affine:
        return False  # 28672 x 8192 143.7, gemm_kernel 115.1; 8192 x 8192 39.4 and 35.3.
    # Where two programs a processor have work: H200, m = 64, 4 bits, 14336 x 4096 27.0 us and 28672
    # x 8192 87.1, by gemm_kernel 32.1 and 94.9; but 8192 x 8192 29.7 and 28.6. There 1 and 2 bits
    # take 25.3 and 26.2 for 30.5 and 27.0, affine 1, 3 and 8 bits 36.3, 39.7 and 46.5 for 42.6,
    # 45.9 and 48.9.
    if size >= 1 << 26 and a.bits in ((1, 3, 8) if affine else (1, 2)):
        return True
    return size >= 1 << 25 and 4 * -(-a.n // MANY_OUTPUTS) >= 3 * gpu.processors


def _many_rows(bits: int, gpu: Gpu, *, affine: bool) -> int:
    """Up to which m ``many_kernel`` beats dequantising."""
    # H200, 8192 x 8192, many_kernel and dequantised, 512 rows: 5 bits 184.6 and 152.8 us, affine
    # 193.2 and 145.5, 7 bits 214.5 and 151.9, affine 4 bits 118.2 and 143.0, 6 and 8 bits 120.9 and
    # 144.1, 131.3 and 151.4. 1024 rows: 258.2 and 238.8, 273.2 and 247.6, affine 1 to 4 bits 234 to
    # 264 and 225 to 245; 4 bits 217.0 and 236.2, 3 bits 227.3 and 234.0.
    if bits in WORDY_BITS:
        return min(gpu.limits.many_m, 256)
    return min(gpu.limits.many_m, 512) if affine or bits > 4 else gpu.limits.many_m


def many_config(
    n: int, m: int, bits: int, k_tiles: int, gpu: Gpu, *, affine: bool = False
) -> ManyConfig:
    """For a product of m rows and n outputs."""
    block_m = 64 if m <= 64 else 128 if m <= 128 or bits in WORDY_BITS else 256
    programs = -(-n // MANY_OUTPUTS) * -(-m // block_m)
    # A processor holds two programs of 64 rows; one where a thread has more than 128 registers.
    is_wide = bits in (3, *WORDY_BITS) or (affine and bits == 1)
    room = gpu.processors * (2 if block_m == 64 and not is_wide else 1)
    split_k = 1
    while 2 * programs * split_k <= room and split_k < 8 and k_tiles >= 4 * split_k:
        split_k *= 2
    # Two parts of k are a cluster: H200, 8192 x 8192, 4 bits, m = 256, 61.1 us -> 56.9.
    # Not so at 8 bits of affine formats with 64 rows: 46.5, in clusters 53.4.
    pairs = 1 if affine and bits == 8 and block_m == 64 else 2
    return ManyConfig(block_m, split_k, min(split_k, pairs))


def last_round(m: int, n: int, config: ManyConfig, gpu: Gpu) -> int | None:
    """The output from which programs are the last of several rounds, and half of one at most.

    Of these, pairs may share k, and the round is over in half of its time.
    """
    blocks_m = -(-m // config.block_m)
    blocks_n = -(-n // MANY_OUTPUTS)
    first = blocks_n * blocks_m // gpu.processors * gpu.processors // blocks_m
    last = (blocks_n - first) * blocks_m
    # Of 64 rows a processor holds two programs.
    is_one_round = config.block_m <= 64 or config.split_k > 1 or first == 0
    if is_one_round or not 0 < 2 * last <= gpu.processors:
        return None
    return first * MANY_OUTPUTS


def dequantise_config(bits: int, *, affine: bool) -> DequantiseConfig:
    """For a whole weight."""
    # H200, 8192 x 8192, with a table and without: 6 bits 55.8 and 104.9 us, 7 65.2 and 113.9 (194.0
    # with one tile and 1944 bytes of stack), 8 58.7 and 82.7. At 1 to 5 bits eight tiles are no
    # quicker than one, 48.3 and 55.8 at 4: fewer programs are done at different times.
    if bits >= 6 and not affine:
        return DequantiseConfig(rounds=8, ahead=True, table=True)
    # Affine formats of long tiles have 248 to 376 bytes of stack without the loop (Triton 3.7.1).
    return DequantiseConfig(ahead=affine and bits in (1, 3, 5, 7))


def stage_bytes(config: GemmConfig, bits: int) -> tuple[int, int]:
    """Of words and of x that a stage of ``gemm_kernel`` holds: a whole tile of k."""
    tile_k = UNITS * POSITIONS[bits]
    block_n = TILE_N * config.tiles * config.warps
    return tile_k * bits // 8 * block_n, 2 * tile_k * config.block_m


def takes_table(config: GemmConfig, bits: int, group: int, shared: int) -> bool:
    """Whether ``gemm_kernel`` may fill a table in shared memory, of which Triton does not know.

    Triton asks for more than a program gets unasked as soon as its own buffers need it, and then
    for all: with buffers just below that there would be no room. Groups of 16 bring so many scales
    to a stage that these leave none (affine, 1 bit, k = 48: 204800 bytes without the table).
    """
    if bits not in TABLE_BYTES or group < 32:
        return False
    words, x = stage_bytes(config, bits)
    least = config.stages * x + (config.stages - 1) * words
    most = (words + x) * config.stages * 6 // 5
    return least > UNASKED_BYTES and most + TABLE_BYTES[bits] <= shared


def fit(config: GemmConfig, bits: int, shared: int) -> GemmConfig:
    """The configuration with fewer stages, then fewer rows, until its buffers fit."""
    # A fifth for scales and the rest.
    stage = sum(stage_bytes(config, bits)) * 6 // 5
    stages = min(config.stages, shared // stage)
    if stages < 2 and config.block_m > 16:
        return fit(replace(config, block_m=config.block_m // 2), bits, shared)
    return replace(config, stages=max(1, stages))
