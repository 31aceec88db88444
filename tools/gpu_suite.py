"""Runs the tests that need a GPU in parts, by several processes, and keeps every failure's text.

    python tools/gpu_suite.py --shard 1/2 --out out/gpu            half of the tests
    python tools/gpu_suite.py --shard 2/2 --out out/gpu            the other half
    python tools/gpu_suite.py --out out/gpu -- -k invariant        some of them, to pytest

Needs pytest and torch, nothing else: the packages are those of this repository. Every result is
written as soon as its test ends, so that a crash or the time limit loses none; what a crash or
the limit left out is listed as "not run". Of several GPUs each process has another one first.
Written:
DIR/results-1of2.jsonl, a row a test {id, outcome, seconds, text}, and DIR/summary-1of2.txt, which
is printed too.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = "packages/fdk-cuda/tests"
# How a process learns which tests are its own, and where its results go.
PART, RESULTS = "FDK_GPU_SUITE_PART", "FDK_GPU_SUITE_RESULTS"
BAD = ("failed", "error", "cut off", "not run")
SUMMARY_CHARACTERS = 1500  # of each failure, in the summary; the rows hold it whole


@dataclass(frozen=True)
class Part:
    """One of ``count`` parts of the tests, counted from 0: every ``count``-th one."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Part":
        """``2/3``, counted from 1.

        Raises:
            ValueError: for anything else.
        """
        index, slash, count = text.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal()):
            raise ValueError(f"a part is written as 1/2, got {text!r}")
        if not 1 <= int(index) <= int(count):
            raise ValueError(f"a part lies between 1/{count} and {count}/{count}, got {text!r}")
        return cls(int(index) - 1, int(count))

    def within(self, index: int, count: int) -> "Part":
        """Part ``index`` of ``count`` of this one."""
        return Part(self.index + self.count * index, self.count * count)

    def __str__(self) -> str:
        return f"{self.index + 1}/{self.count}"


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """As a plugin of pytest: keeps the tests of this process."""
    part = Part.parse(os.environ[PART])
    dropped = [item for i, item in enumerate(items) if i % part.count != part.index]
    items[:] = [item for i, item in enumerate(items) if i % part.count == part.index]
    config.hook.pytest_deselected(items=dropped)


def pytest_collection_finish(session: Any) -> None:
    """As a plugin of pytest: notes what is to run, in case a crash comes before it."""
    for item in session.items:
        _write({"id": item.nodeid, "outcome": "not run"})


def pytest_runtest_logstart(nodeid: str, location: object) -> None:
    """As a plugin of pytest: notes what runs, in case it never ends."""
    _write({"id": nodeid, "outcome": "started"})


def pytest_runtest_logreport(report: Any) -> None:
    """As a plugin of pytest: writes what a test came to."""
    if report.when == "call" or report.outcome != "passed":
        text = report.longreprtext if report.failed else _reason(report)
        outcome = "error" if report.failed and report.when != "call" else report.outcome
        row = {"id": report.nodeid, "outcome": outcome, "seconds": round(report.duration, 2)}
        _write({**row, "text": text})


def pytest_collectreport(report: Any) -> None:
    """As a plugin of pytest: a module that cannot be imported is an error of its own."""
    if report.failed:
        _write({"id": report.nodeid, "outcome": "error", "text": report.longreprtext})


def _reason(report: Any) -> str:
    return str(report.longrepr[2]) if report.skipped else ""


