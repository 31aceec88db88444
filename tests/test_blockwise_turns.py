"""Which calls of the blockwise benchmark count, with a clock that is told how long each takes."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "packages/fdk-formats/benchmarks/blockwise.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes, which the script times")
    spec = importlib.util.spec_from_file_location("blockwise_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("first", "others", "calls", "counted"),
    [
        # By hand: 1 + 11 calls of 1 ms fill the most of a turn; the first four settle.
        (3e-3, 1e-3, 12, 8),
        # 30 and 20 ms are 50 ms.
        (30e-3, 20e-3, 2, 1),
        # Fresh memory, which may cost more than a second: never among those that count.
        (1.05, 0.1, 2, 1),
        (6.0, 6.0, 2, 1),
    ],
)
def test_the_first_call_of_a_turn_does_not_count(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    first: float,
    others: float,
    calls: int,
    counted: int,
) -> None:
    now = 0.0
    costs = iter([first, *[others] * 20])

    def run() -> None:
        nonlocal now
        now += next(costs)

    monkeypatch.setattr(script.time, "perf_counter", lambda: now)
    turn = script.turn_of(run)
    assert len(turn) == calls
    assert script.counted(turn) == pytest.approx([others] * counted)


def test_turns_end_when_each_has_its_seconds(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: of 200 ms a call, five that count are a second; of 2 s three turns are enough."""
    now = 0.0

    def taking(seconds: float):
        def run() -> None:
            nonlocal now
            now += seconds

        return run

    monkeypatch.setattr(script.time, "perf_counter", lambda: now)
    turns = script.turns_of({"a": taking(0.25), "b": taking(2.0), "c": taking(1e-3)}, 1.0)
    assert {name: len(series) for name, series in turns.items()} == {"a": 4, "b": 3, "c": 25}
