"""Options, checks of option values, result folder and console output of every subcommand."""

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
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from fdk_bench.row_log import RowLog
    from fdk_bench.rows import Case, Facts, Row, Values

EXIT_FAILED_ROWS = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # as a shell reports SIGINT
FILE_WIDTH = 180
SHOW_CURSOR = b"\x1b[?25h\n"
# OpenMP threads that spin while they wait starve the rest of a small or shared machine: torch took
# 8 ms for each parallel region on two cores. Bound threads would bind those of other pools too.
OPENMP_DEFAULTS = {"GOMP_SPINCOUNT": "0"}
NUMBER = r"0*[1-9][0-9]{0,17}"  # fits 64 bits
MOST_THREADS = 4  # for each core; torch 2.13 crashed with 100000 threads
Value = TypeVar("Value")

# Options that several subcommands have.
LISTS = "repeat, or separate by commas"
CASES = "Cases"
TIMING = "Timing"
RESULTS = "Results"


def option(help: str, *names: str, panel: str | None = CASES, **settings: Any) -> Any:
    """Declare an option; ``settings`` are those of ``typer.Option``."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


def list_option(help: str, default: str, *names: str, panel: str | None = CASES) -> Any:
    """Declare an option that takes several entries."""
    return option(f"{help}; {LISTS}. Default: {default}.", *names, panel=panel, metavar="LIST")


Texts = list[str] | None
MsOption = Annotated[Texts, list_option("Rows of x", "1, 16, 256; for compare 1, 16", "-m", "--m")]
KsOption = Annotated[Texts, list_option("Inputs of the layer", "4096", "-k", "--k")]
NsOption = Annotated[Texts, list_option("Outputs of the layer", "as k", "-n", "--n")]
SHAPES = "NxK, a model (llama-8b, qwen3-32b, ...), or a file with a shape a line"
ShapesOption = Annotated[Texts, list_option(f"Instead of -n and -k: {SHAPES}", "none")]
GroupOption = Annotated[
    str, option("Group size of formats that name none: a number, or row.", "--group-size", "-g")
]
DEFAULT_BITS = "16, 8, 4, 3, 2, 1; for compare 16, 4; for models 16, 4, 1"
BitsOption = Annotated[
    Texts,
    list_option("Bits: 1 to 8, and 16 for no quantisation", DEFAULT_BITS, "--bits", "-b"),
]
FormatsOption = Annotated[
    Texts,
    list_option(
        "Codebooks (int, affine, nf), combined with --bits, or full formats (kmeans4-g32)",
        "custom, an arbitrary codebook; for real models kmeans",
        *("--format", "--formats"),
    ),
]
DeviceOption = Annotated[str | None, option("cpu or cuda. Default: the GPU, if any.")]
BackendOption = Annotated[
    Texts,
    list_option(
        "Backends: auto, cpu, triton, marlin, marlin-lut, or reference, which dequantises and "
        "multiplies in torch; fdk-bench compare has torch.compile and other peers",
        "auto",
    ),
]
ActivationsOption = Annotated[
    Texts, list_option("Activations: float, or int8 for x rounded to 8 bits (CPU only)", "float")
]
DtypeOption = Annotated[str, option("Dtype of x and y: bf16, fp16 or fp32.")]
AgainstOption = Annotated[
    Texts,
    list_option(
        "Peers to measure in the same run: a name (fdk-bench info lists them), all, or none",
        "none; for compare all",
    ),
]
IncludeOption = Annotated[
    str, option("Regular expression: only cases such as m1-n512-k512-int4-g64-bf16-cpu-auto.")
]
ExcludeOption = Annotated[str | None, option("Regular expression of cases to leave out.")]
CopiesOption = Annotated[
    int | None,
    option("Copies of each weight. Default: more than the caches hold.", panel=TIMING, min=1),
]
IN_A_TURN = "Calls in a turn (CPU; default 8) or at least in a graph (GPU; default 40)."
InnerOption = Annotated[int | None, option(IN_A_TURN, panel=TIMING, min=1)]
TURNS = "Turns (CPU; default: for --seconds) or replays of the graph (GPU; default 15)."
OuterOption = Annotated[int | None, option(TURNS, panel=TIMING, min=1)]
SecondsOption = Annotated[
    float,
    option("Seconds per case on a CPU, unless --outer-reps is given.", panel=TIMING, min=0.0),
]
PeerSecondsOption = Annotated[
    float | None,
    option(
        "Seconds for a peer to pack, compile, tune and pass the check on one layer. "
        "Default: 120 on a GPU.",
        panel=TIMING,
        min=0.1,
    ),
]
ThreadsOption = Annotated[int | None, option("CPU threads. Default: torch's.", panel=TIMING, min=1)]
JsonOption = Annotated[
    bool,
    option("Print rows as JSON lines; the table goes to standard error.", "--json", panel=RESULTS),
]


def check_output(output: Path | None) -> Path | None:
    """Refuse a folder that cannot be created or written; create nothing yet."""
    if output is None:
        return None
    try:
        there = next(path for path in (output, *output.parents) if path.exists())
        with TemporaryFile(dir=there):
            return output
    except OSError as error:
        raise typer.BadParameter(_no_folder(output, error)) from None


# Help drops text in angle brackets.
OutOption = Annotated[
    Path | None,
    option(
        "Folder for results. Default: out/COMMAND-TIME.",
        *("--out", "--output"),
        panel=RESULTS,
        callback=check_output,
    ),
]


ResumeOption = Annotated[
    bool,
    option(
        "Go on with the rows in --out: cases that were measured are skipped. Rows of another "
        "commit, machine, version or environment are refused.",
        "--resume",
        panel=RESULTS,
    ),
]
OverwriteOption = Annotated[
    bool,
    option("Replace the rows in --out when the first is measured.", "--overwrite", panel=RESULTS),
]


def check_results(output: Path | None, file: str, resume: bool, overwrite: bool) -> None:
    """Refuse a folder that holds rows, unless they are to be resumed or overwritten."""
    if resume and overwrite:
        raise typer.BadParameter("--resume and --overwrite: wanted one of them, got both")
    if output is None:
        if resume:
            raise typer.BadParameter("--resume: wanted --out with it, the folder of the rows")
        return
    path = output / file
    if path.is_file() and path.stat().st_size and not (resume or overwrite):
        raise typer.BadParameter(
            f"--out: {path} holds rows of an earlier run: --resume goes on with them, --overwrite "
            "replaces them, or name another folder"
        )


def open_log(
    path: Path,
    facts: "Facts",
    case: "type[Case]",
    values: "type[Values]",
    *,
    resume: bool,
) -> "RowLog[Case, Values]":
    """Return the rows of a file that a run goes on with; bad usage where it cannot."""
    from fdk_bench.row_log import RowLog

    return checked(lambda: RowLog(path, facts, case, values, resume=resume), "--resume")


def output_folder(output: Path | None, benchmark: str) -> Path:
    """Make the folder for results; ``out/<benchmark>-<time>`` where none is given."""
    folder = output or Path("out") / f"{benchmark}-{datetime.now():%Y-%m-%dT%H-%M-%S}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise typer.BadParameter(f"--out: {_no_folder(folder, error)}") from None


def _no_folder(folder: Path, error: OSError) -> str:
    return f"wanted a folder that can be written, got {folder}: {error.strerror}"


# A flag takes no value; the limits of a range are shown anyway.
SHORTER = {"<bool>": "", "<int range>": "<int>", "<float range>": "<float>"}


def _shorten_types(params: Sequence[Any], ctx: Any) -> list[Any]:
    for param in params:
        # An argument would lose its name; typer 0.20 shows no types.
        if param.param_type_name == "option" and hasattr(param, "display_type"):
            param.metavar = SHORTER.get(param.display_type(ctx), param.metavar)
    return list(params)


class Command(TyperCommand):
    """A subcommand whose help names types briefly."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return its options and arguments, as help shows them."""
        return _shorten_types(super().get_params(ctx), ctx)


