"""The Triton kernels for stacks of experts in the interpreter; test_interpreted.py runs this."""

import pytest
import torch
from torch import Tensor
from triton_cases import DTYPES
from triton_interpreter import fix_scalar_masks

from fdk_cuda.triton import TritonBackend, launch
from fdk_cuda.triton.configs import GemmConfig, GemvConfig
from fdk_cuda.triton.configs.experts import ExpertConfig
from fdk_cuda.triton.expert_launch import expert_linear, expert_reduce, gather, route
from fdk_cuda.triton.expert_layout import TritonExpertLayout
from fdk_cuda.triton.expert_ops import triton_expert_mlp_op
from fdk_formats import Format
from fdk_formats.experts import QuantisedExpertLinear, QuantisedExperts
from fdk_formats.testing import (
    ExpertCase,
    check_expert_backend,
    check_expert_decode,
    expert_cases,
    nrmse,
)
from fdk_formats.testing.conformance import exact_weight

assert launch.INTERPRETED
fix_scalar_masks()

# The interpreter needs a minute per case of few tokens; a GPU runs the whole kit.
SOME = list(expert_cases(dtypes=DTYPES, bits=(4, 8), group_sizes=(16,)))
SOME = [case for case in SOME if case.tokens * case.top_k <= 6]
GEMV, GEMM = GemvConfig(1, 2), GemmConfig(1, 4, 16)


def case_of(format: str, tokens: int, top_k: int, n: int, k: int, routing: str) -> ExpertCase:
    dtype = DTYPES[tokens % 2]
    return ExpertCase(Format.parse(format), 5, tokens, top_k, n, k, dtype, routing)


def exact_pairs(case: ExpertCase, x: Tensor) -> Tensor:
    """Computes the products of all pairs, ``[t, top_k, n, float64]``, for x of each pair."""
    known = case.expert_ids().clamp(min=0).long()
    weights = torch.stack([exact_weight(q, case.dtype) for q in case.stack().matrices()])
    return torch.einsum("tjk,tjnk->tjn", x, weights[known])


def exact_bias(bias: Tensor, ids: Tensor) -> Tensor:
    """Returns the bias of each pair."""
    return bias.double()[ids.clamp(min=0).long()]


def product(case: ExpertCase, config: ExpertConfig, *, swiglu: bool, weighted: bool) -> Tensor:
    """Computes y of a case with one configuration, and the error of rounding it."""
    stack, ids = case.stack(), case.expert_ids()
    w = TritonExpertLayout(stack)._weight()
    x, bias = case.random(case.tokens, case.k), case.random(case.experts, case.n)
    weights = case.random(*ids.shape, dtype=torch.float32).softmax(1) if weighted else None
    routing = route(ids, case.experts, config, zeros=not weighted)
    y = expert_linear(x, w, routing, config, bias=bias, weights=weights, swiglu=swiglu)
    y = expert_reduce(y, routing, case.dtype) if weighted else y.to(case.dtype)
    exact = exact_pairs(case, x.double()[:, None].expand(*ids.shape, -1)) + exact_bias(bias, ids)
    if swiglu:
        gate, up = exact.chunk(2, -1)
        exact = torch.nn.functional.silu(gate) * up
    exact = exact.where((ids >= 0)[..., None], 0)
    exact = exact if weights is None else (exact * weights[..., None]).sum(1)
    exact = exact.view(y.shape)
    assert nrmse(y, exact) <= 1.1 * nrmse(exact.to(case.dtype), exact) + 1e-6
    return y


@pytest.mark.parametrize("case", SOME[:2], ids=str)
def test_conformance(case: ExpertCase) -> None:
    check_expert_backend(TritonBackend(), case)


@pytest.mark.parametrize(
    ("codebook", "bits"), [("custom", 1), ("affine", 2), ("custom", 3), ("custom", 8)]
)
def test_decode(codebook: str, bits: int) -> None:
    """Many rows of an expert, which the GEMM computes, and few."""
    for tokens in (1, 19):
        format = Format(codebook, bits, (24, 32)[bits % 2])
        case = ExpertCase(format, 2, tokens, 2, 19, 96, DTYPES[bits % 2], "random", seed=bits)
        check_expert_decode(TritonBackend(), case)


