"""Mixtures of experts served by vLLM choose the tokens that transformers chooses."""

import copy

import pytest
import serving
import torch
from serving import TINY, assert_same_tokens, engine, model_of, packed_folder, prompts, quantised

from fdk_formats import QuantisedExpertLinear, QuantisedLinear, quantise, save

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
    },
    # Grouped top-k of sigmoids with a correction, shared experts, a dense first layer.
    "Glm4Moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "head_dim": 32,
    },
    # Weights that are not normalised.
    "DeepseekV2": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 8,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        # Sizes that vLLM's attention on a CPU takes.
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
    # Biases, and gates that take turns with what they multiply.
    "GptOss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 128,
        "head_dim": 32,
    },
}
REQUESTED = {"quantization_config": {"quant_method": "fdk", "format": FORMAT}}


def mixture(kind):
    model = serving.tiny_model(kind, **KINDS[kind])
    for name, buffer in model.named_buffers():
        if "correction" in name:  # zero in a new model
            torch.nn.init.normal_(buffer, std=0.1)
    return model


def experts_of(llm):
    """Returns the products of vLLM's modules of experts."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    modules = [each for each in model_of(llm).modules() if isinstance(each, RoutedExperts)]
    return [module.quant_method.weights.product for module in modules]


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("Glm4Moe", "GptOss")]


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe", *SLOW])
def test_packed(kind, tmp_path):
    model = quantised(mixture(kind), FORMAT, overrides={"down_proj$": "int8-g32"})
    with engine(packed_folder(tmp_path, model, FORMAT)) as llm:
        assert_same_tokens(model, llm, PROMPTS)
        found = experts_of(llm)
        assert len(found) == (1 if kind == "Glm4Moe" else 2)
        for product in found:
            assert product.backends == ["cpu", "cpu"]
            assert [str(each.format) for each in product.layouts] == [FORMAT, "int8-g32"]


@pytest.mark.parametrize("kind", ["Qwen3Moe", pytest.param("Glm4Moe", marks=pytest.mark.slow)])
def test_quantised_while_loading(kind, tmp_path):
    model = mixture(kind)
    with engine(serving.plain_folder(tmp_path, model), hf_overrides=REQUESTED) as llm:
        assert_same_tokens(quantised(model, FORMAT, fuse=True), llm, PROMPTS)
        assert all(product.backends == ["cpu", "cpu"] for product in experts_of(llm))


# A minute each on two busy cores: `nox -s test-vllm -- -m slow`.


@pytest.mark.slow
@pytest.mark.parametrize("while_loading", [False, True])
def test_deepseek_v2(while_loading, tmp_path):
    """Compared with vLLM itself: its attention on a CPU does not give transformers' tokens."""
    model = mixture("DeepseekV2")
    small = quantised(model, FORMAT, fuse=while_loading)
    if while_loading:
        folder, options = serving.plain_folder(tmp_path / "source", model), REQUESTED
    else:
        folder, options = packed_folder(tmp_path / "source", small, FORMAT), None
    with engine(folder, hf_overrides=options) as llm:
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
    from peft import LoraConfig, PeftModel, get_peft_model
    from vllm.lora.request import LoRARequest

    base, targets = quantised(mixture("Qwen3Moe"), FORMAT), ["q_proj", "v_proj", "o_proj"]
    config = LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
    adapted = get_peft_model(mixture("Qwen3Moe"), config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    adapted.save_pretrained(tmp_path / "adapter")
    folder = packed_folder(tmp_path / "base", base, FORMAT)
    model = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    options = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": targets}
    with engine(folder, **options) as llm:
        request = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
        assert_same_tokens(model, llm, PROMPTS, lora_request=request)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_two_processes_with_half_of_each_expert(kind, tmp_path):
    model = quantised(mixture(kind), FORMAT)
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(packed_folder(tmp_path, model, FORMAT), **options) as llm:
        assert_same_tokens(model, llm, PROMPTS)


@pytest.mark.slow
def test_experts_that_are_packed_one_by_one(tmp_path):
    model = mixture("Mixtral")
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
    model = quantised(mixture(kind), FORMAT, skip=["experts"])
    with engine(packed_folder(tmp_path, model, FORMAT)) as llm:
        assert_same_tokens(model, llm, PROMPTS)


@pytest.mark.slow
def test_reload_of_experts(tmp_path):
    first = mixture("Mixtral")
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
    model = quantised(mixture("Qwen3Moe"), FORMAT)
    folder = packed_folder(tmp_path, model, FORMAT)
    with engine(folder, enforce_eager=False) as llm:
        assert_same_tokens(model, llm, PROMPTS)


@pytest.mark.slow
def test_made_up_experts(tmp_path):
    serving.write_config(tmp_path, mixture("Qwen3Moe"))
    with engine(tmp_path, load_format="dummy", hf_overrides=REQUESTED) as llm:
        assert len(serving.generate(llm, PROMPTS)) == len(PROMPTS)
        assert all(product.backends == ["cpu", "cpu"] for product in experts_of(llm))
