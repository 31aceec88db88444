"""Stacks of experts in the Marlin layout, few and many rows, on a Hopper GPU."""

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from marlin_cases import DTYPES, ON_HOPPER
from torch import Tensor

from fdk_cuda.marlin import expert_ops
from fdk_cuda.marlin.expert_layout import MarlinExpertLayout
from fdk_cuda.marlin.expert_ops import ExpertStack, config_for, few_rows, marlin_expert_linear_op
from fdk_cuda.marlin.grouped_product import grouped_product
from fdk_cuda.marlin.heuristics_experts import MAX_MEAN_ROWS, TILE_ROWS, expert_plans
from fdk_cuda.marlin.heuristics_hopper import grouped_plans
from fdk_cuda.marlin.instantiations import Variant
from fdk_cuda.marlin.runtime import device_limits
from fdk_cuda.triton import TritonBackend
from fdk_cuda.triton.configs.experts import ExpertConfig
from fdk_cuda.triton.expert_launch import Routing, gather, route
from fdk_formats import Format
from fdk_formats.testing import (
    ExpertCase,
    check_expert_backend,
    check_expert_numerics,
    expert_cases,
    nrmse,
    poisoned,
)

pytestmark = ON_HOPPER

FORMATS = [f"custom{bits}-g64" for bits in range(1, 9)]
FORMATS += ["custom2-g32", "affine1-g64-zint", "affine4-g128-zint", "affine5-g64", "affine8-row"]
FORMATS_OF_MANY_ROWS = [f"custom{bits}-g64" for bits in (1, 3, 4)]
FORMATS_OF_MANY_ROWS += ["custom2-g32", "custom8-g128", "affine4-g128-zint", "affine8-g64-zint"]
FORMATS_OF_MANY_ROWS += ["affine3-g64-fp16-zint"]

CASES = list(expert_cases(dtypes=DTYPES, group_sizes=(32, 64, 128, None), device="cuda"))


