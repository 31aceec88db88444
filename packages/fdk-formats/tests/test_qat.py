import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from fdk_formats import fake_quantise, fit_codebook, quantise, quantise_stack


@pytest.mark.parametrize(
    "format", ["kmeans3-g16", "int4-g32", "affine4-g64", "nf4-row", "kmeans3-g16-hadamard"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_is_the_dequantised_weight(format, dtype):
    torch.manual_seed(0)
    weight = torch.randn(6, 64, dtype=dtype)
    assert torch.equal(fake_quantise(weight, format), quantise(weight, format).dequantise(dtype))


def test_gradient_passes_straight_through():
    torch.manual_seed(0)
    weight = torch.randn(6, 64, requires_grad=True)
    grad = torch.randn(6, 64)
    fake_quantise(weight, "int4-g32").backward(grad)
    assert torch.equal(weight.grad, grad)


def test_gradient_to_the_codebook():
    # Groups of 16 with absmax scales 2 and 4; codes by hand: 1.0 -> entry 2, -1.0 -> entry 0.
    weight = torch.tensor([[2.0] * 12 + [-2.0] * 4 + [4.0] * 15 + [0.1]])
    codebook = torch.tensor([1.0, 0.0, 0.5, -1.0], requires_grad=True)  # need not be sorted
    grad = torch.ones(1, 32)
    fake_quantise(weight, "custom2-g16-absmax", codebook).backward(grad)
    # 1.0: 12 weights of scale 2, 15 of scale 4; 0.0: one of scale 4; -1.0: 4 of scale 2
    assert codebook.grad.tolist() == [12 * 2 + 15 * 4, 4.0, 0.0, 4 * 2.0]


def test_gradient_to_the_codebook_is_that_of_indexing():
    torch.manual_seed(0)
    weight = torch.randn(8, 64)
    codebook = fit_codebook(weight, "kmeans3-g16").requires_grad_()
    grad = torch.randn(8, 64)
    fake_quantise(weight, "kmeans3-g16", codebook).backward(grad)
    q = quantise(weight, "kmeans3-g16", codebook=codebook.detach())
    table = codebook.detach().clone().requires_grad_()
    scale = q.scale.float().repeat_interleave(16, dim=1)
    (table[q.codes().long()] * scale).backward(grad)
    torch.testing.assert_close(codebook.grad, table.grad)


SCALED = ["kmeans3-g16", "int2-g16-absmean", "nf4-row-signmax", "affine3-g16", "affine2-g16-zint"]


@pytest.mark.parametrize("format", SCALED)
def test_gradient_to_the_scales_is_that_of_a_dense_reference(format):
    """Straight through rounding between the ends of the grid, and clipped beyond them."""
    torch.manual_seed(0)
    weight, grad = torch.randn(8, 64, dtype=torch.float64).float(), torch.randn(8, 64)
    size = 64 if "row" in format else 16
    start = 0.5 * torch.randn(8, 64 // size)
    table = fit_codebook(weight, format) if "kmeans" in format else None
    found = [w.requires_grad_() for w in (weight.clone(), start.clone())]
    fake_quantise(found[0], format, table, scale_log2=found[1]).backward(grad)

    q = quantise(weight, format, codebook=table, scale_log2=start)
    wanted = [w.requires_grad_() for w in (weight.clone(), start.clone())]
    fixed = q.scale.double() / start.double().exp2()  # the scale of the rule
    scale = (fixed * wanted[1].double().exp2()).repeat_interleave(size, dim=1)
    if q.codebook is not None:
        level = q.codebook.double()[q.codes().long()]
        low, high = q.codebook.double()[[0, -1]]
    else:
        zero = q.zero_point.double().repeat_interleave(size, dim=1)
        level, low, high = q.codes() - zero, -zero, 2**q.format.bits - 1 - zero
    position = wanted[0].detach().double() / scale
    is_inside = (position >= low) & (position <= high)
    rounded = torch.where(is_inside, position + (level - position).detach(), level)
    through = wanted[0] - wanted[0].detach()
    (rounded * scale + through).backward(grad.double())
    assert torch.equal(found[0].grad, wanted[0].grad)
    torch.testing.assert_close(found[1].grad, wanted[1].grad)
    assert is_inside.any()
    assert not is_inside.all()


@pytest.mark.parametrize("format", SCALED)
def test_forward_with_scales_and_a_dtype(format):
    torch.manual_seed(0)
    weight = torch.randn(8, 64)
    scale_log2 = torch.randn(8, 1 if "row" in format else 4)
    table = fit_codebook(weight, format) if "kmeans" in format else None
    q = quantise(weight, format, codebook=table, scale_log2=scale_log2)
    for dtype in (torch.float32, torch.bfloat16):
        found = fake_quantise(weight, format, table, scale_log2=scale_log2, dtype=dtype)
        assert torch.equal(found, q.dequantise(dtype))
    unchanged = quantise(weight, format, codebook=table, scale_log2=torch.zeros_like(scale_log2))
    plain = quantise(weight, format, codebook=table)
    assert torch.equal(unchanged.dequantise(), plain.dequantise())


def test_scales_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"scale_log2 must be \[4, 2\] on cpu, got \[4\] on cpu"):
        fake_quantise(torch.ones(4, 32), "nf4-g16", scale_log2=torch.zeros(4))
    with pytest.raises(TypeError, match="fake_quantise: scale_log2 must be a tensor, got float"):
        fake_quantise(torch.ones(4, 32), "nf4-g16", scale_log2=1.0)


def test_gradient_of_a_transposed_use():
    weight, codebook = torch.randn(4, 32), torch.linspace(-1, 1, 4, requires_grad=True)
    factor = torch.randn(32, 4)
    (fake_quantise(weight, "custom2-g16", codebook).T * factor).sum().backward()
    transposed, codebook.grad = codebook.grad, None
    (fake_quantise(weight, "custom2-g16", codebook) * factor.T).sum().backward()
    torch.testing.assert_close(transposed, codebook.grad)


def test_training_a_layer_and_its_codebook_lowers_the_loss():
    torch.manual_seed(0)
    x, target = torch.randn(256, 32), torch.randn(256, 8)
    weight = nn.Parameter(0.1 * torch.randn(8, 32))
    codebook = nn.Parameter(torch.tensor([-1.0, -0.3, 0.3, 1.0]))
    optimiser = torch.optim.Adam([weight, codebook], lr=1e-2)
    losses = []
    for _ in range(60):
        W_hat = fake_quantise(weight, "custom2-g16-rms", codebook)
        loss = (x @ W_hat.T - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
    assert not torch.equal(codebook.detach(), torch.tensor([-1.0, -0.3, 0.3, 1.0]))


def test_second_derivative():
    torch.manual_seed(0)
    weight, table = torch.randn(4, 32), torch.linspace(-1, 1, 4).requires_grad_()
    factor = torch.randn(4, 32, requires_grad=True)

    def gradient(W_hat, by):
        (grad,) = torch.autograd.grad((W_hat * factor).sum(), by, create_graph=True)
        return grad

    q = quantise(weight, "custom2-g16", codebook=table)
    direct = table[q.codes().long()] * q.scale.float().repeat_interleave(16, dim=1)
    slopes = [
        torch.autograd.grad(gradient(W_hat, table).square().sum(), factor)[0]
        for W_hat in (fake_quantise(weight, "custom2-g16", table), direct)
    ]
    torch.testing.assert_close(*slopes)


def test_transforms_of_torch_func():
    torch.manual_seed(0)
    weights, table = torch.randn(5, 4, 32), torch.tensor([0.3, -1.0, -0.3, 1.0])

    def loss(weight, table):
        return fake_quantise(weight, "custom2-g16", table).square().sum()

    found = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None))(
        weights, table
    )
    for index, weight in enumerate(weights):
        inputs = weight.clone().requires_grad_(), table.clone().requires_grad_()
        wanted = torch.autograd.grad(loss(*inputs), inputs)
        assert all(torch.equal(f[index], w) for f, w in zip(found, wanted, strict=True))
    each = torch.func.vmap(lambda weight: fake_quantise(weight, "kmeans2-g16"))
    assert torch.equal(each(weights)[3], fake_quantise(weights[3], "kmeans2-g16"))
    assert each(weights[:0]).shape == (0, 4, 32)


# torch.func.jvp triggers this warning.
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_forward_mode_is_refused():
    """Without the error the tangent would be zero."""
    weight, table = torch.ones(1, 16), torch.tensor([-1.0, 1.0])
    refused = pytest.raises(NotImplementedError, match=r"fake_quantise\S*: has no forward-mode")
    with refused:
        torch.func.jvp(lambda w: fake_quantise(w, "nf4-row"), (weight,), (weight,))
    with forward_ad.dual_level():
        with refused:
            fake_quantise(forward_ad.make_dual(weight, weight), "nf4-row")
        with refused:
            fake_quantise(weight, "custom1-g16", forward_ad.make_dual(table, table))
        assert fake_quantise(weight, "nf4-row").tolist() == weight.tolist()


class Layer(nn.Module):
    def __init__(self, k, n, format, codebook=None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, k))
        self.codebook = None if codebook is None else nn.Parameter(codebook)
        self.format = format

    def forward(self, x):
        return nn.functional.linear(x, fake_quantise(self.weight, self.format, self.codebook))


