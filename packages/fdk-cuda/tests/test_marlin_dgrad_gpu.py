"""dy @ W_hat from packed bytes on a Hopper GPU."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from marlin_cases import (
    DTYPES,
    FEW_HOPPER,
    ON_HOPPER,
    check_rounded_once,
    pack,
    random_x,
    repeats_bit_for_bit,
)
from torch import Tensor

from fdk_cuda.marlin import MARLIN_LUT, MarlinLayout
from fdk_cuda.marlin.dgrad import dgrad_plans, dgrad_runner, run_dgrad
from fdk_cuda.marlin.ops import dequantise, hopper_grad_x, linear_op, max_dgrad_rows
from fdk_cuda.marlin.runtime import device_limits
from fdk_cuda.nvrtc import swizzled_map
from fdk_cuda.nvrtc.driver import cuda
from fdk_formats.tensor import QuantisedTensor
from fdk_formats.testing import poisoned

pytestmark = ON_HOPPER
FORMATS = [
    *(f"custom{bits}-g64" for bits in (1, 2, 3, 4, 8)),
    *("affine4-g32", "affine8-g128-fp32-zint", "affine8-g64-zint", "affine3-g64-fp16-zint"),
    *("affine1-g32", "affine2-g32-fp16-zint", "int8-g64-signmax"),
]
# Eight kernels each, compiled for seconds; all of them in `nox -s every-kernel`.
EVERY_PLAN_FORMATS = FORMATS if os.environ.get("FDK_TEST_EVERY_KERNEL") else FORMATS[3:5]


def gradient(layout: MarlinLayout, dy: Tensor) -> Tensor:
    weight = layout.packed, layout.codebook, str(layout.format)
    return hopper_grad_x(dy, *weight, *layout.shape)


def check(q: QuantisedTensor, layout: MarlinLayout, dy: Tensor) -> Tensor:
    """Checks dx against float64, and returns it."""
    oracle = dy.double() @ q.dequantise(dy.dtype).double()
    with poisoned():
        dx = gradient(layout, dy)
    check_rounded_once(dx, oracle)
    return dx


@pytest.mark.parametrize("format", EVERY_PLAN_FORMATS)
def test_every_plan(format: str) -> None:
    """Each tile and split gives the same answer, on few SMs too."""
    n, k, m, dtype = 1000, 1152, 150, torch.bfloat16
    q, layout = pack(format, n, k, dtype)
    dy = random_x(m, n, dtype=dtype)
    oracle = dy.double() @ q.dequantise(dtype).double()
    seen = set()
    for device in (FEW_HOPPER, device_limits(0)):
        for plan in dgrad_plans(layout.geometry, m, device):
            seen.add((plan.splits, plan.shape.cluster, plan.whole_tiles > plan.grid))
            runner = dgrad_runner(layout.geometry, dtype, m, plan, 0)
            with poisoned():
                dx = run_dgrad(runner, dy, layout.packed, layout.codebook, k)
            check_rounded_once(dx, oracle, plan)
    assert {(1, 1, True), (1, 1, False), (2, 1, False), (1, 2, False)} <= seen


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_decodes_exactly(format: str, dtype: torch.dtype) -> None:
    """One-hot rows of dy give the dequantised weight, bit for bit, at every row."""
    q, layout = pack(format, 200, 640, dtype)
    with poisoned():
        dx = gradient(layout, torch.eye(200, dtype=dtype, device="cuda"))
    assert torch.equal(dx, q.dequantise(dtype))


@pytest.mark.parametrize("scale_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("last_code", [254, 255])
def test_grids_are_computed(last_code: int, scale_dtype: str) -> None:
    """Codes of int8 in both directions, except code 255, a second 127."""
    for dtype in DTYPES:
        q, _ = pack(f"int8-g32-{scale_dtype}", 200, 640, dtype)
        q = replace(q, packed=q.packed.clamp(max=254))
        q.packed[7, 3] = last_code
        layout = MARLIN_LUT.pack(q, dtype=dtype)
        assert layout.geometry.has_table == (last_code == 255)
        x = torch.eye(640, dtype=dtype, device="cuda", requires_grad=True)
        y = layout(x)
        assert torch.equal(y, q.dequantise(dtype).T)
        dy = random_x(640, 200, dtype=dtype)
        y.backward(dy)
        assert x.grad is not None
        oracle = dy.double() @ q.dequantise(dtype).double()
        check_rounded_once(x.grad, oracle)


@pytest.mark.parametrize(("n", "k"), [(1, 64), (37, 96), (130, 1000), (999, 263), (64, 4107)])
@pytest.mark.parametrize("format", ["custom4-row", "custom1-row", "affine3-row"])
def test_awkward_shapes(format: str, n: int, k: int) -> None:
    """Odd k, k below a tile, n that no step divides, dy that TMA cannot read."""
    q, layout = pack(format, n, k)
    for m in (1, 17, 64, 65, 130, 257):
        check(q, layout, random_x(m, n, seed=m))


def test_misaligned_dy() -> None:
    q, layout = pack("custom4-g64", 256, 512)
    check(q, layout, random_x(1, 40 * 256 + 1)[0, 1:].view(40, 256))


@pytest.mark.parametrize("m", [64, 256, 1024])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_repeats_bit_for_bit(bits: int, m: int) -> None:
    q, layout = pack(f"custom{bits}-g64", 4096, 4096)
    dy = random_x(m, 4096)
    first = check(q, layout, dy)
    assert repeats_bit_for_bit(lambda: gradient(layout, dy), first)


def test_on_two_streams_and_in_a_graph() -> None:
    weights = [pack("custom4-g64", 4096, 4096, seed=i)[1] for i in range(2)]
    dy = random_x(256, 4096)
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


def test_in_a_row() -> None:
    """Each kernel starts before the previous one ends."""
    weights = [pack(f"custom{4 - i % 4}-g64", 2048, 2048, seed=i)[1] for i in range(6)]
    dy = random_x(300, 2048)

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
def test_gradient_is_the_faster_kernel(bits: int) -> None:
    """The gradient is computed from packed bytes up to an m, then through cuBLAS."""
    _, layout = pack(f"custom{bits}-g64", 200, 320)
    weight = layout.packed, layout.codebook, str(layout.format)
    most = max_dgrad_rows(str(layout.format))
    for m in (1, 30, most, most + 1):
        dy = random_x(m, 200)
        dx = linear_op.grad_op(dy, *weight, False, 200, 320)
        wanted = gradient(layout, dy)
        if m > most:
            wanted = dy @ dequantise(*weight, 200, 320)
        assert torch.equal(dx, wanted)


def test_tensor_map_in_a_thread_without_a_context():
    """Autograd's thread of a second GPU is such a thread before torch calls CUDA in it."""
    operand = torch.zeros(64, 128, dtype=torch.bfloat16, device="cuda")
    arguments = operand.data_ptr(), 64, 128, 64, operand.dtype, operand.get_device()

    def without_context() -> bytes:
        status, *_ = cuda().cuCtxSetCurrent(0)
        assert status.value == 0
        return swizzled_map.__wrapped__(*arguments)

    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(without_context).result()
    assert made == swizzled_map.__wrapped__(*arguments)
