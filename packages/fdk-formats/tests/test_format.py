import pytest

from fdk_formats import Format
from fdk_formats.codebooks import named_codebook
from fdk_formats.format import CODEBOOK_BITS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kmeans4-g64", Format("kmeans", 4, 64, "absmax", "bf16", None)),
        ("int1-g64-absmean", Format("int", 1, 64, "absmean", "bf16", None)),
        ("nf4-g64", Format("nf", 4, 64, "absmax", "bf16", None)),
        ("affine4-g128", Format("affine", 4, 128, "minmax", "bf16", "float")),
        ("affine4-g128-search-fp16-zint", Format("affine", 4, 128, "search", "fp16", "int")),
        ("crd_student3-row-rms-e8m0", Format("crd_student", 3, None, "rms", "e8m0", None)),
        ("kmeans2-fp32-g16", Format("kmeans", 2, 16, "absmean", "fp32", None)),
        ("kmeans2-g64-hadamard", Format("kmeans", 2, 64, rotation="hadamard")),
        (
            "affine4-hadamard-row-zint",
            Format("affine", 4, None, zero_point="int", rotation="hadamard"),
        ),
    ],
)
def test_parse(text, expected):
    assert Format.parse(text) == expected


def test_str_is_parsed_back():
    count = 0
    for codebook, widths in CODEBOOK_BITS.items():
        affine = codebook == "affine"
        rules = ("minmax", "search") if affine else ("absmax", "absmean", "rms", "search")
        for bits in widths:
            for size in (16, 64, None):
                for rule in rules:
                    for dtype in ("bf16", "fp16", "fp32", "e8m0"):
                        for zero in ("float", "int") if affine else (None,):
                            for rotation in (None, "hadamard"):
                                fields = codebook, bits, size, rule, dtype, zero, rotation
                                format = Format(*fields)
                                assert Format.parse(str(format)) == format
                                count += 1
    assert count > 6000


def test_str_is_short():
    assert str(Format("int", 1, 64, "absmean")) == "int1-g64"
    assert str(Format("int", 2, 64, "absmax")) == "int2-g64-absmax"
    assert str(Format("kmeans", 4, 64, "absmax")) == "kmeans4-g64"
    assert str(Format("affine", 8, None, zero_point="int")) == "affine8-row-zint"
    assert str(Format("affine", 4, 128, zero_point="float")) == "affine4-g128"
    assert str(Format("kmeans", 2, rotation="hadamard")) == "kmeans2-g64-hadamard"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not start with <codebook><bits>"),
        ("kmeans-g64", "does not say how many bits: kmeans takes 1 to 8 bits, as in kmeans4-g64"),
        ("4-g64", "does not start with <codebook><bits>"),
        ("kmeans4", "names no group size"),
        ("kmeans4-g64-g32", "names its group_size twice"),
        ("kmeans4-g64-best", "'best' in 'kmeans4-g64-best' is not understood"),
        ("kmeans4-g-64", "'g' in"),
        ("fp8x4-g64", "does not start with"),
        ("mean4-g64", "codebook must be one of int, uniform, nf,"),
        ("kmeans0-g64", "takes 1 to 8 bits, got 0"),
        ("ternary-g64", r"'ternary-g64' .* bits: ternary takes 2 bits, as in ternary2-g64$"),
        ("kmeans9-g64", "takes 1 to 8 bits, got 9"),
        ("fp3-g64", "fp takes 4 bits, got 3"),
        ("ternary1-g64", "ternary takes 2 bits, got 1"),
        ("kmeans4-g8", "group_size must be at least 16"),
        ("kmeans4-g0", "group_size must be at least 16"),
        ("affine4-g64-absmax", "affine takes a scale rule of minmax, search, got 'absmax'"),
        ("nf4-g64-minmax", "nf takes a scale rule of absmax,"),
        ("nf4-g64-zint", "zero_point of nf must be None, got 'int'"),
        ("nf4-g64-signmax-e8m0", "e8m0 holds no sign"),
        ("nf4-g64-hadamard-hadamard", "names its rotation twice"),
    ],
)
def test_parse_refuses(text, message):
    with pytest.raises(ValueError, match=message.replace("<", ".").replace(">", ".")):
        Format.parse(text)


