import copy
import io
import os
import pickle
import re
import shutil

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fdk_formats import (
    Format,
    NoBackendError,
    QuantisedLinear,
    backends,
    quantise,
    quantise_model,
    register,
)
from fdk_formats.reference import ReferenceBackend, ReferenceLayout
from fdk_formats.testing import nrmse, random_quantised


def linear(n=24, k=64, *, bias=True, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(k, n, bias=bias)


def layer(format="kmeans4-g32", **kwargs):
    return QuantisedLinear.from_linear(linear(), format, backend="reference", **kwargs)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_linear(bias, dtype):
    source = linear(bias=bias).to(dtype)
    quantised = QuantisedLinear.from_linear(source, "nf4-g64", backend="reference")
    x = torch.randn(2, 3, 64, dtype=dtype)
    W_hat = quantise(source.weight, "nf4-g64").dequantise(dtype)
    assert torch.equal(quantised(x), nn.functional.linear(x, W_hat, source.bias))
    assert quantised(x[0, 0]).shape == (24,)
    assert quantised(x[:0]).shape == (0, 3, 24)
    assert (quantised.in_features, quantised.out_features) == (64, 24)
    assert quantised.format == Format.parse("nf4-g64")


class DoubledLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_from_linear_refuses_what_it_would_drop():
    patched = linear()
    patched.forward = lambda x: x
    for source, kind in ((patched, "Linear"), (DoubledLinear(64, 24), "DoubledLinear")):
        with pytest.raises(ValueError, match=f"wanted a layer with the forward .* got a {kind} "):
            QuantisedLinear.from_linear(source, "nf4-g64")


def test_from_quantised_casts_the_bias():
    q = random_quantised(Format("affine", 5, 16), n=8, k=32)
    quantised = QuantisedLinear.from_quantised(q, torch.ones(8), backend="reference")
    assert quantised.bias.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"bias must be \[8\], got \[9\]"):
        QuantisedLinear.from_quantised(q, torch.ones(9), backend="reference")


def test_a_frozen_bias_stays_frozen():
    source = linear()
    source.bias.requires_grad_(False)
    quantised = QuantisedLinear.from_linear(source, "nf4-g64", backend="reference")
    assert not quantised.bias.requires_grad
    assert quantised.bias.data_ptr() != source.bias.data_ptr()


def test_gradient_reaches_x_and_bias():
    quantised = layer()
    x = torch.randn(5, 64, dtype=torch.float32, requires_grad=True)
    grad_y = torch.randn(5, 24)
    quantised(x).backward(grad_y)
    W_hat = quantised.quantised.dequantise(torch.float64)
    assert nrmse(x.grad, grad_y.double() @ W_hat) < 1e-6
    assert nrmse(quantised.bias.grad, grad_y.double().sum(0)) < 1e-6
    trained = [name for name, p in quantised.named_parameters() if p.requires_grad]
    assert trained == ["bias"]


def test_gradient_of_float64_is_float64():
    q = random_quantised(Format("custom", 3, 16), n=5, k=48)
    quantised = QuantisedLinear.from_quantised(
        q, torch.zeros(5), backend="reference", dtype=torch.float64
    )
    grad_y = torch.randn(1000, 5, dtype=torch.float64)
    quantised(torch.randn(1000, 48, dtype=torch.float64)).backward(grad_y)
    assert nrmse(quantised.bias.grad, grad_y.sum(0)) < 1e-14


def test_second_derivative():
    q = random_quantised(Format("custom", 3, 16), n=5, k=48)
    quantised = QuantisedLinear.from_quantised(q, backend="reference", dtype=torch.float64)
    x = torch.randn(3, 48, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(quantised, (x,))
    assert torch.autograd.gradgradcheck(quantised, (x,))


def test_state_dict_is_canonical_and_comes_back():
    source = layer()
    state = source.state_dict()
    assert sorted(state) == ["bias", "weight_codebook", "weight_packed", "weight_scale"]
    q = quantise(linear().weight, "kmeans4-g32")
    assert torch.equal(state["weight_packed"], q.packed)
    other = QuantisedLinear.from_linear(linear(seed=1), "kmeans4-g32", backend="reference")
    x = torch.randn(3, 64)
    assert not torch.equal(other(x), source(x))
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer))
    assert torch.equal(other(x), source(x))


