"""The plug-in's changes to vLLM's configuration."""

import types

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: nox -s test-vllm")

PDL = "triton.enable_pdl"


@pytest.mark.parametrize(
    ("major", "options", "environment", "wanted"),
    [
        (9, {}, None, {PDL: True}),
        (9, {PDL: False}, None, {PDL: False}),
        (9, {}, "0", {}),
        (8, {}, None, {}),
        (None, {}, None, {}),
    ],
)
def test_products_start_early_on_hopper(monkeypatch, major, options, environment, wanted):
    from fdk_vllm.vllm_versions import start_products_early

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
