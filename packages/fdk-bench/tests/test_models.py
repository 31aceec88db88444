"""Whole models: bytes by hand, measurement by each engine, command."""

import importlib.util
import json
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fdk_bench import engines, models
from fdk_bench.cases import BITSANDBYTES, random_weight
from fdk_bench.cli import app
from fdk_bench.engines import FdkEngine, engine_of
from fdk_bench.models import (
    CONTINUED_TOKENS,
    ROUNDS,
    ModelCase,
    ModelRun,
    ModelValues,
    check_layer,
    measure,
    measure_case,
    token_seconds,
)
from fdk_bench.peers import WrongAnswerError
from fdk_bench.random_llama import SIZES, build_llama
from fdk_formats import Format, QuantisedLinear
from fdk_formats.model import DEFAULT_SKIP
from fdk_transformers.decode.llama_step import LlamaStep

pytestmark = pytest.mark.usefixtures("own_code")


def case_of(format="custom4-g64", **changes):
    case = ModelCase("tiny", 1, format, "reference", "bf16", "cpu", "lm_head", 6, 3, False)
    return replace(case, **changes)


# The llama


@pytest.mark.parametrize(
    ("size", "linear", "parameters"),
    [("4b", 3.095e9, 3.884e9), ("12b", 10.469e9, 11.520e9), ("31b", 29.067e9, 30.643e9)],
)
def test_sizes_are_those_of_the_paper(size, linear, parameters):
    assert SIZES[size].linear_parameters == pytest.approx(linear, rel=2e-4)
    assert SIZES[size].parameters == pytest.approx(parameters, rel=2e-4)


@pytest.mark.parametrize("format", ["bf16", "custom4-g64", "custom4-g64-hadamard"])
def test_llamas_are_those_of_the_step(format):
    """Every layer is on the device, and the step of llamas computes the model."""
    model = build_llama(case_of(format), [1]).model
    assert {p.device.type for p in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert LlamaStep.reason_unlike(model, 1 << 17) is None
    logits = model(torch.randint(512, (2, 9))).logits.float()
    assert logits.isfinite().all()
    assert logits.std() > 0.1


# Measuring


def test_bytes():
    # tiny: a block has q, o [128, 128], k, v [64, 128], gate, up [256, 128] and down [128, 256]:
    # 147456 weights, twice; head and embedding [512, 128]; 5 norms of 128.
    dense = build_llama(case_of("bf16"), [1])
    assert dense.weight_bytes == 2 * (2 * 147456 + 65536 + 5 * 128)
    assert dense.stored_bytes == dense.weight_bytes + 2 * 65536
    assert dense.parameters == 2 * 147456 + 2 * 65536 + 5 * 128
    assert (dense.bits_per_weight, dense.backends) == (16, "torch")
    # Half a byte and 2 / 64 bytes of scale each; 8 codebooks of 64 bytes, 14 where not fused.
    quantised = build_llama(case_of(), [1])
    stored = 2 * 147456 // 2 + 2 * 147456 // 32 + 8 * 64
    assert quantised.weight_bytes == stored + 2 * (65536 + 5 * 128)
    assert (quantised.bits_per_weight, quantised.backends) == (4.25, "reference")
    apart = build_llama(case_of(fused=False), [1])
    assert apart.weight_bytes == quantised.weight_bytes + 6 * 64


def test_skip():
    everything = build_llama(case_of(skip=""), [1])
    # The head too: 16 bits less 4.25 of 65536 weights, and one codebook more.
    less = build_llama(case_of(), [1]).weight_bytes - everything.weight_bytes
    assert less == 65536 * (2 - 4.25 / 8) - 64
    with pytest.raises(ValueError, match="wanted layers to quantise, but --skip leaves none"):
        build_llama(case_of(skip="."), [1])  # no row of 4 bits whose layers have 16


class GigabyteAPerSecond:
    def __init__(self):
        self.seen = []

    def begin(self):
        self.seen.append("begin")

    def probe(self):
        self.seen.append("probe")

    def seconds(self, nbytes):
        return nbytes / 1e9


def test_measure_case():
    floor = GigabyteAPerSecond()
    values = measure_case(case_of(batch=2), build_llama(case_of(), [2]), floor, 5.0)
    assert floor.seen == ["begin", *["probe"] * ROUNDS]
    # 2 layers, keys and values, 2 sequences of 2 heads, 256 places of 32 channels, 2 bytes.
    assert values.cache_bytes == 2 * 2 * 2 * 2 * 256 * 32 * 2
    assert values.floor == pytest.approx(values.weight_bytes / 1e9)
    assert values.floor_share == pytest.approx(values.floor / values.step_time)
    assert values.tokens_per_second == pytest.approx(2 / values.step_time)
    assert 0 < values.step_time_min <= values.step_time
    assert values.first_token_time > 0
    assert (values.graph, values.build_seconds) == (False, 5.0)


def test_seconds_of_tokens(monkeypatch):
    """The first token is not part of the others' time."""

    class Clock:
        now = 0.0

        def generate(self, prompt, count):
            self.now += 3.0 + 0.5 * (count - 1)

    clock = Clock()
    monkeypatch.setattr(models.time, "perf_counter", lambda: clock.now)
    firsts, steps = token_seconds(clock, torch.zeros(1, 4), 8)
    assert firsts == [3.0] * ROUNDS
    assert steps == [0.5] * ROUNDS


@pytest.mark.parametrize("format", ["bf16", "int4-g64"])
def test_memory_of_a_cpu(format):
    """Memory is all stored tensors, each once and as in files, and the cache."""
    case = case_of(format=format)
    built = build_llama(case, [1])
    rotary = sum(buffer.nbytes for buffer in built.model.buffers())
    values = measure_case(case, built, GigabyteAPerSecond(), 0.0)
    # Each layer of a product has its own 16 levels of 4 bytes; the product is counted with one.
    levels = 0 if format == "bf16" else 2 * (2 + 1) * 64
    assert values.memory == built.stored_bytes + values.cache_bytes + rotary + levels


def test_engines_decode_the_same_tokens(monkeypatch):
    """The engine of transformers runs its own loop, ours ours."""
    model = build_llama(case_of(dtype="fp32"), [1]).model
    prompt, found = torch.randint(512, (2, 5)), []
    generate = model.generate
    monkeypatch.setattr(
        model, "generate", lambda *of, **how: found.append((generate(*of, **how), how))
    )
    for name in ("fdk", "transformers"):
        with engine_of(name, model, compiled=True, length=32) as engine:
            engine.generate(prompt, 9)
            assert (engine.cache_bytes is None) == (name == "transformers")
            assert isinstance(engine, FdkEngine) == (name == "fdk")
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][0].shape == (2, 14)
    assert ["custom_generate" in how for _, how in found] == [True, False]


