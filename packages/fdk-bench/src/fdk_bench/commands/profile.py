"""``fdk-bench profile``: what bounds one case."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from fdk_bench.commands.common import (
    EXIT_FAILED_ROWS,
    FILE_WIDTH,
    check_output,
    check_pattern,
    checked,
    output_folder,
    prepare_environment,
)

if TYPE_CHECKING:
    from fdk_bench.cases import KernelCase
    from fdk_bench.profiling import Disassembly, KernelProfile

WARM_CALLS = 5
TOP_INSTRUCTIONS = 8
# Whose files hold the kernels of an instruction set, as fdk-cpu's linear_kernels_for and
# int8_kernels_for choose them; a set that is not here has all its own.
OF_BF16 = {
    "amx": ("amx", "avx512bf16", "avx512vnni"),
    "avx512bf16": ("avx512bf16", "avx512vnni"),
    "neondot": ("neon",),
    "neoni8mm": ("neonbf16",),
    "sve": ("sve", "neonbf16"),
    "sve2": ("sve2", "neonbf16"),
}
OF_FLOATS = {
    "amx": ("avx512",),
    "avx512bf16": ("avx512",),
    **dict.fromkeys(("neondot", "neonbf16", "neoni8mm", "sve", "sve2"), ("neon",)),
}
OF_INT8 = {
    **dict.fromkeys(("amx", "avx512bf16"), ("avx512vnni",)),
    "avx512": ("avx2",),
    "neonbf16": ("neondot",),
    "neoni8mm": ("neoni8mm", "neondot"),
    **dict.fromkeys(("sve", "sve2"), ("sve", "neoni8mm", "neondot")),
}
# Functions that are not templates over bits.
PRODUCTS = {"amx": r"\bgemm_panel_tiles\b"}
BUILD = """the library holds no such names; is it stripped? In a checkout, build
  cmake -S packages/fdk-cpu -B build/native -DCMAKE_BUILD_TYPE=Release -DFDK_CPU_PYTHON=OFF \\
        -DFDK_CPU_TESTS=ON && cmake --build build/native
and pass --library build/native/fdk_native_test"""


def profile(
    name: Annotated[
        str, typer.Argument(help="A case, such as m1-n4096-k4096-custom4-g64-bf16-cuda-auto.")
    ],
    library: Annotated[
        Path | None,
        typer.Option(help="CPU: program or library to disassemble. Default: that of fdk-cpu."),
    ] = None,
    symbol: Annotated[
        str | None,
        typer.Option(help="CPU: regular expression of functions. Default: of the case's bits."),
    ] = None,
    listing: Annotated[bool, typer.Option(help="CPU: print the machine code too.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "--output",
            callback=check_output,
            help="GPU: folder to keep ncu's report in, NAME.ncu-rep, with every section for "
            "Nsight Compute's window. Default: none is kept.",
        ),
    ] = None,
    inside: Annotated[bool, typer.Option("--inside", hidden=True)] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what bounds a case: under Nsight Compute on a GPU, by its machine code on a CPU.

    GPU: runs the case once, warm, under ncu and prints the share of each pipe. CPU: the
    instructions of the kernels for the case's bits and activations, and the file that each is
    from, whose name tells the instruction set; those that this machine uses come first.

    Exit code: 0, 1 where the tool is missing or finds nothing, 2 bad usage.
    """
    check_pattern("--symbol", symbol or "")
    prepare_environment()
    from fdk_bench.profiling import parse_case

    case = checked(lambda: parse_case(name))
    if inside:
        _run_once(case)
    elif case.device == "cuda":
        _profile_gpu(name, json_lines, out)
    elif out is not None:
        raise typer.BadParameter(
            f"--out: wanted a case of cuda, whose report ncu keeps; got {name}"
        )
    else:
        _profile_cpu(case, library, symbol, listing, json_lines)


