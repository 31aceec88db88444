"""Configurations of ``small_kernel``: by width, outputs and rows of x."""

from dataclasses import dataclass, replace

from fdk_cuda.triton.configs import Gpu, SmallConfig


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
TWO_TILES_NOTHING_AHEAD = replace(TWO_TILES, ahead=0)
TWO_TILES_NOTHING_AHEAD_FETCHED = replace(TWO_TILES, ahead=0, fetch=2)
TWO_TILES_168 = replace(TWO_TILES_ALONE, registers=168)
TWO_TILES_128 = replace(TWO_TILES, registers=128)
TWO_TILES_8_WARPS_128 = replace(TWO_TILES_8_WARPS, registers=128)
TWO_TILES_8_WARPS_OVERLAP_128 = replace(TWO_TILES_8_WARPS_OVERLAP, registers=128)
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
    # In turns, rows of 8192 columns, which are four rounds, too few to fetch ahead: 13.3 -> 12.3,
    # 49.7 -> 47.0 without; longer rows were not timed. 4096 x 4096: 6.4 -> 5.3 with overlap.
    1: Choice(TWO_TILES_8_WARPS_OVERLAP, TWO_TILES, TWO_TILES),  # 5.3 12.3 47.0
    2: Choice(TWO_TILES_8_WARPS, TWO_TILES_168, TWO_TILES_FETCHED),  # - 17.2 (without 17.7) 49.0
    3: Choice(ONE_TILE, TWO_TILES_NOTHING_AHEAD, TWO_TILES_NOTHING_AHEAD),  # - 16.6 56.3
    # Two programs of eight warps to a processor, four of four: 8.9 us -> 8.0, 18.5 -> 17.0, 56.6 ->
    # 54.5, 4096 x 14336 21.7 -> 19.4. Nothing fetched, 14336 x 4096 16.7 -> 16.0, 28672 x 8192 as
    # before.
    4: Choice(TWO_TILES_8_WARPS_128, TWO_TILES_8_WARPS_OVERLAP_128, TWO_TILES_128),
    # In turns, by one tile and by two: 29.9 us and 28.4, 26.9 and 25.9; 7 bits 34.7 and 32.9, but
    # with 48 bytes of stack (Triton 3.7.1), as 5 bits with nothing fetched, 28.3 -> 26.9. 6 bits
    # with words ahead 26.3 -> 25.2.
    5: Choice(NOTHING_AHEAD, TWO_TILES_NOTHING_AHEAD_FETCHED, NOTHING_AHEAD_4_WARPS),  # - 28.4 86.1
    6: Choice(NOTHING_AHEAD, TWO_TILES_FETCHED, NOTHING_AHEAD_4_WARPS),  # - 25.2 -
    7: Choice(NOTHING_AHEAD, NOTHING_AHEAD_4_WARPS, NOTHING_AHEAD_4_WARPS),  # - 34.2 -
    8: Choice(TWO_TILES_8_WARPS, TWO_TILES_8_WARPS_OVERLAP, TWO_TILES),  # - 24.2 81.1
}
# Of affine formats where it is not the same: sums of x, or zero points as an operand (``minus``),
# take registers. H200, 2026-11-24, in turns, as before and so (``-``: as it was): 4096 x 4096, 8192
# x 8192, 28672 x 8192. Of each all of one and two tiles, four and eight warps, with and without
# words ahead, fetching (one row of x), ``minus`` and a limit of 128 registers were timed at 8192 x
# 8192, with overlap, and the four fastest elsewhere. With 16 rows faster ones have stack (Triton
# 3.7.1): 3 bits 21.1, 5 bits 25.8, 7 bits 29.8, and 7.4 and 8.4 for 3 and 5 bits at 4096 x 4096; so
# has 7 bits with one row there, 7.4.
ONE_TILE_128 = replace(ONE_TILE_OVERLAP, registers=128)
ONE_TILE_MINUS = replace(ONE_TILE_128, ahead=0, minus=True)
ONE_TILE_4_WARPS_MINUS = replace(ONE_TILE_4_WARPS, minus=True)
ONE_TILE_4_WARPS_MINUS_128 = replace(ONE_TILE_4_WARPS_MINUS, registers=128)
ONE_TILE_4_WARPS_FETCHED_MINUS = replace(ONE_TILE_4_WARPS_FETCHED, minus=True)
LATE_4_WARPS = replace(ONE_TILE_4_WARPS, ahead=0)
NOTHING_AHEAD_4_WARPS_MINUS = replace(NOTHING_AHEAD_4_WARPS, minus=True)
TWO_TILES_MINUS = replace(TWO_TILES, minus=True)
TWO_TILES_FETCHED_MINUS = replace(TWO_TILES_FETCHED, minus=True)
TWO_TILES_NOTHING_AHEAD_MINUS = replace(TWO_TILES_NOTHING_AHEAD, minus=True)
TWO_TILES_8_WARPS_NOTHING_AHEAD = replace(TWO_TILES_8_WARPS_OVERLAP, ahead=0)
TWO_TILES_8_WARPS_MINUS = replace(TWO_TILES_8_WARPS_OVERLAP, minus=True)
AFFINE_FEW_ROWS: dict[int, Choice] = {
    # - 4.3, 11.7 -> 10.6, 39.7 -> 37.8
    1: Choice(TWO_TILES_8_WARPS_FETCHED, TWO_TILES, NOTHING_AHEAD_4_WARPS_MINUS),
    # - 4.6, 13.6 -> 12.5, - 40.1
    2: Choice(TWO_TILES_8_WARPS_OVERLAP, TWO_TILES_8_WARPS_NOTHING_AHEAD, TWO_TILES_FETCHED),
    # 7.0 -> 6.6, 15.1 -> 13.3, 50.2 -> 47.7
    3: Choice(TWO_TILES_FETCHED, TWO_TILES_FETCHED, TWO_TILES_FETCHED),
    # - 6.2, 16.3 -> 13.2, 51.7 -> 45.8
    4: Choice(ONE_TILE, TWO_TILES_8_WARPS_OVERLAP, TWO_TILES_8_WARPS_OVERLAP),
    # 9.8 -> 6.4, 21.0 -> 18.2, - 60.5
    5: Choice(ONE_TILE_MINUS, TWO_TILES, NOTHING_AHEAD_4_WARPS),
    # 7.3 -> 5.7, 20.2 -> 19.1, 65.6 -> 59.9
    6: Choice(ONE_TILE_128, ONE_TILE_128, NOTHING_AHEAD_4_WARPS),
    # - 9.9, 25.1 -> 23.2, - 71.6
    7: Choice(NOTHING_AHEAD, TWO_TILES_NOTHING_AHEAD, NOTHING_AHEAD_4_WARPS),
    # - 9.0, 25.7 -> 23.1, 80.9 -> 73.7
    8: Choice(ONE_TILE, TWO_TILES_8_WARPS_OVERLAP_128, TWO_TILES_8_WARPS_OVERLAP_128),
}
AFFINE_MORE_ROWS: dict[int, Choice] = {
    # 6.9 -> 5.8, - 16.8, - 60.8
    1: Choice(TWO_TILES_8_WARPS_MINUS, TWO_TILES_FETCHED_MINUS, TWO_TILES_FETCHED_MINUS),
    # - 7.5, - 17.2, - 63.4
    2: Choice(TWO_TILES_8_WARPS, TWO_TILES_FETCHED, TWO_TILES_FETCHED),
    # - 10.4, 24.2 -> 22.7, 85.9 -> 81.5
    3: Choice(ONE_TILE, TWO_TILES_NOTHING_AHEAD_MINUS, TWO_TILES_NOTHING_AHEAD_MINUS),
    # - 8.2, - 21.8, - 63.9
    4: Choice(TWO_TILES_8_WARPS, ONE_TILE_4_WARPS_MINUS_128, TWO_TILES_FETCHED),
    # - 10.5, - 27.6, - 86.3
    5: Choice(NOTHING_AHEAD, NOTHING_AHEAD_4_WARPS, NOTHING_AHEAD_4_WARPS),
    # 11.6 -> 11.2, - 23.9, 82.0 -> 78.8
    6: Choice(TWO_TILES_MINUS, ONE_TILE_4_WARPS_MINUS_128, ONE_TILE_4_WARPS_MINUS_128),
    # 11.6 -> 9.5, 31.9 -> 31.3, - 98.5
    7: Choice(LATE_4_WARPS, LATE_4_WARPS, NOTHING_AHEAD_4_WARPS),
}
# Of affine formats on GPUs that were not timed, up to 8 rows of x and more: none of these has stack
# for any of them, as most of the above have with no limit of registers (Triton 3.7.1).
AFFINE_ELSEWHERE = {
    1: (NOTHING_AHEAD_4_WARPS_MINUS, ONE_TILE_4_WARPS_FETCHED_MINUS),
    2: (ONE_TILE_4_WARPS_MINUS, TWO_TILES_FETCHED),
    3: (ONE_TILE_4_WARPS_MINUS, ONE_TILE_4_WARPS_FETCHED),
    4: (replace(ONE_TILE_MINUS, registers=0), ONE_TILE_4_WARPS_MINUS),
    5: (NOTHING_AHEAD_4_WARPS, NOTHING_AHEAD_4_WARPS),
    6: (ONE_TILE_4_WARPS_FETCHED_MINUS, ONE_TILE_4_WARPS_MINUS),
    7: (NOTHING_AHEAD_4_WARPS, NOTHING_AHEAD_4_WARPS),
    8: (ONE_TILE_OVERLAP, TWO_TILES_8_WARPS_OVERLAP),
}


