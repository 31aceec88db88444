"""The Triton backend on a GPU: the whole conformance kit, and its place in PyTorch."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="Triton is not installed")

from triton_cases import DGRAD_CONFIGS, GEMM_CONFIGS, weight

from fdk_cuda.triton import TritonBackend, TritonLayout, bf16_baseline, launch, remembered
from fdk_cuda.triton.configs import H200, DgradConfig, GemmConfig, GemvConfig
from fdk_cuda.triton.configs.gemm import fit
from fdk_cuda.triton.configs.gemv import gemv_config
from fdk_cuda.triton.layout import POSITIONS, TABLE_BYTES, PackedLayout
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
    poisoned,
    random_quantised,
)

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float16)
FORMATS = [(codebook, bits) for codebook in ("custom", "affine") for bits in range(1, 9)]


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
@pytest.mark.parametrize(
    ("codebook", "bits"),
    [("custom", 3), ("custom", 4), ("affine", 4), ("affine", 6), ("affine", 8)],
)
def test_gemm(codebook: str, bits: int, config: GemmConfig) -> None:
    for group_size, split_k in ((16, 1), (64, 2), (24, 3)):
        case = Case(Format(codebook, bits, group_size), 77, 137, 9 * group_size, DTYPES[1], "cuda")
        q = case.quantised()
        x, bias = case.random(case.m, case.k), case.random(case.n)
        fitting = fit(replace(config, split_k=split_k), bits, launch.gpu_at(0).shared_bytes)
        y = launch.gemm(x, weight(TritonLayout(q)), bias, fitting)
        w_hat = q.dequantise(case.dtype)
        oracle = x.double() @ w_hat.double().T + bias.double()
        torch_y = torch.nn.functional.linear(x, w_hat, bias)
        assert nrmse(y, oracle) <= 1.1 * nrmse(torch_y, oracle)


@pytest.mark.parametrize(
    ("codebook", "m", "bits", "config"),
    [
        (codebook, m, bits, config)
        for codebook in ("custom", "affine")
        for m in (3, 16)
        for bits in range(1, 9)
        for config in dict.fromkeys(
            gemv_config(PackedLayout(n, 4096, bits, 64), m, H200, affine=codebook == "affine")
            for n in (4096, 8192, 28672)
        )
    ],
    ids=str,
)
def test_small(codebook: str, m: int, bits: int, config: GemvConfig) -> None:
    """Every configuration that is chosen, where it is chosen."""
    case = Case(Format(codebook, bits, 64), m, 333, 64 * 67, torch.bfloat16, "cuda")
    q = case.quantised()
    x = case.random(case.m, case.k)
    oracle = x.double() @ q.dequantise(torch.float64).T
    y = launch.gemv(x, weight(TritonLayout(q)), None, config)
    assert nrmse(y, oracle) < 6e-3
    assert torch.equal(y, launch.gemv(x, weight(TritonLayout(q)), None, config))


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize(
    "config",
    [
        GemvConfig(n_tiles=1, warps=4, fetch=2, overlap=True),
        GemvConfig(n_tiles=2, warps=4, fetch=2, overlap=True),
    ],
    ids=str,
)
def test_overlap_in_a_row(config: GemvConfig, m: int) -> None:
    """Each kernel starts while the one before still runs, and reads as x what that one writes."""
    if not launch.can_overlap(torch.cuda.current_device()):
        pytest.skip("needs a GPU of compute capability 9.0 or later")
    ws = []
    for seed, name in enumerate(["custom3", "custom1", "custom8", "affine4", "custom2", "custom4"]):
        q = random_quantised(Format.parse(f"{name}-g64"), 2048, 2048, seed=seed).to("cuda")
        ws.append(weight(TritonLayout(q)))
    # What an output's memory held before is never what belongs there: every x is another.
    generator = torch.Generator("cuda").manual_seed(0)
    xs = torch.randn(8, m, 2048, device="cuda", generator=generator).bfloat16()

    def run(x: Tensor, config: GemvConfig) -> Tensor:
        for w in ws:
            x = launch.gemv(x, w, None, config)
        return x

    wanted = [run(x, replace(config, overlap=False)) for x in xs]
    assert all(y.isfinite().all() and y.any() for y in wanted)
    run(xs[0], config)  # compiles
    for _ in range(50):
        torch.cuda._sleep(2_000_000)  # so that the launches queue up, and the kernels meet
        ys = [run(x, config) for x in xs]
        assert all(map(torch.equal, ys, wanted))


@pytest.mark.parametrize("config", [*DGRAD_CONFIGS, replace(DGRAD_CONFIGS[2], warps=8)], ids=str)
@pytest.mark.parametrize(("codebook", "bits"), FORMATS)
def test_transposed(codebook: str, bits: int, config: DgradConfig) -> None:
    for group_size, split_n, dtype in (
        (64, 2, DTYPES[0]),
        (24, 1, DTYPES[1]),
        (None, 3, DTYPES[0]),
    ):
        k = 9 * (group_size or 30)
        case = Case(Format(codebook, bits, group_size), 37, 333, k, dtype, "cuda")
        q = case.quantised()
        w, w_hat = weight(TritonLayout(q)), q.dequantise(dtype)
        chosen = replace(
            config,
            warps=min(config.warps, POSITIONS[bits]),
            split_n=split_n,
            ahead=split_n % 2,
            table=bits in TABLE_BYTES,
            overlap=split_n == 2,
        )
        rows = torch.arange(0, case.n, 9)
        one_hot = torch.zeros(len(rows), case.n, dtype=dtype, device="cuda")
        one_hot[range(len(rows)), rows] = 1
        assert torch.equal(launch.dgrad(one_hot, w, chosen), w_hat[rows.cuda()])
        grad_y = case.random(case.m, case.n)
        # The scale may be on grad_y and not on the weight, which torch rounds.
        oracle = grad_y.double() @ q.dequantise(torch.float64)
        error = nrmse(launch.dgrad(grad_y, w, chosen), oracle)
        assert error <= 2 * nrmse(grad_y @ w_hat, oracle)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("codebook", "bits", "positions"),
    [("custom", 1, 32), ("custom", 3, 32), ("affine", 3, 32), ("affine", 5, 16), ("custom", 7, 16)],
)
def test_transposed_of_many_positions(
    codebook: str, bits: int, positions: int, dtype: torch.dtype
) -> None:
    case = Case(Format(codebook, bits, 64), 5, 333, 9 * 64, dtype, "cuda")
    q = case.quantised()
    w, w_hat = weight(TritonLayout(q)), q.dequantise(dtype)
    grad_y = case.random(case.m, case.n)
    oracle = grad_y.double() @ q.dequantise(torch.float64)
    rows = torch.arange(0, case.n, 67, device="cuda")
    one_hot = torch.zeros(len(rows), case.n, dtype=dtype, device="cuda")
    one_hot[range(len(rows)), rows] = 1
    for ahead, split_n in ((0, 2), (1, 1)):
        config = replace(DGRAD_CONFIGS[0], positions=positions, ahead=ahead, split_n=split_n)
        config = replace(config, table=bits in TABLE_BYTES and bits != 1)
        with poisoned():
            assert torch.equal(launch.dgrad(one_hot, w, config), w_hat[rows])
            error = nrmse(launch.dgrad(grad_y, w, config), oracle)
        assert error <= 2 * nrmse(grad_y @ w_hat, oracle)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", ["custom4-g64", "affine4-g64", "affine4-g64-e8m0"])
def test_gradient_of_few_rows(format: str, dtype: torch.dtype) -> None:
    """By ``dgrad_kernel`` or, where codes would be transposed in a wrong layout, without."""
    case = Case(Format.parse(format), 5, 2048, 2048, dtype, "cuda")
    q = case.quantised()
    layout = TritonLayout(q)
    grad_y = case.random(case.m, case.n)
    oracle = grad_y.double() @ q.dequantise(torch.float64)
    limit = 2 * nrmse(grad_y @ q.dequantise(dtype), oracle)
    assert nrmse(layout.grad_x(grad_y), oracle) <= limit
    assert nrmse(layout.grad_x(grad_y), oracle) <= limit  # remembered: the launch, or that none is


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("signed", [False, True])
def test_dequant_gemm(signed: bool, dtype: torch.dtype) -> None:
    """pack_2xint4's bytes, both products, beside the formula in float64."""
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (203, 1000), (37, 8200)])
def test_plain(n: int, k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    w, bias = torch.randn(n, k).cuda().to(dtype), torch.randn(n).cuda().to(dtype)
    for m in (1, 16, 33, 130, 300):
        x = torch.randn(m, k).cuda().to(dtype)
        oracle = x.double() @ w.double().T + bias.double()
        allowed = 1.2 * nrmse(torch.nn.functional.linear(x, w, bias), oracle)
        assert nrmse(bf16_baseline.gemm(x, w, bias), oracle) <= allowed
        assert nrmse(bf16_baseline.gemv(x[0], w, bias), oracle[0]) <= 1.2 * allowed


def test_relaunch() -> None:
    """The second call goes to the compiled kernel; x that is not aligned does not."""
    linear, x = layer()
    layout, bias = linear.weight.layout, linear.bias.detach()
    first = layout(x, bias)
    before = len(remembered._launches)
    assert torch.equal(layout(x, bias), first)
    assert len(remembered._launches) == before
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)
    assert shifted.data_ptr() % remembered.ALIGNMENT != 0
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
    a: TritonLayout = linear.weight.layout
    arguments = (x.requires_grad_(), a.words, a.scale, a.zero_point, a.values, a.lanes, 4, 64)
    torch.library.opcheck(triton_linear_op.op, (*arguments, False, linear.bias, 128, 256))


# Inductor's first import within torch 2.11 meets a deprecation of torch's own.
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
        late = x.clone()  # ordered behind the sleep on this stream only
        y = linear(late)
    stream.synchronize()
    assert torch.equal(y, expected)


def test_two_streams() -> None:
    """Calls on two streams at once, each ordered on its own."""
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


# What the debug mode says of itself.
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
        expected = linear(x)
        with torch.autocast("cuda", dtype=torch.float16):
            assert torch.equal(linear(x.float()), expected)
            assert torch.equal(linear(x), expected)


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
