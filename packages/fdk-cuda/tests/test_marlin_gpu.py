"""The Marlin backends on a GPU: conformance, every m, many runs, streams, graphs, compile."""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from marlin_cases import exact_weight, pack, random_x, run_plan
from torch.nn.functional import linear

from fdk_cuda.marlin import MARLIN, MARLIN_LUT, backend, precompile
from fdk_cuda.marlin.hopper import hopper_plans
from fdk_cuda.marlin.launches import (
    device_limits,
    hopper_runner,
    run_hopper,
)
from fdk_cuda.marlin.ops import (
    MAX_FUSED_ROWS,
    MAX_HOPPER_ROWS,
    dequantise,
    few_rows,
    linear_op,
)
from fdk_cuda.marlin.plan import MAX_ROWS, Device, _plans, plan_small
from fdk_cuda.marlin.programs import Variant
from fdk_formats.format import Format
from fdk_formats.testing import cases, check_backend, nrmse, poisoned, random_quantised

pytestmark = pytest.mark.gpu

BITS = (1, 2, 3, 4, 8)
DTYPES = (torch.bfloat16, torch.float16)
CASES = {"bits": BITS, "group_sizes": (32, 64, 128, None), "dtypes": DTYPES, "device": "cuda"}
LUT_CASES = list(cases(codebooks=("custom",), ms=(1, 3, 9), **CASES))
GRID_CASES = list(cases(codebooks=("affine", "int"), ms=(1, 3, 9), **CASES))


@pytest.mark.parametrize("case", LUT_CASES, ids=str)
def test_marlin_lut_conformance(case):
    check_backend(MARLIN_LUT, case)


@pytest.mark.parametrize("case", GRID_CASES, ids=str)
def test_marlin_conformance(case):
    check_backend(MARLIN, case)


def check(layout, q, x, bias=None):
    """y is no further from float64 than torch, where torch has nothing but its sums to round.

    Few rows multiply the weight before its products with scales are rounded, many rows after.
    """
    W = exact_weight(q, x.dtype) if len(x) <= MAX_ROWS else q.dequantise(x.dtype).double()
    with poisoned():
        y = layout(x, bias)
    oracle = linear(x.double(), W, None if bias is None else bias.double())
    rounded_once = oracle.to(x.dtype)
    assert nrmse(y, oracle) <= 1.2 * nrmse(rounded_once, oracle) + 1e-5
    return y


# A tile more and less than whole, several tiles to a block, clusters of every size, all-pad rows.
SHAPES = [(1, 64), (37, 192), (64, 4096), (1000, 2048), (4096, 4096), (8224, 1024), (14336, 576)]


@pytest.mark.parametrize(("n", "k"), SHAPES, ids=lambda v: str(v))
@pytest.mark.parametrize("format", [f"custom{bits}-g64" for bits in BITS] + ["affine4-g32"])
def test_marlin_every_m(format, n, k):
    q, layout = pack(format, n, k)
    bias = random_x(n, seed=5)
    for m in (1, 2, 4, 5, 8, 9, 16, 17, 33, 64, 65, MAX_FUSED_ROWS, 200, 256, 1024):
        check(layout, q, random_x(m, k, seed=m), bias)


# A GPU of few processors: several tiles to a block, with and without clusters.
FEW = Device(processors=6, shared_bytes=232448, has_clusters=True)


def plans_to_try(plans, *, with_short_tiles):
    """A third of the plans of each split, in which the splits of a shape follow one another."""
    for split in (1, 2, 4):
        own = [plan for plan in plans if plan.split == split]
        yield from [p for p in own if p.shape.short_blocks > 0 or not with_short_tiles][::3]


