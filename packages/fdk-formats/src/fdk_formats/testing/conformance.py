"""Conformance of a backend: decode, numerics, rotated x, in-place work, golden bytes, bad input."""

import hashlib
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from fdk_formats.backends import Backend, Layout
from fdk_formats.format import MIN_ROTATION_BLOCK, power_of_two_in
from fdk_formats.packing import pack
from fdk_formats.rotated_layout import RotatedLayout
from fdk_formats.rotation import rotate
from fdk_formats.scales import decode_scale
from fdk_formats.tensor import QuantisedTensor
from fdk_formats.testing.cases import Case
from fdk_formats.testing.golden import golden_codes, golden_packed

# At most this many one-hot calls per case; each covers m columns.
DECODE_CALLS = 24


def check_backend(backend: Backend, case: Case) -> None:
    """Runs all six checks on one case.

    Args:
        backend: the backend to test.
        case: one of ``cases``.

    Raises:
        AssertionError: if a check fails, naming the case and the difference.
    """
    reason = backend.unsupported(case.problem)
    assert reason is None, f"{backend.name} does not support {case.problem}: {reason}"
    check_decode(backend, case)
    check_numerics(backend, case)
    check_rotated(backend, case)
    check_in_place(backend, case)
    check_golden(backend, case)
    check_bad_input(backend, case)


def check_decode(backend: Backend, case: Case) -> None:
    """Checks that one-hot x gives the dequantised weight bit for bit."""
    q = case.quantised()
    layout = backend.pack(q, dtype=case.dtype)
    expected = q.dequantise(case.dtype).T  # [k, n]
    starts = list(range(0, case.k, case.m))
    if len(starts) > DECODE_CALLS:  # both ends and a sample in between
        inner = torch.randperm(len(starts) - 2, generator=torch.Generator().manual_seed(case.seed))
        starts = [starts[i] for i in (0, *(inner[: DECODE_CALLS - 2] + 1).tolist(), -1)]
    for start in starts:
        columns = [min(start + i, case.k - 1) for i in range(case.m)]
        x = torch.zeros(case.m, case.k, dtype=case.dtype, device=case.device)
        x[range(case.m), columns] = 1
        with poisoned():
            y = layout(x)
        wrong = (y != expected[columns]).nonzero()
        assert len(wrong) == 0, (
            f"decode {case}: {len(wrong)} weights differ; first at row {wrong[0, 1]}, "
            f"column {columns[wrong[0, 0]]}: wanted {expected[columns][tuple(wrong[0])]}, "
            f"got {y[tuple(wrong[0])]}"
        )


def check_numerics(backend: Backend, case: Case) -> None:
    """Checks that errors of y, dx and dbias are at most twice torch's in the same dtype.

    The oracle is float64 and its weight is not rounded to the dtype, while torch's is: a kernel may
    apply scales to its accumulator and does not round there. See ``allowed_error``.
    """
    q = case.quantised()
    layout = backend.pack(q, dtype=case.dtype)
    W_hat = q.dequantise(case.dtype)
    x, bias, grad_y = case.random(case.m, case.k), case.random(case.n), case.random(case.m, case.n)
    ours: list[Tensor] = []
    torchs: list[Tensor] = []
    for out, function in (
        (ours, lambda x, bias: layout(x, bias)),
        (torchs, lambda x, bias: linear(x, W_hat, bias)),
    ):
        leaves = x.clone().requires_grad_(), bias.clone().requires_grad_()
        with poisoned():
            y = function(*leaves)
        out += [y.detach(), *torch.autograd.grad(y, leaves, grad_y)]
    W_exact = exact_weight(q, case.dtype)
    oracles = (
        linear(x.double(), W_exact, bias.double()),
        grad_y.double() @ W_exact,
        grad_y.double().sum(0),
    )
    names, terms = ("y", "dx", "dbias"), (case.k, case.n, case.m)
    x_squares, grad_squares = x.double().square(), grad_y.double().square()
    squares = (
        linear(x_squares, W_exact.square(), bias.double().square()),
        grad_squares @ W_exact.square(),
        grad_squares,
    )
    typicals = [float(square.sum().sqrt()) for square in squares]
    for name, y, torch_y, oracle, n, typical in zip(
        names, ours, torchs, oracles, terms, typicals, strict=True
    ):
        assert y.dtype == case.dtype, f"{name} of {case}: wanted {case.dtype}, got {y.dtype}"
        error, allowed = nrmse(y, oracle), allowed_error(torch_y, oracle, n, typical)
        assert error <= allowed, f"{name} of {case}: error {error:.3e}, allowed {allowed:.3e}"
    with poisoned():
        assert torch.equal(layout(x, bias), ours[0]), f"{case}: a second run gives another answer"
        stack = x.expand(2, 1, *x.shape)
        stacked = layout(stack, bias)
    assert stacked.shape == (2, 1, case.m, case.n), f"{case}: got shape {list(stacked.shape)}"
    # 2 m rows may run another kernel than m: bits may differ within the bound.
    oracle = oracles[0].expand(stacked.shape)
    torch_y = linear(stack.reshape(-1, case.k), W_hat, bias).view(stacked.shape)
    typical = math.sqrt(2) * typicals[0]
    error, allowed = nrmse(stacked, oracle), allowed_error(torch_y, oracle, case.k, typical)
    assert error <= allowed, f"stacked y of {case}: error {error:.3e}, allowed {allowed:.3e}"