class Group(TyperGroup):
    """``fdk-bench`` itself: ends without a traceback where a disk is full."""

    def main(self, *arguments: Any, **named: Any) -> Any:
        """Run the command line."""
        with full_disk_ends_run():
            return super().main(*arguments, **named)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return its options, as help shows them."""
        return _shorten_types(super().get_params(ctx), ctx)


@contextmanager
def full_disk_ends_run() -> Iterator[None]:
    """Print a line and exit with code 1, without a traceback, where a disk is full."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # None where it was closed at the start
                sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EPIPE):
            raise
        # Python would flush its buffer again at exit, fail, and change the exit code.
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
        if error.errno != errno.EPIPE:  # the reader of a pipe has seen enough
            typer.echo(f"fdk-bench: not everything was written: {error}", err=True)
        raise SystemExit(EXIT_FAILED_ROWS) from None


def prepare_environment() -> None:
    """Set the environment for fair timings and import torch; call before torch is imported."""
    # Huge pages for torch's weights, as in fdk-cpu, and for the memory of the read floor.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if not {"OMP_PROC_BIND", "OMP_WAIT_POLICY"} & set(os.environ):
        for name, value in OPENMP_DEFAULTS.items():
            os.environ.setdefault(name, value)
    with interrupt_exits():
        import torch  # noqa: F401


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Install the handler of Ctrl-C, unless there is one or this is not the main thread."""
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


def interrupt_exits() -> AbstractContextManager[None]:
    """Let Ctrl-C end the process, while modules are imported that would catch its exception."""
    return _handled(lambda *_: os._exit(EXIT_INTERRUPTED))


class Interrupt:
    """Ctrl-C that is noted as well as raised, because Python may drop what it raises.

    An exception in a weak reference's callback or in ``__del__`` is printed and ignored: one run of
    models in five went on to its end.
    """

    noted = False

    def check(self) -> None:
        """Raise ``KeyboardInterrupt`` where a signal was noted."""
        if self.noted:
            raise KeyboardInterrupt

    def watched(self) -> AbstractContextManager[None]:
        """Note and raise the first signal while the context is open; the second ends at once."""
        return _handled(self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.noted:
            for stream in (1, 2):
                if os.isatty(stream):  # rich hides the cursor while a table is live
                    os.write(stream, SHOW_CURSOR)
            os._exit(EXIT_INTERRUPTED)
        self.noted = True
        raise KeyboardInterrupt


def split(texts: Sequence[str] | None, option: str = "") -> list[str]:
    """Return the entries of an option that may be repeated and may hold commas.

    Empty for one that was not given; one that was given without an entry is refused.
    """
    found = [part.strip() for text in texts or () for part in text.split(",") if part.strip()]
    if texts and not found:
        raise typer.BadParameter(
            f"{option or 'a list'}: wanted an entry or several ({LISTS}), got {','.join(texts)!r}"
        )
    return found


def numbers(option: str, texts: Sequence[str] | None, default: Sequence[int]) -> list[int]:
    """Return the positive whole numbers of an option, each once, in order."""
    found = []
    for text in split(texts, option):
        if not re.fullmatch(NUMBER, text):
            raise typer.BadParameter(
                f"{option}: wanted whole numbers from 1, of up to 18 digits, got {text[:40]!r}"
            )
        found.append(int(text))
    return list(dict.fromkeys(found)) or list(default)


def checked(call: Callable[[], Value], option: str = "") -> Value:
    """Return the result of a call; its ``ValueError`` becomes bad usage of ``option``."""
    try:
        return call()
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}" if option else str(error)) from None


def given_text(option: str, path: Path) -> str:
    """Return the text of a file that the user named."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{option}: wanted a UTF-8 text file: {error}") from None
    if not text.strip():
        raise typer.BadParameter(f"{option}: wanted text, {path} has none")
    return text


