"""Error compensation: codes and grids for the least error of a layer's outputs."""

import math

import pytest
import torch

from fdk_formats import quantise
from fdk_formats.compensate import Hessian, compensate, output_error
from fdk_formats.format import CODEBOOK_BITS, Format
from fdk_formats.scales import GroupedWeight, decode_scale

FIXED = [name for name in CODEBOOK_BITS if name not in ("affine", "custom")]


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moments(k, seed=0, rank=None):
    """Second moments of inputs that go together and differ much in size, as a model's do."""
    mixed = random(4 * k, rank or k, seed=seed) @ random(rank or k, k, seed=seed + 1)
    x = (mixed / mixed.std() + random(4 * k, k, seed=seed + 2)) * random(k, seed=seed + 3).exp()
    return x.T @ x / len(x)


def squared(weight, q, hessian):
    error = (weight - q.dequantise()).double()
    return ((error @ hessian.double()) * error).sum().item()


def same(a, b):
    return all(
        torch.equal(x, y) for x, y in zip(a.tensors().values(), b.tensors().values(), strict=True)
    )


def formats():
    for name in FIXED:
        for bits in CODEBOOK_BITS[name]:
            yield f"{name}{bits}-g32"
    for bits in range(1, 9):
        yield from (f"affine{bits}-g32", f"affine{bits}-g32-zint")
    yield from ("kmeans3-row", "int4-row-fp32", "affine2-row", "kmeans2-g48-e8m0", "nf4-g16-e8m0")
    yield from ("affine3-g16-e8m0", "affine3-g16-e8m0-zint", "int4-g32-signmax", "kmeans3-g96-fp16")


@pytest.mark.parametrize("format", list(formats()))
def test_every_format_has_less_error_than_nearest_codes(format):
    weight, hessian = random(40, 96), moments(96, rank=8)
    search = Format.parse(format)
    nearest = quantise(weight, search, importance=hessian.diagonal())
    if not search.has_signed_scale:
        name = f"{format}-search"
        nearest = min(
            nearest,
            quantise(weight, name, importance=hessian.diagonal()),
            key=lambda q: squared(weight, q, hessian),
        )
    q = quantise(weight, format, hessian=hessian)
    assert q.format == search
    assert squared(weight, q, hessian) < 0.9 * squared(weight, nearest, hessian)
    if search.has_power_of_two_scale or not search.is_affine:
        q.check_values("q")


def test_custom_codebook_is_kept():
    table = torch.tensor([-1.0, -0.25, 0.25, 1.0])
    weight, hessian = random(24, 64), moments(64, rank=4)
    for format in ("custom2-g32", "kmeans2-g32"):
        q = quantise(weight, format, hessian=hessian, codebook=table)
        near = quantise(weight, "custom2-g32-search", hessian.diagonal(), codebook=table)
        assert squared(weight, q, hessian) < 0.9 * squared(weight, near, hessian)
        if format.startswith("custom"):
            assert torch.equal(q.codebook, table)


