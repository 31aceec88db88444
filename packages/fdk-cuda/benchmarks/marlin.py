"""Time the Marlin kernels for any number of rows of x, in both directions.

    python packages/fdk-cuda/benchmarks/marlin.py --ms 1,16,64,256 --bits 1,4 [--out rows.jsonl]
    python packages/fdk-cuda/benchmarks/marlin.py --dy --ms 64,1024      dy @ W_hat
    python packages/fdk-cuda/benchmarks/marlin.py --ms 256,4096 --heat 0.25

Microseconds per call, cold L2, median of graph replays in turns with cuBLAS on a bf16 weight and,
for 128 or more rows, with dequantising first. `floor` is the larger of reading weight and x once
and of the arithmetic at the rate of cuBLAS (H200). Each case is checked against float64 first.
"""

from collections.abc import Iterator

import torch
from _marlin_weight import KINDS, MarlinWeight
from _timing import (
    Row,
    argument_parser,
    check,
    graph_times,
    has_gpu,
    heat,
    integers,
    product_floor,
    shapes,
    write_rows,
)

DEQUANTISE_ROWS = 128


def time_case(
    n: int, k: int, bits: int, kind: str, ms: list[int], *, dy: bool, heated: float
) -> Iterator[Row]:
    """Yield a row for each m."""
    weight = MarlinWeight.random(bits, n, k, kind)
    for m in ms:
        x = torch.randn(m, n if dy else k, device="cuda").bfloat16()
        runs = weight.grad_x(x) if dy else weight.linear(x)
        if m < DEQUANTISE_ROWS:
            del runs["dequantise"]
        case = f"{n}x{k} {kind} b{bits} m{m}{' dy' * dy}"
        check(runs["us"](0), weight.oracle(x, dy=dy), case)
        # A graph of a few milliseconds: the cost of launching it is below 1 %.
        count = 8 if m * n * k > 1e11 else max(40, len(weight.packed))
        if heated:
            heat(heated)
        times = graph_times(list(runs.values()), count)
        row = {"n": n, "k": k, "bits": bits, "m": m, "kind": kind, "dy": dy, "heat": heated}
        row |= dict(zip(runs, times, strict=True))
        yield row | {"floor": product_floor(m, n, k, weight.nbytes + x.nbytes)}


def line_of(row: Row) -> str:
    """Format a row."""
    us, direction = row["us"], "dy" if row["dy"] else "y"
    line = (
        f"{row['n']:6}x{row['k']:<6} {row['kind']:8} b{row['bits']} m{row['m']:<4} {direction:2} "
        f"{us:7.2f} us, floor {row['floor']:7.2f} ({100 * row['floor'] / us:3.0f} %), "
        f"cuBLAS {row['cublas']:7.2f} ({us / row['cublas']:4.2f})"
    )
    return f"{line}, dequantise first {row['dequantise']:7.2f}" if "dequantise" in row else line


def main() -> None:
    """Read the command line and time every case."""
    parser = argument_parser(__doc__)
    parser.add_argument("--ms", type=integers, default="1,4,16,64,256", help="rows of x")
    parser.add_argument("--bits", type=integers, default="1,2,3,4,8")
    parser.add_argument("--shapes", type=shapes, default="4096x4096,8192x8192,28672x8192")
    parser.add_argument("--kinds", default="codebook,affine", help=", ".join(KINDS))
    parser.add_argument("--dy", action="store_true", help="time dy @ W_hat instead")
    parser.add_argument("--heat", type=float, default=0, help="seconds of cuBLAS before each case")
    args = parser.parse_args()
    if not has_gpu():
        return
    rows = (
        row
        for n, k in args.shapes
        for bits in args.bits
        for kind in args.kinds.split(",")
        for row in time_case(n, k, bits, kind, args.ms, dy=args.dy, heated=args.heat)
    )
    write_rows(args.out, rows, line_of)


if __name__ == "__main__":
    main()
