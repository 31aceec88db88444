"""Rows of a benchmark: measured values, and the facts needed to repeat the run."""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

# Prefixes of environment variables that change what is measured.
SETTINGS = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "THP_", "GLIBC_"),
    *("FDK_", "TRITON_", "CUDA_", "TORCHINDUCTOR_"),
)
# Marks a format whose errors were weighed by the inputs of a text.
CALIBRATED = "+cal"
ROW = "a row of benchmark (text), case (an object), and values (an object) or error (text)"

Case = TypeVar("Case")
Values = TypeVar("Values")


class RowsError(ValueError):
    """A file that does not hold rows; the message names the line."""


@dataclass(frozen=True)
class Row(Generic[Case, Values]):
    """A case of a benchmark with its values, or the error it failed with.

    ``case`` and ``values`` are frozen dataclasses of numbers and strings.
    """

    case: Case
    values: Values | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        assert (self.values is None) != (self.error is None), "a row has values or an error"


@dataclass(frozen=True)
class Facts:
    """Facts shared by all rows of a run."""

    benchmark: str
    started: str
    command: str
    commit: str | None
    device: str
    threads: int
    platform: str
    versions: Mapping[str, str]
    environment: Mapping[str, str]


def gather_facts(
    benchmark: str, *, device: str, threads: int, modules: tuple[str, ...] = ()
) -> Facts:
    """Gather the facts of this process.

    Args:
        benchmark: name of the subcommand.
        device: name of the GPU or processor.
        threads: number of threads of torch.
        modules: imported modules whose versions matter.
    """
    versions = {"python": platform.python_version()}
    # From the modules, not from package metadata: fdk also runs from PYTHONPATH alone.
    versions |= {
        name: str(getattr(sys.modules.get(name), "__version__", "not imported"))
        for name in ("fdk_bench", "fdk_formats", *modules)
    }
    return Facts(
        benchmark=benchmark,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["fdk-bench", *sys.argv[1:]]),
        commit=source_commit(),
        device=device,
        threads=threads,
        platform=platform.platform(),
        versions=versions,
        environment=environment(),
    )


def environment() -> dict[str, str]:
    """Return the environment variables that start with one of ``SETTINGS``.

    An absolute path is cut to its last part: the folders of a machine change no measurement, and
    rows are published.
    """
    return {
        name: Path(value).name if Path(value).is_absolute() else value
        for name, value in sorted(os.environ.items())
        if name.startswith(SETTINGS) and name != "FDK_COMMIT"  # stored as the row's commit
    }


def source_commit(folder: Path = Path(__file__).parent) -> str | None:
    """Return the commit of the checkout that tracks ``folder``, with ``-dirty``; None without one.

    A package installed below another project's checkout is not tracked there, so it gets None.
    ``FDK_COMMIT`` overrides it, for sources copied out of their checkout.
    """
    if given := os.environ.get("FDK_COMMIT"):
        return given
    try:
        _git(folder, "ls-files", "--error-unmatch", ".")
        return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name where the system gives one, else its architecture.

    Virtual machines call many processors by one name (``AMD EPYC``). A name without a model number
    gets its family and model (25 is Zen 3 and 4, 26 Zen 5), so that two generations differ.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    pairs = (line.partition(":") for line in reversed(lines))
    entries = {key.strip(): value.strip() for key, _, value in pairs}  # the first core only
    name = entries.get("model name", "")
    number = re.search(r"\d", re.sub(r"(@|\bversion\b).*", "", name))
    if name and number is None and "cpu family" in entries:
        name += f" (family {entries['cpu family']}, model {entries.get('model', '?')})"
    return name or platform.processor() or platform.machine()


def to_json(row: Row[Any, Any], facts: Facts) -> str:
    """Return a whole row as one line of JSONL, without its newline."""
    record = {"benchmark": facts.benchmark, **asdict(row), **asdict(facts)}
    return json.dumps(record, allow_nan=False, ensure_ascii=False)


def print_error(text: str) -> None:
    """Print a line to standard error."""
    print(text, file=sys.stderr)


def read_records(
    paths: Iterable[Path], say: Callable[[str], object] = print_error
) -> Iterator[dict[str, Any]]:
    """Yield the rows of some files, one after another, as dictionaries.

    A line with neither ``values`` nor ``error`` holds facts, and entries of ``case``, that are
    shared by the rows after it. Recorded results use that; `fdk-bench` writes whole rows. A last
    line that a kill or a full disk cut short is left out.

    Args:
        paths: the files.
        say: called with a sentence for each line that is left out.

    Raises:
        RowsError: for a file that cannot be read, and for a line that is not a row.
    """
    for path in paths:
        try:
            # Not by splitlines: texts may hold other separators of lines.
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise RowsError(f"{path}: wanted a UTF-8 text file: {error}") from None
        shared: dict[str, Any] = {}
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode())
            except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
                if number == len(lines) and line.startswith(b"{"):  # no newline follows it
                    say(f"{path}:{number}: the last line was cut short and is left out")
                    continue
                raise RowsError(f"{path}:{number}: wanted JSON in UTF-8, got {error}") from None
            if isinstance(record, dict) and not {"values", "error"} & set(record):
                shared = record
                continue
            record = _with_shared(record, shared)
            if not _is_row(record):
                raise RowsError(f"{path}:{number}: wanted {ROW}; got {line.decode().strip()[:80]}")
            yield record


def _with_shared(record: Any, shared: Mapping[str, Any]) -> Any:
    if not isinstance(record, dict) or not isinstance(record.get("case"), dict):
        return record
    case = {**shared.get("case", {}), **record["case"]}
    whole = {**shared, **record, "case": case}
    return whole | {name: whole.get(name) for name in ("values", "error")}


def _is_row(record: object) -> bool:
    if not isinstance(record, dict) or not isinstance(record.get("case"), dict):
        return False
    values, error = record.get("values"), record.get("error")
    measured = isinstance(values, dict) and error is None
    failed = values is None and isinstance(error, str)
    return isinstance(record.get("benchmark"), str) and (measured or failed)


def thread_count(threads: int) -> str:
    """Return ``1 thread`` or ``2 threads``."""
    return f"{threads} thread{'' if threads == 1 else 's'}"


def machine_text(record: Mapping[str, Any]) -> str:
    """Name the device of a row, with its threads for a CPU."""
    on_gpu = record["case"].get("device") == "cuda"
    return str(record["device"]) + ("" if on_gpu else f", {thread_count(record['threads'])}")


def run_text(record: Mapping[str, Any]) -> str:
    """Describe the run of a row: machine, date, version of torch and commit."""
    number, _, dirty = (record["commit"] or "").partition("-")
    commit = f", commit {number[:10]}" + (" and changes" if dirty else "") if number else ""
    torch = record["versions"]["torch"]
    return f"{machine_text(record)}, {record['started'][:10]}, torch {torch}{commit}"