@pytest.fixture
def many_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Uses the kernel for many rows for any number of rows."""
    monkeypatch.setattr(expert_ops, "tile_rows", lambda *sizes: None)
    expert_ops._config.cache_clear()
    yield
    expert_ops._config.cache_clear()


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
    shared: bool = False,
) -> ExpertCase:
    sizes = experts, tokens, top_k, n, k, dtype
    return ExpertCase(Format.parse(format), *sizes, routing, shared, device="cuda")


def pack(case: ExpertCase) -> tuple[MarlinExpertLayout, ExpertStack]:
    layout = TritonBackend().pack_stack(case.stack(), dtype=case.dtype)
    assert isinstance(layout, MarlinExpertLayout)
    return layout, ExpertStack(layout.packed, layout.codebook, layout._format, case.n, case.k)


def exact_pairs(case: ExpertCase, x: Tensor, bias: Tensor, *, rounded: bool) -> Tensor:
    """Computes the products of the pairs' rows x in float64; zeros where there is no expert.

    Args:
        case: the case.
        x: ``[pairs, k]``.
        bias: ``[experts, n]``.
        rounded: whether weights are rounded to the dtype of x, as hopper_gemm.cu multiplies them.
    """
    ids = case.expert_ids().flatten()
    y = x.new_zeros(len(ids), case.n, dtype=torch.float64)
    for expert, q in enumerate(case.stack().matrices()):
        own = ids == expert
        if q.codebook is not None:  # kernels have it in the dtype of x
            q = replace(q, codebook=q.codebook.to(case.dtype).float())
        weight = q.dequantise(case.dtype if rounded else torch.float32).double()
        y[own] = x[own].double() @ weight.T + bias[expert].double()
    return y


def routing_of(ids: Tensor, experts: int, rows: int, kernel: object) -> Routing:
    config = ExpertConfig(kernel, rows, is_sorted=rows > 1)  # type: ignore[arg-type]
    return route(ids, experts, config, zeros=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_every_plan_of_few_rows(format: str, dtype: torch.dtype) -> None:
    """Every plan gives the same answer, with and without gates, and the same bits twice."""
    limits = device_limits(torch.cuda.current_device())
    for routing, n in (("random", 192), ("elsewhere", 80), ("one", 37)):
        case = case_of(format, 19, n, 256, dtype=dtype, routing=routing, shared=n == 37)
        if case.format.is_affine and case.shared_codebook:
            case = replace(case, shared_codebook=False)
        _, w = pack(case)
        x, bias = case.random(case.tokens, case.k) / 8, case.random(case.experts, case.n)
        ids, variant = case.expert_ids(), Variant.of(w.geometry, dtype)
        rows = x.repeat_interleave(case.top_k, 0)
        exact = exact_pairs(case, rows, bias, rounded=False)
        ways = [(False, exact)]
        if n % 16 == 0:
            gate, up = exact.chunk(2, -1)
            ways.append((True, torch.nn.functional.silu(gate) * up))
        for tile_rows in (1, TILE_ROWS):
            for plan in expert_plans(w.geometry, variant, tile_rows, limits):
                for swiglu, wanted in ways:
                    for wide in (False, True):
                        options = {"bias": bias, "swiglu": swiglu, "wide": wide}
                        with poisoned():
                            y = few_rows(x, w, ids, plan, **options)
                        error = nrmse(y, wanted)
                        allowed = 1.2 * nrmse(wanted.to(y.dtype), wanted) + 2e-5
                        assert error <= allowed, (plan, routing, swiglu, wide)
                        with poisoned():
                            assert torch.equal(few_rows(rows, w, ids, plan, **options), y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS_OF_MANY_ROWS)
def test_every_plan_of_many_rows(format: str, dtype: torch.dtype) -> None:
    """Every tile gives the same answer, with and without gates, in both orders."""
    limits = device_limits(torch.cuda.current_device())
    for routing, n in (("random", 352), ("elsewhere", 176), ("one", 37)):
        case = case_of(format, 150, n, 640, dtype=dtype, routing=routing)
        _, w = pack(case)
        x, bias = case.random(case.tokens, case.k) / 8, case.random(case.experts, case.n)
        ids = case.expert_ids()
        exact = exact_pairs(case, x.repeat_interleave(case.top_k, 0), bias, rounded=True)
        ways = [(False, exact)]
        if n % 16 == 0:
            gate, up = exact.chunk(2, -1)
            ways.append((True, torch.nn.functional.silu(gate) * up))
        for plan in grouped_plans(w.geometry, limits):
            known = routing_of(ids, case.experts, plan.shape.tile_m, plan)
            order = known.order.long()
            live = ids.flatten()[order] >= 0
            rows = gather(x, known)
            for swiglu, wanted in ways:
                fixed = w.packed, w.codebook, w.geometry, known, plan
                options = {"bias": bias, "swiglu": swiglu, "interleaved": n % 16 == 0}
                with poisoned():
                    y = grouped_product(rows, *fixed, zeros=True, sorted_y=False, **options)
                    sorted_y = grouped_product(rows, *fixed, zeros=False, sorted_y=True, **options)
                error, rounding = nrmse(y, wanted), nrmse(wanted.to(y.dtype), wanted)
                assert error <= 1.2 * rounding + 1e-5, (plan, routing, swiglu)
                assert torch.equal(sorted_y[live], y[order][live]), (plan, routing)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_conformance(case: ExpertCase) -> None:
    check_expert_backend(TritonBackend(), case)


@pytest.mark.usefixtures("many_rows")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conformance_of_many_rows(case: ExpertCase) -> None:
    check_expert_backend(TritonBackend(), case)


@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 40, 200])
@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
@pytest.mark.parametrize("format", ["custom4-g64", "custom1-g64", "custom3-g32", "affine4-g128"])
def test_every_number_of_tokens(format: str, top_k: int, tokens: int) -> None:
    for routing in ("random", "one", "rest", "elsewhere"):
        for experts in (8, 64):
            case = case_of(format, tokens, 320, 384, experts=experts, top_k=top_k, routing=routing)
            check_expert_numerics(TritonBackend(), case)


@pytest.mark.parametrize("tokens", [512, 4096])
@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("format", ["custom4-g64", "affine4-g128"])
def test_many_tokens(format: str, top_k: int, tokens: int) -> None:
    for routing in ("random", "one", "rest", "elsewhere"):
        case = case_of(format, tokens, 320, 384, top_k=top_k, routing=routing)
        check_expert_numerics(TritonBackend(), case)


def test_kernel_by_rows_of_an_expert() -> None:
    case = case_of("custom4-g64", 1, 320, 384)
    _, w = pack(case)
    x = case.random(1, 384)
    most = MAX_MEAN_ROWS
    assert not config_for(w, most * 4, 2, x).is_wgmma
    assert config_for(w, most * 4 + 1, 2, x).is_wgmma


@pytest.mark.parametrize("experts", [100, 512])
def test_many_experts(experts: int) -> None:
    """More pairs than threads, and than one thread block can sort."""
    for routing in ("random", "elsewhere"):
        case = case_of("custom3-g64", 500, 32, 64, experts=experts, top_k=8, routing=routing)
        check_expert_numerics(TritonBackend(), case)


def test_parts_of_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than thread blocks have room for are computed in parts."""
    monkeypatch.setattr(expert_ops, "MAX_WHOLE_TILES", 1)
    monkeypatch.setattr(expert_ops, "tile_rows", lambda *sizes: 8)
    expert_ops._config.cache_clear()
    up, down = case_of("custom4-g64", 300, 128, 256), case_of("custom4-g64", 300, 256, 64)
    check_expert_numerics(TritonBackend(), up)
    first, second = (pack(case)[0] for case in (up, down))
    x, ids = up.random(300, 256) / 8, up.expert_ids()
    weights = up.random(*ids.shape, dtype=torch.float32).softmax(1)
    with torch.no_grad():
        parts = first.mlp(second, x, ids, weights)
        monkeypatch.undo()
        expert_ops._config.cache_clear()
        assert nrmse(parts, first.mlp(second, x, ids, weights).double()) < 1e-2


