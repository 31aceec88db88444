"""Models served by vLLM choose the tokens that transformers chooses with the same weights."""

import json
import os

import pytest
import serving
import torch
from serving import (
    TINY,
    assert_same_tokens,
    engine,
    first_product,
    model_of,
    packed_folder,
    prompts,
    quantised,
    requested,
)

pytest.importorskip("vllm", reason="needs vLLM: nox -s test-vllm")

PROMPTS = prompts(8, TINY["vocab_size"])
FORMAT = "kmeans4-g64"


def methods(llm):
    """Returns the names of the backends of each quantised layer of vLLM's model."""
    layers = model_of(llm).named_modules()
    found = {name: getattr(layer, "quant_method", None) for name, layer in layers}
    return {
        name: method.weights.product.backends
        for name, method in found.items()
        if hasattr(method, "weights") and method.weights.product is not None
    }


# Packed checkpoints


@pytest.mark.parametrize(
    ("kind", "changes", "format", "options", "products"),
    [
        # q, k and v have each their own codebook, or share one.
        ("Llama", {}, FORMAT, {}, 3),
        ("Llama", {}, FORMAT, {"fuse": True}, 1),
        ("Llama", {}, "int1-g64", {}, 1),
        ("Llama", {}, "affine3-g32-zint", {}, 1),
        ("Llama", {}, "nf4-row-fp16", {}, 1),
        # Formats that differ within what vLLM merges.
        ("Llama", {}, "kmeans3-g64", {"overrides": {"v_proj": "int8-g64", "down": None}}, 3),
        ("Llama", {}, "int4-g64", {"activations": "int8"}, 1),
        ("Qwen2", {}, "int4-g64", {}, 1),  # has biases
        ("Llama", {}, None, {"format": "int4-g64"}, 1),  # config.json names no format
        ("Phi3", {}, FORMAT, {}, 1),  # stores q, k and v as one weight
    ],
)
def test_packed(kind, changes, format, options, products, tmp_path):
    options = {"format": format} | options
    model = quantised(serving.tiny_model(kind, **changes), **options)
    activations = {k: v for k, v in options.items() if k == "activations"}
    folder = packed_folder(tmp_path, model, format, **activations)
    with engine(folder) as llm:
        gaps = {"gap": 0.05, "mean_gap": 0.001} if activations else {}
        serving.assert_chosen(model, PROMPTS, serving.generate(llm, PROMPTS), 16, **gaps)
        found = methods(llm)
        layer = "model.layers.0.self_attn.qkv_proj"
        assert found[layer] == ["cpu"] * products
        expected = 3 if options.get("overrides") else 4  # down_proj is left
        assert len(found) == expected * TINY["num_hidden_layers"]


def test_folder_of_fdk_transformers(tmp_path):
    # In shards with an index, each with the metadata of all, and an empty tensor that stops others.
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    model = quantised(serving.tiny_model(), FORMAT)
    folder = packed_folder(tmp_path, model, FORMAT, skip=[], overrides={}, default_skip=True)
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    path.unlink()
    stopper = "model.layers.0.self_attn.q_proj.weight"
    tensors[stopper] = torch.empty(0, dtype=torch.uint8)
    names = sorted(tensors)
    places = {}
    for number, shard in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in shard}, folder / file, metadata)
        places |= dict.fromkeys(shard, file)
    index = json.dumps({"weight_map": places})
    (folder / "model.safetensors.index.json").write_text(index)
    with engine(folder) as llm:
        assert_same_tokens(model, llm, PROMPTS)


def test_embedding_and_head(tmp_path):
    model = serving.tiny_model(vocab_size=500)  # vLLM pads the vocabulary to 512
    model = quantised(model, "int8-g64", skip=None, include=["embedding"])
    with engine(packed_folder(tmp_path, model, "int8-g64")) as llm:
        assert_same_tokens(model, llm, prompts(8, 500))
        built = model_of(llm)
        assert methods(llm)["lm_head"] == ["cpu"]
        table = built.model.embed_tokens.quant_method.weights.canonical
        assert table.shape == (512, 256)
        assert torch.equal(table.rows(0, 500), model.model.embed_tokens.quantised.rows(0, 500))
        assert not table.rows(500, 512).any()


