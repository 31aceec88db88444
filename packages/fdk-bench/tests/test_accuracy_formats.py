"""Formats of the accuracy benchmark, and the texts that come with it."""

import re
from pathlib import Path

import pytest

from fdk_bench.accuracy import (
    BASELINE,
    DEFAULT_FORMATS,
    PACKAGED,
    SKIP_POOLER_AND_HEAD,
    CalibrationText,
    parse_formats,
    read_texts,
)
from fdk_bench.text_models import EVAL_TEXT
from fdk_formats.model import DEFAULT_SKIP


def test_default_formats_cover_every_width():
    formats = parse_formats(DEFAULT_FORMATS)
    for bits in (1, 2, 3, 4, 8):
        assert {f"{book}{bits}-g64" for book in ("kmeans", "int", "uniform")} <= set(formats)
    assert formats[0] == BASELINE


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
    sentences = EVAL_TEXT.read_text("utf-8").splitlines()
    assert len(set(sentences)) == len(sentences) == 32
    # Recorded numbers are for these sentences, and the text below.
    assert sum(map(len, sentences)) == 2247


def test_packaged_text_is_fixed():
    found = read_texts([Path(PACKAGED)]).paragraphs
    assert (len(found), sum(map(len, found))) == (29, 5478)


def test_the_pooler_and_what_quantise_model_leaves_are_left():
    left = ("pooler.dense", "lm_head", "model.lm_head")
    assert all(re.search(SKIP_POOLER_AND_HEAD, name) for name in left)
    assert not re.search(SKIP_POOLER_AND_HEAD, "lm_head.dense")
    assert DEFAULT_SKIP in SKIP_POOLER_AND_HEAD