def test_load_state_dict_refuses():
    quantised, state = layer(), layer().state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*weight_scale"):
        quantised.load_state_dict({k: v for k, v in state.items() if k != "weight_scale"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*weight_other"):
        quantised.load_state_dict(state | {"weight_other": torch.ones(1)})
    wrong = state | {"weight_packed": state["weight_packed"][:, :-1]}
    with pytest.raises(RuntimeError, match=r"kmeans4-g32: packed of a \[24, 64\] weight"):
        quantised.load_state_dict(wrong)
    falling = state | {"weight_codebook": state["weight_codebook"].flip(0)}
    with pytest.raises(RuntimeError, match="codebook must be finite and ascend"):
        quantised.load_state_dict(falling)
    quantised.load_state_dict(state)
    state["weight_packed"].zero_()  # what was loaded is a copy
    assert quantised.quantised.packed.any()


def test_moves_and_casts_keep_the_weight():
    quantised = layer()
    before = quantised.quantised
    half = copy.deepcopy(quantised).to(torch.bfloat16)
    assert half.bias.dtype == half.weight.dtype == torch.bfloat16
    for name, tensor in half.quantised.tensors().items():
        assert torch.equal(tensor, before.tensors()[name])  # the same dtype and bytes
    assert half(torch.ones(1, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert quantised.weight.dtype == torch.float32
    assert copy.deepcopy(quantised).to("meta").quantised.device.type == "meta"
    again = pickle.loads(pickle.dumps(quantised))
    x = torch.randn(2, 64)
    assert torch.equal(again(x), quantised(x))


class CpuOnly(ReferenceBackend):
    """Supports the CPU only."""

    name = "cpu_only"

    def unsupported(self, problem):
        return None if problem.device.type == "cpu" else f"needs the CPU, got {problem.device}"

    def pack(self, q, *, dtype):
        return ReferenceLayout(q)


class Anywhere(ReferenceBackend):
    name = "anywhere"

    def priority(self, problem):
        return -1


@pytest.fixture
def two_backends(monkeypatch):
    monkeypatch.setattr(backends, "_registry", dict(backends.all_backends()))
    register(CpuOnly())
    register(Anywhere())


@pytest.mark.usefixtures("two_backends")
def test_a_move_chooses_the_backend_anew():
    auto = QuantisedLinear.from_linear(linear(), "nf4-g64", backend="anywhere")
    assert auto.backend_name == "anywhere"
    assert auto.to("meta").backend_name == "reference"


@pytest.mark.usefixtures("two_backends")
def test_a_weight_on_meta_has_shapes_whatever_its_backend():
    quantised = QuantisedLinear.from_linear(linear(), "nf4-g64", backend="cpu_only").to("meta")
    x = torch.ones(3, 64, device="meta", requires_grad=True)
    assert quantised(x).shape == (3, 24)
    quantised(x).sum().backward()
    assert quantised.backend_name == "reference"


@pytest.mark.usefixtures("two_backends")
@pytest.mark.parametrize("format", ["nf4-g64", "affine3-row-zint", "kmeans2-g16-e8m0"])
def test_to_empty(format):
    original = QuantisedLinear.from_linear(linear(), format, backend="cpu_only")
    quantised = copy.deepcopy(original).to("meta")
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta"):
        quantised.to("cpu")
    quantised.to_empty(device="cpu")
    assert quantised.backend_name == "cpu_only"
    assert quantised.relative_error is None
    assert not quantised.quantised.dequantise().any()
    quantised.load_state_dict(original.state_dict())
    assert torch.equal(quantised(torch.ones(1, 64)), original(torch.ones(1, 64)))


class Float32Only(ReferenceBackend):
    name = "float32_only"

    def unsupported(self, problem):
        fits = problem.dtype == torch.float32
        return None if fits else f"needs torch.float32, got {problem.dtype}"

    def pack(self, q, *, dtype, **more):
        layout = super().pack(q, dtype=dtype, **more)
        layout.dtypes = (dtype,)
        return layout


def test_an_unsupported_move_moves_the_whole_model(monkeypatch):
    monkeypatch.setattr(backends, "_registry", dict(backends.all_backends()))
    register(Float32Only())
    quantised = QuantisedLinear.from_linear(linear(), "nf4-g64", backend="float32_only")
    model = nn.Sequential(nn.LayerNorm(64), quantised)
    x = torch.randn(2, 64)
    y, state = model(x), model.state_dict()
    with pytest.warns(UserWarning, match=r"cannot be used in torch.float64 on cpu"):
        model.double()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {parameter.dtype for parameter in trained} == {torch.float64}
    with pytest.raises(NoBackendError, match=r"float32_only does not .*, got torch\.float64"):
        model(x.double())
    assert "backend=none" in repr(pickle.loads(pickle.dumps(model)))
    with pytest.warns(UserWarning, match="cannot be used"):
        model.load_state_dict(state)
    assert torch.equal(model.float()(x), y)
    assert quantised.backend_name == "float32_only"


def test_wrong_input():
    with pytest.raises(TypeError, match=r"wanted a torch\.nn\.Linear, got Tensor"):
        QuantisedLinear.from_linear(torch.ones(3, 64), "nf4-g64")
    quantised = layer()
    for shape in ([1, 65], []):
        said = rf"x must be \[\.\.\., 64\], got {re.escape(str(shape))}"
        with pytest.raises(ValueError, match=said):
            quantised(torch.ones(shape))
    with pytest.raises(ValueError, match="x must be on cpu, got meta"):
        quantised(torch.ones(1, 64, device="meta"))
    with pytest.raises(TypeError, match="QuantisedLinear: x must be a tensor, got ndarray"):
        quantised(np.ones((1, 64), dtype=np.float32))


def test_from_linear_passes_codebook_and_importance_on():
    source, codebook = linear(), torch.linspace(-1, 1, 16)
    own = layer("custom4-g32", codebook=codebook)
    q = quantise(source.weight, "custom4-g32", codebook=codebook)
    assert torch.equal(own.quantised.dequantise(), q.dequantise())
    importance = torch.linspace(0.1, 2, 64)
    weighed = quantise(source.weight, "kmeans4-g32", importance).codebook
    assert torch.equal(layer(importance=importance).quantised.codebook, weighed)
    with pytest.raises(ValueError, match="custom4-g32 needs codebook=, 16 values"):
        layer("custom4-g32")
    with pytest.raises(ValueError, match=r"codebook of custom4-g32 must be \[16\], got \[4\]"):
        layer("custom4-g32", codebook=torch.arange(4.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_computes_as_nn_linear(dtype):
    quantised, x = layer().to(dtype), torch.randn(3, 64, requires_grad=True)
    source = nn.Linear(64, 24).to(dtype)
    source.load_state_dict({"weight": quantised.dequantise(), "bias": quantised.bias})
    quantised.bias.data = quantised.bias.data.float()  # as prepare_model_for_kbit_training does
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, expected = quantised(x), source(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    exact = x.detach().double() @ quantised.dequantise().double().T + source.bias.detach().double()
    assert nrmse(y.detach(), exact) < 1.5 * nrmse(expected.detach(), exact)
    y.float().sum().backward()
    assert x.grad.dtype == quantised.bias.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_x_must_be_floating(dtype):
    x = torch.ones(3, 64, dtype=dtype)
    with pytest.raises(TypeError, match=f"x must be floating, got {dtype}"):
        layer()(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(RuntimeError, match="same dtype"):
            nn.Linear(64, 24)(x)
        with pytest.raises(TypeError, match=f"x must be floating, got {dtype}"):
            layer()(x)


def test_x_of_another_dtype_is_computed_in_its_own():
    quantised = layer().to(torch.bfloat16)
    x = torch.randn(3, 64)
    y = quantised(x)
    assert y.dtype == torch.float32
    assert torch.equal(y, copy.deepcopy(quantised).float()(x))


def test_tied_layers_share_one_weight_through_a_move():
    model = nn.ModuleList([layer(), layer()])
    model[1].tie_weight(model[0])
    model[0].bias = model[1].bias = None
    x = torch.randn(2, 64)
    y = model[0](x)
    for moved in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        moved.to(torch.bfloat16).to("meta").to_empty(device="cpu").float()
        moved.load_state_dict(model.state_dict() if moved is not model else {}, strict=False)
        assert moved[0].stored is moved[1].stored
        assert moved[0].weight_packed is moved[1].weight_packed
        assert moved[0].weight.dtype == torch.float32
    moved[0].load_state_dict(layer().state_dict(), strict=False)
    assert torch.equal(moved[1](x), y)


def test_share_memory():
    quantised = layer().share_memory()
    assert quantised.quantised.packed.is_shared()
    assert quantised.quantised.scale.is_shared()


def test_repr():
    text = repr(layer())
    assert "in_features=64, out_features=24, bias=True" in text
    assert "kmeans4-g32, backend=reference" in text


# aot_eager traces, where graph breaks show, and needs no C++ compiler.
def test_compile_fullgraph_without_recompiling_over_m():
    quantised = layer("affine3-g16")
    compiled = torch.compile(quantised, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.compiler.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m in (2, 3, 17):
            x = torch.randn(m, 64, requires_grad=True)
            y = compiled(x)
            assert torch.equal(y, quantised(x))
            y.sum().backward()
            assert x.grad is not None


def test_compiled_blocks_share_a_graph():
    """Blocks compiled one by one, as with checkpointing: the graph of the first one fits all."""
    model = nn.Sequential(*(linear(seed=seed) for seed in range(5)), linear(32))
    blocks = quantise_model(model, "kmeans4-g32", backend="reference", progress=False)
    standby = copy.deepcopy(blocks)
    torch.compiler.reset()
    for block in blocks[:5]:
        block.compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 64, requires_grad=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for block in blocks[:5]:
            y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            y.sum().backward()
            assert torch.equal(y, nn.functional.linear(x, block.dequantise(), block.bias))
    others = blocks[5], *standby, *pickle.loads(pickle.dumps(standby))
    assert all(other.stored.layout is None for other in others)


def test_a_block_that_cannot_be_packed_fails_in_its_own_call(monkeypatch):
    def fail(dtype):
        raise ValueError("cannot be packed")

    model = nn.Sequential(*(linear(seed=seed) for seed in range(4)))
    blocks = quantise_model(model, "kmeans4-g32", backend="reference", progress=False)
    monkeypatch.setattr(blocks[1], "_pack", fail)
    del blocks[2]._parameters["weight_packed"]
    torch.compiler.reset()
    x = torch.randn(2, 64)
    compiled = torch.compile(blocks[0], backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), blocks[0](x))
    assert blocks[3].stored.layout is not None
    with pytest.raises(ValueError, match="cannot be packed"):
        blocks[1](x)


# torch.vmap puts the repr of the layer in its messages, which are traced too.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # of inductor
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_compile_vmap_over_batch_sizes(backend, compiler):
    if backend == "cpu":
        pytest.importorskip("fdk_cpu")
    if compiler == "inductor" and shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("needs a C++ compiler")
    quantised = QuantisedLinear.from_linear(linear(), "kmeans4-g32", backend)
    torch.compiler.reset()
    compiled = torch.compile(torch.vmap(quantised), fullgraph=True, backend=compiler)
    for batch in (4, 5, 7, 1):
        x = torch.randn(batch, 3, 64)
        torch.testing.assert_close(compiled(x), quantised(x))
    assert quantised.backend_name == backend


def test_export():
    quantised = layer()
    x = torch.randn(4, 64)
    m = torch.export.Dim("m", min=2)
    program = torch.export.export(quantised, (x,), dynamic_shapes=({0: m},))
    wide = torch.randn(9, 64)
    assert torch.equal(program.module()(wide), quantised(wide))
    ops = {str(node.target) for node in program.graph.nodes}
    assert "fdk_formats.reference_linear.default" in ops
    assert program.module()(x).shape == (4, 24)


def test_opcheck():
    q = random_quantised(Format("custom", 3, 16), n=5, k=48)
    bias: Tensor | None
    for m, dtype, bias in (
        (3, torch.float32, torch.randn(5, requires_grad=True)),
        (1, torch.float64, None),
    ):
        x = torch.randn(m, 48, dtype=dtype, requires_grad=True)
        args = (x, q.packed, q.scale, q.codebook, q.zero_point, str(q.format), bias, 5, 48)
        torch.library.opcheck(torch.ops.fdk_formats.reference_linear.default, args)
        grad_y = torch.randn(m, 5, dtype=dtype)
        args = (grad_y, q.packed, q.scale, q.codebook, q.zero_point, str(q.format), 5, 48)
        torch.library.opcheck(torch.ops.fdk_formats.reference_linear_grad_x.default, args)


class Doubled(nn.Module):
    def forward(self, bias):
        return 2 * bias


def test_replaced_biases():
    """A bias may be a parameter, a tensor, None or parametrised."""
    x, one = torch.zeros(1, 64), torch.ones(24)
    with_bias = layer()
    without = QuantisedLinear.from_quantised(with_bias.quantised, backend="reference")
    with_bias.bias = nn.Parameter(one)
    assert torch.equal(with_bias(x), one[None])
    assert torch.equal(torch.func.functional_call(with_bias, {"bias": 3 * one}, x), 3 * one[None])
    nn.utils.parametrize.register_parametrization(with_bias, "bias", Doubled())
    assert torch.equal(with_bias(x), 2 * one[None])
    nn.utils.parametrize.remove_parametrizations(with_bias, "bias")
    with_bias.bias = None
    assert not with_bias(x).any()
    assert not without(x).any()


@pytest.mark.parametrize("format", ["nf4-g64", "affine3-row-zint"])
def test_layers_made_in_inference_mode_can_be_trained(format):
    with torch.inference_mode():
        made = QuantisedLinear.from_linear(linear(), format, backend="reference")
    moved, loaded = layer(format), layer(format)
    with torch.inference_mode():
        moved.to(torch.float64).to(torch.float32)
        loaded.load_state_dict(made.state_dict())
    for quantised in (made, moved, loaded):
        x = torch.ones(1, 64, requires_grad=True)
        quantised(x).sum().backward()
        assert x.grad is not None
        W_hat = quantised.quantised.dequantise()
        torch.testing.assert_close(x.grad, torch.ones(1, 24) @ W_hat)
        assert quantised.bias.grad.tolist() == [1.0] * 24


def test_loading_into_meta():
    """As in nn.Module, assigned tensors stay on their device, and copying to meta warns."""
    original, given = layer(), torch.ones(1, 64)
    state, empty = original.state_dict(), copy.deepcopy(original).to("meta")
    with pytest.warns(UserWarning, match="Linear: loading into the meta device does nothing"):
        empty.load_state_dict({k: v for k, v in state.items() if k != "bias"}, strict=False)
    assert empty.weight.device.type == "meta"
    assert empty.load_state_dict(state, assign=True).missing_keys == []
    assert empty.weight.device.type == "cpu"
    assert torch.equal(empty(given), original(given))