def check_pattern(option: str, text: str) -> None:
    """Refuse text that is not a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise typer.BadParameter(
            f"{option}: wanted a regular expression, got {text!r}: {error}"
        ) from None


def checked_device(device: str | None) -> str:
    """Return the device asked for, or the default; refuse one that torch does not find."""
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
    """Return the activations asked for; refuse others, and int8 on a GPU."""
    from fdk_formats.backends import check_activations

    for name in names:
        checked(lambda name=name: check_activations(name))  # type: ignore[misc]
    if "int8" in names and device != "cpu":
        raise typer.BadParameter(f"--activations: int8 needs --device cpu, got {device}")
    return names


def checked_backends(names: list[str]) -> list[str]:
    """Return the backends asked for, each once; refuse unknown names."""
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
    """Return the dtype asked for; refuse one that is neither measured nor in ``more``."""
    from fdk_bench.cases import DTYPES

    if dtype not in (*DTYPES, *more):
        wanted = ", ".join((*DTYPES, *more))
        raise typer.BadParameter(f"--dtype: wanted one of {wanted}, got {dtype!r}")
    return dtype


def use_threads(threads: int | None) -> None:
    """Set the threads of torch, which fdk-cpu and llama.cpp use too; torch's choice for None."""
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


def make_console(*, to_stderr: bool = False) -> "Console":
    """Return a console as wide as the terminal, or ``FILE_WIDTH`` for a file."""
    from rich.console import Console

    console = Console(stderr=to_stderr)
    return console if console.is_terminal else Console(stderr=to_stderr, width=FILE_WIDTH)


