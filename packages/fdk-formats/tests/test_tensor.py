from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from fdk_formats import (
    Format,
    QuantisedEmbedding,
    QuantisedLinear,
    QuantisedTensor,
    model_report,
    pack,
    quantise,
    relative_error,
)
from fdk_formats.packing import CODES_PER_CHUNK
from fdk_formats.scales import decode_scale
from fdk_formats.testing import random_quantised

CODEBOOK = torch.tensor([-1.0, -0.25, 0.5, 1.0])


def small(**changes):
    codes = torch.tensor([[0, 1, 2, 3] * 8, [3] * 32])
    fields = {
        "format": Format("custom", 2, 16),
        "shape": (2, 32),
        "packed": pack(codes, 2),
        "scale": torch.tensor([[1.0, 2.0], [0.5, 0.0]], dtype=torch.bfloat16),
        "codebook": CODEBOOK,
    }
    return QuantisedTensor(**{**fields, **changes})


def test_dequantise_codebook():
    W_hat = small().dequantise()
    assert W_hat.dtype == torch.float32
    assert W_hat[0, :16].tolist() == [-1.0, -0.25, 0.5, 1.0] * 4
    assert W_hat[0, 16:].tolist() == [-2.0, -0.5, 1.0, 2.0] * 4
    assert W_hat[1].tolist() == [0.5] * 16 + [0.0] * 16


def test_dequantise_affine():
    q = QuantisedTensor(
        format=Format("affine", 3, None, zero_point="float"),
        shape=(1, 8),
        packed=pack(torch.arange(8)[None], 3),
        scale=torch.tensor([[0.5]], dtype=torch.bfloat16),
        codebook=None,
        zero_point=torch.tensor([[2.5]], dtype=torch.bfloat16),
    )
    assert q.dequantise().tolist() == [[-1.25, -0.75, -0.25, 0.25, 0.75, 1.25, 1.75, 2.25]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dequantise_rounds_the_codebook_then_the_product(dtype):
    q = random_quantised(Format("custom", 6, 16), n=8, k=64)
    scale = q.scale.double().repeat_interleave(16, dim=1)
    rounded = q.codebook.to(dtype).double()[q.codes().int()] * scale
    assert torch.equal(q.dequantise(dtype), rounded.to(dtype))
    unrounded = q.codebook.double()[q.codes().int()] * scale
    assert not torch.equal(q.dequantise(dtype), unrounded.to(dtype))


def test_e8m0_scales_are_powers_of_two_and_zero():
    stored = torch.tensor([[127, 130], [120, 0]], dtype=torch.uint8)
    assert decode_scale(stored).tolist() == [[1.0, 8.0], [2**-7, 0.0]]
    q = small(format=Format("custom", 2, 16, scale_dtype="e8m0"), scale=stored)
    assert q.dequantise()[0, 16:20].tolist() == [-8.0, -2.0, 4.0, 8.0]
    assert q.dequantise()[1, 16:].abs().max() == 0


def test_dequantise_in_chunks():
    q = random_quantised(Format("custom", 3, 32), n=CODES_PER_CHUNK // 96 + 5, k=96)
    W_hat = q.dequantise(torch.bfloat16)
    for row in (0, CODES_PER_CHUNK // 96 - 1, CODES_PER_CHUNK // 96, q.shape[0] - 1):
        assert torch.equal(W_hat[row : row + 1], q.rows(row, row + 1, torch.bfloat16))


def test_sizes():
    q = small()
    assert q.nbytes == 16 + 8 + 16  # 64 codes of 2 bits, 4 bf16 scales, 4 float32 entries
    assert q.bits_per_weight == 2 + 16 / 16
    assert q.group_size == 16
    assert q.codes().tolist() == [[0, 1, 2, 3] * 8, [3] * 32]
    assert list(q.tensors()) == ["packed", "scale", "codebook"]


def test_to_and_frozen():
    q = small()
    moved = q.to("meta")
    assert moved.device.type == "meta"
    assert q.device.type == "cpu"
    with pytest.raises(FrozenInstanceError):
        q.scale = moved.scale


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"packed": torch.zeros(2, 9, dtype=torch.uint8)}, ValueError, r"must be \[2, 8\], got"),
        ({"packed": torch.zeros(2, 8)}, TypeError, r"packed must be torch\.uint8, got"),
        ({"packed": None}, TypeError, "packed must be a tensor, got NoneType"),
        ({"scale": torch.ones(2, 2)}, TypeError, r"scale must be torch\.bfloat16"),
        ({"scale": torch.ones(2, 1).bfloat16()}, ValueError, r"scale of a \[2, 32\] weight must"),
        ({"scale": torch.ones(2, 2).bfloat16().to("meta")}, ValueError, "scale must be on cpu"),
        ({"codebook": torch.ones(3)}, ValueError, r"codebook of a .* must be \[4\], got \[3\]"),
        ({"codebook": None}, TypeError, "codebook must be a tensor"),
        ({"zero_point": torch.ones(2, 2)}, ValueError, "takes no zero_point"),
        ({"shape": (2, 40)}, ValueError, "k must be a positive multiple of 16, got k=40"),
        ({"shape": (64,)}, ValueError, r"shape must be two integers \(n, k\), got \(64,\)"),
        ({"shape": (2, 32.0)}, ValueError, r"shape must be two integers .*, got \(2, 32\.0\)"),
        ({"shape": [2, 32]}, ValueError, r"shape must be two integers .*, got \[2, 32\]"),
        ({"format": "custom2-g16"}, TypeError, "format must be a Format, got 'custom2-g16'"),
        ({"format": Format("affine", 2, 16)}, TypeError, "zero_point must be a tensor"),
    ],
)
def test_tensors_are_checked(changes, error, message):
    with pytest.raises(error, match=message):
        small(**changes)


