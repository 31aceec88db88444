"""Times the Hopper kernel on a cool and on a hot chip, and makes the documents' tables of it.

    python packages/fdk-cuda/benchmarks/marlin_hopper.py time rows.jsonl --goals goals.jsonl \\
        [--humming] [--signs] [--job 4:0,1:64,256 --job 8:1]
    python packages/fdk-cuda/benchmarks/marlin_hopper.py table rows.jsonl [--fill F ...]

Each case is checked first, as in marlin.py. `pdl` is with programmatic dependent launch, `plain`
without, `cublas` the product with a bf16 weight; their replays take turns, first after a pause
("cool"), then after as long of cuBLAS ("hot"). With `--humming` its kernel for integers of as many
bits takes its turn too, where the package is there. tests/test_hopper_table.py holds the
documents to the rows.
"""

import argparse
import itertools
import operator
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _floor import product_floor
from _rows import write_rows
from _tables import (
    Row,
    filled,
    goals_met,
    least_to_most,
    markdown,
    over_goals,
    read_goals,
    read_rows,
)
from marlin import COLD_BYTES, SHAPES, Run, Weights, dense_runs, graph_times, line_of
from marlin_rows import heat

from fdk_bench.cases import KernelCase
from fdk_bench.peers import Prepared, check
from fdk_bench.peers.packages import Humming

PAUSE, REPLAYS = 0.25, 9  # seconds
MARKS = "†‡§"  # of the commits of older rows, the oldest first
Width = tuple[int, str]
OF_4_BITS: Width = (4, "codebook")
# What is bound alike, as docs/results/h200/hopper.md tells it, by bits and rows of x.
CLASSES = {
    "1, 2 and 4 bits, m = 64": ((1, 2, 4), (64,)),
    "3 bits, m = 64": ((3,), (64,)),
    "8 bits, m = 64": ((8,), (64,)),
    "1, 2 and 4 bits, m = 256": ((1, 2, 4), (256,)),
    "1, 2 and 4 bits, m >= 1024": ((1, 2, 4), (1024, 4096)),
    "3 bits, m >= 256": ((3,), (256, 1024, 4096)),
    "8 bits, m >= 256": ((8,), (256, 1024, 4096)),
}


