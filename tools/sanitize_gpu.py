"""Runs every family of GPU kernels directly, each answer checked, for compute-sanitizer.

    python tools/sanitize_gpu.py --compile                              first, outside of it
    python tools/sanitize_gpu.py --only triton                          likewise
    compute-sanitizer --tool memcheck --report-api-errors no python tools/sanitize_gpu.py
    compute-sanitizer --tool racecheck python tools/sanitize_gpu.py --only marlin,hopper -k custom4
    python tools/sanitize_gpu.py --list                                 names of cases, no GPU

Families: marlin (few rows, digits, dequantising), layout (laying out and taking back), hopper
(many rows, both directions) and triton. Under the tool each kernel of torch takes seconds to load,
so torch only allocates and copies on the GPU: weights are made, and answers checked, on the CPU.
Cases that --seconds leaves no time for are named, and so is the first that is wrong. Calls that
return an error are not ours: bindings of the driver look for functions that it may not have.

--compile puts the kernels of all families but triton into $FDK_CUDA_CACHE, without a GPU too;
those of triton are compiled by a run without the tool. Packages are those of this repository.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(path) for path in sorted((ROOT / "packages").glob("*/src"))]
# Each tensor has memory of its own, so that the tool sees where it ends.
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

from sanitize_marlin import (  # noqa: E402
    Case,
    WrongAnswerError,
    hopper_cases,
    layout_cases,
    marlin_cases,
)


def triton_cases() -> Iterable[Case]:
    """As the others, but Triton is imported for them alone."""
    import sanitize_triton

    return sanitize_triton.triton_cases()


FAMILIES = {
    "marlin": marlin_cases,
    "layout": layout_cases,
    "hopper": hopper_cases,
    "triton": triton_cases,
}
ARCH = "sm_90a"  # of --compile where there is no GPU


def main(arguments: list[str] | None = None) -> int:
    """See the module; returns what the process should exit with."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--only", default=",".join(FAMILIES), metavar="FAMILY,FAMILY")
    add("-k", dest="word", default="", help="only cases whose names hold it")
    add("--seconds", type=float, default=float("inf"), help="until the rest is cut")
    add("--compile", action="store_true", help="compile what the cases take, and run none")
    add("--list", action="store_true", help="print the names of the cases, and run none")
    add("--workers", type=int, default=os.cpu_count(), help="processes that compile")
    args = parser.parse_args(arguments)
    names = args.only.split(",")
    if unknown := sorted(set(names) - set(FAMILIES)):
        parser.error(f"--only: no {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    start = time.monotonic()
    cases = [(name, case) for name in names for case in FAMILIES[name]() if args.word in case.name]
    if args.list:
        print("\n".join(f"{name}: {case.name}" for name, case in cases))
    elif args.compile:
        count = compile_all([case for _, case in cases], args.workers)
        print(f"{count} kernels for {len(cases)} cases, {time.monotonic() - start:.0f} s")
    else:
        return run(cases, start, args.seconds)
    return 0


def compile_all(cases: Iterable[Case], workers: int) -> int:
    """Compiles every program of the cases into the cache; returns how many there are."""
    import torch

    from fdk_cuda.nvrtc import architecture, cached_cubin

    has_gpu = torch.cuda.is_available()
    arch = architecture(torch.cuda.get_device_capability()) if has_gpu else ARCH
    programs = list(dict.fromkeys(program for case in cases for program in case.programs))
    with ProcessPoolExecutor(workers) as executor:
        for _ in executor.map(partial(cached_cubin, arch=arch), programs):
            pass
    return len(programs)


def run(cases: list[tuple[str, Case]], start: float, seconds: float) -> int:
    """Runs the cases, a line each, so that what the tool prints stands behind its case."""
    import torch

    if not torch.cuda.is_available():
        print("no GPU: --compile and --list need none")
        return 2
    done = dict.fromkeys((name for name, _ in cases), 0)
    wrong = False
    capability = torch.cuda.get_device_capability()
    while cases and time.monotonic() - start < seconds:
        name, case = cases.pop(0)
        if case.capability is not None and capability[0] != case.capability:
            print(f"{name}: {case.name}: skipped, needs compute capability {case.capability}.x")
            continue
        print(f"{name}: {case.name}", flush=True)
        try:
            case.run()
            torch.cuda.synchronize()
        except WrongAnswerError as error:
            wrong = True
            print(f"WRONG: {error}", flush=True)
            break
        done[name] += 1
    for name, case in cases:
        print(f"cut: {name}: {case.name}")
    counts = ", ".join(f"{name} {count}" for name, count in done.items())
    print(
        f"{'not all answers are' if wrong else 'all answers'} right: {counts}; cut: {len(cases)}; "
        f"{time.monotonic() - start:.0f} s on {torch.cuda.get_device_name()}"
    )
    return int(wrong or bool(cases))


if __name__ == "__main__":
    sys.exit(main())
