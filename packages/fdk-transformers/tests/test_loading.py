"""Quantising while loading: choices of layers, devices, dtypes, shards, memory and errors."""

import os
import subprocess
import sys

import pytest
import tiny_models
import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from fdk_formats import (
    NoBackendError,
    QuantisedEmbedding,
    QuantisedLinear,
    model_report,
    quantise_model,
)
from fdk_transformers import FdkConfig

X = tiny_models.inputs("llama")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_models.make("llama").save_pretrained(path)
    return path


def load(folder, *args, kind=AutoModelForCausalLM, config=None, **settings):
    config = config or FdkConfig(*(args or ("int4-g32",)), **settings.pop("rules", {}))
    return kind.from_pretrained(folder, quantization_config=config, **settings)


def plain(folder, **settings):
    return AutoModelForCausalLM.from_pretrained(folder, **settings)


def formats(model):
    return {layer.name: str(layer.format) for layer in model_report(model).layers}


@torch.no_grad()
def same(a, b):
    return torch.equal(a(**X).logits, b(**X).logits)


RULES = {
    "overrides": {"overrides": {r"down_proj$": "int8-g32", r"layers\.0\..*q_proj": None}},
    "skip": {"skip": r"mlp"},
    "skip is none": {"skip": None},
    "without the default skip": {"skip": ["v_proj"], "default_skip": False},
    "embeddings": {"include": ["embedding"]},
    "rounded x": {"activations": "int8"},
    "reference": {"backend": "reference"},
    "importance": {"importance": {"model.layers.1.mlp.down_proj": torch.rand(128).square() + 1e-3}},
    "fused": {"fuse": True},
}


@pytest.mark.parametrize("rules", RULES)
def test_rules_are_those_of_quantise_model(folder, rules):
    rules = RULES[rules]
    model = load(folder, "int3-g32", rules=rules)
    wanted = quantise_model(plain(folder), "int3-g32", progress=False, **rules)
    assert formats(model) == formats(wanted)
    assert same(model, wanted)
    errors = [layer.relative_error for layer in model_report(wanted).layers]
    assert [layer.relative_error for layer in model_report(model).layers] == errors
    backends = {name: m.backend_name for name, m in model.named_modules() if hasattr(m, "backend")}
    assert set(backends.values()) == {"reference" if "backend" in rules else "cpu"}


@pytest.mark.parametrize("include", [[], ["embedding"]])
def test_tied_head(tmp_path, include):
    """Quantised where both are; a head alone is left, as in quantise_model."""
    tiny_models.make("smollm").save_pretrained(tmp_path)
    rules = {"skip": None, "include": include}
    model = load(tmp_path, rules=rules)
    wanted = quantise_model(plain(tmp_path), "int4-g32", progress=False, **rules)
    assert formats(model) == formats(wanted)
    assert same(model, wanted)
    embedding, head = model.model.embed_tokens, model.lm_head
    if include:
        assert isinstance(embedding, QuantisedEmbedding)
        assert isinstance(head, QuantisedLinear)
        assert torch.equal(embedding.weight_packed, head.weight_packed)
    else:
        assert head.weight is embedding.weight
    model.save_pretrained(tmp_path / "small")
    again = plain(tmp_path / "small")
    assert same(again, model)
    assert formats(again) == formats(model)
    with safe_open(tmp_path / "small" / "model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if "lm_head" in name]  # noqa: SIM118


def test_a_head_of_its_own_in_a_checkpoint_that_says_tied(tmp_path):
    """transformers does not tie weights that differ, and warns."""
    model = tiny_models.make("llama")
    model.config.tie_word_embeddings = True
    model.save_pretrained(tmp_path)
    rules = {"skip": None, "include": ["embedding"]}
    small = load(tmp_path, rules=rules)
    wanted = quantise_model(tiny_models.make("llama"), "int4-g32", progress=False, **rules)
    assert same(small, wanted)


def test_shards(tmp_path):
    tiny_models.make("llama").save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = load(tmp_path)
    assert same(model, quantise_model(tiny_models.make("llama"), "int4-g32", progress=False))
    model.save_pretrained(tmp_path / "small", max_shard_size="20KB")
    assert len(list((tmp_path / "small").glob("*.safetensors"))) > 2
    assert same(plain(tmp_path / "small"), model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, "auto"])
def test_dtype(folder, tmp_path, dtype):
    model, wanted = load(folder, dtype=dtype), plain(folder, dtype=dtype)
    assert model.dtype == wanted.dtype
    assert model.lm_head.weight.dtype == wanted.dtype
    assert model.model.layers[0].mlp.up_proj.weight.dtype == wanted.dtype
    assert same(model, quantise_model(wanted, "int4-g32", progress=False))
    model.save_pretrained(tmp_path)
    assert same(plain(tmp_path), model)
    other = plain(tmp_path, dtype=torch.float32)
    assert other.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    assert other(**X).logits.dtype == torch.float32