@pytest.mark.parametrize("dtype", ["float32", torch.int8, torch.complex64, None])
def test_dequantise_requires_a_floating_dtype(dtype):
    with pytest.raises(TypeError, match=f"dequantise: dtype must be a floating .*, got '?{dtype}"):
        small().dequantise(dtype)
    with pytest.raises(TypeError, match=f"rows: dtype must be a floating .*, got '?{dtype}"):
        small().rows(0, 1, dtype)


def test_tensors_with_gradients():
    scale = small().scale.requires_grad_()
    q = small(scale=scale, shape=torch.Size((2, 32)))
    q.dequantise().sum().backward()
    # A group's gradient is the sum of its entries: 4 * (-1 - 0.25 + 0.5 + 1), or 16 * 1.
    assert scale.grad.tolist() == [[1.0, 1.0], [16.0, 16.0]]


def test_affine_takes_no_codebook():
    q = random_quantised(Format("affine", 4, 16, zero_point="int"), n=2, k=32)
    assert q.zero_point.dtype == torch.uint8
    with pytest.raises(ValueError, match="takes no codebook"):
        replace(q, codebook=torch.ones(16))


def test_relative_error_checks_its_arguments():
    weight = torch.ones(1, 32)
    with pytest.raises(TypeError, match="relative_error: weight must be a tensor, got NoneType"):
        relative_error(None, quantise(weight, "nf4-g16"))
    with pytest.raises(
        TypeError, match=r"relative_error: q must be a QuantisedTensor or a .*, got Tensor"
    ):
        relative_error(weight, weight)


def test_model_report_requires_a_module():
    with pytest.raises(TypeError, match=r"model_report: model must be an nn\.Module, got NoneType"):
        model_report(None)


def sum_then_scale(q, x):
    """Computes ``x @ W_hat.T`` as kernels do: over each group, then scaled, in float32."""
    values = q.codebook[q.codes().int()] if q.codebook is not None else q.codes() - q.zero_point
    groups = values.view(*q.scale.shape, q.group_size)
    return ((groups * x.view(1, -1, q.group_size)).sum(-1) * decode_scale(q.scale)).sum(-1)


EXTREME = {
    "table": {"codebook": torch.tensor([-65504.0, 0.0, 1.0, 65504.0])},
    "zero": {
        "zero_point": torch.full((1, 1), 2.0**24),
        "format": Format("affine", 2, None, None, "fp32"),
    },
}


@pytest.mark.parametrize("kind", EXTREME)
@pytest.mark.parametrize("scale", [1e-38, 1.0, 2.0**100])
def test_sums_over_a_group_are_finite_in_the_valid_range(kind, scale):
    k = 1 << 15
    fields = {"format": Format("custom", 2, None, scale_dtype="fp32")} | EXTREME[kind]
    q = QuantisedTensor(
        shape=(1, k),
        packed=torch.full((1, k // 4), 0xFF, dtype=torch.uint8),
        scale=torch.full((1, 1), scale),
        **fields,
    )
    q.check_values("w")
    largest = 1.5e26
    x = torch.full((k,), min(largest, 1e30 / scale / k / 2.0**24))
    expected = torch.nn.functional.linear(x.double(), q.dequantise(torch.float64))
    assert expected.abs() < 2.0**127
    assert torch.allclose(sum_then_scale(q, x).double(), expected, rtol=1e-4)


def test_a_table_that_overflows_before_its_scale_is_refused():
    table = torch.tensor([-1e30, 0.0, 1.0, 1e30])
    q = QuantisedTensor(
        format=Format("custom", 2, 64, scale_dtype="fp32"),
        shape=(1, 64),
        packed=torch.full((1, 16), 0xFF, dtype=torch.uint8),
        scale=torch.full((1, 1), 1e-30),
        codebook=table,
    )
    x = torch.full((64,), 6e6)
    assert torch.nn.functional.linear(x, q.dequantise()).isfinite()
    assert sum_then_scale(q, x).isinf()
    with pytest.raises(
        ValueError, match=r"w: codebook must be within \+-65504, got 1e\+30; divide"
    ):
        q.check_values("w")
    for layer in (QuantisedLinear, QuantisedEmbedding):
        with pytest.raises(ValueError, match=f"{layer.__name__}: codebook must be within"):
            layer.from_quantised(q)
