"""``fdk-bench accuracy --text``: methods of fdk and of other projects on a tiny llama."""

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import fdk_formats
from fdk_bench import language_accuracy as language
from fdk_bench.accuracy import mean_squares
from fdk_bench.cli import app
from fdk_bench.language_accuracy import LanguageCase, LanguageValues, Text, methods_named
from fdk_bench.peers import quantise_weights
from fdk_bench.peers.quantisers import QUANTISERS, PeerError, quantisers_named
from fdk_bench.tables import LANGUAGE, markdown, with_error
from fdk_bench.text_models import load_text_model

SKIP = "lm_head"


@pytest.fixture
def hf_folder(hf_folder):
    """The tiny llama, with a token for padding, as trained models have one."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(hf_folder)
    tokenizer.pad_token = "w0"  # w1 would be found in w12
    tokenizer.save_pretrained(hf_folder)
    return hf_folder


@pytest.fixture
def subject(hf_folder):
    generator = torch.Generator().manual_seed(0)
    held_out, calibration = torch.randint(40, (2, 4, 16), generator=generator)
    return language.prepare(
        load_text_model(hf_folder), SKIP, Text("held", held_out), Text("cal", calibration)
    )


def measured(subject, *names):
    rows = list(language.measure(subject, methods_named(names, "32")))
    assert all(row.error is None for row in rows), rows
    return [row.values for row in rows]


def test_values(subject):
    original, eight, two = measured(subject, "original", "int8", "kmeans2")
    assert (original.divergence, original.weight_error, original.agreement) == (0, 0, 1)
    assert original.bits_per_weight == 32  # the fixture's weights are no 16-bit numbers
    assert original.layers == 14
    weights = sum(layer.weight.numel() for layer in subject.layers.values())
    total = sum(p.numel() for p in subject.model.module.parameters())
    assert (original.weights, original.other_weights) == (weights, total - weights)
    # All stored bits: a codebook, with entries of 32 bits, in each of the 14 layers too.
    assert eight.bits_per_weight == pytest.approx(8.5 + 14 * 256 * 32 / weights)
    assert two.bits_per_weight == pytest.approx(2.5 + 14 * 4 * 32 / weights)
    whole = (two.bits_per_weight * weights + 16 * two.other_weights) / total
    assert two.model_bits_per_weight == pytest.approx(whole)
    assert original.divergence < eight.divergence < 0.01 < two.divergence
    assert two.divergence_error > 0
    assert two.excess == pytest.approx(
        torch.tensor(two.perplexity / original.perplexity).log().item(), rel=1e-4
    )


def test_weights_of_16_bits_are_counted_as_such(subject):
    subject.model.module.bfloat16().float()
    assert measured(subject, "original")[0].bits_per_weight == 16


def test_model_is_that_with_the_weights_of_the_format(subject):
    """Against a model that ``quantise_model`` made."""
    reference = language.Reference(subject.model.module, subject.held_out.windows)
    quantised = fdk_formats.quantise_model(
        subject.model.module, "int3-g32", backend="reference", progress=False
    )
    expected = reference.compare(quantised)
    (found,) = measured(subject, "int3")
    assert found.divergence == pytest.approx(expected.divergence.mean, rel=1e-3)
    assert found.perplexity == pytest.approx(expected.perplexity.mean, rel=1e-4)


def test_importance_is_that_of_the_calibration_text(subject):
    squares = mean_squares(subject.model, subject.layers, subject.calibration.windows)
    expected = {
        name: fdk_formats.quantise(layer.weight, "kmeans2-g32", squares[name]).dequantise()
        for name, layer in subject.layers.items()
    }
    (method,) = methods_named(["kmeans2+importance"], "32")
    done = method.quantise(subject, squares)
    assert all(torch.equal(done.weights[name], W_hat) for name, W_hat in expected.items())
    plain = methods_named(["kmeans2"], "32")[0].quantise(subject, squares)
    assert any(not torch.equal(plain.weights[n], W_hat) for n, W_hat in expected.items())


@pytest.mark.parametrize("format", ["kmeans2-g32", "kmeans2-g32:kmeans3-g32@3"])
def test_calibrated(subject, format):
    model, windows = load_text_model(subject.model.name).module, subject.calibration.windows
    formats = dict.fromkeys(subject.layers, "kmeans2-g32")
    if "@" in format:
        formats = fdk_formats.mix_formats(
            model, list(formats), ["kmeans2-g32", "kmeans3-g32"], 3, windows
        )
        assert len(set(formats.values())) == 2
    found = fdk_formats.calibrate_weights(model, formats, windows.split(2))
    expected = {name: layer.quantised for name, layer in found.items()}
    (method,) = methods_named([f"{format}+calibrated"])
    assert method.calibrated
    before = [layer.weight.clone() for layer in subject.layers.values()]
    done = method.quantise(subject, {})
    assert all(map(torch.equal, before, (m.weight for m in subject.layers.values())))
    assert set(done.weights) == set(subject.layers)
    for name, quantised in expected.items():
        assert torch.equal(done.weights[name], quantised.dequantise())
        assert done.nbytes[name] == quantised.nbytes


def test_random_tokens(subject, monkeypatch):
    monkeypatch.setattr(language, "TOKENS", 64)
    (method,) = methods_named(["kmeans2-g32+random"])
    assert not method.calibrated
    done = method.quantise(subject, {})
    model, window = load_text_model(subject.model.name).module, subject.held_out.windows.shape[1]
    windows = fdk_formats.random_windows(subject.model.tokenizer, window, 64 // window)
    formats = dict.fromkeys(subject.layers, "kmeans2-g32")
    found = fdk_formats.calibrate_weights(model, formats, windows.split(2))
    for name, layer in found.items():
        assert torch.equal(done.weights[name], layer.quantised.dequantise())


def test_mean_squares(subject):
    seen = []
    name, layer = next(iter(subject.layers.items()))
    handle = layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    found = mean_squares(subject.model, subject.layers, subject.calibration.windows)
    handle.remove()
    expected = torch.cat([x.flatten(0, 1) for x in seen]).double().square().mean(0).float()
    torch.testing.assert_close(found[name], expected)


def test_a_method_leaves_nothing_for_the_next(subject):
    before = {n: p.clone() for n, p in subject.model.module.named_parameters()}
    alone = measured(subject, "int4")[0].divergence
    assert measured(subject, "int1", "int4")[1].divergence == alone
    for name, parameter in subject.model.module.named_parameters():
        assert torch.equal(parameter, before[name])


def test_failing_method_is_a_row(subject):
    failed, found = language.measure(subject, methods_named(["int4-g48", "int4-g32"]))
    assert "k must be a positive multiple of 48" in failed.error
    assert found.values.layers == 14


def test_broken_predictions_are_a_failure(subject):
    name = next(iter(subject.layers))
    (method,) = methods_named(["int8-g32"])

    def broken(*arguments):
        done = method.quantise(*arguments)
        done.weights[name][0] = float("nan")
        return done

    (row,) = language.measure(subject, [language.Method("x", "fdk", False, broken)])
    assert row.error == "ValueError: the model's predictions are not finite"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("int9", "int9"),
        ("kmeans3+luck", r"alone or with one of \+importance, \+calibrated, \+random"),
        ("original+importance", "original"),
    ],
)
def test_wrong_methods(text, said):
    with pytest.raises(ValueError, match=said):
        methods_named([text])


def test_table(subject):
    rows = list(language.measure(subject, methods_named(["int4-g32", "int4-g48"])))
    lines = markdown(LANGUAGE, rows).splitlines()
    values = rows[0].values
    assert lines[2].startswith(f"| int4-g32 | fdk | {values.bits_per_weight:.3f} | ")
    assert f" | {with_error(values.divergence, values.divergence_error)} | " in lines[2]
    assert lines[3].endswith(" failed |")


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0.26123, 0.0042, "0.2612 ± 0.0042"),
        (28.806, 1.305, "28.8 ± 1.3"),
        (1540019.96, 51234.0, "1540020 ± 51234"),
        (0.5, None, "0.5"),
        (0.0, 0.0, "0"),
    ],
)
def test_with_error(value, error, text):
    assert with_error(value, error) == text


# Other projects' quantisers

STUB = """
from types import SimpleNamespace