# 1216 rows: short tiles that start early.
PLAN_CASES = [
    *((f"custom{bits}-g64", m, n) for bits in BITS for m in (1, 7, 16) for n in (1000, 1216)),
    *(("custom1-g64", m, 1216) for m in (2, 4)),
    *((f"affine{bits}-g64", m, 1216) for bits in BITS for m in (1, 16)),
    *((f"affine1-g64-{more}", m, 1216) for more in ("zint", "fp16") for m in (1, 3)),
    *((f"affine2-g64-{more}", 1, 1216) for more in ("zint", "fp16")),
]


@pytest.mark.parametrize(("format", "m", "n"), PLAN_CASES)
def test_every_plan(format, m, n):
    """Each shape of tile, number of warps and split that a plan may have gives the same answer."""
    q, layout = pack(format, n, 1024)
    x = random_x(m, 1024)
    oracle = x.double() @ exact_weight(q, x.dtype).T
    variant = Variant.of(layout.geometry, x.dtype)
    plans = list(_plans(layout.geometry, variant, m, FEW))
    assert any(plan.passes > 1 for plan in plans)
    tried = list(plans_to_try(plans, with_short_tiles=n == 1216))
    assert {plan.split for plan in tried} == {1, 2, 4}
    if n == 1000:
        assert {p.split for p in tried if p.shape.short_blocks == 0} == {1, 2, 4}
    if any(rows >= m for rows in variant.digit_rows):
        assert {p.split for p in tried if p.shape.digit_rows} == {1, 2, 4}
    for plan in tried:
        y = run_plan(layout, x, plan)
        assert nrmse(y, oracle) <= 1.2 * nrmse(oracle.to(x.dtype), oracle) + 1e-5, plan


@pytest.mark.parametrize("m", [1, 8, 16])
@pytest.mark.parametrize("format", ["affine1-g64", "affine3-g64"])
def test_zero_points_by_16_warps(format, m):
    """Which plans give to Hopper alone; the instructions are those of every GPU."""
    q, layout = pack(format, 1216, 2048)
    x = random_x(m, 2048)
    oracle = x.double() @ exact_weight(q, x.dtype).T
    variant = Variant.of(layout.geometry, x.dtype)
    plans, elsewhere = (
        {p for p in _plans(layout.geometry, variant, m, device) if p.shape.warps == 16}
        for device in (replace(FEW, is_hopper=True), FEW)
    )
    only_here = plans - elsewhere
    assert (len(only_here) > 0) == (m <= 8 or format == "affine3-g64")
    for plan in only_here:
        y = run_plan(layout, x, plan)
        assert nrmse(y, oracle) <= 1.2 * nrmse(oracle.to(x.dtype), oracle) + 1e-5, plan


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("format", [f"custom{bits}-g64" for bits in BITS] + ["affine4-g32"])
def test_copies_of_older_gpus(format, m):
    """The path of compute capability 8, which this GPU can take too."""
    q, layout = pack(format, 1000, 1024)
    x = random_x(m, 1024)
    oracle = x.double() @ exact_weight(q, x.dtype).T
    device = replace(FEW, has_clusters=False, shared_bytes=101376)
    plan = plan_small(layout.geometry, x.dtype, m, device)
    y = run_plan(layout, x, plan, "-DFORCE_CP_ASYNC")
    assert nrmse(y, oracle) <= 1.2 * nrmse(oracle.to(x.dtype), oracle) + 1e-5


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantise_is_exact(bits, dtype):
    for codebook, group in itertools.product(("custom", "affine"), (32, 64, None)):
        q, layout = pack(Format(codebook, bits, group), 1000, 1216, dtype)
        with poisoned():
            W_hat = dequantise(layout.packed, layout.codebook, str(q.format), *q.shape)
        assert torch.equal(W_hat, q.dequantise(dtype)), q.format


HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a GPU of compute capability 9.x",
)
WIDE_FORMATS = [
    *(f"custom{bits}-g64" for bits in BITS),
    *("affine4-g32", "affine8-g128-fp32-zint", "affine8-g64-zint", "affine3-g64-fp16-zint"),
]
# Tiles of other numbers of groups have the decoders of those, or one of 1 bit, among these:
# compiling all takes minutes.
EVERY_TILE_FORMATS = WIDE_FORMATS if os.environ.get("FDK_TEST_EVERY_KERNEL") else WIDE_FORMATS[::3]


