"""Tables in the documents are what the recorded rows render to."""

import json
import re
from pathlib import Path

import pytest
from documents import documents

from fdk_bench.rendering import MARK, fill

ROOT = Path(__file__).parent.parent
FOLDERS = [path for path in sorted((ROOT / "docs" / "results").iterdir()) if path.is_dir()]
BLOCKWISE = sorted((ROOT / "docs" / "results").glob("*/blockwise.jsonl"))
WITH_TABLES = [path for path in documents(ROOT) if MARK.search(path.read_text("utf-8"))]


def read(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("path", WITH_TABLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_are_those_of_the_recorded_rows(path):
    text = path.read_text("utf-8")
    assert fill(text, ROOT) == text, f"fdk-bench table --fill {path.relative_to(ROOT)}"


def test_the_readme_has_tables():
    marks = MARK.findall((ROOT / "README.md").read_text("utf-8"))
    # Accuracy, kernels, compare, models; on a GPU models and compare.
    assert len(marks) == 6


def models(folder):
    """What was measured behind 128 tokens, by model, format and number of sequences."""
    return {
        (row["case"]["model"], row["case"]["format"], row["case"]["batch"]): row["values"]
        for path in sorted(folder.glob("models-*b.jsonl"))
        for row in read(path)
        if row["case"]["context"] == 128 and row["error"] is None
    }


def test_how_goals_of_whole_models_stand():
    """What prose says of them is what the recorded rows say."""
    folder = ROOT / "docs" / "results" / "h200"
    rows = models(folder)
    bf16, four, one = (
        rows[key]
        for key in (("4b", "bf16", 1), ("12b", "custom4-g64", 1), ("31b", "custom1-g64", 1))
    )
    shares = [100 * values["floor_share"] for values in (bf16, four, one)]
    taken = [v["memory"] / (v["stored_bytes"] + v["cache_bytes"]) for v in rows.values()]
    least, worst = min((v["speedup_16"], key) for key, v in rows.items() if v["speedup_16"])
    page = (folder / "models.md").read_text("utf-8")
    for share, met in zip(shares, ("met", "missed", "missed; the original's beaten"), strict=True):
        assert re.search(rf"^\| .* \| {share:.1f} % \| {met}\b", page, re.MULTILINE)
    assert f"| {four['speedup_16']:.2f} times | missed |" in page
    assert f"| {least:.2f} times ({worst[0]}, {worst[2]}) or more | met |" in page
    assert f"| at most {100 * (max(taken) - 1):.1f} % more | met |" in page
    assert f"75 % would be {1e6 * four['floor'] / 0.75:.0f} us a step" in page
    # 60.7 tokens/s of an L40S that reads 864 GB/s.
    original = one["floor"] / (60.7 * one["weight_bytes"] / 864e9)
    found = " ".join(page.split())
    says = f"A step takes {1e6 * one['step_time']:.0f} us; the original's 43.0 % would be "
    assert f"{says}{1e6 * original:.0f}," in found
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert f"({shares[1]:.1f} and {shares[2]:.1f} % here)" in readme
    assert f"2.8 times 16 bits for 12B ({four['speedup_16']:.2f}), are missed" in readme


def test_what_would_be_met_on_an_h100():
    """Its page has a column of each machine."""
    page = (ROOT / "docs" / "results" / "h100" / "models.md").read_text("utf-8")
    columns = []
    for folder, wanted in (("h100", "met"), ("h200", "missed")):
        rows = models(ROOT / "docs" / "results" / folder)
        four, one = rows["12b", "custom4-g64", 1], rows["31b", "custom1-g64", 1]
        shares = [100 * v["floor_share"] for v in (rows["4b", "bf16", 1], four, one)]
        many = [rows["12b", "custom4-g64", 64], rows["31b", "custom1-g64", 64]]
        least, worst = min((v["speedup_16"], key) for key, v in rows.items() if v["speedup_16"])
        taken = [v["memory"] / (v["stored_bytes"] + v["cache_bytes"]) for v in rows.values()]
        columns.append(
            (
                f"{shares[0]:.1f} %, met",
                f"{shares[1]:.1f} %, {wanted}",
                f"{shares[2]:.1f} %, missed; the original's beaten",
                f"{four['speedup_16']:.2f} times, {wanted}",
                " and ".join(f"{v['speedup_16']:.2f}" for v in many) + " times, met",
                f"{least:.2f} times ({worst[0]}, {worst[2]}) or more, met",
                f"at most {100 * (max(taken) - 1):.1f} % more, met",
            )
        )
        if folder == "h100":
            readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
            assert f"is at {shares[1]:.1f} % of the roofline" in readme
            assert f"{four['speedup_16']:.2f} times as fast as 16 bits, 31B" in readme
            assert f"31B at 1 bit at {shares[2]:.1f} %" in readme
    for here, there in zip(*columns, strict=True):
        assert f"| {here} | {there} |" in page


@pytest.mark.parametrize("machine", ["h100", "h200"])
def test_how_much_faster_long_prompts_are_read(machine):
    found = []
    for name in ("models-2048", "models-2048-31b"):
        plain, quantised = read(ROOT / "docs" / "results" / machine / f"{name}.jsonl")
        assert (plain["case"]["format"], plain["case"]["context"]) == ("bf16", 2048)
        times = [row["values"]["first_token_time"] for row in (plain, quantised)]
        found.append(f"{times[0] / times[1]:.2f}")
    page = (ROOT / "docs" / "results" / machine / "models.md").read_text("utf-8")
    assert f"at {found[0]} times the rate of 16 bits (12b), 1 bit at {found[1]} times" in page
    if machine == "h200":
        readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
        assert f"read {found[0]} and {found[1]} times as fast as 16 bits" in readme


def test_the_readme_counts_goals_as_the_table_does():
    table = (ROOT / "docs" / "results" / "h200" / "compare.md").read_text("utf-8")
    ahead, beside = re.findall(r"best peer: (\d+) of (\d+) cases", table)[0]
    met, goals = re.findall(r"^(\d+) of (\d+) measured goals", table, re.MULTILINE)[0]
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert f"in {ahead} of its {beside} cases, and meets {met} of {goals} goals" in readme
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in table.splitlines()]
    slower = [int(c[2]) for c in cells if len(c) == 13 and c[1].isdecimal() and float(c[7]) < 1]
    many = sum(m >= 256 for m in slower)
    assert f"in {len(slower)} cases cuBLAS is faster with 16 bits, {many} of them of 256" in readme


def test_each_folder_is_of_one_machine_of_its_own():
    """Its rows tell one device, no other folder's, and the README leads to it."""
    devices = {}
    for folder in FOLDERS:
        rows = [row for path in folder.glob("*.jsonl") for row in read(path)]
        (devices[folder.name],) = {row["device"] for row in rows if "device" in row}
    assert len(set(devices.values())) == len(devices) >= 2
    readme = (ROOT / "README.md").read_text("utf-8")
    assert all(f"docs/results/{name}/" in readme for name in devices)


@pytest.mark.parametrize("path", BLOCKWISE, ids=lambda path: path.parent.name)
def test_the_blockwise_rows_are_of_each_case_once(path):
    """Four sizes, five ops, each by all that have it; and the C++ kernels keep to their memory."""
    rows = read(path)
    found = [tuple(row["case"].values()) for row in rows]
    assert len(set(found)) == len(found) == 4 * (3 * 4 + 2 * 3)  # no 4-bit quantiser in bnb C++
    for row in rows:
        if row["case"]["by"] == "fdk C++":
            assert row["values"]["memory"] - row["values"]["result_bytes"] < 64e6


def test_counts_of_an_h100():
    """Of codebooks by Marlin-LUT, in its page and the README."""
    folder = ROOT / "docs" / "results" / "h100"
    rows = [row for path in sorted(folder.glob("compare-*x*.jsonl")) for row in read(path)]
    ours = [
        (row["case"]["m"], row["values"])
        for row in rows
        if row["case"]["backend"] == "marlin-lut" and row["case"]["format"].startswith("custom")
    ]
    ahead = sum(values["speedup_peer"] > 1 for _, values in ours)
    slower = {m: [v["speedup_16"] < 1 for rows, v in ours if rows == m] for m, _ in ours}
    assert not any(sum(slower[m]) for m in slower if m <= 64)
    page = " ".join((folder / "compare.md").read_text("utf-8").split())
    assert f"Faster than the best peer in {ahead} of {len(ours)} cases" in page
    assert (
        f"with 256 rows {sum(slower[256])} of {len(slower[256])} are not, with 1024 "
        f"{sum(slower[1024])} and with 4096 {sum(slower[4096])}, with"
    ) in page
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert f"On an H100 ours is faster than the best peer in {ahead} of {len(ours)} cases" in readme
