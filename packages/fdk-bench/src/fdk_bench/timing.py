"""Time calls in turns: on a CPU one by one, on a GPU as replays of CUDA graphs."""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]
Turn = Callable[[], list[float]]  # runs the calls of a turn and returns the seconds that count

# CPU: calls of a contender per turn; fewer if they exceed TURN_SECONDS.
CALLS_PER_TURN = 8
TURN_SECONDS = 0.05
FEWEST_TURNS = 3
# The first calls of a turn find the caches full of another contender's code and are not counted:
# at 2 bits ours took 371, 257, 232, 220, 201, 198, 196 and 189 us by their place in a turn.
# Long calls are hardly affected, so all of them are counted.
SETTLING_CALLS = 4
SETTLING_SECONDS = 5e-3
# GPU: a shorter graph would show the cost of its launch. Long calls need fewer: 8 of at least
# 0.25 ms, or 40 short ones.
FEWEST_CAPTURED = 40
FEWEST_LONG = 8
LONG_ENOUGH = 2e-3  # seconds that the calls of a graph take eagerly
REPLAYS = 15
WARM_REPLAYS = 2
EAGER_CALLS = 30


@dataclass(frozen=True)
class Timing:
    """Seconds of one call.

    Attributes:
        median: median of the samples.
        minimum: minimum of the samples.
        spread: half the distance between the quartiles over the median.
        samples: number of them: calls on a CPU, replays on a GPU.
        method: ``turns`` of calls, a CUDA ``graph``, or ``steps`` of a model.
        eager: median of calls timed by the host one by one, its own work included; None on a CPU,
            where ``median`` is that.
    """

    median: float
    minimum: float
    spread: float
    samples: int
    method: str
    eager: float | None = None


class CutShortError(KeyboardInterrupt):
    """Ctrl-C after at least ``FEWEST_TURNS`` turns of every contender; holds their timings."""

    def __init__(self, timings: "list[Timing | Exception]") -> None:
        super().__init__()
        self.timings = timings


def summarise(samples: Sequence[float], method: str, eager: float | None = None) -> Timing:
    """Return the statistics of at least one sample."""
    quartiles = statistics.quantiles(samples, n=4) if len(samples) > 1 else [samples[0]] * 3
    median = statistics.median(samples)
    spread = (quartiles[2] - quartiles[0]) / 2 / median
    return Timing(median, min(samples), spread, len(samples), method, eager)


def run_here(turn: Turn) -> list[float]:
    """Run a turn in the thread of the caller."""
    return turn()


def time_calls(
    contenders: Sequence[Sequence[Call]],
    *,
    seconds: float,
    inner: int | None = None,
    outer: int | None = None,
    probe: Call = lambda: None,
    rests: Sequence[Call] | None = None,
    places: Sequence[Callable[[Turn], list[float]]] | None = None,
) -> list[Timing | Exception]:
    """Time each contender's calls one by one, the contenders taking turns.

    Turns share the noise of the machine: a slow second is slow for all. Each round is in another
    order, because the previous contender affects the next. A contender cycles through its calls,
    one per copy of its weight. One that raises returns its error; the others go on.

    Args:
        contenders: the calls of each contender.
        seconds: approximate time of all turns; ignored where ``outer`` is given.
        inner: calls of a turn that count; else as many as ``TURN_SECONDS`` hold,
            ``CALLS_PER_TURN`` at most.
        outer: number of turns.
        probe: called before each round, to measure the machine.
        rests: one function per contender, called after its turn to stop spinning threads.
        places: one function per contender, which runs its turns, warm-up included, for instance
            in a thread, so that no call includes the switch. ``run_here`` by default.

    Raises:
        CutShortError: on Ctrl-C after as many turns as a short run has, unless ``outer`` is given.
    """
    samples: list[list[float]] = [[] for _ in contenders]
    errors: dict[int, Exception] = {}
    turns = [_Turns(calls, inner) for calls in contenders]
    order = list(range(len(contenders)))
    shuffle = random.Random(0).shuffle  # the same orders in each run

    def take(i: int, turn: Turn) -> None:
        if i in errors:
            return
        try:
            samples[i] += turn() if places is None else places[i](turn)
        except Exception as error:  # another project's kernel; the error becomes a row
            errors[i] = error
        if rests is not None:
            rests[i]()

    for i in order:
        take(i, turns[i].warm_up)
    fewest = outer or max((turns[i].fewest for i in order if i not in errors), default=0)
    end = time.perf_counter() + (0.0 if outer else seconds)
    done = 0

    def timings() -> list[Timing | Exception]:
        return [errors.get(i) or summarise(series, "turns") for i, series in enumerate(samples)]

    try:
        while len(errors) < len(contenders) and (done < fewest or time.perf_counter() < end):
            probe()
            shuffle(order)
            for i in order:
                take(i, turns[i].timed)
            done += 1
    except KeyboardInterrupt:
        if done < fewest:
            raise
        raise CutShortError(timings()) from None
    return timings()


