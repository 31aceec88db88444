"""Formats of the accuracy benchmark, and which of its rows are compared."""

import re
from pathlib import Path

import pytest

from fdk_bench.accuracy_cases import (
    BASELINE,
    DEFAULT_FORMATS,
    SKIP_POOLER_AND_HEAD,
    AccuracyCase,
    AccuracyValues,
    compare_calibrated,
    compare_kmeans,
    parse_formats,
)
from fdk_bench.calibration import PACKAGED, CalibrationText, read_texts
from fdk_bench.records import Row
from fdk_bench.sentences import SENTENCES
from fdk_formats.model import DEFAULT_SKIP


def values(weight_error):
    return AccuracyValues(1, 64, 4.25, 34, 100, weight_error, 0.1, 0.9, 0.8, 0.1, "reference")


def row(format, error=None, calibration=""):
    case = AccuracyCase(format, "m", "auto", "", 1, calibration)
    return Row(case, error="failed") if error is None else Row(case, values(error))


def test_default_formats_cover_every_compared_width():
    formats = parse_formats(DEFAULT_FORMATS)
    for bits in (1, 2, 3, 4, 8):
        assert {f"{book}{bits}-g64" for book in ("kmeans", "int", "uniform")} <= set(formats)
    assert formats[0] == BASELINE


def test_compare_kmeans():
    rows = [
        row(BASELINE, 0.001),
        row("kmeans4-g64", 0.09),
        row("kmeans4-g32", 0.08),  # no grid of its group size
        row("kmeans2-g64-search", 0.3),  # nor of its scale rule
        row("kmeans8-g64", 0.005),  # nor a width that is compared
        row("kmeans3-g64", 0.25),
        row("int4-g64", 0.12),
        row("uniform4-g64", 0.11),
        row("uniform2-g64", 0.5),
        row("uniform8-g64", 0.006),
        row("uniform3-g64"),  # failed
        row("int3-g64", 0.2),
    ]
    four, three = compare_kmeans(rows)
    assert (four.kmeans, four.uniform, four.uniform_error) == ("kmeans4-g64", "uniform4-g64", 0.11)
    assert four.holds
    assert (three.kmeans, three.uniform) == ("kmeans3-g64", "int3-g64")
    assert not three.holds


def test_compare_calibrated():
    rows = [row("kmeans4-g64", 0.1), row("kmeans4-g64", 0.12, "book"), row("int2-g64-search", 0.3)]
    rows.append(row("int4-g64-search", None, "book"))
    ((plain, weighed),) = compare_calibrated(rows)
    assert (plain.values.weight_error, weighed.values.weight_error) == (0.1, 0.12)


def test_parse_formats():
    asked = ["kmeans4", "kmeans4-g64", "bf16", "int2-search", "nf4-row"]
    expected = ["kmeans4-g32", "kmeans4-g64", "bf16", "int2-g32-search", "nf4-row"]
    assert parse_formats(asked, "32") == expected
    assert parse_formats(["kmeans4", "kmeans4-g64"]) == ["kmeans4-g64"]
    assert parse_formats(["int4"], "row") == ["int4-row"]
    with pytest.raises(ValueError, match=r"'int9': .* takes 1 to 8 bits, got 9"):
        parse_formats(["int9"])


def test_read_texts(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("a b\nc\n\n\n  d\n")
    two.write_text("\n")
    assert read_texts([one, two]) == CalibrationText("one, two", ["a b c", "d"])
    with pytest.raises(ValueError, match="two has none"):
        read_texts([two])
    with pytest.raises(ValueError, match="wanted a UTF-8 text file"):
        read_texts([tmp_path / "absent"])


def test_sentences_are_thirty_two_and_differ():
    assert len(set(SENTENCES)) == len(SENTENCES) == 32


def test_packaged_text_is_fixed():
    """Recorded numbers are of this text: who changes it measures all of them anew."""
    found = read_texts([Path(PACKAGED)]).paragraphs
    assert (len(found), sum(map(len, found))) == (29, 5478)


def test_the_pooler_and_what_quantise_model_leaves_are_left():
    left = ("pooler.dense", "lm_head", "model.lm_head")
    assert all(re.search(SKIP_POOLER_AND_HEAD, name) for name in left)
    assert not re.search(SKIP_POOLER_AND_HEAD, "lm_head.dense")
    assert DEFAULT_SKIP in SKIP_POOLER_AND_HEAD