def test_tied_embedding_and_head_are_one_weight(tmp_path):
    model = serving.tiny_model(tie_word_embeddings=True)
    model = quantised(model, "int8-g64", skip=None, include=["embedding"])
    with engine(packed_folder(tmp_path, model, "int8-g64")) as llm:
        assert_same_tokens(model, llm, PROMPTS)
        built = model_of(llm)
        assert built.lm_head.quant_method is built.model.embed_tokens.quant_method


def test_smollm2_answers_like_transformers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = serving.example_folder()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model = quantised(model, FORMAT)
    folder = packed_folder(tmp_path, model, FORMAT)
    serving.copy_tokenizer(source, folder)
    tokenizer = AutoTokenizer.from_pretrained(source)
    with engine(folder, skip_tokenizer_init=False, max_num_seqs=64) as llm:
        tokens = assert_same_tokens(model, llm, [tokenizer(text).input_ids for text in TEXTS], 24)
    assert len(tokens) == 64
    assert len({tuple(answer) for answer in tokens}) > 56


SUBJECTS = (
    "The sea",
    "A small dog",
    "Physics",
    "The old king",
    "Bread",
    "My neighbour",
    "Rain",
    "Paris",
)
BEGINNINGS = (
    "{} is",
    "Write a short story about this: {}.",
    "Question: what do you know of it? {}. Answer:",
    "Once upon a time, {} was",
    "List three facts. {}:",
    "Translate to French: {}",
    "def describe():\n    '''{} '''\n    return",
    "In the year 1900, {} had",
)
TEXTS = [beginning.format(subject) for beginning in BEGINNINGS for subject in SUBJECTS]


# 16-bit checkpoints, quantised while they load


@pytest.mark.parametrize(
    ("format", "settings", "options", "products"),
    [
        (FORMAT, {}, {"fuse": True}, 1),
        (FORMAT, {"fuse": False}, {}, 3),
        ("int4-g64", {"skip": ["gate|up"]}, {"skip": ["gate|up"]}, 1),
        (
            "affine2-g32",
            {"overrides": {"lm_head": "int8-g64"}, "include": ["embedding"]},
            {"overrides": {"lm_head": "int8-g64"}, "include": ["embedding"]},
            1,
        ),
    ],
)
def test_quantised_while_loading(format, settings, options, products, tmp_path):
    model = serving.tiny_model()
    folder = serving.plain_folder(tmp_path, model)
    with engine(folder, **requested(format, **settings)) as llm:
        assert_same_tokens(quantised(model, format, **options), llm, PROMPTS)
        found = methods(llm)
        assert found["model.layers.0.self_attn.qkv_proj"] == ["cpu"] * products
        assert ("model.layers.0.mlp.gate_up_proj" in found) == ("skip" not in settings)


def test_format_of_the_environment(tmp_path, monkeypatch):
    model = serving.tiny_model()
    folder = serving.plain_folder(tmp_path, model)
    monkeypatch.setenv("FDK_VLLM_FORMAT", "int4-g64")
    with engine(folder, quantization="fdk") as llm:
        assert_same_tokens(quantised(model, "int4-g64"), llm, PROMPTS)
        # vLLM's cache of compiled graphs has to know the format.
        config = llm.llm_engine.model_config.hf_config.quantization_config
        assert config["format"] == "int4-g64"


def test_head_of_a_tied_16_bit_embedding(tmp_path):
    from fdk_formats import quantise

    model = serving.tiny_model(tie_word_embeddings=True)
    folder = serving.plain_folder(tmp_path, model)
    with engine(folder, **requested("int4-g64", overrides={"lm_head": "int8-g64"})) as llm:
        tokens = serving.generate(llm, PROMPTS)
        assert methods(llm)["lm_head"] == ["cpu"]
    head = quantise(model.lm_head.weight.detach(), "int8-g64").dequantise()
    model = quantised(model, "int4-g64")
    model.lm_head = torch.nn.Linear(256, 512, bias=False)
    model.lm_head.weight = torch.nn.Parameter(head)
    assert serving.disagreements(model, PROMPTS, tokens) == []


