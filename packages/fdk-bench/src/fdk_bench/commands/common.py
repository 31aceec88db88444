"""What the subcommands share: lists in options, the folder of results, rows as they come."""

import errno
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fdk_bench.records import Facts, Row

EXIT_FAILED_ROWS = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # as a shell reports SIGINT
FILE_WIDTH = 180
SHOW_CURSOR = b"\x1b[?25h\n"

# Threads of OpenMP that spin while they wait starve the rest of a small or shared machine: torch
# took 8 ms a parallel region for it (2 cores). Bound threads would bind those of other pools too.
OPENMP_DEFAULTS = {"GOMP_SPINCOUNT": "0"}


Value = TypeVar("Value")
LISTS = "repeat, or separate by commas"
NUMBER = r"0*[1-9][0-9]{0,17}"  # 64 bits hold it
# Of each core: more wait for one another, and torch 2.13 crashed with 100000.
MOST_THREADS = 4


def prepare_environment() -> None:
    """Settings that make timings of torch fair, and torch; call it before torch is imported."""
    # Weights of torch in huge pages, as fdk-cpu has them; and the memory that the floor is read of.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if not {"OMP_PROC_BIND", "OMP_WAIT_POLICY"} & set(os.environ):
        for name, value in OPENMP_DEFAULTS.items():
            os.environ.setdefault(name, value)
    with ended_by_interrupt():
        import torch  # noqa: F401


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Inside, Ctrl-C calls the handler, unless somebody else has one, or this is another thread."""
    before = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def ended_by_interrupt() -> AbstractContextManager[None]:
    """Ctrl-C ends the process, where modules that are imported would catch its exception."""
    return _handled(lambda *_: os._exit(EXIT_INTERRUPTED))


class Interrupt:
    """Ctrl-C that is noted besides being raised, for Python may drop what it raises.

    An exception that lands in a callback of a weak reference, or in a ``__del__``, is printed as
    ignored: a run of models went on to its end in one of five.
    """

    noted = False

    def check(self) -> None:
        """Raises what was dropped.

        Raises:
            KeyboardInterrupt: where a signal was noted.
        """
        if self.noted:
            raise KeyboardInterrupt

    def watched(self) -> AbstractContextManager[None]:
        """Inside, the first signal is noted and raised, and the second ends the process."""
        return _handled(self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.noted:
            for stream in (1, 2):
                if os.isatty(stream):  # rich hides the cursor while a table is live
                    os.write(stream, SHOW_CURSOR)
            os._exit(EXIT_INTERRUPTED)
        self.noted = True
        raise KeyboardInterrupt


@contextmanager
def full_disk_is_told() -> Iterator[None]:
    """A line and exit code 1, in place of a traceback, where a full disk takes no more."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # None where it was closed at the start
                sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EPIPE):
            raise
        # What it still holds would fail once more when Python ends, with a code of its own.
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
        if error.errno != errno.EPIPE:  # who read the pipe has seen enough
            typer.echo(f"fdk-bench: not all was written: {error}", err=True)
        raise SystemExit(EXIT_FAILED_ROWS) from None


def split(texts: Sequence[str] | None, option: str = "") -> list[str]:
    """The entries of an option that may be repeated and may hold commas.

    Empty for one that was not given; one that was given and holds nothing is bad usage.
    """
    found = [part.strip() for text in texts or () for part in text.split(",") if part.strip()]
    if texts and not found:
        raise typer.BadParameter(
            f"{option or 'a list'}: wanted an entry or several ({LISTS}), got {','.join(texts)!r}"
        )
    return found


def numbers(option: str, texts: Sequence[str] | None, default: Sequence[int]) -> list[int]:
    """The positive whole numbers of an option, each once, in order."""
    found = []
    for text in split(texts, option):
        if not re.fullmatch(NUMBER, text):
            raise typer.BadParameter(
                f"{option}: wanted whole numbers from 1, of up to 18 digits, got {text[:40]!r}"
            )
        found.append(int(text))
    return list(dict.fromkeys(found)) or list(default)


def checked(call: Callable[[], Value], option: str = "") -> Value:
    """The result of a call whose ``ValueError`` is about what the user gave, to ``option``."""
    try:
        return call()
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}" if option else str(error)) from None


def given_text(option: str, path: Path) -> str:
    """The text of a file that the user named; bad usage for what is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{option}: wanted a UTF-8 text file: {error}") from None
    if not text.strip():
        raise typer.BadParameter(f"{option}: wanted text, {path} has none")
    return text


def check_pattern(option: str, text: str) -> None:
    """Bad usage for what is no regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise typer.BadParameter(
            f"{option}: wanted a regular expression, got {text!r}: {error}"
        ) from None


def checked_device(device: str | None) -> str:
    """The device asked for, or the default; bad usage where torch does not find it."""
    import torch

    from fdk_bench.machine import default_device

    if device is None:
        return default_device()
    if device not in ("cpu", "cuda"):
        several = "CUDA_VISIBLE_DEVICES picks one GPU of several"
        raise typer.BadParameter(f"--device: wanted cpu or cuda ({several}), got {device!r}")
    if device != "cpu" and not torch.cuda.is_available():
        raise typer.BadParameter(f"--device: torch {torch.__version__} finds no GPU here")
    return device


def checked_activations(names: list[str], device: str) -> list[str]:
    """The activations asked for; bad usage for others, and for int8 on a device without it."""
    from fdk_formats.backends import check_activations

    for name in names:
        checked(lambda name=name: check_activations(name))  # type: ignore[misc]
    if "int8" in names and device != "cpu":
        raise typer.BadParameter(f"--activations: int8 is there for --device cpu, got {device}")
    return names


