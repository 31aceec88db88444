"""Rows of a benchmark and the facts about machine, versions and command that make them whole."""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar

# Settings that change what is measured.
SETTINGS = (
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "THP_",
    "GLIBC_",
    "FDK_",
    "TRITON_",
    "CUDA_",
    "TORCHINDUCTOR_",
)

Case = TypeVar("Case")
Values = TypeVar("Values")


@dataclass(frozen=True)
class Row(Generic[Case, Values]):
    """One case of a benchmark and what was measured; a case that failed has an error instead.

    ``case`` and ``values`` are frozen dataclasses of plain numbers and strings.
    """

    case: Case
    values: Values | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        assert (self.values is None) != (self.error is None), "a row has values or an error"


@dataclass(frozen=True)
class Facts:
    """What is the same for every row of a run."""

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
    """The facts of this process; ``modules`` are the imported modules whose versions matter."""
    versions = {"python": platform.python_version()}
    versions |= {name: _version(name) for name in ("fdk_bench", "fdk_formats", *modules)}
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
    """The variables of the environment that ``SETTINGS`` begin.

    Of an absolute path the last part: where a machine keeps its files changes no measurement, and
    is nobody's business in a published row.
    """
    return {
        name: Path(value).name if Path(value).is_absolute() else value
        for name, value in sorted(os.environ.items())
        if name.startswith(SETTINGS) and name != "FDK_COMMIT"  # a row has it as its commit
    }


def to_record(row: Row[Any, Any], facts: Facts) -> dict[str, Any]:
    """A whole row as JSON takes it: ``case``, ``values`` and ``error``, then the facts."""
    return {"benchmark": facts.benchmark, **asdict(row), **asdict(facts)}


def to_json(row: Row[Any, Any], facts: Facts) -> str:
    """A whole row as one line of JSONL, without its newline."""
    return json.dumps(to_record(row, facts), allow_nan=False, ensure_ascii=False)


def replace_text(path: Path, text: str) -> None:
    """Puts a text in the place of a file's; where a disk has no room for it, the old one stays.

    Raises:
        OSError: for what cannot be written.
    """
    path = path.resolve()
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8", newline="")
        if path.exists():
            path.open("a").close()  # refuses a file that only its folder lets replace
            shutil.copymode(path, new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def source_commit(folder: Path = Path(__file__).parent) -> str | None:
    """The commit of the checkout that ``folder`` is tracked in, ``-dirty`` added; else None.

    A package installed under somebody else's checkout is not tracked there: None, not their commit.
    Whoever copies the sources elsewhere may tell theirs in ``FDK_COMMIT``.
    """
    if told := os.environ.get("FDK_COMMIT"):
        return told
    try:
        _git(folder, "ls-files", "--error-unmatch", ".")
        return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def counted(threads: int) -> str:
    """``1 thread``, ``2 threads``."""
    return f"{threads} thread{'' if threads == 1 else 's'}"


def machine_of(record: Mapping[str, Any]) -> str:
    """The device of a written row, with its threads where that is a CPU."""
    on_gpu = record["case"].get("device") == "cuda"
    return str(record["device"]) + ("" if on_gpu else f", {counted(record['threads'])}")


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's own name where the system tells it, else its architecture.

    A virtual machine may call all of a maker's processors by one name (``AMD EPYC``, ``Intel Xeon
    CPU @ 2.20GHz``): one without a number, but for a speed or a version, comes with its family and
    model (25 is Zen 3 and 4, 26 Zen 5), so that rows of two generations are of two machines.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    pairs = (line.partition(":") for line in reversed(lines))
    told = {key.strip(): value.strip() for key, _, value in pairs}  # the first one's
    name = told.get("model name", "")
    number = re.search(r"\d", re.sub(r"(@|\bversion\b).*", "", name))
    if name and number is None and "cpu family" in told:
        name += f" (family {told['cpu family']}, model {told.get('model', '?')})"
    return name or platform.processor() or platform.machine()


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def _version(module: str) -> str:
    # From the module, not from package metadata: fdk also runs from PYTHONPATH alone.
    return str(getattr(sys.modules.get(module), "__version__", "not imported"))
