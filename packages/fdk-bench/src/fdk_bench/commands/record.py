"""``fdk-bench record``: every benchmark that the documents quote, in one go."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from fdk_bench.commands import options
from fdk_bench.commands.common import (
    EXIT_FAILED_ROWS,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    check_output,
    checked_device,
    split,
)
from fdk_bench.commands.parts import ON_CPU, ON_GPU, Part
from fdk_bench.commands.warming import KILLED, Task, run_side_by_side
from fdk_bench.records import source_commit

STDERR = 2  # standard output is kept for what --json prints
STOP_SECONDS = 20.0
CUT = "cut"  # an empty file beside the rows of a part that had no more time
WORK = Path("out") / "record"  # untracked: a commit is clean until every part was measured


def record(
    out: Annotated[
        Path,
        typer.Argument(
            callback=check_output, help="Folder of the machine, such as docs/results/epyc-zen4."
        ),
    ],
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIST",
            help="Parts: on a CPU kernels, kernels-1-thread, compare, compare-1-thread, models, "
            "accuracy; on a GPU models-12b, models-31b, models-2048, models-2048-31b, models-4b, "
            "models-12b-apart, compare-8192x8192 (and 28672x8192, 4096x4096, 4096x14336, "
            "14336x4096; of many rows alone 6144x4096, 21504x6144, 128256x4096), kernels, "
            "widths; repeat, or use commas. The others' rows stay as they are.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out the parts that out/record holds already.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=1.0, help="Time for all parts; the rows that a part has by then are kept."
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that compile ahead, at a time. Default: the cores."),
    ] = None,
    compile_seconds: Annotated[
        float, typer.Option(min=0.0, help="For compiling ahead, all parts together. 0: none is.")
    ] = 60.0,
    figures: Annotated[
        bool, typer.Option("--figures/--no-figures", help="Draw the figures of the folder anew.")
    ] = True,
    device: options.DeviceOption = None,
    json_lines: Annotated[
        bool, typer.Option("--json", help="Print what each part took, as JSON lines.")
    ] = False,
) -> None:
    """Run every benchmark that the documents quote; keep rows and figures in one folder.

    One JSONL file per part: each row holds its command, machine, versions and commit. Then
    `fdk-bench table --fill README.md` puts them into the documents. Parts that ended before Ctrl-C
    are kept, and --resume goes on with the others. A part that takes too long is asked to stop,
    and the rows that it has are kept; those of one that crashed stay as they were. Where compilers
    take long they run first, for all parts side by side, and what they compiled is timed alone. On
    a machine of several GPUs, give each process its own (CUDA_VISIBLE_DEVICES), its own working
    folder and some of the parts.

    Exit code: 0, 1 where a case failed, 2 bad usage, 130 where a part did not end.
    """
    where = checked_device(device)
    parts = {part.name: part for part in (ON_GPU if where == "cuda" else ON_CPU)}
    asked = split(only, "--only")
    if unknown := [name for name in asked if name not in parts]:
        wanted = ", ".join(parts)
        raise typer.BadParameter(f"--only: wanted some of {wanted}; got {', '.join(unknown)}")
    chosen = [parts[name] for name in asked or parts]
    end = time.perf_counter() + (seconds or float("inf"))
    left = [part for part in chosen if not (resume and _done(part) is not None)]
    _warm(left, where, jobs or os.cpu_count() or 1, min(end, time.perf_counter() + compile_seconds))
    codes: dict[Part, int] = {}
    for number, part in enumerate(chosen, 1):
        if part not in left:
            codes[part], taken = _done(part) or 0, "was measured before"
        else:
            typer.echo(f"{part.name}: part {number} of {len(chosen)}", err=True)
            start = time.perf_counter()
            codes[part] = _run(part, where, end)
            taken = f"{time.perf_counter() - start:.0f} s"
        if codes[part] not in (EXIT_INTERRUPTED, EXIT_USAGE) or _was_cut(part):
            _keep(part, out)
        elif time.perf_counter() < end:
            break
        if json_lines:
            print(json.dumps({"part": part.name, "exit": codes[part], "taken": taken}), flush=True)
        else:
            print(f"{part.name}: {taken}, exit code {codes[part]}", flush=True)
    if figures:
        _draw(out)
    for code in (EXIT_INTERRUPTED, EXIT_USAGE):
        if code in codes.values():
            typer.echo("ended early: see above; --resume goes on with what is left", err=True)
            raise typer.Exit(code)
    if any(codes.values()):
        raise typer.Exit(EXIT_FAILED_ROWS)


def _command(part: Part, arguments: Sequence[str], device: str, target: Path) -> list[str]:
    where = () if part.benchmark == "accuracy" else ("--device", device)
    inner = ("-m", "fdk_bench", part.benchmark, *arguments, *where, "--out", str(target))
    return [sys.executable, *inner]


def _warm(parts: Sequence[Part], device: str, jobs: int, end: float) -> None:
    """Runs what compiles for some parts, side by side; what it measures is thrown away.

    torch, Triton, our kernels and Humming keep what they compiled on disk: minutes of one core.
    What is not ready in time is compiled when it is timed.
    """
    targets = [
        (part, arguments, WORK / f"{part.name}-warm" / str(number))
        for part in parts
        for number, arguments in enumerate(part.warm)
    ]
    start = time.perf_counter()
    if not targets or start >= end:
        return
    tasks = [
        Task(_command(part, arguments, device, target), target / "log.txt")
        for part, arguments, target in targets
    ]
    codes = run_side_by_side(tasks, jobs, end - start)
    taken = time.perf_counter() - start
    failed = [
        f"{target.parent.name}/{target.name}"
        for (*_, target), code in zip(targets, codes, strict=True)
        if code not in (0, KILLED)
    ]
    told = f"compiled ahead in {taken:.0f} s, not ended well: {', '.join(failed) or 'none'}"
    late = f"; {codes.count(KILLED)} of {len(codes)} had no time" if KILLED in codes else ""
    typer.echo(told + late, err=True)


def _run(part: Part, device: str, end: float = float("inf")) -> int:
    """Runs one part in a process of its own; its exit code, written beside the rows at the end.

    One that ends too late is asked to stop, as by Ctrl-C, and marked as cut where it did so.
    """
    target = WORK / part.name
    shutil.rmtree(target, ignore_errors=True)
    command = _command(part, part.arguments, device, target)
    left = min(end - time.perf_counter(), part.limit)
    if left <= 0:
        return EXIT_INTERRUPTED
    commit = _commit()
    environment = os.environ | ({"FDK_COMMIT": commit} if commit else {})
    process = subprocess.Popen(command, stdout=STDERR, env=environment)
    try:
        code = process.wait(None if left == float("inf") else left)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            if process.wait(STOP_SECONDS) == EXIT_INTERRUPTED:
                (target / CUT).touch()
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        process.wait()
        return EXIT_INTERRUPTED
    if code == EXIT_USAGE:
        return code
    # The table is written last: without it the part was killed, or raised, which exits with 1 too.
    if code not in (0, EXIT_FAILED_ROWS) or not (target / f"{part.benchmark}.md").is_file():
        return EXIT_INTERRUPTED
    (target / "done.json").write_text(json.dumps([code, *part.arguments]))
    return code


@cache  # asked once: rows of the first part, where they are kept, make the checkout differ
def _commit() -> str | None:
    return source_commit()


def _done(part: Part) -> int | None:
    """The exit code of a part that ended in an earlier run with the same arguments, or None."""
    try:
        code, *arguments = json.loads((WORK / part.name / "done.json").read_text())
    except OSError:
        return None
    return int(code) if tuple(arguments) == part.arguments else None


def _was_cut(part: Part) -> bool:
    """Whether a part had to stop for time, and has whole rows."""
    rows = WORK / part.name / f"{part.benchmark}.jsonl"
    return (WORK / part.name / CUT).is_file() and rows.is_file() and rows.stat().st_size > 0


def _keep(part: Part, folder: Path) -> None:
    """Copies the rows of a part to the folder.

    Those of one that was cut replace no more rows of the same command, and it says what they are.
    """
    from fdk_bench.records import replace_text

    folder.mkdir(parents=True, exist_ok=True)
    rows, kept = WORK / part.name / f"{part.benchmark}.jsonl", folder / f"{part.name}.jsonl"
    if _was_cut(part):
        found, command = _told(rows)
        before, command_before = _told(kept) if kept.is_file() else (0, "")
        told = f"{part.name}: cut for time after {found} rows"
        if found < before and command == command_before:
            typer.echo(f"{told}: the {before} of an earlier run stay", err=True)
            return
        typer.echo(f"{told}, which replace {before}", err=True)
    replace_text(kept, rows.read_text(encoding="utf-8"))


def _told(rows: Path) -> tuple[int, str]:
    """How many rows a file has, and the command of the last."""
    lines = rows.read_text(encoding="utf-8").splitlines()
    return len(lines), str(json.loads(lines[-1])["command"]) if lines else ""


def _draw(folder: Path) -> None:
    """Figures of what the folder holds."""
    # Behind 128 tokens; models-2048-31b has a context of its own.
    found = sorted(path.stem for path in folder.glob("models-*b.jsonl"))
    models = [name for name in found if re.fullmatch(r"models-\d+b", name)]
    main = [folder / f"{name}.jsonl" for name in ("kernels", "models", *models, "accuracy")]
    _plot([path for path in main if path.is_file()], folder, "*")
    compare = [folder / "compare.jsonl", *sorted(folder.glob("compare-*x*.jsonl"))]
    _plot([path for path in compare if path.is_file()], folder, "bits", prefix="compare-")


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
