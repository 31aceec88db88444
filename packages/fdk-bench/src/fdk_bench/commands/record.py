"""``fdk-bench record``: every benchmark that the documents quote, in one go."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from fdk_bench.commands import options
from fdk_bench.commands.common import (
    EXIT_FAILED_ROWS,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    checked_device,
    split,
)

Arguments = tuple[str, ...]
STDERR = 2  # standard output is kept for what --json prints
# Under ten minutes on two cores; each is a command that a reader can run alone.
ON_CPU: dict[str, Arguments] = {
    "kernels": ("-k", "1024,2048,4096", "-m", "1,4,16,64", "--seconds", "0.3"),
    "compare": ("-m", "1,16", "-b", "16,4"),
    "models": (
        *("--size", "1b", "-b", "16,4,2,1", "--batch-size", "1"),
        # The head too: at 16 bits torch takes longer for it than all the rest takes at 4.
        *("--skip", "", "--context", "32", "--reps", "15", "--no-compile"),
    ),
    "accuracy": (
        *("--format", "bf16,kmeans4,int4,nf4,kmeans3,int3,kmeans2,int2,int2-search,kmeans1,int1"),
        *("--calibrate", "docs/formats.md"),
    ),
}
ON_GPU: dict[str, Arguments] = {
    "kernels": ("-k", "4096,8192", "-m", "1,4,16,64,256,1024"),
    "compare": ("-m", "1,16,256", "-k", "8192", "-b", "16,8,4,2,1"),
    "models": ("--size", "4b,12b,31b", "-b", "16,4,1", "--batch-size", "1,4,16,64,256"),
}


def record(
    out: Annotated[
        Path, typer.Argument(help="Folder of the machine, such as docs/results/epyc-zen4.")
    ],
    only: Annotated[
        list[str] | None,
        typer.Option(help="Of kernels, compare, models and accuracy; repeat, or use commas."),
    ] = None,
    device: options.DeviceOption = None,
    json_lines: Annotated[
        bool, typer.Option("--json", help="Print what each command took, as JSON lines.")
    ] = False,
) -> None:
    """Run every benchmark that the documents quote; keep rows and figures in one folder.

    One JSONL file per benchmark: each row holds its command, machine, versions and commit. Then
    `fdk-bench table --fill README.md` puts them into the documents. A command that is interrupted
    leaves its rows of the last time as they were.

    Exit code: 0, 1 where a case failed, 2 bad usage, 130 interrupted.
    """
    where = checked_device(device)
    commands = ON_GPU if where == "cuda" else ON_CPU
    if unknown := [name for name in split(only) if name not in commands]:
        wanted = ", ".join(commands)
        raise typer.BadParameter(f"--only: wanted some of {wanted}; got {', '.join(unknown)}")
    failed = False
    for name in split(only) or commands:
        code, seconds = _run(name, commands[name], where, out)
        failed |= code != 0
        if json_lines:
            print(json.dumps({"command": name, "exit": code, "seconds": round(seconds, 1)}))
        else:
            print(f"{name}: {seconds:.0f} s, exit code {code}", flush=True)
    _plot(out)
    if failed:
        raise typer.Exit(EXIT_FAILED_ROWS)


def _run(name: str, arguments: Arguments, device: str, folder: Path) -> tuple[int, float]:
    """Runs one command in a process of its own; keeps its rows where it ended by itself."""
    target = Path("out") / "record" / name
    shutil.rmtree(target, ignore_errors=True)
    where = () if name == "accuracy" else ("--device", device)
    inner = [sys.executable, "-m", "fdk_bench", name, *arguments, *where, "--out", str(target)]
    start = time.perf_counter()
    try:
        code = subprocess.run(inner, stdout=STDERR, check=False).returncode
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if code == EXIT_INTERRUPTED:
        raise typer.Exit(code)
    if code == EXIT_USAGE:
        typer.echo(f"{name} was not run: see above", err=True)
        raise typer.Exit(code)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(target / f"{name}.jsonl", folder / f"{name}.jsonl")
    return code, time.perf_counter() - start


def _plot(folder: Path) -> None:
    """Figures of all rows of the folder; SVG alone, which a repository keeps in little space."""
    target = Path("out") / "record" / "plots"
    shutil.rmtree(target, ignore_errors=True)
    files = sorted(str(path) for path in folder.glob("*.jsonl"))
    inner = [sys.executable, "-m", "fdk_bench", "plot", *files, "--out", str(target)]
    subprocess.run(inner, stdout=STDERR, check=False)
    for figure in target.glob("*.svg"):
        shutil.copyfile(figure, folder / figure.name)
