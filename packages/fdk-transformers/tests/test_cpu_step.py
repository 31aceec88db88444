"""CpuStep against the model's own forward and generate."""

import os
from pathlib import Path

import pytest
import tiny_models
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fdk_cpu
from fdk_formats import quantise_model
from fdk_transformers.cpu_step import CpuStep

FOLDER = os.environ.get("FDK_EXAMPLE_MODEL", "")
NAMES = ("llama", "smollm", "mistral", "qwen2", "qwen3")
PROMPT, TOTAL, LENGTH = 6, 12, 16
# Relative errors of logits. The step rounds bf16 sums of attention at other places.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}


def tokens(batch, count=TOTAL):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(6, tiny_models.VOCABULARY, (batch, count), generator=generator)


@torch.no_grad()
def wanted_logits(model, ids, mask=None):
    """Returns the logits of the model's forward from the prompt's last token on."""
    mask = torch.ones_like(ids) if mask is None else mask
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return model(ids, attention_mask=mask, position_ids=positions).logits[:, PROMPT - 1 :]


def step_logits(model, ids, mask=None):
    step = CpuStep(model, len(ids), LENGTH)
    prompt = None if mask is None else mask[:, :PROMPT]
    logits = [step.prefill(ids[:, :PROMPT], prompt)]
    logits += [step.decode(ids[:, i]) for i in range(PROMPT, ids.shape[1])]
    assert step.length == ids.shape[1]
    return torch.stack(logits, 1)


def assert_close(got, wanted, tolerance):
    got, wanted = got.double(), wanted.double()
    assert (got - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_equals_forward(name, dtype):
    for format in (None, "int4-g32"):
        model = tiny_models.make(name, dtype)
        if format is not None:
            model = quantise_model(model, format, progress=False, fuse=True)
        ids = tokens(1)
        assert_close(step_logits(model, ids), wanted_logits(model, ids), TOLERANCES[dtype])


@pytest.mark.parametrize(
    "format", ["kmeans3-g64", "nf4-g32", "affine2-g32", "int8-g64", "nf4-g32-hadamard"]
)
def test_formats(format):
    model = quantise_model(
        tiny_models.make("qwen2", torch.float32), format, progress=False, fuse=True
    )
    ids = tokens(2)
    assert_close(step_logits(model, ids), wanted_logits(model, ids), 1e-4)


def test_int8_activations():
    model = quantise_model(tiny_models.make("llama", torch.float32), "int4-g32", progress=False)
    for layer in model.modules():
        if hasattr(layer, "activations"):
            layer.activations = "int8"
    ids = tokens(1)
    assert_close(step_logits(model, ids), wanted_logits(model, ids), 1e-4)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_rotated_inputs(dtype, activations, fuse):
    """Some layers of an input rotate it, others do not."""
    overrides = {r"k_proj|up_proj": "int4-g32", r"v_proj": None}
    for own in ({}, overrides):
        model = quantise_model(
            tiny_models.make("qwen2", dtype),
            "int4-g32-hadamard",
            overrides=own,
            activations=activations,
            fuse=fuse,
            progress=False,
        )
        ids = tokens(2)
        tolerance = TOLERANCES[dtype] if activations == "float" else max(0.02, TOLERANCES[dtype])
        assert_close(step_logits(model, ids), wanted_logits(model, ids), tolerance)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_padded_rows_and_threads(threads):
    model = tiny_models.make("qwen3", torch.float32)
    model = quantise_model(model, "int4-g32", progress=False, fuse=True)
    ids, mask = tokens(3), torch.ones(3, TOTAL, dtype=torch.int64)
    mask[1, :3] = mask[2, :1] = 0
    fdk_cpu.set_num_threads(threads)
    try:
        got = step_logits(model, ids, mask)
    finally:
        fdk_cpu.set_num_threads(None)
    assert_close(got, wanted_logits(model, ids, mask), 1e-4)


@pytest.mark.parametrize("changes", [{"rope_parameters": LLAMA3}, {"attention_bias": True}])
def test_configurations(changes):
    model = tiny_models.make("llama", torch.float32, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    ids = tokens(1)
    assert_close(step_logits(model, ids), wanted_logits(model, ids), 1e-5)


def test_reset_and_greedy():
    model = tiny_models.make("smollm", torch.float32)
    step, ids = CpuStep(model, 1, LENGTH), tokens(1)
    first = step.prefill(ids)
    token = step.decode_greedy(first.argmax(-1))
    step.reset()
    assert step.length == 0
    assert torch.equal(step.prefill(ids), first)
    assert torch.equal(step.decode(first.argmax(-1)).argmax(-1), token)


def test_full_cache_and_wrong_calls():
    step, ids = CpuStep(tiny_models.make("llama"), 1, TOTAL), tokens(1)
    with pytest.raises(ValueError, match="padding must come before"):
        step.prefill(ids, torch.tensor([[1] * (TOTAL - 1) + [0]]))
    with pytest.raises(ValueError, match=r"wanted \[1, 1 to 12\] tokens, got \[2, 12\]"):
        step.prefill(tokens(2))
    step.prefill(ids)
    with pytest.raises(ValueError, match=r"wanted reset\(\) first"):
        step.prefill(ids)
    with pytest.raises(ValueError, match=r"wanted \[1\] tokens, got \[1, 12\]"):
        step.decode(ids)
    with pytest.raises(ValueError, match="holds max_length=12 tokens already"):
        step.decode(ids[:, 0])


def test_unsupported_models():
    assert "needs a model of" in CpuStep.supports(tiny_models.make("phi"))
    mistral = tiny_models.make("mistral")
    assert CpuStep.supports(mistral, 16) is None
    with pytest.raises(ValueError, match="a sliding window of 16 tokens does not hold 17 tokens"):
        CpuStep(mistral, 1, 17)
    assert "needs a model on the CPU" in CpuStep.supports(tiny_models.make("llama").to("meta"))
    gelu = tiny_models.make("llama", hidden_act="gelu")
    assert "needs the activation silu" in CpuStep.supports(gelu)
    hooked = tiny_models.make("llama")
    hooked.model.layers[0].mlp.register_forward_hook(lambda *args: None)
    assert "model.layers.0.mlp has hooks" in CpuStep.supports(hooked)


@pytest.mark.skipif(not FOLDER, reason="needs FDK_EXAMPLE_MODEL, of `nox -s test-transformers`")
def test_smollm2_answers_as_generate():
    """The tokens of generate, unless two logits are equal within the tolerance."""
    name = Path(FOLDER, "HuggingFaceTB", "SmolLM2-135M-Instruct")
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    model = quantise_model(model, "int4-g32", progress=False, fuse=True)
    tokenizer, count = AutoTokenizer.from_pretrained(name), 16
    step = CpuStep(model, 1, 64)
    for text in ("The capital of France is", "A haiku about the sea:", "1, 2, 3, 4,"):
        ids = tokenizer(text, return_tensors="pt").input_ids
        wanted = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=-1)
        step.reset()
        logits = step.prefill(ids)
        for token in wanted[0, ids.shape[1] :]:
            values = logits[0].float()
            close = values.max() - values[token] <= 1e-2 * values.abs().max()
            assert close, tokenizer.decode(wanted[0])
            logits = step.decode(token[None])
