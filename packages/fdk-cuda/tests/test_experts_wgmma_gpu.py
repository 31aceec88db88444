"""The grouped GEMM by wgmma for stacks of experts, on a Hopper GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from marlin_cases import DTYPES, ON_HOPPER
from torch import Tensor

from fdk_cuda.marlin.heuristics_hopper import grouped_plans
from fdk_cuda.marlin.layout import pack_layout
from fdk_cuda.marlin.runtime import device_limits
from fdk_cuda.triton import TritonBackend, expert_wgmma
from fdk_cuda.triton.configs.experts import ExpertConfig
from fdk_cuda.triton.expert_launch import route
from fdk_cuda.triton.expert_layout import TritonExpertLayout
from fdk_cuda.triton.expert_ops import config_for
from fdk_formats import Format
from fdk_formats.testing import (
    ExpertCase,
    check_expert_backend,
    check_expert_numerics,
    expert_cases,
    nrmse,
    poisoned,
)

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("always")]

FORMATS = ["custom1-g64", "custom2-g32", "custom3-g64", "custom4-g64", "custom8-g128"]
FORMATS += ["affine4-g128-zint", "affine8-g64-zint", "affine3-g64-fp16-zint"]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the kernel for any number of rows."""
    monkeypatch.setattr(expert_wgmma, "MIN_ROWS", 0)


@pytest.mark.parametrize(
    "case",
    list(expert_cases(dtypes=DTYPES, group_sizes=(32, 64, 128, None), device="cuda")),
    ids=str,
)
def test_conformance(case: ExpertCase) -> None:
    check_expert_backend(TritonBackend(), case)


def case_of(
    format: str,
    tokens: int,
    n: int,
    k: int,
    *,
    experts: int = 8,
    top_k: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    routing: str = "random",
) -> ExpertCase:
    sizes = experts, tokens, top_k, n, k, dtype
    return ExpertCase(Format.parse(format), *sizes, routing, device="cuda")


def exact_pairs(case: ExpertCase, x: Tensor, bias: Tensor) -> Tensor:
    """Computes the products of the pairs' rows x in float64; zeros where there is no expert.

    Weights are rounded to the dtype, as the kernel multiplies them.
    """
    ids = case.expert_ids().flatten()
    y = x.new_zeros(len(ids), case.n, dtype=torch.float64)
    for expert, q in enumerate(case.stack().matrices()):
        own = ids == expert
        weight = q.dequantise(case.dtype).double()
        y[own] = x[own].double() @ weight.T + bias[expert].double()
    return y


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_every_plan(format: str, dtype: torch.dtype) -> None:
    """Every tile gives the same answer, with and without gates, in both orders."""
    limits = device_limits(torch.cuda.current_device())
    for routing_kind in ("random", "one", "elsewhere"):
        case = case_of(format, 150, 352, 640, dtype=dtype, routing=routing_kind)
        w = TritonExpertLayout(case.stack())._weight()
        geometry = expert_wgmma.stack_geometry(w)
        assert geometry is not None
        x, bias = case.random(case.tokens, case.k) / 8, case.random(case.experts, case.n)
        ids = case.expert_ids()
        exact = exact_pairs(case, x.repeat_interleave(case.top_k, 0), bias)
        gate, up = exact.chunk(2, -1)
        gated = torch.nn.functional.silu(gate) * up
        for plan in grouped_plans(geometry, limits):
            config = ExpertConfig(plan, plan.shape.tile_m)
            routing = route(ids, case.experts, config, zeros=True)
            order = routing.order.long()
            known = ids.flatten()[order] >= 0
            for swiglu, wanted in ((False, exact), (True, gated)):
                options = {"bias": bias, "swiglu": swiglu}
                with poisoned():
                    y = expert_wgmma.expert_wgmma(x, w, routing, plan, zeros=True, **options)
                    rows = expert_wgmma.gather(x, routing)
                    by_expert = expert_wgmma.expert_wgmma(
                        rows, w, routing, plan, sorted_x=True, sorted_y=True, **options
                    )
                error, rounding = nrmse(y, wanted), nrmse(wanted.to(dtype), wanted)
                assert error <= 1.2 * rounding + 1e-5, (plan, routing_kind, swiglu)
                assert torch.equal(by_expert[known], y[order][known]), (plan, routing_kind)


