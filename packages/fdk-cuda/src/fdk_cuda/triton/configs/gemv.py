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


# One tile has eight warps and two have four where the name has no number. LATE has no words ahead,
# and one tile where it does not say two. All overlap but ONE_TILE, LATE_FETCHED_ALONE,
# TWO_TILES_8_WARPS and TWO_TILES_168, which has three rounds fetched.
ONE_TILE = SmallConfig(n_tiles=1, warps=8)
ONE_TILE_OVERLAP = SmallConfig(n_tiles=1, warps=8, overlap=True)
ONE_TILE_4_WARPS = SmallConfig(n_tiles=1, warps=4, overlap=True)
ONE_TILE_4_WARPS_FETCHED = SmallConfig(n_tiles=1, warps=4, fetch=2, overlap=True)
ONE_TILE_4_WARPS_FETCHED_128 = replace(ONE_TILE_4_WARPS_FETCHED, registers=128)
ONE_TILE_16_WARPS = SmallConfig(n_tiles=1, warps=16, overlap=True)
ONE_TILE_128 = replace(ONE_TILE_OVERLAP, registers=128)
LATE = replace(ONE_TILE_OVERLAP, ahead=0)
LATE_4_WARPS = replace(ONE_TILE_4_WARPS, ahead=0)
LATE_FETCHED_ALONE = SmallConfig(n_tiles=1, warps=8, ahead=0, fetch=2)
LATE_4_WARPS_FETCHED = SmallConfig(n_tiles=1, warps=4, ahead=0, fetch=2, overlap=True)
TWO_TILES = SmallConfig(n_tiles=2, warps=4, overlap=True)
TWO_TILES_FETCHED = SmallConfig(n_tiles=2, warps=4, fetch=2, overlap=True)
TWO_TILES_8_WARPS = SmallConfig(n_tiles=2, warps=8)
TWO_TILES_8_WARPS_OVERLAP = SmallConfig(n_tiles=2, warps=8, overlap=True)
TWO_TILES_8_WARPS_FETCHED = SmallConfig(n_tiles=2, warps=8, fetch=2, overlap=True)
TWO_TILES_LATE = replace(TWO_TILES, ahead=0)
TWO_TILES_8_WARPS_LATE = replace(TWO_TILES_8_WARPS_OVERLAP, ahead=0)
TWO_TILES_LATE_FETCHED = replace(TWO_TILES, ahead=0, fetch=2)
TWO_TILES_168 = SmallConfig(n_tiles=2, warps=4, fetch=3, registers=168)
TWO_TILES_128 = replace(TWO_TILES, registers=128)
TWO_TILES_8_WARPS_OVERLAP_128 = replace(TWO_TILES_8_WARPS_OVERLAP, registers=128)
TWO_TILES_16_WARPS = SmallConfig(n_tiles=2, warps=16, overlap=True)

