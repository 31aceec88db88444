"""SwiGLU by the product ahead of it, beside the same in two steps."""

from dataclasses import replace

import pytest
import torch
from marlin_cases import pack, random_x
from torch.nn.functional import silu

from fdk_cuda import nvrtc
from fdk_cuda.marlin import MARLIN_LUT, gated, gated_linear, in_turns, takes_gated
from fdk_cuda.marlin.launches import small_fields, small_launch
from fdk_cuda.marlin.layout import Geometry
from fdk_cuda.marlin.plan import Device, _plans, plan_small
from fdk_cuda.marlin.programs import Variant, small_m_program
from fdk_formats.format import Format
from fdk_formats.testing import nrmse, poisoned, random_quantised

DEVICES = {
    "sm_80": Device(processors=108, shared_bytes=166912, has_clusters=False),
    "sm_90a": Device(processors=132, shared_bytes=232448, has_clusters=True, is_hopper=True),
    "sm_120": Device(processors=170, shared_bytes=101376, has_clusters=True),
}
FEW = Device(processors=6, shared_bytes=232448, has_clusters=True)
FORMATS = [*(f"custom{bits}-g64" for bits in (1, 2, 3, 4, 8)), "affine1-g64", "affine4-g32"]


def two_steps(y):
    """``silu(gate) * up`` of rounded rows in turns: rounded where torch rounds, and in float64."""
    gate, up = y.unflatten(-1, (-1, 2, gated.GATE_ROWS)).unbind(-2)
    exact = silu(gate.double()) * up.double()
    return (silu(gate.float()).to(y.dtype) * up).flatten(-2), exact.flatten(-2)


def check(product, y):
    """Hardly an element differs, by another exponential in float32."""
    expected, exact = two_steps(y)
    assert product.shape == expected.shape
    assert (product == expected).double().mean() >= 0.99
    assert nrmse(product.double(), exact) <= 1.01 * nrmse(expected.double(), exact)


def test_rows_in_turns():
    gate, up = torch.arange(32), torch.arange(100, 132)
    rows = [*range(16), *range(100, 116), *range(16, 32), *range(116, 132)]
    assert in_turns(gate, up).tolist() == rows
    gate, up = torch.randn(2, 48, 5, 3)
    both = in_turns(gate, up)
    assert both.shape == (96, 5, 3)
    assert torch.equal(both[:32], torch.cat((gate[:16], up[:16])))


@pytest.mark.parametrize(("n", "other"), [(24, 24), (32, 48)])
def test_rows_that_cannot_take_turns(n, other):
    with pytest.raises(ValueError, match="a multiple of 16 rows"):
        in_turns(torch.zeros(n, 3), torch.zeros(other, 3))


def test_layouts_elsewhere_are_not_taken():
    q = random_quantised(Format.parse("custom4-g64"), 64, 128)
    assert not takes_gated(MARLIN_LUT.pack(q, dtype=torch.bfloat16), torch.zeros(1, 128))
    assert not takes_gated(torch.nn.Identity(), torch.zeros(1, 128))


@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("bits", [1, 4])
def test_gated_spills_nothing(bits, arch):
    """By the plans of a llama's gate and up, for few rows and many."""
    geometry = Geometry.of(Format.parse(f"custom{bits}-g64"), 28672, 4096)
    variant = Variant.of(geometry, torch.bfloat16)
    for m in (1, 16):
        plan = plan_small(geometry, torch.bfloat16, m, DEVICES[arch])
        program = small_m_program(variant, replace(plan.shape, gated=True))
        resources = nvrtc.compile_program(program, arch).resources
        assert (resources.stack_bytes, resources.spill_bytes) == (0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("format", "dtype"),
    [*((format, torch.bfloat16) for format in FORMATS), ("custom4-g64", torch.float16)],
)
def test_gated_on_gpu(format, dtype):
    for n, k in ((32, 128), (1216, 1024), (28672, 256)):
        _, layout = pack(format, n, k, dtype)
        for m in (1, 3, 16):
            x = random_x(m, 1, k, dtype=dtype, seed=m)
            y = layout(x)
            assert takes_gated(layout, x)
            with poisoned():
                product = gated_linear(layout, x)
            check(product, y)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("format", "m"), [("custom4-g64", 1), ("custom1-g64", 1), ("custom2-g64", 16)]
)
def test_gated_by_many_plans_on_gpu(format, m):
    """Short tiles that start early, several tiles to a block, clusters."""
    n, k = 1216, 1024
    _, layout = pack(format, n, k)
    x, device = random_x(m, k), 0
    variant = Variant.of(layout.geometry, x.dtype)
    plans = [p for p in _plans(layout.geometry, variant, m, FEW) if p.log_share >= 5]
    assert {p.split for p in plans} == {1, 2, 4}
    assert any(p.shape.short_blocks for p in plans)
    for plan in plans[::7]:
        fields = small_fields(variant, plan, layout.geometry, m)
        found = []
        for is_gated, width in ((False, n), (True, n // 2)):
            own = replace(plan, shape=replace(plan.shape, gated=is_gated))
            out = torch.full((m, width), torch.nan, device="cuda", dtype=x.dtype)
            pointers = layout.packed, layout.codebook, x
            addresses = *(t.data_ptr() for t in pointers), 0, out.data_ptr()
            small_launch(variant, own, device)(*addresses, *fields)
            found.append(out)
        check(found[1], found[0])


@pytest.mark.gpu
def test_what_is_refused_on_gpu():
    _, layout = pack("custom4-g64", 64, 128)
    for x in (random_x(17, 128), random_x(1, 128, dtype=torch.float16), random_x(2, 256)[:, ::2]):
        assert not takes_gated(layout, x)
        with pytest.raises(ValueError, match="takes few rows"):
            gated_linear(layout, x)
    _, layout = pack("custom4-g64", 48, 128)
    assert not takes_gated(layout, random_x(1, 128))


@pytest.mark.gpu
def test_what_would_be_slower_on_gpu(monkeypatch):
    """The op takes it all the same."""
    _, layout = pack("custom4-g64", 64, 128)
    monkeypatch.setattr(gated, "SLOWER", {(4, 64, 128, 1)})
    assert not takes_gated(layout, random_x(1, 1, 128))
    assert takes_gated(layout, random_x(2, 128))
    check(gated_linear(layout, random_x(1, 128)), layout(random_x(1, 128)))


@pytest.mark.gpu
def test_op_on_gpu():
    _, layout = pack("custom4-g64", 64, 128)
    weight = layout.packed, layout.codebook, layout.kernel_format
    torch.library.opcheck(gated.marlin_gated, (random_x(3, 128), *weight, *layout.shape))
