"""Found without an import, in any order of imports; never random weights."""

import os
import subprocess
import sys

import pytest
import tiny_models
import torch

from fdk_transformers import FdkConfig

LOAD = """
model = Auto.from_pretrained(sys.argv[1])
kind = type(model.model.layers[0].self_attn.q_proj).__name__
assert kind == "QuantisedLinear", kind
ids = torch.arange(6, 12)[None]
with torch.no_grad():
    torch.save(model(input_ids=ids).logits, sys.argv[2])
"""
AUTO = "from transformers import AutoModelForCausalLM as Auto"
IMPORTS = {
    "torch first": f"import torch; {AUTO}",
    "transformers first": f"{AUTO}; import torch",
    "a model class": "from transformers import LlamaForCausalLM as Auto; import torch",
    "modeling_utils": f"import transformers.modeling_utils; {AUTO}; import torch",
    # The module waited for imports torch itself, and with it this package.
    "the tables of quantisers": f"import transformers.quantizers.auto; {AUTO}; import torch",
    "their package": f"from transformers.quantizers import HfQuantizer; {AUTO}; import torch",
    "another configuration": f"from transformers import BitsAndBytesConfig; {AUTO}; import torch",
    "this package's class": f"from fdk_transformers import FdkConfig; {AUTO}; import torch",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved quantised model and its logits."""
    path = tmp_path_factory.mktemp("model")
    tiny_models.make("llama").save_pretrained(path / "source")
    kind = tiny_models.model_class("llama")
    model = kind.from_pretrained(path / "source", quantization_config=FdkConfig("int4-g32"))
    model.save_pretrained(path / "small")
    with torch.no_grad():
        torch.save(model(input_ids=torch.arange(6, 12)[None]).logits, path / "wanted")
    return path


def run(folder, tmp_path, imports, **env):
    """Loads the model in a new process; returns it and whether its logits are those wanted."""
    code = f"import sys; {imports}\n{LOAD}"
    done = subprocess.run(
        [sys.executable, "-c", code, folder / "small", tmp_path / "logits"],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        assert torch.equal(torch.load(tmp_path / "logits"), torch.load(folder / "wanted"))
    return done


@pytest.mark.parametrize("order", IMPORTS)
def test_found_without_an_import(folder, tmp_path, order):
    done = run(folder, tmp_path, IMPORTS[order])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("order", ["before", "after"])
def test_an_import_is_the_sure_way(folder, tmp_path, order):
    imports = ["import fdk_transformers", f"import torch; {AUTO}"][
        :: 1 if order == "before" else -1
    ]
    done = run(folder, tmp_path, "; ".join(imports), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr


def test_transformers_alone_refuses_the_folder(folder, tmp_path):
    """Without this package transformers would make up weights, and only warn of it."""
    done = run(folder, tmp_path, f"import torch; {AUTO}", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode != 0
    assert "ignore_mismatched_sizes" in done.stderr
    assert "Unknown quantization type, got fdk" in done.stderr


def test_importing_costs_nothing():
    code = "import sys, torch; assert 'transformers' not in sys.modules; import fdk_transformers"
    code += "; assert 'transformers' not in sys.modules and 'fdk_formats' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_names():
    import fdk_transformers

    with pytest.raises(AttributeError, match="has no attribute 'Config'"):
        fdk_transformers.Config  # noqa: B018
