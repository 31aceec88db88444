"""Times laying a weight out in the Marlin layout, and dequantising it, by width.

    python packages/fdk-cuda/benchmarks/marlin_layout.py [--shapes 1,2] [--bits ...] [--out F]

All but the last in microseconds, in graphs over copies that the L2 does not hold, each in turns
with a copy that reads and writes as many bytes in all: laying out from canonical bytes, taking back
and dequantising. The copy reads as the kernel does, from memory, and writes as it does, to the same
place each time; `_warm_copy` reads the same bytes each time, from the L2 where they fit.
`dequantise_fill` writes zeros where W_hat goes. `pack_ms` is packing a layer, with its work on the
host, by the clock; `torch_ms` laying out by torch alone, which is what a GPU without NVRTC does.
Answers are checked first.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _rows import write_rows
from marlin import COLD_BYTES, SHAPES, Run, graph_times, random_weight

from fdk_cuda.marlin import MARLIN, MARLIN_LUT, MarlinLayout, repack
from fdk_cuda.marlin.layout import pack_layout
from fdk_cuda.marlin.ops import dequantise

REPEATS, GRAPH_LAUNCHES = 5, 12
LINE = (
    "{n:6}x{k:<6} {kind:8} b{bits} pack {pack:6.1f} us, {pack_share:4.0%} of a copy; "
    "unpack {unpack:6.1f}, {unpack_share:4.0%}; dequantise {dequantise:6.1f}, "
    "{dequantise_share:4.0%}, fill {dequantise_fill:6.1f}; pack {pack_ms:5.2f} ms; by torch "
    "{torch_ms:5.1f}"
)


def milliseconds(run: Callable[[], object]) -> float:
    """The median of some runs, after one."""
    times = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def beside_copy(name: str, run: Run, launches: int, moved: int, **more: Run) -> dict[str, float]:
    """Microseconds of a run, of copies of so many bytes, read and written together, and of more.

    Args:
        name: of the run.
        run: as ``graph_times`` takes it.
        launches: in a graph, before which the run's bytes do not come again.
        moved: bytes that it reads and writes.
        more: runs beside it, by name.
    """
    count = min(launches, COLD_BYTES // (moved // 2) + 2)
    sources = [torch.empty(moved // 2, dtype=torch.uint8, device="cuda") for _ in range(count)]
    for source in sources:
        source.random_(0, 256)
    target = torch.empty_like(sources[0])
    runs = {
        name: run,
        f"{name}_copy": lambda i: target.copy_(sources[i % count]),
        f"{name}_warm_copy": lambda i: target.copy_(sources[0]),
        **more,
    }
    times = dict(zip(runs, graph_times(list(runs.values()), launches), strict=True))
    return times | {f"{name}_share": times[f"{name}_copy"] / times[name]}


def time_layout(bits: int, n: int, k: int, *, affine: bool) -> dict[str, object]:
    """A row.

    Raises:
        SystemExit: an answer is wrong.
    """
    q = random_weight(bits, n, k, affine=affine)
    backend = MARLIN if affine else MARLIN_LUT
    layout = backend.pack(q, dtype=torch.bfloat16)
    assert isinstance(layout, MarlinLayout)
    g, weight = layout.geometry, (layout.codebook, str(layout.format), n, k)
    zero_point = None if q.zero_point is None else q.zero_point.to(q.scale.dtype)
    kinds = q.scale, zero_point
    is_right = torch.equal(dequantise(layout.packed, *weight), q.dequantise(torch.bfloat16))
    is_right &= torch.equal(layout.packed, pack_layout(g, q.packed, *kinds))
    if not is_right or not torch.equal(repack.unpack(g, layout.packed)[0], q.packed):
        raise SystemExit(f"wrong answer, not timed: {layout.format} {[n, k]}")
    count = COLD_BYTES // layout.packed.nbytes + 2
    packed = [layout.packed.clone() for _ in range(count)]
    canonical = [q.packed.clone() for _ in range(count)]
    stored = q.packed.nbytes + sum(kind.nbytes for kind in kinds if kind is not None)
    moved = stored + layout.packed.nbytes
    W_hat = layout.codebook.new_empty((n, k))
    launches = max(GRAPH_LAUNCHES, count)
    return {
        **{"n": n, "k": k, "bits": bits, "kind": "affine" if affine else "codebook"},
        **beside_copy(
            "pack", lambda i: repack.pack(g, canonical[i % count], *kinds), launches, moved
        ),
        **beside_copy("unpack", lambda i: repack.unpack(g, packed[i % count])[0], launches, moved),
        **beside_copy(
            "dequantise",
            lambda i: dequantise(packed[i % count], *weight),
            launches,
            layout.packed.nbytes + W_hat.nbytes,
            dequantise_fill=lambda i: W_hat.zero_(),
        ),
        "pack_ms": milliseconds(lambda: backend.pack(q, dtype=torch.bfloat16)),
        "torch_ms": milliseconds(lambda: pack_layout(g, q.packed, *kinds)),
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
