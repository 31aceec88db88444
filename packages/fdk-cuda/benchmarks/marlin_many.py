"""Times many rows of x by the Marlin op, beside what else could take them here, in turns.

    python packages/fdk-cuda/benchmarks/marlin_many.py [--ms 128] [--bits 1,4] [--out F]

`marlin` is what the op runs, `unfused` dequantises its bytes and multiplies by cuBLAS, `triton` is
the other backend where it multiplies codes (above, it dequantises too), `cublas` multiplies by a
weight of 16 bits. Each is checked against float64 first; graphs, cold L2, median replay.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _rows import write_rows
from marlin import COLD_BYTES, SHAPES, Run, dense_runs, graph_times, random_weight

from fdk_cuda.marlin import MARLIN_LUT, MarlinLayout
from fdk_cuda.marlin.ops import marlin_linear
from fdk_cuda.triton import TritonLayout
from fdk_cuda.triton.configs import gpu_of
from fdk_cuda.triton.configs.gemm import serves_gemm_wgmma
from fdk_cuda.triton.ops import triton_linear
from fdk_formats.tensor import QuantisedTensor
from fdk_formats.testing import nrmse

REPLAYS = 7
# Of a graph, at the rate of cuBLAS: its launch is then in the order of 1 %.
GRAPH_MICROSECONDS, FLOPS_PER_MICROSECOND = 1000, 700e6


def copies(tensor: torch.Tensor) -> list[torch.Tensor]:
    """As many that the L2 does not hold them."""
    return [tensor.clone() for _ in range(COLD_BYTES // tensor.nbytes + 2)]


class Candidates:
    """A weight in the layouts of both backends and in 16 bits, each in several copies."""

    def __init__(self, q: QuantisedTensor) -> None:
        marlin, self.triton = MARLIN_LUT.pack(q, dtype=torch.bfloat16), TritonLayout(q)
        assert isinstance(marlin, MarlinLayout)
        self.marlin = marlin
        self.packed, self.words = copies(marlin.packed), copies(self.triton.words)
        self.rounded = q.dequantise(torch.bfloat16)
        self.dense = copies(self.rounded)

    def multiplies_codes(self, m: int) -> bool:
        """Whether the Triton backend does."""
        layout, gpu = self.triton.packed_layout, gpu_of(torch.cuda.get_device_capability())
        return m <= gpu.limits.gemm_m or serves_gemm_wgmma(layout, m, gpu)

    def runs(self, x: torch.Tensor) -> dict[str, Run]:
        """By name, checked.

        Raises:
            SystemExit: an answer is wrong.
        """
        m, t, a = len(x), self.triton, self.triton.packed_layout
        weight = self.marlin.codebook, str(self.marlin.format), False, None, *self.marlin.shape
        other = t.scale, t.zero_point, t.values, t.lanes, a.bits, a.group_size, False, None, a.n
        cublas, unfused = dense_runs(self.marlin, self.packed, self.dense, x)
        runs: dict[str, Callable[[int], torch.Tensor]] = {
            "marlin": lambda i: marlin_linear(x, self.packed[i % len(self.packed)], *weight),
            "unfused": unfused,
            "cublas": cublas,
        }
        if self.multiplies_codes(m):
            words = self.words
            runs["triton"] = lambda i: triton_linear(x, words[i % len(words)], *other, a.k)
        oracle = x.double() @ self.rounded.double().T
        for name, run in runs.items():
            if not (error := nrmse(run(0), oracle)) < 2e-3:
                case = f"{self.marlin.format} {[a.n, a.k]} m{m} {name}"
                raise SystemExit(f"wrong answer, not timed: {case}: {error:.2e}")
        return runs


def time_case(n: int, k: int, bits: int, m: int, candidates: Candidates) -> dict[str, Any]:
    """A row, in microseconds by name."""
    runs = candidates.runs(torch.randn(m, k, device="cuda").to(torch.bfloat16))
    shortest = 2 * m * n * k / FLOPS_PER_MICROSECOND
    count = max(2, int(GRAPH_MICROSECONDS / shortest))
    times = graph_times(list(runs.values()), count, replays=REPLAYS)
    return {"n": n, "k": k, "bits": bits, "m": m} | dict(zip(runs, times, strict=True))


def line_of(row: dict[str, Any]) -> str:
    """A row as text: times, and ours over the best of the other two."""
    parts = " ".join(f"{name} {row[name]:8.1f}" for name in list(row)[4:])
    ratio = row["marlin"] / min(row[name] for name in ("unfused", "triton") if name in row)
    return f"{row['n']:6}x{row['k']:<6} b{row['bits']} m{row['m']:<5} {ratio:5.2f}  {parts}"


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ms", default="128,256,512,1024,2048,4096")
    parser.add_argument("--bits", default="1,2,3,4,8")
    parser.add_argument("--shapes", default="0,1,2,3,4", help="indices of marlin.py's SHAPES")
    parser.add_argument("--out", type=Path, help="a file that rows are written to as JSONL")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: needs an NVIDIA GPU, torch finds none on this machine")
        return
    ms = [int(m) for m in args.ms.split(",")]

    def rows() -> Iterator[dict[str, Any]]:
        for index in map(int, args.shapes.split(",")):
            for bits in map(int, args.bits.split(",")):
                candidates = Candidates(random_weight(bits, *SHAPES[index]))
                for m in ms:
                    yield time_case(*SHAPES[index], bits, m, candidates)

    write_rows(args.out, rows(), line_of)


if __name__ == "__main__":
    main()
