"""Rotated formats: the rotation itself, weights, layers, and what refuses them."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fdk_formats import (
    Format,
    NoBackendError,
    Problem,
    QuantisedLinear,
    calibrate_weights,
    fake_quantise,
    fit_codebook,
    fuse_layers,
    load_model,
    mix_formats,
    output_error,
    quantise,
    quantise_model,
    quantise_stack,
    relative_error,
    save_model,
    select,
    tensor_parallel,
)
from fdk_formats.compensate import Hessian
from fdk_formats.distil import _Trained
from fdk_formats.int8 import int8_linear
from fdk_formats.rotated_layout import RotatedLayout
from fdk_formats.rotation import is_negative, rotate, rotate_in_torch, rotated_importance, signs_on

FORMAT = "kmeans3-g32-hadamard"
K, N = 192, 40  # blocks of 64
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def matrix(k):
    """Returns R, ``[k, k, float64]``, from its definition."""
    block = min(k & -k, 256)
    index = torch.arange(block)
    ones = sum((index[:, None] & index & (1 << bit)) >> bit for bit in range(8))
    signs = torch.tensor([-1.0 if is_negative(i) else 1.0 for i in range(block)])
    own = (1 - 2 * (ones % 2)).double() / math.sqrt(block) * signs.double()
    return torch.block_diag(*[own] * (k // block))


def values(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def outliers(k=K, rows=512):
    """Returns correlated inputs, some of them far larger than the others."""
    x = values(rows, k, seed=1) + values(rows, 1, seed=2)
    return x * torch.where(torch.arange(k) % 23 == 5, 20.0, 1.0)


def weight():
    """Returns a weight whose large inputs are those of ``outliers``."""
    return values(N, K) * torch.where(torch.arange(K) % 23 == 5, 8.0, 1.0)


def layer(format=FORMAT, **settings):
    torch.manual_seed(0)
    return QuantisedLinear.from_linear(nn.Linear(K, N), format, **settings)


def test_signs_never_change():
    """Files depend on them."""
    bits = sum(is_negative(i) << i for i in range(256))
    assert f"{bits:064x}" == "d59e78da5e64f62e027bd818dff46b19da1326214f0d42c33bba28b0629a699d"
    wanted = [-1.0 if is_negative(i) else 1.0 for i in range(256)]
    assert signs_on(torch.device("cpu")).tolist() == wanted


@pytest.mark.parametrize(("k", "block"), [(16, 16), (48, 16), (576, 64), (4096, 256), (11008, 256)])
def test_blocks(k, block):
    assert Format.parse("int4-row-hadamard").rotation_block(k) == block
    assert Format.parse("int4-row").rotation_block(k) is None


@pytest.mark.parametrize("k", [16, 48, 192, 768])
def test_rotation_is_the_product_with_r(k):
    x, R = values(5, k), matrix(k)
    torch.testing.assert_close(R @ R.T, torch.eye(k).double())
    torch.testing.assert_close(rotate(x.double()), x.double() @ R.T, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(
        rotate(x.double(), inverse=True), x.double() @ R, rtol=1e-13, atol=1e-13
    )
    torch.testing.assert_close(rotate(x), (x.double() @ R.T).float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inverse", [False, True])
def test_sixteen_bits_are_rounded_once(dtype, inverse):
    x = values(7, 768, dtype=dtype)
    assert torch.equal(rotate(x, inverse=inverse), rotate(x.float(), inverse=inverse).to(dtype))


@pytest.mark.parametrize("shape", [(48,), (0, 48), (2, 0, 48), (3, 48), (2, 3, 48)])
def test_shapes_and_strides(shape):
    x = values(*shape)
    assert rotate(x).shape == shape
    strided = x.new_empty(*shape[:-1], 96)[..., ::2].copy_(x)
    assert torch.equal(rotate(strided), rotate(x))
    assert torch.equal(rotate(x).reshape(-1, 48), rotate(x.reshape(-1, 48)))


def test_kernels_of_the_device_give_the_bits_of_torch():
    for k in (16, 32, 64, 128, 768):
        for dtype in (*DTYPES, torch.float64):
            for inverse in (False, True):
                x = values(5, k, dtype=dtype)
                wanted = rotate_in_torch(x, min(k & -k, 256), inverse)
                assert torch.equal(rotate(x, inverse=inverse), wanted), (k, dtype, inverse)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("inverse", [False, True])
def test_x_stays_as_it_is(rows, dtype, inverse):
    x = values(rows, 16, dtype=dtype)
    before = x.clone()
    rotated = rotate_in_torch(x, 16, inverse)
    assert torch.equal(x, before)
    back = rotate_in_torch(rotated, 16, not inverse)
    torch.testing.assert_close(back, before)


def test_bad_input():
    with pytest.raises(ValueError, match=r"x must be \[..., k\], got \[\]"):
        rotate(torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"x must be floating, got torch\.int64"):
        rotate(torch.ones(16, dtype=torch.int64))


def test_derivatives():
    x = values(3, 48).double().requires_grad_()
    for inverse in (False, True):
        assert torch.autograd.gradcheck(lambda x, i=inverse: rotate(x, inverse=i), x)
        assert torch.autograd.gradgradcheck(lambda x, i=inverse: rotate(x, inverse=i), x)
    R = matrix(48)
    (dx,) = torch.autograd.grad(rotate(x)[0, 7], x)
    torch.testing.assert_close(dx[0], R[7])
    jacobian = torch.func.jacrev(rotate)(x.detach()[0])
    torch.testing.assert_close(jacobian, R)
    assert torch.equal(torch.vmap(rotate)(x.detach()), rotate(x.detach()))
    torch.library.opcheck(torch.ops.fdk_formats.rotate.default, (x, False))
    torch.library.opcheck(torch.ops.fdk_formats.rotate.default, (x.bfloat16(), True))


# Weights


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_those_of_the_rotated_weight(dtype):
    w, R = weight(), matrix(K)
    q = quantise(w, FORMAT)
    plain = quantise((w.double() @ R.T).float(), "kmeans3-g32")
    torch.testing.assert_close(q.scale.float(), plain.scale.float(), rtol=0.01, atol=0)
    wanted = (q.unrotated.dequantise(dtype).double() @ R).to(dtype)
    torch.testing.assert_close(q.dequantise(dtype), wanted)
    assert torch.equal(q.rows(3, 9, dtype), q.dequantise(dtype)[3:9])
    assert relative_error(w, q) < 0.95 * relative_error(w, quantise(w, "kmeans3-g32"))


def test_threads_do_not_show():
    before = torch.get_num_threads()
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(quantise(values(64, 1024), "kmeans2-g64-search-hadamard"))
    torch.set_num_threads(before)
    for name, tensor in found[0].tensors().items():
        assert torch.equal(tensor, found[1].tensors()[name])


@pytest.mark.parametrize(
    "format", ["kmeans2-g32-hadamard", "affine3-g32-hadamard", "nf4-row-hadamard"]
)
def test_moments_are_rotated(format):
    x, w = outliers(), weight()
    H = Hessian(x.T @ x / len(x))
    torch.testing.assert_close(
        H.rotated.matrix.double(),
        matrix(K) @ H.matrix.double() @ matrix(K).T,
        rtol=1e-4,
        atol=1e-4,
    )
    q = quantise(w, format, hessian=H)
    plain = quantise(w, Format.parse(format).unrotated, hessian=H)
    own, other = (output_error(w, each.dequantise(), H) for each in (q, plain))
    measured = (x @ (w - q.dequantise()).T).norm() / (x @ w.T).norm()
    assert own == pytest.approx(float(measured), rel=1e-3)
    assert own < other
    assert own < 0.7 * output_error(w, quantise(w, format).dequantise(), H)


def test_inputs_whose_rotation_is_zero_almost_everywhere():
    x = 3 * signs_on(torch.device("cpu"))[:64].repeat(3).expand(5, K)  # rotated: one in 64
    w = values(N, K)
    q = quantise(w, FORMAT, hessian=x.T @ x / len(x))
    torch.testing.assert_close(x @ q.dequantise().T, x @ w.T, rtol=0.1, atol=1)


def test_a_weight_that_is_not_finite_is_named():
    w = values(N, K)
    w[3, 70] = torch.inf
    with pytest.raises(ValueError, match="got inf at row 3, column 70"):
        quantise(w, FORMAT)
    with pytest.raises(ValueError, match="weight must be finite in float32, got inf"):
        quantise(torch.full((2, 16), 3e38) * signs_on(w.device)[:16], "int4-row-hadamard")


def test_importance_is_the_mean_of_a_block():
    x = values(1 << 14, K) * torch.linspace(0.1, 3, K)
    importance = x.square().mean(0)
    spread = rotated_importance(importance)
    assert torch.allclose(spread[:64], importance[:64].double().mean())
    # The second moments of rotated inputs that are not correlated.
    torch.testing.assert_close(rotate(x).square().mean(0).double(), spread, rtol=0.1, atol=0)
    w = values(N, K)
    q = quantise(w, FORMAT, importance)
    assert torch.equal(q.codebook, fit_codebook(w, FORMAT, importance))
    assert not torch.equal(q.codebook, fit_codebook(w, FORMAT))
    fake = fake_quantise(w, FORMAT, importance=importance)
    assert torch.equal(fake, q.dequantise())


def test_experts():
    w = torch.stack([weight(), values(N, K, seed=7)])
    stack = quantise_stack(w, FORMAT)
    for expert in range(2):
        assert torch.equal(stack.dequantise()[expert], quantise(w[expert], FORMAT).dequantise())


def test_learned_scales_and_codebooks():
    """The gradients are those of the dense function."""
    w, grad = values(8, 64), values(8, 64, seed=3)
    start = 0.1 * values(8, 2, seed=4)
    table = fit_codebook(w, FORMAT)
    found = [t.clone().requires_grad_() for t in (w, table, start)]
    fake_quantise(found[0], FORMAT, found[1], scale_log2=found[2]).backward(grad)
    wanted = [t.clone().requires_grad_() for t in (w.double() @ matrix(64).T, table, start)]
    rotated = [wanted[0].detach().float().requires_grad_(), *wanted[1:]]
    fake_quantise(rotated[0], "kmeans3-g32", rotated[1], scale_log2=rotated[2]).backward(
        (grad.double() @ matrix(64).T).float()
    )
    torch.testing.assert_close(found[0].grad, grad)
    torch.testing.assert_close(found[1].grad, rotated[1].grad)
    torch.testing.assert_close(found[2].grad, rotated[2].grad)


def test_distilled_scales():
    linear = nn.Linear(K, N, bias=False)
    q = quantise(linear.weight.detach(), FORMAT)
    trained = _Trained(linear, q)
    assert torch.equal(linear.weight, q.dequantise())
    grad = values(N, K, seed=5)
    linear.weight.backward(grad)
    R, G = matrix(K), grad.double()
    unit = q.unrotated.dequantise().double()
    wanted = (unit * (G @ R.T)).view(N, -1, 32).sum(-1)
    torch.testing.assert_close(trained.change.grad.double(), wanted, rtol=1e-4, atol=1e-4)
    trained.handle.remove()
    assert torch.equal(trained.quantised().dequantise(), q.dequantise())


# Layers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(K,), (1, K), (5, K), (2, 3, K), (0, K)])
def test_a_layer(shape, dtype, backend):
    made = layer(backend=backend).to(dtype)
    x = values(*shape, dtype=dtype).requires_grad_()
    y = made(x)
    wanted = nn.functional.linear(rotate(x.detach()), made.quantised.unrotated.dequantise(dtype))
    tolerance = {"rtol": 0.02, "atol": 0.05} if dtype != torch.float32 else {}
    torch.testing.assert_close(y, wanted + made.bias, **tolerance)
    exact = x.detach().double() @ made.dequantise().double().T + made.bias
    torch.testing.assert_close(
        y.double(), exact, rtol=0.02, atol=0.1 if dtype != torch.float32 else 1e-5
    )
    y.backward(torch.ones_like(y))
    dx = (torch.ones_like(y).double() @ made.dequantise().double()).to(dtype)
    torch.testing.assert_close(x.grad, dx, **tolerance)
    assert made.bias.grad is not None
    assert type(made.layout) is RotatedLayout


def test_a_layer_has_the_backend_of_the_unrotated_format(backend):
    made = layer(backend=backend)
    settings = {"dtype": torch.float32, "backend": backend}
    plain = QuantisedLinear.from_quantised(made.quantised.unrotated, **settings)
    assert made.backend_name == plain.backend_name
    assert str(made.format) == FORMAT
    assert str(made.layout.layout.unpack().format) == "kmeans3-g32"


def test_int8_activations(backend):
    made = layer("int8-row-hadamard", backend=backend, activations="int8")
    x = values(4, K)
    torch.testing.assert_close(made(x), int8_linear(x, made.quantised, made.bias))


def test_autocast(backend):
    made, x = layer(backend=backend), values(4, K)
    with torch.autocast("cpu", torch.bfloat16):
        y = made(x)
    assert y.dtype == torch.bfloat16
    rounded = nn.functional.linear(
        rotate(x.bfloat16()), made.quantised.unrotated.dequantise(torch.bfloat16)
    )
    torch.testing.assert_close(y, rounded + made.bias.bfloat16(), rtol=0.02, atol=0.02)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_graphs(backend):
    made, x = layer(backend=backend), values(3, K).requires_grad_()
    torch.compiler.reset()
    call = torch.compile(made, fullgraph=True, backend="aot_eager")
    assert torch.equal(call(x), made(x))
    call(x).sum().backward()
    program = torch.export.export(made, (x.detach(),))
    assert torch.equal(program.module()(x.detach()), made(x.detach()))
    vmapped = torch.vmap(made)(x.detach()[:, None])
    torch.testing.assert_close(vmapped[:, 0], made(x.detach()))


@pytest.mark.parametrize("is_permuted", [False, True])
def test_the_weight_in_a_graph(is_permuted):
    made = layer(backend="reference")
    if is_permuted:
        made.permute_inputs(torch.randperm(K, generator=torch.Generator().manual_seed(2)))
    torch.compiler.reset()
    read = torch.compile(lambda x: x @ made.weight.T, fullgraph=True, backend="aot_eager")
    x = values(3, K)
    torch.testing.assert_close(read(x), x @ made.dequantise().T)


def test_inputs_are_permuted_before_they_are_rotated(backend):
    made, x = layer(backend=backend), values(3, K)
    stored = made.dequantise()
    order = torch.randperm(K, generator=torch.Generator().manual_seed(2))
    made.permute_inputs(order)
    torch.testing.assert_close(made(x), x[:, order] @ stored.T + made.bias)
    torch.testing.assert_close(made(x), x @ made.dequantise().T + made.bias)


def test_copies_moves_and_state(backend):
    made, x = layer(backend=backend), values(3, K)
    y = made(x)
    assert torch.equal(copy.deepcopy(made)(x), y)
    other = QuantisedLinear(K, N, format=FORMAT, backend=backend)
    other.load_state_dict(made.state_dict())
    assert torch.equal(other(x), y)
    with pytest.warns(UserWarning, match="quantised again"):
        other.weight = made.dequantise()
    torch.testing.assert_close(other(x), y, rtol=0.1, atol=0.1)
    assert other.to("meta").to_empty(device="cpu")(x).shape == y.shape


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(K, 64), nn.Linear(K, 64, bias=False)
        self.down_proj = nn.Linear(64, K)

    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.up_proj(x))


def test_fused_layers_rotate_once(monkeypatch):
    from fdk_formats import rotated_layout

    seen = []
    monkeypatch.setattr(rotated_layout, "rotate", lambda x: seen.append(x.shape[-1]) or rotate(x))
    made = quantise_model(Pair(), "int4-g32-hadamard", backend="reference", progress=False)
    x = values(3, K)
    wanted = made(x)
    assert seen == [K, K, 64]
    made = copy.deepcopy(made)  # packed again at the next call
    assert fuse_layers(made) == [("gate_proj", "up_proj")]
    seen.clear()
    torch.testing.assert_close(made(x), wanted)
    assert seen == [K, 64]
    assert [str(each.format) for each in (made.gate_proj, made.up_proj)] == [
        "int4-g32-hadamard"
    ] * 2
    weight = made.up_proj.dequantise()
    torch.compiler.reset()
    read = torch.compile(lambda x: x @ made.up_proj.weight.T, backend="aot_eager")
    torch.testing.assert_close(read(x), x @ weight.T)
    settings = {"overrides": {"gate_proj": "int4-g32"}, "backend": "reference", "fuse": True}
    apart = quantise_model(Pair(), "int4-g32-hadamard", **settings, progress=False)
    assert apart.gate_proj.group is None


def test_files(tmp_path):
    made = quantise_model(
        Pair(), FORMAT, overrides={"down": "int8-g64"}, backend="reference", progress=False
    )
    save_model(tmp_path / "model.safetensors", made)
    loaded = load_model(tmp_path / "model.safetensors", Pair(), backend="reference")
    assert torch.equal(loaded(values(3, K)), made(values(3, K)))
    assert [str(loaded.gate_proj.format), str(loaded.down_proj.format)] == [FORMAT, "int8-g64"]
    for name, tensor in made.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


class Language(nn.Module):
    """A language model whose layers have large inputs among small ones."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.lm_head = nn.Linear(64, 50, bias=False)

    def get_output_embeddings(self):
        return self.lm_head

    def get_input_embeddings(self):
        return self.embed

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.lm_head(x)