def time_shape(
    n: int,
    k: int,
    bits: int,
    ms: list[int],
    goals: dict[tuple[int, ...], float],
    kind: str = "codebook",
    *,
    with_humming: bool = False,
) -> Iterator[dict[str, object]]:
    """A row for each m, cool and hot."""
    humming = humming_of(n, k, bits) if with_humming else None
    weights = Weights.of(kind, bits, n, k)
    rounded = weights.rounded
    dense = [rounded.clone() for _ in range(COLD_BYTES // rounded.nbytes + 2)]
    for m in ms:
        x = torch.randn(m, k, device="cuda").to(torch.bfloat16)
        runs = [*weights.runs(x), dense_runs(weights.layout, weights.packed, dense, x)[0]]
        if humming is not None:
            runs.append(humming_run(humming, x))
        count = 8 if m * n * k > 1e11 else max(30, len(weights.packed))
        for chip in ("cool", "hot"):
            if chip == "cool":
                time.sleep(PAUSE)
            else:
                heat(PAUSE)
            pdl, plain, cublas, *peer = graph_times(runs, count, replays=REPLAYS)
            row = {"n": n, "k": k, "bits": bits, "m": m, "kind": kind, "chip": chip}
            row |= {"floor": product_floor(m, n, k, weights.bytes + x.nbytes)}
            row |= {"pdl": pdl, "plain": plain, "cublas": cublas}
            if peer:
                row["humming"] = peer[0]
            yield row | {"goal": goals.get((n, k, bits, m))}


def humming_of(n: int, k: int, bits: int) -> Prepared:
    """Weights of Humming, an integer grid of as many bits.

    Raises:
        SystemExit: the package is missing.
    """
    peer = Humming()
    if reason := peer.missing():
        raise SystemExit(f"--humming: {reason}")
    return peer.prepare(KernelCase(1, n, k, f"int{bits}-g64", "bf16", "cuda", peer.name))


def humming_run(prepared: Prepared, x: torch.Tensor) -> Run:
    """Checked once."""
    check(prepared, [x])
    calls = prepared.calls
    return lambda i: calls[i % len(calls)](x)


def table(rows: list[Row]) -> str:
    """A line for each shape, m and chip: microseconds by width, and over cuBLAS."""
    widths = widths_of(rows)
    heads = ["n x k", "m", "chip", "cuBLAS", *map(width_name, widths)]
    lines = [[*heads, "4 bits, no PDL", "goal at 4"], ["---"] * (len(heads) + 2)]
    marks = marks_of(rows)
    cases: dict[tuple[Any, ...], dict[Width, dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["n"], row["k"], row["m"], row["chip"]), {})[width_of(row)] = row
    for (n, k, m, chip), by_width in cases.items():
        told = by_width.get(OF_4_BITS) or next(iter(by_width.values()))
        line = [f"{n} x {k}", str(m), chip, f"{told['cublas']:.1f}"]
        line += [cell(by_width.get(width), marks) for width in widths]
        goal = told["goal"]
        line += [f"{told['plain']:.1f}", "-" if goal is None else f"{goal:.1f}"]
        lines.append(line)
    return joined([markdown(lines), run_of(rows), *beside_humming(rows)])


def summary(rows: list[Row]) -> str:
    """How many goals are met, and the least and the most of times over goals and cuBLAS."""
    (device,) = {row["device"] for row in rows}
    days = sorted({row["started"][:10] for row in rows})
    commits = ", ".join(commit[:10] for commit in marks_of(rows))
    parts = [counts(rows), spans(rows, "goal"), spans(rows, "cublas"), *behind_humming(rows)]
    return joined([*parts, f"{device}, {', '.join(days)}, commits {commits}."])


def goals_by_class(rows: list[Row]) -> str:
    """For each class, cool and hot, its cases that are over their goals, and cuBLAS over the same.

    Signs are left out: their goals are those of any other codebook.
    """
    heads = ["class", "chip", "time / goal", "cuBLAS / goal", "met", "over its goal, by name"]
    lines = [heads, ["---"] * len(heads)]
    order = operator.itemgetter("n", "k", "bits", "m")
    told = [row for row in rows if row["kind"] == "codebook" and row["goal"] is not None]
    told.sort(key=order)
    for (name, (bits, ms)), chip in itertools.product(CLASSES.items(), ("cool", "hot")):
        cases = [r for r in told if r["chip"] == chip and r["bits"] in bits and r["m"] in ms]
        if cases:
            ratios = {order(row): row["pdl"] / row["goal"] for row in cases}
            cublas = least_to_most([row["cublas"] / row["goal"] for row in cases])
            met = f"{sum(ratio <= 1 for ratio in ratios.values())} of {len(ratios)}"
            span = least_to_most(ratios.values())
            lines.append([name, chip, span, cublas, met, over_goals(ratios)])
    return markdown(lines)


# By the word in a document's mark.
TABLES = {"hopper": table, "hopper goals": goals_by_class, "hopper summary": summary}


def joined(parts: list[str]) -> str:
    """Parts of a document, an empty line between them."""
    return "\n".join(f"{part.strip()}\n" for part in parts)


def beside_humming(rows: list[Row]) -> list[str]:
    """What was timed in turns with Humming: our time, without overlap, and Humming's."""
    told = [row for row in rows if "humming" in row]
    if not told:
        return []
    heads = ["n x k", "m", "chip", "width", "cuBLAS", "ours", "no PDL", "Humming", "ours over it"]
    lines = [heads, ["---"] * len(heads)]
    for row in told:
        times = [f"{row[name]:.1f}" for name in ("cublas", "pdl", "plain", "humming")]
        case = [f"{row['n']} x {row['k']}", str(row["m"]), row["chip"], width_name(width_of(row))]
        lines.append([*case, *times, f"{row['pdl'] / row['humming']:.2f}"])
    return [markdown(lines)]


def behind_humming(rows: list[Row]) -> list[str]:
    """How many of the cases that were timed in turns with Humming are slower."""
    told = [row for row in rows if "humming" in row]
    behind = sum(row["pdl"] > row["humming"] for row in told)
    return [f"Of {len(told)} cases {behind} are behind Humming."] if told else []


def width_of(row: Row) -> Width:
    """Bits, and the kind of weight."""
    return row["bits"], row["kind"]


def widths_of(rows: list[Row]) -> list[Width]:
    """Any codebook first."""
    return sorted({width_of(row) for row in rows})


def width_name(width: Width) -> str:
    """For a heading."""
    bits, kind = width
    return f"{bits} bit{'s' * (bits > 1)}" + ", signs" * (kind == "signs")


def spans(rows: list[Row], over: str) -> str:
    """The least and the most of times over goals or cuBLAS, by chip and m, and how many are over.

    Rows without that are left out.
    """
    widths = widths_of(rows)
    name = {"goal": "time over goal", "cublas": "time over cuBLAS"}[over]
    heads = [name, "m", *map(width_name, widths)]
    lines = [heads, ["---"] * len(heads)]
    told = [row for row in rows if row[over] is not None]
    for chip, m in sorted({(row["chip"], row["m"]) for row in told}):
        line = [chip, str(m)]
        for width in widths:
            ratios = [
                row["pdl"] / row[over]
                for row in told
                if (row["chip"], row["m"], width_of(row)) == (chip, m, width)
            ]
            line.append(span(ratios))
        lines.append(line)
    return markdown(lines)


def span(ratios: list[float]) -> str:
    """Of times over others."""
    if not ratios:
        return "-"
    slower = sum(ratio > 1 for ratio in ratios)
    return f"{least_to_most(ratios)} ({slower} of {len(ratios)})"


def marks_of(rows: list[Row]) -> dict[str, str]:
    """A mark for each commit in the order of its last row; the last commit has none."""
    last = {row["commit"]: row["started"] for row in sorted(rows, key=lambda row: row["started"])}
    *older, latest = sorted(last, key=last.__getitem__)
    return dict(zip(older, MARKS[: len(older)], strict=True)) | {latest: ""}


def cell(row: dict[str, Any] | None, marks_by_commit: dict[str, str]) -> str:
    """Microseconds, a star where the case's own goal is met, the mark of an older commit."""
    if row is None:
        return "-"
    is_met = row["goal"] is not None and row["pdl"] <= row["goal"]
    marks = "*" * is_met + marks_by_commit[row["commit"]]
    return f"{row['pdl']:.1f}{marks} ({row['pdl'] / row['cublas']:.2f})"


def counts(rows: list[Row]) -> str:
    """How many goals are met, by chip."""
    lines = []
    for chip in ("cool", "hot"):
        ratios = [r["pdl"] / r["goal"] for r in rows if r["chip"] == chip and r["goal"] is not None]
        lines.append(f"{chip}: {goals_met(ratios)}\n")
    return "\n".join(lines)


def run_of(rows: list[Row]) -> str:
    """Of which runs: the last one's commit, and those of the rows that are marked as older."""
    (device,) = {row["device"] for row in rows}
    *older, (latest, _) = marks_of(rows).items()
    days = sorted({row["started"][:10] for row in rows})
    told = f"{device}, {', '.join(days)}, commit {latest}; microseconds, in brackets over cuBLAS."
    return "\n".join([told, *(f"{mark}: commit {commit}." for commit, mark in older)])


def fill(text: str, rows: list[Row]) -> str:
    """A document with the tables between its marks.

    Raises:
        ValueError: it has none.
    """
    found = [name for name in TABLES if f"<!-- {name} table -->" in text]
    if not found:
        raise ValueError(f"wanted a document with a mark of {' or '.join(TABLES)} table; got none")
    for name in found:
        text = filled(text, name, TABLES[name](rows))
    return text


def tell(rows: list[Row], documents: list[Path]) -> None:
    """Prints both tables, or puts them into documents."""
    if not documents:
        print(summary(rows), table(rows), sep="\n")
    for document in documents:
        document.write_text(fill(document.read_text("utf-8"), rows), "utf-8")


def cases_of(job: str, ms: str) -> Iterator[tuple[int, int, list[int]]]:
    """Bits, index of a shape and numbers of rows of ``BITS:SHAPES[:MS]``."""
    bits, shapes, *own = job.split(":")
    for width in bits.split(","):
        for index in shapes.split(","):
            yield int(width), int(index), [int(m) for m in (own[0] if own else ms).split(",")]


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("time", "table"))
    parser.add_argument("rows", type=Path, help="JSONL: written by time, read by table")
    parser.add_argument("--ms", default="64,128,256,1024,4096")
    parser.add_argument("--bits", default="1,2,3,4,8")
    parser.add_argument("--shapes", default="0,1,2,3,4,5,6,7", help="indices of marlin.SHAPES")
    parser.add_argument("--job", action="append", help="BITS:SHAPES[:MS] instead; several times")
    parser.add_argument("--goals", type=Path)
    parser.add_argument("--humming", action="store_true", help="in turns with Humming too")
    parser.add_argument("--signs", action="store_true", help="codebooks of -c and c; 1 bit only")
    parser.add_argument("--fill", type=Path, nargs="+", help="documents with marks")
    args = parser.parse_args()
    if args.what == "table":
        tell(read_rows(args.rows), args.fill or [])
        return
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("not run: needs a GPU of compute capability 9.x")
        return
    goals = read_goals(args.goals)
    kind = "signs" if args.signs else "codebook"
    jobs = args.job or [f"{1 if args.signs else args.bits}:{args.shapes}"]
    cases = [case for job in jobs for case in cases_of(job, args.ms)]
    if args.signs and any(bits > 1 for bits, *_ in cases):
        parser.error("--signs: wanted jobs of 1 bit")
    rows = (
        row
        for bits, index, ms in cases
        for row in time_shape(*SHAPES[index], bits, ms, goals, kind, with_humming=args.humming)
    )
    write_rows(args.rows, rows, lambda row: f"{row['chip']:4} {line_of(row)}")


if __name__ == "__main__":
    main()