def small_config(n: int, m: int, bits: int, gpu: Gpu, *, affine: bool = False) -> SmallConfig:
    """For ``n`` outputs; the same for every m that a batch-invariant call may meet."""
    few_rows = m <= 8
    if affine and gpu.measured_on is None:
        return AFFINE_ELSEWHERE[bits][0 if few_rows else 1]
    choice = (FEW_ROWS if few_rows else MORE_ROWS)[bits]
    if affine:
        choice = (AFFINE_FEW_ROWS if few_rows else AFFINE_MORE_ROWS).get(bits, choice)
    if n <= gpu.few_outputs:
        config = choice.few
    else:
        config = choice.some if n <= 2 * gpu.few_outputs else choice.many
    if gpu.measured_on is not None:
        return config
    if not few_rows and config.n_tiles == 2:
        # With two tiles 3 bits have 16 bytes of stack for sm_120, with one as many for sm_80; 5 and
        # 6 bits 16 and 8 for sm_86 and sm_89 (Triton 3.7.1).
        if bits == 3 and gpu.can_overlap:
            return ONE_TILE_4_WARPS
        if bits in (5, 6):
            return NOTHING_AHEAD_4_WARPS
    return replace(config, registers=0)


def as_run(config: SmallConfig, gpu: Gpu) -> SmallConfig:
    """The configuration without what a GPU leaves aside."""
    return config if gpu.can_overlap else replace(config, fetch=0, overlap=False)