def language():
    torch.manual_seed(0)
    model = Language().eval()
    large = torch.where(torch.arange(64) % 16 == 3, 12.0, 1.0)
    model.embed.weight.data.mul_(large)
    for block in model.blocks:
        block.weight.data.mul_(large.flip(0) / 4)
    return model


def divergence(model, source, ids):
    with torch.no_grad():
        found, wanted = (each(ids).log_softmax(-1) for each in (model, source))
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


@pytest.mark.parametrize("epochs", [0, 2])
def test_calibration_gains(epochs):
    ids = torch.randint(50, (24, 32), generator=torch.Generator().manual_seed(1))
    held_out = torch.randint(50, (8, 32), generator=torch.Generator().manual_seed(2))
    found = {}
    for format in ("kmeans2-g32", "kmeans2-g32-hadamard"):
        model = language()
        names = [f"blocks.{i}" for i in range(2)]
        layers = calibrate_weights(
            model, dict.fromkeys(names, format), ids.split(8), epochs=epochs, progress=False
        )
        found[format] = divergence(model, language(), held_out)
        for name in names:
            assert torch.equal(
                model.get_parameter(f"{name}.weight"), layers[name].quantised.dequantise()
            )
    assert found["kmeans2-g32-hadamard"] < 0.9 * found["kmeans2-g32"], found


