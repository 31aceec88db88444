"""Untrusted input: each refusal of the JSON parser, of sizes and of files."""

import json
import os
import sys

import pytest

from fdk_formats.untrusted import (
    FLOAT32_MAX,
    INT64_MAX,
    MAX_JSON_BYTES,
    MAX_JSON_DEPTH,
    check_int,
    check_number,
    check_shape,
    parse_json_object,
    read_file,
)


def nested(depth, inner="1"):
    """Returns an object of ``depth`` levels."""
    return '{"a":' + "[" * (depth - 1) + inner + "]" * (depth - 1) + "}"


@pytest.mark.parametrize("convert", [str, str.encode], ids=["text", "bytes"])
def test_ordinary_documents_parse_as_json_loads_does(convert):
    value = {
        "text": 'quotes " \\ [[{{ \u00e9 \U0001f600',
        "numbers": [0, -1, 1.5, 1e300, (1 << 64) - 1, -(1 << 63)],
        "rest": [True, False, None, {}, []],
    }
    for ascii in (True, False):
        text = json.dumps(value, ensure_ascii=ascii)
        assert parse_json_object(convert(text), "here") == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "damaged JSON: Expecting value: line 1 column 1"),
        ("{", "damaged JSON: Expecting property name"),
        ('{"a": 1} {}', "damaged JSON: Extra data"),
        (b"\xff\xfe{\x00}\x00", "damaged JSON: .* can't decode byte 0xff"),
        (b'{"a": "\xed\xa0\x80"}', "damaged JSON: .* can't decode"),
        ("\ufeff{}", "damaged JSON: Unexpected UTF-8 BOM"),
        ("[" * 100_000, "damaged JSON: nested deeper than 64 at character 64"),
        ('{"a":' * 100_000, "damaged JSON: nested deeper than 64"),
        (nested(MAX_JSON_DEPTH + 1), "damaged JSON: nested deeper than 64"),
        ('{"a": 1, "b": {"c": 1, "c": 1}}', "damaged JSON: the key 'c' occurs twice in an object"),
        ('{"a": 1, "\\u0061": 2}', "damaged JSON: the key 'a' occurs twice in an object"),
        ('{"a": NaN}', "damaged JSON: a number must be finite, got NaN"),
        ('{"a": [-Infinity, 1]}', "damaged JSON: a number must be finite, got -Infinity"),
        ('{"a": 1e999}', "damaged JSON: a number must fit float64, got 1e999"),
        (
            '{"a": 18446744073709551616}',
            "damaged JSON: an integer must fit 64 bits, got 18446744073709551616",
        ),
        ('{"a": -9223372036854775809}', "damaged JSON: an integer must fit 64 bits"),
        (
            '{"a": 1' + "0" * 5000 + "}",
            r"damaged JSON: an integer must fit 64 bits, got 10{76}\.\.\.",
        ),
        ('{"a": "\\udcff"}', "damaged JSON: .*surrogates not allowed"),
        ('{"\\ud800": 1}', "damaged JSON: .*surrogates not allowed"),
        ('{"a": "\udcff"}', "wanted JSON, got text that is not Unicode: .*surrogates not allowed"),
        ("[1]", r"must be a JSON object, got \[1\]"),
        ("7", "must be a JSON object, got 7"),
        ('"' + "x" * 1000 + '"', r"must be a JSON object, got 'x{76}\.\.\."),
    ],
    ids=range(23),
)
def test_refused_documents(text, message):
    with pytest.raises(ValueError, match=f"^here: {message}") as error:
        parse_json_object(text, "here")
    assert type(error.value) is ValueError
    assert len(str(error.value)) < 300


def test_the_deepest_document_and_one_that_only_looks_deep():
    assert parse_json_object(nested(MAX_JSON_DEPTH), "here")
    text = json.dumps({"a": "[" * 1000 + '"{' * 1000 + "\\"})
    assert parse_json_object(text, "here") == json.loads(text)


def test_depth_does_not_depend_on_the_recursion_limit():
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    try:
        with pytest.raises(ValueError, match="nested deeper than 64"):
            parse_json_object("[" * 1_000_000, "here")
    finally:
        sys.setrecursionlimit(before)