def test_parse_takes_a_format_and_no_other_type():
    format = Format("nf", 4)
    assert Format.parse(format) is format
    with pytest.raises(TypeError, match="wanted a string or a Format, got int"):
        Format.parse(4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 4.0}, "takes 1 to 8 bits, got 4.0"),
        ({"bits": True}, "takes 1 to 8 bits, got True"),
        ({"group_size": 64.0}, "group_size must be at least 16"),
        ({"scale_dtype": "fp8"}, "scale_dtype must be one of bf16, fp16, fp32, e8m0, got 'fp8'"),
    ],
)
def test_fields_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        Format(**{"codebook": "int", "bits": 4, **fields})


@pytest.mark.parametrize(
    ("text", "k", "expected"),
    [
        ("kmeans4-g64", 128, 4.25),  # 4 + 16/64
        ("int1-g64", 64, 1.25),
        ("nf4-g64-fp32", 64, 4.5),  # 4 + 32/64
        ("nf4-g32-e8m0", 64, 4.25),  # 4 + 8/32
        ("affine4-g128", 128, 4.25),  # 4 + (16 + 16)/128
        ("affine4-g128-zint", 128, 4.1875),  # 4 + (16 + 8)/128
        ("affine4-g64-e8m0", 64, 4.375),  # 4 + (8 + 16)/64
        ("uniform3-row", 100, 3.16),  # 3 + 16/100
    ],
)
def test_bits_per_weight(text, k, expected):
    assert Format.parse(text).bits_per_weight(k) == pytest.approx(expected, abs=1e-12)


def test_group_size_for():
    assert Format.parse("nf4-row").group_size_for(100) == 100
    assert Format.parse("nf4-g32").group_size_for(96) == 32
    for format, size, k in (("nf4-g32", 32, 100), ("nf4-g32", 32, 0), ("nf4-g64", 64, 32)):
        with pytest.raises(ValueError, match=f"k must be a positive multiple of {size}, got k={k}"):
            Format.parse(format).group_size_for(k)
    with pytest.raises(ValueError, match="nf4-row: k must be at least 1, got k=0"):
        Format.parse("nf4-row").group_size_for(0)


@pytest.mark.parametrize(
    ("text", "true"),
    [
        ("int8-g64", {"is_grid", "has_repeated_top"}),
        ("int8-g64-signmax", {"is_grid", "has_signed_scale"}),
        ("int1-g64-e8m0", {"is_grid", "has_power_of_two_scale"}),
        ("binary1-g64", {"is_binary"}),
        ("kmeans4-g64", {"is_fitted", "accepts_codebook"}),
        ("custom4-g64", {"needs_codebook", "accepts_codebook"}),
        ("nf4-g64", set()),
        ("affine4-g64", {"is_affine"}),
        ("affine4-g64-zint", {"is_affine", "has_integer_zero_point"}),
    ],
)
def test_boolean_properties(text, true):
    format = Format.parse(text)
    names = {name for name in dir(Format) if name.startswith(("is_", "has_", "needs_", "accepts_"))}
    assert {name for name in names if getattr(format, name)} == true


@pytest.mark.parametrize("rule", ["absmax", "signmax"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_grid_zero_point_turns_codes_into_values(rule, bits):
    format = Format("int", bits, scale_rule=rule)
    values = named_codebook(format, 64).values
    if bits == 1:
        assert format.grid_zero_point is None
        return
    expected = [float(code - format.grid_zero_point) for code in range(1 << bits)]
    if format.has_repeated_top:
        expected[-1] = expected[-2]
    assert list(values) == expected
