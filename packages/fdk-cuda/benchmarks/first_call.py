"""Time the first calls of a Marlin layer in new processes, before and after kernels are cached.

    python packages/fdk-cuda/benchmarks/first_call.py [--formats custom4-g64,affine4-g64]

Milliseconds from a call to its result in a process that has imported torch and used the GPU; what
the call imports, compiles, reads and loads counts. cold: the folder of compiled kernels is empty.
warm: the next process, with the same folder. auto: a third one, in which backend="auto" chooses.
Last, eight cold processes start at once and must all return the same y.
"""

import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from typing import TypeVar

import torch
from _timing import Row, argument_parser, check, has_gpu, write_rows

from fdk_formats.backends import Backend, Problem, select
from fdk_formats.format import Format
from fdk_formats.testing import random_quantised

T = TypeVar("T")
all_ready: Barrier
FORMATS = "custom1-g64,custom2-g64,custom3-g64,custom4-g64,custom8-g64,affine4-g64"
N = K = 4096
PROCESSES = 8
# Each m runs another kernel on Hopper: GEMV of 1 bit, small_m, and two tiles of hopper_gemm.
ROWS = (1, 16, 64, 1024)


def milliseconds(run: Callable[[], T]) -> tuple[T, float]:
    """Call ``run`` and return its result and the time until the GPU is done."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = run()
    torch.cuda.synchronize()
    return result, 1000 * (time.perf_counter() - start)


def set_barrier(barrier: Barrier) -> None:
    """Keep the barrier for ``first_calls`` in this process."""
    global all_ready
    all_ready = barrier


def first_calls(format: str, cache: str, auto: bool) -> Row:
    """Return milliseconds of packing and of each first and second call, and a digest of y.

    Args:
        format: the weight's format.
        cache: folder of compiled kernels.
        auto: select the backend by ``auto`` instead of by name.
    """
    os.environ["FDK_CUDA_CACHE"] = cache
    generator = torch.Generator("cuda").manual_seed(0)
    xs = [torch.randn(m, K, device="cuda", generator=generator).bfloat16() for m in ROWS]
    q = random_quantised(Format.parse(format), N, K, seed=1).to("cuda")

    def pack() -> torch.nn.Module:
        from fdk_cuda.marlin import MARLIN, MARLIN_LUT

        backend: Backend = MARLIN if q.format.is_affine else MARLIN_LUT
        if auto:
            selected = select(Problem(q.format, *q.shape, torch.bfloat16, q.device))
            assert selected.name == backend.name, selected.name
            backend = selected
        return backend.pack(q, dtype=torch.bfloat16)

    all_ready.wait()
    row: Row = {}
    layout, row["pack"] = milliseconds(pack)
    ys = []
    for x in xs:
        y, row[f"m{len(x)}"] = milliseconds(lambda x=x: layout(x))
        _, row[f"m{len(x)}_again"] = milliseconds(lambda x=x: layout(x))
        ys.append(y)
    W_hat = q.dequantise(torch.bfloat16).double()
    for x, y in zip(xs, ys, strict=True):
        check(y, x.double() @ W_hat.T, f"{format} m{len(x)}")
    row["nvrtc"] = "cuda.bindings.nvrtc" in sys.modules
    y_bytes = torch.cat(ys).view(torch.int16).cpu().numpy().tobytes()
    return row | {"digest": hashlib.sha256(y_bytes).hexdigest()}


def in_new_processes(count: int, format: str, cache: str, *, auto: bool) -> list[Row]:
    """Run ``first_calls`` in ``count`` processes at once, each with only torch imported."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "fdk_formats.testing", "_timing"])
    initargs = (context.Barrier(count),)
    with ProcessPoolExecutor(count, context, set_barrier, initargs) as pool:
        return list(pool.map(first_calls, [format] * count, [cache] * count, [auto] * count))


def time_starts(formats: list[str]) -> Iterator[Row]:
    """Yield a row for each process: cold, warm and auto of each format, then eight at once."""
    for format in formats:
        with tempfile.TemporaryDirectory() as cache:
            for start in ("cold", "warm", "auto"):
                (row,) = in_new_processes(1, format, cache, auto=start == "auto")
                yield {"format": format, "n": N, "k": K, "start": start} | row
    with tempfile.TemporaryDirectory() as cache:
        rows = in_new_processes(PROCESSES, formats[0], cache, auto=False)
    if len({row["digest"] for row in rows}) > 1:
        raise SystemExit(f"{formats[0]}: {PROCESSES} processes at once returned different results")
    for row in rows:
        yield {"format": formats[0], "n": N, "k": K, "start": "eight"} | row


def line_of(row: Row) -> str:
    """Format a row."""
    times = {name: round(value, 1) for name, value in row.items() if isinstance(value, float)}
    nvrtc = "NVRTC loaded" if row["nvrtc"] else "NVRTC not loaded"
    return f"{row['format']:12} {row['start']:5} {times} {nvrtc}"


def main() -> None:
    """Read the command line and time every start."""
    parser = argument_parser(__doc__)
    parser.add_argument("--formats", default=FORMATS)
    args = parser.parse_args()
    if has_gpu():
        write_rows(args.out, time_starts(args.formats.split(",")), line_of)


if __name__ == "__main__":
    main()
