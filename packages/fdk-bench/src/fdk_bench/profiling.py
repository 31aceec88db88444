"""What bounds a kernel: Nsight Compute on a GPU, the machine code on a CPU."""

import csv
import io
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fdk_bench.cases import DTYPES, KernelCase
from fdk_bench.peers import PEERS
from fdk_formats import Format, all_backends

# Shares of what the machine can do, in percent, by what each stands for.
PIPES = {
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "device memory",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2",
    "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed": "shared memory and L1",
    "sm__issue_active.avg.pct_of_peak_sustained_elapsed": "issue slots",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "tensor cores",
    "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_elapsed": "integer and logic",
    "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_elapsed": "fp32 arithmetic",
}
OTHERS = {
    "gpu__time_duration.sum": "time",
    "dram__bytes_read.sum": "read from memory",
    "launch__registers_per_thread": "registers per thread",
    "launch__grid_size": "blocks",
    "launch__block_size": "threads per block",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps active, % of the most",
}
# Below this share of every pipe it is waiting that takes the time: latency, or too little work.
BUSY = 60.0
# Backends that a case may name, those of packages that are not installed here too.
BACKENDS = ("auto", "reference", "cpu", "triton", "marlin", "marlin-lut")
INSTRUCTION = re.compile(
    r"^\s*[0-9a-f]+:\s+(?:\{[^}]*\}\s+)?(?P<mnemonic>[a-z][\w.]*)(?P<rest>.*)$"
)
FUNCTION = re.compile(r"^(?P<address>[0-9a-f]+) <(?P<name>.*)>:$")
SYMBOL = re.compile(r"^(?P<address>[0-9a-f]+) l.{5}(?P<kind>[fF]) \S+\s+[0-9a-f]+\s+(?P<name>.*)$")
STACK = re.compile(r"\(%rsp|\[sp[,\]]")


@dataclass(frozen=True)
class KernelProfile:
    """One kernel that ran: its name, and each metric with its unit."""

    name: str
    metrics: dict[str, tuple[float, str]]

    @property
    def shares(self) -> dict[str, float]:
        """Percent of what each part of the machine can do, the busiest first."""
        found = {
            label: self.metrics[metric][0]
            for metric, label in PIPES.items()
            if metric in self.metrics
        }
        return dict(sorted(found.items(), key=lambda entry: -entry[1]))

    @property
    def verdict(self) -> str:
        """What bounds it, in words."""
        if not self.shares:
            return "no metric was read"
        label, share = next(iter(self.shares.items()))
        if share < BUSY:
            return f"latency: nothing is busy, the most is {label} at {share:.0f} %"
        return f"{label}, at {share:.0f} %"


@dataclass(frozen=True)
class Disassembly:
    """A function of machine code, and the file that it was compiled from, where that is known."""

    name: str
    lines: Sequence[str]
    source: str = ""

    @property
    def mnemonics(self) -> Counter[str]:
        """How often each instruction stands in it."""
        found = (INSTRUCTION.match(line) for line in self.lines)
        return Counter(match["mnemonic"] for match in found if match)

    @property
    def on_stack(self) -> int:
        """Instructions that use the stack; in a loop those are spilled registers."""
        return sum(1 for line in self.lines if STACK.search(line))


def parse_case(text: str) -> KernelCase:
    """A case from its text, ``m1-n4096-k4096-custom4-g64-bf16-cuda-auto``.

    Raises:
        ValueError: for text that is none, and for a case that there cannot be.
    """
    pattern = (
        rf"m(\d+)-n(\d+)-k(\d+)-(.+)-({'|'.join(DTYPES)})(?:-(int8))?-(cpu|cuda)(?:-([\w.-]+))?"
    )
    match = re.fullmatch(pattern, text)
    if match is None:
        raise ValueError(
            f"wanted a case such as m1-n4096-k4096-custom4-g64-bf16-cuda-auto, got {text!r}"
        )
    m, n, k, format, dtype, activations, device, backend = match.groups()
    if format not in DTYPES:
        format = str(Format.parse(format))
    default = "torch" if format in DTYPES else "auto"
    shape = (int(m), int(n), int(k))
    if min(shape) < 1:
        raise ValueError(f"wanted m, n and k of at least 1, got m={m}, n={n}, k={k}")
    known = [default, *BACKENDS, *all_backends(), *(peer.name for peer in PEERS)]
    if backend and backend not in known:
        wanted = ", ".join(dict.fromkeys(known))
        raise ValueError(f"wanted a backend or peer of {wanted}; got {backend!r}")
    case = KernelCase(*shape, format, dtype, device, backend or default, activations or "float")
    if case.quantised is not None:
        case.quantised.group_size_for(case.k)  # raises where no group divides k
    return case