def gptq(weight, grid, hessian, order):
    """The column loop of GPTQ with the inverse, in float64, as its paper has it."""
    h = hessian.matrix.double()[order][:, order]
    h = h + 0.01 * torch.eye(len(h), dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    w = weight.double()[:, order].clone()
    scale = (
        decode_scale(grid.scale)
        .double()
        .repeat_interleave(weight.shape[1] // grid.scale.shape[1], 1)[:, order]
    )
    codes = torch.empty(w.shape, dtype=torch.uint8)
    for i in range(w.shape[1]):
        distance = (w[:, i, None] - grid.codebook.double() * scale[:, i, None]).abs()
        codes[:, i] = distance.argmin(-1)
        value = grid.codebook.double()[codes[:, i].long()] * scale[:, i]
        w[:, i:] -= ((w[:, i] - value) / upper[i, i])[:, None] * upper[i, i:]
    return codes[:, order.argsort()]


@pytest.fixture
def one_pass(monkeypatch):
    monkeypatch.setattr("fdk_formats.compensate.REFIT_ROUNDS", 0)
    monkeypatch.setattr("fdk_formats.compensate.SWEEPS", 0)


def test_one_pass_is_gptq(one_pass):
    k = 288  # more than two blocks, the last one short
    weight, hessian = random(32, k), Hessian(moments(k))
    grid = GroupedWeight.of(weight, Format.parse("nf4-g32-fp32")).fit()
    found = compensate(weight, grid, hessian)
    assert (hessian.diagonal[hessian.order].diff() <= 0).all()
    # Rounding of float32 decides a tie now and then, and what follows in that row.
    assert (found.codes == gptq(weight, grid, hessian, hessian.order)).double().mean() > 0.99


def test_no_correlation_gives_the_nearest_codes(one_pass):
    weight = random(16, 64)
    for name in ("int4-g16", "kmeans3-g16", "affine4-g16-zint", "nf3-g16-e8m0"):
        grid = GroupedWeight.of(weight, Format.parse(name)).fit()
        found = compensate(weight, grid, Hessian(torch.diag(torch.arange(1.0, 65))))
        (chunk,) = GroupedWeight.of(weight, Format.parse(name)).chunks()
        assert torch.equal(found.codes, grid.encode(chunk))


def test_ties_go_to_the_lower_code(one_pass):
    weight = torch.tensor([[6, -6, 0, 1, 1.01, 3, 3.01, 5, -1, -0.99, -3, -2.99, -5, -4.99, 2, 4]])
    format = Format.parse("int3-g16-fp32")
    grid = GroupedWeight.of(weight, format).fit()
    found = compensate(weight, grid, Hessian(torch.eye(16)))
    assert found.codes.tolist() == [[6, 0, 3, 3, 4, 4, 5, 5, 2, 3, 1, 2, 0, 1, 4, 5]]


@pytest.mark.parametrize(("bits", "most"), [(1, 0.97), (2, 0.97), (3, 0.985)])
def test_refits_lower_the_error(bits, most, monkeypatch):
    """Up to 2 bits there are two rounds, above one, which gains less."""
    monkeypatch.setattr("fdk_formats.compensate.SWEEPS", 0)
    weight, hessian = random(64, 128), moments(128, rank=16)
    refitted = quantise(weight, f"kmeans{bits}-g32", hessian=hessian)
    monkeypatch.setattr("fdk_formats.compensate.REFIT_ROUNDS", 0)
    once = quantise(weight, f"kmeans{bits}-g32", hessian=hessian)
    assert squared(weight, refitted, hessian) < most * squared(weight, once, hessian)


@pytest.mark.parametrize("format", ["kmeans2-g32", "kmeans4-g32", "int3-g32", "affine3-g32"])
def test_sweeps_lower_the_error(format, monkeypatch):
    weight, hessian = random(64, 128), moments(128, rank=16)
    swept = quantise(weight, format, hessian=hessian)
    monkeypatch.setattr("fdk_formats.compensate.SWEEPS", 0)
    before = quantise(weight, format, hessian=hessian)
    assert squared(weight, swept, hessian) < 0.97 * squared(weight, before, hessian)


@pytest.mark.parametrize("format", ["kmeans2-g16", "affine2-g16"])
def test_after_enough_sweeps_no_other_code_is_better(format, monkeypatch):
    monkeypatch.setattr("fdk_formats.compensate.SWEEPS", 30)
    monkeypatch.setattr("fdk_formats.compensate.BLOCK", 7)
    monkeypatch.setattr("fdk_formats.compensate._refit_scales", lambda _, found, hessian: found)
    weight, hessian = random(6, 32), Hessian(moments(32))
    grid = GroupedWeight.of(weight, Format.parse(format)).fit()
    found = compensate(weight, grid, hessian)
    for column in range(32):
        for code in range(4):
            codes = found.codes.clone()
            codes[:, column] = code
            value = grid.decode(codes, slice(None), torch.float32)
            assert (hessian.row_errors(weight - value) >= found.errors * (1 - 1e-5)).all()


def test_dead_inputs_do_no_harm():
    hessian = moments(64)
    hessian[5] = hessian[:, 5] = 0
    hessian[40:] = 0
    hessian[:, 40:] = 0
    weight = random(20, 64)
    for format in ("kmeans2-g16", "affine3-g16-zint", "int4-row"):
        q = quantise(weight, format, hessian=hessian)
        assert torch.isfinite(q.dequantise()).all()
        nearest = quantise(weight, f"{format}-search", hessian.diagonal())
        assert squared(weight, q, hessian) < squared(weight, nearest, hessian)


def test_moments_of_zero_give_the_search():
    weight = random(8, 32)
    q = quantise(weight, "int4-g16", hessian=torch.zeros(32, 32))
    wanted = quantise(weight, "int4-g16-search")
    assert torch.equal(q.packed, wanted.packed)


@pytest.mark.parametrize("factor", [1e-30, 1e-6, 1e6, 1e30])
def test_units_of_the_inputs_do_not_matter(factor):
    weight, hessian = random(16, 64), moments(64)
    a, b = (quantise(weight, "kmeans3-g16", hessian=h) for h in (hessian, hessian * 2.0**20))
    assert same(a, b)
    wanted = squared(weight, a, hessian)
    found = squared(weight, quantise(weight, "kmeans3-g16", hessian=hessian * factor), hessian)
    assert found == pytest.approx(wanted, rel=0.05)


def test_singular_and_indefinite_moments():
    x = random(3, 64)  # three inputs: rank 3
    weight = random(16, 64)
    singular = x.T @ x / 3
    q = quantise(weight, "int3-g16", hessian=singular)
    nearest = quantise(weight, "int3-g16-search", singular.diagonal())
    assert squared(weight, q, singular) < 0.5 * squared(weight, nearest, singular)
    rounding = singular - 0.5 * singular.diagonal().mean() * torch.eye(64) * (
        singular.diagonal() > singular.diagonal().mean()
    )
    assert torch.linalg.eigvalsh(rounding).min() < -0.1
    assert torch.isfinite(quantise(weight, "int3-g16", hessian=rounding).dequantise()).all()


def test_bad_hessians_are_refused():
    weight = random(4, 32)
    bad = torch.eye(32)
    bad[3, 4] = math.nan
    with pytest.raises(ValueError, match="finite second moments"):
        quantise(weight, "int4-g16", hessian=bad)
    with pytest.raises(ValueError, match="no negative diagonal"):
        quantise(weight, "int4-g16", hessian=-torch.eye(32))
    with pytest.raises(ValueError, match=r"hessian must be \[32, 32\], got \[16, 16\]"):
        quantise(weight, "int4-g16", hessian=torch.eye(16))
    with pytest.raises(ValueError, match=r"wanted \[k, k\], got \[32\]"):
        quantise(weight, "int4-g16", hessian=torch.ones(32))
    with pytest.raises(TypeError, match="floating tensor"):
        quantise(weight, "int4-g16", hessian=[1.0])
    with pytest.raises(ValueError, match="importance or hessian, got both"):
        quantise(weight, "int4-g16", torch.ones(32), hessian=torch.eye(32))


def test_deterministic_and_pure():
    weight, hessian = random(48, 160), moments(160)
    kept, copy = hessian.clone(), weight.clone()
    results = [quantise(weight, "kmeans2-g32", hessian=hessian) for _ in range(2)]
    assert same(*results)
    assert torch.equal(hessian, kept)
    assert torch.equal(weight, copy)
    shared = Hessian(hessian)
    assert same(quantise(weight, "kmeans2-g32", hessian=shared), results[0])
    assert same(quantise(weight.to(torch.float64), "kmeans2-g32", hessian=shared), results[0])


def test_rows_count_alone():
    # With a fixed codebook the rows of a layer do not depend on its other rows.
    weight, hessian = random(24, 64), moments(64)
    whole = quantise(weight, "int2-g16", hessian=hessian).dequantise()
    half = quantise(weight[:12], "int2-g16", hessian=hessian).dequantise()
    assert (whole[:12] == half).double().mean() > 0.98


def test_zero_groups_stay_zero():
    weight = random(8, 64)
    weight[:, 16:32] = 0
    weight[3] = 0
    q = quantise(weight, "int4-g16", hessian=torch.eye(64))
    assert (q.dequantise()[:, 16:32] == 0).all()
    assert (q.dequantise()[3] == 0).all()


def test_output_error_is_that_of_outputs():
    weight, x = random(16, 64), random(500, 64) @ random(64, 64, seed=1)
    q = quantise(weight, "int3-g16").dequantise()
    wanted = (x @ (weight - q).T).norm() / (x @ weight.T).norm()
    assert output_error(weight, q, x.T @ x / 500) == pytest.approx(wanted.item(), rel=1e-4)
    assert output_error(torch.zeros(2, 64), torch.zeros(2, 64), torch.eye(64)) == 0


def test_a_row_of_scales_refitted_in_chunks(monkeypatch):
    weight, hessian = random(33, 64), moments(64)
    wanted = quantise(weight, "int2-g16", hessian=hessian)
    monkeypatch.setattr("fdk_formats.compensate.SYSTEM_SIZE", 300)
    found = quantise(weight, "int2-g16", hessian=hessian)
    assert (found.dequantise() == wanted.dequantise()).double().mean() > 0.98
