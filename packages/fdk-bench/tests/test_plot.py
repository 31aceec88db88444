"""Figures and the report from rows made by hand; the report in a real browser."""

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET

import matplotlib.image
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from typer.testing import CliRunner

from fdk_bench.chart_parts import DASHES, FILLS, MARKERS, kinds_of
from fdk_bench.charts import allowed_speedup, figures, name
from fdk_bench.cli import app
from fdk_bench.report import number, png_width
from fdk_bench.results import ResultsError, kernel_frame, model_frame, read_records

FACTS = {
    "started": "2026-11-20T00:00:00+00:00",
    "command": "fdk-bench kernels -k '<64>'",
    "commit": None,
    "device": "a chip & more",
    "threads": 2,
    "platform": "p",
    "versions": {"torch": "2"},
    "environment": {},
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def kernel(format="int4-g64", m=1, size=64, time=2e-6, by="auto", benchmark="kernels", **values):
    weight = size * size * (2 if format == "bf16" else 0.53125)
    nbytes = weight + m * 4 * size
    return FACTS | {
        "benchmark": benchmark,
        "error": None,
        "case": {
            "m": m,
            "n": size,
            "k": size,
            "format": format,
            "dtype": "bf16",
            "device": "cpu",
            "backend": by,
        },
        "values": {
            "backend": by,
            "bits_per_weight": 16 if format == "bf16" else 4.25,
            "weight_bytes": weight,
            "bytes": nbytes,
            "operations": 2 * m * size * size,
            "time": time,
            "spread": 0.1,
            "bandwidth": nbytes / time,
            "throughput": 2 * m * size * size / time,
            "floor": nbytes / 1e10,
            "floor_share": 0.5,
            "speedup_16": None if format == "bf16" else 2.0,
            "speedup_peer": None,
        }
        | values,
    }


def model(format="int4-g64", batch=1, parameters=4_000_000_000, context=128, fused=True, **values):
    return FACTS | {
        "benchmark": "models",
        "error": None,
        "case": {
            "model": f"{parameters / 1e9:g}b",
            "batch": batch,
            "format": format,
            "backend": "auto",
            "dtype": "bf16",
            "context": context,
            "fused": fused,
        },
        "values": {
            "backends": "cpu",
            "parameters": parameters,
            "tokens_per_second": 50.0 * batch,
            "floor": 0.01,
            "floor_share": 0.5,
            "speedup_16": None,
        }
        | values,
    }


def failed():
    return kernel() | {"values": None, "error": "ValueError: <no>"}


def rows():
    shapes = [
        kernel(format, m, size)
        for size in (64, 128)
        for m in (1, 16)
        for format in ("bf16", "int4-g64", "int1-g64")
    ]
    models = [model(f, b, p) for f in ("bf16", "int4-g64") for b in (1, 4) for p in (4e9, 12e9)]
    return [*shapes, kernel(by="peer"), failed(), *models]


def write(path, records):
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["plot", *map(str, arguments)])


def test_last_row_of_a_case_counts():
    frame = kernel_frame([kernel(time=2e-6), kernel(time=3e-6), failed(), model()])
    assert list(frame["us"]) == [pytest.approx(3)]
    assert frame["bits"].iloc[0] == 4
    assert list(model_frame([kernel(), model(), model()])["tokens_per_second"]) == [50.0]


def test_threads_of_a_cpu_are_of_the_case():
    more = {"threads": 8}
    assert list(kernel_frame([kernel(), kernel() | more])["threads"]) == [2, 8]
    assert list(model_frame([model(), model() | more])["threads"]) == [2, 8]
    of_gpu = [kernel(), kernel() | more]
    for row in of_gpu:
        row["case"]["device"] = "cuda"
    assert len(kernel_frame(of_gpu)) == 1


def test_rows_of_a_device():
    case = {
        "op": "linear",
        "backend": "cpu",
        "instruction_set": "neon",
        "format": "custom4-g64",
        "m": 2,
        "n": 256,
        "k": 256,
        "dtype": "bf16",
    }
    values = {
        "nbytes": 34816,
        "min_us": 3,
        "median_us": 4,
        "gb_s": 8.704,
        "read_gb_s": 17.408,
        "nrmse": 0,
        "runs": 824,
    }
    record = FACTS | {"benchmark": "kernels", "error": None, "case": case, "values": values}
    row = kernel_frame([record]).iloc[0]
    assert (row["by"], row["bits"], row["us"]) == ("cpu neon", 4, pytest.approx(4))
    assert row["floor_us"] == pytest.approx(2)
    assert row["floor_share"] == pytest.approx(0.5)
    assert row["bandwidth"] == pytest.approx(8.704e9)
    assert row["throughput"] == pytest.approx(2 * 2 * 256 * 256 / 4e-6)
    assert row["bits_per_weight"] == 4.25
    assert set(figures(kernel_frame([record]), model_frame([]))) == {
        "throughput",
        "bits",
        "roofline",
    }


