"""Instructions and modelled cycles of the ARM kernels: figures that need no ARM hardware.

    python packages/fdk-cpu/tools/arm_figures.py
    python packages/fdk-cpu/tools/arm_figures.py --bits 4 --kernel sve2 --group 128

Without options, all of them; docs/kernels/arm.md has a command for each of its tables.

qemu runs the gemv one instruction at a time and writes each address down. Two lengths of k
give the instructions of a tile without those around it; four tiles from the middle of a run, in the
order in which they were executed, are what llvm-mca models. Both are the same on every machine with
the same compiler. Needs the compiler of the preset static-arm64, qemu-user, and llvm-mca for cycles
(Debian: apt-get install g++-aarch64-linux-gnu qemu-user llvm-19).
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # where it is imported rather than run

from assembly import Symbol, build, find, functions, instructions

TILE_CODES = 512  # 4 rows of 128 positions
TILES = 4  # that llvm-mca is given
CPUS = ("neoverse-v2", "apple-m4", "cortex-a510")  # of the whole table, m = 1
MCA = next((name for name in ("llvm-mca-19", "llvm-mca") if shutil.which(name)), None)


@dataclass(frozen=True)
class Kernel:
    """What a row of the table is about: a gemv without zero points."""

    isa: str
    # A regular expression, with {bits}, {groups} of a tile, {runs} of float32 and {runs8} of int8.
    name: str
    options: tuple[str, ...] = ()  # of the benchmark executable
    bits: tuple[int, ...] = tuple(range(1, 9))
    rows: int = 1  # of x, that a call takes
    vectors: int = 128  # bits of those of SVE

    def pattern(self, bits: int, group: int) -> str:
        """The regular expression for some bits and size of a group."""
        groups = max(1, 128 // group)
        runs, runs8 = max(4, groups), 2 if groups <= 2 else 8
        return self.name.format(bits=bits, groups=groups, runs=runs, runs8=runs8) + "$"


KERNELS = {
    "neon-fp32": Kernel(
        "neon", "neon_stripes<.*Products<false>, {bits}, {runs}, false, 1>", ("--dtype", "fp32")
    ),
    "neon": Kernel(
        "neon", "neon_stripes<.*Products<true>, {bits}, {runs}, false, 1>", bits=(1, 2, 3, 4, 5, 6)
    ),
    "neonbf16": Kernel("neonbf16", "neon_stripes<.*Products, {bits}, {groups}, false, 1>"),
    "neon-int8": Kernel(
        "neon", "int8_stripes<.*Widened, {bits}, false, {runs8}, 1>", ("--activations", "int8")
    ),
    "neondot-int8": Kernel(
        "neondot", "int8_stripes<.*Fours, {bits}, false, {runs8}, 1>", ("--activations", "int8")
    ),
    "neondot-int8-m4": Kernel(
        "neondot",
        "int8_stripes<.*Fours, {bits}, false, {runs8}, 4>",
        ("--activations", "int8"),
        rows=4,
    ),
    "neoni8mm-int8-m8": Kernel(
        "neoni8mm", "pair_stripes<{bits}, false, {runs8}, 4>", ("--activations", "int8"), rows=8
    ),
    "sve-int8": Kernel(
        "sve", "sve_stripes<{bits}>", ("--activations", "int8"), (1, 2, 4), vectors=256
    ),
    "sve2": Kernel("sve2", "sve_stripes<.*TwoVectors, {bits}, {groups}, false, 1>", bits=(1, 2, 4)),
}


@dataclass(frozen=True)
class Run:
    """The instructions of one call, in the order of their execution, and of one of its tiles."""

    executed: list[str]
    tile: int

    @property
    def per_code(self) -> float:
        """Executed instructions a code."""
        return self.tile / TILE_CODES

    @property
    def middle(self) -> list[str]:
        """Those of some tiles, away from where the call begins and ends."""
        count = TILES * self.tile
        start = (len(self.executed) - count) // 2
        return self.executed[start : start + count]


def trace(executable: Path, kernel: Kernel, bits: int, group: int) -> Run:
    """Runs a kernel over 8 and 16 tiles."""
    symbol = find(functions(executable, "arm64"), kernel.pattern(bits, group))
    text = instructions(executable, "arm64", symbol)
    short, long = (
        last_call(addresses(executable, kernel, bits, group, tiles, symbol), symbol)
        for tiles in (8, 16)
    )
    assert (len(long) - len(short)) % 8 == 0, "each tile takes the same instructions"
    return Run([text[address] for address in long], (len(long) - len(short)) // 8)


def addresses(
    executable: Path, kernel: Kernel, bits: int, group: int, tiles: int, symbol: Symbol
) -> list[int]:
    """Of the instructions of a function that were executed, in order."""
    options = {"--sizes": f"4x{128 * tiles}", "--bits": bits, "--group": group}
    options |= {"--isa": kernel.isa, "--m": kernel.rows, "--seconds": 0, "--rotate-mb": 1}
    arguments = [*(str(item) for pair in options.items() for item in pair), *kernel.options]
    usage = subprocess.run(["qemu-aarch64", "--help"], capture_output=True, text=True).stdout
    single = "-one-insn-per-tb" if "one-insn-per-tb" in usage else "-singlestep"
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        where = ["-dfilter", f"{symbol.start:#x}+{symbol.size:#x}", "-D", str(log)]
        core = f"max,sve-max-vq={kernel.vectors // 128}"
        qemu = ["qemu-aarch64", "-cpu", core, single, "-d", "exec,nochain", *where]
        subprocess.run([*qemu, executable, *arguments], check=True, capture_output=True)
        lines = log.read_text().splitlines()
    return [int(line.split("/")[1], 16) for line in lines if line.startswith("Trace")]


def last_call(executed: list[int], symbol: Symbol) -> list[int]:
    """From the last time that a function was entered."""
    starts = [i for i, address in enumerate(executed) if address == symbol.start]
    return executed[starts[-1] :]


def cycles_per_tile(run: Run, cpu: str) -> float | None:
    """What llvm-mca's model of a core takes for a tile; None where it lacks an instruction."""
    assert MCA is not None
    lines = [line for text in run.middle if (line := for_assembler(text))]
    command = [MCA, "-mtriple=aarch64-linux-gnu", f"-mcpu={cpu}", "-mattr=+all", "-"]
    done = subprocess.run(
        [*command, "--iterations=20"], input="\n".join(lines), capture_output=True, text=True
    )
    total = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    return int(total[1]) / 20 / TILES if total else None


