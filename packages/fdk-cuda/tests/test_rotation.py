"""Rotating activations; interpreted_kernels.py compares it with torch."""

import copy
import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton_compile import MAX_STACK, compile_kernel, layout_of, registers_and_stack

from fdk_cuda.triton.kernels.rotation import rotation_kernel
from fdk_cuda.triton.rotation import VALUES, WARPS, rotate
from fdk_formats import QuantisedLinear, quantise_model
from fdk_formats import rotation as rotations
from fdk_formats.device_constants import constant_on


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("block", [16, 64, 256])
@pytest.mark.parametrize("target", [80, 90])
def test_spills_nothing(target: int, block: int, inverse: bool) -> None:
    arguments = {
        "BLOCK": block,
        "BITS": block.bit_length() - 1,
        "SCALE": 1 / math.sqrt(block),
        "INVERSE": inverse,
        "BLOCKS": VALUES // block,
        "WARPS": WARPS,
    }
    made = compile_kernel(rotation_kernel, target, layout_of(4), False, arguments)
    assert registers_and_stack(made)[1] <= MAX_STACK


@pytest.mark.gpu
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "k"), [(1, 16), (3, 48), (5, 576), (1, 4096), (33, 11008)])
def test_equals_torch(rows: int, k: int, dtype: torch.dtype, inverse: bool) -> None:
    x = torch.randn(rows, k, device="cuda").to(dtype)
    block = min(k & -k, 256)
    wanted = rotations.rotate_in_torch(x, block, inverse)
    for _ in range(2):  # compiled, then launched by address
        assert torch.equal(rotate(x, block, inverse), wanted)
    assert torch.equal(wanted.cpu(), rotations.rotate_in_torch(x.cpu(), block, inverse))
    shifted = torch.randn(rows * k + 1, device="cuda").to(dtype)[1:].view(rows, k).copy_(x)
    assert torch.equal(rotate(shifted, block, inverse), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["kmeans2-g64-hadamard", "affine4-g64-hadamard"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers(dtype: torch.dtype, format: str) -> None:
    torch.manual_seed(0)
    source = torch.nn.Linear(576, 320).to("cuda", dtype)
    layer = QuantisedLinear.from_linear(source, format)
    for m in (1, 7, 300):
        x = torch.randn(m, 576, device="cuda", dtype=dtype).requires_grad_()
        y = layer(x)
        exact = x.double() @ layer.dequantise(torch.float32).double().T + layer.bias
        torch.testing.assert_close(y.double(), exact.double(), rtol=0.02, atol=0.02)
        y.sum().backward()
        assert x.grad is not None
    graph, x = torch.cuda.CUDAGraph(), torch.randn(1, 576, device="cuda", dtype=dtype)
    with torch.inference_mode():
        layer(x)
        with torch.cuda.graph(graph):
            y = layer(x)
        x.copy_(torch.randn(1, 576))
        graph.replay()
        torch.testing.assert_close(y, layer(x))


@pytest.mark.gpu
def test_a_model_in_a_graph() -> None:
    torch.manual_seed(0)
    source = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64)
    )
    model = quantise_model(
        source.to("cuda", torch.bfloat16), "kmeans3-g64-hadamard", progress=False
    )
    x = torch.randn(4, 256, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_signs_are_in_no_memory_pool_of_the_caller() -> None:
    """The sleep mode of vLLM empties the pool in which it loads a model."""
    pool, device = torch.cuda.MemPool(), torch.device("cuda", 0)
    rotations.signs_on.cache_clear()
    constant_on.cache_clear()
    with torch.cuda.use_mem_pool(pool):
        rotations.signs_on(device)
        assert pool.snapshot() == []
        held = torch.zeros(8, device=device)
        assert pool.snapshot() != []
    del held