NO_ROWS = (
    kernel() | {"case": None},
    kernel() | {"benchmark": 1},
    kernel() | {"values": 1},
    kernel() | {"values": None},
)


@pytest.mark.parametrize("text", ["{", '{"a": 1}', "[]", *map(json.dumps, NO_ROWS)])
def test_a_line_that_is_no_row(text, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"\n{json.dumps(kernel())}\n{text}\n")
    with pytest.raises(ResultsError, match=r"rows\.jsonl:3: wanted "):
        list(read_records([path]))


def test_allowed_speedup():
    """Over the time of 16 bits as it was measured, 4 us, half of which was no reading."""
    read, computed = kernel(time=1e-6), kernel(time=1e-6, m=100)
    read["values"] |= {"floor": 0.8e-6, "speedup_16": 4.0, "operations": 1e5}
    # 1.6e6 operations at 1e12 a second take 1.6 us, more than its bytes.
    computed["values"] |= {"floor": 0.8e-6, "speedup_16": 2.0, "operations": 1.6e6, "time": 2e-6}
    larger = kernel("affine4-g64", time=2e-6, floor=1.6e-6, speedup_16=2.0)
    found = allowed_speedup(kernel_frame([read, computed, larger]), 1e12)
    assert dict(found) == pytest.approx({1: 4 / 0.8, 100: 4 / 1.6})


def test_no_time_above_its_floor_is_above_the_limit():
    """Of 16 bits that took twice its floor, and 4 bits at 90 % of theirs."""
    dense = [kernel("bf16", m, time=2 * kernel("bf16", m)["values"]["floor"]) for m in (1, 16)]
    small = []
    for m, row in zip((1, 16), dense, strict=True):
        time = kernel(m=m)["values"]["floor"] / 0.9
        small.append(kernel(m=m, time=time, speedup_16=row["values"]["time"] / time))
    (axes,) = figures(kernel_frame([*dense, *small]), model_frame([]))["speedup"].axes
    lines = {line.get_linestyle(): line for line in axes.lines if line.get_marker() != "None"}
    points, limit = lines["-"], lines[":"]
    assert "dotted: by the read floor" in axes.get_xlabel()
    assert list(limit.get_xdata()) == list(points.get_xdata()) == [1, 16]
    # Reading bounds m = 1; m = 16 is the most TFLOP/s that was measured.
    assert list(np.divide(points.get_ydata(), limit.get_ydata())) == pytest.approx([0.9, 1])


def test_limits_of_one_m_are_ticks():
    (axes,) = figures(kernel_frame([kernel("bf16"), kernel()]), model_frame([]))["speedup"].axes
    assert "(ticks: by the read floor" in axes.get_xlabel()
    assert [line.get_marker() for line in axes.lines][1] == "_"


def test_figures_hold_every_point():
    found = figures(kernel_frame(rows()), model_frame(rows()))
    assert set(found) == {"throughput", "speedup", "bits", "roofline", "tokens"}
    left, right = found["throughput"].axes
    assert [axes.get_title() for axes in (left, right)] == ["m = 1", "m = 16"]
    labels = sorted(line.get_label() for line in left.lines)
    assert labels == ["bf16, auto", "int1-g64, auto", "int4-g64, auto", "int4-g64, peer"]
    line = next(line for line in left.lines if line.get_label() == "int4-g64, auto")
    assert list(line.get_ydata()) == pytest.approx(
        [2 * 64**2 / 2e-6 / 1e12, 2 * 128**2 / 2e-6 / 1e12]
    )
    tokens = found["tokens"].axes[1]
    points = next(line for line in tokens.lines if line.get_label() == "int4-g64, cpu")
    assert list(points.get_xdata()) == [4, 12]
    assert list(points.get_ydata()) == [200, 200]


@pytest.mark.parametrize(("sizes", "drawn"), [((4e9,), "ticks"), ((4e9, 12e9), "dotted")])
def test_the_floor_of_tokens_is_named_as_it_is_drawn(sizes, drawn):
    frame = model_frame([model(parameters=size) for size in sizes])
    (axes,) = figures(kernel_frame([]), frame)["tokens"].axes
    assert f"({drawn}: weights read once a step)" in axes.get_xlabel()