@HOPPER
@pytest.mark.parametrize("case", list(cases(codebooks=("custom",), ms=(33,), **CASES)), ids=str)
def test_hopper_codebook_conformance(case):
    check_backend(MARLIN_LUT, case)


@HOPPER
@pytest.mark.parametrize("case", list(cases(codebooks=("affine",), ms=(65,), **CASES)), ids=str)
def test_hopper_affine_conformance(case):
    check_backend(MARLIN, case)


@HOPPER
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", WIDE_FORMATS)
def test_every_hopper_plan(format, dtype):
    """Each tile, number of consumers and of parts gives the same answer, on few processors too."""
    n, k, m = 1000, 1088, 150
    if format == "affine8-g128-fp32-zint":
        k = 1152
    q, layout = pack(format, n, k, dtype)
    x, bias = random_x(m, k, dtype=dtype), random_x(n, dtype=dtype, seed=7)
    W_hat = q.dequantise(dtype).double()
    oracle = linear(x.double(), W_hat, bias.double())
    allowed = 1.2 * nrmse(oracle.to(dtype), oracle) + 1e-5
    geometry = layout.geometry
    many = device_limits(x.device.index)
    seen = set()
    for device in (replace(FEW, is_hopper=True), many):
        for plan in hopper_plans(geometry, m, device):
            has_other_groups = plan.shape.consumers == 3 or plan.shape.k_groups == 2
            if has_other_groups and format not in EVERY_TILE_FORMATS:
                continue
            seen.add((plan.splits, plan.shape.cluster, plan.whole_tiles > plan.grid))
            runner = hopper_runner(geometry, dtype, m, plan, x.device.index)
            for use_bias in (bias, None):
                with poisoned():
                    y = run_hopper(runner, x, layout.packed, layout.codebook, use_bias, n)
                wanted = oracle if use_bias is not None else x.double() @ W_hat.T
                assert nrmse(y, wanted) <= allowed, plan
    assert {(1, 1, True), (1, 1, False), (2, 1, True), (3, 1, False), (1, 2, False)} <= seen


@HOPPER
@pytest.mark.parametrize(("n", "k"), [(1, 64), (37, 96), (130, 1000), (999, 264), (64, 4104)])
@pytest.mark.parametrize("format", ["custom4-row", "custom1-row", "affine3-row"])
def test_hopper_awkward_shapes(format, n, k):
    """n odd and less than a tile, k that no step divides, x that the copy engine cannot take."""
    for columns in (k, k + 3):
        q, layout = pack(format, n, columns)
        bias = random_x(n, seed=3)
        for m in (17, 31, 64, 65, 130, 257):
            check(layout, q, random_x(m, columns, seed=m), bias)


@HOPPER
@pytest.mark.parametrize("format", [*WIDE_FORMATS, "int8-g64-signmax"])
def test_hopper_decodes_exactly(format):
    """Rows of x with a single 1: the dequantised weight, bit for bit, at every column."""
    n, k = 200, 640
    for dtype in DTYPES:
        q, layout = pack(format, n, k, dtype)
        y = layout(torch.eye(k, dtype=dtype, device="cuda"))
        assert torch.equal(y, q.dequantise(dtype).T)


@HOPPER
@pytest.mark.parametrize("bits", [4, 8])
def test_hopper_thousands_of_rows(bits):
    """At 8 bits dequantised first, from here on."""
    q, layout = pack(f"custom{bits}-g64", 1000, 1088)
    check(layout, q, random_x(MAX_HOPPER_ROWS + 1, 1088), random_x(1000, seed=2))


