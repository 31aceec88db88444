"""The Triton backend on a GPU: the conformance kit, streams, graphs, torch.compile."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from triton_cases import DTYPES

from fdk_cuda.triton import TritonBackend, TritonLayout, compiled_launch
from fdk_cuda.triton.ops import triton_linear_op
from fdk_formats import Format
from fdk_formats.linear import QuantisedLinear
from fdk_formats.readers import read_dequant_gemm
from fdk_formats.testing import (
    Case,
    cases,
    check_backend,
    check_numerics,
    nrmse,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", list(cases(dtypes=DTYPES, device="cuda")), ids=str)
def test_conformance(case: Case) -> None:
    check_backend(TritonBackend(), case)


@pytest.mark.parametrize("m", [1, 2, 3, 8, 16, 17, 64, 200, 1024])
@pytest.mark.parametrize("format", ["custom1-g64", "custom3-g32", "custom4-g64", "affine4-g128"])
def test_every_m(format: str, m: int) -> None:
    case = Case(Format.parse(format), m, 200, 384, torch.bfloat16, "cuda")
    check_numerics(TritonBackend(), case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("signed", [False, True])
def test_dequant_gemm(signed: bool, dtype: torch.dtype) -> None:
    """Bytes of pack_2xint4 in both directions, against the formula in float64."""
    torch.manual_seed(0)
    n, k, group_size = 256, 384, 128
    low = -8 if signed else 0
    codes = torch.randint(low, low + 16, (k, n), device="cuda")
    scales = (torch.rand(k // group_size, n, device="cuda") / 8).to(dtype)
    zeros = (torch.rand(k // group_size, n, device="cuda") * 15 + low).to(dtype)
    packed = ((codes[::2] & 15) | (codes[1::2] & 15) << 4).to(torch.uint8)
    layout = TritonLayout(
        read_dequant_gemm(packed.view(torch.int8) if signed else packed, scales, zeros)
    )
    exact = codes.double() - zeros.double().repeat_interleave(group_size, 0)
    exact *= scales.double().repeat_interleave(group_size, 0)  # [k, n]
    for m in (1, 16, 40, 300):
        x, grad_y = torch.randn(m, k).cuda().to(dtype), torch.randn(m, n).cuda().to(dtype)
        for y, torch_y, oracle in (
            (layout(x), x @ exact.to(dtype), x.double() @ exact),
            (layout.grad_x(grad_y), grad_y @ exact.T.to(dtype), grad_y.double() @ exact.T),
        ):
            assert nrmse(y, oracle) <= 2 * nrmse(torch_y, oracle)


def test_launch_compiled() -> None:
    """The second call launches the compiled kernel directly, except with unaligned x."""
    linear, x = layer()
    layout, bias = linear.layout, linear.bias.detach()
    first = layout(x, bias)
    before = len(compiled_launch._compiled)
    assert torch.equal(layout(x, bias), first)
    assert len(compiled_launch._compiled) == before
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)
    assert shifted.data_ptr() % compiled_launch.ALIGNMENT != 0
    assert torch.equal(layout(shifted, bias), first)
    assert torch.equal(layout(x), layout(x))


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
    a: TritonLayout = linear.layout
    arguments = (x.requires_grad_(), a.words, a.scale, a.zero_point, a.values, a.lanes, 4, 64)
    torch.library.opcheck(triton_linear_op.op, (*arguments, False, linear.bias, 128, 256))


# torch 2.11 raises a deprecation warning when Inductor is first imported.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*")
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
        late = x.clone()  # ordered after the sleep on this stream only
        y = linear(late)
    stream.synchronize()
    assert torch.equal(y, expected)


def test_two_streams() -> None:
    """Concurrent calls on two streams, each in its own order."""
    linear, x = layer(5)
    streams = [torch.cuda.Stream() for _ in range(2)]
    with torch.no_grad():
        expected = linear(x), linear(x * 2)
        torch.cuda.synchronize()
        results = []
        for stream, factor in zip(streams, (1, 2), strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10_000_000)
                results.append(linear(x * factor))
    torch.cuda.synchronize()
    assert all(map(torch.equal, results, expected))


# The debug mode's own warning.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
@pytest.mark.parametrize("m", [1, 16, 40, 300])
def test_no_synchronisation(m: int) -> None:
    linear, x = layer(m)
    x.requires_grad_()
    linear(x).sum().backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear(x).sum().backward()
        with torch.no_grad():
            linear(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_autocast() -> None:
    linear, x = layer()
    with torch.no_grad():
        expected = linear(x.half())
        with torch.autocast("cuda", dtype=torch.float16):
            assert torch.equal(linear(x.float()), expected)
            assert torch.equal(linear(x), expected)
