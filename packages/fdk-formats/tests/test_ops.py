"""Calls of a linear op: its kernels, or torch's dispatcher where a call is not plain."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import Library
from torch.utils._python_dispatch import TorchDispatchMode

from fdk_formats.ops import define_linear_op

library = Library("fdk_test_ops", "FRAGMENT")
plain_linear = define_linear_op(
    library,
    "plain_linear",
    layout="Tensor weight",
    forward=lambda x, weight, bias, n, k: torch.nn.functional.linear(x, weight, bias),
    grad_x=lambda grad_y, weight, n, k: grad_y @ weight,
    dispatch_keys=("CPU",),
)
WEIGHT = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
X = torch.tensor([[1.0, 0.0, -1.0]])


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The x of every call that goes through torch's dispatcher."""
    seen = []

    def record(x: Tensor, *args: object) -> Tensor:
        seen.append(x)
        return torch.ops.fdk_test_ops.plain_linear.default(x, *args)

    monkeypatch.setattr(plain_linear, "op", record)
    return seen


def call(x: Tensor = X, bias: Tensor | None = None) -> Tensor:
    return plain_linear(x, WEIGHT, bias, 2, 3)


def test_plain_calls(dispatched: list[Tensor]) -> None:
    bias = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        for x in (X, X[0], X.expand(2, 4, 1, 3)):
            assert call(x, bias).tolist() == torch.full((*x.shape[:-1], 2), -1.0).tolist()
    assert call().tolist() == [[-2.0, -2.0]]
    assert not dispatched
    assert call(X[:0]).shape == (0, 2)
    with pytest.raises(ValueError, match=r"plain_linear: x must be \[..., 3\], got \[1, 2\]"):
        call(X[:, :2])


@pytest.mark.parametrize("shape", [(3,), (0, 3), (2, 3), (2, 0, 3), (2, 2, 3)])
def test_without_outputs(shape: tuple[int, ...]) -> None:
    """With n = 0 y is empty and the gradient of x is zero."""
    x, bias = torch.ones(shape, requires_grad=True), torch.ones(0, requires_grad=True)
    y = plain_linear(x, WEIGHT[:0], bias, 0, 3)
    assert y.shape == (*shape[:-1], 0)
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros(shape))
    assert bias.grad.shape == (0,)


def test_gradient(dispatched: list[Tensor]) -> None:
    bias = torch.zeros(2, requires_grad=True)
    call(bias=bias).sum().backward()
    assert bias.grad.tolist() == [1.0, 1.0]
    x = X.clone().requires_grad_()
    call(x).sum().backward()
    assert x.grad.tolist() == [[5.0, 7.0, 9.0]]
    assert not dispatched
    x.grad = None
    with Names() as mode:
        call(x).sum().backward()
    assert x.grad.tolist() == [[5.0, 7.0, 9.0]]
    assert "fdk_test_ops.plain_linear_grad_x.default" in mode.names


def test_second_derivatives() -> None:
    weight, x, bias = WEIGHT.double(), X.double(), torch.zeros(2, dtype=torch.float64)

    def quadratic(x: Tensor, bias: Tensor) -> Tensor:
        return plain_linear(x, weight, bias, 2, 3).square()

    inputs = x.requires_grad_(), bias.requires_grad_()
    assert torch.autograd.gradcheck(quadratic, inputs)
    assert torch.autograd.gradgradcheck(quadratic, inputs)


def test_batch_of_gradients() -> None:
    x = X[0].clone().requires_grad_()
    y = call(x)
    assert type(y.grad_fn).__name__ == "plain_linearBackward"
    (dx,) = torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)
    assert torch.equal(dx, WEIGHT)
    assert torch.equal(torch.autograd.functional.jacobian(call, x, vectorize=True), WEIGHT)


@pytest.mark.parametrize("shape", [(1, 3), (3,), (2, 3, 3), (0, 3), (2, 0, 3)])
@pytest.mark.parametrize("n", [0, 2])
def test_results_are_not_views(shape: tuple[int, ...], n: int) -> None:
    """Autograd refuses in-place work on a view that an op made of its own result."""
    x, bias = torch.ones(shape, requires_grad=True), torch.ones(n, requires_grad=True)
    for rows in (x, torch.ones(*shape, 2)[..., 0].requires_grad_()):
        y = plain_linear(rows, WEIGHT[:n], bias, n, 3)
        (dx,) = torch.autograd.grad(y, rows, torch.ones_like(y).requires_grad_(), create_graph=True)
        for result in (y, dx):
            wanted = 2 * (result.detach() + 1)
            result += 1
            result.mul_(2)
            assert torch.equal(torch.nn.ReLU(inplace=True)(result), wanted.relu())


