"""Figures of kernels and models, readable in print and for colour-blind readers."""

import re

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from fdk_bench.chart_parts import (
    COLOURS,
    DASHES,
    FILLS,
    FLOOR,
    LIMIT,
    MARKERS,
    WIDTH_MARKERS,
    curve_of,
    family,
    finish,
    kinds_of,
    name,
    panels_of,
    plain_log,
    series_of,
    spread_of,
)


def throughput_figure(frame: pd.DataFrame) -> Figure:
    """TFLOP/s against the shape, a panel for each m."""
    ms = spread_of(sorted(frame["m"].unique()))
    figure, panels = panels_of(len(ms))
    shapes = frame[["size", "shape"]].drop_duplicates().sort_values(["size", "shape"])["shape"]
    places = {shape: i for i, shape in enumerate(shapes)}
    dashes = kinds_of(frame, DASHES)
    for axes, m in zip(panels, ms, strict=True):
        for bits, format, by, rows in series_of(frame[frame["m"] == m]):
            x = rows["shape"].map(places)
            curve_of(
                axes,
                x,
                rows["throughput"] / 1e12,
                bits,
                dashes[family(format), by],
                name(format, by),
            )
        axes.set_yscale("log")
        plain_log(axes)
        axes.set_xticks(list(places.values()), list(places), rotation=20, ha="right")
        axes.set_xlim(-0.5, len(places) - 0.5)
        axes.set_title(f"m = {m}")
        axes.set_xlabel("n x k")
    panels[0].set_ylabel("TFLOP/s")
    return finish(figure, panels, "Throughput against shape", frame)


def speedup_figure(frame: pd.DataFrame) -> Figure:
    """Speed-up over 16 bits against m, with what reading and arithmetic allow; a panel a shape."""
    measured = frame[frame["speedup_16"].notna()]
    ms_of = measured.groupby("shape")["m"].transform("nunique")
    if (ms_of > 1).any():  # one m is a point and no curve
        measured = measured[ms_of > 1]
    shapes = spread_of(list(measured.sort_values("size")["shape"].unique()))
    figure, panels = panels_of(len(shapes))
    dashes = kinds_of(measured, DASHES)
    peak = frame["throughput"].max()
    drawn = "dotted" if (ms_of > 1).any() else "ticks"
    for axes, shape in zip(panels, shapes, strict=True):
        here = measured[measured["shape"] == shape]
        for bits, format, by, rows in series_of(here):
            rows = rows.sort_values("m")
            curve_of(
                axes,
                rows["m"],
                rows["speedup_16"],
                bits,
                dashes[family(format), by],
                name(format, by),
            )
        for bits, rows in here.groupby("bits"):
            limit = allowed_speedup(rows, peak)
            axes.plot(limit.index, limit, color=COLOURS[bits], **LIMIT)
        axes.axhline(1, **FLOOR)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.set_title(f"n x k = {shape}")
        axes.set_xlabel(f"m ({drawn}: by the read floor and the most TFLOP/s)")
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("speed-up over 16 bits")
    return finish(figure, panels, "Speed-up over the layer that is not quantised", frame)


def allowed_speedup(rows: pd.DataFrame, peak: float) -> pd.Series:
    """The most speed-up that the machine allows at each measured m; of one shape and width.

    The measured time of 16 bits that a row's speed-up is over, divided by the least time of the
    row: the larger of its read floor and of the arithmetic at ``peak`` operations a second. Of
    several formats the most. A speed-up above it is a time below the read floor.
    """
    least = np.maximum(rows["floor"], rows["operations"] / peak)
    allowed: pd.Series = rows["speedup_16"] * rows["time"] / least
    return allowed.groupby(rows["m"]).max()


