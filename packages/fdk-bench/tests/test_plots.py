"""The plot and the tables, drawn from rows made by hand."""

import pytest
from matplotlib.image import imread
from rich.console import Console

from fdk_bench.accuracy_cases import (
    AccuracyCase,
    AccuracyValues,
    Comparison,
    LayerCase,
    LayerValues,
)
from fdk_bench.accuracy_tables import (
    accuracy_markdown,
    accuracy_table,
    comparison_lines,
    layer_table,
)
from fdk_bench.plots import plot_accuracy
from fdk_bench.records import Row


def row(format, bits, error, cosine=0.95):
    values = AccuracyValues(
        layers=2,
        weights=1_000_000,
        bits_per_weight=bits,
        nbytes=1000,
        file_bytes=1_234_567,
        weight_error=error,
        output_error=error / 2,
        cosine_mean=cosine,
        cosine_min=cosine - 0.1,
        seconds=1.26,
        backends="reference",
    )
    return Row(AccuracyCase(format, "tiny", "auto", "", 32), values)


ROWS = [
    row("bf16", 16.0, 0.0017, 1.0),
    row("kmeans4-g64", 4.25, 0.09),
    row("kmeans2-g64", 2.25, 0.36, 0.5),
    row("crd_normal4-g64", 4.25, 0.08, 0.94),
    Row(AccuracyCase("affine4-g64", "tiny", "auto", "", 32), error="no"),
]


def test_plot_names_series_and_formats(tmp_path):
    png, svg = plot_accuracy(ROWS, tmp_path / "accuracy")
    assert (png.name, svg.name) == ("accuracy.png", "accuracy.svg")
    image = imread(png)
    assert image.shape[1] > 1000
    assert image[..., :3].std() > 0.05  # something is drawn
    text = svg.read_text()
    for name in ("kmeans-g64", "crd_normal4-g64", "bf16 weights", "4-bit formats", "tiny"):
        assert name in text
    assert "affine4" not in text
    # Tick labels are written from the bottom up, and the smallest loss is at the top.
    assert text.index("crd_normal4-g64") < text.index("kmeans4-g64")


def test_formats_of_one_width_are_told_apart(tmp_path):
    lone = [row(f"{name}-g64", 4.25, 0.1) for name in ("kmeans4", "nf4", "fp4")]
    _, svg = plot_accuracy(lone, tmp_path / "few")
    # In the legend, and in the ranking with the bits.
    assert [svg.read_text().count(f">{r.case.format}<") for r in lone] == [1, 1, 1]
    assert "formats of one width" not in svg.read_text()
    lone = [row(f"kmeans4-g{16 << i}", 4.25, 0.1) for i in range(9)]
    _, svg = plot_accuracy(lone, tmp_path / "many")
    assert svg.read_text().count("formats of one width") == 1


def test_a_figure_drawn_again_is_the_same(tmp_path):
    first, second = (plot_accuracy(ROWS, tmp_path / name) for name in ("first", "second"))
    assert [a.read_bytes() for a in first] == [b.read_bytes() for b in second]


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS[1:2]], ids=["baseline", "one"])
def test_plot_of_one_row(rows, tmp_path):
    png, _ = plot_accuracy(rows, tmp_path / "accuracy")
    assert png.stat().st_size > 10_000


def test_plot_of_nothing(tmp_path):
    with pytest.raises(ValueError, match="at least one measured row, got none"):
        plot_accuracy(ROWS[-1:], tmp_path / "accuracy")


def test_markdown():
    lines = accuracy_markdown(ROWS).splitlines()
    assert lines[3] == "| kmeans4-g64 | 4.250 | 1.23 | 0.0900 | 0.0450 | 0.95000 | 0.85000 | 1.3 |"
    assert len(lines) == 9  # two of heading, five formats, an empty one, the caption
    assert lines[6].startswith("| affine4-g64 |")
    assert "failed" in lines[6]
    assert "1.00 million weights" in lines[-1]


def printed(table, width):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_cell_is_cut(width):
    text = printed(accuracy_table(ROWS, width), width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert all(cell in text for cell in ("crd_normal4-g64", "4.250", "0.95000", "failed"))
    told = " ".join(text.split())
    assert ("for want of width without file MB, min." in told) == (width == 60)
    assert ("0.85000" in text) == (width > 60)


def test_layers_on_a_narrow_terminal():
    values = LayerValues(64, 64, 4.25, 0.09, 0.0123)
    names = [f"kmeans4-g{size}" for size in (16, 32, 64, 128, 256)]
    rows = [Row(LayerCase(name, "tiny", "encoder.layer.0.output"), values) for name in names]
    text = printed(layer_table(rows, 60), 60)
    assert "…" not in text
    assert text.count("0.0123") == 2
    told = " ".join(text.split())
    assert told.endswith("for want of width without kmeans4-g256, kmeans4-g128, kmeans4-g64")
    assert "want of width" not in printed(layer_table(rows), 120)


def test_comparison_lines():
    won = Comparison(4, "kmeans4-g64", 0.09, "int4-g64", 0.12)
    lost = Comparison(3, "kmeans3-g64", 0.21, "uniform3-g64", 0.2)
    first, *rest = comparison_lines([won, lost])
    assert "does NOT beat it with kmeans3-g64" in first
    assert rest[0] == "  4 bits: kmeans4-g64 0.0900, int4-g64 0.1200 (-25.0 %)"
    assert rest[1] == "  3 bits: kmeans3-g64 0.2100, uniform3-g64 0.2000 (+5.0 %)"
    assert "beats it in every pair" in comparison_lines([won])[0]
    assert "was not compared" in comparison_lines([])[0]
