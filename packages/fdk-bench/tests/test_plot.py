"""Figures and the report, from rows made by hand; the report in a real browser."""

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET

import matplotlib.image
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from typer.testing import CliRunner

from fdk_bench import plots
from fdk_bench.cli import app
from fdk_bench.plots import MOST_SERIES, STYLES, figures
from fdk_bench.tables import accuracy_frame, kernel_frame, model_frame

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
KINDS = ("bits", "speedup", "roofline", "tokens", "accuracy")


@pytest.fixture
def rows(kernel, model, accuracy):
    kernels = [
        kernel(format, m, size=size)
        for size in (64, 128)
        for m in (1, 16)
        for format in ("bf16", "int4-g64", "int1-g64")
    ]
    failed = kernel() | {"values": None, "error": "ValueError: <no>"}
    models = [model(f, b, p) for f in ("bf16", "int4-g64") for b in (1, 4) for p in (4e9, 12e9)]
    formats = [accuracy(f"kmeans{bits}-g64", bits) for bits in (2, 3, 4)]
    return [*kernels, kernel(backend="humming"), failed, *models, *formats]


def draw(records):
    return figures(kernel_frame(records), model_frame(records), accuracy_frame(records))


def curves(axes):
    """Lines with points, by label; the floor has none."""
    lines = {line.get_label(): line for line in axes.lines}
    return {label: line for label, line in lines.items() if line.get_marker() != "None"}


def write(path, records):
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["plot", *map(str, arguments)])


def test_figures_hold_every_point(rows):
    found = draw(rows)
    assert set(found) == set(KINDS)
    left, right = found["bits"].axes
    assert [axes.get_title() for axes in (left, right)] == ["m = 1", "m = 16"]
    assert set(curves(left)) == {"torch", "fdk cpu"}  # of the largest shape
    assert list(curves(left)["fdk cpu"].get_xdata()) == [1.25, 4.25]
    assert list(curves(left)["fdk cpu"].get_ydata()) == pytest.approx([2, 2])  # microseconds
    four = curves(found["speedup"].axes[0])["fdk cpu, int4-g64"]
    assert (list(four.get_xdata()), list(four.get_ydata())) == ([1, 16], [3.5, 3.5])
    assert set(curves(found["roofline"].axes[0])) == {"16 bits", "4 bits", "1 bits"}
    tokens = curves(found["tokens"].axes[1])["int4-g64, cpu"]
    assert (list(tokens.get_xdata()), list(tokens.get_ydata())) == ([4, 12], [200, 200])
    error = curves(found["accuracy"].axes[0])["kmeans-g64"]
    assert (list(error.get_xdata()), list(error.get_ydata())) == ([2, 3, 4], [0.25, 0.125, 0.0625])


def test_styles_are_distinct_in_grey():
    assert MOST_SERIES == 6
    for what in ("marker", "linestyle", "color"):
        assert len({str(style[what]) for style in STYLES}) == 6
    greys = sorted(np.dot((0.299, 0.587, 0.114), to_rgb(style["color"])) for style in STYLES)
    assert greys[0] == 0
    assert greys[-1] > 0.6


def test_at_most_six_series_and_the_others_named(kernel):
    """The order is 16 bits, then the series with the most widths, then the fastest."""
    many = [kernel(backend=f"peer{i}", time=(9 - i) * 1e-6) for i in range(8)]
    wide = [kernel(f"int{bits}-g64", time=1e-3, bits=bits) for bits in (2, 4)]
    (axes,) = (figure := draw([*many, *wide, kernel("bf16", time=1.0)])["bits"]).axes
    assert set(curves(axes)) == {"torch", "fdk cpu", "fdk peer7", "fdk peer6", "fdk peer5"}
    note = figure.legends[0].get_title().get_text().replace("\n", " ")
    assert note == "not drawn: " + "; ".join(f"fdk peer{i}" for i in range(5))


def test_disturbed_points_are_marked(kernel, model):
    calm, late = kernel(time=1e-6, floor=1.04e-6), kernel(m=16, time=1e-6, floor=1.18e-6)
    found = draw([calm, late, kernel("bf16"), kernel("bf16", 16), model(floor=0.03)])
    label = "disturbed: over 105 % of the floor"
    first, second = found["bits"].axes
    assert label not in curves(first)
    assert list(curves(second)[label].get_ydata()) == [1]
    assert list(curves(found["speedup"].axes[0])[label].get_xdata()) == [16]
    assert label in curves(found["tokens"].axes[0])


@pytest.mark.parametrize("machine", ["A CPU", "AMD EPYC (family 26, model 2)", "x" * 50])
def test_texts_are_no_wider_than_their_figures(machine, rows):
    for figure in draw([row | {"device": machine} for row in rows]).values():
        assert figure.get_figwidth() == plots.INCHES
        renderer = FigureCanvasAgg(figure).get_renderer()
        for text in (figure._suptitle, figure.legends[0]):
            assert text.get_window_extent(renderer).width <= figure.bbox.width


