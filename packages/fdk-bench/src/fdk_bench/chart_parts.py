"""What figures have in common: colours and markers by width, panels, legends."""

import math
import re
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd  # type: ignore[import-untyped]
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from fdk_bench.cases import DTYPES
from fdk_bench.records import counted

# Okabe and Ito's colours by bits of a code: one width has one colour in every figure.
COLOURS = {
    16: "#000000",
    32: "#000000",
    8: "#0072B2",
    7: "#56B4E9",
    6: "#56B4E9",
    5: "#009E73",
    4: "#009E73",
    3: "#E69F00",
    2: "#CC79A7",
    1: "#D55E00",
}
# Read without colours too: curves and clouds have a marker for each width and a dash or a filling
# for format and who computed it; where the axis is the width, the marker tells the latter.
WIDTH_MARKERS = {
    32: "o",
    16: "o",
    8: "s",
    7: "p",
    6: "h",
    5: "P",
    4: "^",
    3: "D",
    2: "v",
    1: "X",
}
# As many as compare has contenders at 4 bits on one machine, and none twice.
DASHES = (
    *("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (1, 4)), (0, (3, 1, 1, 1, 1, 1))),
    *((0, (2, 4)), (0, (8, 2)), (0, (8, 2, 2, 2))),
)
HALVES = ("left", "top", "right", "bottom")
# Of a marker, and of its other half.
FILLS = (
    *(("none", "none"), ("full", "none")),
    *((half, other) for other in ("none", "#333333") for half in HALVES),
)
MARKERS = "osD^vPX<>*phd8"
GRID = "#DDDDDD"
FLOOR: dict[str, Any] = {"color": "#555555", "linewidth": 1.2}
# What the machine allows a width; of one point the tick alone is seen.
LIMIT: dict[str, Any] = {
    "linestyle": ":",
    "linewidth": 0.9,
    "marker": "_",
    "markersize": 12,
    "zorder": 1,
}
MOST_PANELS = 4
# Of a legend: a letter of 10 points, what stands before the text, and a line; so many lines have
# room in a figure as it is.
MANY_ENTRIES, WIDE_INCHES = 8, 10.0
TITLE_LETTER_INCHES = 0.1  # of 12 points
LETTER_INCHES, HANDLE_INCHES, LINE_INCHES, FREE_LINES = 0.08, 0.65, 0.21, 3


def name(format: str, by: str) -> str:
    """Of a series."""
    return f"{format}, {by}"


def family(format: str) -> str:
    """A format without its bits, ``int-g64``, which colours tell; a dtype as it is."""
    return format if format in DTYPES else re.sub(r"\d", "", format, count=1)


def panels_of(count: int, width: float = 4.4) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels side by side, of so many inches each."""
    figure = Figure(figsize=(max(6.5, width * count), 5.2), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False, sharey=count > 1)[0]
    return figure, list(axes)


def finish(figure: Figure, panels: Sequence[Axes], title: str, frame: pd.DataFrame) -> Figure:
    """Grid, title and one legend for all panels, which makes the figure as much higher."""
    entries: dict[str, Any] = {}
    for axes in panels:
        axes.grid(color=GRID)
        axes.set_axisbelow(True)
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    if len(entries) > MANY_ENTRIES:
        figure.set_figwidth(max(figure.get_figwidth(), WIDE_INCHES))
    columns = legend_columns(list(entries), figure.get_figwidth())
    lines = math.ceil(len(entries) / columns)
    figure.set_figheight(figure.get_figheight() + LINE_INCHES * max(0, lines - FREE_LINES))
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside lower center",
        frameon=False,
        ncols=columns,
    )
    machine, dtype = frame["machine"].iloc[0], frame["dtype"].iloc[0]
    threads = frame["threads"].iloc[0]
    where = f"{machine}, {dtype}" + (f", {counted(threads)}" if threads else "")
    figure.suptitle(title_of(title, where, figure.get_figwidth()), fontsize=12)
    return figure


def title_of(title: str, where: str, inches: float) -> str:
    """A title and the machine, below it where one line would be wider than the figure."""
    letters = len(title) + len(where) + len(" ()")
    separator = "\n" if letters * TITLE_LETTER_INCHES > inches else " "
    return f"{title}{separator}({where})"


def legend_columns(labels: Sequence[str], inches: float) -> int:
    """Columns of a legend that are no wider than the figure."""
    widest = max(map(len, labels), default=0) * LETTER_INCHES + HANDLE_INCHES
    return max(1, min(len(labels), int(inches // widest)))


def curve_of(axes: Axes, x: Any, y: Any, bits: int, dash: Any, label: str) -> None:
    """Points and the line through them, in the colour and with the marker of a width."""
    axes.plot(
        x,
        y,
        color=COLOURS[bits],
        marker=WIDTH_MARKERS[bits],
        linestyle=dash,
        label=label,
        markersize=7,
        linewidth=1.3,
        markerfacecolor="none",
        markeredgewidth=1.4,
    )


def plain_log(axes: Axes) -> None:
    """Numbers, and no powers of ten, beside a logarithmic axis."""
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.10g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def series_of(frame: pd.DataFrame) -> list[tuple[int, str, str, pd.DataFrame]]:
    """Rows of one format by one backend, with bits and both names, the widest first."""
    groups = frame.groupby(["bits", "format", "by"], sort=False)
    found = [
        (int(bits), format, by, rows.sort_values("size" if "size" in rows else "parameters"))
        for (bits, format, by), rows in groups
    ]
    return sorted(found, key=lambda entry: (-entry[0], *entry[1:3]))


def kinds_of(frame: pd.DataFrame, styles: Sequence[Any]) -> dict[tuple[str, str], Any]:
    """A style for each format, its bits apart, and who computed it.

    What is not quantised has a width of its own and takes no style from the others.
    """
    kinds = dict.fromkeys(zip(frame["format"].map(family), frame["by"], strict=True))
    plain = [kind for kind in kinds if kind[0] in DTYPES and styles is not MARKERS]
    others = [kind for kind in kinds if kind not in plain]
    return {
        kind: style
        for group in (plain, others)
        for kind, style in zip(group, cycle(styles), strict=False)
    }


def spread_of(values: list[Any]) -> list[Any]:
    """At most ``MOST_PANELS`` of the values, the first and the last among them."""
    if len(values) <= MOST_PANELS:
        return values
    step = (len(values) - 1) / (MOST_PANELS - 1)
    return [values[round(i * step)] for i in range(MOST_PANELS)]


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure as its suffix says; the same figure twice gives the same bytes."""
    metadata = {"Date": None} if path.suffix == ".svg" else None
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fdk"}):
        figure.savefig(path, dpi=160, metadata=metadata)
