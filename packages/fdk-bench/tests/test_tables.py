"""Tables for terminals of any width and as Markdown, and frames of rows."""

import json
from dataclasses import replace

import pytest
from rich.console import Console

from fdk_bench.accuracy import AccuracyCase, AccuracyValues, LayerCase, LayerValues
from fdk_bench.cases import KernelCase
from fdk_bench.kernels import KernelValues, stored_bits
from fdk_bench.models import ModelCase, ModelValues
from fdk_bench.rows import Row, RowsError, machine_text, read_records, thread_count
from fdk_bench.tables import (
    ACCURACY,
    KERNELS,
    LAYERS,
    MODELS,
    kernel_frame,
    markdown,
    model_frame,
    seconds_text,
    share_text,
    table,
)

CASE = KernelCase(1, 4096, 14336, "custom4-g64", "bf16", "cpu", "auto")
VALUES = KernelValues(
    backend="cpu",
    bits_per_weight=4.25,
    weight_bytes=31195136,
    bytes=31232000,
    operations=117440512,
    error=1e-3,
    time=1.23e-3,
    time_min=1.11e-3,
    spread=0.05,
    samples=100,
    method="turns",
    eager_time=None,
    copies=8,
    bandwidth=2.539e10,
    throughput=9.55e10,
    floor=1.05e-3,
    floor_share=0.85,
    speedup_16=3.5,
    best_peer="int4pack",
    speedup_peer=1.25,
)
ROWS = [Row(CASE, VALUES), Row(replace(CASE, backend="triton"), error="NoBackendError: none")]
MODEL = Row(
    ModelCase("tiny", 16, "custom4-g64", "auto", "bf16", "cpu", "lm_head", 8, 4, False),
    ModelValues(
        backends="marlin-lut",
        parameters=10**6,
        bits_per_weight=4.25,
        weight_bytes=10**6,
        stored_bytes=10**6,
        cache_bytes=10**4,
        memory=12.5e9,
        step_time=1.3e-3,
        step_time_min=1.2e-3,
        spread=0.05,
        tokens_per_second=12345.6,
        first_token_time=12.3e-3,
        floor=1e-3,
        floor_share=0.8,
        graph=False,
        build_seconds=1.0,
        compile_seconds=1.0,
        perplexity=12.345,
        speedup_16=2.5,
    ),
)


def accuracy_row(format, bits):
    values = AccuracyValues(
        2, 10**6, bits, 1000, 1_234_567, 0.09, 0.045, 0.95, 0.85, 1.26, "reference"
    )
    return Row(AccuracyCase(format, "tiny", "auto", "", 32), values)


OF_ACCURACY = [accuracy_row("kmeans4-g64", 4.25), accuracy_row("crd_normal4-g64", 4.25)]
OF_ACCURACY.append(Row(OF_ACCURACY[0].case, error="no"))
OF_LAYERS = [
    Row(LayerCase("kmeans4-g64", "tiny", "encoder.layer.0"), LayerValues(64, 32, 4.25, 0.09, 0.01)),
    Row(LayerCase("kmeans4-g64", "tiny", "expert", "text"), LayerValues(64, 32, 4.25, 0.1, None)),
]


def printed(table, width):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


