# mypy: ignore-errors
"""Sort the pairs of tokens and experts by expert, on the device and in a fixed order.

A pair is one of the experts of a token, numbered ``token * top_k + j``. A counting sort: a
histogram per block of pairs, prefix sums, and a scatter by rank. Nothing is sized by the data: the
tiles of rows that the products use have an upper bound, and those past the last are marked, as in
vLLM's moe_align_block_size.
"""

import triton
import triton.language as tl


@triton.jit
def bins_of(ids_ptr, pair, pairs, experts):
    """Returns the experts of pairs; ``experts`` for ids outside the stack, -1 past the last."""
    ids = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1)
    bins = tl.where((ids >= 0) & (ids < experts), ids, experts).to(tl.int32)
    return tl.where(pair < pairs, bins, -1)


@triton.jit
def histogram(bins, BINS: tl.constexpr):
    """Counts bins, ``[BINS, int32]``; -1 is not counted."""
    return tl.histogram(tl.maximum(bins, 0), BINS, mask=bins >= 0)


# ids    :: [pairs, int32 | int64]
# counts :: [blocks, BINS, int32]
@triton.jit
def count_kernel(
    ids_ptr,
    counts_ptr,
    pairs,
    experts,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Counts the pairs of each expert in each block of pairs."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    bins = bins_of(ids_ptr, block * BLOCK + tl.arange(0, BLOCK), pairs, experts)
    tl.store(counts_ptr + block * BINS + tl.arange(0, BINS), histogram(bins, BINS))


# ids    :: [pairs, int32 | int64]
# counts :: [blocks, BINS, int32], unused with one block
# order  :: [pairs, int32]
# tiles  :: [3 * max_tiles + 1, int32]
@triton.jit(do_not_specialize=["max_tiles"])
def sort_kernel(
    ids_ptr,
    counts_ptr,
    order_ptr,
    tiles_ptr,
    pairs,
    experts,
    blocks,
    max_tiles,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    ZEROS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Writes the pairs in the order of their experts, and tiles of up to ROWS pairs of an expert.

    A tile is expert, first index in the order, and end: each ``[max_tiles]``, then the number of
    tiles. The expert of tiles past the last is -1.
    With ZEROS, pairs of no expert have tiles of the expert ``experts``.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(0)
    bin = tl.arange(0, BINS)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    own = bins_of(ids_ptr, pair, pairs, experts)
    before = tl.zeros([BINS], tl.int32)
    if ONE_BLOCK:
        total = histogram(own, BINS)
    else:
        total = tl.zeros([BINS], tl.int32)
        for first in tl.range(0, blocks, 16):
            other = first + tl.arange(0, 16)[:, None]
            counts = tl.load(counts_ptr + other * BINS + bin[None, :], mask=other < blocks, other=0)
            total += tl.sum(counts, 0)
            before += tl.sum(tl.where(other < block, counts, 0), 0)
    start = tl.cumsum(total, 0) - total

    rank = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, BLOCK, 32):
        other = block * BLOCK + first + tl.arange(0, 32)
        bins = bins_of(ids_ptr, other, pairs, experts)
        is_earlier = (bins[None, :] == own[:, None]) & (other[None, :] < pair[:, None])
        rank += tl.sum(is_earlier.to(tl.int32), 1)
    place = tl.gather(start + before, tl.maximum(own, 0), 0) + rank
    tl.store(order_ptr + place, pair, mask=own >= 0)

    if block == 0:
        tiled = total
        if not ZEROS:
            tiled = tl.where(bin < experts, total, 0)
        count = tl.cdiv(tiled, ROWS)
        first_tile = tl.cumsum(count, 0) - count
        for i in tl.range(0, tl.max(count, 0)):
            tile = first_tile + i
            live = i < count
            index = start + i * ROWS
            tl.store(tiles_ptr + tile, bin, mask=live)
            tl.store(tiles_ptr + max_tiles + tile, index, mask=live)
            end = tl.minimum(index + ROWS, start + total)
            tl.store(tiles_ptr + 2 * max_tiles + tile, end, mask=live)
        last = tl.sum(count, 0)
        tl.store(tiles_ptr + 3 * max_tiles, last)
        for first in tl.range(0, max_tiles, BINS):
            spare = first + bin
            tl.store(tiles_ptr + spare, bin * 0 - 1, mask=(spare >= last) & (spare < max_tiles))