@HOPPER
@pytest.mark.parametrize(
    ("format", "n"), [("affine8-g64", 8200), ("int8-g64-signmax", 8200), ("custom8-g64", 16400)]
)
def test_hopper_few_rows_of_large_weights(format, n):
    q, layout = pack(format, n, 8192)
    assert few_rows(str(q.format), n, 8192, 0) == 8
    W_hat = q.dequantise(torch.bfloat16).double()
    for m in (8, 9, 16):
        x, bias = random_x(m, 8192, seed=m), random_x(n, seed=2)
        oracle = linear(x.double(), W_hat, bias.double())
        for _ in range(2):  # the second call of a shape may be one made ready
            with poisoned():
                y = layout(x, bias)
            # Up to 8 rows the weight is not rounded.
            allowed = 2.2 if m == 8 else 1.2
            assert nrmse(y, oracle) <= allowed * nrmse(oracle.bfloat16(), oracle) + 1e-5, m


@HOPPER
@pytest.mark.parametrize("m", [17, 64, 256, 1024])
@pytest.mark.parametrize("bits", BITS)
def test_hopper_repeats_bit_for_bit(bits, m):
    q, layout = pack(f"custom{bits}-g64", 4096, 4096)
    x = random_x(m, 4096)
    first = check(layout, q, x)
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        differs |= (layout(x) != first).any()
    assert not differs


def test_pack_on_gpu_gives_the_bytes_of_the_cpu():
    for format in ("custom3-g64", "affine8-g32", "custom1-row"):
        q = random_quantised(Format.parse(format), 100, 192)
        backend = MARLIN if q.format.is_affine else MARLIN_LUT
        on_cpu = backend.pack(q, dtype=torch.bfloat16)
        on_gpu = backend.pack(q.to("cuda"), dtype=torch.bfloat16)
        assert torch.equal(on_cpu.packed, on_gpu.packed.cpu())


REPEATED = [f"custom{bits}-g64" for bits in BITS] + [f"affine{bits}-g64" for bits in (1, 2, 4, 8)]


@pytest.mark.parametrize("format", REPEATED)
@pytest.mark.parametrize("m", [1, 4, 8, 16])
def test_marlin_repeats_bit_for_bit(format, m):
    q, layout = pack(format, 4096, 4096)
    x = random_x(m, 4096)
    first = check(layout, q, x)
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        differs |= (layout(x) != first).any()
    assert not differs


@pytest.mark.parametrize("m", [4, 64, 300])
def test_marlin_layers_in_a_row(m):
    """Back to back, each kernel starts while the one before still runs."""
    layers = [pack(f"custom{4 - i % 4}-g64", 4096, 4096, seed=i) for i in range(8)]
    x = random_x(m, 4096)

    def run():
        y = x
        for _, layout in layers:
            y = layout(y)
            y = y / y.norm() * 64
        return y

    def run_without_pause():
        y = x
        for _, layout in layers:
            y = layout(y)
        return y

    for function in (run, run_without_pause):
        torch.cuda.synchronize()
        first = function()
        step = x
        for _, layout in layers:
            torch.cuda.synchronize()
            step = layout(step)
            if function is run:
                torch.cuda.synchronize()
                step = step / step.norm() * 64
        assert torch.equal(first, step)
        for _ in range(50):
            assert torch.equal(function(), first)


@pytest.mark.parametrize("m", [16, 64, 256])
def test_marlin_on_two_streams(m):
    weights = [pack("custom4-g64", 4096, 4096, seed=i) for i in range(2)]
    x = random_x(m, 4096)
    expected = [layout(x) for _, layout in weights]
    streams = [torch.cuda.Stream() for _ in weights]
    torch.cuda.synchronize()
    for _ in range(50):
        outs = []
        for stream, (_, layout) in zip(streams, weights, strict=True):
            with torch.cuda.stream(stream):
                outs.append([layout(x) for _ in range(4)])
        torch.cuda.synchronize()
        for out, wanted in zip(outs, expected, strict=True):
            assert all(torch.equal(y, wanted) for y in out)


