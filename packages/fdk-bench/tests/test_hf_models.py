"""Models of transformers: steps, bytes, perplexity, and compiled by the command."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from fdk_bench import models
from fdk_bench.cli import app
from fdk_bench.models import (
    ModelCase,
    build_hf,
    continued_from,
    perplexity_of,
    stored_bytes,
)
from fdk_bench.peers import WrongAnswerError
from fdk_formats import load_model, quantise_model, save_model
from fdk_transformers.transformers_step import TransformersStep

pytestmark = pytest.mark.usefixtures("own_code")


def case_of(folder, format):
    return ModelCase(
        str(folder), 1, format, "reference", "fp32", "cpu", "lm_head", 6, 3, compiled=False
    )


def test_the_command_as_it_is_by_default(hf_folder, tmp_path):
    result = CliRunner().invoke(
        app,
        [
            *("models", "--model", str(hf_folder), "-b", "16", "--batch-size", "1"),
            *("--device", "cpu", "--no-compile", "--json", "--out", str(tmp_path)),
        ],
    )
    assert result.exit_code == 0, result.output
    (row,) = map(json.loads, (tmp_path / "models.jsonl").read_text("utf-8").splitlines())
    assert row["error"] is None


def test_a_model_that_is_not_quantised_is_no_row_of_a_format(hf_folder):
    case = replace(case_of(hf_folder, "int4-g32"), skip=".")
    wanted = "wanted layers to quantise, but --skip leaves none"
    with pytest.warns(UserWarning, match="nothing to"), pytest.raises(ValueError, match=wanted):
        build_hf(case, [1])


def test_hf_bytes(hf_folder):
    # A block has q, o [64, 64], k, v [32, 64], gate, up, down [128, 64]: 36864 weights.
    linear, norms, table = 2 * 36864, 5 * 64, 40 * 64
    dense = build_hf(case_of(hf_folder, "fp32"), [1])
    assert dense.stored_bytes == 4 * (linear + norms + 2 * table)
    assert dense.weight_bytes == 4 * (linear + norms + table)
    quantised = build_hf(case_of(hf_folder, "int4-g32"), [1])
    codes = linear // 2 + linear // 32 * 2 + 14 * 64
    assert quantised.weight_bytes == codes + 4 * (norms + table)
    assert (quantised.bits_per_weight, quantised.backends) == (4.5, "reference")


@pytest.mark.parametrize("name", ["self_attn.v_proj", "mlp.down_proj"])
def test_wrong_layer_is_not_timed(name, hf_folder, monkeypatch):
    """A product that layers share, and a single one."""

    def broken(*arguments, **options):
        model = quantise_model(*arguments, **options)
        layout = model.model.layers[0].get_submodule(name).layout
        right = layout.forward
        layout.forward = lambda x, bias=None: right(x, bias) * 1.01
        return model

    case = replace(case_of(hf_folder, "int4-g32"), fused=True)
    monkeypatch.setattr(models, "quantise_model", broken)
    with pytest.raises(WrongAnswerError, match="wrong answer at m=3"):
        build_hf(case, [3, 5])
    monkeypatch.undo()
    build_hf(case, [3, 5])


@pytest.fixture
def qwen2(hf_sizes):
    """Two layers whose q, k and v have biases."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**hf_sizes)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
    return model