@pytest.mark.parametrize("routing", ["random", "one", "rest", "elsewhere"])
@pytest.mark.parametrize(
    "config",
    [
        ExpertConfig(GEMV, 8, is_sorted=False),
        ExpertConfig(GEMV, 8),
        ExpertConfig(GemvConfig(2, 2, ahead=0), 16),
        ExpertConfig(GEMM, 16),
        ExpertConfig(GemmConfig(1, 4, 32), 32),
    ],
    ids=str,
)
def test_every_tile(config: ExpertConfig, routing: str) -> None:
    """Experts without tokens, with all of them, and tiles that are not full."""
    case = case_of("custom4-g32", 6, 2, 24, 64, routing)
    product(case, config, swiglu=False, weighted=routing in ("one", "elsewhere"))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        ExpertConfig(GemvConfig(2, 2), 8, is_sorted=False),
        ExpertConfig(GemvConfig(2, 2, minus=True), 16),
        ExpertConfig(GemmConfig(2, 4, 16), 16),
    ],
    ids=str,
)
@pytest.mark.parametrize("format", ["custom4-g32", "affine2-g32-zint"])
def test_swiglu(format: str, config: ExpertConfig, weighted: bool) -> None:
    case = case_of(format, 4, 2, 64, 32, "elsewhere")
    product(case, config, swiglu=True, weighted=weighted)