def checked_backends(names: list[str]) -> list[str]:
    """The backends asked for; bad usage for a name that none has."""
    from fdk_formats import all_backends

    known = ("auto", *all_backends())
    if unknown := [name for name in names if name not in known]:
        from fdk_bench.peers import PEERS

        text = f"--backend: wanted one of {', '.join(known)}, got {', '.join(unknown)}"
        if peers := [peer.name for peer in PEERS if peer.name in unknown]:
            text += f"; fdk-bench compare measures peers: --against {','.join(peers)}"
        if "torch.compile" in unknown:  # the op of the reference is opaque to the compiler
            text += "; reference computes the same by torch, not compiled"
        raise typer.BadParameter(text)
    return list(dict.fromkeys(names))


def checked_dtype(dtype: str, *more: str) -> str:
    """The dtype asked for, or one of ``more``; bad usage for one that is not measured."""
    from fdk_bench.cases import DTYPES

    if dtype not in (*DTYPES, *more):
        wanted = ", ".join((*DTYPES, *more))
        raise typer.BadParameter(f"--dtype: wanted one of {wanted}, got {dtype!r}")
    return dtype


def use_threads(threads: int | None) -> None:
    """So many threads of torch, and with it of fdk-cpu and llama.cpp; torch's choice for None."""
    import torch

    if threads is None:
        return
    cores = os.cpu_count() or 1
    if threads > MOST_THREADS * cores:
        raise typer.BadParameter(
            f"--threads: wanted at most {MOST_THREADS * cores}, {MOST_THREADS} for each of "
            f"{cores} cores, got {threads}"
        )
    torch.set_num_threads(threads)


def check_output(output: Path | None) -> Path | None:
    """Bad usage for a folder that cannot be made or written; nothing is made yet."""
    if output is None:
        return None
    try:
        there = next(path for path in (output, *output.parents) if path.exists())
        with TemporaryFile(dir=there):
            return output
    except OSError as error:
        raise typer.BadParameter(_no_folder(output, error)) from None


def output_folder(output: Path | None, benchmark: str) -> Path:
    """The folder for results, made; ``out/<benchmark>-<time>`` where none is given."""
    folder = output or Path("out") / f"{benchmark}-{datetime.now():%Y-%m-%dT%H-%M-%S}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise typer.BadParameter(f"--out: {_no_folder(folder, error)}") from None


def _no_folder(folder: Path, error: OSError) -> str:
    return f"wanted a folder that can be written, got {folder}: {error.strerror}"


def collect(
    rows: "Iterable[Row[Any, Any]]",
    facts: "Facts",
    path: Path,
    *,
    json_lines: bool,
    show: "Callable[[list[Row[Any, Any]]], None]",
) -> "tuple[list[Row[Any, Any]], bool]":
    """Writes each row as it comes; returns the rows and whether Ctrl-C ended them.

    The first row replaces what the file holds: until then the rows of an earlier run stay.
    """
    from fdk_bench.records import to_json

    collected: list[Row[Any, Any]] = []
    try:
        for row in rows:
            line = to_json(row, facts)
            collected.append(row)
            with path.open("w" if len(collected) == 1 else "a", encoding="utf-8") as file:
                print(line, file=file)
            if json_lines:
                print(line, flush=True)
            show(collected)
    except KeyboardInterrupt:
        return collected, True
    return collected, False


class Screen:
    """A table that grows while a bar shows how far a run is; on standard error when asked for."""

    def __init__(self, total: int, *, to_stderr: bool) -> None:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

        self.console = Console(stderr=to_stderr)
        if not self.console.is_terminal:  # a file has no edge to cut a table at
            self.console = Console(stderr=to_stderr, width=FILE_WIDTH)
        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=self.console)
        self._task = self._progress.add_task("", total=total)
        self._table: RenderableType | None = None
        self._live: Any = None
        self.interrupt = Interrupt()

    @property
    def width(self) -> int:
        """Columns of the terminal, or of lines in a file."""
        return self.console.width

    @contextmanager
    def live(self) -> "Iterator[Screen]":
        """While it runs, table and bar are drawn again as they change; both go in the end.

        Ctrl-C is noted, and ends the run at the next step where Python dropped it.
        """
        from rich.live import Live

        live = Live(console=self.console, transient=True, refresh_per_second=4)
        with self.interrupt.watched(), live as self._live:
            self._draw()
            yield self

    def step(self, text: str) -> None:
        """What is being done; ``KeyboardInterrupt`` where it should not, see ``Interrupt``."""
        self.interrupt.check()
        self._progress.update(self._task, description=text[:40])
        self._draw()

    def update(self, done: int, table: "RenderableType") -> None:
        """How many rows there are, and the table of them."""
        self._table = table
        self._progress.update(self._task, completed=done)
        self._draw()

    def _draw(self) -> None:
        from rich.console import Group

        # The bar above: what does not fit the terminal is cut below.
        parts = [self._progress] if self._table is None else [self._progress, self._table]
        self._live.update(Group(*parts))


def finish(
    rows: "Sequence[Row[Any, Any]]", total: int, interrupted: bool, screen: Screen, folder: Path
) -> None:
    """Prints where results are and what failed, and leaves with the code that a run deserves."""
    nothing = f"Nothing was measured: no row was written to {folder}"
    where = f"Results are in {folder}" if rows else nothing
    screen.console.print(where, highlight=False, soft_wrap=True)
    for row in rows:
        if row.error is not None:
            screen.console.print(
                f"{row.case} failed: {row.error}", markup=False, style="red", soft_wrap=True
            )
    if interrupted or screen.interrupt.noted:
        screen.console.print(f"Interrupted after {len(rows)} of {total} rows.")
        raise typer.Exit(EXIT_INTERRUPTED)
    if any(row.error is not None for row in rows):
        raise typer.Exit(EXIT_FAILED_ROWS)