def network():
    torch.manual_seed(0)
    table = torch.tensor([0.3, -1.0, -0.3, 1.0])
    return nn.Sequential(
        Layer(64, 32, "kmeans4-g32"), nn.ReLU(), Layer(32, 3, "custom2-g16", table)
    )


# aot_eager traces, where graph breaks show, and needs no C++ compiler.
def test_compile_fullgraph_without_recompiling_over_m():
    model = network()
    expected = copy.deepcopy(model)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m in (2, 3, 17):
            x = torch.randn(m, 64)
            y, wanted = compiled(x), expected(x)
            assert torch.equal(y, wanted)
            y.square().sum().backward()
            wanted.square().sum().backward()
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


def test_export():
    model, x = network(), torch.randn(4, 64)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("m", min=2)},))
    wide = torch.randn(9, 64)
    assert torch.equal(program.module()(wide), model(wide))
    ops = [str(node.target) for node in program.graph.nodes]
    assert ops.count("fdk_formats.fake_quantise.default") == 2


@pytest.mark.parametrize("format", ["nf4-row", "affine3-g16-zint", "kmeans3-g16-search-e8m0"])
def test_opcheck(format):
    torch.manual_seed(0)
    weight = torch.randn(5, 48, requires_grad=True)
    op = torch.ops.fdk_formats.fake_quantise.default
    torch.library.opcheck(op, (weight, None, None, None, format, torch.float32))