@pytest.mark.parametrize("experts", [1, 5, 31])
@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("zeros", [True, False])
def test_route(experts: int, tokens: int, zeros: bool) -> None:
    """A stable sort by expert, and tiles that cover it."""
    rows, top_k = 8, 3
    ids = torch.randint(-1, experts + 1, (tokens, top_k))
    config = ExpertConfig(GEMV, rows)
    routing = route(ids, experts, config, zeros=zeros)
    flat = ids.flatten().where((ids.flatten() >= 0), experts)
    assert torch.equal(routing.order.long(), flat.argsort(stable=True))
    assert routing.max_tiles == config.max_tiles(tokens * top_k, experts)
    wanted = []
    first = 0
    for expert, count in enumerate(flat.bincount(minlength=experts + 1).tolist()):
        end = first + count
        if zeros or expert < experts:
            wanted += [[expert, at, min(at + rows, end)] for at in range(first, end, rows)]
        first = end
    *listed, count = routing.tiles.tolist()
    tiles = torch.tensor(listed).view(3, -1).T.tolist()
    assert count == len(wanted) <= len(tiles)
    assert tiles[: len(wanted)] == wanted
    assert all(expert == -1 for expert, *_ in tiles[len(wanted) :])


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("k", [40, 37])
def test_gather(k: int, top_k: int) -> None:
    """Rows of tokens or of pairs, in the order of experts, padded to whole 16 bytes."""
    ids = torch.randint(-1, 4, (9, top_k))
    routing = route(ids, 4, ExpertConfig(GEMV, 8), zeros=False)
    order = routing.order.long()
    for rows in (9, 9 * top_k):
        x = torch.randn(rows, k).bfloat16()
        got = gather(x, routing)
        assert got.shape == (9 * top_k, 40)
        assert torch.equal(got[:, :k], x[order // (9 * top_k // rows)])
        assert not got[:, k:].any()


def test_reduce_weights() -> None:
    """Results that are not weighted yet; rows of no expert are not read."""
    ids = torch.tensor([[0, -1, 2], [3, 1, 7]])
    routing = route(ids, 4, ExpertConfig(GEMV, 8), zeros=False)
    weights, y = torch.rand(2, 3), torch.randn(2, 3, 40).half()
    live = (ids >= 0) & (ids < 4)
    wanted = (y.double() * weights[..., None] * live[..., None]).sum(1)
    y[~live] = torch.nan
    got = expert_reduce(y.view(6, 40), routing, torch.float16, weights)
    assert got.dtype == torch.float16
    assert nrmse(got, wanted) <= 1.1 * nrmse(wanted.half(), wanted)


@pytest.mark.parametrize(
    ("format", "tokens"), [("custom4-g32", 1), ("custom3-g32", 4), ("affine5-g32", 1)]
)
def test_mlp(format: str, tokens: int) -> None:
    """Equal to the two products but for roundings; 5 bits have no fused SwiGLU."""
    up_case = case_of(format, tokens, 2, 64, 64, "elsewhere")
    down_case = case_of(format, tokens, 2, 24, 32, "elsewhere")
    ids, x = up_case.expert_ids(), up_case.random(tokens, 64)
    weights = up_case.random(*ids.shape, dtype=torch.float32).softmax(1)
    biases = up_case.random(5, 64), down_case.random(5, 24)
    up = TritonExpertLayout(up_case.stack())
    down = TritonExpertLayout(down_case.stack())
    y = up.mlp(down, x, ids, weights, *biases)
    # With gradients the products run one by one.
    composed = up.mlp(down, x.clone().requires_grad_(), ids, weights, *biases)
    pairs = x.double()[:, None].expand(*ids.shape, -1)
    gate, inner = (exact_pairs(up_case, pairs) + exact_bias(biases[0], ids)).chunk(2, -1)
    inner = torch.nn.functional.silu(gate) * inner
    exact = exact_pairs(down_case, inner) + exact_bias(biases[1], ids)
    exact = (exact.where((ids >= 0)[..., None], 0) * weights[..., None]).sum(1)
    assert y.dtype == x.dtype
    assert nrmse(y, exact) <= 1.1 * nrmse(composed.detach(), exact)


def test_mlp_refuses_other_shapes() -> None:
    up = TritonExpertLayout(case_of("custom4-g32", 1, 1, 64, 32, "random").stack())
    ids, weights = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
    x, short = torch.zeros(1, 32).half(), torch.zeros(64).half()
    wide = TritonExpertLayout(case_of("custom4-g32", 1, 1, 64, 64, "random").stack())
    with pytest.raises(ValueError, match=r"mlp: down must be \[5, 64, 32\], got \[5, 64, 64\]"):
        up.mlp(wide, x, ids, weights)
    with pytest.raises(ValueError, match=r"down_bias must be torch.float16 \[5, 64\], got"):
        up.mlp(up, x, ids, weights, None, short)
    with pytest.raises(TypeError, match=r"x must be torch\.bfloat16 or torch\.float16, got"):
        up.mlp(up, x.float(), ids, weights)


def test_batch_invariant() -> None:
    case = case_of("custom4-g32", 5, 2, 24, 64, "random")
    layout = TritonBackend(batch_invariant=True).pack_stack(case.stack(), dtype=case.dtype)
    x, ids = case.random(5, 64), case.expert_ids()
    whole = layout(x, ids)
    for m in (1, 4):
        assert torch.equal(layout(x[:m], ids[:m]), whole[:m])


def test_layer() -> None:
    """A projection packs for this backend, and gives back its tensors."""
    case = case_of("custom4-g32", 2, 2, 24, 64, "elsewhere")
    stack, bias = case.stack(), case.random(5, 24)
    layer = QuantisedExpertLinear.from_quantised(stack, bias, backend="triton", dtype=case.dtype)
    x, ids = case.random(2, 64), case.expert_ids()
    y = layer(x, ids)
    assert torch.equal(y, TritonExpertLayout(stack)(x, ids, bias))
    assert torch.equal(layer.state_dict()["weight_packed"], stack.packed)


class Experts(torch.nn.Module):
    """Experts with SwiGLU, described as transformers does; their weights are assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.has_gate, self.has_bias, self.has_post_expert_norm = True, False, False
        self._is_expert_parallel = False

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


def test_experts_of_a_model_are_one_fused_call() -> None:
    first, second = (case_of("custom4-g32", 2, 2, n, k, "random") for n, k in ((64, 64), (24, 32)))
    x, ids, weights = first.random(2, 64), first.expert_ids(), torch.full((2, 2), 0.5)
    settings = {"backend": "triton", "dtype": first.dtype}
    projections = {
        name: QuantisedExpertLinear.from_quantised(case.stack(), **settings)
        for name, case in (("gate_up_proj", first), ("down_proj", second))
    }
    source = Experts()
    experts = QuantisedExperts(source, projections)
    experts.take_over(source)
    up, down = (TritonExpertLayout(case.stack()) for case in (first, second))
    with torch.no_grad():
        y = experts(x, ids, weights)
        assert torch.equal(y, up.mlp(down, x, ids, weights))
        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, ids, weights), y)
    x.requires_grad_()
    y = experts(x, ids, weights)
    assert torch.equal(y, up.mlp(down, x, ids, weights))  # product by product
    (dx,) = torch.autograd.grad(y.float().square().sum(), x)
    assert dx.isfinite().all()
    assert dx.any()


def test_compiles_whole() -> None:
    """The MLP is one op of a graph, whose fake kernel has the right shape."""
    first = case_of("custom4-g32", 2, 1, 64, 32, "random")
    second = case_of("custom4-g32", 2, 1, 16, 32, "random")
    up, down = TritonExpertLayout(first.stack()), TritonExpertLayout(second.stack())
    given = first.random(2, 32), first.expert_ids(), torch.ones(2, 1)
    with torch.no_grad():
        compiled = torch.compile(up.mlp, fullgraph=True, dynamic=True, backend="aot_eager")
        assert torch.equal(compiled(down, *given), up.mlp(down, *given))
    layouts = up._tensors(), None, 4, 32, down._tensors(), None, 4, 32
    arguments = (*given, *layouts, 32, 16)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(triton_expert_mlp_op.op, arguments, test_utils=checks)