@pytest.mark.parametrize("m", [1, 16, 40, 100, 600])
def test_marlin_in_a_graph(m):
    _, layout = pack("custom2-g64", 4096, 4096)
    x = random_x(m, 4096)
    layout(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layout(x)
        z = layout(y)
    for seed in range(3):
        x.copy_(random_x(m, 4096, seed=seed + 10))
        y.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, layout(x))
        assert torch.equal(z, layout(y))


# torch 2.11's own, when Inductor is first imported.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize("m", [3, 80])
def test_marlin_compiles(m):
    _, layout = pack("custom4-g64", 256, 512)
    function = torch.compile(lambda x: layout(x * 2) + 1, fullgraph=True)
    x = random_x(m, 512).requires_grad_()
    y = function(x)
    assert torch.equal(y, layout(x * 2) + 1)
    (dx,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad((layout(x * 2) + 1).sum(), x)
    assert torch.equal(dx, expected)


def test_marlin_in_a_new_thread():
    """A thread in which nothing has touched the GPU."""
    _, layout = pack("custom4-g64", 256, 512)
    x = random_x(3, 512)
    expected = layout(x)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as executor:
        assert torch.equal(executor.submit(layout, x).result(), expected)


def test_precompile(monkeypatch, tmp_path):
    monkeypatch.setenv("FDK_CUDA_CACHE", str(tmp_path))
    layers = [("custom4-g64", 4096, 4096), ("custom4-g64", 11008, 4096)]
    count = precompile(layers)
    stored = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.cubin")}
    assert 3 <= count == len(stored)
    assert precompile(layers) == count
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.cubin")} == stored


def test_marlin_opcheck():
    _, layout = pack("custom4-g64", 256, 512)
    x = random_x(3, 512).requires_grad_()
    bias = random_x(256).requires_grad_()
    args = (x, layout.packed, layout.codebook, str(layout.format), False, bias, 256, 512)
    torch.library.opcheck(torch.ops.fdk_cuda.marlin_linear.default, args)


@pytest.mark.parametrize("m", [2, 40])
def test_marlin_misaligned_x(m):
    q, layout = pack("custom4-g64", 256, 512)
    x = random_x(m * 512 + 1)[1:].view(m, 512)
    check(layout, q, x)


def test_marlin_wrong_dtype():
    _, layout = pack("custom4-g64", 256, 512)
    with pytest.raises(TypeError, match=r"x must be torch\.bfloat16, got torch\.float16"):
        layout(random_x(1, 512, dtype=torch.float16))


@pytest.mark.parametrize("m", [1, 3, 16])
def test_calls_made_ready_are_those_of_the_op(m, monkeypatch):
    """The second call of a shape takes a way of its own."""
    _, layout = pack("nf4-g64", 200, 256)
    _, other = pack("nf4-g64", 200, 256, seed=5)
    bias = random_x(200, seed=3)
    x = random_x(m, 256)
    for shape in ((m, 256), (1, m, 256)):
        x = x.view(shape)
        for b in (None, bias, bias.expand(2, 200).T[:, 0]):
            first = layout(x, b)
            with monkeypatch.context() as patch:
                if b is None or b.is_contiguous():
                    patch.setattr(backend, "linear_op", OnlyDirect())
                with poisoned():  # memory from new_empty; without it, as inductor takes it
                    second = layout(x, b)
                third = layout(x, b)
            assert torch.equal(first, second)
            assert torch.equal(first, third)
            assert second.shape == (*shape[:-1], 200)
    with pytest.raises(TypeError, match="must be"):
        layout(x.half())
    leaf = x.clone().requires_grad_()
    layout(leaf, bias).sum().backward()
    assert leaf.grad.isfinite().all()
    layout.packed, layout.codebook = other.packed, other.codebook
    assert torch.equal(layout(x, bias), other(x, bias))


class OnlyDirect:
    """Stands for the op where no call may reach it."""

    is_direct = staticmethod(linear_op.is_direct)
