"""The blockwise kernels in torch, for any device: the reference bytes.

Every rounding shows in the bytes, so the arithmetic follows bitsandbytes 0.50.2's torch backend
step by step: whole blocks are multiplied by the reciprocal of their absmax, a short last block is
divided by it, and only the short block's absmax is raised to 1e-38.
"""

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from fdk_formats.blockwise.codebooks import ascending_codes, four_bit_code
from fdk_formats.blockwise.kernels import Kernels

# Quantising needs up to 36 bytes of temporaries per element: 18 MiB per chunk. Smaller chunks are
# slower. Dequantising keeps temporaries in the unwritten part of the result.
CHUNK = 1 << 19
SMALL_CHUNK, LARGE_CHUNK = 1 << 15, 1 << 20
ALIGNMENT = 64  # bytes
SMALLEST_ABSMAX = 1e-38


def quantise_8bit(flat: Tensor, code: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """See ``Kernels.quantise_8bit``."""
    search = _search(code, tuple(range(len(code))), flat.device)
    # empty_like would keep the stride of a single element.
    packed = flat.new_empty(len(flat), dtype=torch.uint8)
    absmax = _empty_absmax(flat, block_size)
    for start, scaled in _scaled_chunks(flat, absmax, block_size):
        search(scaled, out=packed[start : start + len(scaled)])
    return packed, absmax


def quantise_4bit(flat: Tensor, kind: str, block_size: int) -> tuple[Tensor, Tensor]:
    """See ``Kernels.quantise_4bit``. For odd n the last low bits hold the code of 0.0."""
    search = _search(four_bit_code(kind), ascending_codes(kind), flat.device)
    packed = flat.new_empty((len(flat) + 1) // 2, dtype=torch.uint8)
    absmax = _empty_absmax(flat, block_size)
    for start, scaled in _scaled_chunks(flat, absmax, block_size):
        scaled = torch.nn.functional.pad(scaled, (0, 1)) if len(scaled) % 2 else scaled
        codes = torch.empty_like(scaled, dtype=torch.uint8)
        search(scaled, out=codes)
        out = packed[start // 2 : start // 2 + len(codes) // 2]
        torch.add(codes[1::2], codes[::2], alpha=16, out=out)
    return packed, absmax


def dequantise_8bit(
    packed: Tensor, absmax: Tensor, code: Tensor, block_size: int, dtype: torch.dtype
) -> Tensor:
    """See ``Kernels.dequantise_8bit``."""
    out = packed.new_empty(len(packed), dtype=dtype)
    # A float32 result is as wide as the int32 indices and holds them until it is written.
    fits = dtype == torch.float32
    for start, stop, scratch in _chunks_with_scratch(out, 4 if fits else 8, block_size):
        values, *index = scratch.view(torch.float32).split(stop - start)
        index = (out[start:stop] if fits else index[0]).view(torch.int32)
        torch.index_select(code, 0, index.copy_(packed[start:stop]), out=values)
        _scale(values, absmax[start // block_size :], block_size, out=out[start:stop])
    return out


def dequantise_4bit(
    packed: Tensor, absmax: Tensor, code: Tensor, block_size: int, numel: int, dtype: torch.dtype
) -> Tensor:
    """See ``Kernels.dequantise_4bit``."""
    # One gather per byte: its two float32 values are one int64.
    pairs = torch.stack((code.repeat_interleave(16), code.repeat(16)), dim=1)  # [256, 2]
    pairs = pairs.view(torch.int64).view(-1)  # [256]
    out = packed.new_empty(2 * len(packed), dtype=dtype)
    for start, stop, scratch in _chunks_with_scratch(out, 4 + 2, block_size):
        codes = packed[start // 2 : stop // 2]
        both, index = scratch.view(torch.int32).split((2 * len(codes), len(codes)))
        both = both.view(torch.int64)
        torch.index_select(pairs, 0, index.copy_(codes), out=both)
        values = both.view(torch.float32)
        _scale(values, absmax[start // block_size :], block_size, out=out[start:stop])
    return out[:numel]


TORCH_KERNELS = Kernels(
    quantise_8bit=quantise_8bit,
    dequantise_8bit=dequantise_8bit,
    quantise_4bit=quantise_4bit,
    dequantise_4bit=dequantise_4bit,
)


def _step(chunk: int, block_size: int) -> int:
    """Returns the elements of the whole blocks in a chunk, at least one block."""
    return max(1, chunk // block_size) * block_size


def _empty_absmax(flat: Tensor, block_size: int) -> Tensor:
    return flat.new_empty(-(-len(flat) // block_size), dtype=torch.float32)


def _scaled_chunks(flat: Tensor, absmax: Tensor, block_size: int) -> Iterator[tuple[int, Tensor]]:
    """Fills ``absmax``; yields each chunk's start and ``flat / absmax`` in float32, in order."""
    whole = len(flat) - len(flat) % block_size
    step = _step(CHUNK, block_size)
    for start in range(0, whole, step):
        stop = min(start + step, whole)
        blocks = flat[start:stop].to(torch.float32).view(-1, block_size)
        largest = absmax[start // block_size : stop // block_size]
        scratch = blocks.abs()
        torch.amax(scratch, dim=1, out=largest)
        inverse = 1.0 / largest.clamp(min=SMALLEST_ABSMAX)
        torch.mul(blocks, inverse[:, None], out=scratch)
        del blocks
        yield start, scratch.view(-1)
    if whole < len(flat):
        tail = flat[whole:].to(torch.float32)
        absmax[-1] = tail.abs().amax().clamp(min=SMALLEST_ABSMAX)
        yield whole, tail / absmax[-1]


def _chunks_with_scratch(
    out: Tensor, width: int, block_size: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Yields ``start, stop`` of chunks of ``out`` in order, and scratch memory for each.

    The scratch has ``width`` bytes per element. It is the end of ``out``, which is not written yet;
    chunks shrink with what is left, and the last few get separate memory. Each chunk but the
    last is an even number of blocks.
    """
    memory = out.view(torch.uint8)
    size = out.element_size()
    unit = 2 * block_size
    start = 0
    while start < len(out):
        left = len(out) - start
        count = min(_step(LARGE_CHUNK, unit), left * size // (size + width) // unit * unit)
        if count >= SMALL_CHUNK:
            begin = (len(memory) - width * count) // ALIGNMENT * ALIGNMENT
            scratch = memory[begin : begin + width * count]
        else:
            count = min(_step(SMALL_CHUNK, unit), left)
            scratch = memory.new_empty(width * count)
        yield start, start + count, scratch
        start += count


def _scale(values: Tensor, absmax: Tensor, block_size: int, *, out: Tensor) -> None:
    """Writes values times absmax to ``out``, in any floating dtype; values begin at a block."""
    whole = len(values) - len(values) % block_size
    blocks = whole // block_size
    # torch would allocate a temporary to write a product in another dtype.
    product = out if out.dtype == values.dtype else values
    rows = values[:whole].view(-1, block_size)
    torch.mul(rows, absmax[:blocks, None], out=product[:whole].view(-1, block_size))
    if whole < len(values):
        torch.mul(values[whole:], absmax[blocks], out=product[whole:])
    if product is not out:
        out.copy_(product)


class _Search:
    """Nearest codes by table lookup; a tie goes to the lower entry.

    The upper 16 bits of a float32 are a key. For the tables in use, at most one midpoint lies among
    the values of a key, and one comparison decides. On a CPU a gather takes 0.5 ns per value, a
    binary search 10 ns.

        thresholds :: [2^16, float32]      the midpoint among a key's values, or infinity
        codes      :: [2^17, uint8]        the codes below and above it
    """

    def __init__(self, thresholds: Tensor, codes: Tensor) -> None:
        self.thresholds = thresholds
        self.codes = codes

    def __call__(self, scaled: Tensor, *, out: Tensor) -> None:
        keys = scaled.view(torch.int32) >> 16  # sign-extended: -2^15 to 2^15 - 1
        keys += 1 << 15
        above = scaled > self.thresholds.index_select(0, keys)
        keys <<= 1
        keys += above
        torch.index_select(self.codes, 0, keys, out=out)


class _BinarySearch:
    """Nearest codes by ``torch.bucketize``, for any table and device."""

    def __init__(self, bounds: Tensor, order: Tensor) -> None:
        self.bounds = bounds
        self.order = order

    def __call__(self, scaled: Tensor, *, out: Tensor) -> None:
        entries = torch.bucketize(scaled, self.bounds, out_int32=True)
        torch.index_select(self.order, 0, entries, out=out)


def _search(code: Tensor, order: tuple[int, ...], device: torch.device) -> _Search | _BinarySearch:
    if device.type == "cpu":
        return _cpu_search(tuple(code.tolist()), order)
    return _binary_search(code.to(device), order)


def _binary_search(code: Tensor, order: tuple[int, ...]) -> _BinarySearch:
    ranks = torch.tensor(order, dtype=torch.uint8, device=code.device)
    return _BinarySearch(_bounds(code.index_select(0, ranks.to(torch.int32))), ranks)


@lru_cache(maxsize=32)
def _cpu_search(code: tuple[float, ...], order: tuple[int, ...]) -> _Search | _BinarySearch:
    binary = _binary_search(torch.tensor(code, dtype=torch.float32, device="cpu"), order)
    keys = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device="cpu")
    nearest_zero = (keys << 16).view(torch.float32)
    furthest = (keys << 16 | 0xFFFF).view(torch.float32)
    negative = keys < 0
    least = torch.where(negative, furthest, nearest_zero).nan_to_num(posinf=None)
    most = torch.where(negative, nearest_zero, furthest).nan_to_num(posinf=None)
    # Midpoints below the least and below the greatest value of each key, and the first and last of
    # those in between.
    below = torch.bucketize(least, binary.bounds, out_int32=True)
    above = torch.bucketize(most, binary.bounds, out_int32=True)
    bounds = torch.cat((binary.bounds, binary.bounds.new_tensor([torch.inf])))
    first, last = bounds[below], bounds[(above - 1).clamp(min=0)]
    if torch.any((above > below) & (first != last)):
        return binary
    thresholds = torch.where(above > below, first, torch.inf)
    codes = binary.order[torch.stack((below, above), dim=1).view(-1)]
    return _Search(thresholds, codes)


def _bounds(code: Tensor) -> Tensor:
    """Returns the midpoints of an ascending table, for values that rounding may put beyond 1.

    Such values count as 1 or -1: midpoints from 1 up become infinity, those below -1 -infinity.
    """
    bounds = (code[:-1] + code[1:]) / 2
    bounds = torch.where(bounds >= 1, torch.inf, bounds)
    return torch.where(bounds < -1, -torch.inf, bounds)
