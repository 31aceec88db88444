"""The conformance kit on the reference backend and on backends that are broken on purpose."""

import math
from dataclasses import replace

import pytest
import torch

from fdk_formats import Format
from fdk_formats.reference import ReferenceBackend, ReferenceLayout
from fdk_formats.testing import (
    Case,
    cases,
    check_backend,
    check_bad_input,
    check_decode,
    check_golden,
    check_in_place,
    check_numerics,
    layout_digest,
    nrmse,
    poisoned,
)
from fdk_formats.testing.conformance import allowed_error

CASE = Case(Format("custom", 3, 16), m=3, n=37, k=48, dtype=torch.bfloat16)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_reference(case):
    check_backend(ReferenceBackend(), case)


def test_cases_cover_the_formats():
    seen = list(cases())
    formats = {case.format for case in seen}
    grid = {(f.bits, f.codebook, f.group_size) for f in formats}
    assert len(grid) == 8 * 2 * 5
    assert {f.scale_dtype for f in formats} == {"bf16", "fp16", "fp32", "e8m0"}
    assert {f.zero_point for f in formats} == {None, "float", "int"}
    assert len({str(case) for case in seen}) == len(seen)
    for case in seen[:: len(seen) // 16]:
        q = case.quantised()
        assert q.codes().unique().numel() == 1 << case.format.bits
        assert (q.scale == 0).sum() == 1


def broken(change):
    """Returns a reference backend with a changed forward."""

    class Broken(ReferenceLayout):
        def forward(self, x, bias=None):
            return change(super().forward, x, bias)

    class BrokenBackend(ReferenceBackend):
        def pack(self, q, *, dtype, activations="float"):
            return Broken(q)

    return BrokenBackend()


def unwritten(forward, x, bias):
    y = forward(x, bias)
    out = torch.empty_like(y)
    out[..., :-1] = y[..., :-1]
    return out


@pytest.mark.parametrize(
    ("change", "check", "message"),
    [
        (lambda f, x, b: f(x, b) * (1 + 2**-7), check_decode, "weights differ; first at row"),
        (unwritten, check_decode, "got nan"),
        (lambda f, x, b: f(x, b) + 0.01 * f(x, b).roll(1), check_numerics, "y of .* error"),
        (lambda f, x, b: f(x, b).float(), check_numerics, "y of .* wanted torch.bfloat16"),
        (lambda f, x, b: f(x.detach(), b) + x.sum(), check_numerics, "of .* error"),
        (lambda f, x, b: f(x + torch.rand(()), b), check_numerics, "of .* error"),
        (lambda f, x, b: f(x.nan_to_num(), b), check_bad_input, "NaN in x is lost"),
        (lambda f, x, b: f(x[..., : CASE.k], b), check_bad_input, "k \\+ 1 columns was accepted"),
        (lambda f, x, b: f(x.to(torch.bfloat16), b), check_bad_input, "integers was accepted"),
        (lambda f, x, b: f(x, None), check_bad_input, "a long bias was accepted"),
        (lambda f, x, b: f(x, b).nan_to_num(), check_bad_input, "NaN in x is lost"),
    ],
)
def test_the_kit_catches(change, check, message):
    with pytest.raises(AssertionError, match=message):
        check(broken(change), CASE)


def test_the_kit_catches_bytes_that_change():
    class Lossy(ReferenceLayout):
        def unpack(self):
            q = super().unpack()
            return replace(q, scale=q.scale + 1)

    class LossyBackend(ReferenceBackend):
        def pack(self, q, *, dtype):
            return Lossy(q)

    with pytest.raises(AssertionError, match="scale comes back changed"):
        check_golden(LossyBackend(), CASE)


def test_the_kit_catches_results_that_are_views():
    class View(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y[:]

        @staticmethod
        def backward(ctx, grad):
            return grad

    backend = broken(lambda f, x, b: View.apply(f(x, b)))
    with pytest.raises(AssertionError, match=r"y of .*: in-place work is refused for x of"):
        check_in_place(backend, CASE)


def test_int8_activations_in_place():
    check_in_place(ReferenceBackend(), CASE, "int8")


def test_the_kit_names_an_unsupported_case():
    with pytest.raises(AssertionError, match=r"reference does not support .*int8"):
        check_backend(ReferenceBackend(), replace(CASE, dtype=torch.int8))


def test_layout_digest():
    q = CASE.quantised()
    digest = layout_digest(ReferenceLayout(q))
    assert list(digest) == ["packed", "scale", "codebook"]
    assert digest == layout_digest(ReferenceLayout(CASE.quantised()))
    q.packed[0, 0] ^= 1
    changed = layout_digest(ReferenceLayout(q))
    assert {name for name in digest if digest[name] != changed[name]} == {"packed"}


def test_nrmse():
    oracle = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert nrmse(torch.tensor([3.0, 4.5]), oracle) == pytest.approx(0.1)
    assert nrmse(torch.tensor([3.0, math.nan]), oracle) == math.inf
    assert nrmse(torch.zeros(2), torch.zeros(2).double()) == 0
    assert nrmse(torch.ones(2), torch.zeros(2).double()) == math.inf


@pytest.mark.parametrize("terms", [37, 1000])
def test_allowed_error_covers_sequential_sums(terms):
    values = torch.randn(4096, terms)
    oracle, y = values.double().sum(1), torch.zeros(4096)
    for column in values.T:
        y += column
    allowed = allowed_error(oracle.float(), oracle, terms)
    assert 0.25 * allowed < nrmse(y, oracle) < 0.5 * allowed
    y_16 = oracle.bfloat16()
    assert allowed_error(y_16, oracle, terms) == 2 * nrmse(y_16, oracle)
    assert allowed_error(oracle, oracle, terms) < 1e-14  # uses the eps of float64


def test_allowed_error_for_few_outputs():
    # Sequential sums of 3 outputs, some of which nearly cancel.
    terms = torch.randn(2000, 3, 48, generator=torch.Generator().manual_seed(0))
    names = "typical", "norm", "dropped", "bfloat16"
    exceeded = dict.fromkeys(names, 0)
    for values in terms:
        oracle, y, coarse = values.double().sum(1), torch.zeros(3), torch.zeros(3).bfloat16()
        for column in values.T:
            y += column
            coarse += column
        dropped = oracle.clone()
        dropped[0] -= values[0, 0]  # one term of one output
        rounded, typical = oracle.float(), float(values.double().norm())
        allowed = allowed_error(rounded, oracle, 48, typical)
        exceeded["typical"] += nrmse(y, oracle) > allowed
        exceeded["norm"] += nrmse(y, oracle) > allowed_error(rounded, oracle, 48)
        exceeded["dropped"] += nrmse(dropped, oracle) > allowed
        exceeded["bfloat16"] += nrmse(coarse, oracle) > allowed
    assert exceeded["typical"] == 0
    assert exceeded["norm"] > 0
    assert exceeded["dropped"] == exceeded["bfloat16"] == len(terms)


def test_poisoned():
    with poisoned():
        assert torch.empty(1000).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
