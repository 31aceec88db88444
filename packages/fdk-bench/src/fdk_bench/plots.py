"""Figures of rows, and a report in one HTML file.

A figure has at most six series, each with a distinct colour, marker and dash, so that it is
readable in grey; letters are sized for a width of 800 pixels. Series that are left out are named
below the figure.
"""

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
import pandas as pd  # type: ignore[import-untyped]
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from fdk_bench.cases import DTYPES
from fdk_bench.rows import run_text, thread_count
from fdk_bench.tables import MOST_SHARE

# Okabe and Ito's colours, which colour-blind readers tell apart, from dark to light.
STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#000000", "marker": "o", "linestyle": "-"},
    {"color": "#0072B2", "marker": "s", "linestyle": "--"},
    {"color": "#D55E00", "marker": "^", "linestyle": "-."},
    {"color": "#009E73", "marker": "D", "linestyle": ":"},
    {"color": "#CC79A7", "marker": "v", "linestyle": (0, (5, 1, 1, 1))},
    {"color": "#E69F00", "marker": "P", "linestyle": (0, (1, 1))},
)
MOST_SERIES = len(STYLES)
FLOOR: dict[str, Any] = {"color": "#777777", "linewidth": 1.2, "label": "read floor"}
INCHES, DPI = 8.0, 160  # 800 pixels wide, letters of 10 points are 14 pixels high
MOST_PANELS = 3
BIT_TICKS = (1, 2, 3, 4, 6, 8, 16)
SMALLEST_LOSS = 1e-7  # resolution of a cosine computed in float32
STYLE_SHEET = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h2 { font-size: 1.15rem; margin-top: 2rem } img { max-width: 100%; width: 800px }
table { border-collapse: collapse; font-size: 13px } .table { overflow-x: auto }
th, td { padding: 0.2rem 0.6rem; text-align: right; border-bottom: 1px solid #ddd }
"""


def figures(
    kernels: pd.DataFrame, models: pd.DataFrame, accuracy: pd.DataFrame
) -> dict[str, Figure]:
    """Draw every figure that the rows have the numbers for, by the name of its file.

    Machines, thread counts, dtypes and prompt lengths get separate figures.

    Args:
        kernels, models, accuracy: frames of ``tables``; empty where there are no rows.
    """
    found: dict[str, Figure] = {}
    for suffix, frame in _by_machine(kernels):
        found[f"bits{suffix}"] = bits_figure(frame)
        if frame["speedup_16"].notna().any():
            found[f"speedup{suffix}"] = speedup_figure(frame)
        found[f"roofline{suffix}"] = roofline_figure(frame)
    for suffix, frame in _by_machine(models):
        for context, rows in frame.groupby("context"):
            several = frame["context"].nunique() > 1
            found[f"tokens{suffix}" + (f"-context-{context}" if several else "")] = tokens_figure(
                rows
            )
    for model, frame in accuracy.groupby("model") if len(accuracy) else ():
        several = accuracy["model"].nunique() > 1
        found["accuracy" + (f"-{_slug(model)}" if several else "")] = accuracy_figure(frame)
    return found


def bits_figure(frame: pd.DataFrame) -> Figure:
    """Draw time against bits per weight and the read floor, a panel for each m.

    Of several shapes the one measured at the most m is drawn, then the largest.
    """
    ms_of = frame.sort_values("size").groupby("shape", sort=False)["m"].nunique()
    shape = ms_of[ms_of == ms_of.max()].index[-1]
    frame = frame[frame["shape"] == shape]
    frame = frame.assign(series=_by_and_family(frame))
    frame = frame.sort_values("bits_per_weight", kind="stable")
    names, dropped = most_measured(frame, "bits", MOST_SERIES - 1)  # the floor is the sixth
    figure, panels = _panels(_spread(sorted(frame["m"].unique())), "m = {}")
    for axes, m in panels:
        here = frame[frame["m"] == m]
        _draw_series(axes, here, names, here["bits_per_weight"], here["time"] * 1e6)
        _mark_disturbed(axes, here, here["bits_per_weight"], here["time"] * 1e6)
        axes.plot(here["bits_per_weight"], here["floor"] * 1e6, **FLOOR)
        _bit_axis(axes)
        _log_axis(axes)
    panels[0][0].set_ylabel("microseconds")
    return _finish(figure, f"Time of a {shape} layer against bits", frame, dropped)


def speedup_figure(frame: pd.DataFrame) -> Figure:
    """Draw the speed-up over 16 bits against m, a panel for each shape."""
    frame = frame[frame["speedup_16"].notna()].sort_values(["size", "m"])
    ms_of = frame.groupby("shape")["m"].transform("nunique")
    frame = frame[ms_of > 1] if (ms_of > 1).any() else frame  # one m makes no curve
    frame = frame.assign(series=frame["by"] + ", " + frame["format"])
    names, dropped = most_measured(frame, "m", MOST_SERIES)
    figure, panels = _panels(_spread(list(frame["shape"].unique())), "{}")
    for axes, shape in panels:
        here = frame[frame["shape"] == shape]
        _draw_series(axes, here, names, here["m"], here["speedup_16"])
        _mark_disturbed(axes, here, here["m"], here["speedup_16"])
        axes.axhline(1, color=FLOOR["color"], linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.set_xlabel("m")
        axes.set_ylim(bottom=0)
    panels[0][0].set_ylabel("times as fast as 16 bits")
    return _finish(figure, "Speed-up over 16 bits", frame, dropped)


def roofline_figure(frame: pd.DataFrame) -> Figure:
    """Draw TFLOP/s against operations per byte, below the measured read rate and best rate."""
    frame = frame.assign(
        series=[f"{bits} bits" for bits in frame["bits"]],
        intensity=frame["operations"] / frame["bytes"],
    ).sort_values("bits", ascending=False)
    names, dropped = most_measured(frame, "intensity", MOST_SERIES)
    figure, ((axes, _),) = _panels([""], "{}")
    _draw_series(
        axes, frame, names, frame["intensity"], frame["throughput"] / 1e12, linestyle="none"
    )
    rate, peak = (frame["bytes"] / frame["floor"]).max(), frame["throughput"].max()
    most = max(frame["intensity"].max(), peak / rate) * 2
    x = np.geomspace(frame["intensity"].min() / 2, most, 100)
    axes.plot(x, np.minimum(x * rate, peak) / 1e12, color=FLOOR["color"])
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.10g}"))
    _log_axis(axes)
    limits = f"{rate / 1e9:.0f} GB/s read, {peak / 1e12:.3g} TFLOP/s"
    axes.set_xlabel(f"operations per byte (line: {limits})")
    axes.set_ylabel("TFLOP/s")
    return _finish(figure, "Roofline", frame, dropped)


def tokens_figure(frame: pd.DataFrame) -> Figure:
    """Draw tokens per second against parameters, a panel for each batch size."""
    frame = frame.assign(series=frame["format"] + ", " + frame["by"]).sort_values("parameters")
    names, dropped = most_measured(frame, "parameters", MOST_SERIES)
    figure, panels = _panels(_spread(sorted(frame["batch"].unique())), "batch {}")
    for axes, batch in panels:
        here = frame[frame["batch"] == batch]
        _draw_series(axes, here, names, here["parameters"] / 1e9, here["tokens_per_second"])
        _mark_disturbed(axes, here, here["parameters"] / 1e9, here["tokens_per_second"])
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(sorted(frame["parameters"].unique() / 1e9)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.3g}"))
        _log_axis(axes)
        axes.set_xlabel("parameters, 10^9")
    panels[0][0].set_ylabel("tokens per second")
    title = f"Decoding after {frame['context'].iloc[0]} tokens"
    return _finish(figure, title, frame, dropped)


def accuracy_figure(frame: pd.DataFrame) -> Figure:
    """Draw weight error and loss of the output (1 - cosine) against bits per weight."""
    baseline = frame["format"].isin(list(DTYPES))
    shown = frame[~baseline].sort_values("bits_per_weight")
    # Formats that differ only in their width are a series: kmeans3-g64, kmeans4-g64.
    families = [re.sub(r"^([a-z_]+)\d(?=-)", r"\1", label) for label in shown["label"]]
    pairs = zip(families, shown["label"], strict=True)
    shown = shown.assign(series=[f if families.count(f) > 1 else label for f, label in pairs])
    names, dropped = most_measured(shown, "bits_per_weight", MOST_SERIES)
    figure, panels = _panels(["weight error (relative)", "loss of the output (1 - cosine)"], "{}")
    values = shown["weight_error"], (1 - shown["cosine_mean"]).clip(lower=SMALLEST_LOSS)
    for (axes, _), error in zip(panels, values, strict=True):
        _draw_series(axes, shown, names, shown["bits_per_weight"], error)
        _bit_axis(axes)
        _log_axis(axes)
    title = f"{frame['model'].iloc[0]}: error against bits per weight"
    return _finish(figure, title, frame, dropped)


def most_measured(frame: pd.DataFrame, x: str, most: int) -> tuple[list[str], list[str]]:
    """Choose at most ``most`` series: 16 bits first, then those with the most values of ``x``.

    Of series with as many values the fastest are chosen, where the frame has times.

    Returns:
        The names that are drawn, and those that are not, in the order of the frame.
    """
    groups = frame.groupby("series", sort=False)
    rank = pd.DataFrame({"is_coded": ~groups["format"].first().isin(list(DTYPES))})
    rank["missing"] = -groups[x].nunique()
    rank["time"] = groups["time"].median() if "time" in frame else 0.0
    chosen = set(rank.sort_values(list(rank.columns), kind="stable").index[:most])
    return [n for n in rank.index if n in chosen], [n for n in rank.index if n not in chosen]


def save(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PNG and SVG; the same figure twice gives the same bytes."""
    paths = [path.with_name(path.name + suffix) for suffix in (".png", ".svg")]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fdk"}):
        figure.savefig(paths[0], dpi=DPI)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def write_report(
    path: Path,
    pictures: Mapping[str, Path],
    tables: Mapping[str, str],
    records: Sequence[Mapping[str, Any]],
) -> None:
    """Write one HTML file with figures, tables and the runs that the rows are from.

    Args:
        path: path of the file.
        pictures: PNG files by caption; they are inlined.
        tables: HTML by caption.
        records: all rows, those that failed included.
    """
    parts = ["<h1>fdk-bench</h1>"]
    for caption, picture in pictures.items():
        data = base64.b64encode(picture.read_bytes()).decode("ascii")
        image = f'<img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
        parts.append(f"<h2>{escape(caption)}</h2>\n{image}")
    for caption, html in tables.items():
        parts.append(f'<h2>{escape(caption)}</h2>\n<div class="table">{html}</div>')
    if failed := [r for r in records if r["values"] is None]:
        texts = (f"{' '.join(map(str, r['case'].values()))}: {r['error']}" for r in failed)
        parts.append(f"<h2>Failed</h2>{_list(texts)}")
    runs = (f"{record['command']}: {run_text(record)}" for record in records)
    parts.append(f"<h2>Runs</h2>{_list(dict.fromkeys(runs))}")
    head = f'<meta charset="utf-8"><title>fdk-bench</title><style>{STYLE_SHEET}</style>'
    page = f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{"".join(parts)}</body>'
    path.write_text(f"{page}</html>\n", encoding="utf-8")


def _list(texts: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"


def _by_machine(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Split rows by machine, threads and dtype; with a suffix for names where there are several."""
    if frame.empty:
        return []
    groups = list(frame.groupby(["machine", "threads", "dtype"], sort=False))
    if len(groups) == 1:
        return [("", frame)]
    return [
        (f"-{_slug(f'{machine} {threads or str()} {dtype}')}", rows)
        for (machine, threads, dtype), rows in groups
    ]


def _slug(text: str) -> str:
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-")


def _by_and_family(frame: pd.DataFrame) -> list[str]:
    """Name who computed each row, and its format without the bits where there are several."""
    families = [re.sub(r"[0-9]", "", format, count=1) for format in frame["format"]]
    several = pd.Series(families).groupby(frame["by"].to_numpy()).nunique() > 1
    pairs = zip(frame["by"], families, strict=True)
    return [f"{by}, {family}" if several[by] else by for by, family in pairs]


def _spread(values: list[Any]) -> list[Any]:
    """Choose at most ``MOST_PANELS`` values, the first and the last among them."""
    if len(values) <= MOST_PANELS:
        return values
    step = (len(values) - 1) / (MOST_PANELS - 1)
    return [values[round(i * step)] for i in range(MOST_PANELS)]


def _panels(values: Sequence[Any], title: str) -> tuple[Figure, list[tuple[Axes, Any]]]:
    """Make a figure with a panel for each value."""
    figure = Figure(figsize=(INCHES, 4.6), layout="constrained")
    panels = figure.subplots(1, len(values), squeeze=False)[0]
    for axes, value in zip(panels, values, strict=True):
        axes.set_title(title.format(value), fontsize=10)
    return figure, list(zip(panels, values, strict=True))


def _draw_series(
    axes: Axes,
    frame: pd.DataFrame,
    names: Sequence[str],
    x: pd.Series,
    y: pd.Series,
    **changes: Any,
) -> None:
    """Draw the named series of a frame, each in its style, with ``changes`` to all."""
    for name, style in zip(names, STYLES, strict=False):
        rows = (frame["series"] == name).to_numpy()
        if rows.any():
            options = {**style, "label": name, "markersize": 6, "linewidth": 1.3, **changes}
            axes.plot(x[rows], y[rows], **options)[0].set_markerfacecolor("none")


def _mark_disturbed(axes: Axes, frame: pd.DataFrame, x: pd.Series, y: pd.Series) -> None:
    """Mark times well below the read floor: the machine changed its speed during the run."""
    late = frame["share"] > MOST_SHARE
    if late.any():
        label = f"disturbed: over {100 * MOST_SHARE:.0f} % of the floor"
        axes.plot(x[late], y[late], "x", color="black", markersize=11, label=label)


def _bit_axis(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(BIT_TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.set_xlabel("bits per weight")


def _log_axis(axes: Axes) -> None:
    """Scale y logarithmically, with plain numbers instead of powers of ten."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.10g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _finish(figure: Figure, title: str, frame: pd.DataFrame, dropped: Sequence[str]) -> Figure:
    """Add grid, title, one legend for all panels, and a note of what is not drawn."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        axes.grid(color="#DDDDDD")
        axes.set_axisbelow(True)
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    columns = max(1, min(3, int(INCHES * 12) // max(map(len, entries), default=1)))
    note = fill(f"not drawn: {'; '.join(dropped)}", 110) if dropped else None
    legend = figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside lower center",
        frameon=False,
        ncols=columns,
        fontsize=9,
        title=note,
        title_fontsize=8,
    )
    legend.get_title().set_multialignment("center")
    if "machine" in frame:
        first = frame.iloc[0]
        where = f"{first['machine']}, {first['dtype']}"
        title += f"\n{where}" + (f", {thread_count(first['threads'])}" if first["threads"] else "")
    figure.suptitle(title, fontsize=11)
    return figure
