"""Times y = x @ W_hat.T on the CPU beside torch and bitsandbytes, with the read floor of the run.

Weights rotate through more copies than the last-level cache holds. The floor is the time to read
the packed bytes at the bandwidth that this process reaches, interleaved with the kernels. A wrong
answer is not timed. Set OMP_PROC_BIND=true or GOMP_SPINCOUNT=0 for fair torch rows.
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
from fdk_formats import Format
from fdk_formats.testing import nrmse, random_quantised

# More than the last-level cache of any machine this is run on, shared with others or not.
ROTATED_BYTES = 192 << 20
MAX_COPIES = 100
MAX_ERROR = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-5}


@dataclass(frozen=True)
class Row:
    """One contender: a call per copy of the weight, and the bytes each copy takes."""

    name: str
    nbytes: int
    calls: list[Callable[[], object]]


def ours(format: Format, n: int, k: int, x: Tensor) -> Row:
    """The kernel of fdk-cpu, by its op."""
    q = random_quantised(format, n, k)
    backend = fdk_cpu.CpuBackend()
    layout = backend.pack(q, dtype=x.dtype)
    nbytes = sum(b.nbytes for b in layout.buffers())
    expected = linear(x.double(), q.dequantise(x.dtype).double())
    if (error := nrmse(layout(x), expected)) > MAX_ERROR[x.dtype]:
        raise SystemExit(f"{format}: the answer is wrong, nrmse {error:.2e}; not timed")
    layouts = [layout, *(backend.pack(q, dtype=x.dtype) for _ in range(copies_of(nbytes) - 1))]
    return Row(f"fdk-cpu {format}", nbytes, [lambda w=w: w(x) for w in layouts])


def copies_of(nbytes: int) -> int:
    """Copies of a weight that together exceed the caches."""
    return max(3, min(MAX_COPIES, ROTATED_BYTES // nbytes))


def torch_linear(n: int, k: int, x: Tensor) -> Row:
    """The unquantised layer."""
    weights = [torch.randn(n, k).to(x.dtype) for _ in range(copies_of(n * k * x.element_size()))]
    return Row("torch linear", weights[0].nbytes, [lambda w=w: linear(x, w) for w in weights])


def torch_int4pack(n: int, k: int, x: Tensor) -> Row:
    """torch's 4-bit affine kernel, groups of 64."""
    codes = torch.randint(0, 16, (n, k), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2)
    scales = torch.rand(k // 64, n, 2).to(x.dtype)
    nbytes = packed.nbytes + scales.nbytes
    copies = [(packed.clone(), scales.clone()) for _ in range(copies_of(nbytes))]
    op = torch.ops.aten._weight_int4pack_mm_for_cpu
    return Row("torch int4pack g64", nbytes, [lambda w=w, s=s: op(x, w, 64, s) for w, s in copies])


def bitsandbytes_nf4(n: int, k: int, x: Tensor) -> Row | None:
    """bitsandbytes' NF4 layer, blocks of 64."""
    try:
        from bitsandbytes.nn import Linear4bit
    except ImportError:
        return None
    layer = Linear4bit(k, n, bias=False, compute_dtype=x.dtype, quant_type="nf4")
    layer.weight.data = torch.randn(n, k).to(x.dtype)
    layer = layer.to("cpu").eval()
    with torch.no_grad():
        layer(x)
    nbytes = n * k // 2 + n * k // 64 * 4
    layers = [layer, *(copy.deepcopy(layer) for _ in range(copies_of(nbytes) - 1))]
    return Row("bitsandbytes NF4", nbytes, [lambda w=w: w(x) for w in layers])


def main() -> None:
    """Prints one table a shape and number of threads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, nargs="+", default=[4096])
    parser.add_argument("-m", type=int, default=1)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--formats", nargs="+", default=["custom4-g64"])
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row of a table")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--quick", action="store_true", help="a fifth of the time")
    args = parser.parse_args()
    seconds = args.seconds / 5 if args.quick else args.seconds
    fdk_cpu.set_instruction_set(args.isa)
    torch.manual_seed(0)
    for n in args.n:
        x = torch.randn(args.m, n).to(getattr(torch, args.dtype))
        rows = [ours(Format.parse(text), n, n, x) for text in args.formats]
        if not args.no_peers:
            peers = [torch_linear(n, n, x)]
            if x.dtype == torch.bfloat16:
                peers += [torch_int4pack(n, n, x), bitsandbytes_nf4(n, n, x)]
            rows += [row for row in peers if row is not None]
        for threads in args.threads:
            torch.set_num_threads(threads)
            with torch.inference_mode():
                table(rows, seconds, f"n = k = {n}, m = {args.m}, {threads} threads")


def read_bandwidth(memory: Tensor, turn: int) -> float:
    """Bytes a second, reading a quarter of the memory that was not read last."""
    quarter = memory.nbytes // 4
    part = memory[turn % 4 * quarter :][:quarter]
    start = time.perf_counter()
    fdk_cpu.read_sum(part)
    return quarter / (time.perf_counter() - start)


def table(rows: list[Row], seconds: float, title: str) -> None:
    """Times all rows and the read floor in turns, and prints them."""
    memory = torch.ones(ROTATED_BYTES, dtype=torch.uint8)
    times: list[list[float]] = [[] for _ in rows]
    bandwidths: list[float] = []
    end = time.perf_counter() + seconds * len(rows)
    turn = 0
    while time.perf_counter() < end or turn < 3:
        bandwidths.append(read_bandwidth(memory, turn))
        for row, series in zip(rows, times, strict=True):
            for i in range(8):
                call = row.calls[(8 * turn + i) % len(row.calls)]
                start = time.perf_counter()
                call()
                series.append(time.perf_counter() - start)
        turn += 1
    best = statistics.median(bandwidths)
    print(f"\n{title}, {fdk_cpu.instruction_set()}; read {best / 1e9:.1f} GB/s median, ", end="")
    print(f"{max(bandwidths) / 1e9:.1f} best")
    print(f"{'':34}{'MB':>7}{'min ms':>9}{'median ms':>11}{'floor ms':>10}{'median/floor':>14}")
    for row, series in zip(rows, times, strict=True):
        median, low = statistics.median(series), min(series)
        wanted = row.nbytes / best
        print(
            f"{row.name:34}{row.nbytes / 1e6:7.2f}{low * 1e3:9.3f}{median * 1e3:11.3f}"
            f"{wanted * 1e3:10.3f}{median / wanted:14.2f}"
        )


if __name__ == "__main__":
    main()
