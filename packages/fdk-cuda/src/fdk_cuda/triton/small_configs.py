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
AFFINE_NOTHING_AHEAD_FETCHED = replace(AFFINE_NOTHING_AHEAD, fetch=2)
AFFINE_TWO_TILES_FETCHED = replace(TWO_TILES_FETCHED, minus=True)
AFFINE_TWO_TILES_8_WARPS = replace(TWO_TILES_8_WARPS, minus=True)
AFFINE_FEW_ROWS: dict[int, Choice] = {
    # 8192 x 8192, in turns: fetched 11.6 and 11.7 us, otherwise 12.3.
    1: Choice(TWO_TILES_8_WARPS_FETCHED, AFFINE_NOTHING_AHEAD_FETCHED, AFFINE_NOTHING_AHEAD),
    2: Choice(TWO_TILES_8_WARPS_OVERLAP, AFFINE_ONE_TILE_4_WARPS, TWO_TILES_FETCHED),
    3: Choice(ONE_TILE, AFFINE_ONE_TILE_4_WARPS, AFFINE_ONE_TILE_4_WARPS),
    4: Choice(ONE_TILE, AFFINE_ONE_TILE, AFFINE_ONE_TILE),
    6: Choice(ONE_TILE, AFFINE_ONE_TILE_FETCHED, ONE_TILE_OVERLAP),
    7: Choice(NOTHING_AHEAD, NOTHING_AHEAD_4_WARPS, NOTHING_AHEAD_4_WARPS),
}
AFFINE_MORE_ROWS: dict[int, Choice] = {
    1: Choice(AFFINE_TWO_TILES_8_WARPS, AFFINE_TWO_TILES_FETCHED, AFFINE_TWO_TILES_FETCHED),
    # 8192 x 8192, in turns: with overlap 17.1 to 17.3 us, without 17.9 and 18.2.
    2: Choice(TWO_TILES_8_WARPS, TWO_TILES_FETCHED, TWO_TILES_FETCHED),
    # 8192 x 8192, in turns: fetched 24.8 us, otherwise 26.7.
    3: Choice(ONE_TILE, ONE_TILE_4_WARPS_FETCHED, ONE_TILE_4_WARPS),
    4: Choice(TWO_TILES_8_WARPS, AFFINE_ONE_TILE_4_WARPS, TWO_TILES_FETCHED),
    5: Choice(NOTHING_AHEAD, NOTHING_AHEAD_4_WARPS, NOTHING_AHEAD_4_WARPS),
    6: Choice(NOTHING_AHEAD, AFFINE_ONE_TILE_4_WARPS, NOTHING_AHEAD_4_WARPS),
}
# Where limits were not timed there are none, and 1 bit has one tile: with two, 184 bytes of stack
# for sm_80, 112 for sm_100, 200 for sm_120 (Triton 3.7.1).
AFFINE_MORE_ROWS_ELSEWHERE = replace(ONE_TILE_4_WARPS_FETCHED, minus=True)


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
    if m > 8 and config.n_tiles == 2:
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
