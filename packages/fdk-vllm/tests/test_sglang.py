"""The plug-in of SGLang, against stand-ins of what it imports from SGLang 0.5.23."""

import sys
import types
from abc import ABC, abstractmethod

import pytest
import torch
from torch import nn

from fdk_formats import quantise, quantise_stack, save
from fdk_vllm import sglang_plugin

SIZES = {"q": 64, "k": 32, "v": 32}


class LinearMethodBase(ABC):
    def create_weights(self, layer, *args, **options):
        raise NotImplementedError

    @abstractmethod
    def apply(self, layer, x, bias=None): ...


class QuantizationConfig(ABC):
    @abstractmethod
    def get_name(self): ...

    @abstractmethod
    def get_supported_act_dtypes(self): ...

    @classmethod
    @abstractmethod
    def get_min_capability(cls): ...

    @staticmethod
    @abstractmethod
    def get_config_filenames(): ...

    @classmethod
    @abstractmethod
    def from_config(cls, config): ...

    @abstractmethod
    def get_quant_method(self, layer, prefix): ...

    @abstractmethod
    def get_scaled_act_names(self): ...


class Unquantized(LinearMethodBase):
    def apply(self, layer, x, bias=None):
        return x


class LinearBase(nn.Module):
    output_sizes = tuple(SIZES.values())
    output_size = sum(SIZES.values())


@pytest.fixture
def sglang(monkeypatch):
    """Puts stand-ins in the place of SGLang's modules."""
    methods, choices = {}, []
    contents = {
        "arg_groups.choices": {"add_quantization_method_choices": choices.extend},
        "layers.linear": {"LinearBase": LinearBase},
        "layers.quantization": {"QUANTIZATION_METHODS": methods},
        "layers.quantization.base_config": {
            "LinearMethodBase": LinearMethodBase,
            "QuantizationConfig": QuantizationConfig,
        },
        "layers.quantization.unquant": {"UnquantizedLinearMethod": Unquantized},
    }
    for name in ("sglang", "sglang.srt", "sglang.srt.arg_groups", "sglang.srt.layers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, values in contents.items():
        module = types.ModuleType(f"sglang.srt.{name}")
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return types.SimpleNamespace(methods=methods, choices=choices)


def test_registered_once(sglang):
    sglang_plugin.register()
    sglang_plugin.register()
    assert sglang.choices == ["fdk"]
    assert sglang.methods["fdk"].get_min_capability() == 80


def test_layers_of_a_packed_checkpoint(sglang, tmp_path):
    weights = {name: quantise(torch.randn(n, 128), "int4-g64") for name, n in SIZES.items()}
    save(
        tmp_path / "model.safetensors",
        {f"layers.0.{name}_proj.weight": q for name, q in weights.items()},
    )
    sglang_plugin.register()
    config = {
        "quant_method": "fdk",
        "format": "int4-g64",
        "packed_modules_mapping": {"qkv_proj": [f"{name}_proj" for name in SIZES]},
        "hf_config": types.SimpleNamespace(name_or_path=str(tmp_path)),
    }
    made = sglang.methods["fdk"].from_config(config)
    assert made.get_name() == "fdk"
    assert made.get_quant_method(nn.Linear(2, 2), "norm") is None
    assert isinstance(made.get_quant_method(LinearBase(), "layers.0.o_proj"), Unquantized)
    layer = LinearBase()
    method = made.get_quant_method(layer, "layers.0.qkv_proj")
    method.create_weights(layer, 128, list(SIZES.values()), 128, sum(SIZES.values()), torch.float32)
    for name, q in weights.items():
        for field, tensor in q.tensors().items():
            parameter = layer.get_parameter(f"weight.{field}")
            parameter.weight_loader(parameter, tensor, name)
    method.process_weights_after_loading(layer)
    x = torch.randn(3, 128)
    wanted = torch.cat([x @ q.dequantise().T for q in weights.values()], -1)
    torch.testing.assert_close(method.apply(layer, x), wanted)


def test_packed_experts_are_refused(sglang, tmp_path):
    stack = quantise_stack(torch.randn(2, 8, 64), "int4-g64")
    save(tmp_path / "model.safetensors", {"mlp.experts.down_proj.weight": stack})
    sglang_plugin.register()
    config = {"hf_config": types.SimpleNamespace(name_or_path=str(tmp_path)), "format": "int4-g64"}
    with pytest.raises(ValueError, match=r"experts, which fdk does not compute in SGLang.*skip="):
        sglang.methods["fdk"].from_config(config)


def test_entry_point():
    from importlib.metadata import entry_points

    (found,) = entry_points(group="sglang.srt.plugins", name="fdk")
    assert found.load() is sglang_plugin.register
