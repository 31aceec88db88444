"""The benchmark scripts that the session `bench` runs."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A positional argument, its own or that of the `main` of _tables.py.
WANTS_A_FILE = re.compile(r'add_argument\("\w|^from _tables import .*\bmain\b', re.MULTILINE)


def test_scripts_of_bench_need_no_arguments(monkeypatch):
    pytest.importorskip("nox")
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    noxfile = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(noxfile)
    monkeypatch.chdir(ROOT)
    scripts = sorted(Path("packages").glob("*/benchmarks/[!_]*.py"))
    runs_alone = [s for s in scripts if not WANTS_A_FILE.search(s.read_text("utf-8"))]
    assert noxfile.benchmarks() == runs_alone
    assert Path("packages/fdk-cpu/benchmarks/gemv.py") in runs_alone
    assert len(scripts) - len(runs_alone) == 7
