"""What `auto` takes by the recorded times, and where there are none."""

import pytest
import torch

import fdk_cuda
from fdk_cuda import measured
from fdk_cuda.measured import FIRST, OTHER, Case, measured_case, priority, told
from fdk_formats.backends import Problem, all_backends, select
from fdk_formats.format import Format

GPU = "Some GPU"
CASES = [
    Case("codebook", 4, 4096, 4096, {"marlin": (4.0, 9.0), "triton": (5.0, 6.0)}),
    Case("codebook", 4, 8192, 8192, {"marlin": (4.0, 6.0), "triton": (5.0, 6.0)}),
    Case("codebook", 4, 28672, 8192, {"marlin": (4.0, 4.0), "triton": (2.0, 5.0)}),
]


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """A GPU whose times are ``CASES``."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(measured, "_cases", lambda: {GPU: {("codebook", 4): CASES}})


def problem(format="custom4-g64", n=4096, k=4096, device="cuda"):
    return Problem(Format.parse(format), n, k, torch.bfloat16, torch.device(device))


def test_scores_by_hand():
    # 4 / 4 and 9 / 6; 5 / 4 and 6 / 6.
    assert CASES[0].scores == {"triton": 1.125, "marlin": 1.25}
    assert list(CASES[0].scores) == ["triton", "marlin"]


@pytest.mark.parametrize(
    ("n", "k", "nearest"),
    [(4096, 4096, 0), (1, 64, 0), (0, 64, 0), (6144, 4096, 0), (11008, 8192, 1), (17000, 9000, 2)],
)
def test_the_nearest_shape_speaks(n, k, nearest):
    assert measured_case(problem(n=n, k=k)) is CASES[nearest]


@pytest.mark.parametrize(
    ("n", "chosen"), [(4096, "triton"), (8192, "marlin-lut"), (28672, "triton")]
)
def test_auto_takes_the_fastest(n, chosen):
    asked = problem(n=n, k=8192 if n > 4096 else n)
    if "triton" not in all_backends():
        pytest.skip("needs triton")
    assert select(asked).name == chosen
    for name in measured.BACKENDS:
        wanted = FIRST if name.removesuffix("-lut") == chosen.removesuffix("-lut") else OTHER
        assert all_backends()[name].priority(asked) == wanted


@pytest.mark.parametrize(
    "asked", [problem("affine4-g64"), problem("custom3-g64"), problem(device="cpu")], ids=str
)
def test_a_fixed_order_where_nothing_was_measured(asked):
    assert measured_case(asked) is None
    assert [priority(name, asked, batch_invariant=False) for name in measured.BACKENDS] == [
        FIRST,
        FIRST,
        OTHER,
    ]
    assert told(asked) == "fixed order: not measured"


def test_another_gpu_has_the_fixed_order(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Another GPU")
    assert measured_case(problem()) is None


def test_invariant_layers_have_the_fixed_order():
    assert priority("triton", problem(), batch_invariant=False) == FIRST
    assert priority("triton", problem(), batch_invariant=True) == OTHER
    fdk_cuda.register_backends(batch_invariant=True)
    try:
        assert select(problem()).name == "marlin-lut"
    finally:
        fdk_cuda.register_backends()


def test_what_is_told():
    assert told(problem()) == "measured at 4096 x 4096: triton 1.12, marlin 1.25"
