"""Quantising a weight with codebook formats."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fdk_formats import Format, fit_codebook, packing, quantise, scales
from fdk_formats.codebooks import named_codebook
from fdk_formats.encode import CodebookEncoder
from fdk_formats.scales import decode_scale

NAMES = ["int3", "uniform5", "nf4", "sf3", "fp4", "crd_student2", "ternary2", "binary1", "kmeans3"]


RULES = ["absmax", "absmean", "rms", "signmax", "search"]


def normal(n, k, seed=0):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def student(n, k, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_t(5, (n, k))).float()


def squared_error(weight, q, importance=None):
    error = (q.dequantise().double() - weight.double()).square()
    return (error if importance is None else error * importance).sum().item()


def relative_error(weight, format, **options):
    q = quantise(weight, format, **options)
    return math.sqrt(squared_error(weight, q) / weight.double().square().sum().item())


def same(a, b):
    pairs = zip(a.tensors().items(), b.tensors().items(), strict=True)
    return all(x[0] == y[0] and torch.equal(x[1], y[1]) for x, y in pairs)


def test_quantise_by_hand():
    # Largest magnitude 6 and unit 3 give scale 2: 1, 3, -1 ... are half way between codes.
    weight = torch.tensor([[6, -6, 0, 1, 1.01, 3, 3.01, 5, -1, -0.99, -3, -2.99, -5, -4.99, 2, 4]])
    q = quantise(weight, "int3-g16-fp32")
    assert q.scale.tolist() == [[2.0]]
    assert q.codebook.tolist() == [-3, -2, -1, 0, 1, 2, 3, 3]
    assert q.codes().tolist() == [[6, 0, 3, 3, 4, 4, 5, 5, 2, 3, 1, 2, 0, 1, 4, 5]]
    assert q.dequantise().tolist() == [[6, -6, 0, 0, 2, 2, 4, 4, -2, 0, -4, -2, -6, -4, 2, 4]]


def test_quantise_rounds_the_scale_first():
    # The scale 1 + 1/256 rounds to 1 in bf16. 0.5 / 1 is then a tie, which goes to the lower code;
    # with the unrounded scale it would be below the midpoint.
    weight = torch.zeros(1, 16)
    weight[0, :3] = torch.tensor([1 + 1 / 256, 0.5, 0.5 + 2**-20])
    table = torch.tensor([0.0, 1.0])
    q = quantise(weight, "custom1-g16-absmax", codebook=table)
    assert q.scale.tolist() == [[1.0]]
    assert q.codes()[0, :3].tolist() == [1, 0, 1]


def reference_scale(w, rule, unit):
    wide = w.astype(np.float64)
    if rule == "absmax":
        value = np.abs(wide).max(-1)
    elif rule == "absmean":
        value = np.abs(wide).mean(-1)
    elif rule == "rms":
        value = np.sqrt((wide**2).mean(-1))
    else:
        value = np.where(wide.max(-1) >= -wide.min(-1), wide.max(-1), wide.min(-1))
    return value.astype(np.float32) / np.float32(unit)


def reference_midpoints(table):
    """Returns the midpoints between each entry and the next greater one, or infinity."""
    greater = [table[table > entry] for entry in table[:-1]]
    above = [entries[0].item() if len(entries) else torch.inf for entries in greater]
    return (table[:-1] + torch.tensor(above)) / 2


@pytest.mark.parametrize("rule", RULES[:-1])
@pytest.mark.parametrize("name", NAMES)
def test_quantise_matches_numpy(name, rule):
    weight = student(37, 96).bfloat16()
    format = Format.parse(f"{name}-g32-{rule}")
    q = quantise(weight, format)
    w = weight.float().numpy().reshape(37, 3, 32)
    table, unit = q.codebook.numpy(), 1.0
    if format.codebook != "kmeans":
        named = named_codebook(format, 96)
        unit = named.unit
        assert table.tolist() == np.float32(named.values).tolist()
    scale = torch.from_numpy(reference_scale(w, rule, unit)).bfloat16()
    assert torch.equal(q.scale, scale)
    v = w / scale.float().numpy()[..., None]
    codes = (v[..., None] > reference_midpoints(q.codebook).numpy()).sum(-1)
    assert np.array_equal(q.codes().numpy().reshape(37, 3, 32), codes)


@given(
    st.lists(st.integers(-100, 100), min_size=2, max_size=256),
    st.lists(st.integers(-300, 300), min_size=1, max_size=50),
)
def test_codes_are_nearest_and_the_lower_of_a_tie(values, points):
    table = torch.tensor(sorted(values), dtype=torch.float32)
    codes = CodebookEncoder(table).codes(torch.tensor(points) / 2)
    assert codes.dtype == torch.uint8
    for point, code in zip(points, codes.tolist(), strict=True):
        distance = (table - point / 2).abs()
        assert distance[code] == distance.min()
        assert code == distance.argmin()  # the first


@pytest.mark.parametrize("spread", [1e-38, 1e-6, 1.0, 1e5, 1e37])
@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_count_midpoints_at_every_spread(bits, spread):
    # Cubes put entries near zero so close that no table of cells can separate them.
    table = normal(1, 1 << bits, seed=bits)[0].pow(3).sort().values * spread
    middle = reference_midpoints(table)
    around = torch.stack([middle, middle.nextafter(middle + 1), middle.nextafter(middle - 1)])
    value = torch.cat([around.view(-1), normal(1, 999)[0] * spread, torch.tensor([0.0, 3e38])])
    wanted = (value[:, None] > middle).sum(-1)
    nearest = CodebookEncoder(table)
    assert torch.equal(nearest.codes(value), wanted.to(torch.uint8))
    assert torch.equal(nearest.values(value.view(1, -1)), table[wanted].view(1, -1))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "e8m0"])
def test_zero_and_tiny_groups(name, rule, dtype):
    if rule == "signmax" and dtype == "e8m0":
        with pytest.raises(ValueError, match="signmax"):
            Format.parse(f"{name}-g16-{rule}-{dtype}")
        return
    weight = torch.zeros(2, 64)
    weight[0, 16:32] = normal(1, 16)[0]
    weight[1, :16] = 1e-40  # subnormal
    weight[1, 16] = -1e-45  # the smallest float32
    q = quantise(weight, f"{name}-g16-{rule}-{dtype}")
    out = q.dequantise()
    assert torch.isfinite(out).all()
    assert (out[weight.view(2, 4, 16).abs().amax(-1).repeat_interleave(16, 1) == 0] == 0).all()
    assert (decode_scale(q.scale)[weight.view(2, 4, 16).abs().amax(-1) == 0] == 0).all()
    assert (out[1].abs() < 1e-36).all()
    empty = quantise(torch.zeros(3, 32), f"{name}-g16-{rule}-{dtype}")
    assert torch.equal(empty.dequantise(), torch.zeros(3, 32))


@pytest.mark.parametrize("name", ["int1", "int2", "int4", "uniform3", "nf4", "crd_normal4"])
def test_signmax_maps_the_extreme_to_the_unit(name):
    weight = normal(50, 64)
    format = Format.parse(f"{name}-g32-signmax-fp32")
    q = quantise(weight, format)
    w = weight.view(50, 2, 32)
    extreme = w.gather(-1, w.abs().argmax(-1, keepdim=True))[..., 0]
    code = 0 if name.startswith("int") else (1 << format.bits) - 1
    codes = q.codes().view(50, 2, 32).gather(-1, w.abs().argmax(-1, keepdim=True))
    assert (codes == code).all()
    assert torch.equal(q.scale * named_codebook(format, 64).unit, extreme)
    assert (q.scale < 0).any()
    assert (q.scale > 0).any()


def test_e8m0_absmax_clips_nothing():
    weight = student(64, 64)
    q = quantise(weight, "int4-g16-e8m0")
    largest = 7 * decode_scale(q.scale)
    peak = weight.view(64, 4, 16).abs().amax(-1)
    assert (peak <= largest).all()
    assert (peak > largest / 2).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_quantise_takes_every_floating_dtype(dtype):
    weight = normal(9, 48).to(dtype)
    assert same(quantise(weight, "kmeans4-g16"), quantise(weight.float(), "kmeans4-g16"))


def test_quantise_takes_parameters_and_strides():
    weight = normal(48, 32)
    wanted = quantise(weight, "kmeans3-g16-search")
    turned = torch.nn.Parameter(weight.t().contiguous().t())
    assert not turned.is_contiguous()
    q = quantise(turned, Format.parse("kmeans3-g16-search"))
    assert same(q, wanted)
    assert not any(t.requires_grad for t in q.tensors().values())
    assert torch.equal(weight, normal(48, 32))


@pytest.mark.parametrize("format", ["nf4-row", "kmeans4-g16-search", "kmeans2-g48", "affine3-g16"])
def test_quantise_is_the_same_in_any_chunks_and_threads(format, monkeypatch):
    weight = student(67, 48)
    wanted = quantise(weight, format)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert same(quantise(weight, format), wanted)
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(packing, "CODES_PER_CHUNK", 500)
    monkeypatch.setattr(scales, "CACHED_CHUNK", 500)
    small = quantise(weight, format)
    assert torch.equal(small.packed, wanted.packed)
    assert torch.equal(small.scale, wanted.scale)


@pytest.mark.parametrize(
    "format", ["kmeans4-row-search-fp32", "affine4-row-search-fp32", "int3-row-rms-fp32"]
)
def test_one_long_group_is_the_same_with_any_threads(format):
    # torch splits a sum with a single result among its threads.
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found += [[quantise(student(1, 1 << 17, seed=s), format) for s in range(3)]]
    finally:
        torch.set_num_threads(threads)
    for others in found[1:]:
        assert all(same(a, b) for a, b in zip(found[0], others, strict=True))


@pytest.mark.parametrize("rows", [0, 24])
@pytest.mark.parametrize(
    "format", ["kmeans4-g16", "kmeans3-g16-search", "nf3-g48-signmax", "affine3-g16-search"]
)
def test_quantise_ignores_the_default_device(format, rows):
    weight = student(24, 48)[:rows]
    wanted = quantise(weight, format)
    with torch.device("meta"):
        assert same(quantise(weight, format), wanted)


@pytest.fixture(scope="module")
def million():
    return {"normal": normal(15625, 64), "student": student(15625, 64)}


@pytest.mark.parametrize(
    ("data", "format", "most"),
    [
        ("normal", "kmeans4-g64-absmax", 0.0875),
        ("normal", "kmeans3-g64-absmax", 0.178),
        ("normal", "kmeans2-g64", 0.344),
        ("normal", "kmeans1-g64", 0.599),
        ("student", "kmeans4-g64-absmax", 0.1005),
        ("normal", "nf4-g64", 0.0921),
        ("normal", "crd_normal4-g64", 0.0893),
        ("student", "crd_student4-g64", 0.1022),
        ("normal", "affine4-g64", 0.0900),
    ],
)
def test_accuracy(million, data, format, most):
    assert relative_error(million[data], format) <= most


@pytest.mark.parametrize("rule", ["absmean", "absmax", "search"])
def test_one_bit_kmeans_is_symmetric_if_cheap(rule):
    """For normal values symmetry costs mean^2 of the squared error: 4.8e-4 at a mean of 0.022."""
    half = normal(128, 1024)
    even = torch.cat([half, -half]) / half.std()
    for mean, is_mirrored in ((0.0, True), (0.01, True), (0.02, True), (0.026, False)):
        codebook = quantise(even + mean, f"kmeans1-g64-{rule}").codebook
        assert (codebook[0] == -codebook[1]) == is_mirrored
    four = quantise(half, f"kmeans2-g64-{rule}").codebook
    assert (four != -four.flip(0)).all()


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("name", ["int", "uniform", "nf", "crd_laplace", "kmeans"])
@pytest.mark.parametrize("shape", [normal, student])
def test_search_beats_absmax(shape, name, bits):
    weight = shape(128, 256, seed=bits)
    found = relative_error(weight, f"{name}{bits}-g64-search")
    assert found < 0.995 * relative_error(weight, f"{name}{bits}-g64-absmax")


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "e8m0"])
def test_search_is_no_worse_in_any_group(dtype):
    weight = student(64, 128)
    for name in ("int3", "nf4"):
        errors = [
            (quantise(weight, f"{name}-g32-{rule}-{dtype}").dequantise() - weight)
            .view(64, 4, 32)
            .square()
            .sum(-1)
            for rule in ("search", "absmax")
        ]
        assert (errors[0] <= errors[1] * (1 + 1e-5)).all()


def test_search_of_extreme_weights():
    for factor in (1e-38, 1e-20, 1e20, 1e38):
        weight = normal(8, 64).clamp(-3, 3) * factor
        scaled = relative_error(weight, "int4-g32-search-fp32")
        assert scaled == pytest.approx(
            relative_error(weight / factor, "int4-g32-search-fp32"), 1e-3
        )


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("rule", ["absmax", "absmean", "rms", "signmax", "search"])
def test_kmeans_never_worse_than_uniform(bits, rule):
    generator = torch.Generator().manual_seed(bits)
    weights = [
        student(64, 128),
        torch.rand(64, 128, generator=generator) - 0.5,
        torch.randint(-7, 8, (64, 128), generator=generator) / 7,
        normal(64, 128) * torch.logspace(-6, 6, 64)[:, None],
    ]
    for weight in weights:
        kmeans = squared_error(weight, quantise(weight, f"kmeans{bits}-g32-{rule}"))
        plain = squared_error(weight, quantise(weight, f"uniform{bits}-g32-{rule}"))
        assert kmeans <= plain * (1 + 1e-6)


@pytest.mark.parametrize(("bits", "seed"), [(2, 0), (2, 4), (4, 10)])
def test_kmeans_search_begins_with_the_uniform_grid_too(bits, seed):
    # Started from the k-means alone, the error would be up to 0.3 % above the grid's.
    weight = torch.rand(64, 128, generator=torch.Generator().manual_seed(seed)) - 0.5
    kmeans = squared_error(weight, quantise(weight, f"kmeans{bits}-g32-search"))
    plain = squared_error(weight, quantise(weight, f"uniform{bits}-g32-search"))
    assert kmeans <= plain


def test_kmeans_of_discrete_weights_is_exact():
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([-0.7, 0.1, 0.1 + 2**-26, 1.0])
    weight = values[torch.randint(0, 4, (33, 64), generator=generator)]
    weight[:, ::16] = 1.0  # the absmax of every group: scale 1
    q = quantise(weight, "kmeans2-g16-absmax-fp32")
    assert torch.equal(q.codebook, values)
    assert torch.equal(q.dequantise(), weight)
    padded = quantise(weight, "kmeans4-g16-absmax-fp32")
    assert padded.codebook.tolist() == values.tolist() + [1.0] * 12
    assert torch.equal(padded.dequantise(), weight)
    constant = torch.full((4, 32), -0.3)
    assert torch.equal(quantise(constant, "kmeans4-g16-fp32").dequantise(), constant)


def test_weight_by_scale():
    weight = student(128, 128) * torch.logspace(-1, 1, 128)[:, None]
    by_scale = quantise(weight, "kmeans3-g32-absmax")
    even = quantise(weight, "kmeans3-g32-absmax", weight_by_scale=False)
    assert squared_error(weight, by_scale) < squared_error(weight, even)
    scale = by_scale.scale.float().repeat_interleave(32, 1)
    v = weight / scale
    errors = [(q.dequantise() / scale - v).square().sum() for q in (by_scale, even)]
    assert errors[1] < errors[0]


@pytest.mark.parametrize("format", ["kmeans3-g32", "kmeans3-g32-search", "nf3-g32-search"])
def test_importance_lowers_the_error_it_weighs(format):
    weight = student(64, 128)
    generator = torch.Generator().manual_seed(1)
    importance = torch.rand(128, generator=generator) ** 6
    plain, weighed = quantise(weight, format), quantise(weight, format, importance=importance)
    wanted = squared_error(weight, plain, importance)
    assert squared_error(weight, weighed, importance) < 0.995 * wanted
    whole = importance.expand(64, 128).double() * 2.0**-200  # underflows float32
    assert same(quantise(weight, format, importance=whole), weighed)


def test_importance_of_zero_is_ignored():
    weight = normal(16, 64).clamp(-1, 1)
    importance = torch.ones(16, 64)
    importance[3, 7] = 0
    importance[5] = 0
    other = weight.clone()
    other[3, 7] = 0.123
    a, b = (fit_codebook(w, "kmeans3-row-fp32", importance=importance) for w in (weight, other))
    assert torch.equal(a, b)
    q = quantise(weight, "int3-g32-search", importance=importance)
    assert torch.isfinite(q.dequantise()).all()


@pytest.mark.parametrize("format", ["kmeans4-g32", "kmeans2-g32-absmax", "kmeans3-g32-search"])
def test_fit_codebook_equals_quantise(format):
    weight = student(32, 64)
    table = fit_codebook(weight, format)
    wanted = quantise(weight, format)
    assert torch.equal(table, wanted.codebook)
    frozen = quantise(weight, format, codebook=table)
    assert torch.equal(frozen.codebook, table)
    if "search" not in format:
        assert same(frozen, wanted)


def test_fit_codebook_of_fixed_formats():
    weight = normal(2, 32)
    assert fit_codebook(weight, "uniform2-g16").tolist() == pytest.approx([-1, -1 / 3, 1 / 3, 1])
    with pytest.raises(ValueError, match="affine4-g16 has no codebook"):
        fit_codebook(weight, "affine4-g16")


def test_custom_codebook():
    weight = normal(4, 32)
    table = torch.tensor([-0.8, -0.1, 0.2, 0.9])
    q = quantise(weight, "custom2-g16-absmax", codebook=table.double())
    assert torch.equal(q.codebook, table)
    assert torch.equal(q.scale.float(), weight.view(4, 2, 16).abs().amax(-1).bfloat16().float())


def test_quantise_of_no_rows():
    for format in ("nf4-g16", "kmeans4-g16", "affine4-g16", "int4-g16-search"):
        q = quantise(torch.zeros(0, 32), format, importance=torch.ones(0, 32))
        assert q.dequantise().shape == (0, 32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    "format",
    ["nf4-g64", "kmeans3-g32", "int3-g16-search-e8m0", "fp4-g32-signmax", "affine4-g64-search"],
)
def test_quantise_on_a_gpu(format):
    weight, importance = student(96, 128), torch.rand(128, generator=torch.manual_seed(0))
    q = quantise(weight.cuda(), format, importance=importance.cuda())
    assert all(t.is_cuda for t in q.tensors().values())
    wanted = quantise(weight, format, importance=importance)
    if "kmeans" not in format and "search" not in format:
        assert same(q.to("cpu"), wanted)
    # Sums have another order on a GPU: fitted values may differ in the last bit.
    errors = [squared_error(weight, x, importance) for x in (q.to("cpu"), wanted)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("format", ["int4-g64", "kmeans3-g64", "nf4-g64", "affine4-g64"])
def test_quantise_ignores_the_default_dtype(format, dtype):
    weight = normal(4, 128)
    wanted = quantise(weight, format).tensors()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = quantise(weight, format).tensors()
    finally:
        torch.set_default_dtype(before)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("format", "table", "error", "message"),
    [
        ("custom2-g16", None, ValueError, "needs codebook=, 4 values"),
        ("nf4-g16", [0.0] * 16, ValueError, "nf4-g16 takes no codebook"),
        ("affine4-g16", [0.0] * 16, ValueError, "affine4-g16 takes no codebook"),
        ("custom2-g16", [0.0, 1.0], ValueError, r"must be \[4\], got \[2\]"),
        ("custom2-g16", [], ValueError, r"must be \[4\], got \[0\]"),
        ("kmeans1-g16", [1.0, 0.0], ValueError, "finite and ascending"),
        ("kmeans1-g16", [1.0, math.nan], ValueError, "finite and ascending"),
        ("kmeans1-g16", [0, 1], TypeError, "floating tensor, got torch.int64"),
    ],
)
def test_codebook_is_checked(format, table, error, message):
    given_table = None if table is None else torch.tensor(table)
    with pytest.raises(error, match=message):
        quantise(normal(2, 32), format, codebook=given_table)
    with pytest.raises(TypeError, match="floating tensor, got list"):
        quantise(normal(2, 32), "custom1-g16", codebook=[0.0, 1.0])


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        ([[1.0] * 32], TypeError, "must be a tensor, got list"),
        (torch.ones(2, 32, dtype=torch.int32), TypeError, "must be floating, got torch.int32"),
        (torch.ones(32), ValueError, r"must be \[n, k\], got \[32\]"),
        (torch.ones(2, 24), ValueError, "multiple of 16, got k=24"),
        (torch.ones(2, 0), ValueError, "multiple of 16, got k=0"),
    ],
)
def test_weight_is_checked(weight, error, message):
    with pytest.raises(error, match=message):
        quantise(weight, "nf4-g16")


@pytest.mark.parametrize("format", ["kmeans4-g16", "int1-g16", "nf4-g16-search", "affine4-g16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weight_must_be_finite(format, bad, monkeypatch):
    monkeypatch.setattr(packing, "CODES_PER_CHUNK", 96)  # the bad value is in a later chunk
    monkeypatch.setattr(scales, "CACHED_CHUNK", 96)
    weight = normal(7, 32)
    weight[5, 17] = weight[5, 30] = bad
    with pytest.raises(ValueError, match=f"finite.*, got {bad} at row 5, column 17"):
        quantise(weight, format)


def test_weight_must_fit_float32():
    weight = torch.full((2, 16), 1e300, dtype=torch.float64)
    with pytest.raises(ValueError, match="finite in float32, got inf at row 0, column 0"):
        quantise(weight, "nf4-g16")
    with pytest.raises(ValueError, match="fp16 holds up to 65504, got 1e"):
        quantise(torch.full((2, 16), 1e6), "nf4-g16-fp16")


@pytest.mark.parametrize(
    ("importance", "error", "message"),
    [
        (torch.ones(31), ValueError, r"must be \[32\] or \[2, 32\], got \[31\]"),
        (torch.ones(32, 2), ValueError, r"must be \[32\] or \[2, 32\], got \[32, 2\]"),
        (-torch.ones(32), ValueError, "finite and not negative, got -1 to -1"),
        (torch.full((32,), math.nan), ValueError, "finite and not negative, got nan"),
        (torch.full((32,), math.inf), ValueError, "finite and not negative, got inf"),
        (torch.zeros(2, 32), ValueError, "positive somewhere"),
        (torch.ones(32, dtype=torch.bool), TypeError, "real numbers, got torch.bool"),
    ],
)
def test_importance_is_checked(importance, error, message):
    with pytest.raises(error, match=message):
        quantise(normal(2, 32), "kmeans4-g16", importance=importance)


both = pytest.mark.parametrize("function", [quantise, fit_codebook])


@both
@pytest.mark.parametrize("format", ["kmeans4-g16", "int4-g16"])
def test_weight_on_meta(function, format):
    with pytest.raises(ValueError, match="weight needs values, got a tensor on meta"):
        function(torch.empty(4, 32, device="meta"), format)


@both
def test_importance_must_be_a_tensor(function):
    with pytest.raises(TypeError, match="importance must be a tensor, got list"):
        function(torch.ones(2, 16), "kmeans2-g16", importance=[1.0] * 16)


@both
def test_importance_on_meta(function):
    with pytest.raises(ValueError, match="importance must be on cpu, got meta"):
        function(torch.ones(2, 16), "kmeans2-g16", torch.ones(16, device="meta"))


def test_importance_is_the_third_argument():
    weight = torch.tensor([[0.0, 0.25, 0.5, 1.0] * 8])
    importance = torch.tensor([1.0, 1.0, 9.0, 1.0] * 8)
    table = fit_codebook(weight, "kmeans1-row-fp32-absmax", importance)
    # Clusters {0, 0.25} and {0.5, 1.0}, the latter with mean (9 * 0.5 + 1) / 10.
    assert table.tolist() == pytest.approx([0.125, 0.55])
    q = quantise(weight, "kmeans1-row-fp32-absmax", importance)
    assert torch.equal(q.codebook, table)


def test_rows_of_no_weights():
    with pytest.raises(ValueError, match="int4-row: k must be at least 1, got k=0"):
        quantise(torch.empty(4, 0), "int4-row")
