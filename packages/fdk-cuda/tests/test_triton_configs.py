"""Configuration tables: every case has a configuration, and every row decides a case."""

import itertools

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from fdk_cuda.triton.configs.dgrad import DGRAD_TABLE
from fdk_cuda.triton.configs.gemm import DEQUANTISE_TABLE, GEMM_TABLE
from fdk_cuda.triton.configs.gemv import GEMV_TABLE
from fdk_cuda.triton.configs.table import Table

ARCHITECTURES = ("ampere", "hopper", "blackwell")
BITS, AFFINE = range(1, 9), (False, True)
FACTS = {
    "gemv": {
        "architecture": ARCHITECTURES,
        "bits": BITS,
        "affine": AFFINE,
        "rows": ("1-8", "9-16"),
        "outputs": ("few", "some", "many"),
    },
    "gemm": {"architecture": ARCHITECTURES, "bits": BITS, "rows": ("17-32", "33-64", "65-")},
    "dgrad": {
        "architecture": ARCHITECTURES,
        "bits": BITS,
        "affine": AFFINE,
        "rows": ("1-8", "9-16", "17-32", "33-"),
        "wide": (False, True),
    },
    "dequantise": {"bits": BITS, "affine": AFFINE},
}
TABLES = {
    "gemv": GEMV_TABLE,
    "gemm": GEMM_TABLE,
    "dgrad": DGRAD_TABLE,
    "dequantise": DEQUANTISE_TABLE,
}


@pytest.mark.parametrize("name", TABLES)
def test_every_row_decides(name: str) -> None:
    table: Table = TABLES[name]
    facts = FACTS[name]
    cases = [dict(zip(facts, values, strict=True)) for values in itertools.product(*facts.values())]
    found = {id(table.find(**case)) for case in cases}
    assert found == {id(config) for _, config in table.rows}


def test_no_row() -> None:
    with pytest.raises(LookupError, match=r"no configuration for .*'bits': 9"):
        GEMM_TABLE.find(bits=9, architecture="hopper", rows="65-")
