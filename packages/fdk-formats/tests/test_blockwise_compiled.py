"""Blockwise ops under torch.compile, torch.export, fake tensors and torch.func."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from fdk_formats.blockwise import (
    dequantise_4bit,
    dequantise_blockwise,
    quantise_4bit,
    quantise_blockwise,
)

QUANTISE = {
    "8bit": lambda x: quantise_blockwise(x, block_size=96),
    "8bit-nested": lambda x: quantise_blockwise(x, block_size=96, nested=True),
    "8bit-code": lambda x: quantise_blockwise(x, torch.linspace(-1, 1, 256)),
    "nf4": quantise_4bit,
    "fp4-nested": lambda x: quantise_4bit(x, 32, "fp4", nested=True),
}


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def tensors(q):
    parts = [q, *([] if q.nested is None else [q.nested])]
    values = [getattr(part, field.name) for part in parts for field in dataclasses.fields(part)]
    return [value for value in values if isinstance(value, Tensor)]


@pytest.mark.parametrize("quantise", QUANTISE.values(), ids=QUANTISE)
def test_compile_fullgraph_without_recompiling_over_shapes(quantise):
    torch.compiler.reset()
    compiled = torch.compile(quantise, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m in (64, 31, 333):  # a single block would specialise the graph
            x = normal(m, 7)
            q, wanted = compiled(x), quantise(x)
            assert (q.shape, q.dtype, q.kind) == (wanted.shape, wanted.dtype, wanted.kind)
            assert all(map(torch.equal, tensors(q), tensors(wanted)))


@pytest.mark.parametrize("quantise", QUANTISE.values(), ids=QUANTISE)
def test_fake_tensors(quantise):
    wanted = quantise(normal(9, 11))
    with FakeTensorMode():
        q = quantise(torch.empty(9, 11))
    for tensor, other in zip(tensors(q), tensors(wanted), strict=True):
        assert (tensor.shape, tensor.dtype) == (other.shape, other.dtype)


def test_a_compiled_step_of_an_optimiser():
    """QuantisedBlocks are inputs and outputs of a compiled function."""

    def step(grad, moment):
        mean = 0.9 * dequantise_blockwise(moment) + 0.1 * grad
        return mean.sign(), quantise_blockwise(mean)

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    q = wanted = quantise_blockwise(torch.zeros(64, 3))
    for _ in range(3):
        update, q = compiled(normal(64, 3), q)
        other, wanted = step(normal(64, 3), wanted)
        assert torch.equal(update, other)
        assert torch.equal(q.packed, wanted.packed)


def test_export():
    class RoundTrip(torch.nn.Module):
        def forward(self, x):
            return dequantise_4bit(quantise_4bit(x, nested=True))

    x = normal(8, 64)
    program = torch.export.export(RoundTrip(), (x,))
    assert torch.equal(program.module()(x), RoundTrip()(x))
    assert "fdk_formats.quantise_4bit.default" in [str(n.target) for n in program.graph.nodes]


def test_errors_of_values_come_from_compiled_code():
    compiled = torch.compile(quantise_blockwise, fullgraph=True, backend="aot_eager")
    x, falling = normal(64), torch.linspace(1, -1, 256)
    with pytest.raises(ValueError, match="elements 0 to 4095"):
        compiled(x / 0)
    with pytest.raises(ValueError, match="code must be ascending"):
        compiled(x, falling)


def test_a_code_gets_no_gradient():
    code, x = torch.linspace(-1, 1, 256, requires_grad=True), normal(64)

    def round_trip(x):
        return dequantise_blockwise(quantise_blockwise(x, code))

    torch.compiler.reset()
    y = torch.compile(round_trip, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(y, round_trip(x))
    assert not y.requires_grad
    slope = torch.func.grad(lambda x: (x * round_trip(x)).sum())(x)
    assert torch.equal(slope, y)


def test_a_bad_code_is_refused_on_fake_tensors():
    with FakeTensorMode():
        x = torch.empty(8)
        with pytest.raises(ValueError, match=r"code must be \[256\], got \[3\]"):
            quantise_blockwise(x, torch.empty(3))
        with pytest.raises(TypeError, match=r"a tensor of floats, got torch\.int32"):
            quantise_blockwise(x, torch.empty(256, dtype=torch.int32))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype, nested):
    x = normal(5, 77).to(dtype)
    ops = torch.ops.fdk_formats
    for code in (None, torch.linspace(-1, 1, 256)):
        torch.library.opcheck(ops.quantise_blockwise.default, (x, code, 64, nested))
    for kind in ("nf4", "fp4"):
        torch.library.opcheck(ops.quantise_4bit.default, (x, 64, kind, nested))


ROUND_TRIPS = {
    "8bit": lambda x: dequantise_blockwise(quantise_blockwise(x, block_size=96)),
    "nf4-nested": lambda x: dequantise_4bit(quantise_4bit(x, nested=True)),
}


# torch.func.jvp triggers this warning.
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("round_trip", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
def test_quantising_is_constant_under_derivatives(round_trip):
    x = normal(3, 77)
    wanted = round_trip(x)

    def scored(x):
        return (x * round_trip(x)).sum()

    assert torch.equal(torch.func.grad(scored)(x), wanted)
    _, slope = torch.func.jvp(scored, (x,), (torch.ones_like(x),))
    assert torch.equal(slope, wanted.sum())


@pytest.mark.parametrize("quantise", QUANTISE.values(), ids=QUANTISE)
def test_vmap_quantises_each(quantise):
    x = normal(77, 3)
    found = torch.func.vmap(lambda x: tuple(tensors(quantise(x))), in_dims=1)(x)
    for index, column in enumerate(x.T):
        for batch, wanted in zip(found, tensors(quantise(column)), strict=True):
            assert torch.equal(batch[index], wanted)
    none = torch.func.vmap(lambda x: tuple(tensors(quantise(x))), in_dims=1)(x[:, :0])
    for empty, batch in zip(none, found, strict=True):
        assert (empty.shape, empty.dtype) == ((0, *batch.shape[1:]), batch.dtype)


@pytest.mark.parametrize("round_trip", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
def test_vmap_dequantises_unbatched_blocks_only(round_trip):
    x, factors = normal(3, 77), torch.arange(5.0)
    found = torch.func.vmap(lambda factor: factor * round_trip(x))(factors)
    assert torch.equal(found, factors[:, None, None] * round_trip(x))
    for transform in (round_trip, torch.func.grad(lambda x: round_trip(x).sum())):
        with pytest.raises(NotImplementedError, match=r"dequantise_\w+: needs blocks from outside"):
            torch.func.vmap(transform)(x)
