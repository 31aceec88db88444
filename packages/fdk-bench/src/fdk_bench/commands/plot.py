"""``fdk-bench plot``: figures and a report from rows of any benchmark."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fdk_bench.commands.common import (
    EXIT_FAILED_ROWS,
    check_output,
    checked,
    output_folder,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACCURACY = "Error against bits per weight"


def plot(
    files: Annotated[
        list[Path], typer.Argument(help="JSONL files of any of the other commands.", exists=True)
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "--output",
            callback=check_output,
            help="Folder. Default: that of the first file.",
        ),
    ] = None,
    html: Annotated[bool, typer.Option("--html/--no-html", help="Write report.html too.")] = True,
    title: Annotated[str, typer.Option(help="Of the report.")] = "fdk-bench",
    json_lines: Annotated[
        bool, typer.Option("--json", help="Print the files written as JSON.")
    ] = False,
) -> None:
    """Draw what the rows hold: PNG and SVG, and a report that is one HTML file.

    Kernels: throughput against shape; speed-up against m with the most that the machine allows,
    the measured time of 16 bits over the read floor, or over the operations at the most TFLOP/s;
    time against bits with the read floor; roofline. Models: tokens/s against parameters. Accuracy:
    error against bits. A case that is there more than once counts with its last row.

    Exit code: 0, 1 where no row was measured, 2 bad usage.
    """
    import json

    from fdk_bench.charts import figures
    from fdk_bench.report import run_item, write_report
    from fdk_bench.results import kernel_frame, model_frame, read_records

    def check(record: dict[str, Any]) -> None:
        _check(record)
        if html:
            run_item(record)

    records = checked(lambda: list(read_records(files, check)))
    kernels, models = kernel_frame(records), model_frame(records)
    folder = output_folder(out or files[0].parent, "plot")
    written: list[Path] = []
    pictures: dict[str, Path] = {}
    for name, figure in figures(kernels, models).items():
        written += _save(figure, folder / name)
        pictures[figure.get_suptitle()] = folder / f"{name}.png"
    if accuracy := _plot_accuracy(records, folder):
        written += accuracy
        pictures[ACCURACY] = folder / "accuracy.png"
    if not written:
        typer.echo("no row of these files was measured: nothing to draw", err=True)
        raise typer.Exit(EXIT_FAILED_ROWS)
    if html:
        written.append(folder / "report.html")
        write_report(written[-1], title, pictures, kernels, models, records)
    paths = [str(path) for path in written]
    typer.echo(json.dumps(paths) if json_lines else "\n".join(paths))


def _check(record: dict[str, Any]) -> None:
    """Fails for a row that cannot be drawn."""
    from fdk_bench.rendering import KINDS
    from fdk_bench.results import KERNELS, kernel_line, model_line

    if record["values"] is None:
        return
    if record["benchmark"] in KERNELS:
        kernel_line(record)
    elif record["benchmark"] == "models":
        model_line(record)
    elif record["benchmark"] == "accuracy":
        KINDS["accuracy"].load(record)


def _save(figure: "Figure", path: Path) -> list[Path]:
    from fdk_bench.chart_parts import save_figure

    paths = [path.with_name(path.name + suffix) for suffix in (".png", ".svg")]
    for target in paths:
        save_figure(figure, target)
    return paths


def _plot_accuracy(records: list[dict[str, Any]], folder: Path) -> list[Path]:
    from fdk_bench.plots import plot_accuracy
    from fdk_bench.rendering import KINDS

    rows = [
        KINDS["accuracy"].load(record)
        for record in records
        if record["benchmark"] == "accuracy" and record["values"] is not None
    ]
    return plot_accuracy(rows, folder / "accuracy") if rows else []
