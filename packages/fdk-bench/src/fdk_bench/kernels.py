"""Measure kernels: shape by shape, contenders in turns, each checked before it is timed."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from fdk_bench.cases import DTYPES, KernelCase
from fdk_bench.peers.base import Peer, Prepared, check
from fdk_bench.peers.dense import Dense, Fdk
from fdk_bench.roofline import Floor, read_floor
from fdk_bench.rows import Row
from fdk_bench.timeout import time_limit
from fdk_bench.timing import CutShortError, Timing, time_calls, time_graphs

SECONDS_PER_CASE = 0.5  # on a CPU; on a GPU replays are counted


@dataclass(frozen=True)
class KernelValues:
    """Measurements of a case. Times are seconds of one call, rates are per second.

    Attributes:
        backend: the backend that ``auto`` chose, or the peer.
        bits_per_weight: scales and zero points included, the codebook not.
        weight_bytes: bytes of one copy of the weight.
        bytes: weight, x and y, each once.
        operations: 2 m n k.
        error: against the exact product with its own weight, normalised RMSE.
        time: median.
        time_min: the shortest sample.
        spread: half the distance between the quartiles over the median.
        samples: calls timed, or replays of a graph.
        method: ``turns`` of calls timed one by one, or a CUDA ``graph`` over all copies.
        eager_time: time of one call started by the host; None where ``time`` is that.
        copies: number of copies of the weight, used in turn.
        bandwidth: bytes over time.
        throughput: operations over time.
        floor: time to read ``bytes`` once on this machine, measured in this run.
        floor_share: floor over time.
        speedup_16: over torch's layer that is not quantised; None where that was not measured.
        best_peer: the fastest peer with these bits and group size in this run, or None.
        speedup_peer: over that peer.
    """

    backend: str
    bits_per_weight: float
    weight_bytes: int
    bytes: int
    operations: int
    error: float
    time: float
    time_min: float
    spread: float
    samples: int
    method: str
    eager_time: float | None
    copies: int
    bandwidth: float
    throughput: float
    floor: float
    floor_share: float
    speedup_16: float | None = None
    best_peer: str | None = None
    speedup_peer: float | None = None


KernelRow = Row[KernelCase, KernelValues]


@dataclass(frozen=True)
class KernelRun:
    """Cases to measure: every shape with every m, format and contender.

    Attributes:
        shapes: (n, k).
        ms: rows of x.
        formats: short forms, and a name of ``DTYPES`` for the weight that is not quantised.
        dtype, device: see ``KernelCase``.
        backends: backends of fdk, for every quantised format.
        activations: activations of fdk's backends, see ``KernelCase``.
        peers: other projects' kernels to measure in the same turns.
        include, exclude: regular expressions searched in the text of a case.
        copies, inner, outer: see ``timing``; None chooses.
        seconds: time for one case, on a CPU.
        peer_seconds: time limit for preparing a peer; None waits.
    """

    shapes: Sequence[tuple[int, int]]
    ms: Sequence[int]
    formats: Sequence[str]
    dtype: str
    device: str
    backends: Sequence[str] = ("auto",)
    activations: Sequence[str] = ("float",)
    peers: Sequence[Peer] = ()
    include: str = ""
    exclude: str | None = None
    copies: int | None = None
    inner: int | None = None
    outer: int | None = None
    seconds: float = SECONDS_PER_CASE
    peer_seconds: float | None = None

    def contenders(self, n: int, k: int) -> list[tuple[list[KernelCase], Peer]]:
        """Return the contenders of a shape, each with its cases: one for every m included."""
        found: list[tuple[list[KernelCase], Peer]] = []
        for format in self.formats:
            case = KernelCase(0, n, k, format, self.dtype, self.device, Dense.name)
            if case.quantised is None:
                contenders: list[tuple[KernelCase, Peer]] = [(case, Dense())]
            else:
                contenders = [
                    (replace(case, backend=name, activations=activations), Fdk())
                    for name in self.backends
                    for activations in self.activations
                ]
            peers = [peer for peer in self.peers if _takes(peer, case)]
            contenders += [(replace(case, backend=peer.name), peer) for peer in peers]
            for case, contender in contenders:
                cases = [replace(case, m=m) for m in self.ms]
                if cases := [case for case in cases if self._included(str(case))]:
                    found.append((cases, contender))
        return found

    def _included(self, text: str) -> bool:
        if not re.search(self.include, text):
            return False
        return self.exclude is None or not re.search(self.exclude, text)

    def cases(self) -> list[KernelCase]:
        """Return the case of each row."""
        return [
            case for n, k in self.shapes for cases, _ in self.contenders(n, k) for case in cases
        ]

    def unfinished(self, measured: Collection[KernelCase]) -> list[KernelCase]:
        """Return the cases to measure where some have been: whole turns, which are compared."""
        cases = self.cases()
        turns = {(c.n, c.k, c.m) for c in cases if c not in measured}
        return [case for case in cases if (case.n, case.k, case.m) in turns]


def absent(run: KernelRun) -> dict[str, str]:
    """Return the peers that no case of a run measures, each with its first reason."""
    reasons = {}
    for peer in run.peers:
        cases = [
            KernelCase(1, n, k, format, run.dtype, run.device, peer.name)
            for n, k in run.shapes
            # Quantised formats first: most peers' reasons are about those.
            for format in sorted(run.formats, key=lambda format: format in DTYPES)
        ]
        if not any(_takes(peer, case) for case in cases):
            against = (_unsupported(peer, case) for case in cases)
            reasons[peer.name] = peer.missing() or next(filter(None, against), "no case")
    return reasons


def _takes(peer: Peer, case: KernelCase) -> bool:
    # Only for peers: a case that fdk does not support is a row with the error.
    return peer.missing() is None and _unsupported(peer, case) is None


def _unsupported(peer: Peer, case: KernelCase) -> str | None:
    """Return why a peer does not support a case; no peer supports groups that do not divide k."""
    try:
        if case.quantised is not None:
            case.quantised.group_size_for(case.k)
    except ValueError as error:
        return str(error)
    return peer.unsupported(case)


def contender_of(case: KernelCase) -> Peer:
    """Return the peer that a case names; else torch for 16 bits, and fdk for the rest."""
    from fdk_bench.peers import PEERS

    default = Dense() if case.quantised is None else Fdk()
    return next((peer for peer in PEERS if peer.name == case.backend), default)


def measure(
    run: KernelRun,
    on_step: Callable[[str], None] = lambda text: None,
    measured: Collection[KernelCase] = (),
) -> Iterator[KernelRow]:
    """Yield rows as they are measured, those of one shape and m together.

    Args:
        run: what to measure.
        on_step: called with a text before each contender is prepared and each m is timed.
        measured: cases that have been measured; see ``KernelRun.unfinished``.
    """
    todo = {(case.n, case.k, case.m) for case in run.unfinished(measured)}
    if not todo:
        return
    floor = read_floor(run.device)
    for n, k in run.shapes:
        if ms := [m for m in run.ms if (n, k, m) in todo]:
            yield from _measure_shape(replace(run, ms=ms), floor, n, k, on_step)


@dataclass(frozen=True, eq=False)
class _Checked:
    """A contender that passed the check, with its errors by m."""

    cases: Sequence[KernelCase]
    prepared: Prepared
    errors: dict[int, float]


def _measure_shape(
    run: KernelRun, floor: Floor, n: int, k: int, on_step: Callable[[str], None]
) -> Iterator[KernelRow]:
    torch.compiler.reset()  # code of the last shape counts towards limits
    inputs: dict[int, Tensor] = {}
    refused: dict[int, str] = {}
    for m in run.ms:
        try:
            inputs[m] = _input(run, m, k)
        except Exception as error:  # x does not fit into memory
            refused[m] = _text(error)
    checked: list[_Checked] = []
    for asked, contender in run.contenders(n, k):
        yield from (Row(case, error=refused[case.m]) for case in asked if case.m in refused)
        cases = [case for case in asked if case.m in inputs]
        if not cases:
            continue
        on_step(f"{cases[0].format} {cases[0].backend} {n}x{k}")
        limit = run.peer_seconds if contender in run.peers else None
        try:
            with time_limit(limit, "packing, compiling and checking"):
                prepared = contender.prepare(cases[0], run.copies)
                with torch.inference_mode():
                    errors = check(prepared, [inputs[case.m] for case in cases])
        except Exception as error:  # another project's kernel; the run goes on
            yield from (Row(case, error=_text(error)) for case in cases)
        else:
            by_m = {case.m: e for case, e in zip(cases, errors, strict=True)}
            checked.append(_Checked(cases, prepared, by_m))
    for m, x in inputs.items():
        on_step(f"m={m} {n}x{k}")
        yield from _measure_turns(run, floor, x, checked)


def _measure_turns(
    run: KernelRun, floor: Floor, x: Tensor, checked: Sequence[_Checked]
) -> Iterator[KernelRow]:
    """Time every contender on one x, in turns.

    Raises:
        CutShortError: after yielding the rows of turns that Ctrl-C cut short.
    """
    m = x.shape[0]
    timed = [(case, r) for r in checked for case in r.cases if case.m == m]
    calls = [[partial(call, x) for call in r.prepared.calls] for _, r in timed]
    floor.begin()
    cut: CutShortError | None = None
    timings: list[Timing | Exception]
    with torch.inference_mode():
        if torch.device(run.device).type == "cuda":
            timings = time_graphs(calls, inner=run.inner, outer=run.outer)
        else:
            seconds = run.seconds * len(calls)
            try:
                timings = time_calls(
                    calls,
                    seconds=seconds,
                    inner=run.inner,
                    outer=run.outer,
                    probe=floor.probe,
                    rests=[r.prepared.rest for _, r in timed],
                    places=[r.prepared.place for _, r in timed],
                )
            except CutShortError as error:
                timings, cut = error.timings, error
    rows: list[KernelRow] = []
    for (case, r), timing in zip(timed, timings, strict=True):
        if isinstance(timing, Exception):
            rows.append(Row(case, error=_text(timing)))
        else:
            rows.append(Row(case, _values(case, r, timing, floor)))
    yield from with_speedups(rows, {peer.name for peer in run.peers})
    if cut is not None:
        raise cut


def _values(case: KernelCase, r: _Checked, timing: Timing, floor: Floor) -> KernelValues:
    prepared = r.prepared
    nbytes = prepared.nbytes + case.activation_bytes
    seconds = floor.seconds(nbytes)
    return KernelValues(
        backend=prepared.backend,
        bits_per_weight=(prepared.nbytes - prepared.codebook_bytes) * 8 / (case.n * case.k),
        weight_bytes=prepared.nbytes,
        bytes=nbytes,
        operations=case.operations,
        error=r.errors[case.m],
        time=timing.median,
        time_min=timing.minimum,
        spread=timing.spread,
        samples=timing.samples,
        method=timing.method,
        eager_time=timing.eager,
        copies=len(prepared.calls),
        bandwidth=nbytes / timing.median,
        throughput=case.operations / timing.median,
        floor=seconds,
        floor_share=seconds / timing.median,
    )


def with_speedups(rows: Sequence[KernelRow], peers: Collection[str]) -> list[KernelRow]:
    """Add the speed-ups over the 16-bit layer and the best peer to rows of one shape and m."""
    times = {row.case: row.values.time for row in rows if row.values is not None}
    dense = [time for case, time in times.items() if case.backend == Dense.name]
    result = []
    for row in rows:
        if row.values is None or row.case.backend == Dense.name:
            result.append(row)
            continue
        rivals = {
            case.backend: time
            for case, time in times.items()
            if case.backend in peers
            and (case.bits, case.group_size) == (row.case.bits, row.case.group_size)
        }
        rivals.pop(row.case.backend, None)
        best = min(rivals, key=rivals.__getitem__, default=None)
        values = replace(
            row.values,
            speedup_16=min(dense) / row.values.time if dense else None,
            best_peer=best,
            speedup_peer=None if best is None else rivals[best] / row.values.time,
        )
        result.append(Row(row.case, values))
    return result


def stored_bits(rows: Sequence[KernelRow], backend: str) -> str:
    """Describe what a backend stores for each weight, scales included; empty without rows."""
    measured = [row.values for row in rows if row.values and row.case.backend == backend]
    bits = sorted({values.bits_per_weight for values in measured})
    return f"{', '.join(f'{b:.4g}' for b in bits)} bits per weight" if bits else ""


def _input(run: KernelRun, m: int, k: int) -> Tensor:
    generator = torch.Generator(run.device).manual_seed(m)
    case = KernelCase(m, 1, k, run.dtype, run.dtype, run.device, "")
    x = torch.randn(m, k, device=run.device, generator=generator)
    return x.to(case.torch_dtype)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
