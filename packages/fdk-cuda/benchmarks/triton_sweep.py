"""Times configurations of the small-m kernel on one GPU: check first, then sweep, then a table.

    python triton_sweep.py --bits 1 4 --m 1 16 --shape 8192x8192

Kernels are compiled by a pool of processes first (the compiled code is cached on disk). Each case
is captured in a CUDA graph over copies of the weight that together exceed 256 MB, so that the L2
is cold; the median of the replays is quoted, in microseconds a call.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from pathlib import Path

import torch
import triton
from fdk_cuda.triton.linear import run_small
from fdk_cuda.triton.arrangement import Arrangement
from fdk_cuda.triton.decode import lookup_tables

COLD_BYTES = 256 << 20


def random_weight(n, k, bits, group_size, affine, copies):
    a = Arrangement(n, k, bits, group_size)
    shape = (copies, *a.words_shape)
    words = torch.randint(-(1 << 31), (1 << 31) - 1, shape, dtype=torch.int32, device="cuda")
    scales = (copies, a.n_tiles, a.groups, 8, 2)
    scale = (torch.rand(scales, device="cuda") + 0.5).bfloat16() / k**0.5
    zero = (torch.rand(scales, device="cuda") * (1 << bits)).bfloat16() if affine else None
    codebook = torch.arange(2.0**bits) if affine else torch.randn(1 << bits).sort().values
    values, lanes = lookup_tables(codebook.cuda())
    return words, scale, zero, values, lanes


def graph_time(calls, repeats=15):
    """Median microseconds of one of the calls, replayed together."""
    for call in calls[:2]:
        call()
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


def compile_one(job):
    bits, affine, m, config = job
    n, k = 64, 16 * 512
    words, scale, zero, values, lanes = random_weight(n, k, bits, 64, affine, 1)
    x = torch.randn(m, k, device="cuda").bfloat16()
    run_small(x, words[0], scale[0], None if zero is None else zero[0], values, lanes, bits, 64,
              None, n, k, **config)


def configs(args):
    for n_tiles, warps, prefetch in itertools.product(args.n_tiles, args.warps, args.prefetch):
        yield {"n_tiles": n_tiles, "warps": warps, "prefetch": bool(prefetch)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bits", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    parser.add_argument("--m", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--shape", nargs="+", default=["4096x4096", "8192x8192", "28672x8192"])
    parser.add_argument("--n-tiles", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--warps", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--prefetch", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--affine", action="store_true")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shape]

    jobs = [(b, args.affine, m, c) for b in args.bits for m in args.m for c in configs(args)]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        pool.map(compile_one, jobs, chunksize=1)
    print("compiled", flush=True)
    rows = []
    for bits, (n, k) in itertools.product(args.bits, shapes):
        size = n * k * bits // 8
        copies = max(2, -(-COLD_BYTES // size))
        words, scale, zero, values, lanes = random_weight(n, k, bits, 64, args.affine, copies)
        for m in args.m:
            x = torch.randn(m, k, device="cuda").bfloat16()
            best = []
            for config in configs(args):
                def call(i, config=config, x=x):
                    return run_small(x, words[i], scale[i], None if zero is None else zero[i],
                                     values, lanes, bits, 64, None, n, k, **config)
                try:
                    us = graph_time([lambda i=i: call(i) for i in range(copies)])
                except triton.runtime.errors.OutOfResources:
                    continue
                best.append((us, config))
                rows.append({"bits": bits, "n": n, "k": k, "m": m, "us": us, **config})
            best.sort(key=lambda entry: entry[0])
            line = "  ".join(f"{us:.1f} nt{c['n_tiles']}w{c['warps']}p{int(c['prefetch'])}" for us, c in best[:6])
            print(f"b{bits} {n}x{k} m{m}: {line} .. {best[-1][0]:.1f}", flush=True)
    if args.out:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
