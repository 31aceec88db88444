"""Times the first calls of a Marlin layer in new processes: nothing compiled yet, then all of it.

    python packages/fdk-cuda/benchmarks/marlin_start.py [--formats ...] [--out F]

Milliseconds from a call to its result, in a process that has imported torch and touched the GPU;
what the call imports, compiles, reads, loads and plans counts. Cold: with an empty folder of
compiled kernels. Warm: a second process with what the first left there. Auto: a third, in which
``backend="auto"`` chooses. `nvrtc`: whether NVRTC's bindings were loaded. Then eight cold processes
at once, which must all give the same y.
"""

import argparse
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, TypeVar

import torch
from _rows import write_rows

from fdk_formats.backends import Backend, Problem, select
from fdk_formats.format import Format
from fdk_formats.testing import nrmse, random_quantised

T = TypeVar("T")
all_ready: Barrier
FORMATS = "custom1-g64,custom2-g64,custom3-g64,custom4-g64,custom8-g64,affine4-g64"
SHAPE, PROCESSES = (4096, 4096), 8
# One kernel each: small_m.cu or gemv_int8_limbs.cu for 1 and 16 rows, else hopper_gemm.cu.
ROWS = (1, 16, 64, 1024)


def milliseconds(run: Callable[[], T]) -> tuple[T, float]:
    """What it returns, and how long that takes."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = run()
    torch.cuda.synchronize()
    return result, 1000 * (time.perf_counter() - start)


def keep(barrier: Barrier) -> None:
    """For ``first_calls`` of this process."""
    global all_ready
    all_ready = barrier


def first_calls(format: str, cache: str, is_chosen: bool) -> dict[str, float | str]:
    """Of a new process: milliseconds by what is done, and a digest of the results.

    Args:
        format: of the weight.
        cache: where compiled kernels lie.
        is_chosen: whether ``auto`` chooses the backend; it is named otherwise.
    """
    os.environ["FDK_CUDA_CACHE"] = cache
    generator = torch.Generator("cuda").manual_seed(0)
    xs = [torch.randn(m, SHAPE[1], device="cuda", generator=generator).bfloat16() for m in ROWS]
    q = random_quantised(Format.parse(format), *SHAPE, seed=1).to("cuda")

    def pack() -> torch.nn.Module:
        from fdk_cuda.marlin import MARLIN, MARLIN_LUT

        named: Backend = MARLIN if q.format.is_affine else MARLIN_LUT
        if not is_chosen:
            return named.pack(q, dtype=torch.bfloat16)
        chosen = select(Problem(q.format, *q.shape, torch.bfloat16, q.device))
        assert chosen.name == named.name, chosen.name
        return chosen.pack(q, dtype=torch.bfloat16)

    all_ready.wait()
    layout, packing = milliseconds(pack)
    told: dict[str, float | str] = {"pack": packing}
    ys = []
    for x in xs:
        y, told[f"m{len(x)}"] = milliseconds(lambda x=x: layout(x))
        _, told[f"m{len(x)}_again"] = milliseconds(lambda x=x: layout(x))
        ys.append(y)
    W_hat = q.dequantise(torch.bfloat16).double()
    for x, y in zip(xs, ys, strict=True):
        if not (error := nrmse(y, x.double() @ W_hat.T)) < 3e-3:
            raise RuntimeError(f"wrong answer: {format} m{len(x)}: {error:.2e}")
    bits = torch.cat(ys).view(torch.int16).cpu().numpy().tobytes()
    digest = hashlib.sha256(bits).hexdigest()
    return told | {"digest": digest, "nvrtc": "cuda.bindings.nvrtc" in sys.modules}


def in_new_processes(
    count: int, format: str, cache: str, *, is_chosen: bool
) -> list[dict[str, float | str]]:
    """``first_calls`` of so many at once, which have nothing but torch behind them."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "fdk_formats.testing", "_rows"])
    barrier = context.Barrier(count)
    with ProcessPoolExecutor(count, context, initializer=keep, initargs=(barrier,)) as pool:
        return list(pool.map(first_calls, [format] * count, [cache] * count, [is_chosen] * count))


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--out", type=Path, help="a file that rows are written to as JSONL")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("not run: needs an NVIDIA GPU, torch finds none on this machine")
        return
    write_rows(args.out, time_starts(args.formats.split(",")), line_of)


def time_starts(formats: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each process; cold, warm and chosen behind it, and at last several at once.

    Raises:
        SystemExit: processes at once gave different results.
    """
    runs = [(format, kind, 1) for format in formats for kind in ("cold", "warm", "auto")]
    runs.append((formats[0], "eight", PROCESSES))
    cache = tempfile.TemporaryDirectory()
    for format, kind, count in runs:
        if kind not in ("warm", "auto"):
            cache.cleanup()
            cache = tempfile.TemporaryDirectory()
        rows = in_new_processes(count, format, cache.name, is_chosen=kind == "auto")
        if len({row["digest"] for row in rows}) > 1:
            raise SystemExit(f"{format}: {count} processes at once gave different results")
        for row in rows:
            yield {"format": format, "n": SHAPE[0], "k": SHAPE[1], "kind": kind} | row
    cache.cleanup()


def line_of(row: dict[str, Any]) -> str:
    """A row as text."""
    times = {name: round(value, 1) for name, value in row.items() if isinstance(value, float)}
    loaded = "NVRTC loaded" if row["nvrtc"] else "NVRTC not loaded"
    return f"{row['format']:12} {row['kind']:5} {times} {loaded}"


if __name__ == "__main__":
    main()