def test_vllm_is_needed_for_its_engine(monkeypatch):
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    with (
        pytest.raises(ModuleNotFoundError, match="vLLM is not installed"),
        engine_of("vllm", nn.Identity(), compiled=True, length=8),
    ):
        pass


def test_rows_of_engines(monkeypatch):
    monkeypatch.setattr(models, "RATE_BYTES", 1 << 20)
    run = run_of(batches=[1], engines=["fdk", "transformers"])
    rows = list(measure(run, build_llama))
    assert [row.error for row in rows] == [None] * 4
    assert [(row.case.format, row.case.engine) for row in rows] == [
        (format, engine) for format in ("bf16", "int4-g64") for engine in ("fdk", "transformers")
    ]
    for dense, quantised in zip(rows[:2], rows[2:], strict=True):
        ratio = quantised.values.tokens_per_second / dense.values.tokens_per_second
        assert quantised.values.speedup_16 == pytest.approx(ratio)


@pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"), reason="needs bitsandbytes")
def test_layers_of_bitsandbytes(monkeypatch):
    monkeypatch.setattr(models, "RATE_BYTES", 1 << 20)
    (row,) = measure(run_of(formats=[BITSANDBYTES], batches=[1]), build_llama)
    assert row.error is None
    assert (row.case.backend, row.values.backends) == ("bitsandbytes", "bitsandbytes")
    # Half a byte for a weight; scales are not parameters.
    dense = build_llama(case_of("bf16"), [1]).weight_bytes
    assert dense - row.values.weight_bytes == 2 * 147456 * 3 // 2


def test_wrong_layer_is_refused():
    q = random_weight(Format.parse("int4-g64"), 32, 64, "cpu")
    other = random_weight(Format.parse("int4-g64"), 32, 64, "cpu", seed=1)
    layer = QuantisedLinear.from_quantised(other, backend="reference")
    with pytest.raises(WrongAnswerError, match="not timed"):
        check_layer(layer, q, case_of(), [1, 4])


