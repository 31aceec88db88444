"""The benchmark of QLoRA steps, in miniature."""

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("fdk_bench")
pytest.importorskip("peft")

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "qlora.py"
SMALL = ["--size", "tiny", "--device", "cpu", "--sequence", "8", "--steps", "2", "--rounds", "2"]


@pytest.fixture
def qlora():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("qlora", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows(qlora, tmp_path, capsys):
    qlora.main(["int4-g64", "bf16", "int4-g48", *SMALL, "--out", str(tmp_path / "rows.jsonl")])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (tmp_path / "rows.jsonl").read_text("utf-8").splitlines() == [*map(json.dumps, rows)]
    assert [row["contender"] for row in rows] == ["int4-g64", "bf16", "int4-g48"]
    assert "multiple of 48" in rows.pop()["error"]
    for row in rows:
        assert row["error"] is None
        assert len(row["turns"]) == 2
        assert row["tokens_per_second"] == pytest.approx(8 / min(row["turns"]))


def test_only_adapters_are_trained(qlora):
    run = qlora.Run("tiny", "cpu", 4, 1, 8, 1, 1, compile=False)
    model = qlora.model_of("int4-g64", run)
    assert model.is_gradient_checkpointing
    trained = {name: p.clone() for name, p in model.named_parameters() if p.requires_grad}
    # Seven layers of each of two blocks, with two matrices.
    assert len(trained) == 2 * 7 * 2
    assert all("lora" in name for name in trained)
    qlora.step_seconds(model, qlora.torch.randint(512, (1, 8)), 2)
    after = dict(model.named_parameters())
    assert all(not qlora.torch.equal(p, after[name]) for name, p in trained.items())
