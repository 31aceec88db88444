"""Profiles of one kernel: Nsight Compute on a GPU, the machine code on a CPU."""

import csv
import io
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fdk_bench.cases import KernelCase

# Metrics in percent of what the machine can do, with the part of it that each measures.
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
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps active, % of the limit",
}
# Below this share of every pipe a kernel waits: latency, or too little work.
BUSY = 60.0
# Instruction sets whose files hold the kernels of another, as fdk-cpu chooses them; a set that is
# not listed has its own files.
OF_BF16 = {
    "amx": ("amx", "avx512bf16", "avx512vnni"),
    "avx512bf16": ("avx512bf16", "avx512vnni"),
    "neondot": ("neon",),
    "neoni8mm": ("neonbf16",),
    "sve": ("sve", "neonbf16"),
    "sve2": ("sve2", "neonbf16"),
}
OF_FLOATS = {
    "amx": ("avx512",),
    "avx512bf16": ("avx512",),
    **dict.fromkeys(("neondot", "neonbf16", "neoni8mm", "sve", "sve2"), ("neon",)),
}
OF_INT8 = {
    **dict.fromkeys(("amx", "avx512bf16"), ("avx512vnni",)),
    "avx512": ("avx2",),
    "neonbf16": ("neondot",),
    "neoni8mm": ("neoni8mm", "neondot"),
    **dict.fromkeys(("sve", "sve2"), ("sve", "neoni8mm", "neondot")),
}
# Functions that are not templates over bits.
PRODUCTS = {"amx": r"\bgemm_panel_tiles\b"}
INSTRUCTION = re.compile(
    r"^\s*[0-9a-f]+:\s+(?:\{[^}]*\}\s+)?(?P<mnemonic>[a-z][\w.]*)(?P<rest>.*)$"
)
FUNCTION = re.compile(r"^(?P<address>[0-9a-f]+) <(?P<name>.*)>:$")
SYMBOL = re.compile(r"^(?P<address>[0-9a-f]+) l.{5}(?P<kind>[fF]) \S+\s+[0-9a-f]+\s+(?P<name>.*)$")
STACK = re.compile(r"\(%rsp|\[sp[,\]]")


@dataclass(frozen=True)
class KernelProfile:
    """A profiled kernel: its name, and each metric with its unit."""

    name: str
    metrics: dict[str, tuple[float, str]]

    @property
    def shares(self) -> dict[str, float]:
        """Percent of what each part of the machine can do, busiest first."""
        found = {
            label: self.metrics[metric][0]
            for metric, label in PIPES.items()
            if metric in self.metrics
        }
        return dict(sorted(found.items(), key=lambda entry: -entry[1]))

    @property
    def verdict(self) -> str:
        """The bottleneck of the kernel, as text."""
        if not self.shares:
            return "no metric was read"
        label, share = next(iter(self.shares.items()))
        if share < BUSY:
            return f"latency: nothing is busy, the busiest is {label} at {share:.0f} %"
        return f"{label}, at {share:.0f} %"


@dataclass(frozen=True)
class Disassembly:
    """A function of machine code, and its source file where that is known."""

    name: str
    lines: Sequence[str]
    source: str = ""

    @property
    def mnemonics(self) -> Counter[str]:
        """Number of each instruction."""
        found = (INSTRUCTION.match(line) for line in self.lines)
        return Counter(match["mnemonic"] for match in found if match)

    @property
    def on_stack(self) -> int:
        """Number of instructions that use the stack; in a loop those are spilled registers."""
        return sum(1 for line in self.lines if STACK.search(line))


def ncu_command(ncu: str, inner: Sequence[str], report: Path | None = None) -> list[str]:
    """Return a command that runs ``inner`` under Nsight Compute, between profiler marks.

    With a ``report`` it collects every section into that file, and prints no table.
    """
    metrics = ",".join([*PIPES, *OTHERS])
    options = ["--profile-from-start", "off", "--metrics", metrics, "--target-processes", "all"]
    if report is None:
        return [ncu, "--csv", "--page", "raw", *options, *inner]
    return [ncu, "--export", str(report), "--force-overwrite", "--set", "full", *options, *inner]


def ncu_import(ncu: str, report: Path) -> list[str]:
    """Return a command that prints the table of a report."""
    return [ncu, "--import", str(report), "--csv", "--page", "raw"]


def parse_ncu(text: str) -> list[KernelProfile]:
    """Parse ``ncu --csv --page raw``: a line of names, one of units, one per kernel.

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
    """Return the functions of a library or program whose names ``pattern`` matches.

    Raises:
        ValueError: where objdump fails.
    """
    run = partial(subprocess.run, capture_output=True, text=True, check=False)
    done = run([objdump, "--disassemble", "--demangle", "--no-show-raw-insn", str(library)])
    if done.returncode:
        # objdump prints nothing for an empty file.
        wanted = f"wanted a program or library, got {library} of {library.stat().st_size} bytes"
        raise ValueError(f"{objdump} failed: {done.stderr.strip() or wanted}")
    symbols = run([objdump, "--syms", str(library)])
    return functions_of(done.stdout, pattern, sources_of(symbols.stdout))


def sources_of(symbols: str) -> dict[int, str]:
    """Return the source file of each local function by address, from ``objdump --syms``."""
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
    """Return the functions of objdump's listing whose names ``pattern`` matches, ignoring case."""
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


def kernel_files(case: KernelCase, isa: str) -> tuple[str, ...]:
    """Return the instruction sets whose files hold a case's kernels where ``isa`` is in use."""
    of_floats = OF_BF16 if case.dtype == "bf16" else OF_FLOATS
    return (OF_INT8 if case.activations == "int8" else of_floats).get(isa, (isa,))


def symbol_pattern(case: KernelCase, used: Sequence[str]) -> str:
    """Return a pattern for the functions of a case's bits and activations."""
    # Templates over bits; those without an instruction set before them are built for one only.
    isa = "|".join(used) or r"\w+"
    symbol = rf"<(?:[^<>]*\b(?:{isa}), )?{case.bits}[,>]"
    # Kernels for 8-bit x take a task of another type.
    if case.activations == "int8":
        return symbol + r".*\bInt8Task\b"
    symbol += r"(?!.*\bInt8Task\b)"
    return "|".join([symbol, *(PRODUCTS[isa] for isa in used if isa in PRODUCTS)])
