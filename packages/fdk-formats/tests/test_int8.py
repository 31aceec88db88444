"""8-bit activations: the definition, its error, and layers that use it."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from fdk_formats import (
    Format,
    NoBackendError,
    Problem,
    QuantisedLinear,
    load_model,
    quantise,
    quantise_model,
    save_model,
)
from fdk_formats.int8 import int8_linear, int8_table, padded_group, round_activations
from fdk_formats.packing import pack
from fdk_formats.testing import nrmse, random_quantised


def test_round_activations_by_hand():
    # With a largest magnitude of 127 codes are the values; halves round to even.
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 63.4, 0.0]])
    assert round_activations(x, 8).tolist() == [[127, 0, 2, 2, 0, -2, 63, 0]]
    assert round_activations(x / 64, 8).tolist() == [[v / 64 for v in (127, 0, 2, 2, 0, -2, 63, 0)]]
    assert round_activations(torch.zeros(2, 8), 8).tolist() == [[0.0] * 8] * 2
    assert round_activations(torch.full((1, 8), 2.0**-121), 8).tolist() == [[0.0] * 8]
    assert torch.equal(round_activations(x.double(), 8), round_activations(x, 8).double())


@pytest.mark.parametrize(
    ("group_size", "padded"), [(1, 16), (16, 16), (17, 32), (48, 64), (128, 128), (129, 256)]
)
def test_padded_group(group_size, padded):
    assert padded_group(group_size) == padded


@pytest.mark.parametrize(
    ("k", "group_size", "blocks"),
    [
        (320, 64, [range(128), range(128, 256), range(256, 320)]),
        (144, 48, [range(96), range(96, 144)]),  # a block holds two padded groups of 48
        (400, 200, [range(128), range(128, 200), range(200, 328), range(328, 400)]),
    ],
)
def test_blocks(k, group_size, blocks):
    # 1000 in a block rounds a 1 in it to zero, and does not affect other blocks.
    for block in blocks:
        x = torch.ones(1, k)
        x[0, block[0]] = 1000
        kept = [j for j in range(k) if j not in block]
        rounded = round_activations(x, group_size)[0]
        assert torch.allclose(rounded[kept], torch.ones(len(kept)), atol=1e-6)
        assert not rounded[list(block[1:])].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_x_makes_its_row_nan(bad):
    q = random_quantised(Format("custom", 4, 32), 5, 160)
    x = torch.randn(3, 160)
    expected = int8_linear(x, q)
    x[1, 7] = bad
    y = int8_linear(x, q)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], expected[[0, 2]])


def test_without_rows():
    q = random_quantised(Format("custom", 4, 48), 5, 144)
    assert round_activations(torch.ones(0, 144), 48).shape == (0, 144)
    assert int8_linear(torch.ones(0, 144), q, torch.ones(5)).shape == (0, 5)


def test_an_outlier_costs_its_block_at_most_half_a_step():
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    x[:, 5] = 1000
    error = (round_activations(x, 64) - x).abs()
    assert 1 < error[:, :128].max() <= 1000 / 254 * 1.0001
    assert error[:, 128:].max() < 0.02


@pytest.mark.parametrize(
    "format",
    [
        "int4-g64",
        "uniform4-g64",
        "fp4-g64",
        "ternary2-g64",
        "binary1-g64",
        "int8-g64",
        "uniform8-g64",
    ]
    + [f"{name}{bits}-g64" for name in ("int", "uniform") for bits in (2, 3, 5, 6, 7)],
)
def test_tables_of_grids_are_exact(format):
    codebook = quantise(torch.randn(4, 64), format).codebook
    table = int8_table(codebook)
    assert (table.values - codebook).abs().max() <= 1e-6 * codebook.abs().max()
    if len(codebook) < 256:
        assert table.levels.min() >= -127


def test_int8_table_by_hand():
    # 0, 1 and 3 are the steps 0, L/3 and L; the smallest multiple of 3 from 128 on is 129.
    table = int8_table(torch.tensor([0.0, 1.0, 3.0, 3.0]))
    assert table.levels.diff().tolist() == [43, 86, 0]
    assert table.step == pytest.approx(3 / 129)
    assert table.values.tolist() == pytest.approx([0, 1, 3, 3], abs=1e-6)
    same = int8_table(torch.full((4,), -0.25))
    assert same.values.tolist() == [-0.25] * 4
    assert int8_table(torch.tensor([0.0, float("nan")])).values.isnan().all()


# Error against the product without rounding x, for normal x and weights; see docs/guide/int8.md.
EXPECTED_ERROR = {
    "int4-g64": 0.0064,
    "fp4-g64": 0.0064,
    "affine4-g64": 0.0064,
    "affine8-g128": 0.0064,
    "kmeans1-g64": 0.0064,
    "kmeans2-g64": 0.0065,
    "kmeans3-g64": 0.0065,
    "nf4-g64": 0.0073,
    "kmeans4-g64": 0.0072,
    "nf6-g64": 0.0082,
    "nf8-g64": 0.0086,
}


@pytest.mark.parametrize(("format", "expected"), EXPECTED_ERROR.items())
def test_error(format, expected):
    generator = torch.Generator().manual_seed(0)
    q = quantise(torch.randn(512, 1024, generator=generator), format)
    x = torch.randn(64, 1024, generator=generator)
    exact = x.double() @ q.dequantise(torch.float64).T
    assert nrmse(int8_linear(x, q), exact) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("format", ["affine4-g16", "custom3-g48", "affine8-g200", "custom2-row"])
def test_rounding_is_done_once_and_the_bias_is_not_rounded_before(format):
    q = random_quantised(Format.parse(format), 7, 600 if "200" in format else 240)
    x, bias = torch.randn(3, q.shape[1]).bfloat16(), torch.randn(7).bfloat16()
    wide = int8_linear(x.float(), q, bias.float())
    assert torch.equal(int8_linear(x, q, bias), wide.bfloat16())


def layer(format="nf4-g32", **changes):
    torch.manual_seed(0)
    source = nn.Linear(96, 24)
    return QuantisedLinear.from_linear(
        source, format, backend="reference", activations="int8", **changes
    )


@pytest.mark.parametrize("format", ["nf4-g32", "affine4-g48"])
def test_layer(format):
    quantised = layer(format)
    x = torch.randn(2, 3, 96)
    expected = int8_linear(x.view(6, 96), quantised.quantised, quantised.bias)
    assert torch.equal(quantised(x), expected.view(2, 3, 24))
    assert "backend=reference, activations=int8" in repr(quantised)
    plain = QuantisedLinear.from_quantised(
        quantised.quantised, quantised.bias, backend="reference", dtype=torch.float32
    )
    assert "activations" not in repr(plain)
    assert 1e-3 < nrmse(quantised(x).detach(), plain(x).detach().double()) < 2e-2


def test_activations_belong_to_the_layer():
    quantised = layer()
    x = torch.randn(3, 96)
    expected = quantised(x)
    for other in (copy.deepcopy(quantised), pickle.loads(pickle.dumps(quantised))):
        assert other.activations == "int8"
        assert torch.equal(other(x), expected)
    half = copy.deepcopy(quantised).to(torch.bfloat16)
    assert half.activations == "int8"
    assert torch.equal(half(x.bfloat16()), int8_linear(x.bfloat16(), half.quantised, half.bias))
    # A state_dict does not record activations: the layer that loads it keeps its own.
    plain = QuantisedLinear.from_quantised(
        quantised.quantised, quantised.bias, backend="reference", dtype=torch.float32
    )
    assert quantised.state_dict().keys() == plain.state_dict().keys()
    before = plain(x)
    plain.load_state_dict(quantised.state_dict())
    assert plain.activations == "float"
    assert torch.equal(plain(x), before)
    quantised.load_state_dict(plain.state_dict())
    assert torch.equal(quantised(x), expected)


def test_the_gradient_is_that_of_the_product_without_rounding():
    quantised = layer()
    x = torch.randn(5, 96, requires_grad=True)
    grad_y = torch.randn(5, 24)
    quantised(x).backward(grad_y)
    plain = QuantisedLinear.from_quantised(
        quantised.quantised, quantised.bias, backend="reference", dtype=torch.float32
    )
    leaf = x.detach().clone().requires_grad_()
    plain(leaf).backward(grad_y)
    assert torch.equal(x.grad, leaf.grad)
    assert torch.equal(quantised.bias.grad, plain.bias.grad)


def test_compile_and_export():
    quantised = layer("affine3-g16")
    compiled = torch.compile(quantised, fullgraph=True, backend="aot_eager", dynamic=True)
    for m in (2, 3, 17):
        x = torch.randn(m, 96, requires_grad=True)
        y = compiled(x)
        assert torch.equal(y, quantised(x))
        y.sum().backward()
        assert x.grad is not None
    x = torch.randn(4, 96)
    program = torch.export.export(quantised, (x,))
    assert torch.equal(program.module()(x), quantised(x))
    ops = {str(node.target) for node in program.graph.nodes}
    assert "fdk_formats.reference_linear_int8.default" in ops


@pytest.mark.parametrize("format", [Format("custom", 3, 16), Format("affine", 4, 48)])
def test_opcheck(format):
    q = random_quantised(format, n=5, k=144)
    x = torch.randn(3, 144, requires_grad=True)
    bias = torch.randn(5, requires_grad=True)
    args = (x, q.packed, q.scale, q.codebook, q.zero_point, str(q.format), bias, 5, 144)
    torch.library.opcheck(torch.ops.fdk_formats.reference_linear_int8.default, args)


def test_models_and_files(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    quantised = quantise_model(model, "nf4-g32", backend="reference", activations="int8")
    x = torch.randn(3, 64)
    layers = [module for module in quantised if isinstance(module, QuantisedLinear)]
    assert [module.activations for module in layers] == ["int8", "int8"]
    save_model(tmp_path / "model.safetensors", quantised)
    read = tmp_path / "model.safetensors"
    again = load_model(read, model, backend="reference", activations="int8")
    assert torch.equal(again(x), quantised(x))
    plain = load_model(read, model, backend="reference")
    assert not torch.equal(plain(x), quantised(x))


def test_bad_activations_are_refused():
    message = "activations: wanted float or int8, got 'int4'"
    with pytest.raises(ValueError, match=message):
        Problem(Format("nf", 4), 8, 64, torch.float32, torch.device("cpu"), "int4")
    with pytest.raises(ValueError, match=message):
        QuantisedLinear.from_linear(
            nn.Linear(64, 8), "nf4-g64", backend="reference", activations="int4"
        )
    with pytest.raises(ValueError, match=message):
        quantise_model(nn.Linear(64, 8), "nf4-g64", activations="int4")


def test_a_backend_without_int8_gives_the_reason(monkeypatch):
    from fdk_formats import backends
    from fdk_formats.reference import ReferenceBackend

    class Plain(ReferenceBackend):
        name = "plain"

        def unsupported(self, problem):
            return None if problem.activations == "float" else "has no int8 activations"

    monkeypatch.setattr(backends, "_registry", {"plain": Plain()})
    problem = Problem(Format("nf", 4), 8, 64, torch.float32, torch.device("cpu"))
    assert backends.select(problem).name == "plain"
    message = r"float32 activations rounded to int8 on cpu:\n  plain: has no int8 activations"
    with pytest.raises(NoBackendError, match=message):
        backends.select(replace(problem, activations="int8"))


def test_codes_of_one_hot_rows_are_the_weights():
    q = replace(
        random_quantised(Format("affine", 8, 16), 3, 32),
        packed=pack(torch.arange(96).view(3, 32) + 100, 8),
    )
    y = int8_linear(torch.eye(32), q)
    assert torch.allclose(y, q.dequantise().T, rtol=1e-6, atol=0)