def test_machines_and_contexts_get_figures_of_their_own(kernel, model):
    wide = kernel()
    wide["case"] = wide["case"] | {"dtype": "fp32"}
    found = draw([kernel(), kernel() | {"device": "B 2"}, wide])
    machines = {"-a-chip-2-bf16", "-b-2-2-bf16", "-a-chip-2-fp32"}
    assert {name.removeprefix("roofline") for name in found if "roofline" in name} == machines
    found = draw([model(), model(fused=False), model(context=2048)])
    assert list(found) == ["tokens-context-128", "tokens-context-2048"]
    assert set(curves(found["tokens-context-128"].axes[0])) == {
        "int4-g64, cpu",
        "int4-g64, cpu, not fused",
    }
    assert found["tokens-context-2048"].get_suptitle().startswith("Decoding after 2048 tokens")


def test_axes_have_plain_numbers(rows):
    for name, figure in draw(rows).items():
        if name != "speedup":
            assert figure.axes[0].yaxis.get_major_formatter()(0.5, 0) == "0.5"


def test_a_figure_drawn_again_is_the_same(rows, tmp_path):
    first, second = (plots.save(draw(rows)["bits"], tmp_path / name) for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_outputs(rows, tmp_path):
    file = write(tmp_path / "rows.jsonl", rows)
    done = run(file, "--out", tmp_path / "plots", "--json")
    assert done.exit_code == 0, done.output
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {f"{kind}.{end}" for kind in KINDS for end in ("png", "svg")} | {"report.html"}
    assert {path.rsplit("/", 1)[1] for path in json.loads(done.stdout)} == names
    for kind in KINDS:
        image = matplotlib.image.imread(tmp_path / "plots" / f"{kind}.png")
        assert image.shape[1] == plots.INCHES * plots.DPI
        assert image.std() > 0.02
        ET.parse(tmp_path / "plots" / f"{kind}.svg")
    assert list(tmp_path.glob("*.png")) == []


def test_figures_are_written_below_out_by_default(rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    assert run(write(tmp_path / "docs" / "rows.jsonl", rows), "--no-html").exit_code == 0
    (folder,) = (tmp_path / "out").iterdir()
    assert folder.name.startswith("plot-")
    assert (folder / "bits.png").is_file()
    assert not (folder / "report.html").exists()
    assert [path.name for path in (tmp_path / "docs").iterdir()] == ["rows.jsonl"]


def test_include(rows, tmp_path):
    file = write(tmp_path / "rows.jsonl", rows)
    assert run(file, "--include", "^m1-n64-.*humming", "--out", tmp_path / "out").exit_code == 0
    text = "".join(ET.parse(tmp_path / "out" / "bits.svg").getroot().itertext())
    assert "humming" in text
    assert "fdk cpu" not in text
    assert (tmp_path / "out" / "tokens.png").is_file()  # only kernels are left out


def test_report_refers_to_no_other_file(rows, tmp_path):
    changes = {"device": "a chip & more", "command": "fdk-bench kernels -k '<64>'"}
    file = write(tmp_path / "rows.jsonl", [row | changes for row in rows])
    assert run(file, "--out", tmp_path).exit_code == 0
    page = (tmp_path / "report.html").read_text()
    assert re.findall(r'(?:src|href)="([^"]{0,22})', page) == ["data:image/png;base64,"] * 5
    assert "fdk-bench kernels -k &#x27;&lt;64&gt;&#x27;" in page
    assert "ValueError: &lt;no&gt;" in page
    assert page.count("<td>128 x 128</td>") == 6  # two m, three formats
    assert page.count("<td>a chip &amp; more</td>") == 13 + 8


def test_report_in_a_browser(rows, tmp_path):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    assert run(write(tmp_path / "rows.jsonl", rows), "--out", tmp_path).exit_code == 0
    picture = tmp_path / "report.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,3000"]
    page = (tmp_path / "report.html").as_uri()
    command = [browser, *options, f"--screenshot={picture}", page]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    seen = matplotlib.image.imread(picture)
    assert seen.shape[1] == 1200
    assert (np.ptp(seen[..., :3], axis=2) > 0.2).sum() > 1000  # colours, which figures alone have


def test_nothing_measured(kernel, tmp_path):
    failed = kernel() | {"values": None, "error": "no"}
    done = run(write(tmp_path / "rows.jsonl", [failed]), "--out", tmp_path / "plots")
    assert done.exit_code == 1
    assert "nothing to draw" in done.stderr
    assert not (tmp_path / "plots").exists()


def test_bad_usage(tmp_path, tmp_path_factory, refused, kernel):
    refused(run, tmp_path / "absent.jsonl", said="absent.jsonl")
    folder = tmp_path_factory.mktemp("rows")
    refused(run, folder, said=f"{folder}: wanted a UTF-8 text file: ")
    bad = folder / "bad.jsonl"
    bad.write_text("no\n")
    refused(run, bad, said="bad.jsonl:1")
    refused(run, write(bad, [kernel() | {"case": {}}]), said="a row is not whole: ")
    refused(run, write(bad, [kernel()]), "--include", "(", said="wanted a regular expression")


def test_no_folder_for_figures(no_folder, tmp_path, kernel):
    done = run(write(tmp_path / "rows.jsonl", [kernel()]), "--out", no_folder)
    assert done.exit_code == 2
    assert f"wanted a folder that can be written, got {no_folder}: " in done.stderr