def run_of(**changes):
    shared = {"context": 4, "reps": 2}
    shared |= {name: changes.pop(name) for name in ("dtype", "reps", "compiled") if name in changes}
    run = ModelRun(
        models=["tiny"],
        formats=["bf16", "int4-g64"],
        batches=[1, 2],
        backends=["reference"],
        case=case_of(**shared),
    )
    return replace(run, **changes)


def test_rows_and_speedups(monkeypatch):
    monkeypatch.setattr(models, "RATE_BYTES", 1 << 20)
    rows = list(measure(run_of(), build_llama))
    assert [(r.case.format, r.case.batch) for r in rows] == [
        ("bf16", 1),
        ("bf16", 2),
        ("int4-g64", 1),
        ("int4-g64", 2),
    ]
    assert [r.case.backend for r in rows] == ["torch", "torch", "reference", "reference"]
    for dense, quantised in zip(rows[:2], rows[2:], strict=True):
        ratio = quantised.values.tokens_per_second / dense.values.tokens_per_second
        assert quantised.values.speedup_16 == pytest.approx(ratio)
        assert dense.values.speedup_16 is None


def test_each_backend_has_a_model_and_16_bits_are_one(monkeypatch):
    pytest.importorskip("fdk_cpu", reason="auto has no backend to choose without it")
    monkeypatch.setattr(models, "RATE_BYTES", 1 << 20)
    run = run_of(backends=["reference", "auto"], batches=[1])
    rows = list(measure(run, build_llama))
    assert len(run.cases()) == len(rows) == 3
    assert [r.error for r in rows] == [None] * 3
    assert [(r.case.format, r.case.backend) for r in rows] == [
        ("bf16", "torch"),
        ("int4-g64", "reference"),
        ("int4-g64", "auto"),
    ]
    assert rows[1].values.backends == "reference"
    assert all(row.values.speedup_16 for row in rows[1:])


def test_failing_model_is_rows(monkeypatch):
    monkeypatch.setattr(models, "RATE_BYTES", 1 << 20)
    rows = list(measure(run_of(formats=["int4-g48", "int4-g64"]), build_llama))
    assert [r.values is None for r in rows] == [True, True, False, False]
    assert "k must be a positive multiple of 48, got k=128" in rows[0].error


# Command line


def run(*arguments):
    return CliRunner().invoke(app, ["models", "--device", "cpu", *map(str, arguments)])


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(models, "RATE_BYTES", 1 << 20)
    return ("--no-compile", "--reps", "2", "--context", "4", "--backend", "reference")


def test_outputs(quick, tmp_path):
    done = run(*quick, "-b", "16,4", "--batch-size", "1,2", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (tmp_path / "models.jsonl").read_text().splitlines()]
    assert [(r["case"]["format"], r["case"]["batch"]) for r in rows] == [
        ("bf16", 1),
        ("bf16", 2),
        ("custom4-g64", 1),
        ("custom4-g64", 2),
    ]
    assert {r["case"]["skip"] for r in rows} == {DEFAULT_SKIP}
    for r in rows:
        assert ModelCase(**r["case"]).model == "tiny"
        assert ModelValues(**r["values"]).parameters == SIZES["tiny"].parameters
        assert r["versions"]["torch"] == torch.__version__
    rate = f"{rows[3]['values']['tokens_per_second']:.1f}"
    assert rate in done.stdout
    assert f"| {rate} |" in (tmp_path / "models.md").read_text()


