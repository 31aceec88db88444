"""What marlin_ncu.py and triton_ncu.py make of what Nsight Compute writes."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "packages/fdk-cuda/benchmarks"
HELPER = {"marlin_ncu": "sum_splits", "triton_ncu": "permute_kernel"}


@pytest.fixture(params=HELPER)
def script(request, monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module(request.param)


def written(script, kernels):
    """As ncu writes it: warnings, names, units, and a line of the same number for each kernel."""
    lines = importlib.import_module("marlin_ncu").LINES
    metrics = ["gpu__time_duration.sum", "smsp__inst_executed.sum"]
    metrics += [metric for metric, _, _ in lines.values()]
    rows = [["ID", "Kernel Name", *metrics], ["", "", "ns", *[""] * (len(metrics) - 1)]]
    rows += [["0", name, "1,500", *["0.25"] * (len(metrics) - 1)] for name in kernels]
    return "==WARNING== clocks\n" + "".join(
        ",".join(f'"{cell}"' for cell in row) + "\n" for row in rows
    )


def test_a_table_by_hand(script):
    count = len(script.CASES)
    kernels = [HELPER[script.__name__], *["gemv_kernel"] * count]
    lines = script.table(written(script, kernels)).splitlines()
    cells = {line.split(" | ")[0]: line.split(" | ")[1:] for line in lines}
    assert [each.strip(" |") for each in cells["| us"]] == ["1.5"] * count
    assert cells["| issue slots, %"][0] == "25"
    assert cells["| barriers"][0] == "0.2"


def test_too_few_kernels(script):
    with pytest.raises(ValueError, match=rf"wanted {len(script.CASES)} kernels, got \[\]"):
        script.table("==ERROR== no permission\n")
    with pytest.raises(ValueError, match=r"got \['gemv_kernel'\]"):
        script.table(written(script, ["gemv_kernel"]))