@pytest.mark.parametrize("model", ["hf_model", "qwen2"])
@torch.inference_mode()
def test_fused_logits(model, request, tmp_path):
    """Fused layers give the logits of separate ones, from either file, with a static cache."""
    model = request.getfixturevalue(model)
    tokens = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(1))
    how = {"backend": "reference", "progress": False}
    apart, fused = (quantise_model(model, "int4-g32", fuse=fuse, **how) for fuse in (False, True))
    attention, mlp = fused.model.layers[1].self_attn, fused.model.layers[1].mlp
    names = ["q_proj", "k_proj", "v_proj"]
    products = {id(getattr(attention, name).layout.product) for name in names}
    assert len(products) == 1
    assert mlp.gate_proj.layout.product is mlp.up_proj.layout.product
    expected = apart(tokens).logits
    torch.testing.assert_close(fused(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    step = TransformersStep(fused, 2, 64)
    step.prefill(tokens[:, :8], None)
    for i in range(8, 12):
        last = step.decode(tokens[:, i])
    torch.testing.assert_close(last, expected[:, -1], rtol=1e-4, atol=1e-4)
    for made in (apart, fused):
        save_model(tmp_path / "file", made)
        for fuse in (False, True):
            read = load_model(tmp_path / "file", model, backend="reference", fuse=fuse)
            torch.testing.assert_close(read(tokens).logits, expected, rtol=1e-4, atol=1e-4)


def test_perplexity_of_a_uniform_model_is_its_vocabulary():
    class Uniform(nn.Module):
        device = torch.device("cpu")

        def forward(self, input_ids):
            logits = torch.zeros(*input_ids.shape, 40)
            return type("Output", (), {"logits": logits})

    assert perplexity_of(Uniform(), torch.arange(30)) == pytest.approx(40)
    with pytest.raises(ValueError, match="at least two tokens"):
        perplexity_of(Uniform(), torch.arange(1))


def test_continuation_takes_the_likeliest_token_after_32():
    class Counting(nn.Module):
        device = torch.device("cpu")

        def forward(self, input_ids):
            logits = nn.functional.one_hot((input_ids + 2) % 64, 64).float()
            return type("Output", (), {"logits": logits})

    # The first 32 of 50 end with 31.
    assert continued_from(Counting(), torch.arange(50), 3).tolist() == [33, 35, 37]
    assert continued_from(Counting(), torch.arange(5), 2).tolist() == [6, 8]


def test_stored_bytes_counts_tied_weights_once(hf_model):
    from transformers import LlamaForCausalLM

    config = hf_model.config
    config.tie_word_embeddings = True
    tied = LlamaForCausalLM(config)
    assert stored_bytes(tied) == 4 * (2 * 36864 + 5 * 64 + 40 * 64)
    # The head stays: its weight is the embedding's.
    left = stored_bytes(quantise_model(tied, "int4-g32", None, backend="reference"))
    assert left == 36864 + 2 * 36864 // 32 * 2 + 14 * 64 + 4 * (5 * 64 + 40 * 64)


def test_folder(hf_folder, tmp_path, monkeypatch):
    """``fdk-bench models FOLDER``: whole models, by two engines, for one sequence and several."""
    monkeypatch.setattr(models, "RATE_BYTES", 1 << 20)
    out = tmp_path / "out"
    arguments = ["--model", hf_folder, "--engine", "fdk,transformers", "-b", "16,4"]
    few = ["--batch-size", "1,3", "--context", "5", "--reps", "2", "--dtype", "fp32"]
    few += ["--backend", "reference", "-g", "32", "--format", "int"]
    command = ["models", "--device", "cpu", *arguments, *few, "--out", out]
    done = CliRunner().invoke(app, list(map(str, command)))
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (out / "models.jsonl").read_text().splitlines()]
    assert [(r["case"]["format"], r["case"]["batch"], r["case"]["engine"]) for r in rows] == [
        (format, batch, engine)
        for format in ("fp32", "int4-g32")
        for batch in (1, 3)
        for engine in ("fdk", "transformers")
    ]
    for r in rows:
        assert r["values"]["tokens_per_second"] > 0
        if r["case"]["engine"] == "fdk":
            # 2 layers, keys and values, 2 heads, 256 places of 16 channels, 4 bytes.
            assert r["values"]["cache_bytes"] == r["case"]["batch"] * 2 * 2 * 2 * 256 * 16 * 4
        # Frequencies of rotary positions more; codebooks of layers that are one product, once.
        cache = r["values"]["cache_bytes"] or 0
        assert abs(r["values"]["memory"] - cache - r["values"]["stored_bytes"]) < 1000
