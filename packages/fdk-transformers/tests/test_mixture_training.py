"""A small mixture of experts trained on text, then quantised: perplexity beside its own weights."""

import math

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from fdk_formats import model_report, quantise_model
from fdk_transformers import FdkConfig

TEXT = (
    "A mixture of experts sends each token to a few of its experts. A router scores the experts, "
    "and the best of them compute the token's new state, weighted by their scores. Most of the "
    "weights are never read for a token, and all of them have to be stored. "
)
WINDOW = 64


def windows(text: str) -> torch.Tensor:
    """Returns the bytes of a text, ``[windows, WINDOW]``."""
    ids = torch.tensor(list(text.encode())) % 128
    return ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)


@torch.no_grad()
def perplexity(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """Returns the perplexity of a model on windows of tokens."""
    return math.exp(float(model(input_ids=ids, labels=ids).loss))


def trained(steps: int) -> MixtralForCausalLM:
    """Trains a small Mixtral on the text."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = windows(TEXT * 4)
    for _ in range(steps):
        optimiser.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimiser.step()
    return model.eval()


def test_a_trained_mixture_keeps_its_perplexity(tmp_path):
    model, ids = trained(steps=60), windows(TEXT * 4)
    before = perplexity(model, ids)
    assert before < 2  # 128 for a model that knows nothing
    model.save_pretrained(tmp_path)
    found = {}
    for format in ("kmeans4-g32", "int3-g32"):
        config = FdkConfig(format)
        small = MixtralForCausalLM.from_pretrained(tmp_path, quantization_config=config)
        found[format] = perplexity(small, ids)
        experts = [row for row in model_report(small).layers if "experts" in row.name]
        assert len(experts) == 4
        own = perplexity(small.dequantize(), ids)
        assert abs(found[format] / own - 1) < 1e-4, (format, found[format], own)
    assert found["kmeans4-g32"] < 1.1 * before
    assert found["kmeans4-g32"] < found["int3-g32"]


def test_norms_train_through_frozen_experts():
    """Gradients pass the quantised experts: training the norms before them lowers the loss."""
    model = quantise_model(trained(steps=20), "int4-g32", backend="reference")
    ids = windows(TEXT)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    norms = [layer.input_layernorm.weight for layer in model.model.layers]
    for weight in norms:
        weight.requires_grad_(True)
    optimiser = torch.optim.AdamW(norms, lr=1e-2)
    losses = []
    for _ in range(10):
        optimiser.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
