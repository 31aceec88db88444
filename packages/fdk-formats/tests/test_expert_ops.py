"""Stacks of experts on the reference backend, and on backends that are broken on purpose."""

from dataclasses import replace

import pytest
import torch
from torch.library import opcheck

from fdk_formats import Format, NoBackendError, Problem, all_backends, select
from fdk_formats.expert_ops import tokens_of_experts
from fdk_formats.reference import ReferenceBackend, ReferenceExpertLayout
from fdk_formats.testing import (
    ExpertCase,
    check_expert_backend,
    check_expert_bad_input,
    check_expert_bytes,
    check_expert_decode,
    check_expert_numerics,
    expert_cases,
)

CASE = ExpertCase(
    Format("custom", 3, 16), experts=5, tokens=7, top_k=3, n=37, k=48, dtype=torch.float32
)


@pytest.mark.parametrize("case", list(expert_cases()), ids=str)
def test_reference(case):
    check_expert_backend(ReferenceBackend(), case)


def test_cases_cover_top_k_routings_and_formats():
    seen = list(expert_cases())
    assert {case.top_k for case in seen} == set(range(1, 9))
    assert {case.routing for case in seen} == {"random", "one", "rest", "elsewhere"}
    assert {case.shared_codebook for case in seen} == {True, False}
    assert len({(c.format.bits, c.format.codebook, c.format.group_size) for c in seen}) == 80
    assert any(case.top_k > case.experts for case in seen)
    assert {bool((case.expert_ids() < 0).any()) for case in seen} == {True, False}


def broken(change):
    class Broken(ReferenceExpertLayout):
        def forward(self, x, expert_ids, bias=None, routing_weights=None):
            return change(super().forward, x, expert_ids, bias, routing_weights)

    class BrokenBackend(ReferenceBackend):
        def pack_stack(self, stack, *, dtype, activations="float"):
            return Broken(stack)

    return BrokenBackend()


@pytest.mark.parametrize(
    ("change", "check", "message"),
    [
        (lambda f, x, i, b, w: f(x, i.flip(1), b, w), check_expert_decode, "outputs differ"),
        (lambda f, x, i, b, w: f(x, i, None, w), check_expert_numerics, "of .* error"),
        (lambda f, x, i, b, w: f(x.detach(), i, b, w), check_expert_numerics, "dx of .* error"),
        (
            lambda f, x, i, b, w: f(x, i, b, w if w is None else w.roll(1, 0)),
            check_expert_numerics,
            "y of .* error",
        ),
        (
            lambda f, x, i, b, w: f(x, i, b, w if w is None else w.detach()),
            check_expert_numerics,
            "drouting of .* error",
        ),
        (lambda f, x, i, b, w: f(x, i.clamp(max=4), b, w), check_expert_bad_input, "an id outside"),
        (lambda f, x, i, b, w: f(x.nan_to_num(), i, b, w), check_expert_bad_input, "NaN in x"),
        (lambda f, x, i, b, w: f(x[:, : CASE.k], i, b, w), check_expert_bad_input, "k \\+ 1"),
    ],
)
def test_the_kit_catches(change, check, message):
    with pytest.raises(AssertionError, match=message):
        check(broken(change), CASE)


def test_the_kit_catches_bytes_that_change():
    class Lossy(ReferenceBackend):
        def pack_stack(self, stack, *, dtype, activations="float"):
            stack.scale.add_(1)
            return ReferenceExpertLayout(stack)

    with pytest.raises(AssertionError, match="scale comes back changed"):
        check_expert_bytes(Lossy(), CASE)


@pytest.mark.parametrize("weighted", [False, True])
def test_opcheck(weighted):
    stack, ids = CASE.stack(), CASE.expert_ids()
    x = CASE.random(CASE.tokens, CASE.k).requires_grad_()
    bias = CASE.random(CASE.experts, CASE.n).requires_grad_()
    routing = CASE.random(*ids.shape).requires_grad_() if weighted else None
    tensors = stack.packed, stack.scale, stack.codebook, stack.zero_point
    op = torch.ops.fdk_formats.reference_expert_linear.default
    opcheck(op, (x, ids, *tensors, str(stack.format), bias, routing, *stack.shape))
    grad_op = torch.ops.fdk_formats.reference_expert_linear_grad_x.default
    grad_y = CASE.random(*ids.shape, CASE.n).requires_grad_()
    opcheck(grad_op, (grad_y, ids, *tensors, str(stack.format), *stack.shape))


def test_transforms_and_second_derivatives():
    case = replace(CASE, tokens=2, top_k=2, n=3, k=16)
    stack, ids = case.stack(), case.expert_ids()
    layout = ReferenceExpertLayout(stack)
    x, routing = case.random(case.tokens, case.k), case.random(*ids.shape).softmax(1)

    def loss(x, routing):
        return layout(x, ids, None, routing).square().sum()

    leaves = x.clone().requires_grad_(), routing.clone().requires_grad_()
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    got = torch.func.grad(loss, argnums=(0, 1))(x, routing)
    torch.testing.assert_close(got, wanted)
    double = tuple(tensor.double().requires_grad_() for tensor in (x, routing))
    assert torch.autograd.gradcheck(lambda *args: layout(args[0], ids, None, args[1]), double)
    assert torch.autograd.gradgradcheck(lambda x: layout(x, ids), double[:1])


@pytest.mark.parametrize("weighted", [False, True])
def test_compiled_in_one_graph(weighted):
    stack, ids = CASE.stack(), CASE.expert_ids()
    layout = ReferenceExpertLayout(stack)
    x = CASE.random(CASE.tokens, CASE.k)
    routing = CASE.random(*ids.shape).softmax(1) if weighted else None
    compiled = torch.compile(layout, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, ids, None, routing), layout(x, ids, None, routing))


def test_tokens_of_experts():
    ids = torch.tensor([[2, 0], [-1, 2], [5, 0]])
    found = {expert: own.tolist() for expert, own in tokens_of_experts(ids, 4)}
    assert found == {0: [1, 5], 2: [0, 3]}


def test_backends_without_stacks_say_so():
    class Plain:
        name = "plain"

        def unsupported(self, problem):
            return None

        def priority(self, problem):
            return 0

        def pack(self, q, *, dtype, activations="float"):
            raise NotImplementedError

    from fdk_formats import backends

    problem = Problem(CASE.format, 37, 48, torch.float32, torch.device("cpu"), experts=5)
    assert "[experts=5, n=37, k=48]" in str(problem)
    backends._registry["plain"] = Plain()
    try:
        with pytest.raises(NoBackendError, match="has no kernels for stacks of experts"):
            select(problem, "plain")
    finally:
        del backends._registry["plain"]
    assert select(problem, "reference") is all_backends()["reference"]