def for_assembler(text: str) -> str | None:
    """An instruction as an assembler takes it: targets of branches become a label; no calls."""
    text = re.sub(r"\s*(//|<).*", "", text)
    if re.match(r"(bl|blr|br|ret)\b", text):
        return None
    return re.sub(r"^((?:b\S*|cbn?z|tbn?z|adrp?)\t.*?)[0-9a-f]{5,}$", r"\1label", text)


def main() -> None:
    """Prints a table: instructions a code, and codes by rows of x a cycle on each core."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bits", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--kernel", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--cpu", nargs="+", default=list(CPUS), help="of llvm-mca")
    args = parser.parse_args()
    executable = build("arm64")
    cpus = args.cpu if MCA else []
    if not MCA:
        print("no llvm-mca on PATH: instructions only", file=sys.stderr)
    print("|", " | ".join(["bits", "kernel", "instructions / code", *cpus]), "|")
    print("|" + "---|" * (3 + len(cpus)))
    for bits in args.bits:
        for name in args.kernel:
            if bits not in KERNELS[name].bits:
                continue
            run = trace(executable, KERNELS[name], bits, args.group)
            cycles = [cycles_per_tile(run, cpu) for cpu in cpus]
            products = TILE_CODES * KERNELS[name].rows
            rates = [f"{products / c:.2f}" if c else "-" for c in cycles]
            print(
                "|", " | ".join([str(bits), name, f"{run.per_code:.3f}", *rates]), "|", flush=True
            )


if __name__ == "__main__":
    main()
