"""Timing calls in turns: on a CPU one by one, on a GPU as replays of CUDA graphs."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

# CPU: calls of one contender before the next has its turn.
CALLS_PER_TURN = 8
FEWEST_TURNS = 3
# GPU: a shorter graph would show the cost of starting it. Of calls that are long for the host fewer
# do: by the times of docs/results/h200/compare-8192x8192.jsonl graphs of theirs take 0.3 ms at
# least, and those of 40 short calls 0.36.
FEWEST_CAPTURED = 40
FEWEST_LONG = 8
LONG_ENOUGH = 2e-3  # seconds of as many eager calls
REPLAYS = 15
WARM_REPLAYS = 2
EAGER_CALLS = 30


@dataclass(frozen=True)
class Timing:
    """Seconds of one call.

    Attributes:
        median: over the samples.
        minimum: of them.
        spread: half the distance between the quartiles, as a share of the median.
        samples: how many there were: calls on a CPU, replays on a GPU.
        eager: median of calls timed by the host one by one, its own work included; None on a CPU,
            where ``median`` is that.
        method: ``calls`` or ``graph``.
    """

    median: float
    minimum: float
    spread: float
    samples: int
    eager: float | None = None
    method: str = "calls"


def summarise(samples: Sequence[float], method: str, eager: float | None = None) -> Timing:
    """The statistics of some samples, at least one."""
    quartiles = statistics.quantiles(samples, n=4) if len(samples) > 1 else [samples[0]] * 3
    median = statistics.median(samples)
    spread = (quartiles[2] - quartiles[0]) / 2 / median
    return Timing(median, min(samples), spread, len(samples), eager, method)


def time_calls(
    contenders: Sequence[Sequence[Call]],
    *,
    seconds: float,
    inner: int | None = None,
    outer: int | None = None,
    probe: Call = lambda: None,
    rests: Sequence[Call] | None = None,
) -> list[Timing | Exception]:
    """Times each contender's calls one by one, the contenders taking turns.

    Turns share the noise of the machine: a slow second is slow for all. A contender cycles through
    its calls, one for each copy of its weight. One that raises gives its error, the others go on.

    Args:
        seconds: for all turns together, about; ignored where ``outer`` is given.
        inner: calls of a contender in one turn.
        outer: turns.
        probe: called before each turn, to measure the machine.
        rests: for each contender, what ends its turn: stops threads that would spin on.
    """
    inner = inner or CALLS_PER_TURN
    samples: list[list[float]] = [[] for _ in contenders]
    errors: dict[int, Exception] = {}
    turn = -1  # the turn before the first warms up: every call once, for some pack then
    end = 0.0
    while turn < (outer or FEWEST_TURNS) or (outer is None and time.perf_counter() < end):
        if turn == 0:
            end = time.perf_counter() + seconds
        if turn >= 0:
            probe()
        for i, calls in enumerate(contenders):
            if i in errors:
                continue
            count = inner if turn >= 0 else max(inner, len(calls))
            try:
                series = _timed(calls, max(turn, 0) * inner, count)
            except Exception as error:  # of somebody's kernel: a row of its own
                errors[i] = error
            else:
                samples[i] += series if turn >= 0 else []
            if rests is not None:
                rests[i]()
        turn += 1
    return [errors.get(i) or summarise(series, "calls") for i, series in enumerate(samples)]


def time_graphs(
    contenders: Sequence[Sequence[Call]], *, inner: int | None = None, outer: int | None = None
) -> list[Timing | Exception]:
    """Times each contender's calls as replays of one CUDA graph, the contenders taking turns.

    A graph holds every call at least once, so that a rotated weight is cold again when its turn
    comes.

    Args:
        inner: calls in a graph at least; None for 40, or fewer that take the host 2 ms, 8 at least.
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


def _timed(calls: Sequence[Call], first: int, count: int) -> list[float]:
    series = []
    for i in range(first, first + count):
        call = calls[i % len(calls)]
        start = time.perf_counter()
        call()
        series.append(time.perf_counter() - start)
    return series


def _capture(
    calls: Sequence[Call], fewest: int | None = None
) -> tuple[torch.cuda.CUDAGraph, int, float]:
    """A graph of all calls, their number in it, and the seconds of an eager one."""
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