def _run_once(case: "KernelCase") -> None:
    """The process that ncu looks at: a cold weight each time, marked once warm."""
    import torch

    from fdk_bench.kernels import contender_of

    prepared = contender_of(case).prepare(case)
    generator = torch.Generator(case.device).manual_seed(0)
    x = torch.randn(case.m, case.k, device=case.device, generator=generator)
    x = x.to(case.torch_dtype)
    with torch.inference_mode():
        for call in prepared.calls[:WARM_CALLS]:
            call(x)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        prepared.calls[-1](x)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def _profile_gpu(name: str, json_lines: bool, out: Path | None) -> None:
    from fdk_bench.profiling import ncu_command, ncu_import, parse_ncu

    ncu = shutil.which("ncu")
    if ncu is None:
        _fail("ncu is not on PATH: it comes with the CUDA toolkit, or as Nsight Compute")
    inner = [sys.executable, "-m", "fdk_bench", "profile", name, "--inside"]
    run = partial(subprocess.run, capture_output=True, text=True, check=False)
    report = None if out is None else output_folder(out, "profile") / f"{name}.ncu-rep"
    if report is not None:
        report.unlink(missing_ok=True)  # or the last one would be taken for this
    done = run(ncu_command(ncu, inner, report))
    if report is not None and report.is_file():
        done = run(ncu_import(ncu, report))
    try:
        profiles = parse_ncu(done.stdout)
    except ValueError as error:
        _fail(f"{error}\n{done.stderr.strip()[-2000:]}")
    if not profiles:
        _fail("ncu saw no kernel")
    if report is not None:
        typer.echo(f"ncu's report is in {report}", err=True)
    for found in profiles:
        if json_lines:
            print(json.dumps(asdict(found) | {"shares": found.shares, "verdict": found.verdict}))
        else:
            _print_kernel(found)


def _print_kernel(found: "KernelProfile") -> None:
    from fdk_bench.profiling import OTHERS

    print(f"{found.name}\n  bound by {found.verdict}")
    for label, share in found.shares.items():
        print(f"  {label:24}{share:6.1f} %")
    for metric, label in OTHERS.items():
        if metric in found.metrics:
            value, unit = found.metrics[metric]
            print(f"  {label:24}{value:10g} {'' if unit == '%' else unit}".rstrip())


def _profile_cpu(
    case: "KernelCase", library: Path | None, symbol: str | None, listing: bool, json_lines: bool
) -> None:
    from fdk_bench.machine import module_or_none
    from fdk_bench.profiling import disassemble

    objdump = shutil.which("objdump")
    if objdump is None:
        _fail("objdump is not on PATH: it comes with binutils")
    fdk_cpu = module_or_none("fdk_cpu")
    used = _homes(case, checked(fdk_cpu.instruction_set)) if fdk_cpu else ()
    if library is None:
        if fdk_cpu is None:
            _fail("fdk-cpu is not installed; pass --library")
        library = Path(fdk_cpu._native.__file__)
    elif not library.is_file():
        raise typer.BadParameter(f"--library: found no file at {library}")
    hint = "" if symbol is not None else f"\n{BUILD}"
    if symbol is None:
        if case.quantised is None:
            _fail(f"{case}: wanted a quantised format, or --symbol: 16 bits are torch's")
        symbol = _symbol(case, used)
    functions = checked(lambda: disassemble(objdump, library, symbol), "--library")
    if not functions:
        _fail(f"{library}: no function matches {symbol!r}{hint}")
    first = [f"_{isa}." for isa in used]
    for function in sorted(functions, key=lambda f: [name not in f.source for name in first]):
        if json_lines:
            counts = dict(function.mnemonics.most_common())
            origin = {"name": function.name, "source": function.source}
            print(json.dumps(origin | {"on_stack": function.on_stack, "instructions": counts}))
        else:
            _print_function(function, listing)


def _homes(case: "KernelCase", isa: str) -> tuple[str, ...]:
    """The instruction sets whose files hold a case's kernels where ``isa`` is in use."""
    of_floats = OF_BF16 if case.dtype == "bf16" else OF_FLOATS
    return (OF_INT8 if case.activations == "int8" else of_floats).get(isa, (isa,))


def _symbol(case: "KernelCase", used: Sequence[str]) -> str:
    """A pattern of the functions for a case's bits and activations."""
    # Templates over bits; one that has no instruction set before them is built for one alone.
    isa = "|".join(used) or r"\w+"
    symbol = rf"<(?:[^<>]*\b(?:{isa}), )?{case.bits}[,>]"
    # Kernels for x of 8 bits take a task of another type.
    if case.activations == "int8":
        return symbol + r".*\bInt8Task\b"
    symbol += r"(?!.*\bInt8Task\b)"
    return "|".join([symbol, *(PRODUCTS[isa] for isa in used if isa in PRODUCTS)])


def _print_function(function: "Disassembly", listing: bool) -> None:
    counts = function.mnemonics
    most = ", ".join(
        f"{count} {mnemonic}" for mnemonic, count in counts.most_common(TOP_INSTRUCTIONS)
    )
    print(function.name[:FILE_WIDTH])
    place = f"{function.source}: " if function.source else ""
    print(f"  {place}{counts.total()} instructions, {function.on_stack} on the stack: {most}")
    if listing:
        print("\n".join(function.lines))


def _fail(text: str) -> NoReturn:
    typer.echo(text, err=True)
    raise typer.Exit(EXIT_FAILED_ROWS)