def test_two_of_16_bits_are_told_apart():
    """By dash or filling, for they share the colour and the marker of their width."""
    dense = [kernel("bf16", by=by, size=size) for by in ("torch", "other") for size in (64, 128)]
    found = figures(kernel_frame([*dense, kernel()]), model_frame([]))
    lines = {line.get_label(): line for line in found["throughput"].axes[0].lines}
    assert lines["bf16, torch"].get_linestyle() == lines["int4-g64, auto"].get_linestyle() == "-"
    assert lines["bf16, other"].get_linestyle() == "--"
    fills = {line.get_label(): line.get_fillstyle() for line in found["roofline"].axes[0].lines}
    assert (fills["bf16, torch"], fills["bf16, other"]) == ("none", "full")


@pytest.mark.parametrize("styles", [DASHES, FILLS, MARKERS], ids=["dashes", "fills", "markers"])
def test_contenders_of_one_width_are_told_apart(styles):
    """Nine at 4 bits on an H200, besides 16 bits; on a CPU as many at all widths."""
    found = kinds_of(kernel_frame([kernel("bf16"), *(kernel(by=by) for by in "abcdefghi")]), styles)
    assert len({style for (_, by), style in found.items() if by in "abcdefghi"}) == 9


@pytest.mark.parametrize("machine", ["A CPU", "AMD EPYC (family 26, model 2)", "x" * 50])
def test_titles_are_no_wider_than_their_figures(machine):
    found = figures(kernel_frame(rows()).assign(machine=machine), model_frame(rows()))
    for figure in found.values():
        canvas = FigureCanvasAgg(figure)
        title = figure._suptitle
        assert title.get_window_extent(canvas.get_renderer()).width <= figure.bbox.width


def test_machines_get_figures_of_their_own():
    other = kernel() | {"device": "B 2"}
    wide = kernel()
    wide["case"]["dtype"] = "fp32"
    found = figures(kernel_frame([kernel(), other, wide]), model_frame([]))
    machines = {"-a-chip-more-2-bf16", "-b-2-2-bf16", "-a-chip-more-2-fp32"}
    assert {name.removeprefix("roofline") for name in found if "roofline" in name} == machines


def test_contexts_get_figures_of_their_own():
    """And projections that are not fused a curve; neither takes the place of the other's row."""
    frame = model_frame([model(), model(fused=False), model(context=2048), model(context=2048)])
    assert frame["by"].tolist() == ["cpu", "cpu, not fused", "cpu"]
    found = figures(kernel_frame([]), frame)
    assert list(found) == ["tokens-behind-128", "tokens-behind-2048"]
    assert found["tokens-behind-2048"].get_suptitle().startswith("Decoding behind 2048 tokens")
    assert list(figures(kernel_frame([]), model_frame([model()]))) == ["tokens"]


@pytest.mark.parametrize("figure", ["throughput", "roofline", "bits"])
def test_axes_have_plain_numbers(figure):
    for axes in figures(kernel_frame(rows()), model_frame([]))[figure].axes:
        assert axes.yaxis.get_major_formatter()(0.5, 0) == "0.5"
        if figure == "roofline":
            assert axes.xaxis.get_major_formatter()(1000.0, 0) == "1000"


def test_a_gpu_has_no_threads(tmp_path):
    """Neither in the name of a figure nor in the report."""
    of_gpu = kernel()
    of_gpu["case"]["device"] = "cuda"
    path = write(tmp_path / "rows.jsonl", [kernel() | {"device": "B"}, of_gpu])
    assert run(path).exit_code == 0
    assert {p.name for p in tmp_path.glob("bits*.svg")} == {
        "bits-b-2-bf16.svg",
        "bits-a-chip-more-bf16.svg",
    }
    page = (tmp_path / "report.html").read_text()
    assert page.count("<td>bf16</td><td>a chip &amp; more</td><td></td>") == 1


def test_formats_of_the_same_bits_are_curves_of_their_own():
    rows = [kernel(format, size=size) for format in ("int4-g64", "nf4-g64") for size in (64, 128)]
    (axes,) = figures(kernel_frame(rows), model_frame([]))["throughput"].axes
    assert [line.get_label() for line in axes.lines] == ["int4-g64, auto", "nf4-g64, auto"]
    assert all(len(line.get_xdata()) == 2 for line in axes.lines)
    # One colour and marker is one width; a dash is a format.
    assert len({(line.get_color(), line.get_marker()) for line in axes.lines}) == 1
    assert len({line.get_linestyle() for line in axes.lines}) == 2


def test_widths_are_told_apart_without_colours():
    rows = [kernel(f"int{bits}-g64", size=size) for bits in range(1, 9) for size in (64, 128)]
    found = figures(kernel_frame(rows), model_frame([]))
    for figure in ("throughput", "roofline"):
        lines = [line for line in found[figure].axes[0].lines if line.get_marker() != "None"]
        assert len({line.get_marker() for line in lines}) == 8