def test_opcheck_with_a_codebook():
    torch.manual_seed(0)
    weight = torch.randn(5, 48, dtype=torch.bfloat16, requires_grad=True)
    table, importance = torch.linspace(-1, 1, 8, requires_grad=True), torch.rand(48)
    op = torch.ops.fdk_formats.fake_quantise.default
    dtype = torch.bfloat16
    torch.library.opcheck(op, (weight, table, None, importance, "custom3-g16", dtype))
    outputs = op(weight.detach(), table.detach(), None, None, "custom3-g16", dtype)
    grad, codes, scale, _ = outputs
    op = torch.ops.fdk_formats.fake_quantise_grad_codebook.default
    torch.library.opcheck(op, (grad, codes, scale, "custom3-g16"))


@pytest.mark.parametrize("format", ["custom3-g16", "affine2-g16-zint"])
def test_opcheck_with_learned_scales(format):
    torch.manual_seed(0)
    weight, scale_log2 = torch.randn(5, 48, requires_grad=True), torch.zeros(5, 3)
    table = None if "affine" in format else torch.linspace(-1, 1, 8, requires_grad=True)
    op = torch.ops.fdk_formats.fake_quantise.default
    arguments = weight, table, scale_log2.requires_grad_(), None, format, torch.bfloat16
    torch.library.opcheck(op, arguments)
    outputs = op(*(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments))
    op = torch.ops.fdk_formats.fake_quantise_grad_scale.default
    torch.library.opcheck(op, (*outputs, weight.detach(), format))