def allowed_error(
    torch_y: Tensor, oracle: Tensor, terms: int, typical: float | None = None
) -> float:
    """Returns twice torch's error, or twice that of adding one term after another.

    Args:
        torch_y: torch's result.
        oracle: the exact one.
        terms: number of terms in a sum.
        typical: root of the sum of squares of all terms, which is the norm of y for terms of random
            sign. By default the norm of the oracle, which is as good for many outputs. Few outputs
            may cancel by chance while their errors do not: with 3 outputs of 48 terms torch's own
            error exceeded a bound from the oracle's norm in 86 of 3000 seeds, up to 9 times.

    torch's libraries split sums differently on each processor, and the error varies with it. With
    random roundings, adding terms in sequence has the relative error eps / 2 * sqrt(terms / 6)
    (Higham, Accuracy and Stability of Numerical Algorithms, chapter 4), which matters in float32.
    The norm of d random errors has a relative standard deviation of 1 / sqrt(2 d); the bound allows
    sqrt(2) times that.
    """
    eps = torch.finfo(torch.promote_types(torch_y.dtype, torch.float32)).eps
    sequential = eps / 2 * math.sqrt(terms / 6)
    norm = float(oracle.norm())
    if typical is not None and 0 < norm < typical:
        sequential *= typical / norm
    sequential *= 1 + 1 / math.sqrt(max(1, oracle.numel()))
    return 2 * max(nrmse(torch_y, oracle), sequential)


def check_rotated(backend: Backend, case: Case) -> None:
    """Checks the product with rotated x, as layers of a rotated format compute it."""
    if power_of_two_in(case.k) < MIN_ROTATION_BLOCK:
        return
    q, x = case.quantised(), case.random(case.m, case.k)
    format = replace(case.format, rotation="hadamard")
    layout = RotatedLayout(backend.pack(q, dtype=case.dtype), format)
    with poisoned():
        y = layout(x)
    W_hat = exact_weight(layout.unpack(), case.dtype)
    oracle = linear(x.double(), W_hat)
    torch_y = linear(rotate(x), q.dequantise(case.dtype))
    typical = float(linear(x.double().square(), W_hat.square()).sum().sqrt())
    error, allowed = nrmse(y, oracle), allowed_error(torch_y, oracle, case.k, typical)
    assert error <= allowed, f"rotated {case}: error {error:.3e}, allowed {allowed:.3e}"
    assert layout.unpack().format == format, f"rotated {case}: another format comes back"


def check_in_place(backend: Backend, case: Case, activations: str = "float") -> None:
    """Checks that y and dx may be changed in place under autograd, like those of nn.Linear.

    Autograd refuses it for a view that an op made of its own result.
    """
    layout = backend.pack(case.quantised(), dtype=case.dtype, activations=activations)
    x, bias = case.random(case.m, case.k), case.random(case.n).requires_grad_()
    for rows in (x, x[0], x.expand(2, *x.shape), x.expand(2, 0, *x.shape), x.T.contiguous().T):
        for autocast in (False, case.dtype in (torch.bfloat16, torch.float16)):
            leaf = rows.detach().requires_grad_()
            with torch.autocast(torch.device(case.device).type, case.dtype, enabled=autocast):
                y = layout(leaf, bias)
            grad_y = torch.ones_like(y).requires_grad_()
            (dx,) = torch.autograd.grad(y, leaf, grad_y, create_graph=True)
            for name, result in (("y", y), ("dx", dx)):
                wanted = 2 * (result.detach() + 1)
                try:
                    result += 1
                    result.mul_(2)
                except RuntimeError as error:
                    raise AssertionError(
                        f"{name} of {case}: in-place work is refused for x of {list(rows.shape)}: "
                        f"{error}"
                    ) from error
                assert torch.equal(result, wanted), f"{name} of {case}: in-place work is lost"


def exact_weight(
    q: QuantisedTensor, dtype: torch.dtype, oracle: torch.dtype = torch.float64
) -> Tensor:
    """Computes ``q.dequantise(dtype)`` without its last rounding.

    The codebook is rounded to ``dtype``, because that is what every kernel is given.

    Args:
        q: the weight.
        dtype: dtype of the activations.
        oracle: dtype to compute in, and of the result: float64, or float32.
    """
    codes = q.codes().view(q.shape[0], -1, q.group_size)
    if q.codebook is not None:
        values = q.codebook.to(dtype).to(oracle)[codes.to(torch.int32)]
    else:
        assert q.zero_point is not None
        values = codes.to(oracle) - q.zero_point[..., None].to(oracle)
    values *= decode_scale(q.scale)[..., None].to(oracle)
    decoded = values.view(q.shape)
    return decoded if q.format.rotation is None else rotate(decoded, inverse=True)


