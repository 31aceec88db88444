"""The benchmark of variants of calibration, in miniature."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from fdk_formats import calibration

pytest.importorskip("fdk_bench")
pytest.importorskip("transformers")

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "calibration_variants.py"
REPLACED = ("_Moments", "_run_block", "_quantised")


@pytest.fixture
def script(monkeypatch):
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("calibration_variants", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_every_variant(script, tmp_path):
    out = tmp_path / "rows.jsonl"
    before = [getattr(calibration, name) for name in REPLACED]
    script.main(["--quick", "--device", "cpu", "--out", str(out)])
    assert [getattr(calibration, name) for name in REPLACED] == before
    rows = {row["variant"]: row for row in map(json.loads, out.read_text("utf-8").splitlines())}
    assert list(rows) == script.QUICK_VARIANTS.split(",")
    for name, row in rows.items():
        assert row["error"] is None
        # Splitting and rotating alone change no prediction.
        assert abs(row["unquantised_divergence"]) < 1e-6
        assert 0 < row["divergence"] < 1
        assert (row["drift"] is None) == ("sequential" not in name and "gptaq" not in name)
        assert (row["weight_of_top_percent"] is None) == ("fisher" not in name)
    assert len({row["divergence"] for row in rows.values()}) == len(rows)
    assert rows["rows-64"]["bits_per_weight"] > rows["base"]["bits_per_weight"]
    # Corrected weights keep the streams closer to each other.
    drifts = [rows[name]["drift"][-1] for name in ("gptaq", "gptaq-half", "sequential")]
    assert drifts == sorted(drifts)


def test_a_variant_that_fails_stops_no_other(script, tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError("no gradients")

    monkeypatch.setattr(script, "fisher_weights", fail)
    out = tmp_path / "rows.jsonl"
    command = ["--quick", "--device", "cpu", "--variants", "fisher,epochs0", "--out", str(out)]
    with pytest.raises(SystemExit, match="failed: fisher"):
        script.main(command)
    failed, row = map(json.loads, out.read_text("utf-8").splitlines())
    assert failed["error"] == "ValueError: no gradients"
    assert row["error"] is None


@pytest.mark.parametrize("name", ["awq", "hadamard-48", "gptaq-third"])
def test_wrong_variants(script, name):
    with pytest.raises(ValueError, match=r"wanted|could not convert"):
        script.Variant.parse(name, 2)


def test_a_token_of_weight_two_counts_as_two_tokens(script):
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    repeated = calibration._Moments()
    weights = {"layer": torch.tensor([1.0, 2.0, 1.0, 1.0, 2.0, 1.0])}
    weighted = script.VariantMoments(weights, None)
    repeated.hook("layer")(None, (x[[0, 1, 1, 2, 3, 4, 4, 5]],))
    add = weighted.hook("layer")
    add(None, (x[None, :2],))
    add(None, (x[None, 2:],))
    wanted = repeated.hessians()["layer"].matrix
    torch.testing.assert_close(weighted.hessians()["layer"].matrix, wanted)


def test_correction_is_the_least_squares_solution(script):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8, generator=generator)
    change = torch.randn(8, 8, generator=generator)
    streams = script.TwoStreams()
    streams.inputs = {"layer": x @ change.T}  # W + W C with C = change - 1 gives the same outputs
    moments = script.VariantMoments(None, script.Gptaq(streams, 0.5, damping=1e-9))
    moments.hook("layer")(None, (x,))
    correction = moments.hessians()["layer"].correction
    torch.testing.assert_close(correction, 0.5 * (change - torch.eye(8)), rtol=1e-4, atol=1e-4)
