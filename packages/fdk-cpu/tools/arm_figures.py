"""Counts instructions and models cycles of the ARM kernels, without ARM hardware.

    python packages/fdk-cpu/tools/arm_figures.py
    python packages/fdk-cpu/tools/arm_figures.py --bits 4 --kernel sve2 --group 128

Without options it measures all kernels; docs/design/cpu.md has the results.

QEMU runs a gemv one instruction at a time and logs each address. Runs with two lengths of k give
the instructions of one tile; llvm-mca models four tiles from the middle of a run. The result
depends only on the compiler. Needs the compiler of the preset static-arm64, qemu-user, and llvm-mca
for cycles (Debian: apt-get install g++-aarch64-linux-gnu qemu-user llvm-19).
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # when a test imports this file

from assembly import Symbol, build, find, functions, instructions

TILE_CODES = 512  # 4 rows of 128 positions
TILES = 4  # modelled by llvm-mca
CPUS = ("neoverse-v2", "apple-m4", "cortex-a510")
MCA = next((name for name in ("llvm-mca-19", "llvm-mca") if shutil.which(name)), None)


@dataclass(frozen=True)
class Kernel:
    """A gemv without zero points: one row of the table."""

    isa: str
    # A regular expression, with {bits}, {groups} per tile, {runs} (float32) and {runs8} (int8).
    name: str
    options: tuple[str, ...] = ()  # for fdk_cpu_bench
    bits: tuple[int, ...] = tuple(range(1, 9))
    rows: int = 1  # of x in one call
    vectors: int = 128  # bits of an SVE vector

    def pattern(self, bits: int, group: int) -> str:
        """Return the regular expression for some bits and group size."""
        groups = max(1, 128 // group)
        runs, runs8 = max(4, groups), 2 if groups <= 2 else 8
        return self.name.format(bits=bits, groups=groups, runs=runs, runs8=runs8) + "$"


KERNELS = {
    "neon-fp32": Kernel(
        "neon", "gemv_stripes<.*Products<false>, {bits}, {runs}, false, 1>", ("--dtype", "fp32")
    ),
    "neon": Kernel(
        "neon", "gemv_stripes<.*Products<true>, {bits}, {runs}, false, 1>", bits=(1, 2, 3, 4, 5, 6)
    ),
    "neonbf16": Kernel("neonbf16", "gemv_stripes<.*Products, {bits}, {groups}, false, 1>"),
    "neon-int8": Kernel(
        "neon", "int8_gemv_stripes<.*Widened, {bits}, false, {runs8}, 1>", ("--activations", "int8")
    ),
    "neondot-int8": Kernel(
        "neondot",
        "int8_gemv_stripes<.*Fours, {bits}, false, {runs8}, 1>",
        ("--activations", "int8"),
    ),
    "neondot-int8-m4": Kernel(
        "neondot",
        "int8_gemv_stripes<.*Fours, {bits}, false, {runs8}, 4>",
        ("--activations", "int8"),
        rows=4,
    ),
    "neoni8mm-int8-m8": Kernel(
        "neoni8mm",
        "int8_gemv_pair_stripes<{bits}, false, {runs8}, 4>",
        ("--activations", "int8"),
        rows=8,
    ),
    "sve-int8": Kernel(
        "sve", "gemv_stripes<{bits}>", ("--activations", "int8"), (1, 2, 4), vectors=256
    ),
    "sve2": Kernel(
        "sve2", "gemv_stripes<.*TwoVectors, {bits}, {groups}, false, 1>", bits=(1, 2, 4)
    ),
}


@dataclass(frozen=True)
class Run:
    """The executed instructions of one call in order, and how many a tile takes."""

    executed: list[str]
    tile: int

    @property
    def per_code(self) -> float:
        """Executed instructions per code."""
        return self.tile / TILE_CODES

    @property
    def middle(self) -> list[str]:
        """The instructions of TILES tiles in the middle of the call."""
        count = TILES * self.tile
        start = (len(self.executed) - count) // 2
        return self.executed[start : start + count]


def trace(executable: Path, kernel: Kernel, bits: int, group: int) -> Run:
    """Run a kernel over 8 and over 16 tiles."""
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
    """Return the addresses of a function's executed instructions, in order."""
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
    """Return the addresses of the last call."""
    starts = [i for i, address in enumerate(executed) if address == symbol.start]
    return executed[starts[-1] :]


def cycles_per_tile(run: Run, cpu: str) -> float | None:
    """Return llvm-mca's cycles per tile, or None if its model lacks an instruction."""
    assert MCA is not None
    lines = [line for text in run.middle if (line := for_assembler(text))]
    command = [MCA, "-mtriple=aarch64-linux-gnu", f"-mcpu={cpu}", "-mattr=+all", "-"]
    done = subprocess.run(
        [*command, "--iterations=20"], input="\n".join(lines), capture_output=True, text=True
    )
    total = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    return int(total[1]) / 20 / TILES if total else None


def for_assembler(text: str) -> str | None:
    """Return an instruction in assembler syntax, branching to a label; None for calls."""
    text = re.sub(r"\s*(//|<).*", "", text)
    if re.match(r"(bl|blr|br|ret)\b", text):
        return None
    return re.sub(r"^((?:b\S*|cbn?z|tbn?z|adrp?)\t.*?)[0-9a-f]{5,}$", r"\1label", text)


def main() -> None:
    """Print instructions per code, and codes times rows of x per cycle, for each core."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bits", type=int, nargs="+", default=list(range(1, 9)))
    parser.add_argument("--kernel", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--cpu", nargs="+", default=list(CPUS), help="llvm-mca core")
    args = parser.parse_args()
    executable = build("arm64")
    cpus = args.cpu if MCA else []
    if not MCA:
        print("no llvm-mca on PATH: instructions only", file=sys.stderr)
    print("|", " | ".join(["bits", "kernel", "instructions per code", *cpus]), "|")
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