def test_mixed_formats():
    formats = ["kmeans2-g32-hadamard", "kmeans3-g32-hadamard"]
    ids = torch.randint(50, (2, 32), generator=torch.Generator().manual_seed(1))
    chosen = mix_formats(language(), ["blocks.0", "blocks.1"], formats, 3.0, ids)
    assert sorted(map(str, chosen.values())) == formats


# Refusals


def test_inputs_that_cannot_be_rotated():
    message = "int4-row-hadamard: k must be a multiple of 16 to be rotated, got k=40; int4-row fits"
    with pytest.raises(ValueError, match=message):
        quantise(values(8, 40), "int4-row-hadamard")
    with pytest.raises(ValueError, match=message):
        fake_quantise(values(8, 40), "int4-row-hadamard")
    with pytest.raises(ValueError, match=f"layer 0: {message}; skip or override it"):
        quantise_model(nn.Sequential(nn.Linear(40, 8)), "int4-row-hadamard", progress=False)
    with pytest.raises(ValueError, match="rotation must be hadamard or None, got 'givens'"):
        Format("int", 4, rotation="givens")


@pytest.mark.parametrize("experts", [None, 2])
def test_backends_refuse_rotated_formats(experts, backend):
    format = Format.parse(FORMAT)
    problem = Problem(format, N, K, torch.float32, torch.device("cpu"), experts=experts)
    wanted = "multiplies x as it is: rotate x, and use the weight as kmeans3-g32$"
    with pytest.raises(NoBackendError, match=wanted):
        select(problem, backend)
    chosen = select(replace(problem, format=format.unrotated), backend)
    weights = values(experts or 1, N, K)
    q = quantise(weights[0], format) if experts is None else quantise_stack(weights, format)
    pack = chosen.pack if experts is None else chosen.pack_stack
    with pytest.raises(ValueError, match=f"{FORMAT}: a backend {wanted}"):
        pack(q, dtype=torch.float32)


