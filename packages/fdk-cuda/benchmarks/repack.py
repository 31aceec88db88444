"""Time packing into the Marlin layout, unpacking and dequantising, against a copy of as many bytes.

    python packages/fdk-cuda/benchmarks/repack.py [--bits 4] [--shapes 8192x8192] [--out rows.jsonl]

Microseconds in graphs, cold L2, in turns with a copy that reads and writes as many bytes in all
from memory, as the kernel does. `fill` writes zeros where W_hat goes. `pack_ms` is packing a layer
by the clock, with its work on the host, and `torch_ms` packing by torch alone, as on a GPU without
NVRTC. Answers are checked first.
"""

import statistics
import time
from collections.abc import Callable

import torch
from _marlin_weight import KINDS, marlin_layout, random_weight
from _timing import (
    Row,
    Run,
    argument_parser,
    copies,
    graph_times,
    has_gpu,
    integers,
    shapes,
    write_rows,
)

from fdk_cuda.marlin import repack
from fdk_cuda.marlin.layout import pack_layout
from fdk_cuda.marlin.ops import dequantise

REPEATS, FEWEST_CALLS = 5, 12
LINE = (
    "{n:6}x{k:<6} {kind:8} b{bits} pack {pack:6.1f} us, {pack_share:4.0%} of a copy's speed; "
    "unpack {unpack:6.1f}, {unpack_share:4.0%}; dequantise {dequantise:6.1f}, "
    "{dequantise_share:4.0%}, fill {fill:6.1f}; layer {pack_ms:5.2f} ms, by torch {torch_ms:5.1f}"
)


def milliseconds(run: Callable[[], object]) -> float:
    """Return the median of ``REPEATS`` calls, after a first one."""
    times = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def beside_copy(name: str, run: Run, calls: int, moved: int, **more: Run) -> dict[str, float]:
    """Time a run in turns with a copy that moves as many bytes.

    Args:
        name: key of the run's time; the copy's speed over the run's is ``<name>_share``.
        run: call i, on its own copy of the data.
        calls: calls in a graph.
        moved: bytes that one call reads and writes.
        more: further runs, by name.
    """
    sources = copies(torch.randint(256, (moved // 2,), dtype=torch.uint8, device="cuda"))
    target = torch.empty_like(sources[0])
    runs = {name: run, "copy": lambda i: target.copy_(sources[i % len(sources)]), **more}
    times = dict(zip(runs, graph_times(list(runs.values()), calls), strict=True))
    return {f"{name}_share": times.pop("copy") / times[name], **times}


def time_layout(bits: int, n: int, k: int, kind: str) -> Row:
    """Return a row, after checking that packing and unpacking give torch's bytes."""
    q = random_weight(bits, n, k, kind)
    layout = marlin_layout(q)
    g, weight = layout.geometry, (layout.codebook, str(layout.format), n, k)
    zero_point = None if q.zero_point is None else q.zero_point.to(q.scale.dtype)
    groups = q.scale, zero_point
    is_right = torch.equal(dequantise(layout.packed, *weight), q.dequantise(torch.bfloat16))
    is_right &= torch.equal(layout.packed, pack_layout(g, q.packed, *groups))
    if not is_right or not torch.equal(repack.unpack(g, layout.packed)[0], q.packed):
        raise SystemExit(f"wrong answer, not timed: {layout.format} {[n, k]}")
    packed, stored = copies(layout.packed), copies(q.packed)
    stored_bytes = q.packed.nbytes + sum(t.nbytes for t in groups if t is not None)
    moved = stored_bytes + layout.packed.nbytes
    W_hat = layout.codebook.new_empty((n, k))
    calls = max(FEWEST_CALLS, len(packed))
    row: Row = {"n": n, "k": k, "bits": bits, "kind": kind}
    row |= beside_copy(
        "pack", lambda i: repack.pack(g, stored[i % len(stored)], *groups), calls, moved
    )
    row |= beside_copy(
        "unpack", lambda i: repack.unpack(g, packed[i % len(packed)])[0], calls, moved
    )
    row |= beside_copy(
        "dequantise",
        lambda i: dequantise(packed[i % len(packed)], *weight),
        calls,
        layout.packed.nbytes + W_hat.nbytes,
        fill=lambda i: W_hat.zero_(),
    )
    row["pack_ms"] = milliseconds(lambda: marlin_layout(q))
    return row | {"torch_ms": milliseconds(lambda: pack_layout(g, q.packed, *groups))}


def main() -> None:
    """Read the command line and time every case."""
    parser = argument_parser(__doc__)
    parser.add_argument("--bits", type=integers, default="1,2,3,4,8")
    parser.add_argument("--shapes", type=shapes, default="8192x8192,28672x8192")
    parser.add_argument("--kinds", default="codebook,affine", help=", ".join(KINDS))
    args = parser.parse_args()
    if not has_gpu():
        return
    rows = (
        time_layout(bits, n, k, kind)
        for n, k in args.shapes
        for bits in args.bits
        for kind in args.kinds.split(",")
    )
    write_rows(args.out, rows, LINE.format_map)


if __name__ == "__main__":
    main()
