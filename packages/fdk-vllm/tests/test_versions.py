"""The plug-in's changes to vLLM's configuration."""

import sys
import types

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: nox -s test-vllm")

PDL = "triton.enable_pdl"


@pytest.fixture
def started(monkeypatch):
    """Stands in for a GPU and vLLM's configuration; returns a function that starts products early.

    It returns the options of Inductor, and how often its kernels were changed.
    """

    def start(major, options, environment, is_safe):
        from fdk_vllm.vllm_versions import start_products_early

        calls = []
        found = types.SimpleNamespace(start_kernels_early=lambda: calls.append(1) or is_safe)
        compilation = types.SimpleNamespace(inductor_compile_config=options)
        config = types.SimpleNamespace(compilation_config=compilation)
        monkeypatch.setitem(sys.modules, "fdk_cuda", types.ModuleType("fdk_cuda"))
        monkeypatch.setitem(sys.modules, "fdk_cuda.inductor", None if is_safe is None else found)
        found_config = None if options is None else config
        monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: found_config)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: major is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
        monkeypatch.delenv("TORCHINDUCTOR_ENABLE_PDL", raising=False)
        if environment is not None:
            monkeypatch.setenv("TORCHINDUCTOR_ENABLE_PDL", environment)
        start_products_early()
        return options, len(calls)

    return start


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
        (9, None, None, True, None),
    ],
    ids=["hopper", "option", "environment", "torch", "no-fdk-cuda", "ampere", "cpu", "reload"],
)
def test_products_start_early_on_hopper(started, major, options, environment, is_safe, wanted):
    assert started(major, options, environment, is_safe)[0] == wanted


@pytest.mark.parametrize(("options", "environment"), [({}, "1"), ({PDL: True}, None)])
def test_kernels_are_changed_for_who_chose_the_option(started, options, environment):
    assert started(10, dict(options), environment, True) == (options, 1)


@pytest.mark.parametrize(("options", "environment"), [({}, "1"), ({PDL: True}, None)])
def test_a_choice_that_is_not_safe_is_turned_off_once(started, options, environment, caplog):
    options = dict(options)
    for _ in range(2):
        assert started(9, options, environment, False)[0] == {PDL: False}
    (message,) = caplog.messages
    assert message.startswith(f"fdk: {PDL} is turned off: kernels that torch")


def test_inductor_has_the_option():
    """A name that Inductor does not know fails when vLLM compiles."""
    from torch._inductor import config
    from vllm.config import CompilationConfig

    assert hasattr(config.triton, "enable_pdl")
    assert isinstance(CompilationConfig().inductor_compile_config, dict)