def bits_figure(frame: pd.DataFrame) -> Figure:
    """Time against bits per weight, the read floor drawn; a panel for each m.

    Of the shape that was measured at most m, the largest of several.
    """
    by_size = frame.sort_values("size").groupby("shape", sort=False)["m"].nunique()
    shape = by_size[by_size == by_size.max()].index[-1]
    frame = frame[frame["shape"] == shape]
    ms = spread_of(sorted(frame["m"].unique()))
    figure, panels = panels_of(len(ms))
    markers = kinds_of(frame, MARKERS)
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
        plain_log(axes)
        axes.set_title(f"m = {m}")
        axes.set_xlabel("bits per weight (scales included)")
    panels[0].set_ylabel("microseconds")
    return finish(figure, panels, f"Time against bits, {shape}", frame)


def roofline_figure(frame: pd.DataFrame) -> Figure:
    """TFLOP/s against operations per byte, under the measured read rate and the best throughput."""
    figure, (axes,) = panels_of(1, width=7.5)
    fills = kinds_of(frame, FILLS)
    intensity = frame["operations"] / frame["bytes"]
    for bits, format, by, rows in series_of(frame):
        fill, other = fills[family(format), by]
        axes.plot(
            intensity[rows.index],
            rows["throughput"] / 1e12,
            color=COLOURS[bits],
            marker=WIDTH_MARKERS[bits],
            fillstyle=fill,
            linestyle="none",
            markersize=7,
            markerfacecoloralt=other,
            markeredgewidth=1.2,
            label=name(format, by),
        )
    rate, peak = (frame["bytes"] / frame["floor"]).max(), frame["throughput"].max()
    x = np.geomspace(intensity.min() / 2, max(intensity.max(), peak / rate) * 2, 100)
    axes.plot(x, np.minimum(x * rate, peak) / 1e12, **FLOOR)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.10g}"))
    plain_log(axes)
    limits = f"{rate / 1e9:.0f} GB/s read, {peak / 1e12:.3g} TFLOP/s"
    axes.set_xlabel(f"operations per byte (line: {limits}, the most of these rows)")
    axes.set_ylabel("TFLOP/s")
    return finish(figure, [axes], "Roofline", frame)


def tokens_figure(frame: pd.DataFrame, title: str = "Decoding") -> Figure:
    """Tokens per second against parameters, a panel for each batch size."""
    batches = spread_of(sorted(frame["batch"].unique()))
    figure, panels = panels_of(len(batches))
    dashes = kinds_of(frame, DASHES)
    for axes, batch in zip(panels, batches, strict=True):
        for bits, format, by, rows in series_of(frame[frame["batch"] == batch]):
            rows = rows.sort_values("parameters")
            x = rows["parameters"] / 1e9
            label = name(format, by)
            curve_of(axes, x, rows["tokens_per_second"], bits, dashes[family(format), by], label)
            roof = rows["batch"] / rows["floor"]
            axes.plot(x, roof, color=COLOURS[bits], **LIMIT)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        sizes = sorted(frame["parameters"].unique() / 1e9)
        axes.xaxis.set_major_locator(FixedLocator(sizes))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.3g}"))
        axes.set_xlim(sizes[0] / 1.5, sizes[-1] * 1.5)
        plain_log(axes)
        axes.set_title(f"batch {batch}")
        drawn = "ticks" if len(sizes) == 1 else "dotted"  # one point makes no line
        axes.set_xlabel(f"parameters, 10^9 ({drawn}: weights read once a step)")
    panels[0].set_ylabel("tokens per second")
    return finish(figure, panels, title, frame)


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
        contexts = frame["context"].unique()
        for context in contexts:
            behind = "" if len(contexts) == 1 else f"-behind-{context}"
            rows = frame[frame["context"] == context]
            title = f"Decoding behind {context} tokens" if behind else "Decoding"
            found[f"tokens{machine}{behind}"] = tokens_figure(rows, title)
    return found


def _by_machine(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Rows of one machine, threads and dtype; these as a suffix where there are more than one."""
    if frame.empty:
        return []
    groups = list(frame.groupby(["machine", "threads", "dtype"], sort=False))
    if len(groups) == 1:
        return [("", frame)]
    return [
        ("-" + re.sub("[^a-z0-9]+", "-", f"{machine} {threads or ''} {dtype}".lower()), rows)
        for (machine, threads, dtype), rows in groups
    ]