def fit(W, nbits, group_size, **rest):
    assert rest["axis"] == 1
    print("a line that is not an answer")
    return W, {"levels": 2 ** nbits}

def decode(codes, state):
    return (codes * state["levels"]).round() / state["levels"]

Quantizer = SimpleNamespace(quantize=fit, dequantize=decode)
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """A project named hqq that rounds weights to fractions."""
    folder = tmp_path / "site"
    (folder / "hqq" / "core").mkdir(parents=True)
    (folder / "hqq" / "core" / "quantize.py").write_text(STUB)
    (folder / "hqq-9.8.dist-info").mkdir()
    (folder / "hqq-9.8.dist-info" / "METADATA").write_text("Name: hqq\nVersion: 9.8\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def peer(name, row):
    ((quantiser, _),) = quantisers_named([row])
    assert quantiser.name == name
    return quantiser


def test_peer_in_its_own_process(subject, stub):
    hqq = peer("hqq", "hqq3-g64")
    assert hqq.missing(sys.executable) is None
    method = language.peer_method(hqq, "hqq3-g64", sys.executable, "model")
    (row,) = language.measure(subject, [method])
    assert row.error is None
    assert (row.case.method, row.case.by, row.case.calibration) == ("hqq3-g64", "hqq", "")
    assert row.values.version == "9.8"
    # 3 bits, and 32 for each started group of 64.
    n_k = [layer.weight.shape for layer in subject.layers.values()]
    bits = sum(n * (3 * k + 32 * -(-k // 64)) for n, k in n_k)
    assert row.values.bits_per_weight == pytest.approx(bits / row.values.weights)
    squares = errors = 0
    for layer in subject.layers.values():
        W = layer.weight.double()
        squares += W.square().sum().item()
        errors += ((W * 8).round() / 8 - W).square().sum().item()
    assert row.values.weight_error == pytest.approx((errors / squares) ** 0.5, rel=1e-5)


def test_peer_that_fails(subject, stub):
    (stub / "hqq" / "core" / "quantize.py").write_text("raise SystemExit('no such card')")
    hqq = peer("hqq", "hqq3-g64")
    with pytest.raises(PeerError, match=r"hqq ended with code 1: .*no such card"):
        hqq.quantise("hqq3-g64", sys.executable, "model", {}, {}, torch.empty(0, 0))


def test_peer_that_is_missing():
    gptq = peer("gptqmodel", "gptqmodel3-g64")
    said = "pip install gptqmodel, or --peer-python gptqmodel=<a Python that has it>"
    assert gptq.missing(sys.executable) == said
    assert "does not run" in gptq.missing("/no/such/python")


def test_script_imports_nothing_of_fdk():
    """It runs in environments that have other projects, not fdk."""
    command = [sys.executable, "-P", "-I", "-c", "import runpy, sys\n"]
    command[-1] += f"runpy.run_path({quantise_weights.__file__!r})\n"
    # Where fdk-transformers is installed, its entry point runs with torch.
    command[-1] += "assert sys.modules.keys().isdisjoint({'fdk_formats', 'fdk_bench'})"
    subprocess.run(command, check=True)


def test_every_row_has_a_method():
    for quantiser in QUANTISERS:
        assert quantiser.method in quantise_weights.METHODS
    with pytest.raises(ValueError, match=r"wanted all, none, hqq, .* got nobody"):
        quantisers_named(["nobody"])
    assert len(quantisers_named(["all"])) == sum(len(q.settings) for q in QUANTISERS)
    assert [row for _, row in quantisers_named(["hqq", "hqq3-g64"])] == [
        *("hqq4-g64", "hqq3-g64", "hqq2-g64"),
    ]


def test_bitsandbytes(subject):
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    quantiser = peer("bitsandbytes", "bitsandbytes-nf4-g64")
    weights = {name: layer.weight for name, layer in subject.layers.items()}
    done = quantiser.quantise(
        "bitsandbytes-nf4-g64", sys.executable, "", weights, {}, torch.empty(0, 0)
    )
    for name, W in weights.items():
        expected = dequantize_4bit(*quantize_4bit(W.data, blocksize=64, quant_type="nf4"))
        assert torch.equal(done.weights[name], expected)
        assert done.nbytes[name] == W.numel() * (4 + 32 / 64) / 8


# The command


def run(*arguments):
    return CliRunner().invoke(app, ["accuracy", *map(str, arguments)])


@pytest.fixture
def texts(tmp_path):
    generator = torch.Generator().manual_seed(0)
    for name in ("held_out", "calibration"):
        words = torch.randint(40, (400,), generator=generator).tolist()
        (tmp_path / name).write_text(" ".join(f"w{word}" for word in words))
    few = ("--tokens", "64", "--window", "16", "--calibration-tokens", "64")
    return ("--text", tmp_path / "held_out", *few)


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_command(hf_folder, texts, tmp_path, stub):
    calibrated = ("--calibrate", tmp_path / "calibration", "-g", "32")
    asked = ("--format", "original,kmeans2,kmeans2+importance", "--against", "hqq,gptqmodel3-g64")
    done = run("--model", hf_folder, *texts, *calibrated, *asked, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    rows = records(tmp_path / "out" / "language.jsonl")
    assert [r["case"]["method"] for r in rows] == [
        *("original", "kmeans2-g32", "kmeans2-g32+importance"),
        *("hqq4-g64", "hqq3-g64", "hqq2-g64"),
    ]
    for r in rows:
        case = LanguageCase(**r["case"])
        assert (case.text, case.tokens, case.window) == ("held_out", 64, 16)
        assert LanguageValues(**r["values"]).layers == 14
    assert [r["case"]["calibration"] for r in rows][:3] == ["", "", "calibration"]
    assert "not measured: gptqmodel: pip install gptqmodel" in done.stdout
    table = (tmp_path / "out" / "language.md").read_text()
    assert "| kmeans2-g32+importance | fdk |" in table
    assert "64 tokens of held_out in windows of 16, calibrated on 64 of calibration" in table


def test_defaults_without_calibration(hf_folder, texts, tmp_path):
    done = run("--model", hf_folder, *texts, "-g", "32", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    methods = [r["case"]["method"] for r in records(tmp_path / "out" / "language.jsonl")]
    assert methods == [
        *("original", "kmeans4-g32", "int4-g32", "nf4-g32", "kmeans3-g32", "kmeans2-g32"),
    ]


def test_resumed(hf_folder, texts, tmp_path):
    asked = ("--model", hf_folder, *texts, "-g", "32", "--out", tmp_path / "out")
    assert run(*asked, "--format", "int4,int3").exit_code == 0
    path = tmp_path / "out" / "language.jsonl"
    before = path.read_text()
    path.write_text(before[:-30])
    done = run(*asked, "--format", "int4,int3,int2", "--resume")
    assert done.exit_code == 0, done.output
    assert "Resumed: 1 rows" in done.stdout
    assert path.read_text().startswith(before.splitlines()[0])
    assert [r["case"]["method"] for r in records(path)] == ["int4-g32", "int3-g32", "int2-g32"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--text", "no-such-file"], "--text: wanted a UTF-8 text file"),
        (["--backend", "reference"], "--text: wanted --model with it, and none of --layers"),
        (["--format", "kmeans2+importance"], "--calibrate: wanted a text for kmeans2-g64+import"),
        (["--against", "nobody"], "--against: wanted all, none, hqq"),
        (["--against", "llama.cpp"], "--calibrate: wanted a text for llama.cpp-Q4_K"),
        (["--peer-python", "nobody=python"], "--peer-python: wanted NAME=PATH with a name of hqq"),
        (["--tokens", "4096"], "--text: wanted 256 windows of 16 tokens, the text has 25"),
        (["--tasks", "arc_easy"], "--tasks: lm-eval is not installed: pip install lm-eval"),
    ],
)
def test_bad_usage(arguments, said, hf_folder, texts, tmp_path, monkeypatch):
    monkeypatch.setenv("FDK_GGML", str(tmp_path))
    for name in ("libggml-base.so", "libggml-cpu.so", "libggml.so"):
        (tmp_path / name).touch()
    out = tmp_path / "out"
    done = run("--model", hf_folder, *texts, *arguments, "--out", out)
    assert done.exit_code == 2
    assert said in done.stderr
    assert not (out / "language.jsonl").exists()


def test_calibration_on_the_held_out_text_is_refused(hf_folder, texts, tmp_path):
    done = run("--model", hf_folder, *texts, "--calibrate", tmp_path / "held_out")
    assert done.exit_code == 2
    assert "--text: wanted another text than that of --calibrate" in done.stderr


def test_encoder_is_refused(bert_folder, texts):
    done = run("--model", bert_folder, *texts)
    assert done.exit_code == 2
    assert "wanted a model made for text generation" in done.stderr


def test_options_of_language_models_alone(refused):
    said = "--against, --peer-python and --tasks: wanted --text with them"
    refused(run, "--against", "hqq", said=said)
