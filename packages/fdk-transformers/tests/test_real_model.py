"""SmolLM2-135M end to end: quantised while loading, saved, loaded, generating, fine-tuned."""

import os
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from fdk_formats import model_report, quantise_model
from fdk_transformers import FdkConfig, merge_adapters

FOLDER = os.environ.get("FDK_EXAMPLE_MODEL", "")
pytestmark = pytest.mark.skipif(
    not FOLDER, reason="needs FDK_EXAMPLE_MODEL, which `nox -s test-transformers` fetches"
)
NAME = Path(FOLDER, "HuggingFaceTB", "SmolLM2-135M-Instruct")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    model = AutoModelForCausalLM.from_pretrained(NAME, quantization_config=FdkConfig("int4-g64"))
    folder = tmp_path_factory.mktemp("small")
    model.save_pretrained(folder, max_shard_size="40MB")
    return folder


@torch.no_grad()
def test_saved_and_loaded(small):
    model = AutoModelForCausalLM.from_pretrained(small)
    wanted = quantise_model(AutoModelForCausalLM.from_pretrained(NAME), "int4-g64", progress=False)
    assert len(model_report(model).layers) == 210
    assert sum(file.stat().st_size for file in small.glob("*.safetensors")) < 115e6
    a, b = model.state_dict(), wanted.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    tokenizer = AutoTokenizer.from_pretrained(NAME)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(tokens[0])
    assert torch.equal(tokens, wanted.generate(**prompt, max_new_tokens=8, do_sample=False))


def test_qlora(small):
    torch.manual_seed(0)
    # In bf16 the sum of weight and adapter is rounded: logits change by a tenth of their size.
    base = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear"))
    tokenizer = AutoTokenizer.from_pretrained(NAME)
    text = tokenizer("A codebook of sixteen values, a scale for each group.", return_tensors="pt")
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    losses = []
    for _ in range(6):
        loss = model(**text, labels=text["input_ids"]).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    with torch.no_grad():
        wanted = model(**text).logits
        merged = merge_adapters(model)(**text).logits
    assert (merged - wanted).norm() / wanted.norm() < 1e-3