def test_layers_that_a_model_keeps_in_float32(tmp_path):
    tiny_models.make("t5").save_pretrained(tmp_path)
    kind, x = tiny_models.model_class("t5"), tiny_models.inputs("t5")
    model = load(tmp_path, kind=kind, dtype=torch.float16)
    wanted = quantise_model(
        kind.from_pretrained(tmp_path, dtype=torch.float16), "int4-g32", progress=False
    )
    model.save_pretrained(tmp_path / "small")
    again = kind.from_pretrained(tmp_path / "small", dtype=torch.float16)
    for each in (model, again):
        wo = each.encoder.block[0].layer[1].DenseReluDense.wo
        assert wo.weight.dtype == torch.float32
        assert wo.weight_scale.dtype == torch.bfloat16
        assert torch.equal(each(**x).logits, wanted(**x).logits)


@pytest.mark.parametrize(
    "device_map", ["auto", "cpu", {"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}]
)
def test_device_map(folder, tmp_path, device_map):
    wanted = quantise_model(plain(folder), "int4-g32", progress=False)
    model = load(folder, device_map=device_map)
    assert same(model, wanted)
    model.save_pretrained(tmp_path)
    assert same(plain(tmp_path, device_map=device_map), wanted)


@pytest.mark.parametrize("include", [[], ["embedding"]])
def test_disk_offload(tmp_path, include):
    tiny_models.make("smollm").save_pretrained(tmp_path / "source")
    rules = {"skip": None, "include": include}
    wanted = quantise_model(plain(tmp_path / "source"), "int4-g32", progress=False, **rules)
    device_map = {
        "model.embed_tokens": "cpu" if not include else "disk",
        "lm_head": "cpu" if not include else "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
    }
    settings = {"device_map": device_map, "offload_folder": tmp_path / "offload"}
    model = load(tmp_path / "source", rules=rules, **settings)
    assert model.model.layers[1].mlp.up_proj.weight_packed.device.type == "meta"
    assert same(model, wanted)
    with pytest.raises(ValueError, match="is offloaded"):
        model.dequantize()
    with pytest.warns(UserWarning, match="save a model with offloaded modules"):
        model.save_pretrained(tmp_path / "small")
    assert same(plain(tmp_path / "small"), wanted)
    assert same(plain(tmp_path / "small", **settings), wanted)


def test_automatic_maps_know_the_sizes(folder):
    """Layers are placed by their quantised bytes, though they are not quantised yet."""
    from transformers.integrations.accelerate import compute_module_sizes

    seen = {}
    quantiser = FdkConfig("int4-g32")
    model = load(folder, config=quantiser)
    import fdk_transformers.quantiser as module

    empty = module.FdkQuantiser(FdkConfig("int4-g32"), pre_quantized=False)
    with torch.device("meta"):
        source = tiny_models.make("llama")
    empty._process_model_before_weight_loading(source)
    sizes, _ = compute_module_sizes(source, empty)
    seen = sizes["model.layers.0.mlp.up_proj"]
    layer = model.model.layers[0].mlp.up_proj
    # The codebook of 16 float32 is no part of it.
    assert seen == sum(p.nbytes for p in layer.weight_parameters) - 64


def test_a_new_head_is_left(folder):
    """It has no weight in the checkpoint, and is there to be trained."""
    model = load(folder, kind=AutoModelForSequenceClassification)
    assert type(model.score) is nn.Linear
    assert model.score.weight.requires_grad
    assert isinstance(model.model.layers[0].mlp.up_proj, QuantisedLinear)


@torch.no_grad()
def test_a_base_model_from_the_folder_of_a_language_model(folder, tmp_path):
    model = load(folder)
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    assert isinstance(base.layers[0].mlp.up_proj, QuantisedLinear)
    assert torch.equal(base(**X).last_hidden_state, model.model(**X).last_hidden_state)
    base.save_pretrained(tmp_path / "base")
    again = AutoModel.from_pretrained(tmp_path / "base")
    assert torch.equal(again(**X).last_hidden_state, base(**X).last_hidden_state)


def test_parameters_are_frozen_and_biases_are_not(tmp_path):
    tiny_models.make("qwen2").save_pretrained(tmp_path)
    model = load(tmp_path)
    layer = model.model.layers[0].self_attn.q_proj
    assert not any(parameter.requires_grad for parameter in layer.weight_parameters)
    assert layer.bias.requires_grad
    assert torch.equal(layer.bias, plain(tmp_path).model.layers[0].self_attn.q_proj.bias)


def test_conversions_of_transformers(tmp_path):
    """A checkpoint that stores several layers as one, of which the first is skipped."""
    model = tiny_models.make("llama")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path)

    from transformers.core_model_loading import Chunk, WeightConverter

    names = [f"self_attn.{each}_proj.weight" for each in "kv"]
    for i in range(2):
        both = [state.pop(f"model.layers.{i}.{name}") for name in names]
        state[f"model.layers.{i}.self_attn.kv.weight"] = torch.cat(both)
    from safetensors.torch import save_file

    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    converter = WeightConverter("self_attn.kv.weight", names, [Chunk(dim=0)])
    import transformers.modeling_utils as modeling

    original = modeling.get_model_conversion_mapping

    def mapping(model, key_mapping=None, hf_quantizer=None, **kwargs):
        found = [*original(model, key_mapping, None, **kwargs), converter]
        return hf_quantizer.update_weight_conversions(found, model) if hf_quantizer else found

    rules = {"skip": ["k_proj"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling, "get_model_conversion_mapping", mapping)
        small = load(tmp_path, rules=rules)
    wanted = quantise_model(model, "int4-g32", progress=False, **rules)
    assert formats(small) == formats(wanted)
    assert same(small, wanted)
    small.save_pretrained(tmp_path / "small")
    assert same(plain(tmp_path / "small"), wanted)


@pytest.mark.parametrize("settings", [{}, {"epochs": 0}])
def test_calibration(folder, settings):
    ids = torch.randint(6, 128, (4, 16), generator=torch.Generator().manual_seed(3))
    settings = {"calibration": ids, **settings}
    model = load(folder, "int3-g32", rules=settings)
    wanted = quantise_model(plain(folder), "int3-g32", progress=False, **settings)
    assert same(model, wanted)
    assert model.config.quantization_config.calibration is None


def test_calibration_needs_one_device(folder, tmp_path):
    ids = torch.randint(6, 128, (4, 16))
    device_map = {"model": "cpu", "lm_head": "disk"}
    with pytest.raises(ValueError, match="python -m fdk_formats"):
        load(
            folder,
            "int3-g32",
            rules={"calibration": ids},
            device_map=device_map,
            offload_folder=tmp_path,
        )


ERRORS = {
    "no format": ((None,), {}, {}, "wanted a format"),
    "unknown format": (("int9-g32",), {}, {}, "int takes 1 to 8 bits, got 9"),
    "k does not fit": (("int4-g48",), {}, {}, r"0\.self_attn\.q_proj: int4-g48: .* int4-g32 fits"),
    "an override that matches nothing": (
        ("int4-g32", (), {"nothing": "int8-g32"}), {}, {}, "override 'nothing' fits no",
    ),
    "unknown backend": (("int4-g32",), {"backend": "abacus"}, {}, "must be one of auto, .*abacus"),
    "no regular expression": (("int4-g32", "("), {}, {}, "wanted regular expressions"),
    "unknown kind": (("int4-g32",), {"include": ["conv2d"]}, {}, "embedding or conv1d"),
    "importance of no layer": (
        ("int4-g32",), {"importance": {"nothing": torch.ones(64)}}, {}, "importance names nothing",
    ),
    "another method": (("int4-g32",), {"quant_method": "awq"}, {}, "quant_method must be 'fdk'"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(folder, case):
    args, rules, settings, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        load(folder, config=FdkConfig(*args, **rules), **settings)


def test_a_backend_that_does_not_support_the_layer(folder, tmp_path):
    with pytest.raises(NoBackendError, match="cpu"):
        load(folder, rules={"backend": "cpu"}, dtype=torch.float64)


def test_weights_that_are_not_finite(tmp_path, capfd):
    model = tiny_models.make("llama")
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="conversion"):
        load(tmp_path)


MEMORY = """
import sys, torch, threading, time
from transformers import AutoModelForCausalLM
from fdk_transformers import FdkConfig

def rss():
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["RssAnon"].split()[0]) * 1024

torch.set_num_threads(1)
config = FdkConfig("int4-g64")
AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=config)  # imports a lot
start, peak, stop = rss(), 0, threading.Event()

def watch():
    global peak
    while not stop.is_set():
        peak = max(peak, rss())
        time.sleep(0.002)

thread = threading.Thread(target=watch, daemon=True)
thread.start()
model = AutoModelForCausalLM.from_pretrained(sys.argv[2], quantization_config=config)
stop.set()
thread.join()
size = model.get_memory_footprint()
print(size, peak - start)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_peak_memory_is_one_layer_above_the_result(folder, tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=1024, intermediate_size=4096, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    weights = model.num_parameters()
    assert weights > 100e6
    model.save_pretrained(tmp_path)
    command = [sys.executable, "-c", MEMORY, folder, tmp_path]
    # malloc returns large blocks to the system, in place of keeping them among small ones.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=170)
    size, peak = map(int, done.stdout.split())
    assert size < weights * 0.6
    # Quantising one layer of 8 MiB takes it in float32 and its codes, a few times its size.
    assert peak < size + 64e6, f"{peak / 1e6:.0f} MB for a result of {size / 1e6:.0f} MB"
