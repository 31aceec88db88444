"""Plans of experts: what a checkpoint stores, and what the settings ask for."""

import json

import pytest
import torch
from safetensors.torch import save_file

from fdk_formats import Format, quantise, quantise_stack, save
from fdk_vllm.planner import Planner

PREFIX = "layers.0.mlp.experts"
NAMES = ("gate_proj", "up_proj", "down_proj")
SETTINGS = {"quant_method": "fdk", "format": "kmeans4-g32"}


def planner(folder, tensors=None, **settings):
    made = Planner(SETTINGS | settings)
    if tensors is not None:
        save(folder / "model.safetensors", tensors)
        made.read_checkpoint(str(folder))
    return made


def stack(format="kmeans4-g32"):
    return quantise_stack(torch.randn(2, 32, 32), format)


def singles(format="int4-g32", experts=(0, 1)):
    return {
        f"{PREFIX}.{expert}.{name}.weight": quantise(torch.randn(32, 32), format)
        for expert in experts
        for name in NAMES
    }


def test_stacks(tmp_path):
    tensors = {
        f"{PREFIX}.gate_up_proj.weight": stack(),
        f"{PREFIX}.down_proj.weight": stack("affine4-g32"),
    }
    plan = planner(tmp_path, tensors, backend="cpu").expert_plan(PREFIX, NAMES)
    assert plan.is_stacked
    assert not plan.is_quantised_here
    assert plan.backend == "cpu"
    assert plan.sources["w13"].shape == (2, 32, 32)
    assert str(plan.sources["w2"].format) == "affine4-g32"
    assert set(plan.sources["w2"].tensors) == {"packed", "scale", "zero_point"}


def test_packed_one_by_one(tmp_path):
    plan = planner(tmp_path, singles()).expert_plan(PREFIX, NAMES)
    assert list(plan.sources) == ["w1", "w3", "w2"]
    assert list(plan.of("w13")) == ["w1", "w3"]
    assert plan.sources["w1"].shape == (32, 32)


def test_16_bits(tmp_path):
    tensors = {name: torch.zeros(32, 32).half() for name in singles()}
    overrides = {r"experts\.down_proj$": "int8-g32"}
    plan = planner(tmp_path, tensors, overrides=overrides).expert_plan(PREFIX, NAMES)
    assert plan.is_quantised_here
    formats = {shard: str(source.format) for shard, source in plan.sources.items()}
    assert formats == {"w1": "kmeans4-g32", "w3": "kmeans4-g32", "w2": "int8-g32"}
    assert plan.sources["w1"].tensors == {"weight": torch.float16}
    without_files = planner(tmp_path).expert_plan(PREFIX, ("up_proj", None, "down_proj"))
    assert list(without_files.sources) == ["w1", "w2"]


def test_what_stays_in_16_bits(tmp_path):
    assert planner(tmp_path, skip=["experts"]).expert_plan(PREFIX, NAMES) is None
    packed = {"lm_head.weight": quantise(torch.randn(32, 32), "int4-g32")}
    tensors = packed | {name: torch.zeros(32, 32) for name in singles()}
    assert planner(tmp_path, tensors).expert_plan(PREFIX, NAMES) is None
    assert planner(tmp_path).plan("layers.0.mlp.gate", {}) is None  # the router
    assert planner(tmp_path).plan("layers.0.mlp.gate_proj", {}) is not None


def test_merged_layers_that_the_model_does_not_name(tmp_path):
    names = [f"layers.0.mlp.{name}" for name in ("gate_proj", "up_proj")]
    made = planner(
        tmp_path, {f"{n}.weight": quantise(torch.randn(32, 32), "int4-g32") for n in names}
    )
    plan = made.plan("layers.0.mlp.gate_up_proj", {"qkv_proj": ["q_proj", "k_proj", "v_proj"]})
    assert [source.name for source in plan.sources] == names


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        (
            {f"{PREFIX}.down_proj.weight": "stack"},
            {},
            "only w2 of w13, w2 would be quantised: quantise all of them or none",
        ),
        ({}, {"overrides": {"down_proj$": None}}, "only w1, w3 of w1, w3, w2 would be quantised"),
        (
            {f"{PREFIX}.1.up_proj.weight": "int8-g32"},
            {},
            r"up_proj of all experts must have one format and shape, got int4-g32 \[32, 32\], int8",
        ),
    ],
)
def test_halves_are_refused(tensors, settings, message, tmp_path):
    made = {
        name: stack() if kind == "stack" else quantise(torch.randn(32, 32), kind)
        for name, kind in tensors.items()
    }
    given = (singles() | made if "int8-g32" in tensors.values() else made) or None
    with pytest.raises(ValueError, match=rf"{PREFIX}: .*{message}"):
        planner(tmp_path, given, **settings).expert_plan(PREFIX, NAMES)


def test_a_stack_without_all_its_tensors_is_refused(tmp_path):
    q, name = stack(), f"{PREFIX}.down_proj.weight"
    text = json.dumps({name: {"format": "kmeans4-g32", "shape": [2, 32, 32]}})
    metadata = {"fdk.weights": text}
    save_file({f"{name}.packed": q.packed}, tmp_path / "m.safetensors", metadata)
    made = Planner(SETTINGS)
    made.read_checkpoint(str(tmp_path))
    with pytest.raises(ValueError, match="the checkpoint has no scale, codebook of w2"):
        made.expert_plan(PREFIX, NAMES)


def test_experts_of_other_projects_are_refused(tmp_path):
    tensors = {f"{PREFIX}.0.gate_proj.qweight": torch.zeros(4, 32, dtype=torch.int32)}
    save_file(tensors, tmp_path / "model.safetensors")
    made = Planner({"quant_method": "gptq", "bits": 4, "group_size": 32})
    made.read_checkpoint(str(tmp_path))
    with pytest.raises(
        ValueError, match=r"experts of gptq checkpoints: .* without --quantization fdk"
    ):
        made.expert_plan(PREFIX, NAMES)
    assert made.expert_plan("layers.1.mlp.experts", NAMES) is None


def test_formats_are_those_of_the_names_that_transformers_has():
    made = Planner(SETTINGS | {"overrides": {"gate_up_proj": "int3-g32", "mlp": "int8-g32"}})
    plan = made.expert_plan(PREFIX, NAMES)
    assert plan.sources["w3"].format == Format.parse("int3-g32")
    assert plan.sources["w2"].format == Format.parse("int8-g32")