def test_a_weight_on_meta():
    weight = torch.empty(4, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
    W_hat = fake_quantise(weight, "kmeans4-g32")
    assert (W_hat.shape, W_hat.dtype, W_hat.device.type) == ((4, 64), torch.bfloat16, "meta")
    with pytest.raises(ValueError, match=r"weight must be \[n, k\], got \[64\]"):
        fake_quantise(weight[0], "kmeans4-g32")
    with pytest.raises(TypeError, match=r"weight must be floating, got torch\.int32"):
        fake_quantise(weight.int(), "nf4-g32")
    with pytest.raises(ValueError, match=r"codebook of custom2-g32 must be \[4\], got \[5\]"):
        fake_quantise(weight, "custom2-g32", torch.empty(5, device="meta"))
    with pytest.raises(ValueError, match="custom2-g32 needs codebook=, 4 values"):
        fake_quantise(weight, "custom2-g32")


def test_a_weight_without_rows():
    weight = torch.empty(0, 32, requires_grad=True)
    table = torch.linspace(-1, 1, 4, requires_grad=True)
    fake_quantise(weight, "custom2-g16", table).sum().backward()
    assert weight.grad.shape == (0, 32)
    assert table.grad.tolist() == [0.0] * 4


def test_arguments_must_be_tensors():
    with pytest.raises(TypeError, match="fake_quantise: weight must be a tensor, got NoneType"):
        fake_quantise(None, "nf4-g64")
    with pytest.raises(TypeError, match="fake_quantise: codebook must be a tensor, got list"):
        fake_quantise(torch.ones(1, 16), "custom1-g16", [0.0, 1.0])
    with pytest.raises(TypeError, match="fake_quantise: importance must be a tensor, got float"):
        fake_quantise(torch.ones(1, 16), "nf4-row", importance=1.0)


def test_fixed_codebooks_take_no_other():
    with pytest.raises(ValueError, match="codebook"):
        fake_quantise(torch.randn(4, 64), "nf4-g64", torch.linspace(-1, 1, 16))


def stack_and_importance():
    torch.manual_seed(0)
    return torch.randn(4, 6, 64), torch.rand(4, 64)


@pytest.mark.parametrize("format", ["kmeans3-g16", "int4-g32", "affine4-g64", "nf4-row"])
@pytest.mark.parametrize("weighed", [False, True])
def test_a_stack_is_its_dequantised_weight(format, weighed):
    weight, importance = stack_and_importance()
    importance = importance if weighed else None
    expected = quantise_stack(weight, format, importance).dequantise(torch.bfloat16)
    found = fake_quantise(weight, format, importance=importance, dtype=torch.bfloat16)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("own", [False, True])
def test_gradients_of_a_stack_are_those_of_its_experts(own):
    weight, _ = stack_and_importance()
    codebook = torch.randn(4, 8) if own else torch.randn(8)
    scale_log2, grad = 0.1 * torch.randn(4, 6, 4), torch.randn(4, 6, 64)
    given = [t.clone().requires_grad_() for t in (weight, codebook, scale_log2)]
    fake_quantise(given[0], "custom3-g16", given[1], scale_log2=given[2]).backward(grad)
    apart = [t.clone().requires_grad_() for t in (weight, codebook, scale_log2)]
    for e in range(4):
        table = apart[1][e] if own else apart[1]
        W_hat = fake_quantise(apart[0][e], "custom3-g16", table, scale_log2=apart[2][e])
        W_hat.backward(grad[e])
    for one, other in zip(given, apart, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_stack_compiles_and_refuses_other_shapes():
    weight, importance = stack_and_importance()
    codebook = torch.randn(4, 8)
    compiled = torch.compile(fake_quantise, fullgraph=True, backend="aot_eager")
    expected = fake_quantise(weight, "custom3-g16", codebook)
    assert torch.equal(compiled(weight, "custom3-g16", codebook), expected)
    assert fake_quantise(weight.to("meta"), "int4-g16").shape == weight.shape
    with pytest.raises(ValueError, match=r"codebook must be \[8\] or \[4, 8\], got \[3, 8\]"):
        fake_quantise(weight, "custom3-g16", codebook[:3])
    with pytest.raises(ValueError, match=r"importance must be \[64\], \[4, 64\] or \[4, 6, 64\]"):
        fake_quantise(weight, "int4-g16", importance=importance[:3])
    with pytest.raises(ValueError, match=r"scale_log2 must be \[4, 6, 4\], got \[4, 6, 2\]"):
        fake_quantise(weight, "int4-g16", scale_log2=torch.zeros(4, 6, 2))
    with pytest.raises(ValueError, match="weight"):
        fake_quantise(weight[None], "int4-g16")