def test_dummy_weights_have_the_formats_asked_for(tmp_path):
    serving.write_config(tmp_path, serving.tiny_model())
    settings = requested(FORMAT, overrides={"[qk]_proj": "int4-g64", "v_proj": "int8-g64"})
    with engine(tmp_path, load_format="dummy", **settings) as llm:
        assert len(serving.generate(llm, PROMPTS)) == len(PROMPTS)
        block = model_of(llm).model.layers[0]
        for layer, formats in (
            (block.self_attn.qkv_proj, ["int4-g64", "int8-g64"]),
            (block.mlp.gate_up_proj, [FORMAT]),  # one codebook, as of weights that are quantised
        ):
            layouts = layer.quant_method.weights.product.layouts
            assert [str(layout.format) for layout in layouts] == formats


# What users do with a server


@pytest.mark.slow
def test_compiled_graphs_hold_no_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    first, second = serving.tiny_model(), serving.tiny_model()
    for parameter in second.parameters():
        parameter.data = parameter.data.roll(1, 0)
    for model in (first, second):  # the second finds what was compiled for the first
        model = quantised(model, FORMAT)
        with engine(packed_folder(tmp_path / "model", model, FORMAT), enforce_eager=False) as llm:
            assert_same_tokens(model, llm, PROMPTS)
    packed = model.model.layers[0].mlp.down_proj.quantised.scale
    needle = packed.view(torch.uint8).numpy().tobytes()[:64]
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert files
    assert not any(needle in path.read_bytes() for path in files)


def test_reload_of_weights(tmp_path):
    first, second = serving.tiny_model(), serving.tiny_model()
    models, folders = serving.two_checkpoints(tmp_path, first, second, "int4-g64")
    with engine(folders[0]) as llm:
        assert_same_tokens(models[0], llm, PROMPTS)
        buffers = first_product(model_of(llm)).buffers()
        addresses = {name: buffer.data_ptr() for name, buffer in buffers.items()}
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folders[1])})
        assert llm.reset_prefix_cache()
        assert_same_tokens(models[1], llm, PROMPTS)
        buffers = first_product(model_of(llm)).buffers()
        assert addresses == {name: buffer.data_ptr() for name, buffer in buffers.items()}


def test_adapter_over_quantised_layers(tmp_path):
    from peft import PeftModel
    from vllm.lora.request import LoRARequest

    base = quantised(serving.tiny_model(), FORMAT)
    folder = packed_folder(tmp_path / "base", base, FORMAT)
    adapter = str(serving.write_adapter(tmp_path / "adapter", serving.tiny_model()))
    model = PeftModel.from_pretrained(base, adapter).eval()
    options = {"enable_lora": True, "max_lora_rank": 8}
    with engine(folder, **options) as llm:
        request = LoRARequest("adapter", 1, adapter)
        with_adapter = assert_same_tokens(model, llm, PROMPTS, lora_request=request)
        with model.disable_adapter():
            without = assert_same_tokens(model, llm, PROMPTS)
    assert with_adapter != without


def test_prefixes_are_cached(tmp_path):
    model = quantised(serving.tiny_model(), "int4-g64")
    folder = packed_folder(tmp_path, model, "int4-g64")
    shared = prompts(1, TINY["vocab_size"], 64, 64)[0]
    asked = [shared + prompt for prompt in PROMPTS]
    with engine(folder, enable_prefix_caching=True, max_num_seqs=1) as llm:
        assert_same_tokens(model, llm, asked)