def test_strings_that_do_not_end_take_linear_time():
    for text in ('{"a": "' + "\\" * 2_000_001, '{"a": "' + '\\"' * 1_000_000, '"' * 1_000_001):
        with pytest.raises(ValueError, match="damaged JSON"):
            parse_json_object(text, "here")


def test_size_is_bounded_in_bytes():
    text = json.dumps({"a": "\u00e9" * 10}, ensure_ascii=False)
    assert parse_json_object(text, "here", max_bytes=29)
    for data in (text, text.encode()):
        with pytest.raises(ValueError, match="here: wanted JSON of at most 28 bytes, got 29"):
            parse_json_object(data, "here", max_bytes=28)
    with pytest.raises(ValueError, match="wanted JSON of at most 100000000 bytes"):
        parse_json_object(b" " * (MAX_JSON_BYTES + 1), "here")


def test_infinity_is_allowed_on_request():
    value = parse_json_object('{"a": [0.0, Infinity, 1e999]}', "here", allow_infinity=True)
    assert value == {"a": [0.0, float("inf"), float("inf")]}


@pytest.mark.parametrize("value", [0, 9, True, 4.0, "4", None, 10**400, float("nan")], ids=range(8))
def test_check_int(value):
    assert check_int("bits", 4, low=1, high=8) == 4
    with pytest.raises(ValueError, match="bits must be an integer from 1 to 8, got "):
        check_int("bits", value, low=1, high=8)


@pytest.mark.parametrize(
    "value",
    [True, "1", None, float("nan"), float("inf"), 10**400, -(10**5000), 1e39],
    ids=range(8),
)
def test_check_number(value):
    assert check_number("offset", 3) == 3.0
    assert check_number("offset", -FLOAT32_MAX) == -FLOAT32_MAX
    with pytest.raises(ValueError, match=r"offset must be a number from -3\.40"):
        check_number("offset", value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([3], "must be 2 integers of 1 or more"),
        ([3, 4, 5], "must be 2 integers of 1 or more"),
        ([3, 0], "must be 2 integers of 1 or more"),
        ([3, True], "must be 2 integers of 1 or more"),
        ([3, 4.0], "must be 2 integers of 1 or more"),
        ("34", "must be 2 integers of 1 or more"),
        ({3: 4}, "must be 2 integers of 1 or more"),
        (None, "must be 2 integers of 1 or more"),
        ([3, 5], "must have at most 12 elements"),
        ([10**5000, 1], "must have at most 12 elements"),
        ([1 << 62, 1 << 62], "must have at most 12 elements"),
    ],
    ids=range(11),
)
def test_check_shape(value, message):
    assert check_shape("shape", [3, 4], ndim=2, max_numel=12) == (3, 4)
    with pytest.raises(ValueError, match=f"shape {message}"):
        check_shape("shape", value, ndim=2, max_numel=12)


def test_sizes_beside_a_size_of_zero_are_bounded():
    assert check_shape("shape", (0, 4), ndim=2, low=0, max_numel=12) == (0, 4)
    assert check_shape("shape", [], ndim=0) == ()
    with pytest.raises(ValueError, match="at most 12 elements"):
        check_shape("shape", [0, 13], ndim=2, low=0, max_numel=12)
    with pytest.raises(ValueError, match=f"at most {INT64_MAX} elements"):
        check_shape("shape", [0, 1 << 62, 4], ndim=3, low=0)


def test_read_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "fifo")
    assert read_file(path, max_bytes=5) == read_file(tmp_path / "link") == b"12345"
    with pytest.raises(ValueError, match="file: wanted at most 4 bytes, got more"):
        read_file(path, max_bytes=4)
    with pytest.raises(ValueError, match="wanted a file, got a folder"):
        read_file(tmp_path)
    with pytest.raises(ValueError, match="fifo: wanted a regular file, got a FIFO"):
        read_file(tmp_path / "fifo")
    with pytest.raises(ValueError, match="wanted a regular file, got a device"):
        read_file("/dev/zero")
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none")
    with pytest.raises(OSError, match="link"):
        read_file(tmp_path / "link", follow_links=False)
