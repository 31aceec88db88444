"""Figures of kernels and models, readable in print and for colour-blind readers."""

import re
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from fdk_bench.cases import DTYPES

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
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (1, 1)))
FILLS = ("none", "full", "left", "top", "right", "bottom")
MARKERS = "osD^vPX<>*"
GRID = "#DDDDDD"
FLOOR: dict[str, Any] = {"color": "#555555", "linewidth": 1.2}
MOST_PANELS = 4


def throughput_figure(frame: pd.DataFrame) -> Figure:
    """TFLOP/s against the shape, a panel for each m."""
    ms = _spread(sorted(frame["m"].unique()))
    figure, panels = _panels(len(ms))
    shapes = frame[["size", "shape"]].drop_duplicates().sort_values(["size", "shape"])["shape"]
    places = {shape: i for i, shape in enumerate(shapes)}
    dashes = _kinds(frame, DASHES)
    for axes, m in zip(panels, ms, strict=True):
        for bits, format, by, rows in _series(frame[frame["m"] == m]):
            x = rows["shape"].map(places)
            _curve(
                axes,
                x,
                rows["throughput"] / 1e12,
                bits,
                dashes[family(format), by],
                name(format, by),
            )
        axes.set_yscale("log")
        axes.set_xticks(list(places.values()), list(places), rotation=20, ha="right")
        axes.set_xlim(-0.5, len(places) - 0.5)
        axes.set_title(f"m = {m}")
        axes.set_xlabel("n x k")
    panels[0].set_ylabel("TFLOP/s")
    return _finish(figure, panels, "Throughput against shape", frame)


def speedup_figure(frame: pd.DataFrame) -> Figure:
    """Speed-up over 16 bits against m, with what reading and arithmetic allow; a panel a shape."""
    measured = frame[frame["speedup_16"].notna()]
    ms_of = measured.groupby("shape")["m"].transform("nunique")
    if (ms_of > 1).any():  # one m is a point and no curve
        measured = measured[ms_of > 1]
    shapes = _spread(list(measured.sort_values("size")["shape"].unique()))
    figure, panels = _panels(len(shapes))
    dashes = _kinds(measured, DASHES)
    peak = frame["throughput"].max()
    for axes, shape in zip(panels, shapes, strict=True):
        here = measured[measured["shape"] == shape]
        everything = frame[frame["shape"] == shape]
        ms = np.geomspace(1, max(frame["m"].max(), 2), 60)
        for bits, format, by, rows in _series(here):
            rows = rows.sort_values("m")
            _curve(
                axes,
                rows["m"],
                rows["speedup_16"],
                bits,
                dashes[family(format), by],
                name(format, by),
            )
        for bits in sorted(here["bits"].unique(), reverse=True):
            curve = allowed_speedup(everything, int(bits), ms, peak)
            axes.plot(ms, curve, color=COLOURS[bits], linewidth=0.9, linestyle=":", zorder=1)
        axes.axhline(1, **FLOOR)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.set_title(f"n x k = {shape}")
        axes.set_xlabel("m (dotted: reading once, or the most TFLOP/s of this run)")
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("speed-up over 16 bits")
    return _finish(figure, panels, "Speed-up over the layer that is not quantised", frame)


def allowed_speedup(frame: pd.DataFrame, bits: int, ms: np.ndarray, peak: float) -> np.ndarray:
    """The ratio of the least times, not quantised and at some bits, for each m; of one shape.

    The least time is the larger of reading weight, x and y once at the best rate that the floors
    show, and of the arithmetic at ``peak`` operations a second.
    """
    rate = (frame["bytes"] / frame["floor"]).max()
    n, k = frame["n"].iloc[0], frame["k"].iloc[0]
    activations = ms * (n + k) * DTYPES[frame["dtype"].iloc[0]].itemsize
    arithmetic = 2 * ms * n * k / peak
    small = frame[frame["bits"] == bits]["weight_bytes"].min()
    dense = frame[frame["bits"] >= 16]["weight_bytes"].min()
    least = [np.maximum((w + activations) / rate, arithmetic) for w in (dense, small)]
    return np.asarray(least[0] / least[1])