class _Turns:
    """The turns of one contender; each goes on with the call after the last one of the turn before.

    Args:
        calls: calls of the contender.
        inner: calls of a turn that count, or None.
    """

    def __init__(self, calls: Sequence[Call], inner: int | None) -> None:
        self._calls, self._inner = calls, inner
        self._next = 0
        self._settling, self._count = 0, inner or CALLS_PER_TURN

    @property
    def fewest(self) -> int:
        """Turns that give as many samples as short calls have in ``FEWEST_TURNS``."""
        wanted = FEWEST_TURNS * (self._inner or CALLS_PER_TURN)
        return -(-wanted // self._count)

    def warm_up(self) -> list[float]:
        """Run every call once, since some pack at first, and choose the length of a turn."""
        series = self._run(max(self._count, len(self._calls)))
        self._next = 0
        shortest = max(min(series), 1e-9)
        self._settling = min(SETTLING_CALLS, int(SETTLING_SECONDS / shortest))
        if self._inner is None:
            self._count = max(1, min(CALLS_PER_TURN, int(TURN_SECONDS / shortest)))
        return []

    def timed(self) -> list[float]:
        """Run a turn; return the seconds of the calls that count."""
        self._run(self._settling)
        return self._run(self._count)

    def _run(self, count: int) -> list[float]:
        series = []
        for _ in range(count):
            call = self._calls[self._next % len(self._calls)]
            self._next += 1
            start = time.perf_counter()
            call()
            series.append(time.perf_counter() - start)
        return series


def time_graphs(
    contenders: Sequence[Sequence[Call]], *, inner: int | None = None, outer: int | None = None
) -> list[Timing | Exception]:
    """Time each contender's calls as replays of one CUDA graph, the contenders taking turns.

    A graph holds every call at least once, so that a rotated weight is cold again when its turn
    comes.

    Args:
        contenders: the calls of each contender.
        inner: least calls of a graph; None for 40, or fewer that take the host 2 ms, 8 at least.
        outer: replays.
    """
    graphs: list[tuple[torch.cuda.CUDAGraph, int, float] | Exception] = []
    for calls in contenders:
        try:
            graphs.append(_capture(calls, inner))
        except Exception as error:  # see time_calls
            graphs.append(error)
    samples: list[list[float]] = [[] for _ in contenders]
    for replay in range(WARM_REPLAYS + (outer or REPLAYS)):
        for captured, series in zip(graphs, samples, strict=True):
            if not isinstance(captured, Exception):
                graph, count, _ = captured
                seconds = _gpu_seconds(graph.replay) / count
                series += [seconds] if replay >= WARM_REPLAYS else []
    return [
        captured
        if isinstance(captured, Exception)
        else summarise(series, "graph", eager=captured[2])
        for captured, series in zip(graphs, samples, strict=True)
    ]


def _capture(
    calls: Sequence[Call], fewest: int | None = None
) -> tuple[torch.cuda.CUDAGraph, int, float]:
    """Return a graph of all calls, the number of calls in it, and the seconds of an eager one."""
    for call in calls[:EAGER_CALLS]:  # compiles and tunes; no eager sample is a copy's first call
        call()
    torch.cuda.synchronize()
    eager = statistics.median(_gpu_host_seconds(calls[i % len(calls)]) for i in range(EAGER_CALLS))
    if fewest is None:
        fewest = min(FEWEST_CAPTURED, max(FEWEST_LONG, math.ceil(LONG_ENOUGH / eager)))
    rounds = -(-fewest // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph, rounds * len(calls), eager


def _gpu_seconds(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _gpu_host_seconds(call: Call) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start
