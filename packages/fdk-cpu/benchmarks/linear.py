"""Times y = x @ W_hat.T on the CPU for several m, against torch and bitsandbytes.

    GOMP_SPINCOUNT=0 python packages/fdk-cpu/benchmarks/linear.py --formats custom4-g64 custom8-g64

Prints one table per number of threads: minimum and median ms of each contender, all of one m in
turns. `--ratios` prints the time of torch over that of each contender instead, and `--backward`
times dy @ W_hat. Weights rotate through more copies than the caches hold; a wrong result is not
timed. GOMP_SPINCOUNT=0 keeps OpenMP's threads from spinning between torch's calls.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

import fdk_cpu
from fdk_cpu.backend import CpuLayout
from fdk_formats import Format
from fdk_formats.testing import nrmse, random_quantised

ROTATED_BYTES = 192 << 20  # more than the last-level cache of any machine so far
MAX_COPIES = 100
MAX_ERROR = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}
CHECKED_ROWS = (1, 2, 7, 33)
Layer = Callable[[Tensor], object]


@dataclass(frozen=True)
class Contender:
    """A layer in several copies, and the bytes of one copy."""

    name: str
    nbytes: int
    layers: list[Layer]


def copies_of(nbytes: int) -> int:
    """Return how many copies of a weight exceed the caches together."""
    return max(3, min(MAX_COPIES, ROTATED_BYTES // nbytes))


def ours(format: Format, n: int, k: int, dtype: torch.dtype, *, backward: bool) -> Contender:
    """Return a layer of fdk-cpu, after a comparison with float64 at several m."""
    q = random_quantised(format, n, k)
    backend = fdk_cpu.CpuBackend()
    layout = backend.pack(q, dtype=dtype)
    w = q.dequantise(dtype).double()
    first = gradient_of(layout) if backward else layout
    for m in CHECKED_ROWS:
        x = torch.randn(m, n if backward else k).to(dtype)
        expected = x.double() @ (w if backward else w.T)
        if (error := nrmse(first(x), expected)) > MAX_ERROR[dtype]:
            raise SystemExit(f"{format}: m = {m} is wrong, nrmse {error:.2e}; not timed")
    nbytes = sum(buffer.nbytes for buffer in layout.buffers())
    layouts = [layout, *(backend.pack(q, dtype=dtype) for _ in range(copies_of(nbytes) - 1))]
    layers: list[Layer] = [gradient_of(one) if backward else one for one in layouts]
    return Contender(f"fdk-cpu {format}", nbytes, layers)


def gradient_of(layout: CpuLayout) -> Layer:
    """Return the function from dy :: [m, n] to dy @ W_hat :: [m, k]."""
    tensors = (layout.codes, layout.scale, layout.codebook, layout.zero_point)
    sizes = (layout.group_size, layout.format.bits, *layout.shape)
    return lambda dy: torch.ops.fdk_cpu.lut_linear_grad_x(dy, *tensors, *sizes)


def peers(n: int, k: int, dtype: torch.dtype, *, backward: bool) -> list[Contender]:
    """Return torch's layers and, if it is installed, bitsandbytes' NF4 layer."""
    weights = [torch.randn(n, k).to(dtype) for _ in range(copies_of(n * k * dtype.itemsize))]
    if backward:
        layers: list[Layer] = [lambda dy, w=w: dy @ w for w in weights]
        return [Contender("torch dy @ W", weights[0].nbytes, layers)]
    found = [
        Contender("torch linear", weights[0].nbytes, [lambda x, w=w: linear(x, w) for w in weights])
    ]
    if dtype == torch.bfloat16:
        found += [torch_int4pack(n, k, dtype), *bitsandbytes_nf4(n, k, dtype)]
    return found


def torch_int4pack(n: int, k: int, dtype: torch.dtype) -> Contender:
    """Return torch's 4-bit affine layer with groups of 64."""
    codes = torch.randint(0, 16, (n, k), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2)
    scales = torch.rand(k // 64, n, 2).to(dtype)
    nbytes = packed.nbytes + scales.nbytes
    copies = [(packed.clone(), scales.clone()) for _ in range(copies_of(nbytes))]
    op = torch.ops.aten._weight_int4pack_mm_for_cpu
    layers: list[Layer] = [lambda x, w=w, s=s: op(x, w, 64, s) for w, s in copies]
    return Contender("torch int4pack g64", nbytes, layers)


def bitsandbytes_nf4(n: int, k: int, dtype: torch.dtype) -> list[Contender]:
    """Return bitsandbytes' NF4 layer with blocks of 64, or nothing."""
    try:
        from bitsandbytes.nn import Linear4bit
    except ImportError:
        return []
    layer = Linear4bit(k, n, bias=False, compute_dtype=dtype, quant_type="nf4")
    layer.weight.data = torch.randn(n, k).to(dtype)
    layer = layer.to("cpu").eval()
    with torch.no_grad():
        layer(torch.randn(1, k).to(dtype))  # packs the weight
    nbytes = n * k // 2 + n * k // 64 * 4
    layers = [layer, *(copy.deepcopy(layer) for _ in range(copies_of(nbytes) - 1))]
    return [Contender("bitsandbytes NF4", nbytes, layers)]


def read_bandwidth() -> float:
    """Return bytes per second, the median of eight reads."""
    memory = torch.ones(ROTATED_BYTES, dtype=torch.uint8)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        fdk_cpu.read_sum(memory)
        times.append(time.perf_counter() - start)
    return ROTATED_BYTES / statistics.median(times)


def times(contenders: list[Contender], x: Tensor, seconds: float) -> list[list[float]]:
    """Return the seconds of each call by contender, in turns until each had `seconds`."""
    series: list[list[float]] = [[] for _ in contenders]
    end = time.perf_counter() + seconds * len(contenders)
    turn = 0
    while time.perf_counter() < end or turn < 3:
        for contender, seconds_of in zip(contenders, series, strict=True):
            for i in range(3):
                layer = contender.layers[(3 * turn + i) % len(contender.layers)]
                start = time.perf_counter()
                layer(x)
                seconds_of.append(time.perf_counter() - start)
        turn += 1
    return series


def print_table(contenders: list[Contender], inner: int, args: argparse.Namespace) -> None:
    """Print a line for each m, in ms or as ratios."""
    bandwidth = read_bandwidth()
    floors = ", ".join(f"{c.name} {1e3 * c.nbytes / bandwidth:.2f}" for c in contenders)
    print(f"read {bandwidth / 1e9:.1f} GB/s median; read floors, ms: {floors}")
    print(f"{'m':>5}" + "".join(f"{c.name:>24}" for c in contenders))
    torch_linear = len(args.formats)  # its index: it comes after our formats
    for m in args.m:
        x = torch.randn(m, inner).to(getattr(torch, args.dtype))
        series = times(contenders, x, args.seconds)
        cells = [(min(one), statistics.median(one)) for one in series]
        low, middle = cells[torch_linear] if args.ratios else (None, None)
        texts = [
            f"{low / a:.2f} / {middle / b:.2f}" if args.ratios else f"{1e3 * a:.3f} / {1e3 * b:.3f}"
            for a, b in cells
        ]
        print(f"{m:5}" + "".join(f"{text:>24}" for text in texts), flush=True)


def main() -> None:
    """Print one table per number of threads."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, default=4096, help="outputs")
    parser.add_argument("-k", type=int, default=4096, help="inputs")
    parser.add_argument("-m", type=int, nargs="+", default=[1, 2, 4, 8, 16, 24, 32, 64, 512])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--formats", nargs="+", default=["custom4-g64"])
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--seconds", type=float, default=0.5, help="per cell of a table")
    parser.add_argument("--ratios", action="store_true", help="time of torch over that of each")
    parser.add_argument("--backward", action="store_true", help="dy @ W_hat")
    parser.add_argument("--quick", action="store_true", help="a fifth of the time, two values of m")
    args = parser.parse_args()
    if args.quick:
        args.seconds, args.m = args.seconds / 5, args.m[:2]
    fdk_cpu.set_instruction_set(args.isa)
    torch.manual_seed(0)
    dtype, backward = getattr(torch, args.dtype), args.backward
    formats = [Format.parse(text) for text in args.formats]
    contenders = [ours(format, args.n, args.k, dtype, backward=backward) for format in formats]
    contenders += peers(args.n, args.k, dtype, backward=backward)
    for threads in args.threads:
        torch.set_num_threads(threads)
        shown = "time of torch over it" if args.ratios else "ms"
        print(f"\n{args.n} x {args.k}, {threads} threads, {fdk_cpu.instruction_set()}", end="")
        print(f"{', backward' if backward else ''}: minimum / median, {shown}")
        with torch.inference_mode():
            print_table(contenders, args.n if backward else args.k, args)


if __name__ == "__main__":
    main()
