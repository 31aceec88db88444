"""The Triton backend on a GPU: the whole conformance kit, and its place in PyTorch."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton is not installed")

from fdk_cuda.triton import TritonBackend, TritonLayout, launch
from fdk_cuda.triton.configs import GEMM_CONFIGS, SMALL_CONFIGS, GemmConfig, fit
from fdk_cuda.triton.linear import triton_linear_op
from fdk_formats import Format
from fdk_formats.linear import QuantisedLinear
from fdk_formats.testing import Case, cases, check_backend, check_numerics, nrmse

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float16)
FORMATS = [(codebook, bits) for codebook in ("custom", "affine") for bits in range(1, 9)]


def weight(layout: TritonLayout) -> launch.Weight:
    tensors = (layout.words, layout.scale, layout.zero_point, layout.values, layout.lanes)
    return launch.Weight(*tensors, layout.arrangement)


@pytest.mark.parametrize("case", list(cases(dtypes=DTYPES, device="cuda")), ids=str)
def test_conformance(case: Case) -> None:
    check_backend(TritonBackend(), case)


@pytest.mark.parametrize("m", [1, 2, 3, 8, 16, 17, 64, 200, 1024])
@pytest.mark.parametrize("format", ["custom1-g64", "custom3-g32", "custom4-g64", "affine4-g128"])
def test_every_m(format: str, m: int) -> None:
    case = Case(Format.parse(format), m, 200, 384, torch.bfloat16, "cuda")
    check_numerics(TritonBackend(), case)


@pytest.mark.parametrize(("codebook", "bits"), FORMATS)
def test_dequantise(codebook: str, bits: int) -> None:
    for group_size in (16, 24, 64, None):
        format = Format(codebook, bits, group_size)
        case = Case(format, 1, 37, 9 * (group_size or 30), DTYPES[bits % 2], "cuda")
        q = case.quantised()
        w_hat = launch.dequantise(weight(TritonLayout(q)), case.dtype)
        assert torch.equal(w_hat, q.dequantise(case.dtype))


@pytest.mark.parametrize("config", GEMM_CONFIGS, ids=str)
@pytest.mark.parametrize(("codebook", "bits"), [("custom", 3), ("custom", 4), ("affine", 8)])
def test_gemm(codebook: str, bits: int, config: GemmConfig) -> None:
    for group_size, split_k in ((16, 1), (64, 2), (24, 3)):
        case = Case(Format(codebook, bits, group_size), 77, 137, 9 * group_size, DTYPES[1], "cuda")
        q = case.quantised()
        x, bias = case.random(case.m, case.k), case.random(case.n)
        fitting = fit(replace(config, split_k=split_k), bits, launch.shared_memory(x.device))
        y = launch.gemm(x, weight(TritonLayout(q)), bias, fitting)
        w_hat = q.dequantise(case.dtype)
        oracle = x.double() @ w_hat.double().T + bias.double()
        torch_y = torch.nn.functional.linear(x, w_hat, bias)
        assert nrmse(y, oracle) <= 1.1 * nrmse(torch_y, oracle)


@pytest.mark.parametrize("config", SMALL_CONFIGS, ids=str)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8])
def test_small(bits: int, config: object) -> None:
    case = Case(Format("custom", bits, 64), 16, 333, 64 * 67, torch.bfloat16, "cuda")
    q = case.quantised()
    x = case.random(case.m, case.k)
    oracle = x.double() @ q.dequantise(torch.float64).T
    y = launch.small(x, weight(TritonLayout(q)), None, config)
    assert nrmse(y, oracle) < 6e-3
    assert torch.equal(y, launch.small(x, weight(TritonLayout(q)), None, config))


@pytest.mark.parametrize("bits", [1, 4])
def test_batch_invariant(bits: int) -> None:
    case = Case(Format("custom", bits, 64), 64, 300, 1024, torch.bfloat16, "cuda")
    layout = TritonBackend(batch_invariant=True).pack(case.quantised(), dtype=case.dtype)
    x = case.random(64, case.k)
    whole = layout(x)
    for m in range(1, 64):
        assert torch.equal(layout(x[:m]), whole[:m]), m
        assert torch.equal(layout(x[-m:]), whole[-m:]), m


def layer(m: int = 3) -> tuple[QuantisedLinear, Tensor]:
    case = Case(Format("custom", 4, 64), m, 128, 256, torch.bfloat16, "cuda")
    q = case.quantised()
    linear = QuantisedLinear.from_quantised(q, case.random(case.n), backend="triton")
    return linear, case.random(m, case.k)


def test_opcheck() -> None:
    linear, x = layer()
    a: TritonLayout = linear.weight.layout
    arguments = (x.requires_grad_(), a.words, a.scale, a.zero_point, a.values, a.lanes, 4, 64)
    torch.library.opcheck(triton_linear_op, (*arguments, False, linear.bias, 128, 256))


def test_compiles_whole() -> None:
    linear, x = layer()
    expected = linear(x)
    compiled = torch.compile(linear, fullgraph=True, dynamic=True)
    assert torch.equal(compiled(x), expected)
    for m in (2, 5, 40):
        rows = x[:1].expand(m, -1).contiguous()
        assert torch.equal(compiled(rows), linear(rows))


@pytest.mark.parametrize("m", [1, 16, 40, 300])
def test_cuda_graph(m: int) -> None:
    linear, x = layer(m)
    with torch.no_grad():
        expected = linear(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = linear(x)
        y.fill_(float("nan"))
        graph.replay()
    assert torch.equal(y, expected)


def test_runs_on_the_current_stream() -> None:
    linear, x = layer()
    expected = linear(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late = x.clone()  # ordered behind the sleep on this stream only
        y = linear(late)
    stream.synchronize()
    assert torch.equal(y, expected)


def test_low_rank_adapter_trains() -> None:
    torch.manual_seed(0)
    linear, x = layer(64)
    down = nn.Linear(256, 8, bias=False, device="cuda")
    up = nn.Linear(8, 128, bias=False, device="cuda")
    nn.init.zeros_(up.weight)
    first = nn.Parameter(x.float())  # so that the gradient must pass through the weight
    target = torch.randn(64, 128, device="cuda")
    optimiser = torch.optim.Adam([*down.parameters(), *up.parameters(), first], lr=1e-2)
    losses = []
    for _ in range(30):
        y = linear(first.bfloat16()).float() + up(down(first))
        loss = (y - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
