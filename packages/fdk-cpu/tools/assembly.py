"""Prints the assembly of a kernel for a target, or lists the kernels.

    python packages/fdk-cpu/tools/assembly.py --target arm64
    python packages/fdk-cpu/tools/assembly.py --target arm64 'TwoVectors, 4, 2, false, 1>'

A name is a regular expression for a C++ name. The benchmark executable of the preset
static-<target> is built first. Needs that preset's compiler and its objdump.
"""

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[1]
TARGETS = {"arm64": "aarch64-linux-gnu-", "x86_64": ""}


@dataclass(frozen=True)
class Symbol:
    """A function of an executable."""

    name: str
    start: int
    size: int


def build(target: str) -> Path:
    """Build the benchmark executable of a target and return its path."""
    preset = f"static-{target}"
    folder = SOURCE / "build" / preset
    for command in (
        ["cmake", "-S", SOURCE, "--preset", preset],
        ["cmake", "--build", folder, "--target", "fdk_cpu_bench", "--parallel", "2"],
    ):
        subprocess.run(command, check=True, stdout=sys.stderr)
    return folder / "fdk_cpu_bench"


def functions(executable: Path, target: str) -> list[Symbol]:
    """Return the functions in namespace fdk, named without their arguments."""
    command = [f"{TARGETS[target]}nm", "-S", "-C", "--defined-only", executable]
    found = []
    for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split(
        "\n"
    ):
        match = re.match(r"([0-9a-f]+) ([0-9a-f]+) [tTwW] (?:void )?(.*fdk::.*)\(", line)
        if match:
            found.append(Symbol(match[3].split("(fdk::")[0], int(match[1], 16), int(match[2], 16)))
    return found


def find(symbols: list[Symbol], pattern: str) -> Symbol:
    """Return the symbol that matches a regular expression.

    Raises:
        SystemExit: unless exactly one symbol matches.
    """
    found = [symbol for symbol in symbols if re.search(pattern, symbol.name)]
    if len(found) != 1:
        names = "\n  ".join(symbol.name for symbol in found or symbols)
        raise SystemExit(f"wanted one match of {pattern!r}, got {len(found)}:\n  {names}")
    return found[0]


def instructions(executable: Path, target: str, symbol: Symbol) -> dict[int, str]:
    """Return the text of each instruction of a function by address."""
    span = [f"--start-address={symbol.start}", f"--stop-address={symbol.start + symbol.size}"]
    command = [f"{TARGETS[target]}objdump", "-d", "--no-show-raw-insn", *span, executable]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    matches = re.finditer(r"^\s*([0-9a-f]+):\t(.*)$", output, re.MULTILINE)
    return {int(match[1], 16): match[2].strip() for match in matches}


def main() -> None:
    """Print the assembly of a kernel, or the kernels' names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", nargs="?", help="a regular expression for a C++ name")
    parser.add_argument("--target", choices=TARGETS, default="arm64")
    args = parser.parse_args()
    executable = build(args.target)
    symbols = functions(executable, args.target)
    if args.name is None:
        print(*sorted(f"{symbol.size:7} {symbol.name}" for symbol in symbols), sep="\n")
        return
    symbol = find(symbols, args.name)
    print(f"// {symbol.name}: {symbol.size} bytes")
    for address, text in instructions(executable, args.target, symbol).items():
        print(f"{address:8x}\t{text}")


if __name__ == "__main__":
    main()