def bits_figure(frame: pd.DataFrame) -> Figure:
    """Time against bits per weight, the read floor drawn; a panel for each m.

    Of the shape that was measured at most m, the largest of several.
    """
    by_size = frame.sort_values("size").groupby("shape", sort=False)["m"].nunique()
    shape = by_size[by_size == by_size.max()].index[-1]
    frame = frame[frame["shape"] == shape]
    ms = _spread(sorted(frame["m"].unique()))
    figure, panels = _panels(len(ms))
    markers = _kinds(frame, MARKERS)
    for axes, m in zip(panels, ms, strict=True):
        here = frame[frame["m"] == m]
        kinds = here["format"].map(family)
        for (kind, by), rows in here.groupby([kinds, "by"], sort=False):
            for bits, few in rows.groupby("bits"):
                axes.plot(
                    few["bits_per_weight"],
                    few["us"],
                    color=COLOURS[bits],
                    marker=markers[kind, by],
                    markersize=8,
                    linestyle="none",
                    markerfacecolor="none",
                    markeredgewidth=1.5,
                )
            # For the legend: the marker alone, since colours repeat the axis.
            axes.plot(
                [],
                [],
                color="black",
                marker=markers[kind, by],
                linestyle="none",
                label=name(kind, by),
                markerfacecolor="none",
                markersize=8,
            )
        floor = here.sort_values("bits_per_weight")
        axes.plot(floor["bits_per_weight"], floor["floor_us"], label="read floor", **FLOOR)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlim(min(0.9, frame["bits_per_weight"].min() / 1.2), 20)
        axes.xaxis.set_major_locator(FixedLocator([1, 2, 3, 4, 6, 8, 16]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        _plain_log(axes)
        axes.set_title(f"m = {m}")
        axes.set_xlabel("bits per weight (scales included)")
    panels[0].set_ylabel("microseconds")
    return _finish(figure, panels, f"Time against bits, {shape}", frame)


def roofline_figure(frame: pd.DataFrame) -> Figure:
    """TFLOP/s against operations per byte, under the measured read rate and the best throughput."""
    figure, (axes,) = _panels(1, width=7.5)
    fills = _kinds(frame, FILLS)
    intensity = frame["operations"] / frame["bytes"]
    for bits, format, by, rows in _series(frame):
        axes.plot(
            intensity[rows.index],
            rows["throughput"] / 1e12,
            color=COLOURS[bits],
            marker=WIDTH_MARKERS[bits],
            fillstyle=fills[family(format), by],
            linestyle="none",
            markersize=7,
            markerfacecoloralt="none",
            markeredgewidth=1.2,
            label=name(format, by),
        )
    rate, peak = (frame["bytes"] / frame["floor"]).max(), frame["throughput"].max()
    x = np.geomspace(intensity.min() / 2, max(intensity.max(), peak / rate) * 2, 100)
    axes.plot(x, np.minimum(x * rate, peak) / 1e12, **FLOOR)
    axes.set_xscale("log")
    axes.set_yscale("log")
    limits = f"{rate / 1e9:.0f} GB/s read, {peak / 1e12:.3g} TFLOP/s"
    axes.set_xlabel(f"operations per byte (line: {limits}, the most of these rows)")
    axes.set_ylabel("TFLOP/s")
    return _finish(figure, [axes], "Roofline", frame)


def tokens_figure(frame: pd.DataFrame) -> Figure:
    """Tokens per second against parameters, a panel for each batch size."""
    batches = _spread(sorted(frame["batch"].unique()))
    figure, panels = _panels(len(batches))
    dashes = _kinds(frame, DASHES)
    for axes, batch in zip(panels, batches, strict=True):
        for bits, format, by, rows in _series(frame[frame["batch"] == batch]):
            rows = rows.sort_values("parameters")
            x = rows["parameters"] / 1e9
            label = name(format, by)
            _curve(axes, x, rows["tokens_per_second"], bits, dashes[family(format), by], label)
            roof = rows["batch"] / rows["floor"]
            axes.plot(
                x,
                roof,
                color=COLOURS[bits],
                linestyle=":",
                linewidth=0.9,
                marker="_",
                markersize=12,
                zorder=1,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        sizes = sorted(frame["parameters"].unique() / 1e9)
        axes.xaxis.set_major_locator(FixedLocator(sizes))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.3g}"))
        axes.set_xlim(sizes[0] / 1.5, sizes[-1] * 1.5)
        _plain_log(axes)
        axes.set_title(f"batch {batch}")
        axes.set_xlabel("parameters, 10^9 (dotted: weights read once a step)")
    panels[0].set_ylabel("tokens per second")
    return _finish(figure, panels, "Decoding", frame)


def figures(kernels: pd.DataFrame, models: pd.DataFrame) -> dict[str, Figure]:
    """Every figure that the rows have the numbers for, by the name of its file."""
    found: dict[str, Figure] = {}
    for machine, frame in _by_machine(kernels):
        found[f"throughput{machine}"] = throughput_figure(frame)
        if frame["speedup_16"].notna().any():
            found[f"speedup{machine}"] = speedup_figure(frame)
        found[f"bits{machine}"] = bits_figure(frame)
        found[f"roofline{machine}"] = roofline_figure(frame)
    for machine, frame in _by_machine(models):
        found[f"tokens{machine}"] = tokens_figure(frame)
    return found


def name(format: str, by: str) -> str:
    """Of a series."""
    return f"{format}, {by}"


def family(format: str) -> str:
    """A format without its bits, ``int-g64``, which colours tell; a dtype as it is."""
    return format if format in DTYPES else re.sub(r"\d", "", format, count=1)


def _by_machine(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Rows of one machine, threads and dtype; these as a suffix where there are more than one."""
    if frame.empty:
        return []
    groups = list(frame.groupby(["machine", "threads", "dtype"], sort=False))
    if len(groups) == 1:
        return [("", frame)]
    return [
        ("-" + "-".join(f"{machine} {threads} {dtype}".lower().split()), rows)
        for (machine, threads, dtype), rows in groups
    ]


def _panels(count: int, width: float = 4.4) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(max(6.5, width * count), 5.2), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False, sharey=count > 1)[0]
    return figure, list(axes)


def _finish(figure: Figure, panels: Sequence[Axes], title: str, frame: pd.DataFrame) -> Figure:
    entries: dict[str, Any] = {}
    for axes in panels:
        axes.grid(color=GRID)
        axes.set_axisbelow(True)
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside lower center",
        frameon=False,
        ncols=min(len(entries), max(2, int(figure.get_figwidth() // 2.5))),
    )
    machine, dtype = frame["machine"].iloc[0], frame["dtype"].iloc[0]
    threads = frame["threads"].iloc[0]
    where = f"{machine}, {dtype}" + (f", {threads} threads" if threads else "")
    figure.suptitle(f"{title} ({where})", fontsize=12)
    return figure


def _curve(axes: Axes, x: Any, y: Any, bits: int, dash: Any, label: str) -> None:
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


def _plain_log(axes: Axes) -> None:
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _series(frame: pd.DataFrame) -> list[tuple[int, str, str, pd.DataFrame]]:
    """Rows of one format by one backend, with bits and both names, the widest first."""
    groups = frame.groupby(["bits", "format", "by"], sort=False)
    found = [
        (int(bits), format, by, rows.sort_values("size" if "size" in rows else "parameters"))
        for (bits, format, by), rows in groups
    ]
    return sorted(found, key=lambda entry: (-entry[0], *entry[1:3]))


def _kinds(frame: pd.DataFrame, styles: Sequence[Any]) -> dict[tuple[str, str], Any]:
    """A style for each format, its bits apart, and who computed it.

    What is not quantised has a width of its own and takes no style from the others.
    """
    kinds = dict.fromkeys(zip(frame["format"].map(family), frame["by"], strict=True))
    plain = {kind: styles[0] for kind in kinds if kind[0] in DTYPES and styles is not MARKERS}
    others = [kind for kind in kinds if kind not in plain]
    return plain | dict(zip(others, cycle(styles), strict=False))


def _spread(values: list[Any]) -> list[Any]:
    """At most ``MOST_PANELS`` of the values, the first and the last among them."""
    if len(values) <= MOST_PANELS:
        return values
    step = (len(values) - 1) / (MOST_PANELS - 1)
    return [values[round(i * step)] for i in range(MOST_PANELS)]
