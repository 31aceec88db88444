"""Times y = x @ W_hat.T for many m beside torch and bitsandbytes, with the read floor of the run.

    GOMP_SPINCOUNT=0 python packages/fdk-cpu/benchmarks/rows.py --formats custom4-g64 custom8-g64

One table a shape and number of threads: minimum and median ms of each contender, all of one m in
turns; with --ratios the time of torch over each one's, below 1 where torch is faster. Weights
rotate through more copies than the caches hold; a wrong answer is not timed. With --backward the
product is dy @ W_hat, beside torch's dy @ W.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from gemv import MAX_ERROR, ROTATED_BYTES, bitsandbytes_nf4, copies_of, read_bandwidth
from torch import Tensor
from torch.nn.functional import linear

import fdk_cpu
from fdk_cpu.backend import CpuLayout
from fdk_formats import Format
from fdk_formats.testing import nrmse, random_quantised

ROWS = [2, 4, 8, 16, 24, 32, 64, 512]


@dataclass(frozen=True)
class Contender:
    """A layer: one function of x for each copy of its weight, and the bytes of a copy."""

    name: str
    nbytes: int
    layers: list[Callable[[Tensor], Tensor]]


def ours(format: Format, n: int, k: int, dtype: torch.dtype, *, backward: bool) -> Contender:
    """The kernel of fdk-cpu, compared with float64 at several m."""
    q = random_quantised(format, n, k)
    backend = fdk_cpu.CpuBackend()
    layout = backend.pack(q, dtype=dtype)
    w = q.dequantise(dtype).double()
    first = gradient_of(layout) if backward else layout
    for m in (2, 7, 33):
        x = torch.randn(m, n if backward else k).to(dtype)
        expected = x.double() @ (w if backward else w.T)
        if (error := nrmse(first(x), expected)) > MAX_ERROR[dtype]:
            raise SystemExit(f"{format}: m = {m} is wrong, nrmse {error:.2e}; not timed")
    nbytes = sum(b.nbytes for b in layout.buffers())
    layouts = [layout, *(backend.pack(q, dtype=dtype) for _ in range(copies_of(nbytes) - 1))]
    layers = [gradient_of(one) for one in layouts] if backward else layouts
    return Contender(f"fdk-cpu {format}", nbytes, layers)


def gradient_of(layout: CpuLayout) -> Callable[[Tensor], Tensor]:
    """dy :: [m, n] to dy @ W_hat :: [m, k]."""
    tensors = (layout.codes, layout.scale, layout.codebook, layout.zero_point)
    sizes = (layout.group_size, layout.format.bits, *layout.shape)
    return lambda dy: torch.ops.fdk_cpu.lut_linear_grad_x(dy, *tensors, *sizes)


def peers(n: int, k: int, dtype: torch.dtype, *, backward: bool) -> list[Contender]:
    """The unquantised layer and, where it is installed and forward, bitsandbytes' NF4."""
    weights = [torch.randn(n, k).to(dtype) for _ in range(copies_of(n * k * dtype.itemsize))]
    layers = [lambda x, w=w: linear(x, w) for w in weights]
    found = [Contender("torch linear", weights[0].nbytes, layers)]
    if backward:
        return [
            Contender("torch dy @ W", weights[0].nbytes, [lambda x, w=w: x @ w for w in weights])
        ]
    x = torch.randn(1, k).to(dtype)
    if dtype == torch.bfloat16 and (row := bitsandbytes_nf4(n, k, x)) is not None:
        # Its calls are bound to one x: their default argument is the layer.
        found.append(Contender(row.name, row.nbytes, [c.__defaults__[0] for c in row.calls]))
    return found


def times(contenders: list[Contender], x: Tensor, seconds: float) -> list[list[float]]:
    """Seconds of each call, by contender; in turns until each had `seconds`."""
    series: list[list[float]] = [[] for _ in contenders]
    end = time.perf_counter() + seconds * len(contenders)
    turn = 0
    while time.perf_counter() < end or turn < 3:
        for contender, of_one in zip(contenders, series, strict=True):
            for i in range(3):
                layer = contender.layers[(3 * turn + i) % len(contender.layers)]
                start = time.perf_counter()
                layer(x)
                of_one.append(time.perf_counter() - start)
        turn += 1
    return series


def table(contenders: list[Contender], inner: int, args: argparse.Namespace, title: str) -> None:
    """Prints a line for each m."""
    memory = torch.ones(ROTATED_BYTES, dtype=torch.uint8)
    bandwidth = statistics.median(read_bandwidth(memory, turn) for turn in range(8))
    floors = ", ".join(f"{c.name} {1e3 * c.nbytes / bandwidth:.2f}" for c in contenders)
    shown = "time of torch over it, by minimum / median" if args.ratios else "minimum / median ms"
    print(f"\n{title}, {fdk_cpu.instruction_set()}; {shown}")
    print(f"read {bandwidth / 1e9:.1f} GB/s median; floors, ms: {floors}")
    print(f"{'m':>5}" + "".join(f"{c.name:>24}" for c in contenders))
    for m in args.m:
        x = torch.randn(m, inner).to(getattr(torch, args.dtype))
        cells = times(contenders, x, args.seconds)
        pairs = [(min(t), statistics.median(t)) for t in cells]
        if args.ratios:
            low, median = pairs[len(args.formats)]  # torch comes after ours
            texts = [f"{low / least:.2f} / {median / middle:.2f}" for least, middle in pairs]
        else:
            texts = [f"{1e3 * least:.3f} / {1e3 * middle:.3f}" for least, middle in pairs]
        print(f"{m:5}" + "".join(f"{text:>24}" for text in texts), flush=True)


def main() -> None:
    """Prints one table a shape and number of threads."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, default=4096, help="outputs")
    parser.add_argument("-k", type=int, default=4096, help="inner size")
    parser.add_argument("-m", type=int, nargs="+", default=ROWS)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--formats", nargs="+", default=["custom4-g64"])
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each cell of a table")
    parser.add_argument("--ratios", action="store_true", help="times of torch over each one's")
    parser.add_argument("--backward", action="store_true", help="dy @ W_hat")
    args = parser.parse_args()
    fdk_cpu.set_instruction_set(args.isa)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    backward = args.backward
    formats = [Format.parse(text) for text in args.formats]
    contenders = [ours(format, args.n, args.k, dtype, backward=backward) for format in formats]
    contenders += peers(args.n, args.k, dtype, backward=backward)
    for threads in args.threads:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            title = (
                f"n = {args.n}, k = {args.k}, {threads} threads{', backward' if backward else ''}"
            )
            table(contenders, args.n if backward else args.k, args, title)


if __name__ == "__main__":
    main()
