"""Conformance of backends for stacks of experts: the same tests for every backend."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fdk_formats.backends import ExpertBackend, Problem
from fdk_formats.format import Format
from fdk_formats.reference import ReferenceBackend
from fdk_formats.tensor import QuantisedStack
from fdk_formats.testing.cases import (
    ALL_BITS,
    ALL_GROUP_SIZES,
    DTYPE_NAMES,
    cases,
    random_quantised,
)
from fdk_formats.testing.conformance import (
    allowed_error,
    exact_weight,
    expect_error,
    nrmse,
    poisoned,
)

# How tokens choose their experts.
ROUTINGS = ("random", "one", "rest", "elsewhere")


@dataclass(frozen=True)
class ExpertCase:
    """One conformance case: ``tokens`` rows, each for ``top_k`` of ``experts`` weights ``[n, k]``.

    Attributes:
        routing: ``random``; ``one``: every token has the first expert alone in every place;
            ``rest``: the first and last expert get no token; ``elsewhere``: ids of -1 among others.
        shared_codebook: whether all experts have one codebook.
    """

    format: Format
    experts: int
    tokens: int
    top_k: int
    n: int
    k: int
    dtype: torch.dtype
    routing: str = "random"
    shared_codebook: bool = False
    device: str = "cpu"
    seed: int = 0

    def __str__(self) -> str:
        shape = f"e{self.experts}-t{self.tokens}-top{self.top_k}-n{self.n}-k{self.k}"
        shared = "-shared" if self.shared_codebook else ""
        return f"{shape}-{self.routing}-{self.format}-{DTYPE_NAMES[self.dtype]}{shared}"

    @property
    def problem(self) -> Problem:
        """The problem that the backend must support."""
        device = torch.device(self.device)
        return Problem(self.format, self.n, self.k, self.dtype, device, experts=self.experts)

    def stack(self) -> QuantisedStack:
        """Returns the stack of the case, on its device."""
        made = [
            random_quantised(self.format, self.n, self.k, seed=self.seed * self.experts + expert)
            for expert in range(self.experts)
        ]
        if self.shared_codebook:
            made = [replace(q, codebook=made[0].codebook) for q in made]
        return QuantisedStack.of(made).to(self.device)

    def expert_ids(self) -> Tensor:
        """Returns ``[tokens, top_k]``; int32 in every second case."""
        generator = torch.Generator().manual_seed(self.seed + 2)
        low, high = (1, self.experts - 1) if self.routing == "rest" else (0, self.experts)
        scores = torch.rand(self.tokens, high - low, generator=generator)
        if self.top_k <= high - low:
            ids = scores.argsort(1)[:, : self.top_k] + low
        else:  # an expert more than once
            ids = torch.randint(low, high, (self.tokens, self.top_k), generator=generator)
        if self.routing == "one":
            ids = torch.zeros_like(ids)
        if self.routing == "elsewhere":
            ids[torch.rand(ids.shape, generator=generator) < 0.5] = -1
        return ids.to(self.device, torch.int32 if self.seed % 2 else torch.int64)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns standard normal values in the case's dtype, on its device."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        values = torch.randn(*shape, generator=generator)
        return values.to(self.device, self.dtype if dtype is None else dtype)


def expert_cases(
    *,
    bits: Iterable[int] = ALL_BITS,
    codebooks: Iterable[str] = ("custom", "affine"),
    group_sizes: Iterable[int | None] = ALL_GROUP_SIZES,
    dtypes: Iterable[torch.dtype] = (torch.bfloat16, torch.float16, torch.float32),
    device: str = "cpu",
) -> Iterator[ExpertCase]:
    """Yields every combination of the arguments, with awkward sizes of everything else.

    Numbers of tokens (1 to 71), top_k (1 to 8), experts and routings alternate, so that each width
    and group size meets some of them; scale dtypes and kinds of zero point as in ``cases``.
    """
    kinds = {"bits": bits, "codebooks": codebooks, "group_sizes": group_sizes, "dtypes": dtypes}
    for turn, case in enumerate(cases(**kinds, ms=(1,), device=device)):  # type: ignore[arg-type]
        top_k = (1, 2, 4, 8, 3, 6, 7, 5)[turn % 8]
        yield ExpertCase(
            case.format,
            experts=(5, 8, 9, 16)[turn // 3 % 4],
            tokens=(1, 3, 17, 2, 71)[turn % 5],
            top_k=top_k,
            n=case.n,
            k=case.k,
            dtype=case.dtype,
            routing=ROUTINGS[turn // 3 % len(ROUTINGS)],
            shared_codebook=turn % 7 == 0 and not case.format.is_affine,
            device=device,
            seed=turn,
        )


def check_expert_backend(backend: ExpertBackend, case: ExpertCase) -> None:
    """Runs all checks on one case.

    Args:
        backend: the backend to test.
        case: one of ``expert_cases``.

    Raises:
        AssertionError: if a check fails, naming the case and the difference.
    """
    reason = backend.unsupported(case.problem)
    assert reason is None, f"{backend.name} does not support {case.problem}: {reason}"
    check_expert_decode(backend, case)
    check_expert_numerics(backend, case)
    check_expert_bytes(backend, case)
    check_expert_bad_input(backend, case)


def check_expert_decode(backend: ExpertBackend, case: ExpertCase) -> None:
    """Checks that one-hot x gives columns of the expert's dequantised weight bit for bit."""
    stack = case.stack()
    layout = backend.pack_stack(stack, dtype=case.dtype)
    W_hat, ids = stack.dequantise(case.dtype), case.expert_ids()
    columns = torch.arange(case.tokens * case.top_k) * 7 % case.k  # other ones for each pair
    columns = columns.view(case.tokens, case.top_k).to(case.device)
    for x_columns in (columns, columns[:, :1].expand_as(columns)):
        x = torch.nn.functional.one_hot(x_columns, case.k).to(case.dtype)
        for given in (x, x[:, 0]):
            chosen = x_columns if given.ndim == 3 else x_columns[:, :1].expand_as(columns)
            wanted = W_hat[ids.clamp(min=0).long(), :, chosen]
            wanted = wanted.where((ids >= 0)[..., None], 0)
            with poisoned():
                y = layout(given, ids)
            wrong = (y != wanted).nonzero()
            assert len(wrong) == 0, (
                f"decode {case}: {len(wrong)} outputs differ; first of token {wrong[0, 0]}, place "
                f"{wrong[0, 1]}, row {wrong[0, 2]}: wanted {wanted[tuple(wrong[0])]}, "
                f"got {y[tuple(wrong[0])]}"
            )


