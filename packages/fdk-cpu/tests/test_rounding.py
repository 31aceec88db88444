"""Rounding in C++ equals torch's, bit for bit; its sums are those of float64 within rounding."""

import pytest
import torch

from fdk_cpu.rounding import KERNELS, round_columns
from fdk_formats import compensate, fake_quantise, quantise, rounding
from fdk_formats.encode import CodebookEncoder
from fdk_formats.testing.rounding import check_round_columns

SIZES = (1, 5, 16, 64, 100)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def case(
    entries: int, size: int, rows: int = 7
) -> tuple[CodebookEncoder, torch.Tensor, torch.Tensor]:
    """An encoder, groups with midpoints among them, and scales, one of them zero."""
    encoder = CodebookEncoder(normal(entries, seed=1).sort().values)
    groups = normal(rows, 3, size)
    scale = normal(rows, 3, seed=2)
    scale[1, 1] = 0
    scale[2] = 1
    groups[2].view(-1)[: len(encoder.midpoints)] = encoder.midpoints[: groups[2].numel()]
    return encoder, groups, scale


@pytest.fixture
def torch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(rounding._REGISTERED, "cpu")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("entries", [2, 3, 4, 7, 8, 16])
def test_round_equals_torch(
    isa: str, entries: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, groups, scale = case(entries, size)
    for dtype in (torch.float32, torch.bfloat16):
        codes, values = encoder.round(groups, scale, dtype)
        with monkeypatch.context() as patch:
            patch.delitem(rounding._REGISTERED, "cpu")
            wanted_codes, wanted = encoder.round(groups, scale, dtype)
        assert torch.equal(codes, wanted_codes)
        assert torch.equal(values.view(torch.int32), wanted.view(torch.int32))


def test_round_with_repeated_entries(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = CodebookEncoder(torch.tensor([-1.0, 0, 0, 1]))
    groups = torch.tensor([[[-2.0, -0.5, -0.4, 0, 0.4, 0.5, 0.6]]])
    codes, values = encoder.round(groups, torch.ones(1, 1))
    assert codes.tolist() == [[[0, 0, 1, 1, 1, 1, 3]]]
    assert values.tolist() == [[[-1, -1, 0, 0, 0, 0, 1]]]


@pytest.mark.parametrize("importance_rows", [0, 1, 7])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("entries", [2, 8, 16])
def test_sums(isa: str, entries: int, size: int, importance_rows: int) -> None:
    encoder, groups, scale = case(entries, size)
    importance = normal(importance_rows, 3, size, seed=3).square() if importance_rows else None
    given = encoder.midpoints, encoder.entries, groups, scale, importance
    weights = torch.ones(()).double() if importance is None else importance.double()
    quotient = torch.where(scale[..., None] == 0, 0, groups / scale[..., None])
    entry = encoder.values(quotient).double()
    error = (entry * scale[..., None] - groups).square() * weights
    torch.testing.assert_close(
        KERNELS.squared_errors(*given).double(), error.sum(-1), rtol=1e-5, atol=1e-6
    )
    product, square = KERNELS.products(*given)
    magnitude = ((groups * entry).abs() * weights).sum(-1)
    assert ((product - (groups * entry * weights).sum(-1)).abs() <= 1e-5 * magnitude).all()
    torch.testing.assert_close(
        square.double(), (entry.square() * weights).sum(-1), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("format", ["kmeans2-g32", "int4-g32", "nf4-g32-e8m0", "kmeans3-row"])
def test_fake_quantise_equals_torch(isa: str, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(33, 96)
    found = fake_quantise(weight, format)
    with monkeypatch.context() as patch:
        patch.delitem(rounding._REGISTERED, "cpu")
        assert torch.equal(found, fake_quantise(weight, format))


def test_search_is_as_good_as_torchs(isa: str, torch_only: None) -> None:
    weight = normal(64, 256)

    def error(format: str) -> float:
        return float((quantise(weight, format).dequantise() - weight).square().sum())

    formats = ("kmeans2-g32-search", "kmeans3-g32-search", "int4-g32-search")
    wanted = [error(format) for format in formats]
    rounding.register_rounding_kernels("cpu", KERNELS)
    for format, limit in zip(formats, wanted, strict=True):
        assert error(format) == pytest.approx(limit, rel=1e-3)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_show(threads: int) -> None:
    from fdk_cpu import set_num_threads

    encoder, groups, scale = case(8, 64, rows=1000)
    given = encoder.midpoints, encoder.entries, groups, scale, None
    wanted = KERNELS.squared_errors(*given)
    set_num_threads(threads)
    try:
        assert torch.equal(KERNELS.squared_errors(*given), wanted)
        assert torch.equal(encoder.round(groups, scale)[1], encoder.round(groups, scale)[1])
    finally:
        set_num_threads(None)


@pytest.mark.parametrize("has_zero", [False, True])
@pytest.mark.parametrize(("columns", "rows"), [(1, 1), (7, 5), (128, 64), (20, 203)])
@pytest.mark.parametrize("entries", [2, 3, 8, 16])
def test_columns_equal_torchs(
    isa: str, entries: int, columns: int, rows: int, has_zero: bool
) -> None:
    check_round_columns(round_columns, entries, columns, rows, has_zero=has_zero)


@pytest.mark.parametrize("format", ["kmeans2-g32", "affine4-g32", "kmeans4-row"])
def test_compensation_equals_torchs(isa: str, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(400, 200) @ (torch.eye(200) + 0.1 * normal(200, 200, seed=1))
    hessian = compensate.Hessian(x.T @ x / len(x))
    weight = normal(70, 192, seed=2) if "g32" in format else normal(70, 200, seed=2)
    if "g32" in format:
        hessian = compensate.Hessian(hessian.matrix[:192, :192])

    def error() -> float:
        found = quantise(weight, format, hessian=hessian)
        return float(hessian.row_errors(weight - found.dequantise()).sum())

    found = error()
    monkeypatch.delitem(rounding._COLUMNS, "cpu")
    assert found == pytest.approx(error(), rel=1e-3)


def test_wrong_sizes_are_refused() -> None:
    square = torch.ones(2, 2)
    with pytest.raises(ValueError, match="feedback must be"):
        round_columns(torch.ones(1), torch.ones(2), square, square, torch.ones(3), square, None)
    with pytest.raises(ValueError, match="scale must be"):
        round_columns(torch.ones(1), torch.ones(2), square, square, square, torch.ones(2, 1), None)
    encoder, groups, scale = case(8, 64)
    with pytest.raises(ValueError, match="values must be"):
        KERNELS.round(encoder.midpoints, encoder.entries, groups.view(-1)[:-1], scale)
    with pytest.raises(ValueError, match="1 to 16 entries"):
        KERNELS.round(torch.zeros(16), torch.zeros(17), groups, scale)
    with pytest.raises(ValueError, match="midpoints must be"):
        KERNELS.round(encoder.midpoints[1:], encoder.entries, groups, scale)
