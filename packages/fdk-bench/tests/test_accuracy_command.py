"""``fdk-bench accuracy``: what it writes and prints, and what it refuses."""

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fdk_formats
from fdk_bench.accuracy import AccuracyCase, AccuracyValues
from fdk_bench.cli import app


def run(*arguments):
    return CliRunner().invoke(app, ["accuracy", *map(str, arguments)])


def records(text):
    return [json.loads(line) for line in text.splitlines()]


def test_outputs(bert_folder, tmp_path):
    formats = ["--formats", "bf16,kmeans3,uniform3", "--formats", "nf4"]
    done = run("--model", bert_folder, *formats, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    rows = records((tmp_path / "accuracy.jsonl").read_text())
    assert [r["case"]["format"] for r in rows] == ["bf16", "kmeans3-g64", "uniform3-g64", "nf4-g64"]
    for r in rows:
        assert AccuracyCase(**r["case"]).sentences == 32
        assert AccuracyValues(**r["values"]).weights == 65536
        assert r["error"] is None
        assert r["versions"]["torch"] == torch.__version__
        assert r["device"]
    assert rows[1]["values"]["bits_per_weight"] == 3.25
    printed = done.stdout.splitlines()
    line = next(line for line in printed if "kmeans3-g64 " in line)
    assert len(line) <= 80
    assert f"{rows[1]['values']['weight_error']:.4f}" in line
    table = (tmp_path / "accuracy.md").read_text()
    assert f"| kmeans3-g64 | 3.250 | {rows[1]['values']['file_bytes'] / 1e6:.2f} |" in table
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert "kmeans3-g64" in (tmp_path / "accuracy.svg").read_text()


def test_a_model_in_bf16(bert_folder, tmp_path):
    asked = ("--formats", "bf16,int4", "--dtype", "bf16", "--device", "cpu", "--layers")
    done = run("--model", bert_folder, *asked, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    bf16, int4 = records((tmp_path / "accuracy.jsonl").read_text())
    assert {(r["case"]["device"], r["case"]["dtype"]) for r in (bf16, int4)} == {("cpu", "bf16")}
    assert bf16["values"]["weight_error"] == 0  # the model's own weights
    assert bf16["values"]["cosine_min"] == pytest.approx(1, abs=1e-6)
    assert 0.01 < int4["values"]["weight_error"] < 0.2
    assert int4["values"]["cosine_min"] < 0.9999
    assert "bf16 on cpu" in (tmp_path / "accuracy.md").read_text()
    layers = records((tmp_path / "layers.jsonl").read_text())
    assert {(r["case"]["device"], r["case"]["dtype"]) for r in layers} == {("cpu", "bf16")}


def test_json(bert_folder, tmp_path):
    done = run("--model", bert_folder, "--formats", "int4,nf4", "--json", "--output", tmp_path)
    assert done.exit_code == 0
    assert done.stdout == (tmp_path / "accuracy.jsonl").read_text()
    assert [r["case"]["format"] for r in records(done.stdout)] == ["int4-g64", "nf4-g64"]


def test_calibration_and_layers(bert_folder, tmp_path):
    (tmp_path / "text").write_text("the cat sat\n")
    (tmp_path / "more").write_text("dogs ran far from home\n")
    texts = f"{tmp_path / 'text'},{tmp_path / 'more'}"
    asked = ("--formats", "kmeans2,int4,", "--calibrate", texts, "--layers")
    done = run("--model", bert_folder, *asked, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    rows = records((tmp_path / "accuracy.jsonl").read_text())
    found = [(r["case"]["format"], r["case"]["calibration"]) for r in rows]
    assert found == [("kmeans2-g64", ""), ("kmeans2-g64", "text, more"), ("int4-g64", "")]
    assert "errors weighed by the inputs that text, more gives" in " ".join(done.stdout.split())
    layers = records((tmp_path / "layers.jsonl").read_text())
    assert len(layers) == 36  # 12 of each
    assert {r["benchmark"] for r in layers} == {"layers"}
    first = layers[0]
    name, error = first["case"]["layer"], first["values"]["output_error"]
    assert (first["values"]["n"], first["values"]["k"]) == (64, 64)
    for text in (done.stdout, (tmp_path / "layers.md").read_text()):
        lines = [line for line in text.splitlines() if name in line and f"{error:.4f}" in line]
        assert lines
        assert "kmeans2-g64" in lines[0]
    assert (tmp_path / "layers.md").read_text().count("kmeans2-g64 +cal") == 12


def test_calibration_text_is_read_once(bert_folder, tmp_path, monkeypatch):
    read, read_text = [], Path.read_text

    def counted(path, *arguments, **named):
        read.append(path.name)
        return read_text(path, *arguments, **named)

    (tmp_path / "text").write_text("the cat sat\n")
    monkeypatch.setattr(Path, "read_text", counted)
    asked = ("--formats", "kmeans2", "--calibrate", tmp_path / "text")
    assert run("--model", bert_folder, *asked, "--out", tmp_path / "out").exit_code == 0
    assert read.count("text") == 1  # it may be a pipe


def test_failed_row(bert_folder, tmp_path):
    done = run("--model", bert_folder, "--formats", "int4-g48,int4", "--output", tmp_path)
    assert done.exit_code == 1
    failed, measured = records((tmp_path / "accuracy.jsonl").read_text())
    assert failed["values"] is None
    assert "got k=64" in failed["error"]
    assert measured["error"] is None
    assert "int4-g48 failed: ValueError" in done.stdout
    # In the tables too, as those of kernels and models have it.
    assert any(re.match(" *int4-g48 .* failed", line) for line in done.stdout.splitlines())
    table = (tmp_path / "accuracy.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in table[2:4]] == ["| int4-g48", "| int4-g64"]
    assert table[2].endswith(" failed |")


def test_table_where_nothing_was_measured(bert_folder, tmp_path):
    done = run("--model", bert_folder, "--formats", "int4-g48", "--output", tmp_path)
    assert done.exit_code == 1
    assert "| int4-g48 |" in (tmp_path / "accuracy.md").read_text()
    assert not (tmp_path / "accuracy.png").exists()


def test_interrupt_keeps_what_was_measured(bert_folder, tmp_path, monkeypatch):
    plain = fdk_formats.quantise

    def interrupted(weight, format, importance):
        if format == "int2-g64":
            raise KeyboardInterrupt
        return plain(weight, format, importance)

    monkeypatch.setattr(fdk_formats, "quantise", interrupted)
    done = run("--model", bert_folder, "--formats", "int4,int2,int1", "--output", tmp_path)
    assert done.exit_code == 130
    (only,) = records((tmp_path / "accuracy.jsonl").read_text())
    assert only["case"]["format"] == "int4-g64"
    assert "Interrupted after 1 of 3 rows" in done.stdout
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--formats", "int9"], "int9"),
        (["--group-size", "8"], "at least 16"),
        (["--skip", "("], "wanted a regular expression"),
        (["--backend", "absent"], "wanted one of auto, "),
        (["--model", "no-such-folder"], "found none"),
        (["--sentences", "no-such-file"], "no-such-file"),
        (["--calibrate", "no-such-file"], "--calibrate: wanted a UTF-8 text file"),
        (["--calibrate", "packaged,no-such-file"], "No such file or directory: 'no-such-file'"),
        (["--threads", "0"], "--threads"),
        (["--device", "tpu"], "--device: wanted cpu or cuda"),
        (["--dtype", "fp8"], "--dtype: wanted one of bf16, fp16, fp32, model, got 'fp8'"),
    ],
)
def test_bad_usage(arguments, said, refused):
    refused(run, *arguments, said=said)


def test_sentences_and_default_output(bert_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("the cat\n\n  a mat \n", encoding="utf-8")
    done = run("--model", bert_folder, "--formats", "int4", "--sentences", "text")
    assert done.exit_code == 0
    (folder,) = (tmp_path / "out").iterdir()
    assert folder.name.startswith("accuracy-")
    assert records((folder / "accuracy.jsonl").read_text())[0]["case"]["sentences"] == 2
    (tmp_path / "text").write_text(" \n")
    assert run("--model", bert_folder, "--sentences", "text").exit_code == 2