def check_expert_numerics(backend: ExpertBackend, case: ExpertCase) -> None:
    """Checks y and the gradients of x, bias and routing weights against float64.

    Errors are at most twice those of torch's own products in the same dtype, expert by expert; see
    ``allowed_error``.
    """
    stack, ids = case.stack(), case.expert_ids()
    layout = backend.pack_stack(stack, dtype=case.dtype)
    W_hat = stack.dequantise(case.dtype)
    W_exact = torch.stack([exact_weight(q, case.dtype) for q in stack.matrices()])
    bias = case.random(case.experts, case.n)
    routing = case.random(*ids.shape, dtype=torch.float32).softmax(1)
    # As for gate, up and down projections, or the other way round in every second case.
    for shared in (True, False):
        weighted = shared == bool(case.seed % 2)
        x = case.random(case.tokens, *(() if shared else (case.top_k,)), case.k)
        grad_y = case.random(case.tokens, *(() if weighted else (case.top_k,)), case.n)
        arguments = x, bias, *([routing] if weighted else [])
        names = "y", "dx", "dbias", *(["drouting"] if weighted else [])
        ours = _with_gradients(lambda *args: layout(args[0], ids, *args[1:]), arguments, grad_y)
        torchs = _with_gradients(lambda *args: _by_expert(W_hat, ids, *args), arguments, grad_y)
        exact = _with_gradients(
            lambda *args: _by_expert(W_exact, ids, *args),
            tuple(tensor.double() for tensor in arguments),
            grad_y.double(),
        )
        for name, y, torch_y, oracle in zip(names, ours, torchs, exact, strict=True):
            where = f"{name} of {case}, x {list(x.shape)}"
            wanted = torch.float32 if name == "drouting" else case.dtype
            assert y.dtype == wanted, f"{where}: wanted {wanted}, got {y.dtype}"
            assert y.shape == oracle.shape, (
                f"{where}: wanted {list(oracle.shape)}, got {list(y.shape)}"
            )
            terms = case.top_k * {"y": case.k, "dbias": case.tokens}.get(name, case.n)
            error, allowed = nrmse(y, oracle), allowed_error(torch_y, oracle, terms)
            if name == "drouting":
                places = _by_expert(W_exact, ids, x.double(), bias.double())
                allowed = max(allowed, _error_of_rounding(case.dtype, places, grad_y, oracle))
            assert error <= allowed, f"{where}: error {error:.3e}, allowed {allowed:.3e}"
        with poisoned():
            again = layout(x, ids, *arguments[1:])
        assert torch.equal(again, ours[0]), f"{case}: a second run gives another answer"