def test_json_and_real_model(quick, hf_folder, tmp_path):
    text = tmp_path / "text"
    text.write_text("w1 w2 w3 w4 w5 w6 w7 w8")
    arguments = ("--model", hf_folder, "-b", "16,8", "--text", text, "--json", "--dtype", "fp32")
    done = run(*quick, *arguments, "--format", "int", "-g", "32", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    plain, quantised = (r["values"]["perplexity"] for r in rows)
    assert [r["case"]["format"] for r in rows] == ["fp32", "int8-g32"]
    # An untrained model is worse than a uniform guess; 8 bits change little.
    assert plain > 20
    assert quantised == pytest.approx(plain, rel=0.1)
    assert quantised != plain
    said = [r["values"]["continuation"] for r in rows]
    # A token of this tokeniser is a word; a model of random weights may produce any.
    assert [len(words.split()) for words in said] == [CONTINUED_TOKENS] * 2
    assert f"int8-g32 reference: {said[1]!r}" in (tmp_path / "models.md").read_text()


def test_real_models_get_kmeans(quick, hf_folder, tmp_path):
    """The arbitrary codebook of random llamas would destroy real weights."""
    done = run(*quick, "--model", hf_folder, "-b", "16,4,1", "--out", tmp_path, "--json")
    assert done.exit_code == 0, done.output
    formats = [json.loads(line)["case"]["format"] for line in done.stdout.splitlines()]
    assert formats == ["bf16", "kmeans4-g64", "kmeans1-g64"]
    assert "Loading weights" not in done.stderr


def test_failed_row(quick, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    done = run(*quick, "--size", empty, "-b", "4", "--out", tmp_path)
    assert done.exit_code == 1
    assert f"{empty}-b1-kmeans4-g64-reference-cpu-fdk failed: " in done.stdout
    assert json.loads((tmp_path / "models.jsonl").read_text())["values"] is None


def test_interrupt_keeps_what_was_measured(quick, tmp_path, monkeypatch):
    measured = models.measure_case

    def interrupted(case, *rest):
        if case.batch == 2:
            raise KeyboardInterrupt
        return measured(case, *rest)

    monkeypatch.setattr(models, "measure_case", interrupted)
    done = run(*quick, "-b", "16", "--batch-size", "1,2", "--out", tmp_path)
    assert done.exit_code == 130
    assert len((tmp_path / "models.jsonl").read_text().splitlines()) == 1
    assert "Interrupted after 1 of 2 rows" in done.stdout
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    again = (*quick, "-b", "16", "--batch-size", "2", "--out", tmp_path, "--overwrite")
    done = run(*again)
    assert "Interrupted after 0 of 1 rows" in done.stdout
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(("at", "rows"), [(2, 2), (3, 3)])
def test_interrupt_that_python_drops(at, rows, quick, tmp_path, monkeypatch, interruptible):
    """As in the callback of a weak reference: the run still ends after the case."""
    measured = models.measure_case
    before = signal.getsignal(signal.SIGINT)

    def dropped(case, *rest):
        if case.batch == at:
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        return measured(case, *rest)

    monkeypatch.setattr(models, "measure_case", dropped)
    done = run(*quick, "-b", "16", "--batch-size", "1,2,3", "--out", tmp_path)
    assert done.exit_code == 130
    assert len((tmp_path / "models.jsonl").read_text().splitlines()) == rows
    assert f"Interrupted after {rows} of 3 rows" in done.stdout
    assert signal.getsignal(signal.SIGINT) is before


SECOND_CTRL_C = """
import signal, sys
from contextlib import suppress
from fdk_bench.cli_common import Screen
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored below nohup
with Screen(1, to_stderr=False).interrupt.watched():
    for _ in range(2):
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        print("went on", file=sys.stderr)
"""


def test_second_interrupt_ends_at_once():
    done = subprocess.run([sys.executable, "-c", SECOND_CTRL_C], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "went on\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch-size", "0"], "wanted whole numbers"),
        (["--size", ""], "--size: wanted an entry or several"),
        (["--format", ","], "--format: wanted an entry or several"),
        (["--backend", " , "], "got ' , '"),
        (["--bits", "12"], "got 12"),
        (["--skip", "("], "wanted a regular expression"),
        (["--backend", "absent"], "wanted one of auto"),
        (["--backend", "torch.compile"], "compare measures peers: --against torch.compile"),
        (["--backend", "torch.compile"], "reference computes the same by torch, not compiled"),
        (["--text", __file__], "perplexity needs a real model, and tiny has random weights"),
        (["--model", "a/b", "--text", "no-such-file"], "--text: wanted a UTF-8 text file: "),
        (["--model", "a/b", "--text", "/dev/null"], "--text: wanted text, /dev/null has none"),
        (["--model", "a/b", "--layers", "1"], "--layers: wanted only random llamas, and a/b has"),
        (["--engine", "fdk,llama.cpp"], "--engine: wanted some of fdk, transformers, vllm"),
        (["--device", "cuda:x"], "wanted cpu or cuda"),
        (["--size", "7b"], "wanted some of tiny, 1b, 4b, 8b, 12b, 31b"),
        (["--model", "no/such/folder"], "got 'no/such/folder'"),
    ],
)
def test_bad_usage(arguments, said, refused):
    refused(run, *arguments, said=said)
