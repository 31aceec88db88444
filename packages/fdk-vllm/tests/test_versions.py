"""The plug-in's changes to vLLM's configuration."""

import sys
import types

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: nox -s test-vllm")

PDL = "triton.enable_pdl"


@pytest.mark.parametrize(
    ("major", "options", "environment", "is_safe", "wanted"),
    [
        (9, {}, None, True, {PDL: True}),
        (9, {PDL: False}, None, True, {PDL: False}),
        (9, {}, "0", True, {}),
        (9, {}, None, False, {}),
        (9, {}, None, None, {}),
        (8, {}, None, True, {}),
        (None, {}, None, True, {}),
    ],
    ids=["hopper", "option", "environment", "other-torch", "no-fdk-cuda", "ampere", "cpu"],
)
def test_products_start_early_on_hopper(monkeypatch, major, options, environment, is_safe, wanted):
    from fdk_vllm.vllm_versions import start_products_early

    found = types.SimpleNamespace(start_kernels_early=lambda: is_safe)
    monkeypatch.setitem(sys.modules, "fdk_cuda", types.ModuleType("fdk_cuda"))
    monkeypatch.setitem(sys.modules, "fdk_cuda.inductor", None if is_safe is None else found)
    compilation = types.SimpleNamespace(inductor_compile_config=options)
    config = types.SimpleNamespace(compilation_config=compilation)
    monkeypatch.setattr("vllm.config.get_current_vllm_config", lambda: config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: major is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    monkeypatch.delenv("TORCHINDUCTOR_ENABLE_PDL", raising=False)
    if environment is not None:
        monkeypatch.setenv("TORCHINDUCTOR_ENABLE_PDL", environment)
    start_products_early()
    assert options == wanted


def test_inductor_has_the_option():
    """A name that Inductor does not know fails when vLLM compiles."""
    from torch._inductor import config
    from vllm.config import CompilationConfig

    assert hasattr(config.triton, "enable_pdl")
    assert isinstance(CompilationConfig().inductor_compile_config, dict)
