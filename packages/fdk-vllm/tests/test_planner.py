"""Plans of layers: checkpoints whose files do not hold all."""

import pytest
import torch

from fdk_formats import quantise, save
from fdk_vllm.planner import Planner

MERGED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
ATTENTION = "model.layers.{}.self_attn"
NAMES = [f"{ATTENTION.format(block)}.{each}" for block in range(12) for each in MERGED["qkv_proj"]]
EXPERTS = [
    f"model.layers.{block}.mlp.experts.{expert}.up_proj" for block in (0, 1) for expert in (0, 1)
]


def planner(folder, names, is_packed, **settings):
    """Returns a planner of a checkpoint with these layers."""
    weight = torch.randn(16, 32)
    stored = quantise(weight, "int4-g32") if is_packed else weight.half()
    save(folder / "model.safetensors", {f"{name}.weight": stored for name in names})
    made = Planner({"quant_method": "fdk", "format": "int4-g32", "skip": None} | settings)
    made.read_checkpoint(str(folder))
    return made


def test_a_layer_that_no_file_holds_is_refused(tmp_path):
    """Also where its block's number begins another's."""
    missing = ATTENTION.format(1)
    made = planner(tmp_path, [name for name in NAMES if missing not in name], is_packed=True)
    with pytest.raises(ValueError, match=r"1\.self_attn\.q_proj: the checkpoint's files hold no"):
        made.plan(f"{missing}.qkv_proj", MERGED)
    assert len(made.plan(f"{ATTENTION.format(10)}.qkv_proj", MERGED).sources) == 3


def test_blocks_that_differ(tmp_path):
    """Blocks without v, and blocks for drafts, which have other names in vLLM."""
    made = planner(tmp_path, [f"{ATTENTION.format(1)}.q_proj", *NAMES[3:]], is_packed=False)
    made.blocks = 12
    assert len(made.plan(f"{ATTENTION.format(1)}.qkv_proj", MERGED).sources) == 3
    made.is_packed = True
    assert made.plan(f"{ATTENTION.format(12)}.qkv_proj", MERGED) is None
    with pytest.raises(ValueError, match=r"0\.self_attn\.q_proj: the checkpoint's files hold no"):
        made.plan(f"{ATTENTION.format(0)}.qkv_proj", MERGED)


def test_a_merged_layer_that_no_file_holds_is_refused(tmp_path):
    names = [f"{ATTENTION.format(block)}.qkv_proj" for block in (0, 2)]
    made = planner(tmp_path, names, is_packed=True)
    with pytest.raises(
        ValueError, match=r"1\.self_attn\.qkv_proj: .* but some of model\.layers\.0\."
    ):
        made.plan(f"{ATTENTION.format(1)}.qkv_proj", MERGED)


def test_experts_that_no_file_holds_are_refused(tmp_path):
    made = planner(tmp_path, EXPERTS, is_packed=True)
    shards = ("up_proj", None, "down_proj")
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.experts: the checkpoint's files h"):
        made.expert_plan("model.layers.2.mlp.experts", shards)


def test_layers_of_other_names_are_left(tmp_path):
    """vLLM has layers that a checkpoint calls otherwise, or does not have."""
    made = planner(tmp_path, NAMES, is_packed=True)
    assert made.plan("model.layers.0.mlp.router", {}) is None
    assert made.plan("visual.blocks.0.attn.qkv", {}) is None


@pytest.mark.parametrize("is_packed", [False, True])
def test_patterns_that_match_nothing_are_warned_of(is_packed, tmp_path, caplog):
    """Not where the files say how every layer is stored."""
    settings = {
        "overrides": {"q_proj": "int8-g32", "qproj": "int8-g32", r"experts\.gate_up_proj": None},
        "skip": ["k_prj", r"\.0\."],
    }
    planner(tmp_path, NAMES + EXPERTS, is_packed, **settings)
    found = [record.getMessage().partition(" matches")[0] for record in caplog.records]
    wanted = ["quantization_config: overrides: 'qproj'", "quantization_config: skip: 'k_prj'"]
    assert found == ([] if is_packed else wanted)
