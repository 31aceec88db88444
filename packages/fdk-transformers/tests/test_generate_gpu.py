"""``generate`` on a GPU: captured steps, kernels between the layers, no waits for the device."""

import warnings

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, Qwen3Config
from transformers import Qwen3ForCausalLM as Qwen3

from fdk_formats import quantise_model
from fdk_transformers import generate, step_cache
from fdk_transformers.decode.llama_ops import TorchOps
from fdk_transformers.decode.llama_step import LlamaStep
from fdk_transformers.step_cache import kept_step
from fdk_transformers.transformers_step import TransformersStep

# Inductor recommends TF32, in which tokens would differ.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:TensorFloat32")]
SIZES = {
    "vocab_size": 5000,
    "hidden_size": 512,
    "intermediate_size": 1088,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "initializer_range": 0.05,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def model_on_gpu(kind="llama", dtype=torch.bfloat16, format=None):
    """Returns a model whose logits differ by more than kernels round."""
    torch.manual_seed(0)
    config, of = (LlamaConfig, LlamaForCausalLM) if kind == "llama" else (Qwen3Config, Qwen3)
    model = of(config(**SIZES)).to("cuda").eval().requires_grad_(False)
    for parameter in model.parameters():  # rotary frequencies stay float32, as in from_pretrained
        parameter.data = parameter.to(dtype)
    if format is None:
        return model
    return quantise_model(model, format, fuse=True, progress=False)


def prompts(batch=3, tokens=40):
    """Returns prompts that are padded by different numbers of tokens."""
    ids = torch.randint(1, 5000, (batch, tokens), device="cuda")
    pads = 5 * torch.arange(batch, device="cuda")[:, None]
    mask = (torch.arange(tokens, device="cuda") >= pads).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def logits_of(step, given, tokens):
    """Returns logits after prompts and after each of ``tokens :: [b, t]``."""
    found = [step.prefill(**given)]
    found += [step.decode(tokens[:, i]).clone() for i in range(tokens.shape[1])]
    return torch.stack(found).double()


@pytest.mark.parametrize("format", [None, "int4-g64"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 9), (3, 140), (2, 700)])
def test_logits(batch, tokens, kind, format):
    """The error against float64 is at most twice that of torch's own kernels in bf16."""
    model, given = model_on_gpu(kind, format=format), prompts(batch, tokens)
    following = torch.randint(1, 5000, (batch, 4), device="cuda")
    exact = model_on_gpu(kind).to(torch.float64)  # of the same rounded weights
    if format is not None:
        for name, layer in exact.named_modules():
            if type(layer) is torch.nn.Linear and name != "lm_head":
                layer.weight.data = model.get_submodule(name).dequantise(torch.float64)
    wanted = logits_of(LlamaStep(exact, batch, 1024, ops=TorchOps()), given, following)
    plain = logits_of(LlamaStep(model, batch, 1024, ops=TorchOps()), given, following)
    ours = logits_of(LlamaStep(model, batch, 1024), given, following)
    allowed = 2 * (plain - wanted).norm() / wanted.norm()
    assert (ours - wanted).norm() / wanted.norm() <= allowed <= 0.1


@pytest.mark.parametrize("step", [LlamaStep, TransformersStep])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_sample": True, "top_k": 20},
        {"eos_token_id": list(range(0, 5000, 9))[:8]},
        {"repetition_penalty": 1.3},
    ],
)
def test_tokens(settings, step, monkeypatch):
    """In float32 the tokens are those of transformers, in a second call too."""
    monkeypatch.setattr(step_cache, "STEPS", (step,))
    model, given = model_on_gpu(dtype=torch.float32), prompts()
    torch.manual_seed(1)
    expected = model.generate(**given, max_new_tokens=30, **settings)
    for _ in range(2):
        torch.manual_seed(1)
        ours = model.generate(**given, max_new_tokens=30, **settings, custom_generate=generate)
        assert torch.equal(ours, expected)
    assert kept_step(model).is_graph


@pytest.mark.parametrize("length", [40, 600])
def test_kernels_of_both_attentions(length):
    """Short and long caches, quantised layers: graphs give the tokens of calls."""
    model, given = model_on_gpu(format="int4-g64"), prompts(2, length)
    ours = model.generate(**given, max_new_tokens=24, custom_generate=generate)
    step = LlamaStep(model, 2, kept_step(model).max_length)
    tokens = [step.prefill(**given).argmax(-1)]
    with torch.inference_mode():
        for _ in range(23):
            step.tokens.copy_(tokens[-1][:, None])
            tokens.append(step._decode().argmax(-1))
    assert torch.equal(ours[:, length:], torch.stack(tokens, 1))


def test_the_host_does_not_wait(monkeypatch):
    """After the first call, nothing synchronises until the end is read."""
    model, given = model_on_gpu(), prompts(2)
    how = GenerationConfig(max_new_tokens=20, pad_token_id=0)
    model.generate(**given, generation_config=how, custom_generate=generate)
    step = kept_step(model)
    with torch.inference_mode():
        step.begin_greedy(step.prefill(**given), None, None)
        torch.cuda.synchronize()
        try:
            with warnings.catch_warnings(action="ignore"):  # the mode is called a prototype
                torch.cuda.set_sync_debug_mode("error")
            for _ in range(10):
                step.decode_greedy()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_memory_is_freed():
    """A model goes with its step, and release_step frees a cache."""
    from fdk_transformers import release_step

    model, given = model_on_gpu(), prompts(2)
    before = torch.cuda.memory_allocated()
    model.generate(**given, max_new_tokens=4, custom_generate=generate)
    step = kept_step(model)
    cache = step.cache_bytes
    del step
    assert torch.cuda.memory_allocated() >= before + cache
    release_step(model)
    assert torch.cuda.memory_allocated() < before + cache