def _error_of_rounding(dtype: torch.dtype, places: Tensor, grad_y: Tensor, oracle: Tensor) -> float:
    """Returns twice the error of the gradient of routing weights where y is rounded to a dtype.

    There are few such gradients, so that torch's own error may be small by chance. Rounding has a
    relative RMS error of at most ``eps / 2 / sqrt(3)``, and the norm of d random errors a relative
    standard deviation of ``1 / sqrt(2 d)``; see ``allowed_error``.
    """
    terms = float((places * grad_y[:, None].double()).square().sum().sqrt())
    norm = float(oracle.norm())
    if norm == 0:
        return 0.0
    chance = 1 + 1 / math.sqrt(oracle.numel())
    return torch.finfo(dtype).eps / math.sqrt(3) * terms / norm * chance


def check_expert_bytes(backend: ExpertBackend, case: ExpertCase) -> None:
    """Checks that unpacking a layout returns every byte."""
    stack = case.stack()
    unpacked = backend.pack_stack(case.stack(), dtype=case.dtype).unpack()
    assert (unpacked.format, unpacked.shape) == (stack.format, stack.shape)
    for name, tensor in stack.tensors().items():
        got = unpacked.tensors()[name]
        assert torch.equal(got, tensor), f"{case}: {name} comes back changed"


