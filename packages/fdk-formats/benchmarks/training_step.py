"""Time of a training step of a layer with quantised weights, over that of a plain one.

    python packages/fdk-formats/benchmarks/training_step.py --shape 576x1536 --m 512

A step is forward and backward of x and weight; refits of the codebook are counted in, at their
share of a step. Plain and quantised steps take turns, so that other load meets both alike.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from fdk_formats import prepare_qat

FORMATS = (
    "kmeans1-g64,kmeans2-g64,kmeans3-g64,kmeans4-g64,int1-g64,int2-g64,int4-g64,affine4-g64,"
    "nf4-g64,int8-g64"
)
LEARN = {"rules": (), "learned": ("codebook", "scale")}
WARM_CALLS = 2


def main() -> None:
    """Prints a table of formats."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="576x1536", help="k x n")
    parser.add_argument("--m", type=int, default=512)
    parser.add_argument("--formats", default=FORMATS, help="comma-separated")
    parser.add_argument("--refit-every", type=int, default=100)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    k, n = map(int, arguments.shape.split("x"))
    torch.manual_seed(0)
    plain = nn.Linear(
        k, n, bias=False, device=arguments.device, dtype=getattr(torch, arguments.dtype)
    )
    x = torch.randn(arguments.m, k).to(plain.weight).requires_grad_()
    print(f"k={k} n={n} m={arguments.m} {arguments.dtype}, {arguments.threads} threads")
    print(
        "| format | learned | plain ms | step ms | refit ms | ratio |\n"
        "|---|---|---:|---:|---:|---:|"
    )
    for format in arguments.formats.split(","):
        for name, learn in LEARN.items():
            if not format.startswith("kmeans"):
                learn = tuple(each for each in learn if each != "codebook")
            layer = prepare_qat(plain, format, learn=learn)
            before, after = alternately(
                [lambda: step(plain, x), lambda layer=layer: step(layer, x)], arguments.turns
            )
            refit = alternately([layer.refit], 3)[0] if layer.qat.refit_every else 0.0
            ratio = (after + refit / arguments.refit_every) / before
            print(
                f"| {format} | {name} | {1e3 * before:.1f} | {1e3 * after:.1f} | {1e3 * refit:.0f} "
                f"| {ratio:.2f} |",
                flush=True,
            )


def step(layer: nn.Linear, x: torch.Tensor) -> None:
    """Runs forward and backward."""
    y = layer(x)
    y.backward(torch.ones_like(y))
    if x.is_cuda:
        torch.cuda.synchronize()


def alternately(calls: list[Callable[[], None]], turns: int) -> list[float]:
    """Returns the median seconds of each call: of one CPU thread those it worked, else elapsed."""
    is_alone = torch.get_num_threads() == 1 and not torch.cuda.is_initialized()
    clock = time.process_time if is_alone else time.perf_counter
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(turns + WARM_CALLS):
        for call, found in zip(calls, times, strict=True):
            start = clock()
            call()
            if turn >= WARM_CALLS:
                found.append(clock() - start)
    return [statistics.median(found) for found in times]


if __name__ == "__main__":
    main()
