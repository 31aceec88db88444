"""Mixtures of experts served by vLLM choose the tokens that transformers chooses."""

import pytest
import serving
from serving import TINY, assert_same_tokens, engine, model_of, packed_folder, prompts, quantised

pytest.importorskip("vllm", reason="needs vLLM: nox -s test-vllm")

PROMPTS = prompts(8, TINY["vocab_size"])
FORMAT = "kmeans4-g32"
KINDS = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128},
    "Qwen3Moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "head_dim": 32,
        "decoder_sparse_step": 1,
    },
}


def mixture(kind, **changes):
    return serving.tiny_model(kind, **KINDS[kind] | changes)


def experts_of(llm, layer=0):
    """Returns vLLM's module of experts of a layer."""
    found = [m for m in model_of(llm).modules() if type(m).__name__ == "RoutedExperts"]
    return found[layer]


@pytest.mark.parametrize("kind", KINDS)
def test_packed(kind, tmp_path):
    model = quantised(mixture(kind), FORMAT)
    with engine(packed_folder(tmp_path, model, FORMAT)) as llm:
        assert_same_tokens(model, llm, PROMPTS)
        product = experts_of(llm).quant_method.weights.product
        assert product.backends == ["cpu", "cpu"]


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_while_loading(kind, tmp_path):
    model = mixture(kind)
    folder = serving.plain_folder(tmp_path, model)
    config = {"quantization_config": {"quant_method": "fdk", "format": FORMAT}}
    with engine(folder, hf_overrides=config) as llm:
        assert_same_tokens(quantised(model, FORMAT, fuse=True), llm, PROMPTS)
        assert experts_of(llm).quant_method.weights.product is not None
