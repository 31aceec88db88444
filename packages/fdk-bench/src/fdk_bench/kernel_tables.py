"""The table of a kernel benchmark, for the terminal and as Markdown."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table

from fdk_bench.kernels import KernelRow, KernelValues

HEADINGS = (
    "n x k",
    "m",
    "format",
    "by",
    "time",
    "least",
    "spread",
    "eager",
    "GB/s",
    "floor",
    "share",
    "TFLOP/s",
    "x 16 bit",
    "x best peer",
)
LEFT = ("n x k", "format", "by")
COLUMN_GAP = 2  # a column's padding and the divider of SIMPLE_HEAD, whose edges are as wide
# Left out of a terminal that is too narrow, in this order; the Markdown file has them.
SPARE = (
    "least",
    "floor",
    "eager",
    "TFLOP/s",
    "GB/s",
    "spread",
    "x 16 bit",
    "share",
    "x best peer",
)
WIDEST = 10_000  # no table is


class WholeTable(Table):
    """A table whose lines go on below where a terminal is narrower: rich would cut its cells."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines at their full width, each in parts that the terminal has room for."""
        natural, width = options.update(max_width=WIDEST), max(1, options.max_width)
        for line in Segment.split_lines(super().__rich_console__(console, natural)):  # type: ignore[arg-type]
            # Without the blanks at its end, which would make a line of their own.
            length = cell_len("".join(segment.text for segment in line).rstrip()) or 1
            cuts = [*range(width, length, width), length]
            for part in Segment.divide(line, cuts):
                yield from part
                yield Segment.line()


def kernel_table(rows: Sequence[KernelRow], caption: str = "", width: int | None = None) -> Table:
    """A line per row, a rule between shapes and m; without some of ``SPARE`` in a narrow one."""
    lines = [cells_of(row) for row in rows]
    headings, note = fitting(headings_of(rows), lines, SPARE, width)
    table = empty_table(headings, LEFT, caption + note)
    before = None
    for row, cells in zip(rows, lines, strict=True):
        group = (row.case.n, row.case.k, row.case.m)
        if before not in (None, group):
            table.add_section()
        if before == group:  # said once
            cells |= {"n x k": "", "m": ""}
        table.add_row(*(cells[heading] for heading in headings))
        before = group
    return table


def kernel_markdown(rows: Sequence[KernelRow]) -> str:
    """The same table as Markdown."""
    return markdown(headings_of(rows), LEFT, map(cells_of, rows))


def stored_bits(rows: Sequence[KernelRow], backend: str) -> str:
    """What a backend stores for each weight, scales included; empty where it measured nothing."""
    measured = [row.values for row in rows if row.values and row.case.backend == backend]
    bits = sorted({values.bits_per_weight for values in measured})
    return f"{', '.join(f'{b:.4g}' for b in bits)} bits a weight" if bits else ""


def fitting(
    headings: Sequence[str],
    lines: Sequence[Mapping[str, str]],
    spare: Sequence[str],
    width: int | None,
    fold: Callable[[str], str] = str,
) -> tuple[list[str], str]:
    """The headings of a table that a terminal has room for, and a note of those left out.

    ``fold`` gives a heading as it is shown, on one line or more.
    """
    columns = {
        h: max(*map(len, fold(h).split("\n")), *(len(cells[h]) for cells in lines), 0)
        for h in headings
    }
    left_out = []
    for heading in spare:
        if width is None or sum(columns.values()) + COLUMN_GAP * len(columns) <= width:
            break
        if columns.pop(heading, None) is not None:
            left_out.append(heading)
    note = f"; for want of width without {', '.join(left_out)}" if left_out else ""
    return list(columns), note


def empty_table(
    headings: Sequence[str], left: Sequence[str], caption: str, fold: Callable[[str], str] = str
) -> WholeTable:
    """A table without lines, of figures but for columns ``left``; ``fold`` as of ``fitting``."""
    table = WholeTable(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        caption=caption or None,
        caption_justify="left",
    )
    for heading in headings:
        justify = "left" if heading in left else "right"
        table.add_column(fold(heading), justify=justify, no_wrap=True)  # type: ignore[arg-type]
    return table


def markdown(
    headings: Sequence[str], left: Sequence[str], rows: Iterable[Mapping[str, str]]
) -> str:
    """A Markdown table of the texts of rows by heading."""
    lines = [headings, ["---" if heading in left else "---:" for heading in headings]]
    lines += [[cells[heading] for heading in headings] for cells in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def headings_of(rows: Sequence[KernelRow]) -> tuple[str, ...]:
    """The columns that any row fills."""
    filled = [cells_of(row) for row in rows]
    optional = ("eager", "x 16 bit", "x best peer")
    return tuple(h for h in HEADINGS if h not in optional or any(cells[h] for cells in filled))


def cells_of(row: KernelRow) -> dict[str, str]:
    """The texts of a row by heading."""
    case, values = row.case, row.values
    cells = dict.fromkeys(HEADINGS, "")
    cells |= {"n x k": f"{case.n} x {case.k}", "m": str(case.m), "format": case.format}
    if values is None:
        return cells | {"by": case.backend, "time": "failed"}
    return cells | _measured(values)


def _measured(values: KernelValues) -> dict[str, str]:
    peer = "" if values.best_peer is None else f"{values.speedup_peer:.2f} ({values.best_peer})"
    return {
        "by": values.backend,
        "time": seconds_text(values.time),
        # Beside the median, which other work on the machine raises.
        "least": seconds_text(values.time_min),
        "spread": f"{100 * values.spread:.0f} %",
        "eager": "" if values.eager_time is None else seconds_text(values.eager_time),
        "GB/s": f"{values.bandwidth / 1e9:.1f}",
        "floor": seconds_text(values.floor),
        "share": f"{100 * values.floor_share:.0f} %",
        "TFLOP/s": f"{values.throughput / 1e12:.3g}",
        "x 16 bit": "" if values.speedup_16 is None else f"{values.speedup_16:.2f}",
        "x best peer": peer,
    }


def seconds_text(seconds: float) -> str:
    """Seconds with three digits and a unit: ``9.87 us``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