def test_batch_invariant_kernels(monkeypatch):
    # vLLM's own batch-invariant kernels are for GPUs: no engine starts with them on a CPU.
    import fdk_cpu
    from fdk_formats import quantise
    from fdk_vllm import register
    from fdk_vllm.product import Product, Weight

    # vLLM caches its environment: a variable set here would hold for the engines after.
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True)
    register()
    try:
        weights = [Weight(quantise(torch.randn(n, 512), FORMAT)) for n in (256, 64)]
        product = Product(weights, torch.bfloat16, "auto", "float")
        assert all(layout.batch_invariant for layout in product.layouts)
        x = torch.randn(64, 512, dtype=torch.bfloat16)
        alone = torch.cat([product(row[None], None) for row in x])
        assert torch.equal(product(x, None), alone)
    finally:
        fdk_cpu.register_backends()


# Refusals


def refused(folder, message, **options):
    with pytest.raises(Exception, match=message), engine(folder, **options):
        pass


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "needs a format, as in"),
        ({"format": "int9-g64"}, "format: int takes 1 to 8 bits, got 9"),
        ({"format": "int4-g64", "formats": {}}, "unknown key 'formats'; there are quant_method"),
        ({"format": "int4-g64", "skip": ["("]}, r"skip: '\(' is no pattern"),
        ({"format": "int4-g64", "activations": "int4"}, "activations: wanted float or int8"),
        ({"format": "int4-g96"}, "model.layers.0.self_attn.qkv_proj: int4-g96: k must be a pos"),
        (
            {"format": "int4-g64", "overrides": {"v_proj": None}},
            "the engine computes 3 layers as one, and only model.layers.0.self_attn.q_proj, ",
        ),
        ({"format": "int4-g64", "backend": "marlinn"}, "wanted auto or one of .* got 'marlinn'"),
    ],
)
def test_bad_configurations_are_refused(config, message, tmp_path):
    model = serving.tiny_model(num_hidden_layers=1)
    folder = serving.plain_folder(tmp_path, model)
    serving.write_config(folder, model, {"quant_method": "fdk"} | config)
    refused(folder, message)


def test_no_format_is_refused(tmp_path):
    folder = serving.plain_folder(tmp_path, serving.tiny_model(num_hidden_layers=1))
    refused(folder, "set FDK_VLLM_FORMAT=kmeans4-g64, or pass --hf-overrides", quantization="fdk")


def test_missing_and_damaged_weights_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    model = quantised(serving.tiny_model(num_hidden_layers=1), "int4-g64")
    folder = packed_folder(tmp_path, model, "int4-g64")
    path = folder / "model.safetensors"
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    good = load_file(path)
    missing = "model.layers.0.mlp.down_proj.weight.scale"
    save_file({name: t for name, t in good.items() if name != missing}, path, metadata)
    refused(folder, f"the checkpoint has no {missing}")
    bad = good | {missing: torch.full_like(good[missing], float("nan"))}
    save_file(bad, path, metadata)
    refused(folder, r"model.layers.0.mlp.down_proj: .*scale must be finite")
    weights = json.loads(metadata["fdk.weights"])
    weights["model.layers.0.mlp.down_proj.weight"]["format"] = "int77"
    save_file(good, path, metadata | {"fdk.weights": json.dumps(weights)})
    refused(folder, "damaged metadata: model.layers.0.mlp.down_proj.weight: format")


def test_the_session_has_the_plug_in():
    from importlib.metadata import entry_points

    (found,) = entry_points(group="vllm.general_plugins", name="fdk")
    assert found.load().__module__ == "fdk_vllm"
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "1"


# Last: it imports numba, among whose objects vLLM 0.32 then trips when another engine starts.
def test_guesses_of_a_speculator_are_checked(tmp_path):
    model = quantised(serving.tiny_model(), "int4-g64")
    folder = packed_folder(tmp_path, model, "int4-g64")
    speculator = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    repeated = [prompt * 3 for prompt in PROMPTS]
    with engine(folder, speculative_config=speculator) as llm:
        assert_same_tokens(model, llm, repeated)