def _write(row: dict[str, object]) -> None:
    with Path(os.environ[RESULTS]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """See the module; returns what the process should exit with."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--shard", type=Part.parse, default=Part(0, 1), help="1/2 or 2/2; all of them")
    add("--workers", type=int, default=min(14, os.cpu_count() or 1))
    add("--timeout", type=float, default=560, help="seconds until the rest is cut off")
    add("--out", type=Path, default=Path("out/gpu"), metavar="DIR")
    add("--tests", default=TESTS)
    add("pytest", nargs="*", help="arguments of pytest, after --; -m gpu by default")
    args = parser.parse_args(arguments)
    name = str(args.shard).replace("/", "of")
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    chosen = args.pytest or ["-m", "gpu"]
    unfinished = run(args.shard, args.workers, args.timeout, args.out / name, [args.tests, *chosen])
    files = sorted(args.out.glob(f"{name}-*.part"))
    rows = list(merged(files))
    (args.out / f"results-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for file in files:
        file.unlink()
    text = summary(rows, args.shard, time.monotonic() - start, unfinished)
    (args.out / f"summary-{name}.txt").write_text(text)
    print(text, end="")
    return int(unfinished > 0 or not rows or any(row["outcome"] in BAD for row in rows))


def run(shard: Part, workers: int, timeout: float, prefix: Path, arguments: list[str]) -> int:
    """Runs a part by several processes; returns how many of them had to be ended, or crashed."""
    sources = [str(path) for path in sorted((ROOT / "packages").glob("*/src"))]
    paths = [str(ROOT / "tools"), *sources, *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "gpu_suite", "-p", "no:cacheprovider"]
    processes, logs = [], []
    gpus = visible_gpus()
    for index in range(workers):
        own = {PART: str(shard.within(index, workers)), RESULTS: f"{prefix}-{index}.part"}
        Path(own[RESULTS]).unlink(missing_ok=True)
        if gpus:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(rotated(gpus, index))
        env = os.environ | own | {"PYTHONPATH": os.pathsep.join(paths)}
        # To a file: a pipe that nobody reads yet would stop the process once it is full.
        logs.append(Path(f"{prefix}-{index}.log"))
        with logs[-1].open("w") as log:
            processes.append(
                subprocess.Popen([*command, *arguments], cwd=ROOT, env=env, stdout=log, stderr=log)
            )
    end = time.monotonic() + timeout
    failed = 0
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(0.1)
    for process, log_file in zip(processes, logs, strict=True):
        if process.poll() is None:
            process.kill()
            process.wait()
        # 0 passed, 1 some failed, 5 no tests: pytest came to its end.
        if process.returncode not in (0, 1, 5):
            failed += 1
            print(f"a process ended with {process.returncode}:\n{log_file.read_text()[-3000:]}")
        log_file.unlink()
    return failed


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them, where it is set; none where there is no GPU."""
    import torch

    count = torch.cuda.device_count()
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named[:count] or [str(index) for index in range(count)]


def rotated(names: list[str], by: int) -> list[str]:
    """The same names, beginning with another one."""
    first = by % len(names)
    return names[first:] + names[:first]


def merged(files: list[Path]) -> Iterator[dict[str, Any]]:
    """What each test came to; one that only started was cut off.

    A test that fails and then cannot be torn down has two rows: the texts of both are kept.
    """
    rows: dict[str, dict[str, Any]] = {}
    for file in files:
        own: dict[str, dict[str, Any]] = {}
        for row in _read(file):
            before = own.get(row["id"])
            if before and before["outcome"] in ("failed", "error"):
                row = {**before, "text": f"{before['text']}\n{row['text']}"}
            own[row["id"]] = row
        rows |= own
    for _, row in sorted(rows.items()):
        yield {**row, "outcome": "cut off"} if row["outcome"] == "started" else row


def _read(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a process; killed while it wrote, it leaves a last one that is not whole."""
    lines = file.read_text(encoding="utf-8").splitlines()
    for i, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            if i < len(lines):
                raise


def summary(rows: list[dict[str, Any]], shard: Part, seconds: float, unfinished: int) -> str:
    """Versions, counts, the slowest tests, why some were skipped, and every failure."""
    counts = Counter(row["outcome"] for row in rows)
    lines = [versions(), f"part {shard}, {seconds:.0f} s: " + _counted(counts)]
    if unfinished:
        lines.append(f"{unfinished} processes crashed or were out of time")
    slowest = sorted(rows, key=lambda row: -row.get("seconds", 0))[:8]
    lines += ["slowest:", *(f"  {row.get('seconds', 0):7.1f} s  {row['id']}" for row in slowest)]
    skipped = Counter(row["text"] for row in rows if row["outcome"] == "skipped")
    lines += [f"skipped {count}: {reason}" for reason, count in skipped.items()]
    for row in rows:
        if row["outcome"] in BAD:
            lines.append(f"--- {row['outcome']}: {row['id']}")
            lines += [text[-SUMMARY_CHARACTERS:]] if (text := row.get("text")) else []
    return "\n".join(lines) + "\n"


def _counted(counts: Counter[str]) -> str:
    return (
        ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "no tests"
    )


def versions() -> str:
    """Of Python, torch, Triton and the GPU."""
    import torch

    try:
        import triton  # type: ignore[import-untyped]

        triton_version = triton.__version__
    except ImportError:
        triton_version = "none"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    count = torch.cuda.device_count()
    python = sys.version.split()[0]
    return f"{count} x {gpu}, torch {torch.__version__}, triton {triton_version}, Python {python}"


if __name__ == "__main__":
    sys.exit(main())
