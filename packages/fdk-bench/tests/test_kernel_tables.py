"""Tables of kernels on terminals of any width, and what is said below them."""

from dataclasses import replace

import pytest
from rich.console import Console

from fdk_bench.cases import KernelCase
from fdk_bench.kernel_tables import SPARE, kernel_table, stored_bits
from fdk_bench.kernels import KernelValues
from fdk_bench.model_cases import ModelCase, ModelValues
from fdk_bench.model_tables import model_table
from fdk_bench.records import Row, counted, machine_of

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


def printed(table, width):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_no_cell_is_cut(width):
    text = printed(kernel_table(ROWS, "a machine", width), width)
    assert "…" not in text
    for cell in ("4096 x 14336", "custom4-g64", "1.23 ms", "failed"):
        assert cell in text
    for cell in ("85 %", "1.25 (int4pack)"):
        assert (cell in text) == (width > 60)


COMPARED = [
    Row(replace(CASE, m=m, backend="torch.compile"), replace(VALUES, backend="torch.compile"))
    for m in (1, 16)
]
COMPARED.append(Row(CASE, replace(VALUES, best_peer="torch.compile")))
MODELS = [
    Row(
        ModelCase("tiny", batch, "custom4-g64", "auto", "bf16", "cpu", "lm_head", 8, 4, False),
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
    for batch in (1, 16)
]


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize(
    ("table", "rows", "kept"),
    [(kernel_table, COMPARED, {"m", "time"}), (model_table, MODELS, {"batch", "tokens/s"})],
    ids=["compare", "models"],
)
def test_a_table_is_whole_at_any_width(table, rows, kept, width):
    fitted = table(rows, "a machine", width)
    text, whole = printed(fitted, width), printed(fitted, 400)
    assert "…" not in text
    assert kept <= set(whole.split())
    # What does not fit goes on in the next line.
    assert text.replace("\n", "") == whole.replace("\n", "")
    assert max(map(len, text.splitlines())) <= width
    assert width < 80 or text == whole


def test_a_table_wider_than_the_terminal_goes_on_below():
    case = replace(CASE, format="kmeans4-search-g64")
    table = kernel_table([Row(case, VALUES), Row(replace(case, m=16), VALUES)], "a machine", 40)
    lines = [line for line in printed(table, 40).splitlines() if line.startswith(" 4096 x 14336")]
    assert len(lines) == 2
    assert printed(table, 40).count("1.23 ms") == 2
    assert all(len(line) == 40 for line in lines)
    # The blank at the end of a line makes none of its own.
    just = max(map(len, printed(table, 200).splitlines()))
    assert printed(table, just) == printed(table, 200)


def test_what_is_left_out_is_named():
    def told(width):
        return " ".join(printed(kernel_table(ROWS, "a machine", width), 200).split())

    # 13 columns without eager hold 12 + 1 + 11 + 6 + 7 + 7 + 6 + 4 + 7 + 5 + 7 + 8 + 15 = 96
    # letters; with 2 for each it is 122; without least 9 fewer.
    assert "want of width" not in told(122)
    assert told(121).endswith("a machine; for want of width without least")
    assert told(113).endswith("without least")
    assert told(112).endswith("without least, floor")
    assert told(20).endswith(f"without {', '.join(h for h in SPARE if h != 'eager')}")
    assert "want of width" not in told(None)


def test_models_on_a_narrow_terminal():
    case = ModelCase("tiny", 1, "custom4-g64", "auto", "bf16", "cpu", "lm_head", 8, 4, False)
    row = Row(case, error="RuntimeError: none")
    text = printed(model_table([row], "a machine", 80), 80)
    assert "…" not in text
    assert "first token" in text
    assert "want of width without spread, head" in " ".join(text.split())


def test_stored_bits():
    eight = Row(replace(CASE, format="custom8-g64"), replace(VALUES, bits_per_weight=8.25))
    assert stored_bits([eight, *ROWS], "auto") == "4.25, 8.25 bits a weight"
    assert stored_bits(ROWS, "triton") == ""


def test_counted():
    assert [counted(1), counted(2)] == ["1 thread", "2 threads"]


def test_a_gpu_has_no_threads():
    record = {"device": "a chip", "threads": 2, "case": {"device": "cpu"}}
    assert machine_of(record) == "a chip, 2 threads"
    assert machine_of(record | {"case": {"device": "cuda"}}) == "a chip"