def check_golden(backend: Backend, case: Case) -> None:
    """Checks that unpacking a layout returns every byte, and packing gives the golden bytes."""
    q = case.quantised()
    unpacked = backend.pack(q, dtype=case.dtype).unpack()
    assert (unpacked.format, unpacked.shape) == (q.format, q.shape)
    for name, tensor in q.tensors().items():
        assert torch.equal(unpacked.tensors()[name], tensor), f"{case}: {name} comes back changed"
    bits = case.format.bits
    codes = golden_codes(bits).to(case.device)
    assert torch.equal(pack(codes, bits).cpu(), golden_packed(bits)), f"golden bytes, {bits} bits"


def check_bad_input(backend: Backend, case: Case) -> None:
    """Checks that bad input gives a clear error or the right answer."""
    q = case.quantised()
    layout = backend.pack(q, dtype=case.dtype)
    x, bias = case.random(case.m, case.k), case.random(case.n)
    with poisoned():
        expect_error(case, "k + 1 columns", lambda: layout(case.random(case.m, case.k + 1)))
        expect_error(case, "a scalar", lambda: layout(x[0, 0]))
        expect_error(case, "integers", lambda: layout(x.to(torch.int64)))
        expect_error(case, "another device", lambda: layout(x.to("meta")))
        expect_error(case, "a long bias", lambda: layout(x, case.random(case.n + 1)))
        expect_error(case, "a bias of another dtype", lambda: layout(x, bias.to(torch.int32)))
        y = layout(x)
        assert layout(x[:0]).shape == (0, case.n), f"{case}: an empty batch"
        assert torch.equal(layout(x[0]), layout(x[:1])[0]), f"{case}: a single row without batch"
        strided = case.random(case.m, 2 * case.k)[:, ::2].copy_(x)
        assert torch.equal(layout(strided), y), f"{case}: x that is not contiguous"
        _check_other_dtype(layout, case, x, q.dequantise(case.dtype))
        # A NaN in x stays in its own row of y, and a NaN scale in its own column.
        spoilt = x.clone()
        spoilt[-1, 0] = math.nan
        rows = layout(spoilt)
    assert rows[-1].isnan().all(), f"{case}: NaN in x is lost"
    assert torch.equal(rows[:-1], y[:-1]), f"{case}: NaN in a row of x reaches other rows of y"
    if q.scale.is_floating_point():
        q.scale[0, 0] = math.nan
        with poisoned():
            y = backend.pack(q, dtype=case.dtype)(x)
        assert y[:, 0].isnan().all(), f"{case}: a NaN scale is lost"
        assert not y[:, 1:].isnan().any(), f"{case}: a NaN scale reaches other outputs"


def _check_other_dtype(layout: Layout, case: Case, x: Tensor, W_hat: Tensor) -> None:
    """Checks that x of another dtype raises or gives the right answer."""
    other = torch.float32 if case.dtype != torch.float32 else torch.bfloat16
    try:
        y = layout(x.to(other))
    except (TypeError, ValueError):
        return
    assert y.dtype == other, f"{case}: x of {other} gives y of {y.dtype}"
    # The eps of bf16 bounds the rounding of either dtype.
    error = nrmse(y, x.to(other).double() @ W_hat.double().T)
    assert error < torch.finfo(torch.bfloat16).eps, f"{case}: x of {other} has error {error:.3e}"


def layout_digest(layout: Layout) -> dict[str, str]:
    """Returns the SHA-256 of each buffer's bytes, to pin a backend's layout in a test."""
    return {
        name: hashlib.sha256(
            buffer.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, buffer in layout.named_buffers()
    }


def nrmse(value: Tensor, oracle: Tensor) -> float:
    """Computes ``||value - oracle|| / ||oracle||``: 0 if equal, infinite if not finite."""
    error = (value.double() - oracle).norm()
    relative = error / oracle.norm() if error else error
    return float(relative) if relative.isfinite() else math.inf


@contextmanager
def poisoned() -> Iterator[None]:
    """Makes torch fill new memory with NaN in the block, so that unwritten outputs show."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        # This mode also warns about ops that may not be deterministic, such as cuBLAS.
        warnings.filterwarnings("ignore", message=".*deterministic.*", category=UserWarning)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warn_only)


def expect_error(case: object, what: str, call: Callable[[], Tensor]) -> None:
    """Checks that a call raises TypeError or ValueError with a message."""
    message = None
    try:
        call()
    except (TypeError, ValueError) as error:
        message = str(error)
    assert message is not None, f"{case}: {what} was accepted, expected an error"
    assert message, f"{case}: the error for {what} has an empty message"
