"""Stacks of experts on every instruction set, and what they share with single weights."""

from dataclasses import replace

import pytest
import torch

import fdk_cpu
from fdk_cpu.expert_linear import CpuExpertLayout
from fdk_formats import Format, Problem
from fdk_formats.testing import ExpertCase, check_expert_backend, expert_cases

BACKEND = fdk_cpu.CpuBackend()
# Every width and group size, top_k, routing and dtype is among them.
CASES = list(expert_cases())[::11]
# Rows of an expert for each kernel; one that gets more than a pass handles.
CASES += [
    ExpertCase(
        Format("custom", 4, 64), 3, tokens, 2, n=70, k=640, dtype=torch.bfloat16, seed=tokens
    )
    for tokens in (4, 9, 40, 300)
]
CASES.append(
    ExpertCase(Format("affine", 3, 32), 2, 1030, 1, n=9, k=96, dtype=torch.float32, routing="one")
)
CASE = ExpertCase(Format("custom", 4, 64), 8, 12, 3, n=70, k=128, dtype=torch.bfloat16)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kit(isa: str, case: ExpertCase) -> None:
    check_expert_backend(BACKEND, case)


def test_cases_cover_the_kit() -> None:
    every = list(expert_cases())
    for name in ("top_k", "routing", "dtype", "experts", "tokens", "shared_codebook"):
        wanted = {getattr(case, name) for case in every}
        assert wanted <= {getattr(case, name) for case in CASES}, name
    assert {c.format.bits for c in CASES} == {c.format.bits for c in every}


def test_rows_are_those_of_single_weights() -> None:
    stack, ids = CASE.stack(), CASE.expert_ids()
    x, bias = CASE.random(CASE.tokens, CASE.k), CASE.random(CASE.experts, CASE.n)
    y = BACKEND.pack_stack(stack, dtype=CASE.dtype)(x, ids, bias)
    for expert in range(CASE.experts):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        layout = BACKEND.pack(stack[expert], dtype=CASE.dtype)
        assert torch.equal(y[tokens, places], layout(x[tokens], bias[expert]))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_result_does_not_depend_on_threads(threads: int) -> None:
    case = replace(CASE, n=519, tokens=40)
    layout = BACKEND.pack_stack(case.stack(), dtype=case.dtype)
    x, ids = case.random(case.tokens, case.k), case.expert_ids()
    weights = case.random(*ids.shape).softmax(1)
    expected = layout(x, ids, None, weights)
    fdk_cpu.set_num_threads(threads)
    try:
        assert torch.equal(layout(x, ids, None, weights), expected)
    finally:
        fdk_cpu.set_num_threads(None)


def test_batch_invariant() -> None:
    backend = fdk_cpu.CpuBackend(batch_invariant=True)
    layout = backend.pack_stack(CASE.stack(), dtype=CASE.dtype)
    x, ids = CASE.random(CASE.tokens, CASE.k), CASE.expert_ids()
    together = layout(x, ids)
    alone = [layout(x[t : t + 1], ids[t : t + 1]) for t in range(CASE.tokens)]
    assert torch.equal(torch.cat(alone), together)


def test_opcheck() -> None:
    layout = CpuExpertLayout(CASE.stack())
    ids, x = CASE.expert_ids(), CASE.random(CASE.tokens, CASE.k).requires_grad_()
    weights = CASE.random(*ids.shape).requires_grad_()
    tensors = layout.codes, layout.scale, layout.codebook, layout.zero_point
    arguments = (x, ids, *tensors, 64, 4, False, None, weights, *layout.shape)
    torch.library.opcheck(torch.ops.fdk_cpu.expert_linear.default, arguments)


def test_unsupported() -> None:
    problem = Problem(CASE.format, 70, 128, torch.float64, torch.device("cpu"), "int8", experts=8)
    reason = BACKEND.unsupported(problem)
    assert reason is not None
    assert "has no int8 activations" in reason
    assert "float64" in reason
