"""Timing in turns, with a clock that tests move."""

from contextlib import nullcontext

import pytest
import torch

from fdk_bench import timing
from fdk_bench.roofline import SMALLEST, GpuFloor, neighbours
from fdk_bench.timing import CutShortError, summarise, time_calls


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
    assert seen[:5] == ["a0", "a1", "a2", "b0", "b0"]  # each at least once
    assert seen[5] == seen[10] == "probe"
    turns = [seen[i : i + 2] for i in (6, 8, 11, 13)]
    assert turns.count(["b0", "b0"]) == 2
    assert [turn for turn in turns if turn != ["b0", "b0"]] == [["a0", "a1"], ["a2", "a0"]]
    assert (a.samples, b.samples, a.median) == (4, 4, 1.0)


@pytest.mark.parametrize(
    ("last", "outer", "kept"), [(24, None, True), (23, None, False), (24, 50, False)]
)
def test_ctrl_c_after_turns_enough(last, outer, kept, clock):
    """A short run has three turns of eight calls."""
    calls = {"a": 0, "b": 0}

    def call(name):
        # After 8 calls of warm-up and 4 in each turn that are not counted.
        if name == "b" and calls["b"] == 8 + 3 * 4 + last:
            raise KeyboardInterrupt
        calls[name] += 1
        clock.spend(1e-3)

    both = [[lambda name=name: call(name)] for name in "ab"]
    with pytest.raises(KeyboardInterrupt) as raised:
        time_calls(both, seconds=60, outer=outer)
    assert isinstance(raised.value, CutShortError) is kept
    if kept:
        a, b = raised.value.timings
        assert b.samples == 24
        assert a.samples in (24, 32)
        assert a.median == b.median == pytest.approx(1e-3)


def test_rounds_are_in_different_orders(clock):
    """In 60 rounds of three contenders every order occurs."""
    seen = []

    def call(name):
        return lambda: (seen.append(name), clock.spend(1.0))

    time_calls([[call(name)] for name in "abc"], seconds=0, inner=1, outer=60)
    rounds = ["".join(seen[i : i + 3]) for i in range(3, len(seen), 3)]
    assert len(rounds) == 60
    assert set(rounds) == {"abc", "acb", "bac", "bca", "cab", "cba"}


def test_the_first_calls_of_a_turn_do_not_count(clock):
    """The first 4 calls of a turn are not counted if calls take 1 ms."""
    seen = []

    def short():
        place = len(seen) - 8  # of the calls after the warm-up
        seen.append(place)
        clock.spend(1e-3 if place < 0 or place % 12 >= 4 else 3e-3)

    (only,) = time_calls([[short]], seconds=0, outer=2)
    assert len(seen) == 8 + 2 * (4 + 8)
    assert (only.samples, only.minimum, only.spread) == (16, pytest.approx(1e-3), 0)


def test_long_calls_have_shorter_turns_and_as_many_samples(clock):
    """Two calls of 20 ms make a turn of 50 ms, and none is left out."""
    seen = []

    def call(name, seconds):
        return lambda: (seen.append(name), clock.spend(seconds))

    long, short = time_calls([[call("l", 0.02)], [call("s", 1e-3)]], seconds=0)
    assert (long.samples, short.samples) == (24, 96)
    assert seen.count("l") == 8 + 24


def test_each_turn_ends_with_a_rest(clock):
    seen = []

    def call(name):
        return lambda: (seen.append(name), clock.spend(1.0))

    rests = [lambda: seen.append("rest a"), lambda: seen.append("rest b")]
    time_calls([[call("a")], [call("b")]], seconds=0, inner=2, outer=1, rests=rests)
    assert seen == ["a", "a", "rest a", "b", "b", "rest b"] * 2


def test_turns_run_where_a_contender_wants_them(clock):
    """Warm-up and turns run there as a whole, so no sample includes the switch."""
    seen = []

    def place(turn):
        clock.spend(5.0)
        seen.append("there")
        return turn()

    def call(name):
        return lambda: (seen.append(name), clock.spend(1.0))

    places = [place, timing.run_here]
    far, near = time_calls([[call("a")], [call("b")]], seconds=0, inner=2, outer=2, places=places)
    assert seen.count("there") == 3
    assert all(seen[i + 1 : i + 3] == ["a", "a"] for i, what in enumerate(seen) if what == "there")
    assert (far.samples, far.median, near.median) == (4, 1.0, 1.0)


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


def test_where_all_raise_there_are_no_rounds(clock):
    def fails():
        raise RuntimeError("no")

    broken, again = time_calls([[fails]] * 2, seconds=10.0, probe=lambda: clock.spend(1.0))
    assert (str(broken), str(again), clock.now) == ("no", "no", 0.0)


@pytest.mark.parametrize("copies", [1, 40])
def test_no_eager_sample_is_a_first_call(copies, clock, monkeypatch):
    """Packing, at the first call of a copy, does not count as host time of a call."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", nullcontext)

    def call():
        cost = iter([100.0, *[1.0] * 99])
        return lambda: clock.spend(next(cost))

    _, count, eager = timing._capture([call() for _ in range(copies)], 40)
    assert (count, eager) == (40, 1.0)


@pytest.mark.parametrize(("seconds", "count"), [(1e-6, 40), (100e-6, 20), (5e-3, 8)])
def test_a_graph_of_long_calls_holds_fewer(seconds, count, clock, monkeypatch):
    """A graph holds 2 ms of calls, at least 8: 2 ms / 100 us = 20."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", nullcontext)
    calls = [lambda: clock.spend(seconds)] * 2
    assert timing._capture(calls)[1] == count
    assert timing._capture(calls, 3)[1] == 4  # whole rounds of both


def test_floor_between_measured_sizes(monkeypatch):
    """20 MiB are in the octave of 16 MiB, whose steps are 1 MiB."""
    mib = 1 << 20
    assert neighbours(20 * mib) == (20 * mib, 20 * mib)
    assert neighbours(20 * mib + mib // 4) == (20 * mib, 21 * mib)
    assert neighbours(32 * mib - 1) == (31 * mib, 32 * mib)
    assert neighbours(1) == (SMALLEST, SMALLEST)
    assert neighbours(1 << 30) == (1 << 30, 1 << 30)
    measured = []
    monkeypatch.setattr(GpuFloor, "_measure", lambda _, size: measured.append(size) or size / 4e12)
    floor = GpuFloor.__new__(GpuFloor)
    floor._times = {}
    assert floor.seconds(20 * mib + mib // 4) == pytest.approx(20.25 * mib / 4e12)
    assert floor.seconds(20 * mib + mib // 2) == pytest.approx(20.5 * mib / 4e12)
    assert measured == [20 * mib, 21 * mib]