def check_expert_bad_input(backend: ExpertBackend, case: ExpertCase) -> None:
    """Checks that bad input gives a clear error or the right answer."""
    stack, ids = case.stack(), case.expert_ids()
    layout = backend.pack_stack(stack, dtype=case.dtype)
    x, bias = case.random(case.tokens, case.k), case.random(case.experts, case.n)
    routing = case.random(*ids.shape)
    wide = case.random(case.tokens, case.k + 1)
    long = case.random(case.experts, case.n + 1)
    with poisoned():
        for what, call in (
            ("x of k + 1 columns", lambda: layout(wide, ids)),
            ("x of one more token", lambda: layout(torch.cat((x, x[:1])), ids)),
            ("integers as x", lambda: layout(x.to(torch.int64), ids)),
            ("x on another device", lambda: layout(x.to("meta"), ids)),
            ("ids without top_k", lambda: layout(x, ids[:, 0])),
            ("floating ids", lambda: layout(x, ids.to(torch.float32))),
            ("a long bias", lambda: layout(x, ids, long)),
            ("a bias of one expert", lambda: layout(x, ids, bias[0])),
            ("a bias of another dtype", lambda: layout(x, ids, bias.to(torch.int32))),
            (
                "routing weights of one more token",
                lambda: layout(x, ids, None, routing[:, :1, None]),
            ),
            ("integers as routing weights", lambda: layout(x, ids, None, ids)),
        ):
            expect_error(case, what, call)
        outside = ids.clone()
        outside[-1, -1] = case.experts
        y = layout(x, ids, bias)
        if torch.device(case.device).type == "cpu":
            expect_error(case, "an id outside the stack", lambda: layout(x, outside, bias))
        else:
            rest = layout(x, outside, bias)
            assert not rest[-1, -1].any(), f"{case}: an id outside the stack gives y"
        no_tokens = layout(x[:0], ids[:0], bias)
        assert no_tokens.shape == (0, case.top_k, case.n), f"{case}: no tokens"
        summed = layout(x[:0], ids[:0], bias, routing[:0])
        assert summed.shape == (0, case.n), f"{case}: no tokens, summed"
        nowhere = layout(x, torch.full_like(ids, -1), bias, routing)
        assert not nowhere.any(), f"{case}: tokens without experts have y"
        strided = case.random(case.tokens, 2 * case.k)[:, ::2].copy_(x)
        turned = ids.T.contiguous().T
        assert torch.equal(layout(strided, turned, bias), y), f"{case}: strided x and ids"
        # A NaN in x stays in the rows of its token.
        spoilt = x.clone()
        spoilt[-1, 0] = math.nan
        rows = layout(spoilt, ids, bias)
    nan = rows.isnan().all(-1)
    assert torch.equal(nan[-1], ids[-1] >= 0), f"{case}: NaN in x is lost, or where no expert is"
    if backend.name != ReferenceBackend.name or _torch_keeps_rows_apart(spoilt, case.n):
        assert torch.equal(rows[:-1], y[:-1]), f"{case}: NaN in a token reaches other tokens"
    if stack.scale.is_floating_point():  # a NaN scale stays in its expert
        expert = int(ids.max())
        if expert >= 0:
            stack.scale[expert, 0, 0] = math.nan
            with poisoned():
                y = backend.pack_stack(stack, dtype=case.dtype)(x, ids, bias)
            assert torch.equal(y[..., 0].isnan(), ids == expert), f"{case}: a NaN scale"
            assert not y[..., 1:].isnan().any(), f"{case}: a NaN scale reaches other outputs"


def _torch_keeps_rows_apart(x: Tensor, n: int) -> bool:
    """Returns whether a NaN in the last row of x stays there in torch's own product.

    With AMX, oneDNN reads into the next row where k is no multiple of 32: seen in bf16 with 17 rows
    of 80 and 88 values (torch 2.13).
    """
    y = torch.nn.functional.linear(x, x.new_zeros(n, x.shape[1]))
    return not bool(y[:-1].isnan().any())


def _with_gradients(
    function: Callable[..., Tensor], arguments: tuple[Tensor, ...], grad_y: Tensor
) -> list[Tensor]:
    """Returns y and the gradients of all arguments."""
    leaves = [tensor.clone().requires_grad_() for tensor in arguments]
    with poisoned():
        y = function(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad_y, materialize_grads=True)]


def _by_expert(
    weight: Tensor,
    expert_ids: Tensor,
    x: Tensor,
    bias: Tensor,
    routing_weights: Tensor | None = None,
) -> Tensor:
    """Computes ``ExpertLayout.forward`` with torch's products, in the dtype of x."""
    tokens, top_k = expert_ids.shape
    rows = (x[:, None].expand(tokens, top_k, -1) if x.ndim == 2 else x).reshape(tokens * top_k, -1)
    y = rows.new_zeros(tokens * top_k, weight.shape[1])
    for expert in range(len(weight)):
        own = (expert_ids.reshape(-1) == expert).nonzero().flatten()
        product = torch.nn.functional.linear(rows[own], weight[expert], bias[expert])
        y = y.index_put((own,), product)
    y = y.view(tokens, top_k, -1)
    if routing_weights is None:
        return y
    return (y * routing_weights[..., None]).sum(1).to(x.dtype)