@pytest.mark.parametrize(
    "format", ["custom1-row", "custom3-g32", "affine4-g64-zint", "custom6-g64"]
)
def test_repacked_bytes(format: str) -> None:
    """The kernel gives the bytes of the torch functions, as it does on the host."""
    case = case_of(format, 1, 200, 1152)
    stack = case.stack()
    w = TritonExpertLayout(stack)._weight()
    geometry = expert_wgmma.stack_geometry(w)
    assert geometry is not None
    with poisoned():
        got = expert_wgmma.repack_stack(w, geometry, gates=False)
    for packed, q in zip(got, stack.matrices(), strict=True):
        zero = None if q.zero_point is None else q.zero_point.to(q.scale.dtype)
        assert torch.equal(packed, pack_layout(geometry, q.packed, q.scale, zero))


@pytest.mark.parametrize("tokens", [512, 4096])
@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("format", ["custom4-g64", "affine4-g128"])
def test_many_tokens(format: str, top_k: int, tokens: int) -> None:
    for routing in ("random", "one", "rest", "elsewhere"):
        case = case_of(format, tokens, 320, 384, top_k=top_k, routing=routing)
        layout = TritonExpertLayout(case.stack())
        assert config_for(layout._weight(), tokens, top_k, 0).is_wgmma
        check_expert_numerics(TritonBackend(), case)


def test_config_by_rows_of_an_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_wgmma, "MIN_ROWS", 64)
    layout = TritonExpertLayout(case_of("custom4-g64", 1, 320, 384).stack())
    w = layout._weight()
    least = 8 * expert_wgmma.MIN_ROWS // 2
    assert not config_for(w, least - 1, 2, 0).is_wgmma
    assert config_for(w, least, 2, 0).is_wgmma


@pytest.mark.parametrize("tokens", [300, 2048])
@pytest.mark.parametrize("format", ["custom4-g64", "custom2-g64", "affine8-g64-zint"])
def test_mlp(format: str, tokens: int) -> None:
    """Deterministic, near the exact result, and captured graphs run with other experts."""
    first, second = case_of(format, tokens, 768, 512), case_of(format, tokens, 512, 384)
    up, down = TritonExpertLayout(first.stack()), TritonExpertLayout(second.stack())
    ids = first.expert_ids()
    x = first.random(tokens, 512) / 8
    biases = first.random(8, 768), second.random(8, 512)
    weights = first.random(*ids.shape, dtype=torch.float32).softmax(1)
    both = exact_pairs(first, x.repeat_interleave(2, 0), biases[0])
    gate, inner = both.chunk(2, -1)
    inner = torch.nn.functional.silu(gate) * inner
    exact = exact_pairs(second, inner, biases[1]).view(tokens, 2, -1)
    exact = (exact * weights[..., None]).sum(1)
    with torch.no_grad(), poisoned():
        y = up.mlp(down, x, ids, weights, *biases)
        # Rounded between the products, after the second, and in the sum.
        assert nrmse(y, exact) <= 2 * nrmse(exact.to(y.dtype), exact)
        for _ in range(20):
            assert torch.equal(up.mlp(down, x, ids, weights, *biases), y)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = up.mlp(down, x, ids, weights, *biases)
        for shift in (1, 7):
            ids.copy_(ids.roll(shift, 0))
            ids[: tokens // 2] = shift  # one expert takes half, others may be empty
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(replayed, up.mlp(down, x, ids, weights, *biases))


def test_one_stack_in_memory() -> None:
    """The memory of a call is free again after it."""
    case = case_of("custom4-g64", 512, 1024, 1024)
    layout = TritonExpertLayout(case.stack())
    x, ids = case.random(512, 1024), case.expert_ids()
    weights = case.random(*ids.shape, dtype=torch.float32).softmax(1)
    y = layout(x, ids, None, weights)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    layout(x, ids, None, weights)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert y.isfinite().all()