@pytest.mark.parametrize(
    ("value", "text"),
    [(1240.0, "1240"), (0.0599, "0.0599"), (2.15, "2.15"), (98.94, "98.9"), (0.0, "0")],
)
def test_number(value, text):
    assert number(value) == text


def test_name():
    assert name("int1-g64", "cpu") == "int1-g64, cpu"


def test_outputs(tmp_path):
    file = write(tmp_path / "rows.jsonl", rows())
    done = run(file, "--out", tmp_path / "plots", "--json")
    assert done.exit_code == 0, done.output
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    kinds = ("throughput", "speedup", "bits", "roofline", "tokens")
    assert names == {f"{kind}.{end}" for kind in kinds for end in ("png", "svg")} | {"report.html"}
    assert {path.rsplit("/", 1)[1] for path in json.loads(done.stdout)} == names
    for kind in kinds:
        assert matplotlib.image.imread(tmp_path / "plots" / f"{kind}.png").std() > 0.02
        text = "".join(ET.parse(tmp_path / "plots" / f"{kind}.svg").getroot().itertext())
        assert "a chip & more, bf16" in text


def test_report_refers_to_no_other_file(tmp_path):
    assert run(write(tmp_path / "rows.jsonl", rows())).exit_code == 0
    page = (tmp_path / "report.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]{0,22})', page)
    assert sources == ["data:image/png;base64,"] * 5
    assert "fdk-bench kernels -k &#x27;&lt;64&gt;&#x27;" in page
    assert "ValueError: &lt;no&gt;" in page
    # Two shapes, two m, three formats, and a peer.
    assert page.count("<td>64 x 64</td>") == 7
    assert page.count("<td>128 x 128</td>") == 6
    assert page.count("<td>4b</td>") == 4  # two formats, two batches
    # A row says whose it is: dtype, machine, threads.
    assert page.count("<td>bf16</td><td>a chip &amp; more</td><td>2</td>") == 13 + 8
    assert f'width="{round(png_width(tmp_path / "bits.png") / 1.7)}"' in page


def test_report_in_a_browser(tmp_path):
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    assert run(write(tmp_path / "rows.jsonl", rows())).exit_code == 0
    picture = tmp_path / "report.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,3000"]
    page = (tmp_path / "report.html").as_uri()
    command = [browser, *options, f"--screenshot={picture}", page]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    seen = matplotlib.image.imread(picture)
    # Pictures as wide as the page, and colours that the page itself has not.
    assert seen.shape[1] == 1200
    assert (np.ptp(seen[..., :3], axis=2) > 0.2).sum() > 1000


def test_nothing_measured(tmp_path):
    done = run(write(tmp_path / "rows.jsonl", [failed()]))
    assert done.exit_code == 1
    assert "nothing to draw" in done.stderr
    assert not (tmp_path / "report.html").exists()


def test_bad_usage(tmp_path, tmp_path_factory, refused):
    refused(run, tmp_path / "absent.jsonl", said="absent.jsonl")
    bad = tmp_path_factory.mktemp("rows") / "bad.jsonl"
    bad.write_text("no\n")
    refused(run, bad, said="bad.jsonl:1")


@pytest.mark.parametrize(
    "row",
    [
        kernel() | {"case": {}},
        model() | {"case": {}},
        model() | {"case": {"format": "int4-g64"}},
        kernel() | {"benchmark": "accuracy"},
        kernel() | {"versions": None},
    ],
)
def test_rows_that_are_not_whole(row, tmp_path_factory, refused):
    path = write(tmp_path_factory.mktemp("rows") / "rows.jsonl", [kernel(), row])
    wanted = f"rows.jsonl:2: wanted a whole row of {row['benchmark']}; got "
    refused(run, path, "--out", "plots", said=wanted)


def test_no_folder_for_figures(no_folder, tmp_path):
    done = run(write(tmp_path / "rows.jsonl", [kernel()]), "--out", no_folder)
    assert done.exit_code == 2
    assert f"wanted a folder that can be written, got {no_folder}: " in done.stderr


def test_a_folder_in_place_of_rows(tmp_path_factory, refused):
    folder = tmp_path_factory.mktemp("rows")
    refused(run, folder, said=f"{folder}: wanted a UTF-8 text file: ")


def test_no_html(tmp_path):
    assert run(write(tmp_path / "rows.jsonl", [kernel()]), "--no-html").exit_code == 0
    assert not (tmp_path / "report.html").exists()
