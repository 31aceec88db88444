"""Times the Triton kernels on one GPU beside cuBLAS; each case is checked before it is timed.

    python triton_kernels.py --bits 1 4 --m 1 16 64 --shape 8192x8192
    python triton_kernels.py --sweep --bits 4 --m 64 256      every configuration, best first

Each case is captured in a CUDA graph over copies of the weight that together exceed 256 MB, so
that the L2 is cold; the median of 15 replays is quoted, in microseconds a call.
"""

import argparse
import itertools
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fdk_cuda.triton import launch
from fdk_cuda.triton.arrangement import Arrangement
from fdk_cuda.triton.configs import (
    GemmConfig,
    SmallConfig,
    fit,
    gemm_config,
    small_config,
)
from fdk_cuda.triton.decode import lookup_tables

COLD_BYTES = 256 << 20
Config = SmallConfig | GemmConfig | None  # None: dequantise and cuBLAS


def weights(n: int, k: int, bits: int, group_size: int, affine: bool) -> list[launch.Weight]:
    """Random weights that together exceed the L2."""
    a = Arrangement(n, k, bits, group_size)
    codebook = torch.arange(2.0**bits) if affine else torch.randn(1 << bits).sort().values
    values, lanes = lookup_tables(codebook.cuda())
    result = []
    for _ in range(max(2, -(-COLD_BYTES // (n * k * bits // 8)))):
        words = torch.randint(-(1 << 31), 1 << 31, a.words_shape, dtype=torch.int32, device="cuda")
        scale = (torch.rand(a.n_tiles, a.groups, 8, 2, device="cuda") + 0.5) / k**0.5
        zero = (torch.rand_like(scale) * (1 << bits)).bfloat16() if affine else None
        result.append(launch.Weight(words, scale.bfloat16(), zero, values, lanes, a))
    return result


def run(x: Tensor, w: launch.Weight, config: Config) -> Tensor:
    """One product by the kernel that a configuration belongs to."""
    if isinstance(config, SmallConfig):
        return launch.small(x, w, None, config)
    if isinstance(config, GemmConfig):
        return launch.gemm(x, w, None, config)
    return x @ launch.dequantise(w, x.dtype).T


def graph_time(calls: list[Callable[[], Tensor]], repeats: int = 15) -> float:
    """Median microseconds of a call, all of them replayed together."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times)[len(times) // 2]


def chosen(n: int, m: int, w: launch.Weight) -> list[Config]:
    """What the dispatcher would choose from."""
    a = w.arrangement
    if m <= 16:
        return [small_config(n, m, a.bits)]
    shared = launch.shared_memory(torch.device("cuda", 0))
    return [gemm_config(n, m, a.bits, a.k_tiles, shared), None]


def all_configs(m: int, bits: int) -> list[Config]:
    """Everything worth trying."""
    if m <= 16:
        grid = itertools.product((1, 2, 4), (4, 8), (False, True))
        return [SmallConfig(tiles, warps, prefetch) for tiles, warps, prefetch in grid]
    blocks = [b for b in (16, 32, 64, 128) if m // 4 <= b < 2 * m]
    base = [
        GemmConfig(tiles, warps, block, stages=stages)
        for (tiles, warps), block, stages in itertools.product(((1, 4), (1, 8)), blocks, (3, 4))
    ]
    shared = launch.shared_memory(torch.device("cuda", 0))
    fitting = {fit(replace(c, split_k=s), bits, shared) for c in base for s in (1, 2, 4)}
    return [*sorted(fitting, key=str), None]


def compile_one(job: tuple[int, bool, int, Config]) -> None:
    """Fills the disk cache with one kernel."""
    bits, affine, m, config = job
    w = weights(256, 4096, bits, 64, affine)[0]
    run(torch.randn(m, 4096, device="cuda").bfloat16(), w, config)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--bits", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--m", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--shape", nargs="+", default=["4096x4096", "8192x8192", "28672x8192"])
    parser.add_argument("--affine", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--processes", type=int, default=12)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: needs an NVIDIA GPU, torch finds none on this machine")
        return
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shape]

    def configs(n: int, m: int, w: launch.Weight) -> list[Config]:
        return all_configs(m, w.arrangement.bits) if args.sweep else chosen(n, m, w)

    jobs = set()
    for bits, m, (n, k) in itertools.product(args.bits, args.m, shapes):
        a = Arrangement(n, k, bits, 64)
        w = launch.Weight(*[torch.empty(0)] * 5, a)
        jobs |= {(bits, args.affine, m, config) for config in configs(n, m, w)}
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        pool.map(compile_one, sorted(jobs, key=str), chunksize=1)
    for bits, (n, k) in itertools.product(args.bits, shapes):
        ws = weights(n, k, bits, 64, args.affine)
        dense = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(4)]
        for m in args.m:
            x = torch.randn(m, k, device="cuda").bfloat16()
            reference = x.float() @ launch.dequantise(ws[0], torch.bfloat16).float().T
            times = []
            for config in configs(n, m, ws[0]):
                y = run(x, ws[0], config).float()
                error = float((y - reference).norm() / reference.norm())
                assert error < 6e-3, f"{bits} bits, {n} x {k}, m = {m}, {config}: error {error:.1e}"
                calls = [partial(run, x, w, config) for w in ws]
                times.append((graph_time(calls), config))
            times.sort(key=lambda entry: entry[0])
            cublas = graph_time([partial(torch.nn.functional.linear, x, d) for d in dense])
            line = "  ".join(f"{us:.1f} {short(config)}" for us, config in times[:5])
            print(f"b{bits} {n}x{k} m{m}: cuBLAS {cublas:.1f} | {line}", flush=True)


def short(config: Config) -> str:
    """A configuration in a few letters."""
    if isinstance(config, SmallConfig):
        return f"small-n{config.n_tiles}w{config.warps}p{config.prefetch:d}"
    if isinstance(config, GemmConfig):
        c = config
        return f"gemm-t{c.tiles}w{c.warps}m{c.block_m}k{c.split_k}s{c.stages}"
    return "dequantise"


if __name__ == "__main__":
    main()