class Screen:
    """A table that grows during a run, with a progress bar."""

    def __init__(self, total: int, *, to_stderr: bool) -> None:
        from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

        self.console = make_console(to_stderr=to_stderr)
        columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=self.console)
        self._task = self._progress.add_task("", total=total)
        self._total, self._measured = total, 0
        self._table: RenderableType | None = None
        self._live: Any = None
        self.interrupt = Interrupt()

    def step(self, text: str) -> None:
        """Show what is being done; raises ``KeyboardInterrupt`` that Python dropped."""
        self.interrupt.check()
        self._progress.update(self._task, description=text[:40])
        self._draw()

    def run(
        self,
        rows: "Iterable[Row[Case, Values]]",
        log: "RowLog[Case, Values]",
        table: "Callable[[Sequence[Row[Any, Any]], int], RenderableType]",
        *,
        json_lines: bool,
    ) -> "list[Row[Case, Values]]":
        """Write each row as it comes, show the table of all, and print it at the end.

        Ctrl-C ends the rows.

        Args:
            rows: rows of the run.
            log: the file; the table begins with the rows that it holds.
            table: makes the table of rows for a width.
            json_lines: whether new rows are printed too.

        Returns:
            All rows of the file, or only those of an earlier run where there is no new one.
        """
        from rich.live import Live

        earlier = len(log.rows)
        if earlier:
            self._table = table(log.rows, self.console.width)
            text = f"Resumed: {earlier} rows of {log.path} are not measured again."
            self.console.print(text, highlight=False, soft_wrap=True)
        live = Live(console=self.console, transient=True, refresh_per_second=4)
        with self.interrupt.watched(), live as self._live:
            self._draw()
            try:
                for row in rows:
                    line = log.append(row)
                    if json_lines:
                        print(line, flush=True)
                    self._table = table(log.rows, self.console.width)
                    self._measured += 1
                    self._progress.update(self._task, completed=self._measured)
                    self._draw()
            except KeyboardInterrupt:
                self.interrupt.noted = True
        self.console.print(table(log.rows, self.console.width))
        return log.rows

    def _draw(self) -> None:
        from rich.console import Group

        # The bar is above, because what does not fit the terminal is cut below.
        parts = [self._progress] if self._table is None else [self._progress, self._table]
        self._live.update(Group(*parts))

    def finish(self, rows: "Sequence[Row[Any, Any]]", folder: Path) -> None:
        """Print the folder of the results and what failed; exit with the code of the run."""
        nothing = f"Nothing was measured: no row was written to {folder}"
        where = f"Results are in {folder}" if rows else nothing
        self.console.print(where, highlight=False, soft_wrap=True)
        for row in rows:
            if row.error is not None:
                self.console.print(
                    f"{row.case} failed: {row.error}", markup=False, style="red", soft_wrap=True
                )
        if self.interrupt.noted:
            done = f"{self._measured} of {self._total} rows"
            self.console.print(f"Interrupted after {done}.")
            raise typer.Exit(EXIT_INTERRUPTED)
        if any(row.error is not None for row in rows):
            raise typer.Exit(EXIT_FAILED_ROWS)