def mlp_layouts(
    format: str, tokens: int, *, experts: int, top_k: int, n: int = 512, inner: int = 384
) -> tuple[MarlinExpertLayout, MarlinExpertLayout, ExpertCase, ExpertCase]:
    sizes = {"experts": experts, "top_k": top_k}
    first = case_of(format, tokens, 2 * inner, n, **sizes)
    second = case_of(format, tokens, n, inner, **sizes)
    return pack(first)[0], pack(second)[0], first, second


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (64, 6)])
@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 300, 2048])
@pytest.mark.parametrize("format", ["custom4-g64", "custom1-g64", "custom6-g64", "affine8-g64"])
def test_mlp(format: str, tokens: int, experts: int, top_k: int) -> None:
    """Deterministic, near the exact result, and captured graphs run with other experts."""
    sizes = {"experts": experts, "top_k": top_k}
    up, down, first, second = mlp_layouts(format, tokens, **sizes)
    ids = first.expert_ids()
    x = first.random(tokens, 512) / 8
    biases = first.random(experts, 768), second.random(experts, 512)
    weights = first.random(*ids.shape, dtype=torch.float32).softmax(1)
    both = exact_pairs(first, x.repeat_interleave(top_k, 0), biases[0], rounded=False)
    gate, inner = both.chunk(2, -1)
    inner = torch.nn.functional.silu(gate) * inner
    exact = exact_pairs(second, inner, biases[1], rounded=False).view(tokens, top_k, -1)
    exact = (exact * weights[..., None]).sum(1)
    with torch.no_grad(), poisoned():
        y = up.mlp(down, x, ids, weights, *biases)
        # Many rows round the weights too.
        assert nrmse(y, exact) <= 3 * nrmse(exact.to(y.dtype), exact)
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
        ids.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        assert not replayed.any()


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (64, 6)])
@pytest.mark.parametrize("tokens", [1, 4, 16, 64])
def test_dependent_launches_overlap(tokens: int, experts: int, top_k: int) -> None:
    """Kernels that start before the previous one ends read what it wrote.

    The experts of a call are computed on the GPU just before it, and differ from call to call.
    """
    sizes = {"experts": experts, "top_k": top_k}
    up, down, first, _ = mlp_layouts("custom4-g64", tokens, **sizes)
    router = first.random(512, experts)
    x = first.random(tokens, 512) / 8

    def block(y: Tensor) -> Tensor:
        scores, ids = (y.float() @ router.float()).topk(top_k)
        y = up.mlp(down, y, ids.int(), scores.softmax(1))
        return torch.nn.functional.layer_norm(y, (512,))

    with torch.no_grad():
        wanted = []
        y = x
        for _ in range(6):
            y = block(y)
            torch.cuda.synchronize()
            wanted.append(y)
        for _ in range(30):
            torch.cuda._sleep(2_000_000)  # so that launches queue up and kernels overlap
            y, got = x, []
            for _ in range(6):
                y = block(y)
                got.append(y)
            assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("format", ["custom4-g64", "affine3-g32-zint", "custom5-g64"])
def test_moves(format: str) -> None:
    """The layout survives copies and moves; bytes come back from a CPU too."""
    case = case_of(format, 5, 96, 256)
    layout, _ = pack(case)
    x, ids = case.random(5, 256), case.expert_ids()
    y = layout(x, ids)
    assert torch.equal(copy.deepcopy(layout)(x, ids), y)
    stack = layout.cpu().unpack()
    for name, tensor in case.stack().tensors().items():
        assert torch.equal(stack.tensors()[name], tensor.cpu())
    assert torch.equal(layout.cuda()(x, ids), y)


def test_opcheck() -> None:
    case = case_of("custom4-g64", 5, 64, 128, experts=32, top_k=4)
    _, w = pack(case)
    x, ids = case.random(5, 128).requires_grad_(), case.expert_ids()
    weights = case.random(*ids.shape).requires_grad_()
    arguments = (x, ids, w.packed, w.codebook, w.format, None, weights, 32, 64, 128)
    torch.library.opcheck(marlin_expert_linear_op.op, arguments)


# torch 2.11 raises a deprecation warning when Inductor is first imported.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*")
def test_compiles_whole() -> None:
    up, down, first, _ = mlp_layouts("custom4-g64", 5, experts=32, top_k=4)
    x, ids = first.random(5, 512), first.expert_ids()
    weights = first.random(*ids.shape, dtype=torch.float32).softmax(1)
    with torch.no_grad():
        compiled = torch.compile(up.mlp, fullgraph=True, dynamic=True)
        for tokens in (5, 2, 3):
            given = x[:tokens], ids[:tokens], weights[:tokens]
            assert torch.equal(compiled(down, *given), up.mlp(down, *given))
