"""On two GPUs a launch uses the tensor's device and that device's current stream."""

import pytest
import torch

from fdk_formats import Format
from fdk_formats.linear import QuantisedLinear
from fdk_formats.testing import random_quantised

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2,
        reason=f"needs two GPUs, torch finds {torch.cuda.device_count()}",
    ),
]
LAYERS = (
    ("triton", "custom4-g64"),
    ("triton", "affine4-g64"),
    ("marlin", "affine4-g64"),
    ("marlin-lut", "custom4-g64"),
    ("marlin-lut", "custom1-g64"),
)
# GEMV, GEMM, and dequantising with cuBLAS.
ROWS = (1, 16, 40, 300)


def layer(backend: str, format: str) -> tuple[QuantisedLinear, torch.Tensor]:
    """Returns a layer on the first GPU, and x with the most rows."""
    q = random_quantised(Format.parse(format), 256, 512).to("cuda:0")
    generator = torch.Generator("cuda:0").manual_seed(1)
    x = torch.randn(max(ROWS), 512, device="cuda:0", generator=generator).bfloat16()
    bias = torch.arange(256, device="cuda:0").bfloat16() / 64
    return QuantisedLinear.from_quantised(q, bias, backend=backend), x


def outputs(linear: QuantisedLinear, x: torch.Tensor) -> list[torch.Tensor]:
    """Returns y and dx for each m, on the CPU."""
    found = []
    for m in ROWS:
        rows = x[:m].detach().requires_grad_()
        y = linear(rows)
        y.backward(torch.ones_like(y))
        with torch.no_grad():
            assert torch.equal(linear(rows), y)
        assert y.device == rows.grad.device == x.device
        found += [y.detach().cpu(), rows.grad.cpu()]
    return found


@pytest.mark.parametrize(("backend", "format"), LAYERS)
def test_launch_follows_the_tensor(backend: str, format: str) -> None:
    """Any GPU may be current, for first and cached calls."""
    linear, x = layer(backend, format)
    expected = outputs(linear, x)
    linear.to("cuda:1")
    for current in (0, 1):
        with torch.cuda.device(current):
            assert all(map(torch.equal, outputs(linear, x.to("cuda:1")), expected))
            assert torch.cuda.current_device() == current
    # Back on the first one, with the kernels of both loaded and their launches cached.
    linear.to("cuda:0")
    with torch.cuda.device(1):
        assert all(map(torch.equal, outputs(linear, x), expected))


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(("backend", "format"), LAYERS)
def test_launch_follows_the_stream_of_the_device(backend: str, format: str, m: int) -> None:
    """x is written late on the second GPU's current stream, not on the first GPU's."""
    linear, x = layer(backend, format)
    with torch.no_grad():
        expected = linear(x[:m]).cpu()
        linear.to("cuda:1")
        rows = x[:m].to("cuda:1")
        linear(rows)  # compiles
        late = torch.zeros_like(rows)
        torch.cuda.synchronize(1)
        stream = torch.cuda.Stream("cuda:1")
        with torch.cuda.stream(stream), torch.cuda.device(0):
            # The first GPU is current again; stream is still the second one's current stream.
            assert torch.cuda.current_stream("cuda:1") == stream
            with torch.cuda.device(1):
                torch.cuda._sleep(20_000_000)
            late.copy_(rows)
            y = linear(late)
        stream.synchronize()
    assert torch.equal(y.cpu(), expected)