@pytest.mark.parametrize("width", [80, 120, 160])
@pytest.mark.parametrize(
    ("layout", "rows", "kept"),
    [
        (KERNELS, ROWS, ["4096 x 14336", "custom4-g64", "1.23 ms", "failed", "1.25 (int4pack)"]),
        (MODELS, [MODEL], ["tiny", "12345.6", "1.3 ms", "marlin-lut"]),
        (ACCURACY, OF_ACCURACY, ["crd_normal4-g64", "4.250", "0.95000", "failed"]),
        (LAYERS, OF_LAYERS, ["encoder.layer.0", "kmeans4-g64 +cal", "0.0100"]),
    ],
    ids=["kernels", "models", "accuracy", "layers"],
)
def test_no_cell_is_cut(layout, rows, kept, width):
    text = printed(table(layout, rows, "a machine", width), width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert all(cell in text for cell in kept)


def test_columns_left_out_are_named():
    wide, narrow = (table(KERNELS, ROWS, "a machine", width).caption for width in (200, 100))
    assert wide == "a machine"
    assert narrow.startswith("a machine; too narrow for least, floor")
    headings = [column.header for column in table(KERNELS, ROWS, width=None).columns]
    assert headings == [h for h in KERNELS.headings if h != "eager"]  # no row has it


def test_markdown():
    first, rule, line, failed = markdown(KERNELS, ROWS).splitlines()
    assert first.startswith("| n x k | m | format | by | time | least | spread | GB/s |")
    assert rule.startswith("| --- | ---: | --- | --- | ---: |")
    assert line.endswith("| 1.05 ms | 85 % | 0.0955 | 3.50 | 1.25 (int4pack) |")
    assert "| auto |" not in failed
    assert "| triton | failed |" in failed
    lines = markdown(ACCURACY, OF_ACCURACY).splitlines()
    assert lines[2] == "| kmeans4-g64 | 4.250 | 1.23 | 0.0900 | 0.0450 | 0.95000 | 0.85000 | 1.3 |"


def test_texts():
    texts = [seconds_text(s) for s in (9.87e-6, 0.00123, 2.5, 1.234e-4)]
    assert texts == ["9.87 us", "1.23 ms", "2.5 s", "123 us"]
    # A time below the floor by more than noise is marked.
    assert [share_text(s) for s in (0.85, 1.05, 1.18)] == ["85 %", "105 %", "118 % (disturbed)"]
    assert [thread_count(1), thread_count(2)] == ["1 thread", "2 threads"]
    record = {"device": "a chip", "threads": 2, "case": {"device": "cpu"}}
    assert machine_text(record) == "a chip, 2 threads"
    assert machine_text(record | {"case": {"device": "cuda"}}) == "a chip"
    eight = Row(replace(CASE, format="custom8-g64"), replace(VALUES, bits_per_weight=8.25))
    assert stored_bits([eight, *ROWS], "auto") == "4.25, 8.25 bits per weight"
    assert stored_bits(ROWS, "triton") == ""


# Reading rows


def test_shared_facts(tmp_path, kernel):
    """A line without values holds what the rows after it share."""
    row = kernel("int4-g64")
    shared = {name: row[name] for name in row if name not in ("case", "values", "error")}
    shared["case"] = {"dtype": "bf16", "device": "cpu"}
    case = {name: row["case"][name] for name in row["case"] if name not in shared["case"]}
    path = tmp_path / "rows.jsonl"
    lines = [shared, {"case": case, "values": row["values"]}, {"case": case, "error": "no"}]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in [row, *lines]))
    whole, read, failed = read_records([path])
    assert read == whole == row
    assert (failed["values"], failed["error"], failed["case"]) == (None, "no", row["case"])


@pytest.mark.parametrize(
    "change", [{"case": None}, {"benchmark": 1}, {"values": 1}, {"values": None}, None]
)
def test_a_line_that_is_not_a_row(change, tmp_path, kernel):
    text = "{" if change is None else json.dumps(kernel() | change)
    path = tmp_path / "rows.jsonl"
    path.write_text(f"\n{json.dumps(kernel())}\n{text}\n")
    with pytest.raises(RowsError, match=r"rows\.jsonl:3: wanted "):
        list(read_records([path]))
    with pytest.raises(RowsError, match="wanted a UTF-8 text file"):
        list(read_records([tmp_path]))


def test_last_row_of_a_case_counts(kernel, model):
    failed = kernel() | {"values": None, "error": "no"}
    frame = kernel_frame([kernel(time=2e-6), kernel(time=3e-6), failed, model()])
    assert list(frame["time"]) == [3e-6]
    assert (frame["bits"].iloc[0], frame["by"].iloc[0]) == (4, "fdk cpu")
    assert list(model_frame([kernel(), model(), model()])["tokens_per_second"]) == [50.0]


def test_engines_and_bitsandbytes(model):
    rows = [model("bitsandbytes-nf4"), model("bitsandbytes-nf4")]
    rows[1]["case"]["engine"] = "transformers"
    frame = model_frame(rows)
    assert list(frame["by"]) == ["cpu", "cpu, transformers"]
    assert list(frame["bits"]) == [4, 4]


def test_threads_belong_to_a_case_on_a_cpu(kernel, model):
    more = {"threads": 8}
    assert list(kernel_frame([kernel(), kernel() | more])["threads"]) == [2, 8]
    assert list(model_frame([model(), model() | more])["threads"]) == [2, 8]
    on_gpu = [kernel(), kernel() | more]
    for row in on_gpu:
        row["case"] = row["case"] | {"device": "cuda"}
    assert list(kernel_frame(on_gpu)["threads"]) == [0]


def test_rows_of_a_phone(facts):
    """Rows of ``fdk_cpu_bench`` name their values differently."""
    case = {"m": 2, "n": 256, "k": 256, "format": "custom4-g64", "dtype": "bf16"}
    case |= {"op": "linear", "backend": "cpu", "instruction_set": "neon"}
    values = {"nbytes": 34816, "min_us": 3, "median_us": 4, "read_gb_s": 17.408, "nrmse": 0}
    row = kernel_frame([facts | {"benchmark": "kernels", "case": case, "values": values}]).iloc[0]
    assert (row["by"], row["bits"], row["time"]) == ("fdk cpu neon", 4, 4e-6)
    assert row["floor"] == pytest.approx(2e-6)
    assert row["share"] == pytest.approx(0.5)
    assert row["throughput"] == pytest.approx(2 * 2 * 256 * 256 / 4e-6)
    assert row["bits_per_weight"] == 4.25
