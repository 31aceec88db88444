"""Times laying a weight out in the Marlin layout, and dequantising it, by width.

    python packages/fdk-cuda/benchmarks/marlin_layout.py [--shapes 1,2] [--bits ...] [--out F]

Packing: milliseconds on the GPU from canonical bytes, of them those of unpacking these, by events,
the median of several. Dequantising: microseconds in graphs over copies that the L2 does not hold,
in turns with a copy that reads and writes as many bytes in all; `share` is the copy's time over it.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from _rows import write_rows
from marlin import COLD_BYTES, SHAPES, graph_times, random_weight

from fdk_cuda.marlin import MARLIN, MARLIN_LUT, MarlinLayout
from fdk_cuda.marlin.layout import pack_layout, unpack_layout
from fdk_cuda.marlin.ops import dequantise
from fdk_formats.packing import unpack

REPEATS, GRAPH_LAUNCHES = 5, 12
LINE = (
    "{n:6}x{k:<6} {kind:8} b{bits} pack {pack_ms:6.1f} ms, of it unpacking "
    "{unpack_codes_ms:5.1f}; back {unpack_ms:6.1f}; dequantise "
    "{dequantise:6.1f} us, {share:4.0%} of a copy, {terabytes_per_second:.2f} TB/s"
)


def milliseconds(run: Callable[[], object]) -> float:
    """The median of some runs, after one."""
    times = []
    for _ in range(REPEATS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])


def time_layout(bits: int, n: int, k: int, *, affine: bool) -> dict[str, object]:
    """A row.

    Raises:
        SystemExit: the layout does not give the weight back.
    """
    q = random_weight(bits, n, k, affine=affine)
    layout = (MARLIN if affine else MARLIN_LUT).pack(q, dtype=torch.bfloat16)
    assert isinstance(layout, MarlinLayout)
    weight = layout.codebook, str(layout.format), n, k
    if not torch.equal(dequantise(layout.packed, *weight), q.dequantise(torch.bfloat16)):
        raise SystemExit(f"wrong answer, not timed: {layout.format} {[n, k]}")
    zero_point = None if q.zero_point is None else q.zero_point.to(q.scale.dtype)
    stored = q.packed, q.scale, zero_point
    packed = [layout.packed.clone() for _ in range(COLD_BYTES // layout.packed.nbytes + 2)]
    moved = layout.packed.nbytes + 2 * n * k
    source, target = (torch.empty(moved // 2, dtype=torch.uint8, device="cuda") for _ in range(2))
    source.random_(0, 256)
    unfused, copy = graph_times(
        [lambda i: dequantise(packed[i % len(packed)], *weight), lambda i: target.copy_(source)],
        GRAPH_LAUNCHES,
    )
    return {
        **{"n": n, "k": k, "bits": bits, "kind": "affine" if affine else "codebook"},
        "pack_ms": milliseconds(lambda: pack_layout(layout.geometry, *stored)),
        "unpack_codes_ms": milliseconds(lambda: unpack(q.packed, bits, k)),
        "unpack_ms": milliseconds(lambda: unpack_layout(layout.geometry, layout.packed)),
        **{"dequantise": unfused, "copy": copy, "share": copy / unfused},
        "terabytes_per_second": moved / unfused / 1e6,
    }


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", default="1,2,3,4,8")
    parser.add_argument("--shapes", default="1,2", help="indices of marlin.py's SHAPES")
    parser.add_argument("--out", type=Path, help="a file that rows are written to as JSONL")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: needs an NVIDIA GPU, torch finds none on this machine")
        return
    rows = (
        time_layout(bits, *SHAPES[index], affine=affine)
        for index in map(int, args.shapes.split(","))
        for bits in map(int, args.bits.split(","))
        for affine in (False, True)
    )
    write_rows(args.out, rows, LINE.format_map)


if __name__ == "__main__":
    main()
