"""dy @ W_hat from packed bytes on a Hopper GPU."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fdk_cuda.marlin import MARLIN, MARLIN_LUT, MarlinLayout
from fdk_cuda.marlin.dgrad import dgrad_plans, dgrad_runner, run_dgrad
from fdk_cuda.marlin.heuristics_small_m import Device
from fdk_cuda.marlin.ops import dequantise, hopper_grad_x, linear_op, max_dgrad_rows
from fdk_cuda.marlin.runtime import device_limits
from fdk_cuda.nvrtc import swizzled_map
from fdk_cuda.nvrtc.driver import cuda
from fdk_formats.codebooks import named_codebook
from fdk_formats.format import Format
from fdk_formats.tensor import QuantisedTensor
from fdk_formats.testing import nrmse, poisoned, random_quantised

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a GPU of compute capability 9.x",
    ),
]

DTYPES = (torch.bfloat16, torch.float16)
FORMATS = [
    *(f"custom{bits}-g64" for bits in (1, 2, 3, 4, 8)),
    *("affine4-g32", "affine8-g128-fp32-zint", "affine8-g64-zint", "affine3-g64-fp16-zint"),
    *("affine1-g32", "affine2-g32-fp16-zint", "int8-g64-signmax"),
]
# Eight kernels each, compiled for seconds: the others where time does not matter.
EVERY_PLAN_FORMATS = FORMATS if os.environ.get("FDK_TEST_EVERY_KERNEL") else FORMATS[3:5]
FEW = Device(sm_count=6, shared_bytes=232448, has_clusters=True, is_hopper=True)


def packed_weight(
    format: str, n: int, k: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[QuantisedTensor, MarlinLayout]:
    q = random_quantised(Format.parse(format), n, k, seed=seed).to("cuda")
    if q.format.codebook == "int":
        q = replace(q, codebook=named_codebook(q.format, k).tensor(q.device))
    layout = (MARLIN if q.format.is_affine else MARLIN_LUT).pack(q, dtype=dtype)
    assert isinstance(layout, MarlinLayout)
    return q, layout


def random_dy(m: int, n: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(m, n, device="cuda", generator=generator).to(dtype)


def gradient(layout: MarlinLayout, dy: Tensor) -> Tensor:
    weight = layout.packed, layout.codebook, str(layout.format)
    return hopper_grad_x(dy, *weight, *layout.shape)


def check(q: QuantisedTensor, layout: MarlinLayout, dy: Tensor) -> Tensor:
    """dx is no further from float64 than rounding it once is, but for the order of the sum."""
    oracle = dy.double() @ q.dequantise(dy.dtype).double()
    with poisoned():
        dx = gradient(layout, dy)
    assert nrmse(dx, oracle) <= 1.2 * nrmse(oracle.to(dy.dtype), oracle) + 1e-5
    return dx


@pytest.mark.parametrize("format", EVERY_PLAN_FORMATS)
def test_every_backward_plan(format: str) -> None:
    """Each tile and number of parts gives the same answer, on few SMs too."""
    n, k, m, dtype = 1000, 1152, 150, torch.bfloat16
    q, layout = packed_weight(format, n, k, dtype)
    dy = random_dy(m, n, dtype)
    oracle = dy.double() @ q.dequantise(dtype).double()
    allowed = 1.2 * nrmse(oracle.to(dtype), oracle) + 1e-5
    seen = set()
    for device in (FEW, device_limits(0)):
        for plan in dgrad_plans(layout.geometry, m, device):
            seen.add((plan.splits, plan.shape.cluster, plan.whole_tiles > plan.grid))
            runner = dgrad_runner(layout.geometry, dtype, m, plan, 0)
            with poisoned():
                dx = run_dgrad(runner, dy, layout.packed, layout.codebook, k)
            assert nrmse(dx, oracle) <= allowed, plan
    assert {(1, 1, True), (1, 1, False), (2, 1, False), (1, 2, False)} <= seen


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_backward_decodes_exactly(format: str, dtype: torch.dtype) -> None:
    """Rows of dy with a single 1: the dequantised weight, bit for bit, at every row."""
    q, layout = packed_weight(format, 200, 640, dtype)
    with poisoned():
        dx = gradient(layout, torch.eye(200, dtype=dtype, device="cuda"))
    assert torch.equal(dx, q.dequantise(dtype))


@pytest.mark.parametrize("scale_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("last_code", [254, 255])
def test_grids_are_computed(last_code: int, scale_dtype: str) -> None:
    """Codes of int8 are, in both directions, but for the second one of 127."""
    for dtype in DTYPES:
        q, _ = packed_weight(f"int8-g32-{scale_dtype}", 200, 640, dtype)
        q = replace(q, packed=q.packed.clamp(max=254))
        q.packed[7, 3] = last_code
        layout = MARLIN_LUT.pack(q, dtype=dtype)
        assert isinstance(layout, MarlinLayout)
        assert layout.geometry.has_table == (last_code == 255)
        x = torch.eye(640, dtype=dtype, device="cuda", requires_grad=True)
        y = layout(x)
        assert torch.equal(y, q.dequantise(dtype).T)
        dy = random_dy(640, 200, dtype)
        y.backward(dy)
        assert x.grad is not None
        oracle = dy.double() @ q.dequantise(dtype).double()
        assert nrmse(x.grad, oracle) <= 1.2 * nrmse(oracle.to(dtype), oracle) + 1e-5


@pytest.mark.parametrize(("n", "k"), [(1, 64), (37, 96), (130, 1000), (999, 263), (64, 4107)])
@pytest.mark.parametrize("format", ["custom4-row", "custom1-row", "affine3-row"])
def test_backward_awkward_shapes(format: str, n: int, k: int) -> None:
    """k odd and less than a tile, n that no step divides, dy that the copy engine cannot take."""
    q, layout = packed_weight(format, n, k)
    for m in (1, 17, 64, 65, 130, 257):
        check(q, layout, random_dy(m, n, seed=m))


def test_backward_misaligned_dy() -> None:
    q, layout = packed_weight("custom4-g64", 256, 512)
    check(q, layout, random_dy(1, 40 * 256 + 1)[0, 1:].view(40, 256))


@pytest.mark.parametrize("m", [64, 256, 1024])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_backward_repeats_bit_for_bit(bits: int, m: int) -> None:
    q, layout = packed_weight(f"custom{bits}-g64", 4096, 4096)
    dy = random_dy(m, 4096)
    first = check(q, layout, dy)
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        differs |= (gradient(layout, dy) != first).any()
    assert not differs


def test_backward_on_two_streams_and_in_a_graph() -> None:
    weights = [packed_weight("custom4-g64", 4096, 4096, seed=i)[1] for i in range(2)]
    dy = random_dy(256, 4096)
    expected = [gradient(layout, dy) for layout in weights]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [gradient(layout, dy) for layout in weights]
    streams = [torch.cuda.Stream() for _ in weights]
    torch.cuda.synchronize()
    for _ in range(30):
        outs = []
        for stream, layout in zip(streams, weights, strict=True):
            with torch.cuda.stream(stream):
                outs.append([gradient(layout, dy) for _ in range(4)])
        for dx in captured:
            dx.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for out, dx, wanted in zip(outs, captured, expected, strict=True):
            assert all(torch.equal(one, wanted) for one in out)
            assert torch.equal(dx, wanted)


def test_backward_in_a_row() -> None:
    """Back to back, each kernel starts while the one before still runs."""
    weights = [packed_weight(f"custom{4 - i % 4}-g64", 2048, 2048, seed=i)[1] for i in range(6)]
    dy = random_dy(300, 2048)

    def run(*, pause: bool) -> Tensor:
        dx = dy
        for layout in weights:
            if pause:
                torch.cuda.synchronize()
            dx = gradient(layout, dx)
        return dx

    wanted = run(pause=True)
    for _ in range(30):
        assert torch.equal(run(pause=False), wanted)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_gradient_takes_the_faster_way(bits: int) -> None:
    """From packed bytes for any number of rows up to the most; then through cuBLAS."""
    _, layout = packed_weight(f"custom{bits}-g64", 200, 320)
    weight = layout.packed, layout.codebook, str(layout.format)
    most = max_dgrad_rows(str(layout.format))
    for m in (1, 30, most, most + 1):
        dy = random_dy(m, 200)
        dx = linear_op.grad_op(dy, *weight, False, 200, 320)
        wanted = gradient(layout, dy)
        if m > most:
            wanted = dy @ dequantise(*weight, 200, 320)
        assert torch.equal(dx, wanted)


def test_tensor_map_in_a_thread_without_a_context():
    """As autograd's thread of a second GPU is, before torch has called CUDA in it."""
    operand = torch.zeros(64, 128, dtype=torch.bfloat16, device="cuda")
    arguments = operand.data_ptr(), 64, 128, 64, operand.dtype, operand.get_device()

    def without_context() -> bytes:
        status, *_ = cuda().cuCtxSetCurrent(0)
        assert status.value == 0
        return swizzled_map.__wrapped__(*arguments)

    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(without_context).result()
    assert made == swizzled_map.__wrapped__(*arguments)