# By the bits of a code. Above each, microseconds on an H200, 2026-11-24, in turns: 4096 x 4096 (in
# brackets 4096 x 14336), 8192 x 8192, 28672 x 8192; an arrow leads from the one before to this one.
# Timed were all of one and two tiles, four and eight warps, with and without words ahead, fetching
# and a limit of 128 registers, with overlap; some without overlap, and some of sixteen warps. With
# 16 rows, at 8 bits, and at 7 bits but for 4096 x 4096, only some of these were timed.
FEW_ROWS = {
    # 3.5, 9.2, 27.1
    1: Choice(TWO_TILES_8_WARPS_FETCHED, ONE_TILE_4_WARPS_FETCHED, TWO_TILES_FETCHED),
    # 5.5 -> 4.0 (15.2 -> 10.2), 10.2, 33.3 -> 31.3
    2: Choice(ONE_TILE_128, TWO_TILES_8_WARPS_OVERLAP, TWO_TILES),
    # 5.8 -> 4.5 (13.0 -> 11.8), 12.3, 37.8
    3: Choice(ONE_TILE_OVERLAP, ONE_TILE_4_WARPS, ONE_TILE_4_WARPS),
    # 5.5 -> 5.2 (13.8 -> 12.3), 12.2 -> 11.6, 38.3 -> 37.7 (14336 x 4096 11.9 -> 11.4)
    4: Choice(TWO_TILES_16_WARPS, TWO_TILES_8_WARPS_OVERLAP_128, TWO_TILES_128),
    # 9.4 -> 6.6 (25.4 -> 18.9), 19.6, 60.6
    5: Choice(LATE, LATE_4_WARPS_FETCHED, LATE_4_WARPS_FETCHED),
    # 7.3 -> 6.0 (18.4 -> 16.7), 19.7 -> 19.2, 66.8 -> 60.8
    6: Choice(ONE_TILE_128, ONE_TILE_4_WARPS_FETCHED_128, ONE_TILE_4_WARPS_FETCHED_128),
    # 9.2 -> 7.4 (25.1 -> 21.8), 21.9, 75.3 -> 71.0
    7: Choice(LATE, ONE_TILE_4_WARPS, ONE_TILE_4_WARPS),
    # 8.1 -> 7.0 (22.1 -> 18.8), 21.4, 77.1 -> 71.5
    8: Choice(ONE_TILE_16_WARPS, ONE_TILE_OVERLAP, TWO_TILES_8_WARPS_OVERLAP_128),
}
# The same for 9 to 16 rows of x; 2 to 4 bits at 28672 x 8192, and 4 at 8192 x 8192, on 2026-11-23.
MORE_ROWS = {
    # 5.2; rows of 8192 columns are four rounds, too few to fetch ahead: 13.3 -> 12.3, 49.7 -> 47.0
    # without (2026-11-23); longer rows were not timed.
    1: Choice(TWO_TILES_8_WARPS_OVERLAP, TWO_TILES, TWO_TILES),
    # 7.7 -> 6.5 (18.8 -> 18.0), 17.0, 49.0
    2: Choice(ONE_TILE_OVERLAP, TWO_TILES_168, TWO_TILES_FETCHED),
    # 8.7 -> 6.5 (24.8 -> 18.0), 16.5, 56.3
    3: Choice(TWO_TILES_8_WARPS_LATE, TWO_TILES_LATE, TWO_TILES_LATE),
    # 7.9 -> 7.2 (18.5 -> 16.1; by one tile of eight warps 6.6 and 18.0), 17.0, 54.5
    4: Choice(TWO_TILES_16_WARPS, TWO_TILES_8_WARPS_OVERLAP_128, TWO_TILES_128),
    # 10.8, 28.5 (with nothing fetched 26.9, and 48 bytes of stack, Triton 3.7.1), 88.3
    5: Choice(LATE_FETCHED_ALONE, TWO_TILES_LATE_FETCHED, LATE_4_WARPS_FETCHED),
    # 10.4 -> 8.9 (26.8 -> 24.7), 24.6 -> 23.9, 89.8 -> 82.7
    6: Choice(ONE_TILE_128, TWO_TILES, TWO_TILES_FETCHED),
    # 11.9 -> 11.1 (34.7 -> 32.5), 34.1 -> 32.8, 97.7 -> 93.9
    7: Choice(LATE, LATE_4_WARPS, LATE_4_WARPS),
    # 9.8, 24.3, 81.1
    8: Choice(TWO_TILES_8_WARPS, TWO_TILES_8_WARPS_OVERLAP, TWO_TILES),
}
# Of affine formats where it is not the same: sums of x, or zero points as an operand (``minus``),
# take registers. Times as above; a dash: as it was. Of each all of one and two tiles, four and
# eight warps, with and without words ahead, fetching (one row of x), ``minus`` and a limit of 128
# registers were timed at 8192 x 8192, with overlap, and the four fastest at the other widths; with
# 4096 outputs some more. With 16 rows faster ones have stack (Triton 3.7.1): 3 bits 21.1, 5 bits
# 25.8, 7 bits 29.8, and 7.4 and 8.4 for 3 and 5 bits at 4096 x 4096; so has 7 bits with one row
# there, 7.4.
LATE_MINUS = replace(LATE, minus=True)
LATE_MINUS_128 = replace(LATE_MINUS, registers=128)
ONE_TILE_OVERLAP_MINUS = replace(ONE_TILE_OVERLAP, minus=True)
ONE_TILE_4_WARPS_MINUS = replace(ONE_TILE_4_WARPS, minus=True)
ONE_TILE_4_WARPS_MINUS_128 = replace(ONE_TILE_4_WARPS_MINUS, registers=128)
ONE_TILE_4_WARPS_FETCHED_MINUS = replace(ONE_TILE_4_WARPS_FETCHED, minus=True)
LATE_4_WARPS_FETCHED_MINUS = replace(LATE_4_WARPS_FETCHED, minus=True)
TWO_TILES_FETCHED_MINUS = replace(TWO_TILES_FETCHED, minus=True)
TWO_TILES_LATE_MINUS = replace(TWO_TILES_LATE, minus=True)
TWO_TILES_8_WARPS_MINUS = replace(TWO_TILES_8_WARPS_OVERLAP, minus=True)
AFFINE_FEW_ROWS: dict[int, Choice] = {
    # - 4.3, 11.7 -> 10.6, 39.7 -> 37.8
    1: Choice(TWO_TILES_8_WARPS_FETCHED, TWO_TILES, LATE_4_WARPS_FETCHED_MINUS),
    # - 4.6, 13.6 -> 12.5, - 40.1
    2: Choice(TWO_TILES_8_WARPS_OVERLAP, TWO_TILES_8_WARPS_LATE, TWO_TILES_FETCHED),
    # 6.8 (16.7; fetched, by two tiles, 6.4 and 19.5), 15.1 -> 13.3, 50.2 -> 47.7
    3: Choice(ONE_TILE, TWO_TILES_FETCHED, TWO_TILES_FETCHED),
    # 6.2 -> 5.0 (16.1 -> 14.1), 16.3 -> 13.2, 51.7 -> 45.8
    4: Choice(ONE_TILE_128, TWO_TILES_8_WARPS_OVERLAP, TWO_TILES_8_WARPS_OVERLAP),
    # 9.8 -> 6.4, 21.0 -> 18.2, - 60.5
    5: Choice(LATE_MINUS_128, TWO_TILES, LATE_4_WARPS_FETCHED),
    # 7.3 -> 5.7, 20.2 -> 19.1, 65.6 -> 59.9
    6: Choice(ONE_TILE_128, ONE_TILE_128, LATE_4_WARPS_FETCHED),
    # 9.9 -> 9.7 (26.9 -> 26.0), 25.1 -> 23.2, - 71.6
    7: Choice(LATE, TWO_TILES_LATE, LATE_4_WARPS_FETCHED),
    # 9.2 -> 7.3 (26.2 -> 21.3), 25.7 -> 23.1, 80.9 -> 73.7
    8: Choice(ONE_TILE_16_WARPS, TWO_TILES_8_WARPS_OVERLAP_128, TWO_TILES_8_WARPS_OVERLAP_128),
}
AFFINE_MORE_ROWS: dict[int, Choice] = {
    # 6.9 -> 5.8, - 16.8, - 60.8
    1: Choice(TWO_TILES_8_WARPS_MINUS, TWO_TILES_FETCHED_MINUS, TWO_TILES_FETCHED_MINUS),
    # 7.7 -> 6.9 (17.4 -> 16.6), - 17.2, - 63.4
    2: Choice(TWO_TILES_8_WARPS_OVERLAP, TWO_TILES_FETCHED, TWO_TILES_FETCHED),
    # 10.5 -> 9.8 (29.1 -> 28.2), 24.2 -> 22.7, 85.9 -> 81.5
    3: Choice(ONE_TILE_OVERLAP_MINUS, TWO_TILES_LATE_MINUS, TWO_TILES_LATE_MINUS),
    # 8.2 -> 7.2 (19.6 -> 18.7), - 21.8, - 63.9
    4: Choice(TWO_TILES_8_WARPS_OVERLAP, ONE_TILE_4_WARPS_MINUS_128, TWO_TILES_FETCHED),
    # - 10.5, - 27.6, - 86.3
    5: Choice(LATE_FETCHED_ALONE, LATE_4_WARPS_FETCHED, LATE_4_WARPS_FETCHED),
    # 11.7 (30.1; by two tiles 11.3 and 35.3), - 23.9, 82.0 -> 78.8
    6: Choice(LATE, ONE_TILE_4_WARPS_MINUS_128, ONE_TILE_4_WARPS_MINUS_128),
    # 11.6 -> 9.5, 31.9 -> 31.3, - 98.5
    7: Choice(LATE_4_WARPS, LATE_4_WARPS, LATE_4_WARPS_FETCHED),
}
# Of affine formats on GPUs that were not timed, up to 8 rows of x and more: none of these has stack
# for any of them, as most of the above have with no limit of registers (Triton 3.7.1).
AFFINE_ELSEWHERE = {
    1: (LATE_4_WARPS_FETCHED_MINUS, ONE_TILE_4_WARPS_FETCHED_MINUS),
    2: (ONE_TILE_4_WARPS_MINUS, TWO_TILES_FETCHED),
    3: (ONE_TILE_4_WARPS_MINUS, ONE_TILE_4_WARPS_FETCHED),
    4: (LATE_MINUS, ONE_TILE_4_WARPS_MINUS),
    5: (LATE_4_WARPS_FETCHED, LATE_4_WARPS_FETCHED),
    6: (ONE_TILE_4_WARPS_FETCHED_MINUS, ONE_TILE_4_WARPS_MINUS),
    7: (LATE_4_WARPS_FETCHED, LATE_4_WARPS_FETCHED),
    8: (ONE_TILE_OVERLAP, TWO_TILES_8_WARPS_OVERLAP),
}


def small_config(n: int, m: int, bits: int, gpu: Gpu, *, affine: bool = False) -> SmallConfig:
    """For ``n`` outputs; the same for every m that a batch-invariant call may meet.

    On a GPU that was not timed codebooks with up to 8 rows of x alone keep a limit of registers.
    """
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
            return LATE_4_WARPS_FETCHED
    return config if few_rows else replace(config, registers=0)


def as_run(config: SmallConfig, gpu: Gpu) -> SmallConfig:
    """The configuration without what a GPU leaves aside."""
    return config if gpu.can_overlap else replace(config, fetch=0, overlap=False)
