"""``fdk-bench record``: every benchmark that the documents quote, in one go."""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
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

STDERR = 2  # standard output is kept for what --json prints
WORK = Path("out") / "record"  # untracked: a commit is clean until every part was measured
# Every width at one row of x, a few and many; the larger layer at one row alone, for time.
KERNELS = ("-k", "4096,8192", "-m", "1,2,16,64,512", "--include", "^m1-|-k4096-")
PEERS = ("-b", "16,8,4,2,1")


@dataclass(frozen=True)
class Part:
    """A command of fdk-bench that a reader can run alone; its rows are a file of that name."""

    name: str
    benchmark: str
    arguments: tuple[str, ...]


# Under ten minutes on two cores.
ON_CPU = (
    Part("kernels", "kernels", (*KERNELS, "--seconds", "0.3")),
    Part("kernels-1-thread", "kernels", (*KERNELS, "--seconds", "0.3", "--threads", "1")),
    # Sixteen rows at 4 bits, where peers have kernels of their own.
    Part("compare", "compare", (*PEERS, "-m", "1,16", "--exclude", r"^m16-.*-\D+[821]-g")),
    Part("compare-1-thread", "compare", (*PEERS, "-m", "1", "--threads", "1")),
    Part(
        "models",
        "models",
        (
            *("--size", "1b", "-b", "16,4,2,1", "--batch-size", "1"),
            *("--context", "32", "--reps", "15", "--no-compile"),
        ),
    ),
    Part(
        "accuracy",
        "accuracy",
        (
            *("--format", "bf16,kmeans4,int4,nf4,kmeans3,int3,kmeans2,int2,int2-search"),
            *("--format", "kmeans1,int1", "--calibrate", "docs/formats.md"),
        ),
    ),
)
ON_GPU = (
    Part("kernels", "kernels", ("-k", "4096,8192", "-m", "1,4,16,64,256,1024")),
    Part("compare", "compare", ("-m", "1,16,256", "-k", "8192", "-b", "16,8,4,2,1")),
    Part(
        "models",
        "models",
        ("--size", "4b,12b,31b", "-b", "16,4,1", "--batch-size", "1,4,16,64,256"),
    ),
)


def record(
    out: Annotated[
        Path, typer.Argument(help="Folder of the machine, such as docs/results/epyc-zen4.")
    ],
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Parts (kernels, kernels-1-thread, compare, compare-1-thread, models, accuracy); "
            "repeat, or use commas. The others' rows stay as they are."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out the parts that out/record holds already.")
    ] = False,
    device: options.DeviceOption = None,
    json_lines: Annotated[
        bool, typer.Option("--json", help="Print what each part took, as JSON lines.")
    ] = False,
) -> None:
    """Run every benchmark that the documents quote; keep rows and figures in one folder.

    One JSONL file per part: each row holds its command, machine, versions and commit. Then
    `fdk-bench table --fill README.md` puts them into the documents. Parts that ended before Ctrl-C
    are kept, and --resume goes on with the others; the rows of the one that was cut stay as they
    were.

    Exit code: 0, 1 where a case failed, 2 bad usage, 130 interrupted.
    """
    where = checked_device(device)
    parts = {part.name: part for part in (ON_GPU if where == "cuda" else ON_CPU)}
    if unknown := [name for name in split(only) if name not in parts]:
        wanted = ", ".join(parts)
        raise typer.BadParameter(f"--only: wanted some of {wanted}; got {', '.join(unknown)}")
    chosen = [parts[name] for name in split(only) or parts]
    codes = {}
    for number, part in enumerate(chosen, 1):
        if resume and (done := _done(part)) is not None:
            codes[part], taken = done, "was measured before"
        else:
            typer.echo(f"{part.name}: part {number} of {len(chosen)}", err=True)
            start = time.perf_counter()
            codes[part] = _run(part, where)
            taken = f"{time.perf_counter() - start:.0f} s"
        if codes[part] in (EXIT_INTERRUPTED, EXIT_USAGE):
            break
        if json_lines:
            print(json.dumps({"part": part.name, "exit": codes[part], "taken": taken}), flush=True)
        else:
            print(f"{part.name}: {taken}, exit code {codes[part]}", flush=True)
    kept = [part for part, code in codes.items() if code not in (EXIT_INTERRUPTED, EXIT_USAGE)]
    _keep(kept, out)
    for code in (EXIT_INTERRUPTED, EXIT_USAGE):
        if code in codes.values():
            typer.echo("ended early: see above; --resume goes on with what is left", err=True)
            raise typer.Exit(code)
    if any(codes.values()):
        raise typer.Exit(EXIT_FAILED_ROWS)


def _run(part: Part, device: str) -> int:
    """Runs one part in a process of its own; its exit code, written beside the rows at the end."""
    target = WORK / part.name
    shutil.rmtree(target, ignore_errors=True)
    where = () if part.benchmark == "accuracy" else ("--device", device)
    command = ("-m", "fdk_bench", part.benchmark, *part.arguments, *where, "--out", str(target))
    try:
        code = subprocess.run([sys.executable, *command], stdout=STDERR, check=False).returncode
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    if code not in (0, EXIT_FAILED_ROWS, EXIT_USAGE):
        return EXIT_INTERRUPTED  # by itself, or killed
    if code != EXIT_USAGE:
        (target / "done.json").write_text(json.dumps([code, *part.arguments]))
    return code


def _done(part: Part) -> int | None:
    """The exit code of a part that ended in an earlier run with the same arguments, or None."""
    try:
        code, *arguments = json.loads((WORK / part.name / "done.json").read_text())
    except OSError:
        return None
    return int(code) if tuple(arguments) == part.arguments else None


def _keep(parts: list[Part], folder: Path) -> None:
    """Copies the rows of some parts to the folder, and draws what the folder holds."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        rows = WORK / part.name / f"{part.benchmark}.jsonl"
        shutil.copyfile(rows, folder / f"{part.name}.jsonl")
    main = [folder / f"{name}.jsonl" for name in ("kernels", "models", "accuracy")]
    _plot([path for path in main if path.is_file()], folder, "*")
    if (compare := folder / "compare.jsonl").is_file():
        _plot([compare], folder, "bits", prefix="compare-")


def _plot(files: list[Path], folder: Path, names: str, prefix: str = "") -> None:
    """Figures of some rows; SVG alone, which a repository keeps in little space."""
    target = WORK / "plots"
    shutil.rmtree(target, ignore_errors=True)
    if not files:
        return
    inner = ["-m", "fdk_bench", "plot", *map(str, files), "--out", str(target), "--no-html"]
    subprocess.run([sys.executable, *inner], stdout=STDERR, check=False)
    for figure in target.glob(f"{names}.svg"):
        shutil.copyfile(figure, folder / f"{prefix}{figure.name}")
