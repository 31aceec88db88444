"""Timing in turns, with a clock that is told how long each call takes."""

from contextlib import nullcontext

import pytest
import torch

from fdk_bench import timing
from fdk_bench.timing import summarise, time_calls


@pytest.fixture
def clock(monkeypatch):
    """A clock that only ``clock.spend`` moves."""

    class Clock:
        now = 0.0

        def spend(self, seconds):
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    return clock


def test_summarise():
    done = summarise([4.0, 1.0, 2.0, 3.0, 10.0], "calls")
    # Quartiles 1.5 and 7 (exclusive method), half their distance over the median of 3.
    assert (done.median, done.minimum, done.samples) == (3.0, 1.0, 5)
    assert done.spread == pytest.approx(2.75 / 3)
    assert summarise([2.0], "graph", eager=5.0).spread == 0
    assert summarise([2.0], "graph", eager=5.0).eager == 5.0


def test_copies_rotate_and_contenders_take_turns(clock):
    seen = []

    def call(name):
        return lambda: (seen.append(name), clock.spend(1.0))

    calls = [[call("a0"), call("a1"), call("a2")], [call("b0")]]
    a, b = time_calls(calls, seconds=0, inner=2, outer=2, probe=lambda: seen.append("probe"))
    warm = ["a0", "a1", "a2", "b0", "b0"]  # each at least once
    assert seen == [*warm, "probe", "a0", "a1", "b0", "b0", "probe", "a2", "a0", "b0", "b0"]
    assert (a.samples, b.samples, a.median) == (4, 4, 1.0)


def test_each_turn_ends_with_a_rest(clock):
    seen = []

    def call(name):
        return lambda: (seen.append(name), clock.spend(1.0))

    rests = [lambda: seen.append("rest a"), lambda: seen.append("rest b")]
    time_calls([[call("a")], [call("b")]], seconds=0, inner=2, outer=1, rests=rests)
    assert seen == ["a", "a", "rest a", "b", "b", "rest b"] * 2


def test_warm_up_is_not_counted(clock):
    cost = iter([100.0, *[1.0] * 99])
    (only,) = time_calls([[lambda: clock.spend(next(cost))]], seconds=0, inner=1, outer=3)
    assert (only.minimum, only.median, only.samples) == (1.0, 1.0, 3)


def test_seconds_end_a_run(clock):
    (only,) = time_calls([[lambda: clock.spend(0.25)]], seconds=10.0, inner=4)
    assert only.samples == 40
    (short,) = time_calls([[lambda: clock.spend(0.25)]], seconds=0.1, inner=4)
    assert short.samples == 4 * timing.FEWEST_TURNS


def test_one_that_raises_does_not_stop_the_others(clock):
    left = [3]

    def fails():
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("no")

    broken, fine = time_calls([[fails], [lambda: clock.spend(1.0)]], seconds=0, inner=2, outer=3)
    assert isinstance(broken, RuntimeError)
    assert fine.samples == 6


@pytest.mark.parametrize("copies", [1, 40])
def test_no_eager_sample_is_a_first_call(copies, clock, monkeypatch):
    """Of any copy: what is packed or looked up then would be counted as the host's work."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", nullcontext)

    def call():
        cost = iter([100.0, *[1.0] * 99])
        return lambda: clock.spend(next(cost))

    _, count, eager = timing._capture([call() for _ in range(copies)], 40)
    assert (count, eager) == (40, 1.0)