class Names(TorchDispatchMode):
    """Records the names of ops."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_calls_that_are_not_plain(dispatched: list[Tensor]) -> None:
    with Names() as mode:
        call()
    assert "fdk_test_ops.plain_linear.default" in mode.names
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    assert "fdk_test_ops::plain_linear" in {event.key for event in profile.key_averages()}
    assert len(dispatched) == 2
    negated = torch._neg_view(X)
    assert call(negated).tolist() == [[2.0, 2.0]]
    assert len(dispatched) == 3
    with forward_ad.dual_level():
        call()
    assert len(dispatched) == 4


# torch.func.jvp loads decompositions through it.
@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_forward_mode_is_refused() -> None:
    """Without the error y would have a tangent of zero."""
    refused = pytest.raises(NotImplementedError, match=r"plain_linear\S*: has no forward-mode")
    with refused:
        torch.func.jvp(call, (X,), (X,))
    with refused:
        torch.func.jacfwd(call)(X)
    with refused:
        torch.func.jvp(lambda bias: call(bias=bias), (torch.ones(2),), (torch.ones(2),))
    with forward_ad.dual_level(), refused:
        call(forward_ad.make_dual(X, X))


def test_transforms_of_torch_func() -> None:
    torch.manual_seed(0)
    xs, biases = torch.randn(5, 4, 3), torch.randn(5, 2)

    def loss(x: Tensor, bias: Tensor) -> Tensor:
        return plain_linear(x, WEIGHT, bias, 2, 3).square().sum()

    def wanted(x: Tensor, bias: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, WEIGHT, bias).square().sum()

    for transform in (
        lambda f: torch.func.vmap(torch.func.grad(f, argnums=(0, 1))),
        lambda f: torch.func.grad(lambda xs, biases: torch.func.vmap(f)(xs, biases).sum()),
        lambda f: torch.func.vmap(torch.func.jacrev(torch.func.grad(f, argnums=1), argnums=0)),
    ):
        found = transform(loss)(xs, biases)
        torch.testing.assert_close(found, transform(wanted)(xs, biases), rtol=1e-5, atol=1e-5)


def test_a_batch_of_vmap_is_more_rows() -> None:
    seen = []

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, n: int, k: int) -> Tensor:
        seen.append(tuple(x.shape))
        return torch.nn.functional.linear(x, weight, bias)

    op = define_linear_op(
        library,
        "counts_calls",
        layout="Tensor weight",
        forward=forward,
        grad_x=lambda grad_y, weight, n, k: grad_y @ weight,
        dispatch_keys=("CPU",),
    )
    xs, weights = torch.randn(4, 5, 3), torch.randn(5, 2, 3)
    y = torch.func.vmap(lambda x: op(x, WEIGHT, None, 2, 3), in_dims=1, out_dims=1)(xs)
    assert torch.equal(y, xs @ WEIGHT.T)
    assert seen == [(20, 3)]
    seen.clear()
    y = torch.func.vmap(lambda x, weight: op(x, weight, None, 2, 3), in_dims=(1, 0))(xs, weights)
    torch.testing.assert_close(y, xs.transpose(0, 1) @ weights.mT)
    assert seen == [(4, 3)] * 5


def test_a_batch_of_vmap_may_be_empty() -> None:
    xs, biases = torch.empty(4, 0, 3), torch.empty(0, 2, requires_grad=True)
    each = torch.func.vmap(lambda x, bias: call(x, bias), in_dims=(1, 0))
    y = each(xs, biases)
    assert y.shape == (0, 4, 2)
    y.sum().backward()
    assert biases.grad is not None
    assert biases.grad.shape == (0, 2)
    loss = torch.func.grad(lambda x, bias: call(x, bias).sum(), argnums=(0, 1))
    found = torch.func.vmap(loss, in_dims=(1, 0))(xs, biases.detach())
    assert [tuple(gradient.shape) for gradient in found] == [(0, 4, 3), (0, 2)]


def test_a_negative_view_of_the_bias_goes_dispatched(dispatched: list[Tensor]) -> None:
    y = call(bias=torch._neg_view(torch.tensor([1.0, 2.0])))
    assert y.tolist() == [[-3.0, -4.0]]
    assert len(dispatched) == 1


def test_kernels_get_a_contiguous_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, n: int, k: int) -> Tensor:
        assert bias is not None
        seen.append(bias.is_contiguous())
        return torch.nn.functional.linear(x, weight, bias)

    op = define_linear_op(
        library,
        "needs_bias",
        layout="Tensor weight",
        forward=forward,
        grad_x=lambda grad_y, weight, n, k: grad_y @ weight,
        dispatch_keys=("CPU",),
    )
    bias = torch.arange(4.0)[::2]
    for x in (X, X.clone().requires_grad_()):
        assert op(x, WEIGHT, bias, 2, 3).tolist() == [[-2.0, 0.0]]
    assert seen == [True, True]
