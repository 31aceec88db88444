import math
from dataclasses import replace

import pytest

from fdk_bench import qat_demo
from fdk_bench.qat_demo import Settings, measure, megabytes, width_of_equal_memory

TINY = Settings(width=32, layers=1, steps=20, batch=4, length=64)


@pytest.mark.parametrize("format", [None, "kmeans2-g32", "int1-g32"])
def test_a_model_learns(format):
    row = measure(format, 32, "size", TINY)
    assert row.bits_per_byte < 0.8 * math.log2(qat_demo.BYTES)
    assert row.format == (format or "bf16")


def test_equal_memory():
    for format in ("kmeans4-g32", "int1-g32"):
        width = width_of_equal_memory(format, Settings())
        assert width > Settings().width
        assert megabytes(width, 2, format) <= megabytes(64, 2, None)
        assert megabytes(width + qat_demo.HEAD, 2, format) > megabytes(64, 2, None)


def test_bytes_are_those_of_the_model():
    model = qat_demo.build(64, Settings())
    counted = sum(2 * p.numel() for p in model.parameters() if p.ndim == 2)
    assert megabytes(64, 2, None) == counted / 1e6


def test_processes_give_the_same_rows(monkeypatch):
    monkeypatch.setattr(qat_demo, "FORMATS", (None, "int1-g32"))
    one, two = (list(qat_demo.rows(TINY, processes)) for processes in (1, 2))
    assert [row.format for row in one] == ["bf16", "int1-g32", "int1-g32"]
    for row, other in zip(one, two, strict=True):
        assert replace(row, seconds=0) == replace(other, seconds=0)
