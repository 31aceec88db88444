"""Plots of results: PNG and SVG, readable in print and for colour-blind readers."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.markers import CARETDOWN, CARETLEFT, CARETRIGHT, CARETUP
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from fdk_bench.accuracy_cases import BASELINE, AccuracyRow
from fdk_bench.chart_parts import save_figure

# Okabe and Ito's colours, each with a marker and a dash of its own: the plot is read without them.
STYLES = (
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#009E73", "^", "-."),
    ("#CC79A7", "D", ":"),
    ("#E69F00", "v", (0, (5, 1, 1, 1))),
    ("#56B4E9", "P", (0, (1, 1))),
)
GREY = "#555555"
# Of formats of which one width was measured: a marker each where there are no more than these.
# Carets touch their point with the tip, so that those of points near each other lie side by side.
LONE_MARKERS = (CARETLEFT, CARETRIGHT, "x", "+", CARETUP, CARETDOWN, "1", "d")
BIT_TICKS = (1, 2, 3, 4, 6, 8, 16)
LOSS = "loss of the output (1 - mean cosine)"
SMALLEST_LOSS = 1e-7  # of a cosine computed in float32


def plot_accuracy(rows: Sequence[AccuracyRow], path: Path) -> list[Path]:
    """Draws error against bits to ``path`` with the suffixes .png and .svg; returns both.

    Left: weight error. Middle: loss of the output, 1 - mean cosine. Right: the formats of the
    width that has most of them, by that loss, since their points fall on each other on the left.

    Raises:
        ValueError: where no row was measured.
    """
    measured = [row for row in rows if row.values is not None]
    if not measured:
        raise ValueError("plot_accuracy: wanted at least one measured row, got none")
    with matplotlib.rc_context({"font.size": 10, "axes.axisbelow": True}):
        figure = Figure(figsize=(13, 4.8), layout="constrained")
        left, middle, right = figure.subplots(1, 3, width_ratios=(4, 4, 3))
        _draw_curves(left, measured, 0, "relative weight error (RMS)")
        _draw_curves(middle, measured, 1, LOSS)
        _draw_ranking(right, measured)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        case = measured[0].case
        figure.suptitle(f"{case.model}: what a format of few bits loses", fontsize=12)
        paths = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
        for target in paths:
            save_figure(figure, target)
    return paths


def _draw_curves(axes: Axes, rows: Sequence[AccuracyRow], which: int, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    styles = cycle(STYLES)
    lone: dict[str, tuple[float, float]] = {}
    for name, points in _series(rows, which):
        if name == BASELINE:
            axes.plot(*points[0], "*", color="black", markersize=10, label="bf16 weights")
        elif len(points) == 1:
            lone[name] = points[0]
        else:
            colour, marker, dash = next(styles)
            x, y = zip(*points, strict=True)
            # Two points are joined by no line: it would cross widths that were not measured.
            dash = dash if len(points) > 2 else "none"
            # Open markers, for formats of one width lie on each other.
            axes.plot(
                x,
                y,
                color=colour,
                marker=marker,
                linestyle=dash,
                markersize=8,
                markerfacecolor="none",
                markeredgewidth=1.4,
                label=name,
            )
    _draw_lone(axes, lone)
    axes.xaxis.set_major_locator(FixedLocator(BIT_TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_xlabel("bits per weight (scales included)")
    if which == 0:  # spans too few decades for labels at powers of ten alone
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel(label)
    axes.grid(color="#DDDDDD")


def _draw_lone(axes: Axes, lone: Mapping[str, tuple[float, float]]) -> None:
    """Formats of one width, each by its name where there are few."""
    if len(lone) > len(LONE_MARKERS):
        x, y = zip(*lone.values(), strict=True)
        axes.plot(x, y, "x", color=GREY, markersize=6, zorder=1, label="formats of one width")
        return
    for (label, point), marker in zip(lone.items(), LONE_MARKERS, strict=False):
        axes.plot(
            *point,
            color="black",
            marker=marker,
            linestyle="none",
            markersize=8,
            markerfacecolor="none",
            zorder=3,
            label=label,
        )


def _draw_ranking(axes: Axes, rows: Sequence[AccuracyRow]) -> None:
    # Rows that calibration repeats do not count: with them a width of few formats would be taken.
    plain = [row for row in rows if not row.case.calibration]
    widths = [int(bits) for row in plain if (bits := _point(row, 0)[0]) < 16] or [16]
    width = max(sorted(widths, reverse=True), key=widths.count)
    ranked = [row for row in rows if int(_point(row, 0)[0]) == width]
    # By what the output loses: calibration raises the weight error and lowers that.
    ranked.sort(key=lambda row: _point(row, 1)[1], reverse=True)
    errors = [_point(row, 1)[1] for row in ranked]
    axes.hlines(range(len(ranked)), 0, errors, color="#BBBBBB", linewidth=1)
    axes.plot(errors, range(len(ranked)), "o", color="black", markersize=5)
    axes.set_yticks(range(len(ranked)), [_ranked_label(row) for row in ranked])
    axes.set_xlim(0, 1.12 * max(errors))
    axes.set_title(f"{width}-bit formats (bits per weight)", fontsize=10)
    axes.set_xlabel(LOSS)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.grid(color="#DDDDDD", axis="x")


def _ranked_label(row: AccuracyRow) -> str:
    return f"{row.case.label}  ({_point(row, 0)[0]:.2f})"


def _series(
    rows: Sequence[AccuracyRow], which: int
) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Formats that differ in nothing but their width, in the order of their first rows.

    One that is alone keeps its width in its name.
    """
    series: dict[str, list[AccuracyRow]] = {}
    for row in rows:
        name = re.sub(r"^([a-z_]+)\d(?=-)", r"\1", row.case.label)
        series.setdefault(name, []).append(row)
    for name, alike in series.items():
        shown = name if len(alike) > 1 else alike[0].case.label
        yield shown, sorted(_point(row, which) for row in alike)


def _point(row: AccuracyRow, which: int) -> tuple[float, float]:
    assert row.values is not None
    loss = max(SMALLEST_LOSS, 1 - row.values.cosine_mean)
    return row.values.bits_per_weight, (row.values.weight_error, loss)[which]