def test_cuts_keep_blocks_whole():
    format = Format.parse("int4-g64-hadamard")
    for k, ranks in ((11008, 43), (4096, 16), (14336, 8), (576, 9)):
        tensor_parallel.check_cut(format, k, ranks, "cut n")
        assert format.rotation_block(k // ranks) == format.rotation_block(k)
        own = values(2, k)
        parts = [rotate(part) for part in own.chunk(ranks, 1)]
        assert torch.equal(torch.cat(parts, 1), rotate(own))
    message = (
        r"int4-g64-hadamard of k=11008 cannot be cut into 2 along k: each part needs whole blocks "
        r"of 256 rotated inputs, and k/2 is 5504; cut n, or quantise without rotation \(int4-g64\)"
    )
    with pytest.raises(ValueError, match=message):
        tensor_parallel.check_cut(format, 11008, 2, "cut n")


def test_importance_is_checked_before_it_is_rotated():
    weight, wrong = values(4, 64), torch.ones(64)
    wrong[3] = -0.5
    for function in (quantise, fake_quantise):
        with pytest.raises(ValueError, match="importance must be finite and not negative"):
            function(weight, FORMAT, importance=wrong)
        with pytest.raises(ValueError, match=r"importance must be \[64\]"):
            function(weight, FORMAT, importance=torch.tensor(1.0))


def test_fake_quantise_gives_the_weight_of_quantise():
    for seed in range(20):
        weight = values(40, 128, seed=seed)
        importance = torch.rand(40, 128, generator=torch.Generator().manual_seed(seed))
        for format in ("kmeans2-g16-search-hadamard", "kmeans3-g32-hadamard"):
            q = quantise(weight, format, importance=importance)
            assert torch.equal(fake_quantise(weight, format, importance=importance), q.dequantise())


@pytest.mark.parametrize("saved", ["int4-g32", "int4-g32-hadamard"])
def test_states_of_the_other_kind_are_refused(saved):
    own = {"int4-g32": "int4-g32-hadamard", "int4-g32-hadamard": "int4-g32"}[saved]
    state = layer(saved, backend="reference").state_dict()
    with pytest.raises(RuntimeError, match=f"wanted a weight of {own}, got one with the rotation"):
        layer(own, backend="reference").load_state_dict(state)
    same = layer(saved, backend="reference")
    same.load_state_dict(state)
    same.load_state_dict(dict(state))  # without metadata


def test_messages_name_formats_that_fit():
    with pytest.raises(ValueError, match="k=40; int4-row fits"):
        quantise(values(4, 40), "int4-g64-hadamard")
    with pytest.raises(ValueError, match=r"without rotation \(int4-g32\)"):
        tensor_parallel.check_cut(Format.parse("int4-g64-hadamard"), 192, 2, "cut n")
    weight = values(4, 64)
    weight[2, 37] = torch.nan
    with pytest.raises(ValueError, match="row 2, column 37"):
        quantise(weight, FORMAT, hessian=torch.eye(64))
