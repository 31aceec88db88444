"""``layer.weight``: metadata for free, arithmetic dequantises, writing quantises again."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fdk_formats import QuantisedLinear, stored_weight

FORMATS = ["kmeans4-g32", "affine3-g16", "nf4-row"]


def layer(format="kmeans4-g32", n=24, k=64, dtype=torch.float32, **kwargs):
    torch.manual_seed(0)
    return QuantisedLinear.from_linear(
        nn.Linear(k, n).to(dtype), format, backend="reference", **kwargs
    )


@pytest.fixture
def no_values(monkeypatch):
    """Fails a test that reads the values of a weight."""

    def read(_):
        raise AssertionError("the weight was unpacked or dequantised")

    monkeypatch.setattr(stored_weight.StoredWeight, "quantised", read)


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_metadata_costs_nothing(is_called, dtype, request):
    quantised = layer(dtype=dtype)
    if is_called:
        quantised(torch.zeros(1, 64, dtype=dtype))
    request.getfixturevalue("no_values")
    weight = quantised.weight
    assert isinstance(weight, Tensor)
    assert isinstance(weight, nn.Parameter)
    assert isinstance(quantised, nn.Linear)
    assert (weight.dtype, weight.device.type, weight.layout) == (dtype, "cpu", torch.strided)
    assert weight.shape == weight.size() == (24, 64)
    assert (weight.ndim, weight.dim(), weight.numel(), len(weight)) == (2, 2, 24 * 64, 24)
    assert (weight.size(1), weight.stride(), weight.is_contiguous()) == (64, (64, 1), True)
    assert weight.nbytes == 24 * 64 * dtype.itemsize
    assert weight.is_floating_point()
    assert not weight.is_complex()
    assert not weight.is_cuda
    assert not weight.is_meta
    assert not weight.requires_grad
    assert weight.grad is None
    assert weight.grad_fn is None
    assert weight.is_leaf
    assert hash(weight) is not None
    assert weight.data.dtype == weight.detach().dtype == dtype
    assert torch.is_tensor(weight)
    assert torch.is_floating_point(weight)
    assert weight.get_device() == -1
    assert weight.element_size() == dtype.itemsize


def test_no_values_fails_a_read(no_values):
    with pytest.raises(AssertionError, match="was unpacked"):
        layer().weight.float()


def test_weight_follows_the_layer():
    quantised = layer()
    assert quantised.to(torch.float16).weight.dtype == torch.float16
    assert quantised.to("meta").weight.is_meta


READS = {
    "x @ W.T": lambda W, x: x @ W.T,
    "x @ W.t()": lambda W, x: x @ W.t(),
    "x @ W.mT": lambda W, x: x @ W.mT,
    "W @ x.T": lambda W, x: W @ x.T,
    "x.matmul": lambda W, x: x.matmul(W.transpose(0, 1)),
    "torch.matmul": lambda W, x: torch.matmul(W, x.T),
    "einsum": lambda W, x: torch.einsum("nk,mk->mn", W, x),
    "F.linear": lambda W, x: functional.linear(x, W),
    "W + 1": lambda W, x: W + 1,
    "1 - W": lambda W, x: 1 - W,
    "-W": lambda W, x: -W,
    "abs": lambda W, x: W.abs().max(),
    "norm": lambda W, x: torch.linalg.norm(W, dim=1),
    "row": lambda W, x: W[3],
    "rows": lambda W, x: W[2:5, ::2],
    "mask": lambda W, x: W[W > 0],
    "float": lambda W, x: W.float(),
    "double": lambda W, x: W.double(),
    "to": lambda W, x: W.to(torch.bfloat16),
    "clone": lambda W, x: W.clone(),
    "data.clone": lambda W, x: W.data.clone(),
    "detach @": lambda W, x: x @ W.detach().T,
    "view": lambda W, x: W.view(-1),
    "reshape": lambda W, x: W.reshape(2, -1),
    "cat": lambda W, x: torch.cat([W, x]),
    "stack": lambda W, x: torch.stack([W, W]),
    "chunk": lambda W, x: torch.cat(W.chunk(2)[::-1]),
    "sum": lambda W, x: W.sum(),
    "zeros_like": lambda W, x: torch.zeros_like(W),
    "new_zeros": lambda W, x: W.new_zeros(3),
    "isnan": lambda W, x: torch.isnan(W),
    "where": lambda W, x: torch.where(W > 0, W, 0),
    "vmap": lambda W, x: torch.func.vmap(lambda row: W @ row)(x),
    "vmap over W": lambda W, x: torch.func.vmap(torch.sum)(W),
    "jvp": lambda W, x: torch.func.jvp(lambda v: v @ W.T, (x,), (x,))[1],
    "numpy": lambda W, x: torch.from_numpy(W.numpy().copy()),
    "tolist": lambda W, x: torch.tensor(W.tolist()),
    "contiguous": lambda W, x: W.T.contiguous(),
    "svd": lambda W, x: torch.linalg.svdvals(W),
    "iterate": lambda W, x: torch.stack(list(W)),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # jvp
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_arithmetic_uses_the_dequantised_weight(read):
    quantised = layer()
    x = torch.randn(3, 64)
    W_hat = quantised.quantised.dequantise(torch.float32)
    for _ in range(2):  # canonical, then packed
        got = read(quantised.weight, x)
        assert type(got) is Tensor
        assert torch.equal(got, read(W_hat, x))
        quantised(x)
    assert torch.equal(quantised.quantised.dequantise(torch.float32), W_hat)


@pytest.mark.parametrize("format", FORMATS)
def test_gradients_pass_through_the_weight(format):
    quantised, x = layer(format), torch.randn(3, 64, requires_grad=True)
    W_hat = quantised.dequantise()
    (x @ quantised.weight.T).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(3, 24) @ W_hat)
    gradient = torch.func.grad(lambda v: (v @ quantised.weight.T).sum())(x.detach())
    torch.testing.assert_close(gradient, x.grad)


def set_data(quantised, value):
    quantised.weight.data = value


def set_weight(quantised, value):
    quantised.weight = value


def set_parameter(quantised, value):
    quantised.weight = nn.Parameter(value)


def copy_to(quantised, value):
    with torch.no_grad():
        quantised.weight.copy_(value)


def copy_to_data(quantised, value):
    quantised.weight.data.copy_(value)


def set_items(quantised, value):
    quantised.weight[:] = value


def add_to_data(quantised, value):
    quantised.weight.data += value - quantised.dequantise()


def add_to_weight(quantised, value):
    with torch.no_grad():
        quantised.weight += value - quantised.dequantise()


def call_add(quantised, value):
    quantised.weight.data.add_(value - quantised.dequantise())


def register(quantised, value):
    quantised.register_parameter("weight", nn.Parameter(value))


def call_an_op(quantised, value):
    torch.ops.aten.copy_.default(quantised.weight, value)


def write_to_out(quantised, value):
    torch.add(value, 0, out=quantised.weight)


def fill_by_init(quantised, value):
    nn.init.zeros_(quantised.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised.weight = value


def copy_in_inference_mode(quantised, value):
    with torch.inference_mode():
        quantised.weight.copy_(value)


WRITES = [
    *(call_an_op, write_to_out, fill_by_init, copy_in_inference_mode),
    *(set_data, set_weight, set_parameter, copy_to, copy_to_data, set_items, add_to_data),
    *(add_to_weight, call_add, register),
]


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_writing_quantises_again_and_warns(write, is_called):
    quantised, x = layer("int8-g32"), torch.randn(3, 64)
    if is_called:
        quantised(x)
    value = torch.randn(24, 64)
    with pytest.warns(UserWarning, match="quantised again to int8-g32, which loses precision"):
        write(quantised, value)
    wanted = QuantisedLinear.from_linear(
        functional_linear(value, quantised.bias), "int8-g32", backend="reference"
    )
    tolerance = (
        {"rtol": 0, "atol": 0} if write not in (add_to_data, add_to_weight, call_add) else {}
    )
    torch.testing.assert_close(quantised.dequantise(), wanted.dequantise(), **tolerance)
    torch.testing.assert_close(quantised(x), wanted(x))
    assert quantised.relative_error is None
    assert torch.equal(quantised.dequantise(), quantised.weight.clone())


def functional_linear(weight, bias):
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    linear.weight, linear.bias = nn.Parameter(weight), nn.Parameter(bias.detach().clone())
    return linear


def test_merging_an_adapter():
    """``weight.data += delta``, as PEFT and others merge LoRA."""
    quantised, x = layer("int8-g16"), torch.randn(5, 64)
    A, B = torch.randn(4, 64) / 8, torch.randn(24, 4) / 8
    wanted = quantised(x) + x @ A.T @ B.T
    with pytest.warns(UserWarning, match="quantised again"):
        quantised.weight.data += B @ A
    error = (quantised(x) - wanted).norm() / wanted.norm()
    assert 0 < error < 0.01
    assert not isinstance(quantised.weight_packed, type(quantised.weight))


def test_assigning_another_shape_resizes_the_layer():
    quantised = layer()
    with pytest.warns(UserWarning, match="quantised again"):
        quantised.weight = nn.Parameter(torch.randn(40, 96))
    assert (quantised.out_features, quantised.in_features) == (40, 96)
    quantised.bias = nn.Parameter(torch.zeros(40))
    assert quantised(torch.randn(2, 96)).shape == (2, 40)


def test_assigning_what_is_no_weight():
    quantised = layer()
    before = quantised.dequantise()
    with pytest.raises(TypeError, match=r"weight must be a tensor \[n, k\], got NoneType"):
        quantised.weight = None
    with pytest.raises(TypeError, match=r"weight must be a tensor \[n, k\], got \[64\]"):
        quantised.weight = torch.zeros(64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="k=65"):
            quantised.weight = torch.zeros(24, 65)
    assert torch.equal(quantised.dequantise(), before)
    assert quantised(torch.zeros(1, 64)).shape == (1, 24)


def test_gradient_flags_have_no_effect():
    quantised = layer()
    quantised.weight.requires_grad = True
    quantised.weight.requires_grad_(True)
    quantised.weight.grad = torch.ones(24, 64)
    assert not quantised.weight.requires_grad
    assert quantised.weight.grad is None


def test_writing_where_only_the_dispatcher_sees_it():
    quantised = layer()
    before = quantised.dequantise()
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(TypeError, match=r"layer\.weight"):
        quantised.weight.add_(1)
    assert torch.equal(quantised.dequantise(), before)


def test_copies_are_plain_tensors():
    quantised = layer()
    copied = copy.deepcopy(quantised.weight)
    assert type(copied) in (Tensor, nn.Parameter)
    assert torch.equal(copied, quantised.dequantise())


def test_repr_shows_values():
    text = repr(layer().weight)
    assert text.startswith("DequantisedWeight(tensor([[")
    assert text.endswith("format=kmeans4-g32)")