def ncu_command(ncu: str, inner: Sequence[str], report: Path | None = None) -> list[str]:
    """Runs ``inner`` under Nsight Compute, which looks at what lies between profiler marks.

    With a ``report`` it collects every section into that file, and prints no table.
    """
    metrics = ",".join([*PIPES, *OTHERS])
    options = ["--profile-from-start", "off", "--metrics", metrics, "--target-processes", "all"]
    if report is None:
        return [ncu, "--csv", "--page", "raw", *options, *inner]
    return [ncu, "--export", str(report), "--force-overwrite", "--set", "full", *options, *inner]


def ncu_import(ncu: str, report: Path) -> list[str]:
    """Prints the table of a report."""
    return [ncu, "--import", str(report), "--csv", "--page", "raw"]


def parse_ncu(text: str) -> list[KernelProfile]:
    """The kernels of ``ncu --csv --page raw``: a line of names, one of units, one per kernel.

    Raises:
        ValueError: where there is no such table.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError(f"ncu gave no table of kernels:\n{text.strip()[-2000:]}")
    names, units, *rows = csv.reader(io.StringIO("\n".join(lines[start:])))
    profiles = []
    for row in rows:
        if len(row) != len(names):
            continue
        entries = zip(names, units, row, strict=True)
        metrics = {
            name: (float(value.replace(",", "")), unit)
            for name, unit, value in entries
            if name in PIPES | OTHERS and re.fullmatch(r"[\d.,]+(e[+-]?\d+)?", value)
        }
        profiles.append(KernelProfile(row[names.index("Kernel Name")], metrics))
    return profiles


def disassemble(objdump: str, library: Path, pattern: str) -> list[Disassembly]:
    """The functions of a library or program whose names ``pattern`` matches.

    Raises:
        ValueError: where objdump fails.
    """
    run = partial(subprocess.run, capture_output=True, text=True, check=False)
    done = run([objdump, "--disassemble", "--demangle", "--no-show-raw-insn", str(library)])
    if done.returncode:
        # Of an empty file objdump says nothing.
        told = f"wanted a program or library, got {library} of {library.stat().st_size} bytes"
        raise ValueError(f"{objdump} failed: {done.stderr.strip() or told}")
    symbols = run([objdump, "--syms", str(library)])
    return functions_of(done.stdout, pattern, sources_of(symbols.stdout))


def sources_of(symbols: str) -> dict[int, str]:
    """The source file of each local function by address: ``objdump --syms`` names a file first."""
    found, source = {}, ""
    for line in symbols.splitlines():
        if match := SYMBOL.match(line):
            if match["kind"] == "f":
                source = match["name"]
            else:
                found[int(match["address"], 16)] = source
    return found


def functions_of(
    listing: str, pattern: str, sources: Mapping[int, str] | None = None
) -> list[Disassembly]:
    """The functions of a listing of objdump whose names ``pattern`` matches, case ignored."""
    wanted = re.compile(pattern, re.IGNORECASE)
    found: list[Disassembly] = []
    name, lines, source = "", list[str](), ""
    for line in [*listing.splitlines(), "0 <>:"]:
        if match := FUNCTION.match(line):
            if name and wanted.search(name):
                found.append(Disassembly(name, lines, source))
            name, lines = match["name"], []
            source = (sources or {}).get(int(match["address"], 16), "")
        elif line.strip():
            lines.append(line)
    return found
