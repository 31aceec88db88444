"""Time the Triton kernels, as the backend configures them, against cuBLAS.

    python packages/fdk-cuda/benchmarks/triton_kernels.py --bits 1,4 --ms 1,16,64 [--out rows.jsonl]
    python packages/fdk-cuda/benchmarks/triton_kernels.py --dy --bits 4 --ms 1,64    dy @ W_hat
    python packages/fdk-cuda/benchmarks/triton_kernels.py --sweep --bits 4 --ms 64   every candidate

Microseconds per call, cold L2, median of graph replays in turns with cuBLAS on a bf16 weight and,
for 64 or more rows, with dequantising first. `floor` is the larger of reading weight and x once and
of the arithmetic at the rate of cuBLAS (H200). Each case is checked against float64 first. Kernels
are compiled by several processes before anything is timed.
"""

import itertools
import multiprocessing
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import triton
from _timing import (
    Row,
    argument_parser,
    check,
    copies,
    graph_times,
    has_gpu,
    integers,
    product_floor,
    shapes,
    write_rows,
)
from torch import Tensor

from fdk_cuda.triton import launch
from fdk_cuda.triton.autotune import candidates, random_weights
from fdk_cuda.triton.configs import DgradConfig, forward_config, grad_config
from fdk_cuda.triton.layout import STRIDES, PackedLayout
from fdk_cuda.triton.packed_weight import PackedWeight

GROUP_SIZE = 64
DEQUANTISE_ROWS = 64
FEW_OUTPUTS = 512  # of the weights that kernels are compiled with
LIMIT = 6e-3


@dataclass(frozen=True)
class Case:
    """A weight, m rows of x, or of dy for ``dy @ W_hat``."""

    n: int
    k: int
    bits: int
    affine: bool
    dy: bool
    m: int

    def weights(self, n: int) -> list[PackedWeight]:
        """Make copies of a random weight with n outputs that together exceed the L2."""
        layout = PackedLayout(n, self.k, self.bits, GROUP_SIZE)
        return random_weights(layout, torch.bfloat16, torch.bfloat16 if self.affine else None, 0)

    def configs(self, sweep: bool) -> list[Any]:
        """List the chosen configuration, then the others to time; None dequantises first."""
        layout, gpu = PackedLayout(self.n, self.k, self.bits, GROUP_SIZE), launch.gpu_at(0)
        choose = grad_config if self.dy else forward_config
        found: list[Any] = [choose(layout, self.m, gpu, affine=self.affine)]
        if sweep and self.dy:
            found += dgrad_candidates(self.m, self.bits)
        elif sweep:
            found += candidates(layout, self.m, gpu, affine=self.affine)
        if self.m >= DEQUANTISE_ROWS:
            found.append(None)
        return list(dict.fromkeys(found))

    def run(self, x: Tensor, ws: list[PackedWeight], config: Any, i: int) -> Tensor:
        """Run one product by a configuration."""
        w = ws[i % len(ws)]
        if self.dy:
            return launch.linear_dgrad(x, w, config)
        return launch.linear(x, w, None, config)


def dgrad_candidates(m: int, bits: int) -> list[Any]:
    """List configurations of the gradient's kernel for few rows of dy."""
    m_tiles = 1 if m <= 8 else 2 if m <= 16 else 4
    tables = (False, True) if bits in STRIDES else (False,)
    grid = itertools.product((2, 4), (2, 4, 8, 16), (0, 1), (4, 8), tables)
    return [
        DgradConfig(1, warps, m_tiles, split, ahead, positions, table)
        for warps, split, ahead, positions, table in grid
    ]


def compile_case(case: Case, *, sweep: bool) -> list[Any]:
    """Compile a case's kernels into Triton's cache; return configurations that do not fit."""
    ws, too_large = case.weights(FEW_OUTPUTS)[:1], []
    x = torch.randn(case.m, FEW_OUTPUTS if case.dy else case.k, device="cuda").bfloat16()
    for config in case.configs(sweep):
        try:
            case.run(x, ws, config, 0)
        except triton.OutOfResources:
            too_large.append(config)
    torch.cuda.synchronize()
    return too_large


def time_case(case: Case, *, sweep: bool, best: int) -> Iterator[Row]:
    """Yield the row of the chosen configuration, and of the ``best`` others."""
    too_large = compile_case(case, sweep=sweep)
    ws, m = case.weights(case.n), case.m
    W_hat = launch.dequantise(ws[0], torch.bfloat16)
    dense = copies(W_hat)
    x = torch.randn(m, case.n if case.dy else case.k, device="cuda").bfloat16()
    oracle = x.double() @ (W_hat.double() if case.dy else W_hat.double().T)
    configs = [config for config in case.configs(sweep) if config not in too_large]
    runs = [partial(case.run, x, ws, config) for config in configs]
    for config, run in zip(configs, runs, strict=True):
        check(run(0), oracle, f"{case} {config}", limit=LIMIT)

    def cublas(i: int) -> Tensor:
        W = dense[i % len(dense)]
        return torch.mm(x, W if case.dy else W.T)

    count = min(max(len(dense), len(ws)), 40) if m <= 64 else 12
    peer, *times = graph_times([cublas, *runs], count)
    read = [t for t in (ws[0].words, ws[0].scale, ws[0].zero_point, x) if t is not None]
    floor = product_floor(m, case.n, case.k, sum(t.nbytes for t in read))
    ranked = sorted(zip(times, configs, strict=True), key=lambda entry: entry[0])
    others = [entry for entry in ranked if entry[1] != configs[0]][:best]
    for us, config in [(times[0], configs[0]), *others]:
        row = asdict(case) | {"us": us, "cublas": peer, "floor": floor}
        yield row | {"config": str(config or "dequantise"), "chosen": config == configs[0]}


def line_of(row: Row) -> str:
    """Format a row."""
    kind = "affine" if row["affine"] else "codebook"
    case = f"{row['n']:6}x{row['k']:<6} {kind:8} b{row['bits']} m{row['m']:<4}"
    us, mark = row["us"], "*" if row["chosen"] else " "
    return (
        f"{case} {'dy' if row['dy'] else 'y':2} {us:7.2f}{mark} us, floor {row['floor']:7.2f} "
        f"({us / row['floor']:4.2f}), cuBLAS {row['cublas']:7.2f} ({us / row['cublas']:4.2f})  "
        f"{row['config']}"
    )


def main() -> None:
    """Read the command line, compile, then time every case."""
    parser = argument_parser(__doc__)
    parser.add_argument("--ms", type=integers, default="1,16,64,256", help="rows of x or dy")
    parser.add_argument("--bits", type=integers, default="1,2,3,4,8")
    parser.add_argument("--shapes", type=shapes, default="4096x4096,8192x8192")
    parser.add_argument("--affine", action="store_true", help="zero points, no codebook")
    parser.add_argument("--dy", action="store_true", help="time dy @ W_hat instead")
    parser.add_argument("--sweep", action="store_true", help="time every candidate")
    parser.add_argument("--best", type=int, default=4, help="rows in addition to the chosen one")
    parser.add_argument("--processes", type=int, default=14, help="processes that compile")
    args = parser.parse_args()
    if not has_gpu():
        return
    cases = [
        Case(n, k, bits, args.affine, args.dy, m)
        for (n, k), bits, m in itertools.product(args.shapes, args.bits, args.ms)
    ]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        pool.map(partial(compile_case, sweep=args.sweep), cases, chunksize=1)
    rows = (row for case in cases for row in time_case(case, sweep=args.sweep, best=args.best))
    write_rows(args.out, rows, line_of)


if __name__ == "__main__":
    main()
